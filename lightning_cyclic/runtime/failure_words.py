"""Failure words: one line with which a rank that fails tells the others why, the culprit first.

    rank 3 on node7 (stage 1) failed in step 12: ValueError: its reason (train.py:57)
    Look at the log of rank 3.

So they lie on the failure board: the line, and behind it what to do. Who reads them stops, too:

    rank 3 on node7 (stage 1) failed in step 12: ValueError: its reason (train.py:57); this
    rank (0) stopped because of it. Look at the log of rank 3.                   (in one line)
"""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

from lightning_cyclic.errors import CyclicError, PeerError, WaitTimeoutError
from lightning_cyclic.runtime.memory_words import lack_of_memory
from lightning_cyclic.runtime.transport.names import Names

LATE = "it did not come in time"
_MOST = 400  # characters of an error that is not our own: its log has the rest
_LIBRARIES = (
    f"{Path(__file__).parents[1]}{os.sep}",
    *(sysconfig.get_path(x) + os.sep for x in ("stdlib", "platstdlib", "purelib", "platlib")),
)
_FRAME = re.compile(r'  File "(.+)", line (\d+), in ')  # as a traceback in text has it
_IN_LOADER = re.compile(r"Caught \w+ in DataLoader worker process \d+\.\nOriginal Traceback")
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
    what = f"{names.own} failed {when}: {reason_of(error)}"
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
    lack = lack_of_memory(error)
    if not isinstance(error, CyclicError):
        kind, said, place = _kind_said_and_place(error)
        said = said if len(said) <= _MOST else said[:_MOST] + " ..."
        return ": ".join(filter(None, (lack, kind, said))) + place
    lines = takewhile(lambda line: not line.startswith(_NOT_TOLD), str(error).splitlines())
    said = " ".join(line.strip() for line in lines if line.strip())
    return ": ".join(filter(None, (lack, type(error).__name__, said)))


def _kind_said_and_place(error: BaseException) -> tuple[str, str, str]:
    """Return the name of an error, its first line, and the user's line, as " (train.py:57)"."""
    kind, text = type(error).__name__, str(error).strip()
    frames = [(f.f_code.co_filename, n) for f, n in traceback.walk_tb(error.__traceback__)]
    if _IN_LOADER.match(text):  # of another kind, where that cannot be made of a message
        found = [*_FRAME.finditer(text)]
        frames = [(m[1], int(m[2])) for m in found]
        behind = text[found[-1].end() :].splitlines()[1:] if found else []
        last = next((x for x in behind if not x.startswith(" ")), "")
        name, _, text = last.partition(": ")
        kind = name.rpartition(".")[2] or kind
    users = [(file, line) for file, line in frames if _is_the_users(file)]
    place = "".join(f" ({Path(file).name}:{line})" for file, line in users[-1:])
    return kind, next(iter(text.splitlines()), ""), place


def _is_the_users(file: str) -> bool:
    """Say whether code is of no library, nor made by one ("<string>", "<eval_with_key>.3")."""
    return not file.startswith((*_LIBRARIES, "<"))


def heard(words: str, names: Names, waited_for: str = "", todo: str = "") -> str:
    """Return with what a rank stops that has read the words of another one.

    Args:
        words: that it has read.
        names: of the ranks.
        waited_for: the name of whom this rank waited for itself, if anybody.
        todo: where to look for that.

    Example:
        >>> heard("rank 3 failed in step 12: it is broken." + chr(10) + "Look there.", Names(0))
        'rank 3 failed in step 12: it is broken; this rank (0) stopped because of it. Look there.'
    """
    said, _, to_do = words.partition("\n")
    because = f"this rank ({names.rank}) stopped because of it"
    said = said.rstrip(".")
    if waited_for and said.endswith(LATE):  # whoever is waited for may wait itself
        because, to_do = f"{because}, and waited itself for {waited_for}", todo
    return f"{said}; {because}. {to_do}".rstrip()


def look_at(ranks: Iterable[int]) -> str:
    """Say whose log has more.

    Example:
        >>> look_at([2]), look_at([1, 3]), look_at([])
        ('Look at the log of rank 2.', 'Look at the logs of ranks 1, 3.', 'Look at all logs.')
    """
    each = sorted(ranks)
    if not each:
        return "Look at all logs."
    several = len(each) > 1
    numbers = ", ".join(map(str, each))
    return f"Look at the log{'s' * several} of rank{'s' * several} {numbers}."
