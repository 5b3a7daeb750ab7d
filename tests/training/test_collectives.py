"""Collectives in the user's code: made where all ranks meet, refused by name elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import all_reduce  # by a name of the user's own

from lightning_cyclic.runtime.torch_functions import Line
from tests.conformance.modules import SIZE, Plain, vectors
from tests.harness.rows import more
from tests.harness.runs import Result, run
from tests.modules.classifier import one_each

pytestmark = pytest.mark.multi
Call = Callable[[Tensor], object]


def own_name(x: Tensor) -> object:
    return all_reduce(x)


def gather(x: Tensor) -> object:
    return dist.all_gather([torch.empty_like(x) for _ in range(2)], x)


def send(x: Tensor) -> object:
    return dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)


def functionally(x: Tensor) -> object:
    return functional.all_reduce(x, "sum", dist.group.WORLD).sum()


def meet(x: Tensor) -> object:
    return dist.barrier()


def found(x: Tensor) -> object:
    return dist.new_group([0, 1])


class Back(torch.autograd.Function):
    """Calls in the backward what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.call(grad.clone())
        return grad, None


class Calling(Plain):
    """Calls a collective in its step, or in its backward, and others between steps."""

    def __init__(self, call: Call, *, in_backward: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.call, self.in_backward, self.sums = call, in_backward, []
        self.norm = nn.BatchNorm1d(SIZE) if norm else nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.norm(self.net[:3](batch[0]))
        if self.in_backward:
            x = Back.apply(x, self.call)
        else:
            total = x.detach().sum(0)
            self.call(total)
            self.sums.append(total.tolist())
        return nn.functional.cross_entropy(self.net[3:](x), batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        x = torch.ones(())
        dist.all_reduce(x)
        assert x == 2

    def on_train_epoch_end(self) -> None:
        dist.barrier(dist.new_group([0, 1]))


def sums(trainer: Any, module: Calling) -> Any:
    return module.sums


def train(preset: str, call: Call, flags: dict[str, Any], look: Any = sums) -> list[Result]:
    strategy = {"preset": preset, "stages": ["net.2"]} if preset != "ddp" else preset
    make, data = partial(Calling, call, **flags), partial(one_each, vectors, 3)
    return run(make, strategy, data=data, look=look)


@pytest.mark.parametrize(
    ("call", "flags"),
    [
        (own_name, {}),
        (functionally, {}),
        (send, {}),
        more(meet, {}),
        (gather, {"in_backward": True}),
    ],
)
def test_ranks_that_run_steps_together_meet_in_them(call: Call, flags: dict[str, Any]) -> None:
    ours, theirs = (train(preset, call, flags) for preset in ("lockstep_dp", "ddp"))
    for one, other in zip(ours, theirs, strict=True):
        assert one.text == other.text == ""
        assert one.found == other.found  # what they had in their steps


@pytest.mark.parametrize(
    ("preset", "call", "flags", "name"),
    [
        ("cyclic_dp", own_name, {}, "all_reduce"),
        ("cyclic_dp", functionally, {}, "all_reduce"),
        ("cyclic_dp", meet, {"in_backward": True}, "barrier"),
        ("cyclic_zero", gather, {}, "all_gather"),
        ("1f1b", found, {}, "new_group"),
        ("cyclic_pipeline", send, {}, "i(send|recv)"),
        ("lockstep_dp", own_name, {"norm": True}, "all_reduce"),  # buffers go from rank to rank
    ],
)
def test_elsewhere_they_are_refused_at_once(
    preset: str, call: Call, flags: dict[str, Any], name: str
) -> None:
    ends = train(preset, call, flags)
    said = [end.text for end in ends if end.error == "StepError"]
    for text in said:
        assert torch.distributed.__name__ in text
        file = Line(__file__, call.__code__.co_firstlineno + 1).short
        assert "waits for all workers" in text
        assert file in text, text
        assert "allowed: in validation, in on_train_batch_end" in text
    assert said, ends
    assert all(end.error for end in ends)


def asked_first() -> tuple[object, object]:
    """Return functions that others stand for during a fit."""
    torchs = dist.distributed_c10d
    return torchs._rank_not_in_group, torchs._new_group_with_tag


AT_FIRST = asked_first()


def is_as_at_first(trainer: Any, module: Any) -> bool:
    return asked_first() == AT_FIRST


def test_torch_has_its_own_again() -> None:
    for rank in train("cyclic_dp", abs, {}, is_as_at_first):
        assert rank.found
