"""Factored gradients: tensors that hold factors, and become a matrix when somebody asks for it.

Autograd, which knows gradients as tensors of the shape of their parameter, hands them on and
adds them; stores and hooks hold them as any other. Nothing of the size of the matrix is made:

    detach, clone in the layout of the parameter, another dtype     the factors go along
    one + a later one of the same step                              the later one, which has both
    all else                                                        the matrix, made once
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.codecs.factors import Factors

_aten: Final = torch.ops.aten


class Form(NamedTuple):
    """Say of which form a tensor is, whose values do not matter."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> Form:
        return cls(x.shape, x.stride(), x.dtype, x.device)


@final
class FactoredGradient(Tensor):
    """Be the gradient of a parameter as far as the step has come, by its factors.

    Args:
        form: of the parameter.
        factors: of the gradient as a matrix, its first dimension as rows.
        num_rows: of the step that are in it.
    """

    factors: Factors
    num_rows: int
    is_changed: bool  # whether somebody has written to the matrix, which the factors lack
    _matrix: Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, form: Form, factors: Factors, num_rows: int) -> FactoredGradient:
        """Make one without memory of its own."""
        made: FactoredGradient = torch.Tensor._make_wrapper_subclass(
            cls,
            form.shape,
            strides=form.strides,
            dtype=form.dtype,
            device=form.device,
            storage_size=0,
        )
        made.factors, made.num_rows = factors, num_rows
        made.is_changed, made._matrix = False, None
        return made

    def matrix(self) -> Tensor:
        """Return the gradient as a plain tensor, in the shape of its parameter."""
        if self._matrix is None:
            dense = self.factors.dense().to(self.dtype).view(self.shape)
            self._matrix = torch.empty_strided(
                self.shape, self.stride(), dtype=self.dtype, device=self.device
            ).copy_(dense)
        return self._matrix

    def held(self) -> list[Tensor]:
        """Return what takes memory of it."""
        return [*self.factors, *([] if self._matrix is None else [self._matrix])]

    @override
    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FactoredGradient({tuple(self.shape)}, rank {len(self.factors.sigma)})"

    @override
    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.matrix().clone()

    @override
    def __reduce_ex__(self, proto: Any) -> Any:
        return self.matrix().__reduce_ex__(proto)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (known := _KNOWN.get(func)) is not None:
            found = known(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if func._schema.is_mutable:
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, cls):
                    x.is_changed = True
        plain = tree_map_only(cls, cls.matrix, (args, kwargs))
        return func(*plain[0], **plain[1])


def _same(x: FactoredGradient, dtype: torch.dtype | None = None) -> Any:
    if x.is_changed:
        return NotImplemented
    form = Form.of(x)._replace(dtype=dtype or x.dtype)
    return FactoredGradient(form, x.factors, x.num_rows)


def _cast(x: FactoredGradient, *, dtype: torch.dtype | None = None, **more: Any) -> Any:
    is_elsewhere = any(value is not None and value is not False for value in more.values())
    return NotImplemented if is_elsewhere else _same(x, dtype)


def _sum(x: Any, y: Any, **more: Any) -> Any:
    """Return the later one: a stream goes on within a step."""
    _check_added(x, y)
    later = x if x.num_rows >= y.num_rows else y
    return FactoredGradient(Form.of(x), later.factors, later.num_rows)


def _add_to(x: Any, y: Any, **more: Any) -> Any:
    _check_added(x, y)
    if y.num_rows > x.num_rows:
        x.factors, x.num_rows, x._matrix = y.factors, y.num_rows, None
    return x


def _add_each(xs: Any, ys: Any, **more: Any) -> None:
    for x, y in zip(xs, ys, strict=True):
        x.add_(y)


def _check_added(x: Any, y: Any) -> None:
    for each in (x, y):
        if not isinstance(each, FactoredGradient) or each.is_changed:
            raise StepError(
                f"the gradient of a weight of shape {list(x.shape)}, of which "
                "LowRankGradients keeps factors, is added to a dense one: the weight is used "
                "outside of its layer, too, or a hook has changed what came before; allowed: "
                "weights that their layer alone uses; leave the layer out, "
                "LowRankGradients(modules=[...])"
            )


def _keep(x: FactoredGradient, stream: Any) -> None:
    for each in x.factors:
        each.record_stream(stream)


_KNOWN: Final[dict[Any, Callable[..., Any]]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten._to_copy.default: _cast,
    _aten.add.Tensor: _sum,
    _aten.add_.Tensor: _add_to,
    _aten._foreach_add_.List: _add_each,
    _aten.record_stream.default: _keep,
}
