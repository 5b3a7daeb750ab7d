"""What rank 0 decides, told to all ranks: also why it could not."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_cyclic.errors import ConfigurationError, PeerError, PlanError
from lightning_cyclic.planner.search import NothingFitsError
from lightning_cyclic.runtime.agreement import gather_texts
from lightning_cyclic.runtime.failure_words import reason_of

_OF_ALL = (ConfigurationError, PlanError)  # which every rank raises


def told_by_rank_0(trainer: Trainer, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what rank 0 decides; all ranks must call it.

    Args:
        trainer: of this rank.
        decide: is called on rank 0; what it returns is plain data.

    Raises:
        PlanError: as on rank 0, as ConfigurationError is.
        PeerError: on the others, where rank 0 failed otherwise.
    """
    text, failure = "", None
    if trainer.is_global_zero:
        try:
            text = json.dumps(["", decide()])
        except Exception as error:  # the others wait for a word
            text, failure = json.dumps([type(error).__name__, _said(error)]), error
    if trainer.world_size > 1:
        text = gather_texts(text)[0]
    if failure is not None:
        raise failure
    kind, found = json.loads(text)
    if kind:
        errors = {e.__name__: e for e in _OF_ALL} | {NothingFitsError.__name__: PlanError}
        raise errors.get(kind, PeerError)(found)
    decided: dict[str, Any] = found
    return decided


def _said(error: Exception) -> str:
    """Return what all ranks are told of an error on rank 0; of some, as if it were theirs."""
    if isinstance(error, (*_OF_ALL, NothingFitsError)):
        return str(error)
    rank_0 = f"rank 0 on {socket.gethostname()}"
    return f"{rank_0} could not choose a plan: {reason_of(error)}. Look at the log of rank 0."
