"""The doctor's patient: a LightningModule made from its class, with a batch and a step to run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import yaml

from lightning_cyclic.cli.branches import faster_order
from lightning_cyclic.cli.user_code import load
from lightning_cyclic.compat import (
    LightningDataModule,
    LightningModule,
    Trainer,
    is_overridden,
    is_param_in_hook_signature,
    quieted,
)
from lightning_cyclic.errors import CyclicError, PlanError
from lightning_cyclic.planner.profile import ModelProfile
from lightning_cyclic.plugin.pipeline_session import first_part
from lightning_cyclic.runtime.snapshot import untouched
from lightning_cyclic.runtime.stages.best_places import most_stages
from lightning_cyclic.runtime.stages.cuts import choose_cuts
from lightning_cyclic.runtime.stages.evidence import ClockName
from lightning_cyclic.runtime.stages.places import CutPoints
from lightning_cyclic.runtime.stages.profiling import measured
from lightning_cyclic.runtime.stages.report import report
from lightning_cyclic.runtime.stages.survey import survey
from lightning_cyclic.runtime.values.split import split

_T = TypeVar("_T")


def examine(
    where: str,
    *,
    data: str | None = None,
    texts: Sequence[str] = (),
    stages: int | Sequence[str] | None = None,
    num_microbatches: int = 1,
    memory_limit_bytes: int | None = None,
    clock: ClockName = "counted",
) -> str:
    """Make a module, run the first of its batch's micro-batches, and report on its stages.

    Args:
        where: "PATH:CLASS", as ``data`` is.
        texts: arguments, "name=value".
        stages: how many, or paths. [2 where that is possible]
    """
    with _patient(where, data, texts) as (module, feed):
        with _detached(module, feed):
            seen = survey(
                module, _step(module, feed, num_microbatches), clock=clock, for_backward=True
            )
        most, asked = most_stages(CutPoints(seen)), stages
        if stages is None or isinstance(stages, int):
            stages = min(2 if stages is None else stages, most)
        cuts = choose_cuts(seen, stages, memory_limit_bytes=memory_limit_bytes)
        remark = None
        if isinstance(stages, int) and memory_limit_bytes is None:  # of which no order knows
            remark = faster_order(seen, cuts)
        if isinstance(asked, int) and asked > most:
            more = f"{asked} stages were asked for, {most} are the most: see above what stands " \
                "against others"  # fmt: skip
            remark = more if remark is None else f"{more}\n{remark}"
        return report(seen, cuts, remark=remark)


@contextmanager
def _patient(
    where: str, data: str | None, texts: Sequence[str]
) -> Iterator[tuple[LightningModule, LightningDataModule | None]]:
    """Make the module and its data; what is wrong with them becomes one line."""
    try:
        mine, its_data = _arguments(texts)
        module = _make(_find(where, LightningModule), mine)
        yield module, None if data is None else _make(_find(data, LightningDataModule), its_data)
    except PlanError:
        raise
    except CyclicError as error:
        raise PlanError(str(error)) from error


# ---------------------------------------------------------------------- classes


def _find(where: str, base: type[_T]) -> type[_T]:
    module, path, name = load(where)
    found = getattr(module, name, None)
    if not (inspect.isclass(found) and issubclass(found, base)):
        what = "does not exist" if found is None else f"is no {base.__name__}"
        raise PlanError(
            f"{name!r} {what} in {path}; allowed: the name of a {base.__name__} there; "
            "check the spelling"
        )
    return found


def _arguments(texts: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of the module and those of the data."""
    mine: dict[str, Any] = {}
    its_data: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise PlanError(f"--arg {text!r} has no value; allowed: NAME=VALUE; write depth=12")
        try:
            literal = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise PlanError(
                f"--arg {text!r} is no YAML; allowed: 12, 1e-3, text, [1, 2]"
            ) from error
        (its_data if name.startswith("data.") else mine)[name.removeprefix("data.")] = literal
    return mine, its_data


def _make(cls: type[_T], arguments: dict[str, Any]) -> _T:
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise PlanError(
            f"{cls.__name__} cannot be made with {arguments or 'no arguments'}: {error}; allowed: "
            f"{cls.__name__}{inspect.signature(cls)}; give them as --arg NAME=VALUE"
        ) from error
    return cls(**arguments)


# ---------------------------------------------------------------------- the step


@contextmanager
def _detached(module: LightningModule, data: LightningDataModule | None) -> Iterator[None]:
    """Give the module a Trainer that trains nothing, and a log that keeps nothing."""
    with quieted():
        trainer = Trainer(
            accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
    module.trainer = trainer
    trainer.strategy.connect(module)
    if data is not None:
        data.trainer = trainer
    for name in ("log", "log_dict"):
        module.__dict__[name] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            del module.__dict__[name]


def _step(
    module: LightningModule, data: LightningDataModule | None, num_microbatches: int
) -> Callable[[], Any]:
    """Return what runs the module once, on its first micro-batch."""
    if not module.automatic_optimization:
        raise PlanError(
            f"{type(module).__name__} optimizes by itself (automatic_optimization=False), so "
            "that its step has no stages; allowed: automatic optimization; return the loss from "
            "training_step"
        )
    for owner in (module,) if data is None else (data, module):
        owner.prepare_data()
        owner.setup("fit")
    module.configure_model()
    module.train()
    source = data if data is not None else module
    if is_overridden("train_dataloader", source) and is_overridden("training_step", module):
        batch = _transferred(_first_batch(source), module, data)
        return _training_step(module, first_part(batch, num_microbatches, module, data))
    example = module.example_input_array
    if example is None:
        raise PlanError(
            f"{type(module).__name__} comes without data; allowed: --data PATH:CLASS, a "
            "train_dataloader or an example_input_array of the module; give one of them"
        )
    example = split(example, num_microbatches)[0].batch
    if isinstance(example, dict):
        return lambda: module(**example)
    return lambda: module(*example) if isinstance(example, tuple) else module(example)


def _first_batch(source: LightningModule | LightningDataModule) -> Any:
    for batch in source.train_dataloader():
        return batch
    raise PlanError(
        f"the train_dataloader of {type(source).__name__} yields no batch; allowed: one or more; "
        "check the data"
    )


def _transferred(batch: Any, module: LightningModule, data: LightningDataModule | None) -> Any:
    for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
        owner = data if data is not None and is_overridden(hook, data) else module
        batch = getattr(owner, hook)(batch, 0)
    return batch


def _training_step(module: LightningModule, batch: Any) -> Callable[[], Any]:
    if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2):
        return lambda: module.training_step(batch, 0)
    return lambda: module.training_step(batch)


def measure(
    where: str,
    *,
    data: str | None = None,
    texts: Sequence[str] = (),
    num_micros: Sequence[int] = (1,),
) -> tuple[ModelProfile, ...]:
    """Make a module and return what its units take, a profile for each size of a micro-batch.

    Of each of the numbers of micro-batches that a batch is cut into, the first is run.
    """
    with _patient(where, data, texts) as (module, feed), _detached(module, feed):
        found = []
        for num_microbatches in num_micros:
            step = _step(module, feed, num_microbatches)
            found.append(measured(module, step, _given(module, step)))
        return tuple({profile.micro_size: profile for profile in found}.values())


def _given(module: LightningModule, step: Callable[[], Any]) -> Any:
    """Return what a step gives the module: the batch, or the example input."""
    given: list[Any] = []
    run = module.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        given.append(args)
        return run(*args, **kwargs)

    def before_forward(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given.append(args or kwargs)

    module.__dict__["training_step"] = training_step
    handle = module.register_forward_pre_hook(before_forward, with_kwargs=True)
    try:
        with untouched(module), torch.no_grad():  # which forgets what hooks have kept
            step()
            first = given[0]
    finally:
        del module.__dict__["training_step"]
        handle.remove()
    return first
