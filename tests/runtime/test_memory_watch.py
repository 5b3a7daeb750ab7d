"""The watch: lifetimes that are known, counts of others, and other modes around and inside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_in_torch_dispatch_mode,
)

from lightning_cyclic.runtime.memory_blocks import Timeline
from lightning_cyclic.runtime.memory_watch import MemoryWatch
from lightning_cyclic.runtime.state_homes import FileHome, HostHome
from lightning_cyclic.runtime.state_layout import lay_state
from tests.modules.huggingface import texts
from tests.modules.plain import Block, images

CPU = torch.device("cpu")


class Conv(nn.Module):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(Block(3, 8, 1), Block(8, 16, 2), nn.AdaptiveAvgPool2d(1))
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.net(x).flatten(1))


def watched(
    run: Any,
    module: nn.Module | None = None,
    batch: Any = (),
    optimizers: Any = (),
    steps: int = 1,
) -> Timeline:
    watch = MemoryWatch(CPU)
    for t in range(steps):
        watch.begin(t, module or nn.Module(), optimizers, batch)
        run()
        watch.end()
    return watch.timeline


def test_known_lifetimes() -> None:
    x = torch.ones(1000)

    def run() -> None:
        a = x * 2  # event 1
        b = a[10:] + 1  # 2, 3: a view is no block of its own
        del a
        b += 1  # 4
        c = b.sum()  # 5
        del b
        torch.empty(10)  # 6
        torch.zeros(3)  # 7
        del c

    timeline = watched(run)
    rows = [(b.num_bytes, b.is_found, b.made, b.ended, b.kind) for b in timeline.blocks]
    assert rows == [
        (4000, True, 0, None, "other"),
        (4000, False, 1, 4, "temporaries"),
        (3960, False, 3, 6, "temporaries"),
        (4, False, 5, 8, "temporaries"),
        (40, False, 6, 7, "temporaries"),
        (12, False, 7, 8, "temporaries"),
    ]
    assert [a.event for a in timeline.blocks[2].accesses] == [3, 4, 5, 6]
    (span,) = timeline.spans
    totals = list(map(sum, zip(*timeline.bytes_at(span).values(), strict=True)))
    assert totals == [4000, 8000, 8000, 11960, 7960, 7964, 4044, 4016]


def test_kinds() -> None:
    module, batch = nn.Linear(10, 20), torch.ones(5, 10)
    module.register_buffer("mean", torch.zeros(20))
    optimizer = torch.optim.Adam(module.parameters())

    def run() -> None:
        optimizer.zero_grad()
        hidden = torch.tanh(module(batch) - module.mean)
        (hidden * hidden).sum().backward()
        optimizer.step()

    timeline = watched(run, module, batch, [optimizer], steps=2)
    most = timeline.most(timeline.spans[-1])
    weights = 4 * (10 * 20 + 20)
    assert most["parameters"] == most["gradients"] == weights
    assert most["optimizer"] == 2 * weights + 2 * 4  # two counts of steps
    assert (most["inputs"], most["buffers"], most["other"]) == (200, 80, 0)
    # tanh, while the difference is gone; and the gradient 1 with which a backward begins
    assert most["activations"] == 4 * 5 * 20 + 4


def test_what_a_checkpoint_makes_again_is_an_activation() -> None:
    module, batch = nn.Linear(10, 20), torch.ones(5, 10)

    def run() -> None:
        def part(x: Tensor) -> Tensor:
            return torch.tanh(module(x))

        torch.utils.checkpoint.checkpoint(part, batch, use_reentrant=False).sum().backward()

    timeline = watched(run, module, batch)
    made = [x.made for x in timeline.blocks if x.kind == "activations" and x.num_bytes == 400]
    before = [x.made for x in timeline.blocks if x.num_bytes == 400 and x.kind == "temporaries"]
    assert len(made) == 1
    assert min(before) < made[0]  # the same, when it was made first


# ---------------------------------------------------------------------- other counts


def conv() -> tuple[nn.Module, Any, Any]:
    module, (x, y) = Conv(), images(0, 8)
    return module, lambda: F.cross_entropy(module(x), y), (x, y)


def gpt() -> tuple[nn.Module, Any, Any]:
    from tests.modules.cases import CASES

    module = CASES["gpt2"].make(0.0).model
    batch = texts(0, 4)
    return module, lambda: module(**batch).loss, batch


class After(TorchDispatchMode):
    """Calls a function behind each function of torch."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self.then = then

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.then()
        return result


@pytest.mark.parametrize("make", [conv, gpt])
def test_bytes_at_each_event_are_those_of_torchs_own_tracker(make: Any) -> None:
    module, loss, batch = make()
    optimizer = torch.optim.AdamW(module.parameters())
    tracker, watch, totals = MemTracker(), MemoryWatch(CPU), list[int]()

    def note() -> None:
        totals.append(tracker.get_tracker_snapshot("current")[CPU]["Total"])

    tracker.track_external(module, optimizer, *torch.utils._pytree.tree_leaves(batch))
    with tracker:
        for t in range(2):
            watch.begin(t, module, [optimizer], batch)
            tracker.reset_mod_stats()
            totals.clear()
            with After(note):
                loss().backward()
                optimizer.step()
                optimizer.zero_grad()
            watch.end()
    timeline = watch.timeline
    each = timeline.bytes_at(timeline.spans[-1])
    assert len(totals) > 100
    assert list(map(sum, zip(*each.values(), strict=True)))[1:] == totals


@pytest.mark.parametrize("make", [conv, gpt])
def test_activations_are_what_autograd_keeps(make: Any) -> None:
    module, loss, batch = make()
    held = {x.untyped_storage()._cdata for x in (*module.parameters(), *module.buffers())}
    held |= {x.untyped_storage()._cdata for x in torch.utils._pytree.tree_leaves(batch)}
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in held:
            sizes[storage._cdata] = storage.nbytes()
        return x

    def run() -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            found = loss()
        found.backward()

    timeline = watched(run, module, batch)
    mine = Counter(x.num_bytes for x in timeline.blocks if x.kind == "activations")
    assert mine == Counter([*sizes.values(), 4])  # the gradient 1 with which it begins


def test_state_in_a_file_is_no_memory(tmp_path: Path) -> None:
    module = nn.Linear(10, 20, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    (chunk,) = lay_state(optimizer, [list(module.parameters())]).stages[0]
    homes = FileHome(tmp_path, 4096), HostHome(4096, is_pinned=False)
    most = []
    for home in homes:
        optimizer.state[module.weight] = {"momentum_buffer": home.views(0, chunk)[0]}
        timeline = watched(lambda: torch.ones(3), module, None, [optimizer])
        most.append(timeline.most(timeline.spans[-1])["optimizer"])
    assert most[0] == 0
    assert most[1] >= 4 * 10 * 20


# ---------------------------------------------------------------------- other modes


class Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    assert _get_current_dispatch_mode_stack() == []
    assert not is_in_torch_dispatch_mode()


def test_modes_that_stay_on_longer() -> None:
    watch, outer, inner = MemoryWatch(CPU), Counts(), Counts()
    outer.__enter__()
    watch.begin(0, nn.Module(), [], ())
    inner.__enter__()
    torch.ones(3)
    watch.end()
    assert _get_current_dispatch_mode_stack() == [outer, inner]
    torch.ones(4)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    assert (outer.number, inner.number) == (2, 2)
    assert [x.num_bytes for x in watch.timeline.blocks] == [12]


def test_nothing_is_followed_when_it_is_closed() -> None:
    watch = MemoryWatch(CPU)
    watch.begin(0, nn.Module(), [], ())
    x = torch.ones(3)
    storage = x.untyped_storage()
    watch.close()
    assert not watch.is_watching
    (block,) = watch.timeline.blocks
    del x, storage
    assert block.ended is None
