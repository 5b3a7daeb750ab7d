"""What a worker that runs whole micro-batches needs to go on with the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias, final

from torch import Tensor

Values: TypeAlias = Mapping[str, Tensor]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalState:
    """Hold it of a worker that trains weights of its own, beside the outer ones.

    Args:
        own: name -> its own value, where that is not the outer one.
        momentum: name -> momentum of the outer weight; of the stages that it owns.
        masters: name -> the outer weight, where it has a wider dtype than the one that is sent.
    """

    own: Values = field(default_factory=dict)
    momentum: Values = field(default_factory=dict)
    masters: Values = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """Hold it beside weights and optimizer state.

    Args:
        t: steps done; every update up to version t has been applied.
        previous: name -> value in version t-1, for the stages that step t still reads so.
        local: of local steps; the module has the outer weights.
    """

    t: int
    previous: Values
    local: LocalState | None = None

    def as_data(self, worker: int, *, has_previous: bool) -> dict[str, Any]:
        """Return this worker's part of what is under a checkpoint's key.

        Args:
            has_previous: whether it is this worker that has the previous versions written.
        """
        data = {"t": self.t, "previous": self.previous if has_previous else {}}
        if (local := self.local) is None:
            return data
        own = {str(worker): local.own}
        return data | {"local": {"own": own, "momentum": local.momentum, "masters": local.masters}}

    @classmethod
    def from_data(cls, data: Mapping[str, Any], worker: int) -> Self:
        """Read what all workers' parts are together."""
        found = data.get("local")
        local = None if found is None else LocalState(
            own=found["own"][str(worker)], momentum=found["momentum"], masters=found["masters"]
        )  # fmt: skip
        return cls(t=data["t"], previous=data["previous"], local=local)
