"""Attributes whose values are not to be used: whoever does is told so, however it looks.

The attribute stays there: ``hasattr``, ``getattr`` with a default and comparisons with None go the
way that they go in the plain step. Taking it away instead would let such code take another way
without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, final

from torch.utils._pytree import tree_leaves

_USES = (
    "call", "bool", "len", "iter", "next", "getitem", "setitem", "delitem", "contains", "enter",
    "exit", "eq", "ne", "lt", "le", "gt", "ge", "hash", "str", "format", "int", "float", "complex",
    "index", "round", "neg", "pos", "abs", "invert", "array",
)  # fmt: skip
_OPERATORS = (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift",
    "rshift", "and", "or", "xor",
)  # fmt: skip


@final
class Hidden:
    """Stand in the place of a value.

    Args:
        refused: makes the error of its use.
    """

    def __init__(self, refused: Callable[[], Exception]) -> None:
        vars(self)["refused"] = refused

    def __getattr__(self, name: str) -> NoReturn:
        raise vars(self)["refused"]()

    def __setattr__(self, name: str, value: object) -> None:
        raise vars(self)["refused"]()

    def __repr__(self) -> str:  # of debuggers, and of errors that show what was around
        return "<not to be used here>"

    def __copy__(self) -> Hidden:  # of the module that has it
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Hidden:
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Hidden):
                raise vars(x)["refused"]()
        return NotImplemented


def _use(hidden: Hidden, *args: object, **kwargs: object) -> NoReturn:
    raise vars(hidden)["refused"]()


for _name in (*_USES, *(f"{side}{name}" for name in _OPERATORS for side in ("", "r", "i"))):
    setattr(Hidden, f"__{_name}__", _use)
