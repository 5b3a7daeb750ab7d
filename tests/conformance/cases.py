"""The rows of the matrix: modules of all kinds, and what a Trainer can be told.

A cell is equal (to the plain Trainer), close (equal to a plain Trainer that keeps the delayed
rule), or refused, with the pattern that is given here for a preset or for several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch import callbacks as lc

from lightning_cyclic import GradientNorms
from tests.conformance import examples as e
from tests.conformance import modules as m
from tests.conformance.harness import FLOWS, PIPELINES, PRESETS, Case
from tests.modules.cases import CASES as NETWORKS
from tests.references.rules import WHOLE

TIED = r"'shared' does not fit tied="
MANUAL = r"automatic_optimization is False"
RATE = r"within a step, by training_step"
LATE = r"in the middle of a step|this rank has not"
CHANGES = r"but ranks have several versions or copies"
NO_CHANGE = r"was changed between two steps|this rank has not, between steps"
GONE = r"is read on rank|this rank has not|its parameters are gone|reaches over the place"
GRADIENTS = [name for name in PRESETS if name != "cyclic_dp_v1"]  # whose updates are whole
AUTO = {name: {"stages": "auto"} for name in WHOLE}


def refused(pattern: str, *presets: str | Iterable[str]) -> dict[str, str]:
    """Return the pattern for each preset."""
    names = [n for x in presets or [PRESETS] for n in ([x] if isinstance(x, str) else x)]
    return dict.fromkeys(names, pattern)


AWAY = refused(GONE, "cyclic_zero")


def _network(name: str) -> Case:
    case, is_tied = NETWORKS[name], name in ("gpt2", "t5", "whisper", "mamba")
    return Case(
        make=partial(case.make, dropout=0.0),
        data=partial(_batch, name),
        stages=case.cuts2,
        refused=refused(TIED, "cyclic_mp") if is_tied else {},
    )


def _batch(name: str, k: int) -> Any:
    return NETWORKS[name].batch(k, 3)


def row(kind: Any, **more: Any) -> Case:
    """Return the row of a module whose second stage begins with its third layer."""
    return Case(**{"make": kind, "data": m.vectors, "stages": ["net.2"]} | more)


def told(*made: Callable[[], Callback], kind: Any = m.Plain, **flags: Any) -> Case:
    """Return the row of a module and a Trainer with callbacks and flags.

    Args:
        *made: make the callbacks.
        kind: of module.
        **flags: of the Trainer; or fields of the row.
    """
    of_row = {"stages", "options", "refused", "behind", "num_epochs", "num_steps"}
    fields = of_row & flags.keys()
    more = {name: flags.pop(name) for name in fields}
    return row(kind, flags=partial(_flags, made, flags), validates=True, **more)


def _flags(made: Iterable[Callable[[], Callback]], flags: dict[str, Any]) -> dict[str, Any]:
    return {"callbacks": [make() for make in made]} | flags


def totals(trainer: Any, *args: Any) -> list[dict[int, float]]:
    """Return what callbacks know of the norms of gradients."""
    return [c.totals for c in trainer.callbacks if isinstance(c, GradientNorms)]


def best(trainer: Any, *args: Any) -> Any:
    """Return what the best checkpoint holds."""
    found = None
    if trainer.is_global_zero:
        path = trainer.checkpoint_callback.best_model_path
        found = torch.load(path, weights_only=True)["state_dict"]
    return trainer.strategy.broadcast(found)


def evaluated(trainer: Any, module: Any, batches: Any) -> Any:
    """Validate, test and predict behind a fit."""
    found = [trainer.validate(module, batches, verbose=False)]
    found += trainer.test(module, batches, verbose=False)
    return [found, trainer.predict(module, batches)]


def _nothing(*args: Any) -> None:
    pass


class Reads(Callback):
    """Reads the norm of all weights where validation and epochs end."""

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            pl_module.seen.append([float(p.detach().norm()) for p in pl_module.parameters()])

    on_train_end = on_validation_end


class Finetuned(lc.BaseFinetuning):
    """Freezes the first layer, and unfreezes it in the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


CASES: dict[str, Case] = {
    name: _network(name) for name, case in NETWORKS.items() if not case.random
} | {
    "plain": row(m.Plain),
    "dataloader_iter": row(m.TakesBatches, validates=True, reference=m.Plain),
    "outs": row(m.Outputs, validates=True, num_epochs=2),
    "training outs": row(m.TrainingOutputs, num_epochs=2, own=["outs"]),
    "counter": row(m.Counter),
    "moving loss": row(m.MovingLoss, own=["mean"]),
    "statistics": row(m.HandMadeStatistics),
    "gives more": row(m.GivesMore),
    "metrics": row(m.Metrics, validates=True, num_epochs=2),
    "annealed": row(m.Annealed),
    "other way": row(m.OtherWay, stages=["net.decoder"], validates=True),
    "whole in training": row(m.WholeInTraining, stages=["net.decoder"], validates=True),
    "validation only": row(m.ValidationOnly, validates=True),
    "teacher": row(m.Teacher, validates=True, refused=refused(TIED, "cyclic_mp")),
    "reversed validation": row(m.ReversedValidation, validates=True),
    "direct forward": row(m.DirectForward, options=AUTO),
    "self.forward": row(m.SelfForward),
    "twice": row(m.Twice, refused=AWAY),
    "skips": row(m.Skips),
    "auxiliary": row(m.Auxiliary),
    "shared step": row(m.SharedStep, validates=True),
    "in place": row(m.InPlace),
    "frozen beginning": row(m.Frozen),
    "frozen end": row(m.FrozenEnd, options=AUTO),
    "tied": row(m.Tied, refused=refused(TIED, "cyclic_mp")),
    "own parameters": row(m.OwnParameter),
    "weight norm": row(m.Parametrized, refused=AWAY),
    "spectral norm": row(m.SpectralNorm, refused=AWAY),
    "batch norm": row(m.Normalised, stages=["net.3"], validates=True),
    "class weights": row(m.Weighted),
    "unused": row(m.Unused),
    "low rank": row(m.LowRankLayers),
    "embedding": row(m.Sparse, data=m.words, stages=["rnn"]),
    "limited embedding": row(
        m.LimitedNorm, data=m.words, stages=["rnn"], refused=refused(CHANGES, WHOLE, FLOWS)
    ),
    "changed weights": row(m.ChangesWeights, refused=refused(CHANGES)),
    "changed weights, later": row(m.LateChanges, refused=refused(CHANGES)),
    "moving teacher, later": row(m.LateTeacher, refused=refused(f"{CHANGES}|{LATE}|{TIED}")),
    "sparse embedding": row(
        m.ReallySparse, data=m.words, stages=["rnn"], refused=refused("sparse", WHOLE)
    ),
    "complex": row(m.Complex),
    "checkpointed": row(m.Checkpointed, stages=["net.1"], refused=AWAY),
    "checkpointed function": row(m.FunctionCheckpointed, refused=AWAY),
    "reentrant": row(
        m.Reentrant, stages=["net.2"], refused=refused("is checkpointed", PIPELINES) | AWAY
    ),
    "compiled block": row(m.CompiledBlock),
    "compiled module": row(m.CompiledModule),
    "hand-made average": row(
        m.HandMadeAverage, refused=refused(LATE, PIPELINES) | AWAY
    ),
    "clipped weights": row(
        m.ClippedWeights, refused=refused(NO_CHANGE, WHOLE, PIPELINES) | AWAY
    ),
    "own clipping": row(m.OwnClipping),
    "gradient hooks": row(m.GradientHooks),
    "backward hooks": row(m.BackwardHooks, refused=refused("has a backward hook", PIPELINES)),
    "gradient penalty": row(
        m.GradientPenalty, refused=refused("takes gradients itself", PIPELINES) | AWAY
    ),
    "functional call": row(m.FunctionalCall),
    "gradient reversal": row(m.GradientReversal),
    "step hooks": row(m.StepHooks, refused=refused(LATE, "gpipe", "1f1b", "zb_h1")),
    "own scheduling": row(m.OwnScheduling, num_epochs=2),
    "plateau": row(m.Plateau, validates=True, num_epochs=3),
    "own optimizer_step": row(m.OwnOptimizerStep),
    "rate in the step": row(m.RateInStep, refused=refused(RATE, FLOWS)),
    "rate in a hook": row(
        m.RateInHook, refused=refused(RATE, WHOLE, FLOWS)
    ),
    "gradients by step": row(m.ScaledByStep),
    "frozen in the step": row(
        m.FreezesInStep,
        refused=refused("was frozen or unfrozen on rank", FLOWS, "cyclic_zero"),
    ),
    "gradient hooks on tensors": row(m.TensorHooks),
    "forgotten momentum": row(
        m.ForgetsMomentum,
        refused=refused("state of the optimizer was changed", "cyclic_dp", "cyclic_zero", FLOWS),
    ),
    "group in a hook": row(
        m.AddsGroup, refused=refused("optimizer was added within a step")
    ),
    "group behind the backward": row(
        m.AddsGroupBehindBackward, refused=refused("optimizer was added within a step")
    ),
    "updates left out": row(
        m.LeavesUpdatesOut, refused=refused("did not call optimizer.step", WHOLE, FLOWS)
    ),
    "own zero_grad": row(m.OwnZeroGrad),
    "own backward": row(m.OwnBackward, refused=refused("runs backwards stage by stage", FLOWS)),
    "made in setup": row(m.MadeInSetup),
    "made in configure_model": row(m.MadeInConfigureModel),
    "skipping": row(m.Skipping, refused=refused("returned None")),
    "gathers": row(
        m.Gathers,
        refused=refused(
            "all_gather waits for all workers", (n for n in PRESETS if n != "lockstep_dp")
        ),
    ),
    "norms of gradients": row(
        m.NormsOfGradients, refused=refused("reads the gradient of", GRADIENTS)
    ),
    "manual": row(m.Manual, refused=refused(MANUAL)),
    "Lion": row(partial(m.With, "Lion")),
    "schedule-free": row(
        partial(m.With, "ScheduleFree"), validates=True,
        refused=refused("exchanges the weights", WHOLE, FLOWS),
    ),
    "counted steps": row(partial(m.With, "Counting")),
    "assigned weights": row(partial(m.With, "Assigning")),
    "norm of all, in the optimizer": row(
        partial(m.With, "Clipping"), refused=refused("is called for some", GRADIENTS),
    ),
    "Adafactor": row(partial(m.With, "Adafactor", lr=0.1)),
    "Muon": row(partial(m.With, "Muon", lr=0.01)),
    "AdamW, fused": row(partial(m.With, "AdamW", lr=0.05, fused=True)),
    "LBFGS": row(partial(m.With, "LBFGS"), refused=refused("LBFGS couples")),
    "groups": row(m.Groups),
    "gpt2 with LoRA": row(
        partial(m.LanguageModel, lora=True), data=m.words,
        stages=["model.base_model.model.transformer.h.1"]),
    "gpt2 generating": row(
        m.Generating, data=m.words, stages=["model.transformer.h.1"], validates=True,
        refused=refused(TIED, "cyclic_mp"),
    ),
    "autoencoder": row(e.Autoencoder, data=e.images, stages=["decoder"], validates=True),
    "Hydra template": row(
        e.template, data=e.images, stages=["net.4"], validates=True, num_epochs=2,
    ),
    "diffusion": row(e.Denoiser, data=e.noisy_images, stages=["down"], validates=True),
    "two views": row(
        e.Contrasted, data=e.two_views, validates=True, refused=refused(TIED, "cyclic_mp") | AWAY
    ),
    "audio classifier": row(
        e.audio_classifier, data=e.sounds, stages=["model.wav2vec2.encoder.layers.1"],
        validates=True,
    ),
    "word classifier": row(
        e.tagger, data=e.tagged_words, stages=["model.distilbert.transformer.layer.1"],
        validates=True,
    ),
    # ------------------------------------------------------------------ the Trainer
    "accumulated": told(
        accumulate_grad_batches=2, num_steps=2,
        refused=refused("accumulate_grad", FLOWS),
    ),
    "clipped by value": told(gradient_clip_val=0.05, gradient_clip_algorithm="value"),
    "clipped by the norm of all": told(
        gradient_clip_val=0.1, options={"": {"clip_norm": "global"}},
        refused=refused("would make every stage wait", "cyclic_pipeline", "cyclic_mp"),
    ),
    "bf16-mixed": told(precision="bf16-mixed"),
    "bf16-true": told(precision="bf16-true"),
    "64-true": told(precision="64-true"),
    "validated in mid epoch": told(Reads, val_check_interval=2),
    "validated every other epoch": told(check_val_every_n_epoch=2, num_epochs=2),
    "without a sanity check": told(num_sanity_val_steps=0, kind=m.SharedStep),
    "read in hooks": told(Reads),
    "detect_anomaly": told(detect_anomaly=True),
    "deterministic": told(deterministic=True),
    "simple profiler": told(profiler="simple"),
    "without inference mode": told(inference_mode=False),
    "evaluated behind": told(behind=evaluated),
    "max_steps": told(max_steps=3, num_steps=3),
    "limited batches": told(limit_val_batches=1),
    "synchronised BatchNorm": told(sync_batchnorm=True, refused=refused("sync_batchnorm")),
    "early stopping": told(partial(lc.EarlyStopping, "val_loss", patience=5)),
    "rate monitor": told(partial(lc.LearningRateMonitor, "step"), logger=True),
    "lambda callback": told(partial(lc.LambdaCallback, on_fit_end=_nothing)),
    "timer": told(partial(lc.Timer, "00:01:00:00")),
    "pruning": told(
        partial(lc.ModelPruning, "l1_unstructured", amount=0.5), refused=refused("ModelPruning")
    ),
    "fine-tuning": told(Finetuned, kind=m.Unfreezing, num_epochs=3),
    "thawing": row(m.Thawing, validates=True, num_epochs=2),
    "stochastic averages": told(
        partial(lc.StochasticWeightAveraging, 0.01), num_epochs=2,
        refused=refused("StochasticWeightAveraging copies", PIPELINES),
    ),
    "accumulation that changes": told(
        partial(lc.GradientAccumulationScheduler, {0: 2}), num_steps=2,
        refused=refused("GradientAccumulationScheduler", FLOWS),
    ),
    "checkpoint of the best": told(
        partial(lc.ModelCheckpoint, monitor="val_loss", save_last=True, save_top_k=2),
        num_epochs=2, behind=best, enable_checkpointing=True,
    ),
    "progress bar": told(lc.TQDMProgressBar, enable_progress_bar=True),
    "model summary": told(partial(lc.ModelSummary, 2), enable_model_summary=True),
    "throughput": told(
        partial(lc.ThroughputMonitor, batch_size_fn=len, window_size=2), logger=True,
        log_every_n_steps=1, kind=e.Measured,
    ),
    "logged every step": told(logger=True, log_every_n_steps=1, kind=m.SharedStep),
    "all batches overfitted": told(overfit_batches=2, num_steps=2),
    "loaders made anew": told(reload_dataloaders_every_n_epochs=1, num_epochs=2),
    "benchmark": told(benchmark=True),
    "gradient norms": told(partial(GradientNorms, 1), behind=totals, num_epochs=2),
    "device statistics": told(lc.DeviceStatsMonitor, logger=True),
    "many flags": told(
        partial(lc.LearningRateMonitor, "step"), partial(lc.LambdaCallback, on_fit_end=_nothing),
        partial(lc.Timer, "00:01:00:00"), partial(lc.ModelSummary, 2), lc.TQDMProgressBar,
        partial(lc.ThroughputMonitor, batch_size_fn=len, window_size=2), lc.DeviceStatsMonitor,
        kind=e.Measured, logger=True, log_every_n_steps=1, enable_progress_bar=True,
        enable_model_summary=True, deterministic=True, profiler="simple",
        limit_val_batches=1, inference_mode=False,
    ),
}  # fmt: skip
if hasattr(lc, "EMAWeightAveraging"):  # from Lightning 2.6 on
    CASES["averaged weights"] = told(
        lc.EMAWeightAveraging, refused=refused("EMAWeightAveraging copies", PIPELINES)
    )
