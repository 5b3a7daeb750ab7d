"""The clocks of a survey: what its times are.

    counted     what a nominal device would take for the FLOPs and bytes of the step
    measured    what passes here, without what the survey itself takes

Counted times are integers made of integers: the same in every run, on a loaded machine and on an
idle one, so that stages that are cut by them are the same, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter_ns
from typing import Any, final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, mm_flop
from typing_extensions import override

from lightning_cyclic.runtime.stages.ledger import num_bytes, storage_of

_PARTLY = frozenset(
    {"__getitem__", "embedding", "embedding_bag", "gather", "index_select", "take"}
    | {"take_along_dim", "__setitem__", "index_put_", "index_copy_", "index_add_", "index_fill_"}
    | {"scatter_", "scatter_add_", "scatter_reduce_", "masked_scatter_", "masked_fill_"}
)
"""Names of the torch functions that look up, or fill, a part of what they are given."""
_ATEN = torch.ops.aten


@final
class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the FLOPs of every kernel that torch has a formula for.

    FLOPs     by torch's own formulas (``torch.utils.flop_counter``), of the kernels that run
    bytes     by what torch functions are given and give back, whichever kernels do it

    Which kernels there are depends on the device; what their functions read and write does not.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # nested, distributed and other tensors are made of plain ones, which come next; some
        # versions of torch list those here, too
        if any(kind not in (Tensor, Parameter) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", func)
        formula = flop_registry.get(packet, _FURTHER.get(packet))
        if formula is None and isinstance(func, OpOverload):
            with self:  # under inference_mode functions come as a whole
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        if formula is not None:
            self.flops += _flops(formula, args, kwargs, result)
        return result


def _flops(
    formula: Callable[..., int], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> int:
    try:
        return int(formula(*args, **kwargs, out_val=result))
    except Exception:  # a formula that does not know such shapes: the bytes count alone
        return 0


def _like_flash(*args: Any, **kwargs: Any) -> int:
    """Count attention on the CPU by torch's formula for the same kernel on GPUs."""
    return int(flop_registry[_ATEN._scaled_dot_product_flash_attention](*args, **kwargs))


def _rnn(x: Tensor, *args: Any, **kwargs: Any) -> int:
    """Count the products of every row with each matrix of a fused recurrent network."""
    weights = args[0] if isinstance(args[0], list | tuple) else args[:2]
    rows = x.numel() // x.shape[-1]
    matrices = (w.shape for w in weights if w.dim() == 2)
    return sum(mm_flop((rows, k), (k, n)) for n, k in matrices)


# kernels that torch's registry lacks (pytorch issue 195460), by formulas that it has
_FURTHER: Mapping[Any, Callable[..., int]] = {
    getattr(_ATEN, name): formula
    for name, formula in {
        "_scaled_dot_product_flash_attention_for_cpu": _like_flash,
        "mkldnn_rnn_layer": _rnn,
        "_cudnn_rnn": _rnn,
        "miopen_rnn": _rnn,
    }.items()
    if hasattr(_ATEN, name)
}


def moved_bytes(
    name: str, inputs: Sequence[Tensor], changed: Sequence[Tensor], outputs: Sequence[Tensor]
) -> int:
    """Return the bytes that a torch function reads and writes; views move none."""
    given = {storage_of(x) for x in inputs} - {None}
    made = [x for x in outputs if storage_of(x) not in given]
    if not made and not changed:
        return 0
    sizes = [num_bytes(x) for x in (*inputs, *changed, *made)]
    if name in _PARTLY:
        moved = made or [x for x in inputs if not any(x is y for y in changed)]
        most = sum(map(num_bytes, moved))
        sizes = [min(size, most) for size in sizes]
    return sum(sizes)


FLOPS_PER_NS = 1000  # 1 TFLOP/s: between the processor and the GPU of a server
FLOPS_PER_BYTE = 10  # 100 GB/s: of processors, and of GPUs in float32, it is 5 to 20


class AbstractClock(ABC):
    """Say how far a step has come."""

    @abstractmethod
    def running(self) -> AbstractContextManager[object]:
        """Run while the body runs the step."""

    @abstractmethod
    def now_ns(self) -> int:
        """Return the time since the step began."""

    def pause(self) -> None:  # noqa: B027  # only time passes by itself
        """Leave out what follows: the survey's own doings."""

    def resume(self) -> None:  # noqa: B027
        """Go on behind a pause."""

    def move(  # noqa: B027
        self,
        name: str,
        inputs: Sequence[Tensor],
        changed: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        """Take note of a torch function, as in ``moved_bytes``."""


@final
class CountedClock(AbstractClock):
    def __init__(self) -> None:
        self._counter = FlopCounter()
        self._num_bytes = 0

    @override
    def running(self) -> AbstractContextManager[object]:
        return self._counter

    @override
    def now_ns(self) -> int:
        return (self._counter.flops + FLOPS_PER_BYTE * self._num_bytes) // FLOPS_PER_NS

    @override
    def move(
        self,
        name: str,
        inputs: Sequence[Tensor],
        changed: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        self._num_bytes += moved_bytes(name, inputs, changed, outputs)


@final
class MeasuredClock(AbstractClock):
    def __init__(self, *, on_cuda: bool) -> None:
        self._on_cuda = on_cuda
        self._begun_ns = 0
        self._paused_ns = 0  # when the last pause began
        self._own_ns = 0  # all pauses together

    @override
    @contextmanager
    def running(self) -> Iterator[None]:
        self._begun_ns = perf_counter_ns()
        yield

    @override
    def now_ns(self) -> int:
        if self._on_cuda:
            torch.cuda.synchronize()
        return perf_counter_ns() - self._begun_ns - self._own_ns

    @override
    def pause(self) -> None:
        self._paused_ns = perf_counter_ns()

    @override
    def resume(self) -> None:
        self._own_ns += perf_counter_ns() - self._paused_ns
