"""What a codec of gradients costs, as plans see it: bytes, seconds, and the way that they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import final

from lightning_cyclic.simulate.costs import Costs


@final
@dataclass(frozen=True, kw_only=True)
class Coding:
    """Hold what a codec costs.

    Args:
        kind: its name, as ``compress=`` has it: "int8", or of its class.
        numbers: what its class is given. [nothing]
        num_bytes: elements of float32 -> bytes that are sent of them.
        encode_bytes_per_s: of float32, on each worker. [in no time]
        decode_bytes_per_s: of float32 that is decoded. [in no time]
        to_owners: whether it encodes the gradient of each worker, which goes straight to the
            owner of its stage; else sums, which travel from worker to worker. [True]
        has_memory: whether each worker keeps what it did not send. [False]

    Example:
        >>> half = Coding(kind="bf16", num_bytes=lambda n: 2 * n, to_owners=False)
        >>> half.of(Costs.even(1, model_bytes=8.0)).sent_sum_bytes
        (4,)
        >>> str(half), str(Coding(kind="TopK", numbers={"density": 0.01}, num_bytes=len))
        ('"bf16"', 'TopK(density=0.01)')
    """

    kind: str
    numbers: Mapping[str, float] = field(default_factory=dict, hash=False)
    num_bytes: Callable[[int], float] = field(compare=False, repr=False)
    encode_bytes_per_s: float = inf
    decode_bytes_per_s: float = inf
    to_owners: bool = True
    has_memory: bool = False

    def of(self, costs: Costs) -> Costs:
        """Return what stages cost with it."""
        return costs.compressed(
            self.num_bytes,
            encode_bytes_per_s=self.encode_bytes_per_s,
            decode_bytes_per_s=self.decode_bytes_per_s,
        )

    def __str__(self) -> str:
        """Write it as ``compress=`` takes it."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.numbers.items())
        return f"{self.kind}({given})" if self.numbers else f'"{self.kind}"'
