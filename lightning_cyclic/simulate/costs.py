"""What things cost: seconds of compute, bytes of payloads, and the links between the workers.

All sequences run over the stages. One micro-batch through the whole model takes
``sum(forward_s) + sum(backward_s)``; :meth:`Costs.even` splits that over equal stages, with a
backward that takes twice its forward, as matrix products do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Self, final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan.actions import Action, Kind, Payload

BACKWARD_PER_FORWARD = 2.0  # a backward makes two products where its forward makes one
_FLOAT32_BYTES = 4
_OF_GRADIENTS = frozenset({Payload.S, Payload.T, Payload.H})
FIRST_HALF = 0.5  # of a backward that is split: one of those products is for the input


_NONE_BY_DEFAULT = (
    "update_s", "moved_s", "weights_moved_s", "put_away_s", "encode_s", "decode_s", "publish_s",
    "cut_bytes", "buffer_bytes", "tied_bytes", "activation_bytes",
)  # fmt: skip


def is_of_gradient(action: Action) -> bool:
    """Say whether an action sends a gradient, or a sum of them."""
    return action.kind is Kind.SEND and action.payload in _OF_GRADIENTS


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Hold what a message costs; every worker has one sending and one receiving port.

    Where hosts have several workers, a worker has two ports more, for those of its host: what
    stays there neither waits for the network nor holds it up.

    Args:
        latency_s: seconds from the start of sending to the start of receiving.
        bandwidth_bytes_per_s: bytes per second of each port and direction.
        hosts: of each worker, where messages inside a host cost less. [each has its own]

    Example:
        >>> network = Network(latency_s=1.0, hosts=(0, 0, 1, 1), inside=Network(latency_s=0.1))
        >>> network.between(0, 1).latency_s, network.between(1, 2).latency_s
        (0.1, 1.0)
    """

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = inf
    hosts: tuple[int, ...] = ()
    inside: Network | None = None

    def __post_init__(self) -> None:
        if bool(self.hosts) != (self.inside is not None):
            raise PlanError(
                f"hosts={self.hosts} with inside={self.inside}; allowed: both, or none of them; "
                "use Network(hosts=(0, 0, 1, 1), inside=Network(latency_s=...))"
            )
        if self.latency_s < 0 or self.bandwidth_bytes_per_s <= 0:
            raise PlanError(
                f"a latency of {self.latency_s} s with {self.bandwidth_bytes_per_s} bytes/s "
                "cannot be; allowed: latency >= 0, bandwidth > 0; give both as positive numbers"
            )

    def transfer_s(self, num_bytes: float) -> float:
        """Return the seconds for which a message of ``num_bytes`` keeps a port busy."""
        return num_bytes / self.bandwidth_bytes_per_s

    def between(self, worker: int, other: int | None) -> Network:
        """Return what a message from a worker to another one costs."""
        if self.inside is None or other is None or self.hosts[worker] != self.hosts[other]:
            return self
        return self.inside

    def is_inside(self, worker: int, other: int | None) -> bool:
        """Say whether a message from a worker to another one stays on their host."""
        return self.between(worker, other) is not self

    @property
    def slowest(self) -> Network:
        """Return what a message costs where workers meet the worst of their links."""
        return self.inside if self.inside is not None and len(set(self.hosts)) == 1 else self

    def check(self, num_workers: int) -> None:
        """Refuse hosts that are not those of so many workers."""
        if self.hosts and len(self.hosts) != num_workers:
            raise PlanError(
                f"hosts={self.hosts} of {num_workers} workers; allowed: {num_workers} numbers, "
                f"one per worker; use hosts=tuple(w // 2 for w in range({num_workers}))"
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Hold what each stage costs.

    Args:
        param_bytes: bytes of the parameters; a gradient has as many.
        update_s: seconds of one optimizer step; none by default.
        moved_s: seconds in which optimizer state that leaves memory is copied, one way; none by
            default.
        weights_moved_s: the same of weights.
        put_away_s: seconds in which what the forward of one micro-batch leaves is copied, one
            way, where it leaves memory; none by default.
        encode_s: seconds in which a gradient, or a sum, is made what is sent of it; none by
            default.
        decode_s: seconds in which that is made a gradient again; none by default.
        publish_s: seconds of an update in which new weights are made what is sent of them, and
            that is decoded, as its owner computes with it, too; none by default.
        cut_bytes: bytes of the activations that enter the stage, for one micro-batch; of stage
            0, of the batch, which is not sent.
        buffer_bytes: bytes of the buffers that are relayed (BatchNorm statistics).
        tied_bytes: bytes of those parameters of the stage that later stages use, too.
        activation_bytes: bytes that the forward of one micro-batch leaves for its backward.
        sent_param_bytes: bytes of the parameters, or of a gradient of them, in a message;
            ``param_bytes`` by default, less where pruned elements are not sent.
        sent_sum_bytes: bytes of a sum of gradients in a message; ``sent_param_bytes`` by default,
            more where gradients have a lower precision than float32.
        sent_cut_bytes: bytes of ``cut_bytes`` in a message; as many by default, less where a
            codec makes activations smaller.
        sent_cut_gradient_bytes: the same of their gradients.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    param_bytes: tuple[float, ...]
    update_s: tuple[float, ...] = ()
    moved_s: tuple[float, ...] = ()
    weights_moved_s: tuple[float, ...] = ()
    put_away_s: tuple[float, ...] = ()
    encode_s: tuple[float, ...] = ()
    decode_s: tuple[float, ...] = ()
    publish_s: tuple[float, ...] = ()
    cut_bytes: tuple[float, ...] = ()
    buffer_bytes: tuple[float, ...] = ()
    tied_bytes: tuple[float, ...] = ()
    activation_bytes: tuple[float, ...] = ()
    sent_param_bytes: tuple[float, ...] = ()
    sent_sum_bytes: tuple[float, ...] = ()
    sent_cut_bytes: tuple[float, ...] = ()
    sent_cut_gradient_bytes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        num_stages = len(self.forward_s)
        if not self.sent_param_bytes:
            object.__setattr__(self, "sent_param_bytes", self.param_bytes)
        if not self.sent_sum_bytes:
            object.__setattr__(self, "sent_sum_bytes", self.sent_param_bytes)
        for name in _NONE_BY_DEFAULT:
            if not getattr(self, name):
                object.__setattr__(self, name, (0.0,) * num_stages)
        for name in ("sent_cut_bytes", "sent_cut_gradient_bytes"):
            if not getattr(self, name):
                object.__setattr__(self, name, self.cut_bytes)
        for name in self.__dataclass_fields__:
            values = getattr(self, name)
            if len(values) != num_stages or min(values, default=0.0) < 0:
                raise PlanError(
                    f"{name} {values!r} does not fit; allowed: {num_stages} numbers >= 0, one per "
                    "stage, as forward_s has; or use Costs.even(num_stages, ...)"
                )

    @classmethod
    def even(
        cls,
        num_stages: int,
        *,
        compute_s: float = 1.0,
        model_bytes: float = 0.0,
        update_s: float = 0.0,
        cut_bytes: float = 0.0,
        activation_bytes: float = 0.0,
    ) -> Self:
        """Split a model into equal stages.

        Args:
            compute_s: seconds of forward and backward of one micro-batch through all stages.
            update_s: seconds of one optimizer step of the whole model.
            cut_bytes: bytes of the activations at each cut, for one micro-batch.
            activation_bytes: bytes that one micro-batch leaves for its backward, of all stages.

        Example:
            >>> Costs.even(2, compute_s=6.0).backward_s
            (2.0, 2.0)
        """
        forward_s = compute_s / num_stages / (1 + BACKWARD_PER_FORWARD)
        return cls(
            forward_s=(forward_s,) * num_stages,
            backward_s=(forward_s * BACKWARD_PER_FORWARD,) * num_stages,
            param_bytes=(model_bytes / num_stages,) * num_stages,
            update_s=(update_s / num_stages,) * num_stages,
            cut_bytes=(cut_bytes,) * num_stages,
            activation_bytes=(activation_bytes / num_stages,) * num_stages,
        )

    def compressed(
        self,
        num_bytes: Callable[[int], float] | None = None,
        *,
        weights: Callable[[int], float] | None = None,
        activations: Callable[[int], tuple[float, float]] | None = None,
        encode_bytes_per_s: float = inf,
        decode_bytes_per_s: float = inf,
    ) -> Self:
        """Return the same of a plan that sends less of gradients, weights or activations.

        Args:
            num_bytes: of gradients: elements of float32 -> bytes that are sent of them; each
                codec has one. [all]
            weights: the same of new weights. [all]
            activations: elements of float32 at a cut -> bytes that are sent of them forward, and
                of their gradients backward. [all]
            encode_bytes_per_s: of what is float32: of gradients on each worker, beside its
                compute, of new weights on their owner, in its update. [in no time]
            decode_bytes_per_s: of what is decoded there. [in no time]

        Example:
            >>> costs = Costs.even(2, model_bytes=800.0)
            >>> small = costs.compressed(lambda n: n / 2, encode_bytes_per_s=200.0)
            >>> small.sent_sum_bytes, small.encode_s
            ((50.0, 50.0), (2.0, 2.0))
            >>> costs.compressed(weights=lambda n: n).sent_param_bytes
            (100, 100)
            >>> costs = Costs.even(2, cut_bytes=400.0)
            >>> costs.compressed(activations=lambda n: (n / 2, n / 4)).sent_cut_gradient_bytes
            (25.0, 25.0)
        """
        made = self
        if num_bytes is not None:
            wide = self.sent_sum_bytes  # sums are float32, unless parameters are wider
            made = replace(
                made,
                sent_sum_bytes=tuple(map(num_bytes, map(_elements, wide))),
                encode_s=tuple(size / encode_bytes_per_s for size in wide),
                decode_s=tuple(size / decode_bytes_per_s for size in wide),
            )
        if weights is not None:
            # sums tell elements of parameters in a lower precision, unless they are small already
            wide = tuple(map(max, self.sent_param_bytes, self.sent_sum_bytes))
            made = replace(
                made,
                sent_param_bytes=tuple(map(weights, map(_elements, wide))),
                publish_s=tuple(
                    size / encode_bytes_per_s + size / decode_bytes_per_s for size in wide
                ),
            )
        if activations is not None:
            each = [activations(_elements(size)) for size in self.cut_bytes]
            forward, backward = (tuple(x[k] for x in each) for k in range(2))
            made = replace(made, sent_cut_bytes=forward, sent_cut_gradient_bytes=backward)
        return made

    @property
    def codes(self) -> bool:
        """Say whether it takes time to encode gradients, or to decode them."""
        return any(self.encode_s) or any(self.decode_s)

    def coding_s(self, action: Action, *, is_own: bool) -> float:
        """Return the seconds of encoding and decoding that an action brings with it.

        Args:
            action: what sends a gradient or a sum, or adds one.
            is_own: of an addition, whether the gradient is the worker's own, which is encoded
                for it, too.
        """
        if action.kind is Kind.ADD:
            return self.decode_s[action.j] + self.encode_s[action.j] * is_own
        return self.encode_s[action.j]

    def running_again(self, again_s: Sequence[float]) -> Self:
        """Return the same with backwards that run a part of their forward again.

        Args:
            again_s: seconds of it, of each stage.
        """
        both = zip(self.backward_s, again_s, strict=True)
        return replace(self, backward_s=tuple(b + again for b, again in both))

    def put_away(self, bytes_per_s: float) -> Self:
        """Return the same with what forwards leave on a disk until their backwards.

        Args:
            bytes_per_s: of the disk, each way.
        """
        return replace(self, put_away_s=tuple(x / bytes_per_s for x in self.activation_bytes))

    def compute_s(self, action: Action) -> float:
        if action.kind is Kind.F:
            return self.forward_s[action.j]
        if action.kind is Kind.B:
            return self.backward_s[action.j]
        if action.kind is Kind.I:
            return self.backward_s[action.j] * FIRST_HALF
        if action.kind is Kind.W:
            return self.backward_s[action.j] * (1 - FIRST_HALF)
        if action.kind in (Kind.FETCH, Kind.EVICT):
            is_state = action.payload is Payload.O
            moved_s = self.moved_s if is_state else self.weights_moved_s
            return (self.put_away_s if action.payload is Payload.A else moved_s)[action.j]
        is_update = action.kind is Kind.UPDATE
        return self.update_s[action.j] + self.publish_s[action.j] if is_update else 0.0

    def message_bytes(self, action: Action) -> float:
        if action.payload is Payload.A:
            return self.sent_cut_bytes[action.j]
        if action.payload is Payload.G:  # enters stage j from behind, over the next cut
            return self.sent_cut_gradient_bytes[action.j + 1]
        if action.payload in (Payload.D, Payload.L, Payload.N):  # samples and numbers
            return 0.0
        if action.payload in (Payload.W, Payload.V):
            return self.tied_bytes[action.j]
        if action.payload in _OF_GRADIENTS:
            return self.sent_sum_bytes[action.j]
        by_stage = self.buffer_bytes if action.payload is Payload.R else self.sent_param_bytes
        return by_stage[action.j]


def _elements(num_bytes: float) -> int:
    return round(num_bytes / _FLOAT32_BYTES)
