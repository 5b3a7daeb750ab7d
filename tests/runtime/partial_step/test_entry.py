"""Entries: received tensors may be changed, and their gradients are added in autograd's order."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from lightning_cyclic.runtime.partial_step.passage import Entry

A, B, C = (0, 0, 0), (0, 1, 0), (0, 2, 0)


def test_what_is_handed_out_shares_memory_and_belongs_to_a_graph():
    x, y = torch.arange(6.0).reshape(2, 3).t(), torch.arange(3)
    entry = Entry({A: x, B: y}, frozenset({A}), copied=False)
    a, b = entry.values[A], entry.values[B]
    assert list(entry.values) == [A, B]
    assert torch.equal(a, x)
    assert a.stride() == x.stride()
    assert a.data_ptr() == x.data_ptr()
    assert a.requires_grad
    assert not a.is_leaf
    assert not a._is_view()
    assert not b.requires_grad
    assert b.data_ptr() == y.data_ptr()


def test_what_is_handed_out_may_be_changed_in_place():
    entry = Entry({A: torch.ones(3)}, frozenset({A}), copied=False)
    a = entry.values[A]
    a.mul_(2)
    a[0] = 5
    a.sum().backward()
    assert a.tolist() == [5, 2, 2]
    assert entry.grads[A].tolist() == [0, 2, 2]


@pytest.mark.parametrize("copied", [False, True])
def test_copies_keep_what_is_needed_again(copied: bool):
    x, y = torch.ones(3), torch.ones(2)
    entry = Entry({A: x, B: y}, frozenset({A}), copied=copied)
    for value in entry.values.values():
        value.add_(1)
    assert (x.tolist() == [1, 1, 1]) is copied
    assert (y.tolist() == [1, 1]) is copied


def test_gradients_of_what_was_not_used_are_absent():
    entry = Entry({A: torch.ones(3), B: torch.ones(3), C: torch.ones(3)}, frozenset({A, B}),
                  copied=False)  # fmt: skip
    (entry.values[B] * entry.values[C] * 3).sum().backward()
    assert entry.handles == [A, B]
    assert set(entry.grads) == {B}
    assert entry.grads[B].tolist() == [3, 3, 3]


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


def test_nothing_is_kept_where_no_graph_is_made():
    with torch.no_grad():
        entry = Entry({A: torch.ones(2)}, frozenset({A}), copied=False)
    assert not entry.values[A].requires_grad
    entry = Entry({A: torch.ones(2)}, frozenset(), copied=False)
    assert not entry.values[A].requires_grad
    assert entry.handles == []


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
