"""The watch: which blocks of memory the functions of torch make and use, while it is entered.

    made      what a function returns whose storage nobody has seen
    found     a storage that a function is given, made before: counted from the step's beginning
    freed     the storage itself has gone: a weak reference says so, whoever let it go

Kinds come from who holds a storage (parameters, gradients, states of optimizers, batches), from
which functions use it (collectives: messages), or from when they do: what a forward makes and a
backward uses is an activation, be it autograd that kept it or the user's own function. Nothing is
hung on tensors or modules, and autograd saves what it always does.

What lies in a file that is mapped (optimizer state that comes and goes, a data set) is no memory.
What is not seen: memory that lives within one function, what threads of their own allocate before
the step's own thread uses it, and tensors without a storage (sparse ones).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_cyclic.runtime.codecs.factored import FactoredGradient
from lightning_cyclic.runtime.mapped_files import MappedFiles
from lightning_cyclic.runtime.memory_blocks import (
    ACTIVATIONS,
    BUFFERS,
    GRADIENTS,
    INPUTS,
    KINDS,
    MESSAGES,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    TEMPORARIES,
    Access,
    Block,
    Span,
    Timeline,
)

_RANK: Final = {kind: n for n, kind in enumerate(KINDS)}
_COLLECTIVES: Final = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
_OUTSIDE: Final = -1  # of any backward


@final
class MemoryWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note blocks of memory, step by step.

        watch.begin(t, module, optimizers, batch); ...; watch.end()

    Args:
        device: whose memory is watched.
        clock: nanoseconds. [of the host: when functions are called, not when a GPU runs them]
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device, clock: Callable[[], int] = perf_counter_ns) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._clock = clock
        self._now = -1  # the last event
        self._blocks: list[Block] = []
        self._alive: dict[int, tuple[weakref.ref[Any], Block]] = {}  # by address of the storage
        self._by_forward: set[int] = set()  # numbers of blocks
        self._files = MappedFiles(())
        self._spans: list[Span] = []
        self._step: Span | None = None  # under way
        self._held: tuple[nn.Module, Sequence[Optimizer]]
        self._parameters: list[nn.Parameter] = []
        self._grads: list[Tensor | None] = []  # as they were last seen

    @property
    def is_watching(self) -> bool:
        return self._step is not None

    @property
    def timeline(self) -> Timeline:
        return Timeline(self._blocks, self._spans)

    # ------------------------------------------------------------------ steps

    def begin(
        self, step: int, module: nn.Module, optimizers: Sequence[Optimizer], batch: Any
    ) -> None:
        """Watch what runs from here on; a step that was ended before goes on."""
        before = self._spans[-1] if self._spans else None
        if before is not None and before.step == step:  # batches whose gradients are added up
            self._step = self._spans.pop()
            self._now += 1
        else:
            self._now += 1
            ns = self._clock()
            self._step = Span(step, self._now, self._now, ns, ns)
        self._files = MappedFiles.now()
        self._held = module, optimizers
        # the class itself is asked: absent parameters refuse to be looked at (absent.py)
        self._parameters = list(module.parameters())
        self._grads = [None] * len(self._parameters)
        self._take_stock()
        for x in _tensors(batch):
            self._tag(x, INPUTS)
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Watch no longer, whatever other modes have been entered since, and are still on."""
        if self._step is None:
            return
        above = []
        stack = _get_current_dispatch_mode_stack()
        while stack and (top := stack.pop()) is not self:
            TorchDispatchMode.__exit__(top, None, None, None)  # type: ignore[no-untyped-call]
            above.append(top)
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for mode in reversed(above):
            TorchDispatchMode.__enter__(mode)  # type: ignore[no-untyped-call]
        self._take_stock()
        self._spans.append(self._step._replace(end=self._now, end_ns=self._clock()))
        self._step = None
        del self._held
        self._parameters, self._grads = [], []
        self._leave_the_batch()
        self._name_the_rest()

    def close(self) -> None:
        """Follow the blocks that are still there no longer."""
        self.end()
        self._alive.clear()

    def _take_stock(self) -> None:
        """See who holds what, between the functions of torch."""
        module, optimizers = self._held
        with torch._C.DisableTorchFunctionSubclass():
            for kind, found in (
                (PARAMETERS, self._parameters),
                (BUFFERS, module.buffers()),
                (OPTIMIZER, _tensors([_state_of(optimizer) for optimizer in optimizers])),
            ):
                for x in found:
                    self._tag(x, kind)
            self._find_gradients()

    def _find_gradients(self) -> None:
        for n, p in enumerate(self._parameters):
            grad = p.grad
            if grad is not self._grads[n]:
                self._grads[n] = grad
                if isinstance(grad, FactoredGradient):
                    for x in grad.held():
                        self._tag(x, GRADIENTS)
                elif grad is not None:
                    self._tag(grad, GRADIENTS)

    def _leave_the_batch(self) -> None:
        """Look no longer at what was made before its step: whether it stays is the loader's."""
        for address, (_, block) in list(self._alive.items()):
            if block.kind == INPUTS and block.is_found:
                block.ended = self._now + 1
                del self._alive[address]

    def _name_the_rest(self) -> None:
        """Tell what the step has made for itself from what was there, or stays."""
        for x in self._blocks:
            if x.kind == OTHER and not x.is_found and x.ended is not None:
                x.kind = TEMPORARIES if x.step == self._spans[-1].step else OTHER

    # ------------------------------------------------------------------ events

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # made of plain tensors, which come next
        result = func(*args, **(kwargs or {}))
        self._note(func, _tensors((args, kwargs)), _tensors(result))
        return result

    def _note(self, func: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        assert self._step is not None
        self._now += 1
        at = Access(self._now, self._clock())
        with torch._C.DisableTorchFunctionSubclass():
            is_forward = torch.is_grad_enabled()
            if not is_forward:  # gradients come and go without one
                self._find_gradients()
            goes_back = not is_forward and torch._C._current_graph_task_id() != _OUTSIDE
            is_message = getattr(func, "namespace", "") in _COLLECTIVES
            for x in given:
                block = self._of(x, at, is_found=True)
                if block is not None and is_message:
                    self._raise(block, MESSAGES)
                if block is not None and goes_back and block.number in self._by_forward:
                    self._raise(block, ACTIVATIONS)
            for x in made:
                block = self._of(x, at, is_found=False)
                if block is not None and is_forward and block.made == self._now:
                    self._by_forward.add(block.number)
        self._ask_the_allocator()

    def _ask_the_allocator(self) -> None:
        if self._device.type == "cuda" and self._step is not None:
            given_out = torch.cuda.memory_allocated(self._device)
            most = max(given_out, self._step.allocated_bytes)
            self._step = self._step._replace(allocated_bytes=most)

    # ------------------------------------------------------------------ blocks

    def _of(self, x: Tensor, at: Access, *, is_found: bool) -> Block | None:
        """Return the block of a tensor that a function was given, or has returned."""
        if x.device.type != self._device.type:
            return None
        try:
            storage = x.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse and other tensors without one
            return None
        _, block = self._alive.get(storage._cdata, (None, None))
        if block is not None and block.num_bytes != storage.nbytes():  # it was resized
            self._free(storage._cdata, at)
            block, is_found = self._add(storage, at, is_found=False, kind=block.kind), False
        elif block is None:
            is_file = is_found and self._files.have(storage.data_ptr())
            return None if is_file else self._add(storage, at, is_found=is_found)
        elif not block.accesses or block.accesses[-1].event != at.event:
            block.accesses.append(at)
        return block

    def _add(self, storage: Any, at: Access, *, is_found: bool, kind: str = OTHER) -> Block:
        assert self._step is not None
        block = Block(
            number=len(self._blocks), num_bytes=storage.nbytes(), step=self._step.step, kind=kind,
            made=self._step.begin if is_found else at.event, is_found=is_found, accesses=[at],
        )  # fmt: skip
        self._blocks.append(block)
        address = storage._cdata
        # the storage's own object lives as long as its memory, whoever holds that
        self._alive[address] = weakref.ref(storage, lambda _: self._free(address)), block
        return block

    def _free(self, address: int, at: Access | None = None) -> None:
        _, block = self._alive.pop(address)
        at = at or Access(self._now + 1, self._clock())
        block.ended = at.event
        block.accesses.append(at)

    def _tag(self, x: Tensor, kind: str) -> None:
        """Say what a block is for, which it was all its life; this is no use of it."""
        try:
            _, block = self._alive[x.untyped_storage()._cdata]
        except (RuntimeError, NotImplementedError):
            return
        except KeyError:
            found = self._of(x, Access(self._now, self._clock()), is_found=True)
            if found is None:
                return
            block = found
            block.accesses.clear()
        self._raise(block, kind)

    def _raise(self, block: Block, kind: str) -> None:
        if _RANK[kind] < _RANK[block.kind]:
            block.kind = kind


def _state_of(optimizer: Optimizer) -> list[Any]:
    """Return all that an optimizer has of its own, and what it trains: masters are its own."""
    inner = getattr(optimizer, "_optimizer", optimizer)  # of Lightning's wrapper
    return [list(inner.state.values()), [group["params"] for group in inner.param_groups]]


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]
