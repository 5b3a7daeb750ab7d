"""What steps keep on the module: per stage, told to others, and refused where it cannot be."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.partial_step.module_state import (
    Change,
    ModuleState,
    Seen,
    packed,
    state_of,
)
from tests.runtime.partial_step.hand import cuts_of


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.calls = 0
        self.outs: list[Any] = []
        self.by_name: Any = defaultdict(list)
        self.notes = ["kept"]

    @property
    def twice(self) -> int:
        return 2 * self.calls

    @property
    def broken(self) -> int:
        return self.notes.calls  # type: ignore[attr-defined, no-any-return]


IGNORED = frozenset(vars(nn.Module()))


def state_for(model: Model, stages: list[int], said: Any = print) -> ModuleState:
    return ModuleState(model, cuts_of(model, []), IGNORED, stages, said, ["mean"])


def run(state: ModuleState, j: int, code: Callable[[], None]) -> tuple[Any, list[Change]]:
    """Run a stage's code; return what a run again is to find, and what others are told."""
    visit = state.begin(j)
    code()
    changes = state.changes(visit, lambda x: x, "training_step") if j == 1 else []
    return state.end(j, visit), changes


def count(model: Model) -> Callable[[], None]:
    def code() -> None:
        model.calls += 1
        model.mean += model.calls
        model.outs.append(model.calls)

    return code


def test_each_stage_of_one_process_counts_by_itself() -> None:
    model = Model()
    state = state_for(model, [0, 1])
    for _ in range(3):  # all of the first stage's, then all of the second one's
        run(state, 0, count(model))
        assert (model.calls, model.outs) == (0, [])
    assert model.mean.tolist() == [0, 0]
    for k in range(3):
        run(state, 1, count(model))
        assert model.calls == k + 1
    assert model.outs == [1, 2, 3]
    assert model.mean.tolist() == [6, 6]


def test_what_hooks_change_all_stages_follow() -> None:
    model = Model()
    state = state_for(model, [0, 1])
    for j in (0, 1):
        run(state, j, count(model))
    model.calls = 10
    model.outs.clear()
    model.mean.zero_()
    seen = []
    for j in (0, 1):
        run(state, j, lambda: (count(model)(), seen.append((model.calls, list(model.outs)))))
    assert seen == [(11, [11]), (11, [11])]
    assert model.mean.tolist() == [11, 11]


def test_a_run_again_finds_what_the_first_found_and_leaves_nothing() -> None:
    model = Model()
    state = state_for(model, [0])
    run(state, 0, count(model))
    found, _ = run(state, 0, count(model))
    run(state, 0, count(model))
    with state.again(0, found):
        assert (model.calls, model.outs, model.mean.tolist()) == (1, [1], [1, 1])
        count(model)()
    assert (model.calls, model.outs, model.mean.tolist()) == (3, [1, 2, 3], [6, 6])


def test_a_run_that_begins_anew_forgets_what_it_did() -> None:
    model = Model()
    state = state_for(model, [0, 1])
    for j in (0, 1):
        visit = state.begin(j)
        count(model)()
        state.begin_anew(visit)
        count(model)()
        state.end(j, visit)
    assert (model.calls, model.outs, model.mean.tolist()) == (1, [1], [1, 1])


def told(code: Callable[[Model], None], other: Model, said: Any = print) -> ModuleState:
    """Let the worker of the last of two stages run code, and tell the other's."""
    model = Model()
    last, first = state_for(model, [1], said), state_for(other, [0])
    for t in range(2):
        _, changes = run(last, 1, lambda: code(model))
        first.adopt(t, *packed({0: changes}))
    return first


def test_others_are_told_of_lists_numbers_and_tensors() -> None:
    def code(model: Model) -> None:
        count(model)()
        model.by_name["loss"].append({"loss": torch.ones(2, requires_grad=True) * 2, "n": 0.5})
        model.scale = torch.full((), float(model.calls))
        model.text = f"step {model.calls}"

    other = Model()
    told(code, other)
    assert (other.calls, other.outs, other.text) == (2, [1, 2], "step 2")
    assert type(other.by_name) is defaultdict
    assert [x["n"] for x in other.by_name["loss"]] == [0.5, 0.5]
    assert not other.by_name["loss"][0]["loss"].requires_grad
    assert float(other.scale) == 2
    assert other.notes == ["kept"]


@pytest.mark.parametrize("largest", [None, 2])
def test_queues_and_sets_are_kept_and_told(largest: int | None) -> None:
    def prepared() -> Model:
        model = Model()
        model.queue, model.names = deque(maxlen=largest), {"a"}
        return model

    def code(model: Model) -> None:
        model.calls += 1
        model.queue.append(model.calls)
        model.names.add(f"n{model.calls}")

    alone, expected = prepared(), prepared()
    state = state_for(alone, [0, 1])
    for j in (0, 0, 0, 1, 1, 1):
        run(state, j, lambda: code(alone))
    for _ in range(3):
        code(expected)
    assert (alone.queue, alone.names) == (expected.queue, expected.names)
    assert alone.queue.maxlen == largest
    model, other = prepared(), prepared()
    last, first = state_for(model, [1]), state_for(other, [0])
    for t in range(3):
        _, changes = run(last, 1, lambda: code(model))
        first.adopt(t, *packed({0: changes}))
    assert (list(other.queue), other.names) == (list(expected.queue), expected.names)


def test_messages_of_numbers_have_one_form() -> None:
    model = Model()
    state = state_for(model, [0])
    facts = []
    for _ in range(3):
        _, changes = run(state, 0, count(model))
        facts.append(packed({0: changes})[1])
    assert facts[0] == facts[1] == facts[2]


def test_what_is_large_or_no_data_stays_and_is_named_once() -> None:
    def code(model: Model) -> None:
        model.features = torch.zeros(2000)
        model.lock = open
        model.thread = iter([])

    said: list[str] = []
    other = Model()
    told(code, other, said.append)
    assert not hasattr(other, "features")
    assert sorted(text.split()[0] for text in said) == ["self.features,", "self.thread,"]


@pytest.mark.parametrize("name", ["calls", "outs"])
def test_an_attribute_that_two_stages_change_is_refused(name: str) -> None:
    def both(model: Model) -> None:
        for _ in range(2):
            count(model)()

    other = Model()
    model = Model()
    last, first = state_for(model, [1]), state_for(other, [0])
    _, changes = run(last, 1, lambda: both(model))
    visit = first.begin(0)
    count(other)()
    first.end(0, visit, (0, 0))
    changes = [c for c in changes if c.name == name]
    with pytest.raises(StepError, match=f"self.{name} is changed .* several stages; allowed"):
        first.adopt(0, *packed({0: changes}))


def test_what_an_earlier_stage_alone_counts_is_as_it_is() -> None:
    other, model = Model(), Model()
    last, first = state_for(model, [1]), state_for(other, [0])
    for t in range(2):
        _, changes = run(last, 1, count(model))
        visit = first.begin(0)
        count(other)()
        first.end(0, visit, (t, 0))
        first.adopt(t, *packed({0: changes}))
    assert (other.calls, other.outs) == (2, [1, 2])


def test_reading_early_what_a_later_stage_changes_is_refused() -> None:
    other = Model()
    first = state_for(other, [0])
    with pytest.raises(AttributeError, match="broken"), first.hiding():
        other.broken  # noqa: B018
    last_model = Model()
    _, changes = run(state_for(last_model, [1]), 1, count(last_model))
    first.adopt(0, *packed({0: changes}))
    assert other.calls == 1
    looks = (
        lambda: other.calls + 1, lambda: other.twice, lambda: 1 if other.calls else 0,
        lambda: getattr(other, "calls", 0) > 3, lambda: torch.ones(2) * other.calls,
        lambda: torch.add(torch.ones(2), other.calls), lambda: f"{other.calls}",
        lambda: range(other.calls), lambda: other.calls.real,
    )  # fmt: skip
    for look in looks:
        visit = first.begin(0)
        refused = pytest.raises(StepError, match="self.calls is read .* one stage, and changed")
        with refused, first.hiding():
            look()
        first.end(0, visit)
    with pytest.raises(AttributeError, match="another"), first.hiding():
        other.another  # noqa: B018
    assert (other.calls, other.twice) == (1, 2)


def test_that_a_later_stage_has_set_something_is_seen_as_in_the_plain_step() -> None:
    other = Model()
    first = state_for(other, [0])
    last_model = Model()

    def keep() -> None:
        last_model.latest, last_model.calls = 2.0, None

    _, changes = run(state_for(last_model, [1]), 1, keep)
    first.adopt(0, *packed({0: changes}))
    with first.hiding():
        assert hasattr(other, "latest")
        assert getattr(other, "latest", None) is not None
        assert getattr(other, "calls", None) is None
        assert hasattr(copy.deepcopy(other), "latest")
    with pytest.raises(StepError, match="self.calls is read"), first.hiding():
        other.calls  # noqa: B018  (it was None a micro-batch ago)
    assert (other.latest, other.calls) == (2.0, None)


def test_a_tensor_changed_in_place_where_stages_share_a_process_is_refused() -> None:
    model = Model()
    model.average = torch.zeros(2)
    state = state_for(model, [0, 1])

    def code() -> None:
        average: Tensor = model.average
        average.add_(1)

    with pytest.raises(StepError, match=r"self.average, a tensor, is changed in place"):
        run(state, 0, code)


NOTHING = Seen({}, [], [])
X = torch.linspace(-1, 1, 8).reshape(4, 2)
STATISTICS = [f"{m}.{n}" for m in ("one", "two") for n in ("running_mean", "running_var")]
COUNTS = [f"{m}.num_batches_tracked" for m in ("one", "two")]


class Normed(nn.Module):
    """A normalization and a metric in each of two stages, and a buffer that is replaced."""

    def __init__(self):
        super().__init__()
        self.one, self.mean = nn.BatchNorm1d(2), MeanMetric()
        self.two, self.cat = nn.BatchNorm1d(2), CatMetric()
        self.two.register_buffer("moving", torch.zeros(2))

    def forward(self, x):
        h = self.one(x)
        self.mean(h.detach() + 3)
        h = self.two(h)
        self.cat.update(h.detach())
        self.two.moving = self.two.moving * 0.5 + h.detach().mean(0) + 1
        return h.sum()


def made():
    model = Normed()
    model(X * 2)
    cuts = cuts_of(
        model, ["two"], metrics={"mean": 0, "cat": 1}, changed=[*STATISTICS, *COUNTS, "two.moving"]
    )
    return model, ModuleState(model, cuts, vars(model), [0], print)


def picture(model):
    buffers = {n: b.tolist() for n, b in model.named_buffers()}
    metrics = {n: repr(state_of(getattr(model, n))) for n in ("mean", "cat")}
    return buffers | metrics


def of_stage(j, found):
    first = ("one", "mean")
    return {n: x for n, x in found.items() if n.startswith(first) == (j == 0)}


@pytest.mark.parametrize("j", [0, 1])
def test_statistics_and_metrics_of_a_stage_are_undone(j):
    model, effects = made()
    before = picture(model)
    with effects.again(j, NOTHING):
        model(X - 1)
        inside = picture(model)
    after = picture(model)
    assert of_stage(j, after) == of_stage(j, before)
    assert of_stage(1 - j, after) == of_stage(1 - j, inside) != of_stage(1 - j, before)
    assert all(inside[n] != before[n] for n in [*STATISTICS, *COUNTS, "two.moving", "mean", "cat"])


def test_everything_is_undone_behind_an_error():
    model, effects = made()
    before = picture(model)
    with pytest.raises(KeyError), effects.again(0, NOTHING):  # noqa: PT012
        model.one(X)
        model.mean.update(X)
        raise KeyError
    assert picture(model) == before


def test_graphs_that_hold_buffers_do_not_notice():
    model, effects = made()
    model.two.eval()  # the backward needs the statistics
    loss = model.two(X.clone().requires_grad_()).sum()
    with effects.again(1, NOTHING):
        pass
    loss.backward()
    assert model.two.weight.grad is not None


def test_buffers_that_do_not_change_are_left_alone():
    model = Normed()
    effects = ModuleState(model, cuts_of(model, ["two"]), vars(model), [0], print)
    with effects.again(0, NOTHING):
        model.one(X)
    assert model.one.num_batches_tracked == 1
