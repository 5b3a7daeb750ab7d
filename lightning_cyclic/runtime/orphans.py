"""Orphans: ranks that torchrun has started end with its agent, also when that is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


def end_with_agent() -> None:
    """Ask the kernel for SIGTERM where torchrun's agent, the parent of this process, ends.

    An agent ends its ranks if it can, which it cannot when it is killed. Nothing is asked for
    where no agent has started this process: the shell of a user may well end before.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
