"""The figures of a simulation as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lightning_cyclic.simulate.compare import Comparison, Figures
from lightning_cyclic.simulate.costs import Costs, Network
from lightning_cyclic.simulate.units import show_bytes, show_seconds

_WIDTH = 100
_MEMORY = {
    "parameters": "parameters",
    "versions": "further versions of them",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "inputs": "inputs of stages, and the batch",
    "returns": "gradients of outputs",
    "in_flight": "gradients in buffers of messages",
    "index": "places of kept elements",
}


def table(comparison: Comparison, *, colour: bool = False) -> str:
    """Print a plan beside lockstep data parallelism.

    Args:
        comparison: the figures.
        colour: use the colours of a terminal. [False: plain text]

    Returns:
        Lines of text, at first what is assumed of the cluster and of the model; a worker's
        figures are those of the worker with the most.
    """
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    grid = Table(box=SIMPLE_HEAD)
    grid.add_column("")
    grid.add_column(comparison.preset, justify="right", style="bold")
    grid.add_column("lockstep data parallelism", justify="right")
    ours, theirs = _rows(comparison.plan), _rows(comparison.lockstep)
    nothing = show_bytes(0)
    for (name, mine), (_, other) in zip(ours, theirs, strict=True):
        if not mine == other == nothing:
            grid.add_row(name, mine, other)
    grid.add_row("speed", f"{comparison.speed:.2f}x", "1.00x", style="green")
    console = Console(width=_WIDTH, force_terminal=colour, no_color=not colour, highlight=False)
    with console.capture() as capture:
        console.print(grid)
    rows = "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())
    reference = comparison.reference
    rows += (
        f"\nlockstep: {reference.all_reduce} all-reduce, {reference.num_buckets} "
        f"{'bucket' if reference.num_buckets == 1 else 'buckets'} per step"
    )
    title = _title(comparison)  # rich would wrap it to the width of the table
    return f"{title}\n{rows}"


def _title(comparison: Comparison) -> str:
    network = comparison.network
    cluster = f"{comparison.num_workers} workers, {comparison.num_stages} stages, {_link(network)}"
    if network.inside is not None:
        cluster += f"; on {len(set(network.hosts))} hosts, inside of them {_link(network.inside)}"
    return "\n".join([cluster, *_assumptions(comparison.costs)])


def _link(network: Network) -> str:
    return (
        f"{show_seconds(network.latency_s)} latency, {show_bytes(network.bandwidth_bytes_per_s)}/s"
    )


def _assumptions(costs: Costs) -> Iterator[str]:
    """Yield what is taken for given of the model, as nobody has measured it here."""
    forward_s, backward_s = sum(costs.forward_s), sum(costs.backward_s)
    cuts = costs.cut_bytes[1:]  # nothing enters stage 0 from another
    between = f"; {_each(cuts, show_bytes)} of activations per cut" if cuts else ""
    yield (
        f"assumed model: {show_bytes(sum(costs.param_bytes))} of parameters, "
        f"{_each(costs.param_bytes, show_bytes)} per stage{between}"
    )
    ratio = f" ({backward_s / forward_s:.3g} times as long)" if forward_s else ""
    yield (
        f"assumed compute: {show_seconds(forward_s + backward_s)} per micro-batch, "
        f"{show_seconds(forward_s)} forward and {show_seconds(backward_s)} backward{ratio}"
    )
    yield (
        f"    of a stage: {_each(costs.forward_s, show_seconds)} forward, "
        f"{_each(costs.backward_s, show_seconds)} backward, "
        f"{_each(costs.update_s, show_seconds)} per update"
    )


def _each(by_stage: Sequence[float], show: Callable[[float], str]) -> str:
    """Say how much it is of one stage: a number where all are alike, else from which to which."""
    least, most = show(min(by_stage)), show(max(by_stage))
    return least if least == most else f"{least} to {most}"


def _rows(figures: Figures) -> Iterator[tuple[str, str]]:
    """Yield the name of each row and its text."""
    yield "time per step", show_seconds(figures.step_s)
    yield "micro-batches per step", f"{figures.num_microbatches:g}"
    yield "micro-batches per second", f"{figures.micro_per_s:.4g}"
    yield "bubble", f"{figures.bubble:.1%}"
    yield "bytes sent per worker and step", show_bytes(figures.sent_bytes)
    yield "messages sent per worker and step", str(figures.sent_messages)
    yield "weight versions read", str(figures.versions)
    yield "stage-activations kept per worker", f"{figures.activations:g}"
    yield "stage-activations kept by all workers", f"{figures.all_activations:g}"
    yield "memory of the worker with the most", show_bytes(figures.memory.total)
    for kind, name in _MEMORY.items():
        yield f"    {name}", show_bytes(getattr(figures.memory, kind))
