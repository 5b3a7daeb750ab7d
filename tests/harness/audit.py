"""Note which code of the package asks tensors for their values, where a GPU would be waited for.

On a GPU each such question blocks the host until everything before it has been computed. On the
host it costs nothing, and nobody notices; so every way is intercepted in which Python asks:

    methods and functions    x.item(), x.tolist(), bool(x), x.cpu(), torch.equal(x, y), ...
    moves between devices    x.to(device), torch.tensor(numbers, device=...): from pageable memory
    what C++ asks by itself  aten::_local_scalar_dense and its like, by a dispatch mode

The one who asked is the innermost function on the stack that is neither torch's nor Python's own.
If it is the package's, the question is its own; if it is Lightning's or the user's, it would be
asked without the package, too.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PACKAGE = "lightning_cyclic"
ASKS = [  # methods
    "item", "tolist", "cpu", "numpy", "nonzero", "is_nonzero", "equal", "allclose", "unique",
    "masked_select", "argwhere", "__bool__", "__float__", "__int__", "__index__", "__complex__",
    "__array__", "__contains__", "__repr__", "__format__",
]  # fmt: skip
FUNCTIONS = [
    "equal", "allclose", "is_nonzero", "nonzero", "argwhere", "unique", "unique_consecutive",
    "masked_select",
]  # fmt: skip
ATEN = {
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2",
    "unique_consecutive",
}  # fmt: skip


class Audit:
    """Intercept all questions of this process, and note them while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.found: set[str] = set()  # "module:function operation"
        self.of_others: set[str] = set()
        self._inside = threading.local()  # one question may be put by others

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Intercept while the body runs, in threads that begin in it, too."""
        patch = pytest.MonkeyPatch()
        for name in ASKS:
            patch.setattr(Tensor, name, self._noting(name, getattr(Tensor, name)))
        for name in FUNCTIONS:
            patch.setattr(torch, name, self._noting(name, getattr(torch, name)))
        for owner, name in ((Tensor, "to"), (Tensor, "new_tensor"), (torch, "tensor")):
            patch.setattr(owner, name, self._noting(name, getattr(owner, name), _moves))
        for name in ("__getitem__", "__setitem__"):
            patch.setattr(Tensor, name, self._noting(name, getattr(Tensor, name), _is_masked))
        patch.setattr(threading.Thread, "run", self._watching(threading.Thread.run))
        try:
            with _Dispatched(self.note):
                yield
        finally:
            self.is_on = False
            patch.undo()

    def note(self, operation: str) -> None:
        """Note a question, and who asks."""
        if not self.is_on or getattr(self._inside, "yes", False):
            return
        frame: Any = sys._getframe(1)
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            top = module.partition(".")[0]
            if module != __name__ and top != "torch" and top not in sys.stdlib_module_names:
                break
            frame = frame.f_back
        if frame is None:
            return
        function = frame.f_code.co_qualname.partition(".<locals>")[0]
        if top == PACKAGE:
            self.found.add(f"{module.removeprefix(f'{PACKAGE}.')}:{function} {operation}")
        else:
            self.of_others.add(f"{module}:{function} {operation}")

    def _noting(
        self, name: str, asked: Any, waits: Callable[..., bool] = lambda *args, **kwargs: True
    ) -> Any:
        @functools.wraps(asked)
        def ask(*args: Any, **kwargs: Any) -> Any:
            if not waits(*args, **kwargs):
                return asked(*args, **kwargs)
            self.note(name)
            before, self._inside.yes = getattr(self._inside, "yes", False), True
            try:
                return asked(*args, **kwargs)
            finally:
                self._inside.yes = before

        return ask

    def _watching(self, run: Callable[..., None]) -> Callable[..., None]:
        def watched(thread: threading.Thread) -> None:
            with _Dispatched(self.note):
                run(thread)

        return watched


class _Dispatched(TorchDispatchMode):
    """Tell of what C++ asks by itself: ``range(x)``, ``torch.full((), x)``, ``y[:x]``."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in ATEN:
            self._note(name)
        return func(*args, **(kwargs or {}))


def _moves(*args: Any, **kwargs: Any) -> bool:
    """Say whether a device is named: what is moved without one stays where it is."""
    return kwargs.get("device") is not None or any(
        isinstance(x, torch.device | str) for x in args[1:]
    )


def _is_masked(x: Tensor, index: Any, *value: Any) -> bool:
    """Say whether a tensor is indexed by a mask, whose number of elements has to be known."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)


class Behind(Callback):
    """Audit the steps of a fit behind its first ones, but for the last, which has a flush.

    Args:
        audit: what is switched on and off.
        first: batch with which it begins.
    """

    def __init__(self, audit: Audit, first: int = 3) -> None:
        self._audit = audit
        self._first = first
        self.batches = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        last = trainer.num_training_batches - 1
        self._audit.is_on = self._first <= batch_idx < last
        self.batches += self._audit.is_on
