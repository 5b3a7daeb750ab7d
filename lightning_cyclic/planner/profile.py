"""A profile: what each part of a model takes, as plain numbers that JSON files keep.

    {"name": "TinyGPT", "micro_size": 8,
     "units": [{"name": "wte", "forward_s": 0.001, "backward_s": 0.002, "param_bytes": 4e6,
                "activation_bytes": 1e6, "crossing_bytes": 64e3}, ...],
     "ties": [{"units": [0, 13], "bytes": 4e6}]}

A list of them holds one model's, for micro-batches of several sizes. Units follow one another as
they run; a stage is some of them in a row, named by its first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from typing import Any, final

from lightning_cyclic.errors import PlanError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class UnitProfile:
    """Hold what one part of a model takes, for one micro-batch.

    Args:
        name: path of the module at which it begins.
        activation_bytes: bytes that its forward leaves for its backward.
        crossing_bytes: bytes that a stage which begins here receives: all that is made before it
            and used from here on. Of the first unit, those of the batch.
    """

    name: str
    forward_s: float
    backward_s: float
    param_bytes: float
    activation_bytes: float
    crossing_bytes: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """Hold parameters that several units share.

    Args:
        bytes: of the parameters, which each of the units counts as its own.
    """

    units: tuple[int, ...]
    bytes: float


COSTS = tuple(field.name for field in fields(UnitProfile) if field.name != "name")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """Hold what a model takes.

    Args:
        micro_size: samples of the micro-batch that the costs are for.
        units: its parts, in the order in which they run.

    Raises:
        PlanError: no unit, a cost below zero or not finite, or a tie of units that do not exist.

    Example:
        >>> unit = UnitProfile(name="a", forward_s=1, backward_s=2, param_bytes=8,
        ...                    activation_bytes=4, crossing_bytes=2)
        >>> profile = ModelProfile(name="two", micro_size=2, units=(unit, unit))
        >>> profile.scaled(4).units[0].forward_s
        2.0
    """

    name: str
    micro_size: int
    units: tuple[UnitProfile, ...]
    ties: tuple[Tie, ...] = ()

    def __post_init__(self) -> None:
        if not self.units:
            raise PlanError(f"profile {self.name!r} has no units; allowed: one or more; add them")
        if not isinstance(self.micro_size, int) or self.micro_size < 1:
            raise PlanError(
                f"micro_size={self.micro_size!r} of profile {self.name!r}; allowed: whole numbers "
                "from 1 on; give the samples of the micro-batch that was measured"
            )
        for number, unit in enumerate(self.units):
            for cost in COSTS:
                _check_cost(self.name, f"unit {number} ({unit.name!r})", cost, getattr(unit, cost))
        for tie in self.ties:
            _check_cost(self.name, f"the tie of units {tie.units}", "bytes", tie.bytes)
            is_ascending = list(tie.units) == sorted(set(tie.units)) and len(tie.units) > 1
            if not is_ascending or not set(tie.units) <= set(range(len(self.units))):
                raise PlanError(
                    f"a tie of units {tie.units} of profile {self.name!r}; allowed: two or more "
                    f"of the units 0 to {len(self.units) - 1}, ascending; correct it"
                )

    def scaled(self, micro_size: int) -> ModelProfile:
        """Return the profile of a micro-batch of another size, its costs in proportion.

        Parameters stay as they are. What each call costs whatever its size is not known here, so
        that small micro-batches look faster than they are: measure those that matter.
        """
        factor = micro_size / self.micro_size
        grows = [cost for cost in COSTS if cost != "param_bytes"]
        units = tuple(
            replace(unit, **{cost: getattr(unit, cost) * factor for cost in grows})
            for unit in self.units
        )
        return replace(self, micro_size=micro_size, units=units)


def to_json(profiles: Sequence[ModelProfile]) -> str:
    """Write profiles of a model as JSON text: a list, or the one that there is."""
    data = [asdict(profile) for profile in profiles]
    return json.dumps(data if len(data) > 1 else data[0], indent=1)


def from_json(text: str) -> tuple[ModelProfile, ...]:
    """Read profiles from JSON text: an object, or a list of them.

    Raises:
        PlanError: says what is missing or wrong, of which unit.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(
            f"the profile is no JSON ({error}); allowed: what `lightning-cyclic plan --save` "
            "writes; correct it there"
        ) from error
    return tuple(_profile(item) for item in (data if isinstance(data, list) else [data]))


def _profile(data: Any) -> ModelProfile:
    name = str(_fields(data, "the profile", ("name", "micro_size", "units"))["name"])
    return ModelProfile(
        name=name,
        micro_size=data["micro_size"],
        units=tuple(
            UnitProfile(**_fields(unit, f"unit {number} of profile {name!r}", ("name", *COSTS)))
            for number, unit in enumerate(_list(data["units"], "units", name))
        ),
        ties=tuple(
            Tie(units=tuple(tie["units"]), bytes=tie["bytes"])
            for tie in _list(data.get("ties", []), "ties", name)
            if _fields(tie, f"a tie of profile {name!r}", ("units", "bytes"))
        ),
    )


def _list(value: object, what: str, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise PlanError(
            f"{what} of profile {name!r} are {value!r}; allowed: a list of objects; write [...]"
        )
    return value


def _fields(data: object, whose: str, names: Iterable[str]) -> Mapping[str, Any]:
    """Return the named fields of an object, all of which must be there."""
    if not isinstance(data, dict):
        raise PlanError(f"{whose} is {data!r}; allowed: an object with {', '.join(names)}")
    missing = [name for name in names if name not in data]
    if missing:
        raise PlanError(
            f"{whose} has no {' and no '.join(missing)}; allowed: units with a number >= 0 for "
            "each cost; measure it, or write 0 where there is none"
        )
    return {name: data[name] for name in names}


def _check_cost(profile: str, whose: str, name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not isfinite(value) or value < 0:  # type: ignore[arg-type,operator]
        raise PlanError(
            f"{name}={value!r} of {whose} of profile {profile!r}; allowed: numbers >= 0; "
            "measure it again, or write 0 where it costs nothing"
        )
