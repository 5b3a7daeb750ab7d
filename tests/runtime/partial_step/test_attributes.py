"""Attributes as they were: whether they hold, to the last item, and what has changed."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_cyclic.runtime.partial_step.attributes import Attributes

Held = dict[str, Any]


class Odd(dict[str, int]):
    """Hide what it has from those who ask for its values."""

    def values(self) -> Any:
        return [0]


def held() -> Held:
    a, b = object(), object()
    return {
        "number": 1, "none": None, "list": [a, b], "more": [], "queue": deque([a]),
        "set": {"x", "y"}, "dict": {"k": a, "in": {"list": [a], "x": torch.zeros(2)}},
        "by": defaultdict(list, k=[b]), "order": OrderedDict(x=1, y=2), "tensor": torch.ones(2),
    }  # fmt: skip


def attributes(values: Held) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    return tuple(values), tuple(values.values())


def swap(items: Any) -> None:
    items[0], items[-1] = items[-1], items[0]


def moved(v: Held) -> None:
    """Move an item from one list to the one behind it."""
    v["more"].append(v["list"].pop())


CHANGES: dict[str, tuple[Callable[[Held], Any], set[str]]] = {
    "a number": (lambda v: v.update(number=2), {"number"}),
    "an attribute that comes": (lambda v: v.update(new=2), {"new"}),
    "an item that comes": (lambda v: v["list"].append(1), {"list"}),
    "an item that goes": (lambda v: v["queue"].clear(), {"queue"}),
    "an item that moves": (moved, {"list", "more"}),
    "a set": (lambda v: v["set"].add("z"), {"set"}),
    "a key": (lambda v: v["dict"].update(new=1), {"dict"}),
    "a value": (lambda v: v["dict"].update(k=1), {"dict"}),
    "a list within": (lambda v: v["dict"]["in"]["list"].append(1), {"dict"}),
    "a tensor within": (lambda v: v["dict"]["in"]["x"].add_(1), {"dict"}),
    "a default": (lambda v: v["by"]["other"], {"by"}),
    "a tensor": (lambda v: v["tensor"].add_(1), {"tensor"}),
}


@pytest.mark.parametrize(("change", "names"), CHANGES.values(), ids=CHANGES)
def test_what_changes_is_seen(change: Callable[[Held], Any], names: set[str]) -> None:
    values = held()
    before = Attributes(*attributes(values))
    assert before.hold(*attributes(values))
    assert before.changed(*attributes(values)) == {}
    change(values)
    assert not before.hold(*attributes(values))
    assert before.changed(*attributes(values)).keys() == names


@pytest.mark.parametrize(
    "change",
    [lambda v: swap(v["list"]), lambda v: v["order"].move_to_end("x"), lambda v: v.pop("none")],
)
def test_attributes_are_kept_again_behind_what_runs_are_not_asked_for(
    change: Callable[[Held], Any],
) -> None:
    values = held()
    before = Attributes(*attributes(values))
    change(values)
    assert not before.hold(*attributes(values))


@pytest.mark.parametrize("inside", [False, True])
def test_what_classes_of_the_users_hide_is_always_looked_at(inside: bool) -> None:
    odd = Odd(a=1)
    values = {"odd": {"in": odd} if inside else odd}
    before = Attributes(*attributes(values))
    assert not before.hold(*attributes(values))
    assert before.changed(*attributes(values)) == {}
    odd["a"] = 2
    assert before.changed(*attributes(values)).keys() == {"odd"}


def test_tensors_of_inference_mode_hold() -> None:
    with torch.inference_mode():
        values = {"x": torch.zeros(2), "in": [torch.zeros(2)]}
    assert Attributes(*attributes(values)).hold(*attributes(values))
