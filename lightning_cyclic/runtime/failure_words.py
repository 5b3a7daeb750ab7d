"""Failure words: what ranks say of failures, and of messages that do not come.

One line with which a rank that fails tells the others why, the culprit first:

rank 3 on node7 (stage 1) failed in step 12: ValueError: its reason (train.py:57)
Look at the log of rank 3.
"""

from __future__ import annotations

import errno
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TypeAlias, final

import torch

from lightning_cyclic.errors import CyclicError, PeerError, WaitTimeoutError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action, Kind
from lightning_cyclic.plan.clock import rows_around, timetable_around
from lightning_cyclic.runtime.transport import AbstractPending, AbstractTransport
from lightning_cyclic.runtime.transport.crew import Names, look_at
from lightning_cyclic.simulate.units import show_bytes
from lightning_cyclic.viz.words import title

_MOST = 400  # characters of an error that is not our own: its log has the rest
_LIBRARIES = (
    f"{Path(__file__).parents[1]}{os.sep}",
    *(sysconfig.get_path(x) + os.sep for x in ("stdlib", "platstdlib", "purelib", "platlib")),
)
_NOT_TOLD = ("The arrow shows", "slot ", "Traceback (most recent call last)")


def words_of(error: BaseException, names: Names, when: str, todo: str = "") -> str:
    """Return what other ranks are told of an error on this one.

    What this rank met while it waited for others is told as it is: it failed by no fault of its.
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


_OF_DEVICE = ("CUDA error: out of memory", "HIP error: out of memory", "CUDA out of memory")
_OF_HOST = ("DefaultCPUAllocator", "Cannot allocate memory", "can't allocate memory")
_MOST_CAUSES = 10
_ASKED = re.compile(r"(?:tried|unable) to allocate (\d+(?:\.\d+)? ?(?:bytes|[KMGTPE]i?B))", re.I)


def lack_of_memory(error: BaseException) -> str:
    """Say of what memory a rank ran out, and how much it asked for; "" for any other error.

    Example:
        >>> lack_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. ..."))
        "out of the device's memory (asked for 2.00 GiB)"
        >>> lack_of_memory(MemoryError())
        "out of the host's memory"
        >>> lack_of_memory(RuntimeError("no memory of that"))
        ''
    """
    found = next(((e, where) for e in _chain(error) if (where := _memory_of(e))), None)
    if found is None:
        return ""
    asked = _ASKED.search(str(found[0]))
    much = f" (asked for {_shown(asked[1])})" if asked else ""
    return f"out of the {found[1]}'s memory{much}"


def relief(plan: Plan, remat: str) -> str:
    """Say what needs less memory under a plan.

    Args:
        plan: of the run.
        remat: what activation_checkpointing is.

    Example:
        >>> from lightning_cyclic import make_plan
        >>> relief(make_plan("cyclic_zero", num_stages=2, num_workers=2), "never")
        'To need less memory, use one of: smaller batches, with Trainer(accumulate_grad_batches=...); more ranks.'
    """  # noqa: E501  (as it is)
    again = ["a smaller memory_limit_bytes"] if remat == "optimal" else []
    if remat in ("never", "except_last", "offload"):
        again = ['activation_checkpointing="always"']
    shares = plan.axes.sharding.gathers
    limits = [] if remat == "optimal" else ["memory_limit_bytes=..., by which stages are cut"]
    ways = {
        "single": ["smaller batches", "a larger num_microbatches", *again],
        "shared": ["smaller batches", *again],
        "pipelined": [
            "smaller batches",
            *again,
            "more stages, each on a rank of its own",
            *limits,
        ],
        "replicated": [
            "smaller batches, with Trainer(accumulate_grad_batches=...)",
            "more ranks" if shares else 'preset="cyclic_zero", whose ranks share weights',
        ],
    }
    return f"To need less memory, use one of: {'; '.join(ways[plan.placement])}."


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes: what fails beside the compute is named by another."""
    at: BaseException | None = error
    for _ in range(_MOST_CAUSES):  # one may be its own
        if at is None:
            return
        yield at
        at = at.__cause__


def _memory_of(error: BaseException) -> str:
    text = str(error)
    if isinstance(
        error, CyclicError
    ):  # which may repeat what another rank says; its cause may not
        return ""
    if isinstance(error, torch.OutOfMemoryError) or any(words in text for words in _OF_DEVICE):
        return "device"
    is_of_host = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    return "host" if is_of_host or any(words in text for words in _OF_HOST) else ""


def _shown(asked: str) -> str:
    number, _, unit = asked.partition(" ")
    return show_bytes(int(number)) if unit == "bytes" else asked


Wait: TypeAlias = Callable[[AbstractPending, Action], None]


@final
class Waiter:
    """Wait for messages; of those that do not come, say from whom, what, and in which step.

    Args:
        when: step -> how to say it. ["in step 12"]
    """

    def __init__(
        self, plan: Plan, transport: AbstractTransport, when: Callable[[int], str] | None = None
    ) -> None:
        self._plan = plan
        self._transport = transport
        self._when = when or "in step {}".format

    def follow(self, plan: Plan) -> None:
        self._plan = plan

    def wait(self, pending: AbstractPending, action: Action) -> None:
        """Wait for a message of the program.

        Raises:
            WaitTimeoutError: it did not come in time.
            PeerError: another rank has failed, or its connection is gone.
        """
        try:
            pending.wait()
        except (TimeoutError, ConnectionError) as error:
            if isinstance(error, CyclicError):  # that of another wait, which has ended all
                raise
            raise self._named(action, error) from None

    def join(self, pending: AbstractPending, action: Action) -> None:
        """Let the current stream of the device wait for a message of the program.

        Raises:
            WaitTimeoutError: as :meth:`wait`, as PeerError is.
        """
        try:
            pending.join(partial(self._named, action))
        except (TimeoutError, ConnectionError) as error:
            if isinstance(error, CyclicError):
                raise
            raise self._named(action, error) from None

    def _named(self, action: Action, error: OSError) -> CyclicError:
        crew, (kind, peer) = self._transport.crew, (action.kind, action.peer)
        assert peer is not None
        theirs = replace(action, kind=Kind.RECV if kind is Kind.SEND else Kind.SEND)
        what = f"to {title(theirs)}, {self._when(action.t)}"
        failed = crew.failed(what, error, crew.names.rank_of(peer))
        drawn = "" if crew.failure() is not None else self._drawn(action)
        return type(failed)(f"{failed}{drawn}")

    def _drawn(self, action: Action) -> str:
        names, worker = self._transport.crew.names, self._transport.worker
        short, (moved, shift) = replace(self._plan, num_steps=4), self._drawable(action)
        note = f", drawn {shift} steps earlier, where the timetable is the same" if shift else ""
        rows = ", ".join(f"w{w} is rank {names.rank_of(w)}" for w in rows_around(short, worker))
        return (
            f"\nThe arrow shows the action, {action} in slot {action.s}{note}; {rows}:\n"
            f"{timetable_around(short, moved, worker)}"
        )

    def _drawable(self, action: Action) -> tuple[Action, int]:
        """Move an action of a late step into the first steps, where a short plan has it."""
        shift = max(action.t - 2, 0)
        v = None if action.v is None else action.v - shift
        slot = action.s - self._plan.axes.schedule.slot(shift, 0)
        return replace(action, t=action.t - shift, v=v, s=slot), shift
