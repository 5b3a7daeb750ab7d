"""MemoryTimeline: what memory is for, block by block, over some steps of a run.

each chosen step    a watch is on from on_train_batch_start to on_train_batch_end
end of training     a table; a file and a picture of each rank; measured over planned
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final, final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_cyclic.compat import (
    Callback,
    DDPStrategy,
    SingleDeviceStrategy,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_cyclic.errors import ConfigurationError, PlanError
from lightning_cyclic.runtime.compiled import is_compiled
from lightning_cyclic.runtime.memory_blocks import (
    ACTIVATIONS,
    GRADIENTS,
    INPUTS,
    KINDS,
    MESSAGES,
    OPTIMIZER,
    PARAMETERS,
    Block,
    Span,
    Timeline,
)
from lightning_cyclic.runtime.memory_watch import MemoryWatch
from lightning_cyclic.simulate import Memory, parse_bandwidth, show_bytes, show_seconds
from lightning_cyclic.viz import Row, save_memory

_DEVICES: Final = ("cpu", "cuda")
_WIDTH: Final = 100
# what is measured -> what a plan has of it
_PLANNED: Final[Mapping[tuple[str, ...], tuple[str, ...]]] = {
    (PARAMETERS,): ("parameters", "versions"),
    (GRADIENTS,): ("gradients", "in_flight"),
    (OPTIMIZER,): ("optimizer", "index"),
    (ACTIVATIONS,): ("activations",),
    (INPUTS, MESSAGES): ("inputs", "returns"),
}


@final
class MemoryTimeline(Callback):
    """Say what memory is for, block by block, over some steps, and how much more than planned.

    Steps are watched as they are: no bit of them changes, and nothing stays behind. They take
    longer, as each function of torch is noted; so do their times.

    Args:
        steps: which, as ``trainer.global_step`` counts them from 0 on. In the first one stages are
            looked for, and optimizers make their states; our strategies
            look at all weights once more in steps 1, 2, 4, 8 and so on, or behind these.
        out: folder for two files of each rank, ``rank0.json`` with everything, and ``rank0.png``
            with the bytes over the last of the steps. [none]
        bandwidth: between device and host, in each direction, by which blocks could be swapped.

    Attributes:
        timeline: blocks and steps of this rank, when training has ended.
        planned: what the plan says that this rank keeps; None where there is none.

    Raises:
        ConfigurationError: steps that are no counts; a device, strategy or compiled module that
            cannot be watched, or a second timeline in one Trainer.

    Source: Li et al., "Pinpointing the Memory Behaviors of DNN Training", ISPASS 2021, arXiv
        2104.00258.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> memory = MemoryTimeline(steps=(20, 21), out="memory")
        >>> trainer = Trainer(callbacks=[memory], accelerator="cpu", logger=False)
    """

    def __init__(
        self,
        steps: Sequence[int] = (10, 11, 12),
        out: str | Path | None = None,
        *,
        bandwidth: str = "12GB/s",
    ) -> None:
        if not steps or any(type(t) is not int or t < 0 for t in steps):
            raise ConfigurationError(
                f"steps={steps!r}; allowed: whole numbers from 0 on, at least one; use "
                "MemoryTimeline(steps=(10, 11, 12))"
            )
        self.timeline: Timeline | None = None
        self.planned: Memory | None = None
        self._steps = frozenset(steps)
        self._out = None if out is None else Path(out)
        self._bytes_per_s = parse_bandwidth(bandwidth)
        self._watch: MemoryWatch | None = None
        self._batch_bytes = 0
        self._title = ""

    # ------------------------------------------------------------------ steps

    @override
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        _refuse(trainer, pl_module)
        self._watch = MemoryWatch(trainer.strategy.root_device)

    @override
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        watch = self._watch
        if watch is None or trainer.global_step not in self._steps:
            return
        self._batch_bytes = _bytes_of(batch)
        watch.end()  # of a batch that a hook left out
        watch.begin(trainer.global_step, pl_module, trainer.optimizers, batch)

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._watch is not None:
            self._watch.end()

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.on_train_batch_end()  # of one that a hook left out, and the epoch with it

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave()

    @override
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    # ------------------------------------------------------------------ what was seen

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Compare with the plan, which all ranks do at this place; write, and print on rank 0."""
        if self._watch is None:
            return
        self.timeline = self._watch.timeline
        self._leave()
        strategy = trainer.strategy
        planned = getattr(strategy, "planned_memory", lambda batch_bytes: None)
        self.planned = planned(self._batch_bytes)
        name = getattr(strategy, "preset", type(strategy).__name__)
        self._title = (
            f"{type(pl_module).__name__}, {name}, rank {trainer.global_rank} of "
            f"{trainer.world_size}"
        )
        if not self.timeline.spans:
            rank_zero_warn(
                f"MemoryTimeline has seen none of steps {sorted(self._steps)}: training ended "
                f"behind step {trainer.global_step - 1}; name earlier ones, or train longer."
            )
            return
        if self._out is not None:
            self._write(self._out, trainer.global_rank)
        rank_zero_info(self.report())

    def measured(self) -> dict[str, tuple[int, float]]:
        """Return what was measured, at most in the last step, and planned, of what has a plan.

        States, and activations where they are planned, are compared at one moment, too, with the
        sum of what is planned.
        """
        assert self.timeline is not None
        if self.planned is None:
            return {}
        kept, found = asdict(self.planned), dict[str, tuple[int, float]]()
        each = self.timeline.bytes_at(self.timeline.spans[-1])
        for kinds, parts in _PLANNED.items():
            planned = sum(kept[part] for part in parts)
            found[" + ".join(kinds)] = _most(each, kinds), planned
        is_seen = found[ACTIVATIONS][1] > 0
        at_once = [PARAMETERS, GRADIENTS, OPTIMIZER, *[ACTIVATIONS] * is_seen]
        name = "states + activations" if is_seen else "states"
        found[name] = _most(each, at_once), sum(found[kind][1] for kind in at_once)
        return found

    def report(self) -> str:
        """Return the tables: of each step, and of what the last one's memory is for.

        Raises:
            ConfigurationError: no step has been watched.
        """
        if self.timeline is None or not self.timeline.spans:
            raise ConfigurationError(
                "MemoryTimeline.report() was asked for where no step has been watched; allowed: "
                "behind a fit that came to one of its steps; use it after trainer.fit(...)"
            )
        console = Console(width=_WIDTH, force_terminal=False, no_color=True, highlight=False)
        with console.capture() as capture:
            console.print(f"Memory of {self._title}", markup=False)
            console.print(_steps_table(self.timeline, self._bytes_per_s))
            console.print(_kinds_table(self.timeline), _pattern(self.timeline), markup=False)
            if self.planned is not None:
                console.print(_planned_table(self.measured()))
        return "\n".join(line.rstrip() for line in capture.get().strip("\n").splitlines())

    def _write(self, folder: Path, rank: int) -> None:
        assert self.timeline is not None
        folder.mkdir(parents=True, exist_ok=True)
        data = {
            "of": self._title,
            "planned": None if self.planned is None else asdict(self.planned),
            "measured_and_planned": self.measured(),
            **self.timeline.as_dict(self._bytes_per_s),
        }
        (folder / f"rank{rank}.json").write_text(json.dumps(data), encoding="utf-8")
        span = self.timeline.spans[-1]
        line = None if self.planned is None else (self.planned.total, "planned")
        row = Row("", self.timeline.bytes_at(span), line)
        title = f"{self._title}: step {span.step}"
        try:
            save_memory(folder / f"rank{rank}.png", title, [row], axis="functions of torch")
        except PlanError as error:  # there is no matplotlib; the other file has it all
            rank_zero_warn(str(error))


def _refuse(trainer: Any, module: Any) -> None:
    """Refuse what cannot be watched, by name.

    Raises:
        ConfigurationError: with what is allowed.
    """
    strategy, device = trainer.strategy, trainer.strategy.root_device
    if device.type not in _DEVICES:
        raise _not_watched(f"memory of {device.type!r}", f"{' and '.join(_DEVICES)} devices")
    if not isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
        raise _not_watched(
            f"training by {type(strategy).__name__}, which keeps weights, gradients or states "
            "where nobody else sees them",
            "one device, DDPStrategy, CyclicStrategy and PipelineStrategy",
        )
    compiled = next((path for path, m in module.named_modules() if is_compiled(m)), None)
    if compiled is not None:
        raise _not_watched(
            f"{compiled or type(module).__name__!r}, which torch.compile has compiled, and which "
            "would run uncompiled while it is watched",
            "modules that are not compiled",
        )
    if sum(isinstance(callback, MemoryTimeline) for callback in trainer.callbacks) > 1:
        raise _not_watched("one step by two of them", "one MemoryTimeline in a Trainer")


def _not_watched(what: str, allowed: str) -> ConfigurationError:
    return ConfigurationError(
        f"MemoryTimeline cannot watch {what}; allowed: {allowed}; remove it from callbacks="
    )


def _bytes_of(batch: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(batch) if isinstance(x, Tensor))


def _most(each: Mapping[str, Sequence[int]], kinds: Sequence[str]) -> int:
    return max(map(sum, zip(*(each[kind] for kind in kinds), strict=True)))


# ---------------------------------------------------------------------- tables


def _table(*names: str) -> Table:
    grid = Table(box=SIMPLE_HEAD)
    grid.add_column(names[0], no_wrap=True)
    for name in names[1:]:
        grid.add_column(name, justify="right", no_wrap=True)
    return grid


def _steps_table(timeline: Timeline, bytes_per_s: float) -> Table:
    has_allocator = any(span.allocated_bytes for span in timeline.spans)
    names = ["step", "functions", "time", "peak", "could be on the host", "leaves"]
    grid = _table(*names, *["given out"] * has_allocator)
    for span in timeline.spans:
        swap = timeline.swap(span, bytes_per_s)
        grid.add_row(
            str(span.step),
            str(span.end - span.begin),
            show_seconds((span.end_ns - span.begin_ns) / 1e9),
            show_bytes(timeline.peak(span).num_bytes),
            show_bytes(swap.num_bytes),
            show_bytes(swap.peak_bytes),
            *[show_bytes(span.allocated_bytes)] * has_allocator,
        )
    return grid


def _kinds_table(timeline: Timeline) -> Table:
    span = timeline.spans[-1]
    peak, most = timeline.peak(span), timeline.most(span)
    grid = _table(
        f"step {span.step}", "blocks", "at the peak", "at most", "lifetime", "interval", "longest"
    )
    for kind in KINDS:
        blocks = [x for x in timeline.blocks if x.kind == kind and _is_of(x, span)]
        if not blocks:
            continue
        lifetimes = [x.lifetime_s for x in blocks if x.lifetime_s is not None]
        intervals = [each for x in blocks for each in x.intervals_s]
        grid.add_row(
            kind, str(len(blocks)), show_bytes(peak.by_kind.get(kind, 0)), show_bytes(most[kind]),
            *_medians(lifetimes, intervals),
        )  # fmt: skip
    return grid


def _is_of(x: Block, span: Span) -> bool:
    return x.made <= span.end and (x.ended is None or x.ended > span.begin)


def _medians(lifetimes: Sequence[float], intervals: Sequence[float]) -> Iterator[str]:
    """Yield medians of lifetimes and of intervals, and the longest of these."""
    yield show_seconds(median(lifetimes)) if lifetimes else ""
    yield show_seconds(median(intervals)) if intervals else ""
    yield show_seconds(max(intervals)) if intervals else ""


def _pattern(timeline: Timeline) -> str:
    steady = timeline.steady
    if steady is None:
        return "No two of these steps make, use and free the same blocks.\n"
    step, period = steady
    every = "each step makes, uses and frees"
    if period > 1:
        every = f"every {period} steps make, use and free"
    return f"From step {step} on, {every} the same blocks.\n"


def _planned_table(measured: Mapping[str, tuple[int, float]]) -> Table:
    grid = _table("", "measured", "planned", "measured / planned")
    for name, (found, planned) in measured.items():
        ratio = f"{found / planned:.3f}" if planned else ""
        grid.add_row(name, show_bytes(found), show_bytes(planned) if planned else "", ratio)
    return grid
