"""Records: what a module logs inside a step, once for the batch and on every worker.

A step is run several times for a batch: for each micro-batch, and by several workers. So
``self.log`` is held back while it runs; what the last stage logged is put together over the
micro-batches, sent to all workers, and logged there, once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_cyclic.compat import LightningModule, Trainer
from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.plain_copies import ours
from lightning_cyclic.runtime.stages.evidence import is_metric
from lightning_cyclic.runtime.values.plain import leaf_from_data, leaf_to_data
from lightning_cyclic.runtime.values.trees import flatten, unflatten

Log = tuple[str, Any, dict[str, Any]]  # name, value, further arguments of self.log
_SIGNATURE = inspect.signature(LightningModule.log)


class Record(NamedTuple):
    """Hold one call of ``self.log``.

    Args:
        metric: path of the metric that was logged; None for a plain value.
    """

    name: str
    value: Tensor | None
    metric: str | None
    arguments: dict[str, Any]


@final
class Recorder:
    """Hold back what a module logs."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._paths = {id(m): path for path, m in module.named_modules() if is_metric(m)}

    @contextmanager
    def holding(self, note: Callable[[str, Any, dict[str, Any]], None]) -> Iterator[None]:
        """Hold back what is logged while the body runs."""

        def log(*args: Any, **kwargs: Any) -> None:
            bound = dict(_SIGNATURE.bind(self._module, *args, **kwargs).arguments)
            del bound["self"]
            note(bound.pop("name"), bound.pop("value"), bound)

        with _put(self._module, "log", ours(log, is_followed=lambda: True)):
            yield

    def combine(self, logs: Sequence[Sequence[Log]], sizes: Sequence[int]) -> list[Record]:
        """Put together what each micro-batch logged.

        Raises:
            StepError: a value that cannot be sent.
        """
        found: dict[str, list[tuple[Any, dict[str, Any], int]]] = {}
        for calls, size in zip(logs, sizes, strict=True):
            for name, value, arguments in calls:
                found.setdefault(name, []).append((value, arguments, size))
        return [self._combine(name, calls) for name, calls in found.items()]

    def replay(self, records: Sequence[Record]) -> None:
        """Log records on this worker, as the module would have.

        Values are reduced over replicas whether or not the module asked for it, so that every
        worker has the same; over the workers of one replica there is nothing to reduce.
        """
        for name, value, path, arguments in records:
            if path is None:
                assert value is not None
                self._module.log(name, value, **(arguments | {"sync_dist": True}))
                continue
            metric: Any = self._module.get_submodule(path)
            if value is not None:
                metric._forward_cache = value
            self._module.log(name, metric, **arguments)

    def _combine(self, name: str, calls: Sequence[tuple[Any, dict[str, Any], int]]) -> Record:
        last, arguments, _ = calls[-1]
        if isinstance(last, nn.Module):
            path = self._paths.get(id(last))
            if path is None:
                raise StepError(
                    f"self.log({name!r}, ...) was given a {type(last).__name__} that is not part "
                    "of the module; allowed: metrics that are attributes of the LightningModule; "
                    "make it one"
                )
            cached = [getattr(m, "_forward_cache", None) for m, _, _ in calls]
            value = last._forward_cache if isinstance(last._forward_cache, Tensor) else None
            return Record(name, None if cached[-1] is None else value, path, arguments)
        values = [_scalar(name, value) for value, _, _ in calls]
        if len(values) == 1:
            return Record(name, values[0], None, arguments)
        sizes = [a.get("batch_size") or size for _, a, size in calls]
        if arguments.get("batch_size"):
            arguments = arguments | {"batch_size": sum(sizes)}
        return Record(name, _reduce(name, values, sizes, arguments), None, arguments)


@contextmanager
def refused_in_update(trainer: Trainer, preset: str) -> Iterator[None]:
    """Refuse what the body logs: hooks of an update, called apart from the step that it is of."""
    module, results = trainer.lightning_module, trainer._results

    def log(hook: str | None, name: str, *args: Any, **kwargs: Any) -> None:
        raise StepError(
            f"self.log({name!r}, ...) was called in {hook}, which runs when an update is made: "
            f"under preset {preset!r} that may be in a later step, once for each stage, and on "
            "the rank alone that makes it; allowed: logging in training_step, optimizer_step, and "
            "hooks of a batch or an epoch; log it in on_train_batch_end, norms of gradients with "
            "Trainer(callbacks=[lightning_cyclic.GradientNorms()]), or use strategy='1f1b' or "
            "'ddp'"
        )

    def log_of_module(name: str, *args: Any, **kwargs: Any) -> None:
        log(module._current_fx_name, name)

    with ExitStack() as changed:
        changed.enter_context(_put(module, "log", log_of_module))  # where a step's is held back
        if results is not None:  # callbacks have the module's own
            changed.enter_context(_put(results, "log", log))
        yield


@contextmanager
def _put(holder: object, name: str, value: object) -> Iterator[None]:
    attributes = vars(holder)
    before = {name: attributes[name]} if name in attributes else {}
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]
        attributes.update(before)


def to_summary(records: Sequence[Record]) -> tuple[list[Tensor], Any]:
    tensors = [r.value for r in records if r.value is not None]
    facts = [
        [
            r.name,
            r.value is not None,
            r.metric,
            {
                k: leaf_to_data(v, f"an argument of self.log({r.name!r}, ...)")
                for k, v in r.arguments.items()
            },
        ]
        for r in records
    ]
    return tensors, facts


def from_summary(tensors: Sequence[Tensor], facts: Any) -> list[Record]:
    left = iter(tensors)
    return [
        Record(
            name,
            next(left) if has_value else None,
            metric,
            {k: leaf_from_data(v) for k, v in arguments.items()},
        )
        for name, has_value, metric, arguments in facts
    ]


def _scalar(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise StepError(
                f"self.log({name!r}, ...) was given a tensor of shape {tuple(value.shape)}; "
                "allowed: one number; log its mean, say"
            )
        return value.detach()
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=torch.get_default_dtype())
    if isinstance(value, Mapping):
        raise StepError(
            f"self.log({name!r}, ...) was given a dict; allowed: one number; use self.log_dict"
        )
    raise StepError(
        f"self.log({name!r}, ...) was given a {type(value).__name__}; allowed: numbers, tensors "
        "of one element, and metrics; convert it"
    )


def _reduce(
    name: str, values: Sequence[Tensor], sizes: Sequence[int], arguments: Mapping[str, Any]
) -> Tensor:
    how = arguments.get("reduce_fx", "mean")
    how = how if isinstance(how, str) else getattr(how, "__name__", "")
    stacked = torch.stack([v.reshape(()).to(values[0].device) for v in values])
    if how in ("mean", "avg"):
        if not stacked.is_floating_point():
            stacked = stacked.to(torch.get_default_dtype())
        weights = weights_for(stacked, sizes)
        return (stacked * weights).sum() / weights.sum()
    if how in ("sum", "max", "min", "amax", "amin"):
        reduced: Tensor = getattr(stacked, how)()
        return reduced
    raise StepError(
        f"self.log({name!r}, ..., reduce_fx={arguments['reduce_fx']!r}) cannot be put together "
        'over micro-batches; allowed: "mean", "sum", "max", "min"; use one of these, or '
        "num_microbatches=1"
    )


def further_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> dict[str, Any]:
    """Put together what the micro-batches of a batch returned besides the loss.

    Example:
        >>> import torch
        >>> outputs = [{"loss": torch.ones(()), "y": torch.ones(n)} for n in (2, 1)]
        >>> further_outputs(outputs, [2, 1])
        {'y': tensor([1., 1., 1.])}
    """
    if not outputs or not all(isinstance(output, Mapping) for output in outputs):
        return {}
    names = [n for n in outputs[0] if n != "loss" and all(n in output for output in outputs)]
    return {n: _together([output[n] for output in outputs], sizes) for n in names}


def weighted_mean(values: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return the mean of tensors of shape (), each weighted by its number of samples."""
    if len(values) == 1:
        return values[0]
    weights = weights_for(values[0], sizes)
    return (torch.stack(list(values)) * weights).sum() / weights.sum()


def weights_for(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return numbers of samples as a tensor of the type of ``x``, and where it is."""
    weights = torch.tensor(sizes, dtype=x.dtype)
    # from memory that is not pinned the host would wait for the copy
    return weights.pin_memory().to(x.device, non_blocking=True) if x.is_cuda else weights


def _together(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    first, *rest = values
    if not rest:
        return first
    flat = [flatten(value) for value in values]
    if any(structure != flat[0][1] for _, structure in flat):
        return list(values)
    leaves = [_leaf(parts, sizes) for parts in zip(*(x for x, _ in flat), strict=True)]
    return unflatten(flat[0][1], leaves)


def _leaf(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    if all(isinstance(x, Tensor) for x in parts):
        if all(x.dim() == 0 and x.is_floating_point() for x in parts):
            return weighted_mean(parts, sizes)
        with_rows = (x.dim() > 0 and len(x) == n for x, n in zip(parts, sizes, strict=True))
        same_rest = len({(x.dtype, x.shape[1:]) for x in parts}) == 1
        return torch.cat(list(parts)) if same_rest and all(with_rows) else list(parts)
    if any(isinstance(x, Tensor) or type(x) is not type(parts[0]) for x in parts):
        return list(parts)
    return parts[0] if all(bool(x == parts[0]) for x in parts) else list(parts)
