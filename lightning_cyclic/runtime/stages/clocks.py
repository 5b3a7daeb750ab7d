"""The clocks of a survey: what its times are.

    counted     what a nominal device would take for the FLOPs and bytes of the step
    measured    what passes here, without what the survey itself takes

Counted times are integers made of integers: the same in every run, on a loaded machine and on an
idle one, so that stages that are cut by them are the same, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter_ns
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cyclic.runtime.stages.counting import FlopCounter, moved_bytes

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
    """Count FLOPs and bytes."""

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
    """Measure time.

    Args:
        on_cuda: whether to wait for the GPU.
    """

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
