"""What codecs of gradients and of new weights cost, as plans see it: bytes, seconds, and ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import final

from lightning_cyclic.simulate.costs import Costs


@final
@dataclass(frozen=True, kw_only=True)
class CodecCosts:
    """Hold what a codec costs.

    Args:
        kind: its name, as ``compress=`` has it: "int8", or of its class.
        numbers: what its class is given. [nothing]
        num_bytes: elements of float32 -> bytes that are sent of them.
        encode_bytes_per_s: of float32, on each worker. [in no time]
        decode_bytes_per_s: of float32 that is decoded. [in no time]
        to_owners: of gradients, whether it encodes that of each worker, which goes straight to
            the owner of its stage; else sums, which travel from worker to worker. [True]
        has_memory: of gradients, whether each worker keeps what it did not send. [False]

    Example:
        >>> str(CodecCosts(kind="TopK", numbers={"density": 0.01}, num_bytes=len))
        'TopK(density=0.01)'
    """

    kind: str
    numbers: Mapping[str, float] = field(default_factory=dict, hash=False)
    num_bytes: Callable[[int], float] = field(compare=False, repr=False)
    encode_bytes_per_s: float = inf
    decode_bytes_per_s: float = inf
    to_owners: bool = True
    has_memory: bool = False

    def at(self, bytes_per_s: float) -> CodecCosts:
        """Return the same, encoded and decoded in another bandwidth."""
        return replace(self, encode_bytes_per_s=bytes_per_s, decode_bytes_per_s=bytes_per_s)

    def __str__(self) -> str:
        """Write it as ``compress=`` takes it."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.numbers.items())
        return f"{self.kind}({given})" if self.numbers else f'"{self.kind}"'


@final
@dataclass(frozen=True, kw_only=True)
class Coding:
    """Hold what makes messages of a plan smaller.

    Args:
        gradients: of gradients, or of sums of them. [they are sent as they are]
        weights: of new weights. [they are sent as they are]

    Example:
        >>> half = CodecCosts(kind="bf16", num_bytes=lambda n: 2 * n, to_owners=False)
        >>> small = CodecCosts(kind="int8", num_bytes=lambda n: n)
        >>> both = Coding(gradients=half, weights=small)
        >>> costs = both.of(Costs.even(1, model_bytes=8.0))
        >>> costs.sent_sum_bytes, costs.sent_param_bytes
        ((4,), (2,))
        >>> str(Coding(gradients=half)), str(both)
        ('"bf16"', '{"gradients": "bf16", "weights": "int8"}')
    """

    gradients: CodecCosts | None = None
    weights: CodecCosts | None = None

    @property
    def to_owners(self) -> bool:
        """Say whether the gradient of each worker goes straight to the owner of its stage."""
        return self.gradients is not None and self.gradients.to_owners

    @property
    def has_memory(self) -> bool:
        """Say whether each worker keeps what it did not send of gradients."""
        return self.gradients is not None and self.gradients.has_memory

    def of(self, costs: Costs) -> Costs:
        """Return what stages cost with it."""
        if (weights := self.weights) is not None:
            costs = costs.compressed(
                weights=weights.num_bytes,
                encode_bytes_per_s=weights.encode_bytes_per_s,
                decode_bytes_per_s=weights.decode_bytes_per_s,
            )
        if (gradients := self.gradients) is not None:
            costs = costs.compressed(
                gradients.num_bytes,
                encode_bytes_per_s=gradients.encode_bytes_per_s,
                decode_bytes_per_s=gradients.decode_bytes_per_s,
            )
        return costs

    def at(self, bytes_per_s: float) -> Coding:
        """Return the same, encoded and decoded in another bandwidth."""
        return Coding(**{what: codec.at(bytes_per_s) for what, codec in self.parts()})

    def parts(self) -> Iterator[tuple[str, CodecCosts]]:
        """Yield what is made smaller, as ``compress=`` names it, and by which codec."""
        for what, codec in (("gradients", self.gradients), ("weights", self.weights)):
            if codec is not None:
                yield what, codec

    def __str__(self) -> str:
        """Write it as ``compress=`` takes it; a single value is of gradients."""
        if self.weights is None:
            return str(self.gradients)
        return "{" + ", ".join(f'"{what}": {codec}' for what, codec in self.parts()) + "}"
