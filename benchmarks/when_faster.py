"""Where data parallelism around a ring is predicted to be faster than lockstep: a map.

    python benchmarks/when_faster.py --out when_faster.csv
    python benchmarks/when_faster.py --from when_faster.csv --pictures docs/images
    python benchmarks/when_faster.py --out hosts.csv --per-host 8 --workers 16 64 256

For each number of workers, latency, bandwidth, size of the model and step time the planner
chooses stages, slack, sharding and, on hosts of several workers, groups; or lockstep,
whose all-reduce and buckets are the best there are. Inside hosts links are those that
`lightning-cyclic simulate` takes. Predictions of the simulator; what it leaves out stands in
docs/simulator.md.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from lightning_cyclic.planner import RingChoices, choose_data_parallel
from lightning_cyclic.planner.candidates import INSIDE_BANDWIDTH, INSIDE_LATENCY
from lightning_cyclic.simulate import (
    Costs,
    Network,
    parse_bandwidth,
    parse_seconds,
    show_bytes,
    show_seconds,
)

WORKERS = (8, 16, 64, 256, 1024)
BANDWIDTHS = (1.25e8, 1.25e9, 1.25e10)  # 1, 10, 100 Gbit/s
LATENCIES_S = (5e-6, 50e-6, 1e-3, 1e-2)
MODEL_BYTES = (1e7, 1e8, 1e9, 1e10)
MOST_STAGES = 64  # that a module can be cut into: of a transformer, two per block
CLEARLY = 1.2
INSIDE = Network(
    latency_s=parse_seconds(INSIDE_LATENCY),
    bandwidth_bytes_per_s=parse_bandwidth(INSIDE_BANDWIDTH),
)


def main() -> None:
    """Make the map, or pictures of one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to write the map to")
    parser.add_argument("--from", dest="source", type=Path, help="file to read a map from")
    parser.add_argument("--pictures", type=Path, help="folder for pictures of it")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--sizes", type=float, nargs="+", default=MODEL_BYTES)
    parser.add_argument("--per-host", type=int, default=1, help="workers of a host")
    parser.add_argument("--step-s", type=float, nargs="+", default=[0.1])
    arguments = parser.parse_args()
    if arguments.out is not None:
        places = product(
            arguments.step_s, arguments.workers, arguments.sizes, BANDWIDTHS, LATENCIES_S
        )
        write(arguments.out, places, arguments.per_host)
    source = arguments.source or arguments.out
    rows = read(source)
    print("\n".join(summary(rows)))
    if arguments.pictures is not None:
        for step_s in sorted({row["step_s"] for row in rows}):
            draw([r for r in rows if r["step_s"] == step_s], step_s, arguments.pictures)


def write(path: Path, places: Iterator[tuple[Any, ...]], per_host: int) -> None:
    """Write a row for each place of the map, as soon as it is known."""
    with path.open("w", newline="") as file:
        writer: csv.DictWriter[str] | None = None
        for step_s, num_workers, model_bytes, bandwidth, latency_s in places:
            network = Network(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)
            if per_host > 1:
                hosts = tuple(w // per_host for w in range(num_workers))
                network = replace(network, hosts=hosts, inside=INSIDE)
            found = row(step_s, num_workers, model_bytes, network)
            if writer is None:
                writer = csv.DictWriter(file, list(found))
                writer.writeheader()
            writer.writerow(found)
            file.flush()


def row(step_s: float, num_workers: int, model_bytes: float, network: Network) -> dict[str, Any]:
    """Return what is chosen at one place."""
    cut = partial(Costs.even, compute_s=step_s, model_bytes=model_bytes)
    choices = RingChoices(most_stages=MOST_STAGES)
    found = choose_data_parallel(cut, network, num_workers, choices)
    numbers = None if found.ring is None else found.ring.numbers
    return {
        "step_s": step_s,
        "num_workers": num_workers,
        "model_bytes": model_bytes,
        "bandwidth_bytes_per_s": network.bandwidth_bytes_per_s,
        "latency_s": network.latency_s,
        "lockstep_s": found.lockstep.step_s,
        "all_reduce": found.lockstep.all_reduce,
        "chosen_s": found.step_s,
        "speed": found.speed,
        "preset": "ddp" if numbers is None else numbers.preset,
        "stages": "" if numbers is None else numbers.num_stages,
        "slack": "" if numbers is None else numbers.slack,
        "sharding": "" if numbers is None else numbers.sharding,
        "groups": "" if numbers is None else num_workers // numbers.group_size,
    }


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a map."""
    words = {"all_reduce", "preset", "stages", "slack", "sharding", "groups"}
    with path.open(newline="") as file:
        return [
            {name: value if name in words else float(value) for name, value in found.items()}
            for found in csv.DictReader(file)
        ]


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the figures of a map, as a table in Markdown."""
    yield "| step | workers | places | least | above 1 | above 1.2 | most |"
    yield "|---:|---:|---:|---:|---:|---:|---:|"
    for step_s in sorted({r["step_s"] for r in rows}):
        at = [r for r in rows if r["step_s"] == step_s]
        for n in [*sorted({r["num_workers"] for r in at}), None]:
            speeds = [r["speed"] for r in at if n in (r["num_workers"], None)]
            yield (
                f"| {show_seconds(step_s)} | {'all' if n is None else int(n)} | {len(speeds)} "
                f"| {min(speeds):.2f} | {_share(speeds, 1.0)} | {_share(speeds, CLEARLY)} "
                f"| {max(speeds):.2f} |"
            )


def _share(speeds: list[float], least: float) -> str:
    return f"{sum(speed > least for speed in speeds) / len(speeds):.0%}"


def draw(rows: list[dict[str, Any]], step_s: float, folder: Path) -> None:
    """Draw a map: by workers and size of the model, each with all networks."""
    from matplotlib import colormaps
    from matplotlib.colors import BoundaryNorm
    from matplotlib.figure import Figure

    workers = sorted({r["num_workers"] for r in rows})
    sizes = sorted({r["model_bytes"] for r in rows})
    bandwidths = sorted({r["bandwidth_bytes_per_s"] for r in rows})
    latencies = sorted({r["latency_s"] for r in rows})
    bounds = [1.0, 1.000001, 1.1, 1.2, 1.5, 2.0, 3.0]
    norm, colours = BoundaryNorm(bounds, 256, extend="max"), colormaps["YlGnBu"]
    figure = Figure(figsize=(2.3 * len(sizes) + 1.2, 1.75 * len(workers) + 1.3))
    grid = figure.subplots(len(workers), len(sizes), sharex=True, sharey=True, squeeze=False)
    speeds = {tuple(r[k] for k in _KEYS): r["speed"] for r in rows}
    for (y, n), (x, size) in product(enumerate(workers), enumerate(sizes)):
        axes = grid[y][x]
        cells = [[speeds[n, size, b, s] for s in latencies] for b in bandwidths]
        axes.imshow(cells, norm=norm, cmap=colours, origin="lower", aspect="auto")
        for (r, line), c in product(enumerate(cells), range(len(latencies))):
            text = "DDP" if line[c] == 1.0 else f"{line[c]:.2f}"
            axes.text(
                c, r, text, ha="center", va="center", fontsize=8,
                color="white" if line[c] >= 2.0 else "#57606a" if line[c] == 1.0 else "black",
            )  # fmt: skip
        axes.set_xticks(range(len(latencies)), [show_seconds(s) for s in latencies], fontsize=8)
        gbits = [f"{8 * b / 1e9:g} Gbit/s" for b in bandwidths]
        axes.set_yticks(range(len(bandwidths)), gbits, fontsize=8)
        axes.tick_params(length=0)
        if y == 0:
            axes.set_title(f"{show_bytes(size)} of parameters", fontsize=9)
        if x == 0:
            axes.set_ylabel(f"{int(n)} workers", fontsize=9)
        if y == len(workers) - 1:
            axes.set_xlabel("latency", fontsize=8)
    title = f"Speed against DDP at its best; {show_seconds(step_s)} of compute per step"
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(folder / f"when_faster_{round(1000 * step_s)}ms.png", dpi=110)


_KEYS = ("num_workers", "model_bytes", "bandwidth_bytes_per_s", "latency_s")

if __name__ == "__main__":
    main()
