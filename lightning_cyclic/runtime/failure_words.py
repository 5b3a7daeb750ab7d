"""Failure words: one line with which a rank that fails tells the others why, the culprit first.

rank 3 on node7 (stage 1) failed in step 12: ValueError: its reason (train.py:57)
Look at the log of rank 3.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from itertools import takewhile
from pathlib import Path

from lightning_cyclic.errors import CyclicError, PeerError, WaitTimeoutError
from lightning_cyclic.runtime.memory_words import lack_of_memory
from lightning_cyclic.runtime.transport.crew import Names, look_at

_MOST = 400  # characters of an error that is not our own: its log has the rest
_LIBRARIES = (
    f"{Path(__file__).parents[1]}{os.sep}",
    *(sysconfig.get_path(x) + os.sep for x in ("stdlib", "platstdlib", "purelib", "platlib")),
)
_NOT_TOLD = ("The arrow shows", "slot ", "Traceback (most recent call last)")


def words_of(error: BaseException, names: Names, when: str, todo: str = "") -> str:
    """Return what other ranks are told of an error on this one.

    What this rank met while it waited for others is told as it is: it failed by no fault of its.

    Args:
        error: with which this rank ends.
        names: of the ranks.
        when: it came, as "in step 12".
        todo: what else to do than to look at its log.
    """
    if isinstance(error, PeerError | WaitTimeoutError):
        first, todo, *_ = [*str(error).splitlines(), ""]
        return f"{first}\n{todo}"
    what = f"{names.of(names.rank)} failed {when}: {reason_of(error)}"
    return f"{what}\n{look_at([names.rank])} {todo}".rstrip()


def reason_of(error: BaseException) -> str:
    """Put an error on one line: all that it says if it is our own, but for the timetable.

    Where memory was lacking it says so first, as allocators say it in many ways. Of others it has
    the line of the user's that was at work.

    Example:
        >>> reason_of(ZeroDivisionError("the batch is broken" + chr(10) + "in its third row"))
        'ZeroDivisionError: the batch is broken'
        >>> reason_of(MemoryError())
        "out of the host's memory: MemoryError"
    """
    lack, kind, lines, place = lack_of_memory(error), type(error).__name__, str(error), ""
    if isinstance(error, CyclicError):
        told = takewhile(lambda line: not line.startswith(_NOT_TOLD), lines.splitlines())
        said = " ".join(line.strip() for line in told if line.strip())
    else:
        frames = [(f.f_code.co_filename, n) for f, n in traceback.walk_tb(error.__traceback__)]
        users = [x for x in frames if not x[0].startswith((*_LIBRARIES, "<"))]
        place = "".join(f" ({Path(file).name}:{line})" for file, line in users[-1:])
        if "\nOriginal Traceback" in lines:  # of a loader's worker, whose last line is the reason
            kind, place, lines = "", "", lines.strip().splitlines()[-1]
        said = next(iter(lines.strip().splitlines()), "")
        said = said if len(said) <= _MOST else said[:_MOST] + " ..."
    return ": ".join(filter(None, (lack, kind, said))) + place
