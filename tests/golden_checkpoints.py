"""Checkpoints in the middle of an epoch, as they were written before the redesign of the runtime.

``python -m tests.golden_checkpoints`` wrote those under tests/golden/before, at the last
commit before it (0.1.0 with a script, a stream and two message layers in place of one program).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from tests import processes
from tests.corpus import Classifier, MicroBatches, Resumable, loader, make_trainer, outcome
from tests.processes import here

FOLDER = Path(__file__).parent / "golden" / "before"
NUM_STEPS, SAVED_AT = 8, 5
STARTS = ["net.3", "net.6", "net.9"]
CASES: dict[str, tuple[int, dict[str, Any]]] = {  # name -> (processes, arguments)
    "cyclic_dp": (2, {"preset": "cyclic_dp", "stages": STARTS}),
    "cyclic_dp_v1": (2, {"preset": "cyclic_dp_v1", "stages": STARTS}),
    "lockstep_dp": (2, {"preset": "lockstep_dp", "stages": STARTS}),
    "one_device": (1, {"preset": "cyclic_dp", "stages": STARTS[1:2], "num_microbatches": 2}),
    "1f1b": (2, {"preset": "1f1b", "stages": STARTS[1:2]}),
    "cyclic_pipeline": (
        2,
        {"preset": "cyclic_pipeline", "stages": STARTS[1:2], "num_microbatches": 2},
    ),
    "pipedream_2bw": (2, {"preset": "pipedream_2bw", "stages": STARTS[1:2]}),
    "pipeoptim": (2, {"preset": "pipeoptim", "stages": STARTS[1:2]}),
}


class SaveAt(Callback):
    """Save a checkpoint in the middle of the epoch."""

    def __init__(self, path: str) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self._path)


def train(
    name: str, path: str, ckpt_path: str | None = None, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train on this rank; save at one step, or go on from what was saved there."""
    strategy = CASES[name][1] | (options or {})
    module = Classifier("batchnorm_mlp", "adamw")
    callbacks = [] if ckpt_path else [SaveAt(path)]
    trainer = make_trainer(strategy, max_epochs=1, callbacks=callbacks)
    trainer.fit(module, _batches(name), ckpt_path=ckpt_path)
    return outcome(trainer, module) | {"stopped_at": trainer.global_step}


def _batches(name: str) -> Any:
    if name in ("cyclic_dp", "cyclic_dp_v1", "lockstep_dp"):  # a batch for each worker
        return loader(MicroBatches("vectors", NUM_STEPS * here().num_ranks))
    return Resumable(_Wide(), batch_size=None)


class _Wide(MicroBatches):
    """Batches of 8, which micro-batches divide."""

    def __init__(self) -> None:
        super().__init__("vectors", NUM_STEPS)

    def __getitem__(self, k: int) -> Any:
        parts = [MicroBatches("vectors", 2 * NUM_STEPS)[2 * k + n] for n in (0, 1)]
        x, y = (torch.cat(xs) for xs in zip(*parts, strict=True))
        return x[:8], y[:8]


def main(folder: str) -> None:
    """Write all of them."""
    for name, (n, _) in CASES.items():
        processes.run(train, n, name, f"{folder}/{name}.ckpt")


if __name__ == "__main__":
    main(sys.argv[1])
