"""Habits keep what is known of a way, and let go of it where it is another."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from lightning_cyclic.runtime.partial_step import passage
from lightning_cyclic.runtime.partial_step.passage import Entry, Habits
from lightning_cyclic.runtime.partial_step.tape import describe
from tests.runtime.partial_step.hand import router_of
from tests.runtime.partial_step.rows import Row, X

A, B, C = (0, 0, 0), (0, 1, 0), (0, 2, 0)


@pytest.mark.parametrize("copied", [False, True])
def test_copies_keep_what_is_needed_again(copied: bool):
    x, y = torch.ones(3), torch.ones(2)
    entry = Entry({A: x, B: y}, frozenset({A}), copied=copied)
    for value in entry.values.values():
        value.add_(1)
    assert (x.tolist() == [1, 1, 1]) is copied
    assert (y.tolist() == [1, 1]) is copied


BIG = 2.0**25  # BIG + 1 == BIG in single precision


@pytest.mark.parametrize(
    ("root", "first", "last", "total"),
    [(BIG, 1, -BIG, 1), (1, -BIG, BIG, 0), (-BIG, 1, BIG, 1), (BIG, -BIG, 1, 0)],
)
def test_a_root_gradient_comes_first_and_then_the_latest_use(root, first, last, total):
    """A tensor that goes on to a later stage: as if that stage were part of the graph."""

    def grad(x, edges_first):
        used = (x * first, x * last)
        z = torch.stack(used).sum()
        roots, grads = [get_gradient_edge(x), z], [torch.tensor(root), None]
        order = (0, 1) if edges_first else (1, 0)
        torch.autograd.backward([roots[k] for k in order], [grads[k] for k in order])

    for edges_first in (True, False):
        entry = Entry({A: torch.tensor(2.0)}, frozenset({A}), copied=False)
        grad(entry.values[A], edges_first)
        assert float(entry.grads[A]) == total
    w = torch.tensor(1.0, requires_grad=True)  # one graph over all stages
    x = w * 2
    uses = [x * first, x * last, x * root]
    got = []
    x.register_hook(lambda g: got.append(float(g)))
    torch.stack(uses).sum().backward()
    assert got == [total]


@pytest.mark.parametrize("changed", [False, True])
def test_a_stage_on_the_same_worker_sees_that_its_output_was_changed(changed: bool):
    w = torch.ones(2, requires_grad=True)
    y = (w * 2).exp()  # its backward needs y
    entry = Entry({A: y.detach()}, frozenset({A}), copied=False)
    if changed:
        entry.values[A].add_(1)
    entry.pass_changes_on()
    if changed:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    else:
        y.sum().backward()
        assert w.grad is not None


def test_inference_tensors_are_handed_out():
    with torch.inference_mode():
        x = torch.ones(2)
        entry = Entry({A: x}, frozenset(), copied=False)
        entry.values[A].add_(1)
        entry.pass_changes_on()
    assert x.tolist() == [2, 2]


A, B = ((describe(name, X, [], ())[0],) for name in ("a()", "b()"))


def habits() -> Habits:
    return Habits(router_of(Row(), "b", "c"))


def test_inputs_of_many_sizes_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(passage, "_MOST_HABITS", 2)
    kept = habits()
    for kind in "abc":
        kept.begin(kind, 1, (A,))
    assert [kept.get(kind, 1) is not None for kind in "abc"] == [False, True, True]
