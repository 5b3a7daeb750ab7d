"""Torch functions that the user's code calls: one watch, to which runs listen, and what they are.

    with watch:                 hear(func, types, args, kwargs)     answers in the place of torch
        watch.step_aside()      where nobody need look, functions cost nothing
        watch.come_back()

The stacks on which torch keeps such watches, hooks of what autograd saves, and transforms of
torch.func are private; they are touched here alone (compat.py).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple, TypeAlias, final

import torch
from torch import nn
from torch._C import (
    _get_function_stack_at,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._functorch import peek_interpreter_stack
from torch.overrides import TorchFunctionMode

Hear: TypeAlias = Callable[[Any, Any, Any, Any], Any]


@final
class FunctionWatch(TorchFunctionMode):
    """Show torch functions to who listens.

    Args:
        hear: is given function, types, arguments and keywords, and answers. [torch answers]
    """

    def __init__(self, hear: Hear | None = None) -> None:
        super().__init__()
        self.hear = hear

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # what is compiled is a unit of its own; a listener would be compiled into it
        if self.hear is None or torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        return self.hear(func, types, args, kwargs or {})

    def insert(self, depth: int) -> None:
        """Begin to watch, beneath the modes that the user's code has entered meanwhile.

        Args:
            depth: how many modes there were before, as of :func:`num_modes`.
        """
        if _len_torch_function_stack() == depth:  # most often none are above
            _push_on_torch_function_stack(self)
            return
        above = [_pop_torch_function_stack() for _ in range(depth, _len_torch_function_stack())]
        for mode in (self, *reversed(above)):
            _push_on_torch_function_stack(mode)

    def step_aside(self) -> bool:
        """Leave the stack, and say so; beneath a mode that the user has entered it stays there."""
        if _get_function_stack_at(_len_torch_function_stack() - 1) is not self:
            return False
        _pop_torch_function_stack()
        return True

    def come_back(self) -> None:
        _push_on_torch_function_stack(self)


num_modes: Callable[[], int] = _len_torch_function_stack


def saving_hooks() -> Any:
    """Return the innermost hooks of what autograd saves; None where there are none."""
    return _top_saved_tensors_default_hooks(False)


def is_transformed() -> bool:
    """Say whether code runs within a transform of torch.func."""
    return peek_interpreter_stack() is not None


def is_made_now(node: Any) -> bool:
    """Say whether the backward under way comes to a node of its graph."""
    return bool(torch._C._will_engine_execute_node(node))


def leave_modes(depth: int) -> None:
    """End all watches above the first ones, of which there are so many."""
    while _len_torch_function_stack() > depth:
        _pop_torch_function_stack()


# ---------------------------------------------------------------------- what functions are

READS_METADATA: Final = frozenset(
    {"size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "get_device"}
    | {"is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "is_conj"}
    | {"is_neg", "is_pinned", "is_shared", "storage_offset", "__len__", "__hash__", "has_names"}
    | {"is_same_size", "_is_view", "is_set_to", "requires_grad_", "__repr__", "__format__"}
    | {"_has_compatible_shallow_copy_type"}
)
"""Names of those that a ghost answers by itself."""
TENSOR_PROPERTIES: Final = frozenset({"T", "mT", "H", "mH", "data", "real", "imag", "grad"})
"""Names of the properties of a tensor that are tensors; all others are metadata."""
READS_VALUE: Final = frozenset(
    {"item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__"}
    | {"__complex__", "equal", "allclose", "is_nonzero", "__contains__"}
)
"""Names of those that hand values to Python."""
DRAWS: Final = frozenset(
    {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal"}
    | {"bernoulli", "multinomial", "poisson", "binomial", "dropout", "rrelu", "bernoulli_"}
    | {"normal_", "uniform_", "exponential_", "geometric_", "log_normal_", "cauchy_", "random_"}
    | {"dropout_", "alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_dropout_"}
    | {"feature_alpha_dropout", "feature_alpha_dropout_", "dropout1d", "dropout2d", "dropout3d"}
    | {"gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d", "native_dropout"}
    | {"fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"}
    | {"scaled_dot_product_attention", "multi_head_attention_forward", "rrelu_"}
    | {"_sample_dirichlet", "_standard_gamma", "lstm", "gru", "rnn_tanh", "rnn_relu"}
    | {"kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_", "trunc_normal_"}
)
"""Names of those that may draw random numbers."""


def reads_metadata(func: Any) -> bool:
    """Say whether a torch function reads what a ghost knows."""
    name = func.__name__
    if name == "__get__":
        return func.__self__.__name__ not in TENSOR_PROPERTIES
    return name in READS_METADATA


_MOVES: Final = frozenset({"to", "float", "double", "half", "bfloat16", "cpu", "cuda"})


def is_move(func: Any) -> bool:
    """Say whether a torch function moves a tensor to a device, or to a dtype."""
    return func.__name__ in _MOVES


def moves_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Say whether a torch function is to move a parameter that is there already.

    So ``module.to(device)`` asks each of its parameters: that is no use of any, nor a change. A
    copy is a use, and so is another order of the elements in memory.
    """
    if not args or not isinstance(p := args[0], nn.Parameter):
        return False
    if not is_move(func):
        return func.__name__ == "__set__" and args[1] is p  # as its data
    if kwargs.get("memory_format") not in (None, torch.preserve_format):
        return False
    with torch._C.DisableTorchFunction():  # an absent one has no values to be moved
        there = torch.empty(0, dtype=p.dtype, device=p.device)
        return func(there, *args[1:], **kwargs) is there


def is_random(func: Any) -> bool:
    """Say whether a torch function may draw random numbers."""
    return func.__name__ in DRAWS


def is_in_place(name: str) -> bool:
    """Say whether a torch function changes the first of its arguments, by its name."""
    return name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Hold what a run asks of a torch function."""

    name: str
    is_metadata: bool
    is_random: bool
    reads_value: bool
    changes_first: bool  # of its arguments, in place
    may_move: bool  # a tensor to a device, or to a dtype


@functools.lru_cache(maxsize=4096)
def known(func: Any) -> Known:
    name: str = func.__name__
    return Known(
        name=f"{func.__self__.__name__}.get" if name == "__get__" else name,
        is_metadata=reads_metadata(func),
        is_random=is_random(func),
        reads_value=name in READS_VALUE,
        changes_first=is_in_place(name),
        may_move=is_move(func) or name == "__set__",
    )


# ---------------------------------------------------------------------- who calls them


class Line(NamedTuple):
    """Name a line of the user's code."""

    file: str
    number: int

    def __str__(self) -> str:
        if not self.file:
            return "line unknown"
        return f"{self.file.removeprefix(os.getcwd() + os.sep)}:{self.number}"

    @property
    def short(self) -> str:
        return f"{os.path.basename(self.file)}:{self.number}"


NO_LINE: Final = Line("", 0)
PACKAGE: Final = f"{Path(__file__).parents[1]}{os.sep}"
TORCH: Final = f"{Path(torch.__file__).parent}{os.sep}"
_OF_LIGHTNING = ("/lightning/fabric/", "/lightning/pytorch/", "/lightning_fabric/",
                 "/pytorch_lightning/")  # fmt: skip
_HELPERS = (contextlib.__file__, copy.__file__)


def callers() -> Iterator[FrameType]:
    """Iterate over who has called the function that asks, and over who called them."""
    return _outward(sys._getframe(1).f_back)


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def module_of(frame: FrameType) -> str:
    """Return the name of the module whose code runs in a frame."""
    return str(frame.f_globals.get("__name__"))


def user_line() -> Line:
    """Return the innermost line that is the user's."""
    for frame in callers():
        if _is_the_users(frame.f_code.co_filename):
            return Line(frame.f_code.co_filename, frame.f_lineno)
    return NO_LINE


@functools.lru_cache(maxsize=4096)
def _is_the_users(file: str) -> bool:
    plain = file.replace("\\", "/")
    return not (
        file.startswith((PACKAGE, TORCH)) or file in _HELPERS
        or any(part in plain for part in _OF_LIGHTNING)
    )  # fmt: skip
