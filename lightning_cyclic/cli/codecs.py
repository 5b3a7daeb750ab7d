"""Codecs as the command line names them, and about how fast they are.

    bf16  fp16  fp32  int8  topk:0.01  dct:0.005  powersgd:4     of gradients
    dct:0.01+topk:0.01  bf16+int8                                and of new weights
    +topk:0.01                                                   of new weights alone

Bytes are what the codec itself says, so torch is imported where one is named, and nowhere else.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import lightning_cyclic
from lightning_cyclic.cli.arguments import explained
from lightning_cyclic.errors import ConfigurationError, PlanError
from lightning_cyclic.plan.presets import PLACEMENTS, PRESETS
from lightning_cyclic.simulate import CodecCosts, Coding, parse_bandwidth

if TYPE_CHECKING:
    from lightning_cyclic.runtime.codecs.base import AbstractCodec


class _Rates(NamedTuple):
    """Hold bytes of float32 per second, of one thread of a CPU (``benchmarks compression``)."""

    encode: float
    decode: float


class _Class(NamedTuple):
    name: str
    number: str
    kind: type[int] | type[float]


_CLASSES: Final[Mapping[str, _Class]] = {
    "topk": _Class("TopK", "density", float),
    "dct": _Class("Dct", "density", float),
    "powersgd": _Class("PowerSgd", "rank", int),
}
_RATES: Final[Mapping[str, _Rates]] = {
    "fp32": _Rates(1e10, 1e10),
    "bf16": _Rates(1e10, 1e10),
    "fp16": _Rates(1e10, 1e10),
    "int8": _Rates(1e9, 3e9),
    "topk": _Rates(1.8e8, 1e10),
    "dct": _Rates(1.5e8, 1e10),
    "powersgd": _Rates(3e8, 5e9),
}
_OFFERED: Final = (
    ("bf16", "sums are rounded to 8 bits wherever they are sent"),
    ("int8", "what is below 1/254 of the largest of 256 neighbours becomes 0"),
    ("dct:0.01", "most of a gradient arrives many steps late"),
    ("powersgd:4", "what 4 ranks of a matrix lack arrives late"),
    ("int8+int8", "as int8; changes of weights are rounded, the rest is in the next"),
    ("dct:0.01+topk:0.01", "as dct:0.01; most of a change of weights arrives late, too"),
)
_SPELLED: Final = "bf16, fp16, fp32, int8, topk:DENSITY, dct:DENSITY, powersgd:RANK"
_SPELLED_OF_WEIGHTS: Final = {"int8": "int8", "topk": "topk:DENSITY"}


def parse_codec(text: str) -> Coding:
    """Read a codec of gradients, behind a + one of new weights, or both.

    Raises:
        PlanError: there is no such codec, or it takes no such number.

    Example:
        >>> str(parse_codec("dct:0.005"))
        'Dct(density=0.005)'
        >>> str(parse_codec("bf16+topk:0.01"))
        '{"gradients": "bf16", "weights": TopK(density=0.01)}'
    """
    gradients, plus, weights = text.partition("+")
    return Coding(
        gradients=_of_gradients(gradients) if gradients or not plus else None,
        weights=_of_weights(weights, text) if plus else None,
    )


def _of_gradients(text: str) -> CodecCosts:
    name, colon, number = text.partition(":")
    if not _is_spelled(name, colon):
        raise PlanError(
            f"{text!r} is no codec; allowed: {_SPELLED}; write it like int8, topk:0.01 or "
            "powersgd:4, and with new weights, too, like int8+int8"
        )
    return _made(name, number)


def _of_weights(text: str, whole: str) -> CodecCosts:
    name, colon, number = text.partition(":")
    if not _is_spelled(name, colon) or name not in _SPELLED_OF_WEIGHTS:
        raise PlanError(
            f"{text!r}, behind the + of {whole!r}, is no codec of new weights; allowed: "
            f"{', '.join(_SPELLED_OF_WEIGHTS.values())}, which leave the rest to the next one; "
            "write it like int8+int8 or dct:0.01+topk:0.01, and without gradients like +topk:0.01"
        )
    return _made(name, number)


def _is_spelled(name: str, colon: str) -> bool:
    return name in _RATES and bool(colon) == (name in _CLASSES)


def _made(name: str, number: str) -> CodecCosts:
    rates = _RATES[name]
    given = _number(name, number) if name in _CLASSES else {}
    kind = _CLASSES[name].name if name in _CLASSES else name
    codec = _codec(kind, given)
    return CodecCosts(
        kind=kind,
        numbers=given,
        num_bytes=_bytes_of_sums(name) if codec is None else codec.num_bytes,
        encode_bytes_per_s=rates.encode,
        decode_bytes_per_s=rates.decode,
        to_owners=codec is not None,
        has_memory=codec is not None and codec.has_memory,
    )


def _codec(kind: str, given: Mapping[str, float]) -> AbstractCodec | None:
    """Make a codec; None of a dtype, in which sums travel."""
    from lightning_cyclic.runtime.codecs.choice import codec_of  # noqa: PLC0415  (slow: torch)

    if not given:
        return codec_of(kind)
    try:
        return cast("AbstractCodec", getattr(lightning_cyclic, kind)(**given))
    except ConfigurationError as error:
        raise PlanError(str(error)) from error


def _bytes_of_sums(dtype: str) -> Callable[[int], float]:
    from lightning_cyclic.runtime.gradient_store import WIRE_DTYPES  # noqa: PLC0415  (slow: torch)

    size = WIRE_DTYPES[dtype].itemsize
    return lambda num_elements: num_elements * size


def _number(name: str, number: str) -> dict[str, float]:
    wanted = _CLASSES[name]
    try:
        return {wanted.number: wanted.kind(number)}
    except ValueError as error:
        example = "4" if wanted.kind is int else "0.01"
        raise PlanError(
            f"{name}:{number} has no {wanted.number}; allowed: "
            f"{'whole numbers from 1 on' if wanted.kind is int else 'above 0, and up to 1'}; "
            f"write it like {name}:{example}"
        ) from error


def add_codec(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compress", type=explained(parse_codec), metavar="CODEC[+CODEC]", help="what is "
        f"sent of gradients: {_SPELLED}; and, behind a +, of new weights: "
        f"{', '.join(_SPELLED_OF_WEIGHTS.values())} (default: all of both)",
    )  # fmt: skip
    parser.add_argument(
        "--encode-bandwidth", type=explained(parse_bandwidth), metavar="3GB/s", help="in "
        "which a worker encodes gradients, and decodes them, beside its compute; and new weights, "
        "in an update (default: about what one thread of a CPU does with such a codec)",
    )  # fmt: skip


def coding_of(
    arguments: argparse.Namespace, presets: Iterable[str], *, of_pipelines: int
) -> Coding | None:
    """Return what is sent of gradients and weights, and refuse presets of which the strategy does.

    Args:
        arguments: those of :func:`add_codec`, and more.
        of_pipelines: how many replicas they have.

    Raises:
        PlanError: in the words of the strategy.
    """
    coding: Coding | None = arguments.compress
    rate: float | None = arguments.encode_bandwidth
    if coding is None:
        if rate is not None:
            raise PlanError(
                "--encode-bandwidth is of what a codec makes smaller; allowed: with "
                "--compress; add --compress int8, or leave it out"
            )
        return None
    for preset in presets:
        _check(coding, preset, of_pipelines)
    return coding if rate is None else coding.at(rate)


def _check(coding: Coding, preset: str, replicas: int) -> None:
    if preset not in PRESETS:  # which has an error of its own
        return
    codecs = {what: _codec(x.kind, x.numbers) or x.kind for what, x in coding.parts()}
    compress: Any = codecs["gradients"] if coding.weights is None else codecs
    try:
        if PLACEMENTS[PRESETS[preset].placement].runs_whole_micro:
            lightning_cyclic.CyclicStrategy(preset, compress=compress)
        else:
            lightning_cyclic.PipelineStrategy(preset, replicas=replicas, compress=compress)
    except ConfigurationError as error:
        raise PlanError(str(error)) from error


def offered() -> Iterator[tuple[Coding, str]]:
    """Yield codecs to look at where the network is slow, and what each risks."""
    for text, risk in _OFFERED:
        yield parse_codec(text), risk
