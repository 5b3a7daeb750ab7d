"""F and B of stages whose way is known: the packet is asked for late, and bits stay the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_cyclic.plan import make_plan
from lightning_cyclic.plan.actions import Action, Kind
from lightning_cyclic.runtime.partial_step import replay, tape
from lightning_cyclic.runtime.partial_step.ghosts import Ghost
from lightning_cyclic.runtime.partial_step.module_state import ModuleState
from lightning_cyclic.runtime.partial_step.ownership import Ownership
from lightning_cyclic.runtime.partial_step.packets import Gradients, Packet
from lightning_cyclic.runtime.partial_step.stage_step import Micro, StageStep
from tests.runtime.partial_step.hand import router_of
from tests.runtime.partial_step.rows import Row, X


class Rig:
    """Run steps of one micro-batch, all stages on one worker."""

    def __init__(self, model: nn.Module, *starts: str, remat: str = "never") -> None:
        self.model = model
        self.router = router_of(model, *(starts or ("b", "c")))
        self.packets: list[Packet] = []  # that each stage was given, in this step
        num_stages = self.router.num_stages
        plan = make_plan("1f1b", num_stages=num_stages, num_workers=1, num_microbatches=1)
        ownership = Ownership(model, self.router.cuts, range(num_stages))
        state = ModuleState(model, self.router.cuts, vars(model), range(num_stages), print)
        self.stage = StageStep(self.router, plan, ownership, state, 0, remat)

    def step(self, t: int, x: Tensor = X, *, backward: bool = True) -> tuple[Tensor, list[Any]]:
        """Return the loss and the gradients of a step."""
        micro = Micro(x, torch.clone, f"kind {tuple(x.shape)}", "family")
        self.stage.prepare(t, {0: micro}, self.model, training=True)
        self.model.zero_grad()
        self.packets, gone = [Packet()], Gradients({}, {})
        with self.router.open():
            for j in range(self.router.num_stages):
                packet = self.stage.forward(Action(kind=Kind.F, t=t, i=0, j=j), self.take)
                self.packets += [packet] if packet is not None else []
            for j in reversed(range(self.router.num_stages if backward else 0)):
                came = gone
                a = Action(kind=Kind.B, t=t, i=0, j=j)
                gone = self.stage.backward(a, lambda came=came: came)
        (outcome,) = self.stage.take_outcomes(t).values()
        self.stage.adopt(self.stage.learnt)
        self.stage.forget(t)
        return outcome.output, [p.grad for p in self.model.parameters()]

    def take(self) -> Packet:
        """Give a stage its packet."""
        self.model.seen.append("take")
        return self.packets[-1]

    def compare(self, t: int, x: Tensor = X) -> None:
        """Compare a step with a plain one, bit by bit."""
        loss, grads = self.step(t, x)
        self.model.zero_grad()
        expected = self.model(x.clone())
        expected.backward()
        assert torch.equal(loss, expected)
        for grad, p in zip(grads, self.model.parameters(), strict=True):
            assert (grad is None) == (p.grad is None)
            assert grad is None or torch.equal(grad, p.grad)


def calls(rig: Rig, t: int, x: Tensor = X) -> list[str]:
    """Return what was called in a step, and where packets were taken."""
    rig.model.seen.clear()
    rig.step(t, x)
    return rig.model.seen


def test_what_is_before_a_stage_runs_while_its_packet_is_on_its_way():
    rig, glue = Rig(Row()), ["glue 1", "glue 2"]
    stages = [["a", "glue 1"], ["glue 1", "b", "glue 2"], ["glue 1", "glue 2", "c"]]
    assert calls(rig, 0) == [name for stage in stages for name in ("take", *stage)]
    stages = [["take", "a", "glue 1"], ["glue 1", "take", "b", "glue 2"], [*glue, "take", "c"]]
    assert calls(rig, 1) == sum(stages, [])


@pytest.mark.parametrize("remat", ["never", "always"])
def test_steps_of_which_the_way_is_known_give_the_same_bits(remat):
    rig = Rig(Row(), remat=remat)
    for t in range(4):
        rig.compare(t, X + t)


def test_a_known_way_is_not_described_again_and_makes_no_moulds(monkeypatch):
    rig = Rig(Row())
    for t in range(3):
        rig.step(t)
    before = [tape for packet in rig.packets for tape in packet.tapes]
    for module, name in ((tape, "describe"), (replay, "Mould")):
        monkeypatch.setattr(module, name, None)  # not to be called
    rig.step(3)
    after = [tape for packet in rig.packets for tape in packet.tapes]
    assert all(a is b for a, b in zip(after, before, strict=True))


class Turning(Row):
    """Go a way that depends on the values of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append("begin")
        h = self.a(x)
        if x[0, 0] > 0:
            h = torch.relu(h)
        h = self.b(h + x)
        if x[0, 1] > 0:
            h = h[x[:, 2] > 0]
        return self.c(h).sum()


WAYS = [X, X + 0.9, X + 3.0, X - 3.0, X + 3.0, X, X + 0.9, X + 0.9]


@pytest.mark.parametrize("remat", ["never", "always"])
def test_where_the_way_turns_out_another_the_stage_is_begun_again(remat):
    rig = Rig(Turning(), remat=remat)
    for t, x in enumerate(WAYS):
        rig.compare(t, x)


def test_what_turned_out_is_the_habit_from_then_on():
    rig = Rig(Turning())
    rig.step(0, X)
    rig.step(1, X + 3.0)
    assert calls(rig, 2, X + 3.0).count("begin") == 3
    assert calls(rig, 3, X - 3.0).count("begin") == 5  # stages 1 and 2 expected the other one


class Sized(Row):
    """Go a way that depends on the sizes of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append("begin")
        h = self.a(x)
        for _ in range(h.size(0) - 1):
            h = self.b(h) if h.shape[0] < 4 else torch.relu(self.b(h.to(x.device)))
        return self.c(h).sum()


def test_batches_of_many_sizes_keep_their_habits():
    rig = Rig(Sized())
    batches = [torch.linspace(-1, 1, 4 * n).reshape(n, 4) for n in (2, 3, 4, 5)]
    for t in range(12):
        rig.compare(t, batches[t % 4])
    assert [calls(rig, 12 + k, x).count("begin") for k, x in enumerate(batches)] == [3] * 4


class Drawing(Row):
    """Draw between layers: on tensors of stages, on nothing, and in plain Python."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.a(x), 0.5)
        if self.extra != "none":
            h = h * torch.rand(4)
        h = self.b(F.dropout(h, 0.5))
        if self.extra in ("python", "restored"):
            state = random.getstate()
            h = h * random.random()
            if self.extra == "restored":
                random.setstate(state)
        return (self.c(F.dropout(h, 0.5)) * torch.rand(4)).sum()


@pytest.mark.parametrize("extra", ["none", "torch", "python", "restored"])
@pytest.mark.parametrize("remat", ["never", "always"])
def test_draws_do_not_depend_on_what_is_known(extra, remat):
    rig = Rig(Drawing(), remat=remat)
    for t in range(4):
        rig.model.extra = extra if t else "none"  # the way is known, but not with these draws
        loss, grads = rig.step(t)
        fresh = Rig(Drawing())
        fresh.model.extra = rig.model.extra
        expected, expected_grads = fresh.step(t)
        assert torch.equal(loss, expected)
        assert all(map(torch.equal, grads, expected_grads))


class Failing(Row):
    """Raise the user's own errors, and catch errors of one layer."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.extra == "glue" and x[0, 0] < 0:
            raise KeyError("the user's")
        try:
            h = self.b(F.relu(h) + x)
        except ConnectionError:
            h = x
        if self.extra == "stage":
            raise KeyError("the user's")
        return self.c(h).sum()


@pytest.mark.parametrize("where", ["glue", "stage"])
def test_the_users_errors_are_raised_and_the_next_step_is_right(where):
    rig = Rig(Failing())
    for t in (0, 2, 4):
        rig.compare(t)
        rig.model.extra = where
        with pytest.raises(KeyError, match="the user's"):
            rig.step(t + 1)
        rig.model.extra = None
    rig.compare(6)


def test_errors_of_the_mail_are_not_for_the_users_code_to_catch(monkeypatch):
    rig = Rig(Failing())
    rig.compare(0)
    with monkeypatch.context() as patch:
        patch.setattr(rig, "take", _broken)
        with pytest.raises(ConnectionError, match="broken"):
            rig.step(1)
    rig.compare(2)


def _broken() -> Packet:
    raise ConnectionError("broken")


class Keeping(Row):
    """Keep what a layer gave for the next step, and write on it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.label = "h"
        last, self.extra = self.extra, h
        h = self.b(h)
        return self.c(h).sum() * (1.0 if last is None else float(last.label == "h"))


def test_ghosts_that_the_users_code_has_kept_are_left_to_it():
    rig, kept = Rig(Keeping(), "b"), []
    for t in range(4):
        rig.compare(t, X + t)
        rig.model.extra = None
        rig.step(10 + t, X + t)
        kept.append(rig.model.extra)
    assert all(type(x) is Ghost for x in kept)
    assert len(set(map(id, kept))) == 4
    for t, x in enumerate(kept):
        assert torch.equal(x.value, rig.model.a(X + t))
