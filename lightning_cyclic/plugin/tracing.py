"""Tracing: the files of ``CyclicStrategy(trace=DIR)``.

    DIR/rank0.json, rank1.json, ...   what each rank did, written while it trains
    DIR/all.json                      those that rank 0 sees at the end, and the plan above them

A rank's file ends when the fit does, also by an error; of a rank that is killed it ends with the
last events that were written. Each is a list of events, so that files can be put together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import final
from warnings import warn

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plan import Plan
from lightning_cyclic.runtime.agreement import gather_texts
from lightning_cyclic.runtime.recorder import Recorder
from lightning_cyclic.viz.trace_events import BEGIN, END, SEPARATOR, lines, planned

_MOST_PLANNED = 20  # steps of the plan that are shown; the others look like the last of them


def checked_trace(trace: object) -> Path | None:
    """Return the folder of a trace.

    Raises:
        ConfigurationError: neither a path nor None.
    """
    if trace is None or (isinstance(trace, str | Path) and str(trace)):
        return None if trace is None else Path(trace)
    raise ConfigurationError(
        f"trace={trace!r} is no folder; allowed: a path, or None for no trace; use "
        'CyclicStrategy(trace="trace")'
    )


@final
class Tracing:
    """Write the trace of one fit; all ranks must make one.

    Args:
        folder: of the files; made if it is not there.
        rank: of this process.
        num_ranks: how many there are.
        worker: that this rank is.

    Raises:
        ConfigurationError: on every rank, where one of them cannot write its file.
    """

    def __init__(self, folder: Path, rank: int, num_ranks: int, worker: int) -> None:
        self._folder = folder
        self._rank = rank
        self._num_ranks = num_ranks
        self._problem_is_said = False
        told = _all_texts(f"{time.time_ns()} {self._problem_with_folder()}", num_ranks)
        began, problems = zip(*(text.split(" ", 1) for text in told), strict=True)
        for r, problem in enumerate(problems):
            if problem:
                raise ConfigurationError(
                    f"trace={str(folder)!r} cannot be written on rank {r} ({problem}); allowed: a "
                    "folder that every rank can make, and write into; check the path, or leave "
                    "trace out"
                )
        title = f"worker {worker}, as it ran on rank {rank}"
        self.recorder = Recorder(self._path(rank), worker, title, min(map(int, began)))

    def save(self) -> None:
        """End the file of this rank."""
        self.recorder.close()
        problem = self.recorder.problem
        if problem is not None and not self._problem_is_said:
            self._problem_is_said = True
            # by the rank itself: only its disk is full
            warn(f"The trace of rank {self._rank} is not complete: {problem}", stacklevel=2)

    def join(self, plan: Plan | None) -> None:
        """Put the files of all ranks together, on rank 0, with what was planned.

        Args:
            plan: of the run; None where a fit ended before there was one.
        """
        if self._rank != 0:
            return
        try:
            with (self._folder / "all.json").open("w", encoding="utf-8") as file:
                events = chain(self._planned(plan), *map(self._lines_of, range(self._num_ranks)))
                file.write(BEGIN + SEPARATOR.join(events) + END)
        except OSError as error:
            rank_zero_warn(f"The traces of all ranks could not be put together: {error}")

    def _planned(self, plan: Plan | None) -> Iterator[str]:
        recorder, slot_us = self.recorder, self.recorder.slot_us
        if plan is None or recorder.first is None:
            return iter(())
        a, began_us = recorder.first
        slots = a.s - plan.axes.schedule.slot(a.t, 0)  # of its step that come before it
        num_steps = min(recorder.num_steps, _MOST_PLANNED)
        return lines(planned(plan, num_steps, slot_us, began_us - slots * slot_us))

    def _lines_of(self, rank: int) -> Iterator[str]:
        """Yield the events of a file that may still be written, or have been left so."""
        path = self._path(rank)
        if not path.exists():  # its folder is on another machine
            return
        with path.open(encoding="utf-8") as file:
            for line in file:
                event = line.rstrip().removesuffix(",")
                if event.startswith("{") and event.endswith("}"):
                    yield event

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.json"

    def _problem_with_folder(self) -> str:
        """Say why the file of this rank cannot be written; nothing if it can."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path(self._rank).write_text("")
        except OSError as error:
            return error.strerror or str(error)
        return ""


def _all_texts(text: str, num_ranks: int) -> list[str]:
    is_alone = num_ranks == 1 or not torch.distributed.is_initialized()
    return [text] if is_alone else gather_texts(text)
