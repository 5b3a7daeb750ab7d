"""Who has the tensors that come and go: the optimizer its state, the module its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.absent import is_absent, make_present
from lightning_cyclic.runtime.state_layout import Chunk, Part
from lightning_cyclic.runtime.weight_watch import WatchedData, get_data, put_data


class Holder:
    """Give and take tensors, and say in errors what they are."""

    what: ClassVar[str]
    is_one: ClassVar[bool]
    use: ClassVar[str]
    where: ClassVar[str]
    allowed: ClassVar[str]

    def begin(self, chunk: Chunk) -> None:
        """Have what is about to be put away."""

    def get(self, part: Part) -> Any:
        """Return what the holder has now; None: nothing yet."""
        raise NotImplementedError

    def put(self, part: Part, x: Tensor) -> None:
        """Let it have a tensor."""
        raise NotImplementedError

    def words_of(self, part: Part) -> str:
        raise NotImplementedError

    def changes(self, chunk: Chunk) -> bool:
        """Say whether an update changes anything of a chunk."""
        return True

    def note(self, chunk: Chunk) -> None:
        """Note what a chunk is that comes, or is shown now."""

    def has_changed(self, chunk: Chunk) -> bool:
        """Say whether somebody may have changed it since, besides an update."""
        return False

    def check(self, j: int, parameters: Sequence[nn.Parameter], known: Sequence[Part]) -> None:
        """Refuse what an update has made of a stage, if it is not known."""

    def close(self) -> None:
        """End."""


@final
class OptimizerState(Holder):
    """Be the state of an optimizer.

    Args:
        optimizer: returns it.
    """

    what = "optimizer state"
    is_one = True
    use = "its update"
    where = "optimizer.state"
    allowed = "state as the optimizer makes it in its first step; load such"

    def __init__(self, optimizer: Callable[[], Optimizer]) -> None:
        self._optimizer = optimizer

    @override
    def get(self, part: Part) -> Any:
        state = self._optimizer().state
        return state[part.p].get(part.key) if part.p in state else None

    @override
    def put(self, part: Part, x: Tensor) -> None:
        self._optimizer().state[part.p][part.key] = x

    @override
    def words_of(self, part: Part) -> str:
        return f"optimizer state {part.key!r} of a parameter"

    @override
    def check(self, j: int, parameters: Sequence[nn.Parameter], known: Sequence[Part]) -> None:
        state = self._optimizer().state
        names = {(part.p, part.key) for part in known}
        for p in parameters:
            for key, x in state.get(p, {}).items():
                if isinstance(x, Tensor) and x.dim() > 0 and (p, key) not in names:
                    name = type(self._optimizer()).__name__
                    raise StepError(
                        f"{name} has made {key!r}, which it does not make in its first step, of a "
                        f"parameter of stage {j}, so that memory_limit_bytes=... has no place for "
                        "it; allowed: parameters that the optimizer has from the first step on, "
                        "and optimizers that make all their state at once, with settings "
                        "(amsgrad, momentum) that stay; leave memory_limit_bytes out"
                    )


@final
class ModuleWeights(Holder):
    """Be the weights of a module.

    What changes them in place counts on them, and who takes their ``data`` tells; so it is known
    what a forward has changed, or might have.
    """

    what = "weights"
    is_one = False
    use = "their use"
    where = "them"
    allowed = "weights that keep their shapes and dtypes"

    def __init__(self) -> None:
        self._noted: dict[int, int] = {}  # of what is shown: how often it was changed
        self._looked: set[int] = set()
        WatchedData.add(self)

    def look(self, p: nn.Parameter) -> None:
        self._looked.add(id(p))

    @override
    def begin(self, chunk: Chunk) -> None:
        absent = [part.p for part in chunk if is_absent(part.p)]
        make_present(*absent)

    @override
    def get(self, part: Part) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # one may be hidden meanwhile
            return get_data(part.p)

    @override
    def put(self, part: Part, x: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            put_data(part.p, x)

    @override
    def words_of(self, part: Part) -> str:
        return "a parameter"

    @override
    def changes(self, chunk: Chunk) -> bool:
        return any(part.p.requires_grad for part in chunk)

    @override
    def note(self, chunk: Chunk) -> None:
        for p, *_ in chunk:
            self._noted[id(p)] = p._version
            self._looked.discard(id(p))

    @override
    def has_changed(self, chunk: Chunk) -> bool:
        return any(
            id(part.p) in self._looked or self._noted.get(id(part.p)) != part.p._version
            for part in chunk
        )

    @override
    def close(self) -> None:
        WatchedData.remove(self)
