"""Tensors that share memory but travel apart: a change of one must not go unseen by the other.

Views of one tensor that cross to the next stage arrive as copies. As long as none of them is
changed in place, nobody can tell. The survey keeps stages from beginning where one is; what it did
not see (another branch of the code, a validation step) is refused here when it happens; so does
the comparison of the first step not see it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.bits import Mark
from lightning_cyclic.runtime.partial_step.ghosts import Handle
from lightning_cyclic.runtime.torch_functions import user_line


def groups_of(
    tensors: Mapping[Handle, Tensor],
    came: Mapping[Handle, Tensor],
    groups: Mapping[Handle, int],
) -> dict[Handle, int]:
    """Return a number for each tensor that shares memory with another one, alike for these.

    Args:
        tensors: that leave a stage.
        came: that entered it: copies, of which some shared memory in an earlier stage.
        groups: which of those: what this function returned there.

    Example:
        >>> x = torch.zeros(4)
        >>> groups_of({(0, 0, 0): x, (0, 1, 0): x[:2], (0, 2, 0): x + 1}, {}, {})
        {(0, 0, 0): 0, (0, 1, 0): 0}
    """
    if len(tensors) < 2:
        return {}
    every = {**came, **tensors}
    spans = sorted((*span, h) for h, x in every.items() if (span := _span(x)) is not None)
    group = dict.fromkeys(every, -1) | {h: n for n, (*_, h) in enumerate(spans)}
    end = 0
    for (_, before_end, before), (begin, _, h) in pairwise(spans):
        end = max(end, before_end)
        if begin < end:
            group[h] = group[before]
    _join(group, groups)
    counts: dict[int, list[Handle]] = {}
    for h in tensors:
        if group[h] >= 0:
            counts.setdefault(group[h], []).append(h)
    shared = [members for members in counts.values() if len(members) > 1]
    return {h: n for n, members in enumerate(shared) for h in members}


def _join(group: dict[Handle, int], groups: Mapping[Handle, int]) -> None:
    first: dict[int, int] = {}
    for h, n in groups.items():
        if h in group:
            new = first.setdefault(n, group[h])
            old = group[h]
            for other in group if new != old else ():
                if group[other] == old:
                    group[other] = new


def _span(x: Tensor) -> tuple[int, int] | None:
    if x.layout is not torch.strided or x.numel() == 0:
        return None
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    begin = x.data_ptr()  # all that are compared are alive
    return begin, begin + (last + 1) * x.element_size()


@final
class Sharing:
    """Look after the tensors that entered a stage and shared memory before.

    Args:
        groups: which did, from :func:`groups_of`.
        stale: tensors of which a view was changed in an earlier stage -> where.
    """

    def __init__(self, groups: Mapping[Handle, int], stale: Mapping[Handle, str]) -> None:
        self.groups = groups
        self.stale = dict(stale)
        self._known: dict[Handle, Mark] = {}

    @classmethod
    def of(cls, groups: Mapping[Handle, int], stale: Mapping[Handle, str]) -> Sharing:
        """Return one that looks after these; for nothing, the one that never does anything."""
        return cls(groups, stale) if groups or stale else NO_SHARING

    def begin(self, came: Mapping[Handle, Tensor]) -> None:
        """Remember the tensors as they entered."""
        if self.groups:
            self._known = {h: Mark.of(came[h]) for h in self.groups if h in came}

    def look(self, used: Iterable[Handle]) -> None:
        """Look for changes in place since the last look.

        Raises:
            StepError: a tensor was changed in place, and another view of it was used here.
        """
        for h, known in self._known.items():
            if not known.is_of(known.value):
                self._known[h] = Mark.of(known.value)
                line = str(user_line())
                mates = {m for m, n in self.groups.items() if n == self.groups[h] and m != h}
                self.stale |= dict.fromkeys(mates, line)
                self.check(mates.intersection(used))

    def check(self, used: Iterable[Handle]) -> None:
        """Refuse uses of views that lack what was changed in place.

        Raises:
            StepError: there is one.
        """
        for h in used:
            if h in self.stale:
                raise StepError(
                    f"a tensor of stage {h[0]} is changed in place at {self.stale[h]}, and "
                    "another view of its memory, which came to this stage apart from it, is used "
                    "too; allowed: changes in place in the stage that made the tensor; write "
                    "x = x + y in place of x += y, make the views behind the change, or let no "
                    "stage begin between, stages=[...]"
                )


NO_SHARING = Sharing({}, {})
