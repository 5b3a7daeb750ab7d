"""One way to train a module on ranks, and to look at what each rank has when it ends.

    run(Chain, {"preset": "1f1b", "stages": 2}, 2, data=batches)[1].weights

What is handed to ranks is pickled: modules and data are made there, by classes, functions of
modules, or partials of them.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cyclic.runtime.torch_functions import Line
from tests.harness import processes
from tests.harness.processes import here
from tests.harness.trainers import Said, make_trainer, weights_of

TIMEOUT_S = 25.0
SOON_S = TIMEOUT_S - 5.0  # an error that needs the whole wait is no clear one


@dataclass(frozen=True)
class Result:
    """Hold what one rank has when training ends.

    Args:
        error: name of the type with which it ended. [none]
        text: of that.
        notes: of that.
        seconds: from the making of the module on.
        weights: parameters and buffers, where nothing went wrong; so are all that follow.
        losses: by batch.
        metrics: that callbacks see.
        messages: that rank 0 has logged.
        stage_of: parameter -> stage.
        global_step: updates done.
        found: what was looked for.
        warned: warnings that were expected.
    """

    error: str = ""
    text: str = ""
    notes: Sequence[str] = ()
    seconds: float = 0.0
    weights: dict[str, Tensor] = field(default_factory=dict)
    losses: Sequence[float] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    messages: Sequence[str] = ()
    stage_of: dict[str, int] = field(default_factory=dict)
    global_step: int = 0
    found: Any = None
    warned: Sequence[str] = ()


class Losses(Callback):
    """Keeps the loss of each batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if outputs is not None:
            self.losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))


def run(
    make: Callable[[], LightningModule],
    strategy: dict[str, Any] | str,
    num_ranks: int = 2,
    *,
    data: Callable[[], Any],
    valid: Callable[[], Any] | None = None,
    look: Callable[[Any, Any], Any] | None = None,
    expects: Sequence[str] = (),
    **flags: Any,
) -> list[Result]:
    """Train on ranks, and return what each has at the end, be it an error.

    Args:
        make: makes the module, on each rank.
        strategy: its options, of which "preset" is one; or a name.
        num_ranks: how many processes train.
        data: makes what is trained on, on each rank.
        valid: makes what is validated on, on each rank.
        look: returns what is found, of the Trainer and the module when the fit has ended.
        expects: beginnings of warnings that are no errors.
        **flags: of the Trainer; and ckpt_path, from which the fit goes on.

    Raises:
        RanksFailedError: a rank died, or did not end.
    """
    args = make, strategy, data, valid, look, expects, {"max_epochs": 1} | flags
    return processes.run(_train, num_ranks, *args, time_limit_s=40, after_failure_s=20)


def trained(*args: Any, **more: Any) -> list[Result]:
    """Train as :func:`run` does, where nothing may go wrong."""
    ends = run(*args, **more)
    for rank, end in enumerate(ends):
        assert not end.error, f"rank {rank}: {end.error}: {end.text}"
    return ends


def _train(
    make: Callable[[], LightningModule],
    strategy: dict[str, Any] | str,
    data: Callable[[], Any],
    valid: Callable[[], Any] | None,
    look: Callable[[Any, Any], Any] | None,
    expects: Sequence[str],
    flags: dict[str, Any],
) -> Result:
    begun, said, losses = time.monotonic(), Said(), Losses()
    if isinstance(strategy, dict):
        strategy = {"timeout": timedelta(seconds=TIMEOUT_S)} | strategy
    flags["callbacks"] = [losses, *flags.get("callbacks", ())]
    ckpt_path = flags.pop("ckpt_path", None)
    try:
        module = make()
        with warnings.catch_warnings(record=bool(expects)) as caught:
            for text in expects:
                warnings.filterwarnings("always", message=text)
            trainer = make_trainer(strategy, **flags)
            trainer.fit(module, data(), valid and valid(), ckpt_path=ckpt_path)
    except BaseException as error:
        notes = getattr(error, "__notes__", ())
        return Result(type(error).__name__, str(error), notes, time.monotonic() - begun)
    return Result(
        seconds=time.monotonic() - begun,
        weights=weights_of(module),
        losses=losses.losses,
        metrics={name: float(x) for name, x in trainer.callback_metrics.items()},
        messages=said.lines,
        stage_of=dict(getattr(trainer.strategy, "stage_of", {})),
        global_step=trainer.global_step,
        found=look and look(trainer, module),
        warned=[str(each.message) for each in caught or ()],
    )


def own_part(steps: Sequence[Sequence[Sequence[Tensor]]]) -> DataLoader[Any]:
    """Return this worker's batches; of one process those of all workers, joined.

    Args:
        steps: by step and worker, the tensors of a batch.
    """
    if here().num_ranks == len(steps[0]):
        own = [list(step[here().rank]) for step in steps]
    else:
        own = [[torch.cat(each) for each in zip(*step, strict=True)] for step in steps]
    return DataLoader(own, batch_size=None)  # type: ignore[arg-type]


def saving(folder: Path, every: int = 1, **options: Any) -> dict[str, Any]:
    """Return flags of a Trainer that keeps a file, step=N.ckpt, of every so many steps."""
    saver = ModelCheckpoint(
        folder, "{step}", every_n_train_steps=every, **({"save_top_k": -1} | options)
    )
    return {"callbacks": [saver], "enable_checkpointing": True}


def line_of(kind: type, comment: str = "this line") -> Path:
    """Return path:line of the one line of a class that ends with a comment, as errors name it."""
    lines, first = inspect.getsourcelines(kind)
    (n,) = (n for n, line in enumerate(lines) if line.rstrip().endswith(f"# {comment}"))
    return Path(str(Line(str(inspect.getsourcefile(kind)), first + n)))
