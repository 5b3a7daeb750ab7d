"""Collectives in the user's code: made where all ranks meet, refused by name elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import all_reduce  # by a name of the user's own
from torch.utils.data import DataLoader

from tests.conformance.harness import Batches
from tests.conformance.modules import SIZE, Plain, vectors
from tests.harness import processes
from tests.harness.trainers import make_trainer

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


def fit(preset: str, call: Call, flags: dict[str, Any]) -> tuple[str, Any]:
    module, r = Calling(call, **flags), processes.here().rank
    stages = {"stages": ["net.2"]} if preset != "ddp" else {}
    data = DataLoader(Batches(vectors, [[2 * t + r] for t in range(3)]), batch_size=None)
    strategy = {"preset": preset, **stages} if preset != "ddp" else preset
    trainer = make_trainer(strategy, max_epochs=1)
    try:
        trainer.fit(module, data)
    except Exception as error:
        return f"{type(error).__name__}: {error}", None
    return "", (module.sums, [p.tolist() for p in module.parameters()])


@pytest.mark.parametrize(
    ("call", "flags"),
    [(own_name, {}), (functionally, {}), (send, {}), (meet, {}), (gather, {"in_backward": True})],
)
def test_ranks_that_run_steps_together_meet_in_them(call: Call, flags: dict[str, Any]) -> None:
    ours, theirs = (
        processes.run(fit, 2, preset, call, flags) for preset in ("lockstep_dp", "ddp")
    )
    assert [text for text, _ in ours] == ["", ""]
    assert [x[0] for _, x in ours] == [x[0] for _, x in theirs]  # what they had in their steps


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
    texts = [text for text, _ in processes.run(fit, 2, preset, call, flags, time_limit_s=40)]
    said = [text for text in texts if text.startswith("StepError")]
    for text in said:
        assert torch.distributed.__name__ in text
        file, line = rf"{__file__}:{call.__code__.co_firstlineno + 1}", "waits for all workers"
        assert file in text, text
        assert line in text
        assert "allowed: in validation, in on_train_batch_end" in text
    assert said, texts


def test_torch_has_its_own_again() -> None:
    assert processes.run(look, 2, "cyclic_dp") == [True, True]


def look(preset: str) -> bool:
    before = dist.distributed_c10d._rank_not_in_group, dist.distributed_c10d._new_group_with_tag
    text, _ = fit(preset, lambda x: None, {})
    now = dist.distributed_c10d._rank_not_in_group, dist.distributed_c10d._new_group_with_tag
    return not text and before == now
