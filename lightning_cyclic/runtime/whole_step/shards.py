"""Shards: a worker holds the parameters of other workers' stages only while it uses them.

    GATHER, RECV   a version has come; the module shows it
    F              what autograd would save of it is remembered by its place alone
    FREE           the parameters are absent: who reads them now is refused by name
    GATHER, RECV   it has come again; autograd gets what it saved, from the same place
    B, FREE

Parameters that several modules share stay, as copies, for those of later stages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.absent import Home, come_back, leave, without_memory
from lightning_cyclic.runtime.saved_places import SavedPlaces
from lightning_cyclic.runtime.stages.stage_map import StageMap
from lightning_cyclic.runtime.whole_step.versions import VersionStore

_WHOLE = "a strategy in which every rank has all parameters, 'cyclic_dp' or 'lockstep_dp'"
_WHERE = (
    "allowed: in the modules of the stage, in validation, where epochs end and behind the fit; "
    "move the code there, begin stages elsewhere, stages=[...], or use "
    f"{_WHOLE}"
)


class Replica:
    """Show versions of stages on a worker that has the parameters of all of them."""

    comes_and_goes = False
    is_read_away = True
    """Whether modules may be called whose weights have gone."""
    instead = ""
    """What a user could choose, where some come and go."""
    resting: frozenset[int] = frozenset()
    """Stages of which something is here for a backward alone that is not trained."""

    def __init__(self, stores: Sequence[VersionStore]) -> None:
        self._stores = stores

    def has(self, j: int) -> bool:
        return True

    def enter(self, j: int, v: int) -> None:
        """Let the module show what a forward reads; older versions have been read."""
        self._stores[j].show(v)
        self._stores[j].drop_below(v)

    def show_newest(self, j: int, v: int, oldest: int) -> None:
        """Let the module show the newest version, between steps."""
        self._stores[j].show(v)
        self._stores[j].drop_below(oldest)

    def oldest(self, v: int, read: int) -> int:
        """Return the oldest version of an own stage to keep when version v is there."""
        return read

    def packing(self) -> AbstractContextManager[Any]:
        """Return a context in which forwards run."""
        return nullcontext()

    def stay(self) -> None:
        """Hide nothing until the end of the step."""

    def stay_no_longer(self) -> None:
        """Hide what has stayed."""

    def free_all(self) -> None:
        """Give up what has come for those who look at the whole module, between steps."""

    def drop_copies(self) -> None:
        """Behind a flush that brings nothing, keep no old copies of what several modules have."""

    def release(self) -> None:
        """End."""


@final
class Shards(Replica):
    """Show and hide the parameters of other workers' stages.

    Args:
        owner_of: stage -> rank of the worker that updates it.
        bring: (stage, version) -> has it come again, for a backward.
    """

    comes_and_goes = True
    is_read_away = False
    instead = _WHOLE

    def __init__(
        self,
        module: nn.Module,
        stages: StageMap,
        stores: Sequence[VersionStore],
        owner_of: Callable[[int], int],
        worker: int,
        bring: Callable[[int, int], None],
    ) -> None:
        super().__init__(stores)
        self._owner_of = owner_of
        self._worker = worker
        self._bring = bring
        self._foreign = [j for j in range(len(stores)) if owner_of(j) != worker]
        self._names = [stage.parameters for stage in stages.stages]
        self._stage_of = stages.stage_of
        self._shared = shared_parameters(module)
        self._places = SavedPlaces(self._find)  # by stage and version
        self._shown: dict[int, int] = {}  # foreign stage -> version
        self._stays = False
        self._is_apart = False  # whether no worker ever has all parameters
        for j in self._foreign:
            for v in stores[j].versions:
                self._note(j, v)
            if not stores[j].versions:
                self._is_apart = True
                self._leave(j)

    # ------------------------------------------------------------------ coming and going

    @override
    def has(self, j: int) -> bool:
        return j not in self._foreign or j in self._shown

    def show(self, j: int, v: int) -> None:
        for p in self._stores[j].parameters:
            come_back(p)
        self._stores[j].show(v)
        if j in self._foreign:
            self._note(j, v)

    @override
    def enter(self, j: int, v: int) -> None:
        self.show(j, v)

    @override
    def show_newest(self, j: int, v: int, oldest: int) -> None:
        self.show(j, v)

    @override
    def oldest(self, v: int, read: int) -> int:
        return v - 1  # for others, who are behind

    def _note(self, j: int, v: int) -> None:
        self._places.note(self._stores[j][v].data, (j, v))
        self._shown[j] = v

    def free(self, j: int, v: int) -> None:
        store = self._stores[j]
        if v not in store:  # a flush would have brought it, and there was none
            return
        self._places.forget(store[v].data)
        store.forget(v)
        if not self._stays:
            self._hide(j)

    def _hide(self, j: int) -> None:
        if self._shown.pop(j, None) is None:
            return
        store = self._stores[j]
        with store.changing():
            for p, name in zip(store.parameters, self._names[j], strict=True):
                if id(p) in self._shared:
                    p.data = p.data.clone()
                else:
                    _leave(p, name, self)

    @override
    def stay(self) -> None:
        self._stays = True

    @override
    def stay_no_longer(self) -> None:
        if self._stays:
            self._stays = False
            for j in self._foreign:
                self._hide(j)

    @override
    def free_all(self) -> None:
        for j in self._foreign:
            for v in self._stores[j].versions:
                self.free(j, v)

    @override
    def release(self) -> None:
        # plain parameters again, and not a number where nobody has brought them
        for j in self._foreign if not self._is_apart else ():
            if j not in self._shown:
                for p in self._stores[j].parameters:
                    come_back(p)
                    if p.is_floating_point() and id(p) not in self._shared:
                        p.data = p.data.new_full((), torch.nan).expand(p.shape)

    # ------------------------------------------------------------------ between steps

    @property
    def foreign(self) -> list[str]:
        """Return the names of the parameters that come and go."""
        return [n for j in self._foreign for n in self._names[j]]

    @override
    def drop_copies(self) -> None:
        for j in (j for j in self._foreign if j not in self._shown):
            with self._stores[j].changing():
                self._leave(j)

    def _leave(self, j: int) -> None:
        for p, name in zip(self._stores[j].parameters, self._names[j], strict=True):
            _leave(p, name, self)

    # ------------------------------------------------------------------ what autograd saves

    @override
    def packing(self) -> AbstractContextManager[Any]:
        # graphs hold no parameters of other workers' stages
        return self._places.remembering()

    def _find(self, key: tuple[int, int]) -> Tensor:
        j, v = key
        if self._shown.get(j) != v:
            self._bring(j, v)
        return self._stores[j][v].data

    # ------------------------------------------------------------------ who reads what is absent

    def read(self, names: Sequence[str]) -> NoReturn:
        """Refuse that an absent parameter is read.

        Raises:
            StepError: with its stage and the rank that has it.
        """
        name = names[0]
        j = self._stage_of[name]
        raise StepError(
            f"{name!r} of stage {j} is read on rank {self._worker}, where it is not: rank "
            f"{self._owner_of(j)} has it, and others hold it only while they run its modules; "
            f"{_WHERE}"
        )

    def read_gradient(self, name: str) -> NoReturn:
        """Refuse that its gradient is read.

        Raises:
            StepError: with its stage and the rank that has it.
        """
        j = self._stage_of[name]
        raise StepError(
            f"the gradient of {name!r} of stage {j} is read on rank {self._worker}, where it is "
            f"not: rank {self._owner_of(j)} updates it; allowed: the gradients of "
            "strategy.updated_parameters, in on_before_optimizer_step; use the GradientNorms "
            "callback for norms over all stages"
        )


def refuse_block(worker: int, j: int, instead: str) -> NoReturn:
    """Refuse that a backward runs modules again before the turn of their stage.

    Args:
        instead: what could be used.

    Raises:
        StepError: with the stage.
    """
    raise StepError(
        f"a backward on rank {worker} runs a module of stage {j} again, while a later "
        "stage is not over: a checkpointed block reaches over the place where a stage begins; "
        "allowed: blocks within one stage; begin stages where blocks begin, "
        f"stages=[...], or use {instead}"
    )


def refuse_return(worker: int, j: int, instead: str) -> NoReturn:
    """Refuse that a module is called when its stage is over; see :func:`refuse_block`.

    Raises:
        StepError: with the stage.
    """
    raise StepError(
        f"rank {worker} calls a module of stage {j} again, when a later stage has begun "
        "and its parameters are gone; allowed: calls within one stage; let one stage have "
        f"all of them, stages=[...], or use {instead}"
    )


def shared_parameters(module: nn.Module) -> Collection[int]:
    seen: dict[int, int] = {}
    for m in module.modules():
        for p in set(m._parameters.values()) - {None}:
            seen[id(p)] = seen.get(id(p), 0) + 1
    return {key for key, count in seen.items() if count > 1}


def _leave(p: nn.Parameter, name: str, home: Home) -> None:
    p.data = without_memory(p)
    leave(p, name, home)
