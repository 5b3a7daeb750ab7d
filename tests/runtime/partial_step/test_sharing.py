"""Which tensors share memory, also where stages hold them apart, and what is refused."""

from __future__ import annotations

import pytest
import torch

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.partial_step.sharing import Sharing, groups_of

A, B, C, D = ((0, n, 0) for n in range(4))


def test_views_are_a_group_and_equal_tensors_are_none():
    x, y = torch.zeros(4, 6), torch.zeros(6)
    groups = groups_of({A: x[:2], B: y, C: x.t(), D: y.clone()}, {}, {})
    assert set(groups) == {A, C}
    assert groups[A] == groups[C]


def test_halves_of_one_buffer_are_no_group():
    x = torch.zeros(8)
    assert groups_of({A: x[:4], B: x[4:]}, {}, {}) == {}


def test_a_span_within_a_longer_one_that_began_before():
    x = torch.zeros(10)
    groups = groups_of({A: x, B: x[1:3], C: x[6:8]}, {}, {})
    assert set(groups) == {A, B, C}
    assert len(set(groups.values())) == 1


def test_copies_remember_what_they_shared():
    x, y = torch.zeros(4), torch.zeros(2)
    came = {A: x, B: y}
    assert set(groups_of(came, came, {A: 0, B: 0})) == {A, B}
    view_of_copy = (1, 0, 0)
    assert set(groups_of({A: x, view_of_copy: y[:1]}, came, {A: 0, B: 0})) == {A, view_of_copy}
    assert groups_of({A: x, view_of_copy: y[:1]}, came, {}) == {}


@pytest.mark.parametrize("inference", [False, True])
def test_a_change_is_refused_if_another_view_was_used_before_or_is_used_later(inference: bool):
    came = {A: torch.zeros(4), B: torch.zeros(2)}
    for used in ([A, B], [A]):
        sharing = Sharing({A: 0, B: 0}, {})
        sharing.begin(came)
        sharing.look(used)
        with torch.inference_mode(inference):
            came[A].add_(1)
        if B in used:
            with pytest.raises(StepError, match="stage 0 is changed in place at "):
                sharing.look(used)
        else:
            sharing.look(used)
            sharing.check([A])
            with pytest.raises(StepError, match="another view"):
                sharing.check([B])
