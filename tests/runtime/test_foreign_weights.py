"""Foreign weights: when they may be read, and what an owner gives."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.foreign_weights import ForeignWeights
from lightning_cyclic.runtime.partial_step.ownership import Ownership
from tests.runtime.partial_step.hand import cuts_of

STATISTICS = ["norm.running_mean", "norm.num_batches_tracked"]
STAGE_OF = dict.fromkeys(["norm.weight", "norm.bias", *STATISTICS], 0) | {
    "last.weight": 1, "last.bias": 1,
}  # fmt: skip


class Model(nn.Module):
    """Two stages, the first with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 3)


class Asked:
    """Stand for the service of a worker whose owner gives what it has; count how often."""

    def __init__(self, owner: ForeignWeights) -> None:
        self.owner, self.asked = owner, []

    def ask(self, rank, stamp, names, into) -> None:
        self.asked.append((rank, stamp, set(names)))
        assert stamp == self.owner.stamp
        for x, value in zip(into, self.owner._give(names), strict=True):
            x.copy_(value)


def worker(stage: int, *, limit: int | None = None) -> tuple[Model, ForeignWeights, list[str]]:
    """Make the worker of one stage, whose rank is another number."""
    torch.manual_seed(stage)
    model, said = Model(), []
    cuts = cuts_of(model, ["last"], changed=STATISTICS)
    ownership = Ownership(model, cuts, [stage])
    foreign = ForeignWeights(model, STAGE_OF, ownership, lambda j: 7 - j, limit, said.append)
    foreign.settle(0)
    ownership.free_foreign(foreign)
    return model, foreign, said


def pair(**options) -> tuple[Model, Model, ForeignWeights, ForeignWeights, Asked, list[str]]:
    first, owner, _ = worker(0)
    last, reader, said = worker(1, **options)
    reader._service = owner._service = asked = Asked(owner)
    owner.settle(0)  # as sessions do once others may ask
    return first, last, owner, reader, asked, said


def train(model: Model, foreign: ForeignWeights, t: int) -> None:
    """Do what a session does in a step with an update."""
    foreign.begin_batch()
    with foreign.running(), torch.no_grad():
        model.norm.running_mean += 1
    foreign.begin_update()
    with torch.no_grad():
        model.norm.weight += 1
    foreign.settle(t + 1)


def test_reading_one_fetches_all_until_the_program_runs_again() -> None:
    first, last, _, reader, asked, said = pair()
    assert torch.equal(last.norm.weight * 1, first.norm.weight)
    assert torch.equal(last.norm.running_mean, first.norm.running_mean)
    assert float(last.norm.num_batches_tracked) == 0
    assert asked.asked == [(7, (0, 0, 0), {"norm.weight", "norm.bias", *STATISTICS})]
    with reader.running():
        assert last.norm.weight.shape == (3,)
    assert float(last.norm.weight.detach().sum()) == 3
    assert len(asked.asked) == 2
    assert len(said) == 1
    assert re.search(
        r"test_foreign_weights.py:\d+ reads the module between steps, .* \[1\]", said[0]
    )


def test_an_owner_that_has_begun_the_next_step_gives_what_was_before_it() -> None:
    first, last, owner, reader, _, _ = pair()
    train(first, owner, 0)
    reader.begin_batch()
    reader.settle(1)
    owner.begin_batch()
    with owner.running(), torch.no_grad():
        first.norm.running_mean += 100
        first.norm.num_batches_tracked += 100
    assert last.norm.running_mean.tolist() == [1, 1, 1]
    assert int(last.norm.num_batches_tracked) == 0
    assert last.norm.weight.tolist() == [2, 2, 2]


def test_reads_within_a_step_are_refused() -> None:
    _, last, _, reader, asked, _ = pair()
    words = r"reads 'norm.weight' of stage 0, which rank 7 has, in the middle of a step; allowed"
    with reader.running(), pytest.raises(StepError, match=words):
        last.norm.weight.sum()
    reader.begin_batch()  # behind the gradients, before the update
    with pytest.raises(StepError, match=words):
        last.norm.weight.sum()
    reader.begin_update()
    with pytest.raises(StepError, match=words):
        last.norm.weight.sum()
    assert asked.asked == []
    reader.settle(1)
    reader._service.owner.begin_batch()
    reader._service.owner.settle(1)
    last.norm.weight.sum()
    assert asked.asked == [(7, (1, 1, 0), {"norm.weight", "norm.bias", *STATISTICS})]


def test_gradients_of_others_are_refused_but_where_the_program_runs() -> None:
    _, last, _, reader, _, _ = pair()
    with reader.running():
        assert last.norm.weight.grad is None
    with pytest.raises(
        StepError, match="the gradient of 'norm.bias' of stage 0, which rank 7 has"
    ):
        last.norm.bias.grad  # noqa: B018
    assert last.last.bias.grad is None


def test_what_does_not_fit_is_fetched_by_itself_and_makes_room() -> None:
    first, last, _, reader, asked, said = pair(limit=71)  # of 72 bytes, 48 of them its own
    norm = last.norm
    with torch.no_grad():
        assert torch.equal(norm.weight * 1, first.norm.weight)
        assert has_memory(norm.weight)
        assert torch.equal(norm.bias * 1, first.norm.bias)
        assert not has_memory(norm.weight)
        norm.weight.sum()
    assert [names for *_, names in asked.asked] == [
        {"norm.weight"},
        {"norm.bias"},
        {"norm.weight"},
    ]
    with reader.running():
        assert not has_memory(norm.weight)
    assert len(said) == 1


def test_what_a_call_reads_leaves_when_it_ends() -> None:
    first, last, _, reader, asked, _ = pair(limit=71)
    x = torch.randn(4, 3)
    with torch.no_grad(), reader.lending(last):
        assert torch.equal(last.norm.eval()(x), first.norm.eval()(x))
        assert not has_memory(last.norm.weight)
        assert not has_memory(last.norm.bias)
    everything = {"norm.weight", "norm.bias", "norm.running_mean"}
    assert {n for *_, names in asked.asked for n in names} == everything


def test_what_an_operation_reads_stays_while_the_rest_of_it_comes() -> None:
    first, last, _, _, _, _ = pair(limit=71)
    with torch.no_grad():
        last.norm.weight.sum()  # here already
        got = torch.stack([last.norm.weight, last.norm.bias])
        assert torch.equal(got, torch.stack([first.norm.weight, first.norm.bias]))


def has_memory(p: nn.Parameter) -> bool:
    return p.untyped_storage().nbytes() > 4


def asked_of(model: Model) -> list[str]:
    """Return what a worker that has the last layer alone has to ask for."""
    return ["norm.weight", "norm.bias", *STATISTICS]


def test_what_graphs_hold_stays_until_the_program_runs_again() -> None:
    first, last, _, reader, _, _ = pair(limit=71)
    x = torch.randn(4, 3)
    got, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    first.norm.eval()(expected).square().sum().backward()
    with torch.no_grad():
        last.norm.weight.sum()  # which is here when the graph is made
    out = last.norm.eval()(got)
    with torch.no_grad():
        last.norm.weight.sum()
    out.square().sum().backward()
    assert torch.equal(got.grad, expected.grad)
    with reader.running():
        assert not has_memory(last.norm.weight)


def test_more_at_once_than_fits_is_refused() -> None:
    _, last, _, _, asked, _ = pair(limit=20)
    with pytest.raises(StepError, match="24 bytes at once, but memory_limit_bytes=20"):
        torch._foreach_norm([last.norm.weight, last.norm.bias])
    (last.norm.weight * 1).sum()  # its graph needs it
    with pytest.raises(StepError, match="24 bytes at once"):
        last.norm.bias.sum()
    assert [names for *_, names in asked.asked] == [{"norm.weight"}]


def test_without_a_process_group_nothing_can_be_fetched() -> None:
    model, _, _ = worker(1)
    with pytest.raises(StepError, match="no process group joins them"):
        model.norm.weight.sum()


def test_whoever_has_everything_fetches_nothing() -> None:
    model = Model()
    cuts = cuts_of(model, ["last"], changed=STATISTICS)
    ownership = Ownership(model, cuts, [0, 1])
    foreign = ForeignWeights(model, STAGE_OF, ownership, lambda j: 0, None, print)
    foreign.settle(0)
    ownership.free_foreign(foreign)
    foreign.fetch()
    assert type(model.norm.weight) is nn.Parameter
