"""The figures of a simulation as a table."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_cyclic.simulate.compare import Comparison, Figures
from lightning_cyclic.simulate.units import show_bytes, show_seconds

_WIDTH = 100


def table(comparison: Comparison, *, colour: bool = False) -> str:
    """Print a plan beside lockstep data parallelism.

    Args:
        comparison: the figures.
        colour: use the colours of a terminal. [False: plain text]

    Returns:
        Lines of text; a worker's figures are those of the worker with the most.
    """
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    grid = Table(box=SIMPLE_HEAD, title=_title(comparison), title_justify="left")
    grid.add_column("")
    grid.add_column(comparison.preset, justify="right", style="bold")
    grid.add_column("lockstep data parallelism", justify="right")
    ours, theirs = _rows(comparison.plan), _rows(comparison.lockstep)
    for (name, mine), (_, other) in zip(ours, theirs, strict=True):
        grid.add_row(name, mine, other)
    grid.add_row("speed", f"{comparison.speed:.2f}x", "1.00x", style="green")
    console = Console(width=_WIDTH, force_terminal=colour, no_color=not colour, highlight=False)
    with console.capture() as capture:
        console.print(grid)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


def _title(comparison: Comparison) -> str:
    network = comparison.network
    return (
        f"{comparison.num_workers} workers, {comparison.num_stages} stages, "
        f"{show_seconds(network.latency_s)} latency, "
        f"{show_bytes(network.bandwidth_bytes_per_s)}/s"
    )


def _rows(figures: Figures) -> Iterator[tuple[str, str]]:
    """Yield the name of each row and its text."""
    yield "time per step", show_seconds(figures.step_s)
    yield "micro-batches per step", f"{figures.num_micro:g}"
    yield "micro-batches per second", f"{figures.micro_per_s:.4g}"
    yield "bubble", f"{figures.bubble:.1%}"
    yield "bytes sent per worker and step", show_bytes(figures.sent_bytes)
    yield "messages sent per worker and step", str(figures.sent_messages)
    yield "weight versions kept", str(figures.versions)
    yield "parameter bytes kept per worker", show_bytes(figures.param_bytes)
    yield "stage-activations kept per worker", f"{figures.activations:g}"
    yield "stage-activations kept by all workers", f"{figures.all_activations:g}"
