"""The ways of validation, test and prediction through the stages, each found by its own survey.

as training         most steps do: nothing is added
another way         the stages begin at other calls: the step has a call router of its own
none                it is run whole, by every worker, with the weights of all stages fetched
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

from torch import nn

from lightning_cyclic.runtime.partial_step.call_router import CallRouter
from lightning_cyclic.runtime.stages.cuts import Cuts
from lightning_cyclic.runtime.stages.evidence import Survey
from lightning_cyclic.runtime.stages.other_way import cuts_along
from lightning_cyclic.runtime.stages.survey import survey

if TYPE_CHECKING:
    from lightning_cyclic.runtime.foreign_weights import ForeignWeights
    from lightning_cyclic.runtime.partial_step.collectives import Collectives

Waiting = Callable[[str], AbstractContextManager[None]]


@final
class Ways:
    """Find the way of each kind of step once, the same on every worker.

    Args:
        module: the whole module.
        collectives: of all workers.
        waiting: the context in which the others are waited for.
        say: tells the user what happens.
    """

    def __init__(
        self,
        module: nn.Module,
        collectives: Collectives,
        waiting: Waiting,
        say: Callable[[str], None],
    ) -> None:
        self._module = module
        self._collectives = collectives
        self._waiting = waiting
        self._say = say
        self._surveys: dict[str, Survey] = {}  # on rank 0, before there are stages
        self._found: dict[str, CallRouter | None] = {}

    def look(self, kind: str, step: Callable[[], Any]) -> None:
        """Survey a step while every worker still has the whole module."""
        if kind not in self._surveys and self._collectives.decides:
            self._surveys[kind] = survey(self._module, step)

    def goes_as_training(self, kind: str, router: CallRouter) -> None:
        """Note the kind of step by which the stages were found."""
        self._found[kind] = router

    def begin(self, router: CallRouter, foreign: ForeignWeights) -> None:
        """Find the ways of all steps that were looked at; all workers must call it."""

        def find() -> dict[str, Any]:
            return {kind: _data(seen, router.cuts) for kind, seen in self._surveys.items()}

        found = self._collectives.agree(find, self._waiting("to compare their steps"))
        for kind, data in found.items():
            self._take(kind, data, router, foreign)
        self._surveys.clear()

    def of(
        self, kind: str, step: Callable[[], Any], router: CallRouter, foreign: ForeignWeights
    ) -> CallRouter | None:
        """Return what routes the calls of a kind of step; None if it is run whole.

        All workers must call it. Without a survey from before training, rank 0 fetches what it
        needs for one.
        """
        if kind not in self._found:

            def find() -> Any:
                with foreign.present():
                    return _data(
                        survey(self._module, step, stateful=router.cuts.stateful), router.cuts
                    )

            data = self._collectives.agree(find, self._waiting(f"to begin {kind}"))
            self._take(kind, data, router, foreign)
        return self._found[kind]

    def _take(self, kind: str, data: Any, router: CallRouter, foreign: ForeignWeights) -> None:
        if data is None and self._collectives.is_alone:
            self._found[kind] = None
        elif data is None:
            self._found[kind] = None
            when = "once per evaluation" if foreign.fits else "as they are used"
            self._say(
                f"{kind} does not pass through the stages of training_step in their order: every "
                f"rank runs it whole, with the weights of all stages, which it fetches {when}."
            )
        else:
            cuts = Cuts.from_data(data)
            same = (cuts.starts, cuts.split) == (router.cuts.starts, router.cuts.split)
            self._found[kind] = router if same else CallRouter(self._module, cuts, router.device)


def _data(seen: Survey, cuts: Cuts) -> Any:
    along = cuts_along(seen, cuts)
    return None if along is None else along.as_data()
