"""What training keeps of one parameter beside its weight: kept elements, and a master weight.

mask         1 0 0 1 / 0 1 0 0        which elements of a weight are kept
index        0 3 5                    their positions in the flat weight, int32, made once
compress     w.view(-1)[index]        1-D; gradient, master weight and optimizer state share it
expand_into  w.view(-1)[index] = v    in place; the others are zero and stay so

forward, backward   weight (dense, low precision); in the master weight's ``grad`` the gradient's
                    sum (compressed, of the weight's dtype)
the step            the sum as float32: what the optimizer sees
behind it           the weight is written from the master weight; gradients go

Under "32-true" the weight is the master weight. What the optimizer sees is compressed from it for
the step, and goes with the gradients; between steps the master weight has a shape and no memory.
So it is where another worker makes the updates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.absent import is_absent

MOST_ELEMENTS = 2**31 - 1  # of a tensor whose positions are int32
_AT_ONCE = 1 << 18


@final
class Layout:
    """Train the elements that a mask keeps, as a 1-D tensor; or all, in the weight's own shape.

    Args:
        index: positions in the flat weight, int32, ascending, shape (kept,); None for all.
        shape: of the weight; none is needed for all.

    Raises:
        ConfigurationError: a weight whose positions do not fit into int32.

    Source: Singh and Bhatele, "Exploiting Sparsity in Pruned Neural Networks to Optimize Large
        Model Training", IPDPS 2023, arXiv 2302.05045, section III.

    Example:
        >>> layout = Layout.of(torch.tensor([[True, False], [False, True]]))
        >>> layout.index
        tensor([0, 3], dtype=torch.int32)
        >>> layout.compress(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([1., 4.])
    """

    def __init__(self, index: Tensor | None, shape: Sequence[int] = ()) -> None:
        self.index = index
        self.shape = torch.Size(shape)
        if index is not None:
            check_size(self.shape)

    @classmethod
    def of(cls, mask: Tensor) -> Layout:
        """Return the layout of a mask, bool, True where an element is kept."""
        check_size(mask.shape)
        return cls(mask.reshape(-1).nonzero().view(-1).to(torch.int32), mask.shape)

    @property
    def kept(self) -> Tensor:
        assert self.index is not None, "nothing is pruned"
        return self.index

    @property
    def mask(self) -> Tensor:
        return self.expand(torch.ones_like(self.kept, dtype=torch.bool))

    @property
    def digest(self) -> str:
        told = hashlib.sha256(repr(tuple(self.shape)).encode())
        told.update(self.kept.cpu().contiguous().view(torch.uint8).numpy().data)
        return told.hexdigest()

    def compress(self, dense: Tensor) -> Tensor:
        if self.index is None:
            return dense.detach()
        flat = (dense.to_dense() if dense.is_sparse else dense).detach().reshape(-1)
        return flat.index_select(0, self.index)

    def expand(self, values: Tensor) -> Tensor:
        """Return a tensor of the weight's shape, with zeros in all other places."""
        if self.index is None:
            return values.detach()
        dense = torch.zeros(self.shape, dtype=values.dtype, device=values.device)
        self.expand_into(values, dense)
        return dense

    def expand_into(self, values: Tensor, dense: Tensor) -> None:
        """Write values into a tensor of the weight's shape, whose other elements stay."""
        if self.index is None:
            dense.detach().copy_(values.detach())
            return
        if not dense.is_contiguous():  # channels_last
            dense.detach().copy_(self.expand(values.to(dense.dtype)))
            return
        flat = dense.detach().view(-1)
        # index_put_ makes an int64 copy of its positions: of all at once, 8 bytes for each
        for k in range(0, len(self.index), _AT_ONCE):
            part = slice(k, k + _AT_ONCE)
            flat.index_put_((self.index[part],), values.detach()[part].to(dense.dtype))

    def to(self, device: torch.device) -> Layout:
        return self if self.index is None else Layout(self.index.to(device), self.shape)


def check_size(shape: Sequence[int], name: str = "") -> None:
    numel = torch.Size(shape).numel()
    if numel > MOST_ELEMENTS:
        raise ConfigurationError(
            f"parameter {name!r} has {numel} elements, but positions of kept elements are int32; "
            f"allowed: up to {MOST_ELEMENTS} in one tensor; split the layer, or exclude it: "
            f"SparseStatePrecision(exclude=({name!r}, ...))"
        )


@final
class ParameterState:
    """Train one parameter by what is kept of it.

    Args:
        weight: the module's own, as it was initialised. Pruned elements become zero, and the
            others are rounded.
        layout: of what is trained.
        dtype: of forwards and backwards.

    Attributes:
        master: what the optimizer is given in place of the weight, float32.
        trained_shape: its shape in the optimizer's step.
    """

    def __init__(
        self, name: str, weight: nn.Parameter, layout: Layout, dtype: torch.dtype
    ) -> None:
        self.name = name
        self.weight = weight
        self.layout = layout = layout.to(weight.device)  # masks may have been given on another
        self._keeps_master = dtype != torch.float32
        self._is_shown = self._is_away = False
        self._sum: Tensor | None = None  # of gradients, while the optimizer sees them as float32
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        values = layout.compress(weight).to(torch.float32, copy=True)
        self.trained_shape = values.shape
        dense = torch.zeros_like(weight, dtype=dtype, requires_grad=False)
        layout.expand_into(values, dense)
        weight.data = dense
        self._version = weight._version
        self.master = nn.Parameter(values)
        self.master.grad_dtype = None  # sums are of the weight's
        self._rest()

    # ------------------------------------------------------------------ a step

    def watch(self) -> None:
        """Take each gradient of the weight as soon as backward has it."""
        self.weight.grad = None
        is_trained = self.weight.requires_grad
        if self._hook is None:
            self.weight.requires_grad_()  # torch wants it for a hook; it may be unfrozen later
            self._hook = self.weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self.take
            )
            self.weight.requires_grad_(is_trained)

    def take(self, weight: Tensor) -> None:
        """Add the gradient of the weight, or of what stands in for it, and leave it none."""
        assert weight.grad is not None
        grad = self.layout.compress(weight.grad)
        weight.grad = None
        self.master.grad = grad if self.master.grad is None else self.master.grad.add_(grad)

    def show(self, *, follows: bool = True) -> None:
        """Let the optimizer see master weight and gradient; take over what others have written."""
        if self._is_away:
            return
        if follows and self.weight._version != self._version:
            self.reread()
        if not self._keeps_master:
            self.master.data = self.layout.compress(self.weight)
        self._sum = self.master.grad
        if self._sum is not None:
            self.master.grad = self._sum.to(torch.float32)
        self._is_shown = True

    def write(self) -> None:
        if not self._is_shown:  # the optimizer has not called its closure
            return
        self._is_shown = False
        self.layout.expand_into(self.master, self.weight)
        self._version = self.weight._version
        self._sum = self.master.grad = None
        self._rest()

    @property
    def _rests(self) -> bool:
        return self._is_away or not (self._keeps_master or self._is_shown)

    def _rest(self) -> None:
        if self._rests:  # with the shape of its gradients
            self.master.data = self.master.data.new_zeros(()).expand(self.trained_shape)

    def leave(self) -> None:
        self._is_away = True
        self._rest()

    # ------------------------------------------------------------------ between steps

    def reread(self) -> None:
        """Take over what others have written into the weight: a hook, or a checkpoint.

        Master weights of elements that are as they were keep the bits that the weight has not.
        """
        if is_absent(self.weight):  # another worker has it
            return
        now = self.layout.compress(self.weight)
        if self._is_away:
            self._is_away = False
            self.master.data = now.to(torch.float32, copy=True)
        elif self._keeps_master:
            is_old = now == self.master.detach().to(now.dtype)
            now = torch.where(is_old, self.master.detach(), now.to(torch.float32))
            self.master.data = now
        self.weight.detach().copy_(self.layout.expand(now.to(self.weight.dtype)))
        self._version = self.weight._version

    def load(self, values: Tensor) -> None:
        if is_absent(self.weight):
            return
        self.master.data = values.to(self.weight.device, torch.float32, copy=True)
        self._is_away, self._is_shown = False, True
        self.write()

    def to(self, device: torch.device) -> None:
        self.layout = self.layout.to(device)
        if not self._rests:
            self.master.data = self.master.data.to(device)
        elif self.master.device != device:
            self.master.data = self.master.data.new_zeros((), device=device)
            self._rest()

    def release(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._sum = self.master.grad = None

    @property
    def kept(self) -> list[Tensor]:
        master = None if self._rests else self.master.detach()
        found = (self.layout.index, master, self._sum, self.master.grad)
        return [x for x in found if x is not None]

    @property
    def is_compressed(self) -> bool:
        return self.layout.index is not None

    @property
    def saved(self) -> Tensor | None:
        """Return what a checkpoint has of the master weight; None where it is not here.

        The weight has it all under "32-true", and another worker what it updates.
        """
        return None if self._rests else self.master.detach().cpu()
