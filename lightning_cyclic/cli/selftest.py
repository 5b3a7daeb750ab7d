"""The self-test: whether every preset trains to the right bits on the devices that there are.

    lightning-cyclic selftest
    lightning-cyclic selftest --accelerator cpu --devices 4 --preset 1f1b
    lightning-cyclic selftest --devices 2 --backend nccl      over NCCL, also on one GPU

Each preset is trained by several processes, and by one that runs the whole plan by itself; all
weights have to be the same, bit by bit. What one process trains synchronously is compared with
Lightning alone. Only arguments and the table are known here, so that the command line starts
without torch; a trial is in :mod:`lightning_cyclic.cli.trial`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_cyclic.errors import PlanError, one_of
from lightning_cyclic.plan import PRESETS
from lightning_cyclic.plan.presets import WEIGHTS

if TYPE_CHECKING:
    from lightning_cyclic.cli.trial import Ended, Trial
    from lightning_cyclic.runtime.transport.shared_gpus import Nccl

_ROUTES = ("auto", "named", "edges", "host_staged")
_PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")
_SAID = {
    "": "none",
    "named": "by name",
    "edges": "by channel",
    "host_staged": "through the host",
}
_ROW = "{:<17}{:>7}  {:<17}{:>6}  {:<15}{:<11}{:>8}"


class Place(NamedTuple):
    """Say where trials run.

    Args:
        accelerator: "cpu" or "gpu".
        backend: of their process group. [Lightning's choice]
        hint: a line on what would let them take another one.
    """

    accelerator: str
    devices: tuple[int, ...]
    num_workers: int
    backend: str | None
    hint: str = ""


def add_selftest(commands: Any) -> None:
    parser = commands.add_parser(
        "selftest",
        help="train every preset on your devices, and compare bits",
        description="Train a small module by every preset: one process per GPU; with one GPU two "
        "that share it, over NCCL where that lets them; with none two on the CPU. The weights are "
        "compared, bit by bit, with those of one process. Exit status 1 if any differ, or a "
        "trial fails.",
        epilog="example: lightning-cyclic selftest --accelerator cpu --devices 4",
    )
    add = parser.add_argument
    add("--devices", type=int, metavar="N", help="number of workers; more than there are GPUs "
        "share them (default: as many as GPUs, at least 2)")  # fmt: skip
    add("--accelerator", choices=("auto", "cpu", "gpu"), default="auto",
        help="(default: GPUs where there are any)")  # fmt: skip
    add("--preset", action="append", default=[], metavar="PRESET", help="try this one only; may "
        "be repeated (default: all)")  # fmt: skip
    add("--backend", choices=("nccl", "gloo"), help="by which processes on GPUs talk (default: "
        "NCCL, but gloo where some share a GPU that NCCL does not let them share)")  # fmt: skip
    add("--transport", choices=_ROUTES, default="auto", help="how messages travel (default: what "
        "strategies choose)")  # fmt: skip
    add("--precision", choices=_PRECISIONS, default=_PRECISIONS[0],
        help="of the Trainer (default: 32-true)")  # fmt: skip
    add("--limit-s", type=float, default=120.0, metavar="S", help="when it has passed a trial is "
        "ended, in seconds (default: 120)")  # fmt: skip
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    from lightning_cyclic.cli.trial import run  # noqa: PLC0415

    presets = presets_of(arguments.preset)
    place = _place(arguments.accelerator, arguments.devices, arguments.backend)
    print(_headline(place), flush=True)
    columns = ("preset", "workers", "messages", "steps", "compared with", "weights", "seconds")
    print(_ROW.format(*columns), flush=True)
    folder, bad = Path(tempfile.mkdtemp(prefix="lightning_cyclic-")), 0
    ended: dict[Trial, Ended] = {}
    trials = _trials(presets, place, arguments.transport)
    for given, expected in (
        (replace(x, precision=arguments.precision) for x in pair) for pair in trials
    ):
        for trial in (expected, given):
            if trial not in ended:
                logs = folder / f"{len(ended)}-{trial.preset or 'lightning'}-{trial.num_workers}"
                logs.mkdir()
                ended[trial] = run(trial, logs, arguments.limit_s)
        verdict, detail = _verdict(ended[given], ended[expected])
        bad += verdict != "equal"
        print(_row(given, expected, ended[given], verdict), flush=True)
        if detail:
            print(f"    {detail}", flush=True)
    if bad:
        return f"{bad} not equal; what the workers wrote lies in {folder}", 1
    shutil.rmtree(folder)
    return "all equal", 0


def presets_of(given: Sequence[str]) -> list[str]:
    """Return the presets that are tried: those that were named, or all that one process runs."""
    tried = [name for name, preset in PRESETS.items() if not WEIGHTS[preset.weights].is_local]
    for name in given:
        if name not in tried:
            raise PlanError(one_of(name, tried, "--preset", "leave it out to try all"))
    return list(dict.fromkeys(given or tried))


def _place(accelerator: str, num_workers: int | None, backend: str | None = None) -> Place:
    from torch import cuda  # noqa: PLC0415

    num_gpus = 0 if accelerator == "cpu" else cuda.device_count()
    if accelerator == "gpu" and num_gpus == 0:
        raise PlanError(
            "--accelerator gpu was given, but torch sees no GPU; allowed: auto or cpu here; "
            "look at nvidia-smi, and at torch.version.cuda"
        )
    size = max(2, num_gpus) if num_workers is None else num_workers
    if size < 2:
        raise PlanError(f"--devices {size} leaves nothing to compare; allowed: 2 or more")
    if not num_gpus:
        if backend == "nccl":
            raise PlanError(
                "--backend nccl was given without a GPU; allowed: gloo on the CPU; leave it out"
            )
        return Place("cpu", (), size, None)
    devices = tuple(w % num_gpus for w in range(size))
    if size <= num_gpus:
        return Place("gpu", devices, size, backend)
    from lightning_cyclic.runtime.transport.shared_gpus import loaded_nccl  # noqa: PLC0415

    return Place("gpu", devices, size, *_sharing(backend, loaded_nccl()))


def _sharing(backend: str | None, nccl: Nccl) -> tuple[str, str]:
    """Return by which backend workers talk that share GPUs, and what would let them use NCCL."""
    if backend == "gloo":
        return "gloo", ""
    if not nccl.missing:
        return "nccl", ""
    if backend == "nccl":
        raise PlanError(
            f"--backend nccl was given where workers share a GPU, {nccl.refuses}; allowed: a GPU "
            f"for each worker (--devices), or gloo; {nccl.missing}, or use --backend gloo"
        )
    hint = f"; they share a GPU, {nccl.refuses}: to try NCCL {nccl.missing}"
    return "gloo", hint


def _headline(place: Place) -> str:
    if place.accelerator == "cpu":
        return f"{place.num_workers} workers on the CPU"
    from torch import cuda  # noqa: PLC0415

    names = dict.fromkeys(cuda.get_device_name(device) for device in place.devices)
    num_gpus = len(set(place.devices))
    where = f"{place.num_workers} workers on {num_gpus} x {', '.join(names)}"
    if place.num_workers == num_gpus and place.backend is None:
        return where
    return f"{where}, {'through the host' if place.backend == 'gloo' else 'over NCCL'}{place.hint}"


def _trials(presets: Sequence[str], place: Place, transport: str) -> Iterator[tuple[Trial, Trial]]:
    """Yield what is tried, and what it is compared with."""
    from lightning_cyclic.cli.trial import Trial  # noqa: PLC0415

    for preset in presets:
        many = Trial(
            preset=preset,
            num_workers=place.num_workers,
            size=place.num_workers,
            is_cut=PRESETS[preset].placement != "replicated",
            accelerator=place.accelerator,
            devices=place.devices,
            backend=place.backend,
            route=transport,  # type: ignore[arg-type]  # argparse knows its choices
        )
        one = replace(many, num_workers=1, devices=place.devices[:1], backend=None, route="auto")
        if PRESETS[preset].weights == "sync":
            yield one, replace(one, preset="")
        yield many, one


def _verdict(given: Ended, expected: Ended) -> tuple[str, str]:
    """Return a word on a trial, and what is to be said besides."""
    for ended, whose in ((given, ""), (expected, "what it is compared with: ")):
        if ended.error:
            return "failed", f"{whose}{ended.error}"
    right = expected.came[0].weights
    for rank, came in enumerate(given.came):
        wrong = [name for name, digest in right.items() if came.weights.get(name) != digest]
        if wrong:
            count = f"{len(wrong)} of {len(right)} tensors"
            return "different", f"on rank {rank}: {count}, the first is {wrong[0]}"
    return "equal", ""


def _row(given: Trial, expected: Trial, ended: Ended, verdict: str) -> str:
    came = ended.came[0] if ended.came else None
    other = "one process" if expected.preset else "Lightning"
    route, steps = ("?", "?") if came is None else (_SAID[came.route], came.steps)
    if given.num_workers == 1:
        route = "none"
    return _ROW.format(
        given.preset, given.num_workers, route, steps, other, verdict, f"{ended.seconds:.1f}"
    )
