"""The doctor's test: whether a module's own step comes out alike in stages, preset by preset.

    lightning-cyclic doctor model.py:Model --verify
    lightning-cyclic doctor model.py:Model --verify --steps 4 --preset 1f1b

Each preset trains the module for a few steps on this process, which runs all of its stages, and
compares them with the plain steps (docs/is_it_right.md).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from lightning_cyclic.cli.load_module import _arguments, _find, _make
from lightning_cyclic.compat import (
    LightningDataModule,
    LightningModule,
    Trainer,
    is_overridden,
    quieted,
)
from lightning_cyclic.errors import CyclicError, PlanError, VerificationError
from lightning_cyclic.plan import PRESETS
from lightning_cyclic.plugin.strategy import PlannedStrategy
from lightning_cyclic.registration import make_strategy

NUM_MICRO = 4
_ROW = "{:<18}{:<11}{:>14}{:>9}   {}"
_STEP_BY_STEP = frozenset(
    name for name, preset in PRESETS.items() if preset.weights in ("stashed", "predicted")
)


class Verdict(NamedTuple):
    """Say what came of one preset.

    Args:
        word: "equal", "different", "unclear", "refused" or "failed".
        text: why, or what differs first; "" where all is equal.
    """

    word: str
    num_compared: int
    seconds: float
    text: str


def verify(
    where: str,
    *,
    data: str | None,
    texts: Sequence[str],
    stages: int | Sequence[str],
    num_microbatches: int,
    num_steps: int,
    presets: Sequence[str],
) -> Iterator[tuple[str, bool]]:
    """Yield a row for each preset, and whether all is equal there; first the heads of columns.

    Fewer than ``num_steps`` are compared where later ones read several versions of the weights.
    """
    mine, its_data = _arguments(texts)
    kind = _find(where, LightningModule)
    feed = None if data is None else _find(data, LightningDataModule)
    yield _ROW.format("preset", "verdict", "steps compared", "seconds", "").rstrip(), True
    for preset in presets:
        module = _make(kind, mine)
        source = None if feed is None else _make(feed, its_data)
        strategy = make_strategy(
            preset,
            stages=stages if isinstance(stages, int) else list(stages),
            num_microbatches=1 if preset in _STEP_BY_STEP else num_microbatches,
            verify=num_steps,
        )
        batches = _batches(module, source, num_steps)
        verdict = _verdict(module, batches, strategy, num_steps)
        yield _row(preset, verdict), verdict.word == "equal"


def _row(preset: str, verdict: Verdict) -> str:
    word, num, seconds, text = verdict
    row = _ROW.format(preset, word, num, f"{seconds:.1f}", "").rstrip()
    return f"{row}\n    {text}" if text else row


def _verdict(
    module: LightningModule, batches: dict[str, Any], strategy: PlannedStrategy, num_steps: int
) -> Verdict:
    begin, word, text = time.perf_counter(), "equal", ""
    try:
        with quieted(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = Trainer(
                accelerator="cpu", devices=1, strategy=strategy, max_steps=num_steps,
                limit_val_batches=0, num_sanity_val_steps=0, logger=False,
                enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(module, **batches)
    except VerificationError as error:
        word, text = "different", str(error)
    except CyclicError as error:
        word, text = "refused", str(error)
    except Exception as error:
        word, text = "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"
    if word == "equal" and strategy.steps_compared == 0:
        word, text = "refused", "one worker runs Lightning's own step: there is nothing to compare"
        if strategy.not_compared:
            word, text = "unclear", " ".join(strategy.not_compared)
    return Verdict(word, strategy.steps_compared, time.perf_counter() - begin, text)


def _batches(
    module: LightningModule, data: LightningDataModule | None, num_steps: int
) -> dict[str, Any]:
    if data is not None:
        return {"datamodule": data}
    if is_overridden("train_dataloader", module):
        return {}
    example = module.example_input_array
    if example is None:
        raise PlanError(
            f"{type(module).__name__} comes without data; allowed: --data PATH:CLASS, a "
            "train_dataloader or an example_input_array of the module; give one of them"
        )
    rows: Any = [example] * num_steps
    return {"train_dataloaders": DataLoader(rows, batch_size=None)}
