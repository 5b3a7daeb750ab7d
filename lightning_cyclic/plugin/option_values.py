"""Which values options may have; each is checked by a row of CHECKS."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from lightning_cyclic.errors import ConfigurationError, PlanError
from lightning_cyclic.plugin.clipping import CLIPPING
from lightning_cyclic.runtime.codecs.activations import NAMES as NAMES_OF_ACTIVATIONS
from lightning_cyclic.runtime.codecs.base import AbstractCodec
from lightning_cyclic.runtime.codecs.choice import NAMES
from lightning_cyclic.runtime.codecs.weights import NAMES as NAMES_OF_WEIGHTS
from lightning_cyclic.runtime.transport.choice import Route
from lightning_cyclic.simulate import parse_bandwidth

Checkpointing: TypeAlias = Literal["never", "always", "except_last", "optimal", "offload"]
OfGradients: TypeAlias = Literal["fp32", "bf16", "fp16", "int8"] | AbstractCodec
OfWeights: TypeAlias = Literal["int8"] | AbstractCodec
OfActivations: TypeAlias = Literal["bf16", "fp16", "int8"] | AbstractCodec
Compress: TypeAlias = OfGradients | Mapping[str, OfGradients | OfWeights | OfActivations | None]
Clipping: TypeAlias = Literal["stage", "global"]


class Check(NamedTuple):
    """Say which values an option may have."""

    passes: Callable[[Any], bool]
    allowed: str
    example: str


def _one_of(*allowed: str, or_none: bool = False) -> Check:
    values = (*allowed, None) if or_none else allowed
    return Check(lambda given: given in values, ", ".join(map(repr, values)), repr(allowed[0]))


def _whole(least: int, *words: str | None) -> Check:
    def passes(given: object) -> bool:
        is_number = isinstance(given, int) and not isinstance(given, bool)
        return given in words or (is_number and given >= least)  # type: ignore[operator]

    beside = "".join(f", or {word!r}" for word in words)
    return Check(passes, f"whole numbers from {least} on{beside}", str(max(least, 2)))


def _switch() -> Check:
    return Check(lambda given: isinstance(given, bool), "True or False", "True")


def _are_stages(given: object) -> bool:
    if isinstance(given, list | tuple):
        return all(isinstance(path, str) for path in given) and len(set(given)) == len(given)
    return _whole(1, "auto", "measured").passes(given)


def bandwidth_of(given: object) -> float:
    """Return bytes per second; 0 for what is no bandwidth."""
    if isinstance(given, int | float) and not isinstance(given, bool):
        return float(given)
    try:
        return parse_bandwidth(str(given))
    except PlanError:
        return 0.0


_COMPRESSED: Final = {
    "gradients": NAMES,
    "weights": NAMES_OF_WEIGHTS,
    "activations": NAMES_OF_ACTIVATIONS,
}


def compressed(given: Any) -> Mapping[str, Any]:
    """Return what makes gradients, weights and activations smaller; one value is of gradients."""
    return given if isinstance(given, Mapping) else {"gradients": given}


def _is_codec(given: object, names: Collection[str]) -> bool:
    return given is None or isinstance(given, AbstractCodec) or given in list(names)


CHECKS: Final[Mapping[str, Check]] = {
    "stages": Check(
        _are_stages,
        '"auto", "measured" (by times), a number from 1, or a list of module paths, each once',
        '["layer2", "layer3"]',
    ),
    "num_microbatches": _whole(1, None),
    "slack": _whole(0),
    "group_size": _whole(1, "host"),
    "clip_norm": _one_of(*CLIPPING, or_none=True),
    "relay_buffers": _one_of("auto", "all"),
    "replicas": _whole(1),
    "activation_checkpointing": _one_of(*get_args(Checkpointing)),
    "memory_limit_bytes": Check(
        lambda given: (
            given is None
            or (isinstance(given, int | float) and not isinstance(given, bool) and given > 0)
        ),
        "a number of bytes above 0, or None",
        "24 * 10**9",
    ),
    "disk": Check(
        lambda given: given is None or isinstance(given, str | os.PathLike),
        "the path of a folder, or None",
        '"/tmp"',
    ),
    "error_feedback": _switch(),
    "compress": Check(
        lambda given: all(
            what in _COMPRESSED and _is_codec(codec, _COMPRESSED[what])
            for what, codec in compressed(given).items()
        ),
        f"of gradients {', '.join(map(repr, NAMES))}, a codec, as TopK(density=0.01) is one, or "
        "None; or a mapping of these for 'gradients', for 'weights' of "
        f"{', '.join(map(repr, NAMES_OF_WEIGHTS))}, and for 'activations' of "
        f"{', '.join(map(repr, NAMES_OF_ACTIVATIONS))}, or a codec",
        "'bf16'",
    ),
    "bandwidth": Check(
        lambda given: given is None or bandwidth_of(given) > 0,
        'text like "10Gbit/s", or bytes per second',
        '"10Gbit/s"',
    ),
    "transport": _one_of(*get_args(Route)),
    "save_distributed_checkpoint": _switch(),
    "verify": Check(
        lambda given: given is False or _whole(0, "first_step").passes(given),
        '"first_step", the number of first steps that are compared with plain ones, or False',
        '"first_step"',
    ),
}


def check_values(given: Mapping[str, Any]) -> None:
    """Refuse values that options cannot have."""
    for name, value in given.items():
        check = CHECKS[name]
        if not check.passes(value):
            raise ConfigurationError(
                f"{name}={value!r}; allowed: {check.allowed}; use {name}={check.example}"
            )
