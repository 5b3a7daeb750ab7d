"""The weight watch: notice who changes weights while a step is under way, besides its updates.

Or between two steps, where hooks and callbacks run (plugin/weight_guard.py).

    begin      note how often each weight was changed in place; in some steps, its bits as well
    look       somebody takes the ``data`` of a weight: note its bits
    changing   around what the package itself changes: what was before must be as noted
    end        all must be as noted

Several ranks have copies of a weight, or one rank several versions, and what the user's step, a
module or a hook changes reaches one of them. That gave other weights in silence.

The comparison of the first step does not look at weights, and sees no later step.

Counts cost nothing, and do not see what ``.data`` changes. So parameters tell when theirs is taken
or set, and the bits of those are compared. What was taken before training, or reaches the memory
by another way (numpy), no parameter tells of: the bits of all weights are compared in steps 0, 1,
2, 4, 8, ... from the first on, so that whoever begins to change weights in step t is found by step
2t; and in every step on the host, where that takes less than 1 % of the step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.absent import is_absent
from lightning_cyclic.runtime.bits import Mark, digest, sum_of_bits

_count = attrgetter("_version")
_is_trained = attrgetter("requires_grad")

Weights = Mapping[str, Tensor]
"""By name; also buffers that may not change."""
_CHEAP = 0.01
_NAME = "data"
_DATA: Any = Tensor.data
get_data: Any = _DATA.__get__
"""Take the ``data`` of a parameter, and tell nobody."""
put_data: Any = _DATA.__set__
"""Set it, and tell nobody."""


class Looks(Protocol):
    """Be told of parameters whose ``data`` is taken or set."""

    def look(self, p: nn.Parameter) -> None: ...


@final
class WatchedData:
    """Be ``data`` of all parameters, and tell who watches of each that is asked for it."""

    _lock: ClassVar[threading.Lock] = threading.Lock()  # ranks may be threads

    def __init__(self) -> None:
        self.watching: dict[Looks, None] = {}

    @classmethod
    def add(cls, who: Looks) -> None:
        with cls._lock:
            found = vars(nn.Parameter).get(_NAME)
            if not isinstance(found, cls):
                found = cls()
                setattr(nn.Parameter, _NAME, found)
            found.watching[who] = None

    @classmethod
    def remove(cls, who: Looks) -> None:
        """Tell it no longer; parameters have torch's own again, if nobody is left."""
        with cls._lock:
            found = vars(nn.Parameter).get(_NAME)
            if isinstance(found, cls):
                found.watching.pop(who, None)
                if not found.watching:
                    delattr(nn.Parameter, _NAME)

    def __get__(self, p: nn.Parameter | None, kind: type) -> Any:
        if p is None:
            return _DATA
        self._tell(p)
        return get_data(p)

    def __set__(self, p: nn.Parameter, value: Tensor) -> None:
        self._tell(p)
        put_data(p, value)

    def _tell(self, p: nn.Parameter) -> None:
        if type(p) is nn.Parameter:  # else it is absent, or has no values yet
            with torch._C.DisableTorchFunction():  # none of this is the user's
                for who in list(self.watching):
                    who.look(p)


class _Noted(NamedTuple):
    """Hold what some weights were: what is absent has no bits; None where nobody looks."""

    counts: list[int]
    bits: list[Tensor | None] | None
    trained: list[bool]  # where freezing is noticed


def changed_within(name: str, rank: int, t: int) -> StepError:
    """Make the error of a weight that was changed within step ``t``."""
    return StepError(
        f"parameter {name!r} was changed on rank {rank} while step {t} was under way, by "
        "training_step, a module that it calls, a hook or a callback, but ranks have several "
        "versions or copies of it, which the change does not reach; allowed: weights that the "
        "optimizer alone changes; change them in the optimizer's step(), keep what moves in a "
        "buffer, or use strategy='ddp'"
    )


def buffer_changed_late(name: str, rank: int, t: int) -> StepError:
    """Make the error of a buffer of which several stages run code that changes it."""
    return StepError(
        f"buffer {name!r} was changed in step {t} by code that several stages run, but "
        "not in the first micro-batch, which decides which stage has it; allowed: buffers "
        "that change from the first step on; change it in the first one, too"
    )


@final
class WeightWatch:
    """Compare weights at two moments.

    Args:
        may_freeze: whether weights may be frozen and unfrozen meanwhile.
        stays_in_place: whether weights may not be laid elsewhere, where views of them stay behind.
        changed: makes the error, of a name, the rank and the step; the next, that of a buffer.
        now: a clock, in seconds.
    """

    def __init__(
        self,
        rank: int,
        *,
        may_freeze: bool = True,
        stays_in_place: bool = False,
        changed: Callable[[str, int, int], Exception] = changed_within,
        buffer_changed: Callable[[str, int, int], Exception] = buffer_changed_late,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._rank = rank
        self._may_freeze = may_freeze
        self._stays_in_place = stays_in_place
        self._error, self._buffer_error = changed, buffer_changed
        self._now = now
        self._began_s = self._bits_s = 0.0  # of the step under way; seconds that its bits took
        self._is_cheap = False  # as far as the last step in which all bits were read has shown
        self._on_host = True
        self._first: int | None = None
        self._t = 0
        self._looks = self._is_on = self._may_change_back = False
        self._groups: Sequence[Weights] = ()
        self._noted: list[_Noted] = []
        self._seen: list[tuple[str, Tensor, Tensor]] = []  # bits before and behind
        self._is_changing = False  # the package itself
        self._places: dict[int, tuple[int, str]] | None = None  # id -> group, name
        # by group and name: where it lies, which is held meanwhile, and bits before
        self._looked: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}

    def begin(self, t: int, groups: Sequence[Weights], *, may_change_back: bool = False) -> None:
        """Note what weights are.

        Args:
            may_change_back: whether the same bits are no change, whatever was there meanwhile.
        """
        self._first = t if self._first is None else self._first
        since = t - self._first
        self._may_change_back = may_change_back
        self._looks = since & (since - 1) == 0 or self._is_cheap or may_change_back
        self._began_s, self._bits_s, self._on_host = self._now(), 0.0, True
        self._t, self._groups, self._seen = t, groups, []
        self._places, self._looked = None, {}
        self._noted = [self._note(k) for k in range(len(groups))]
        self._is_on, self._is_changing = True, False
        WatchedData.add(self)

    def look(self, p: nn.Parameter) -> None:
        """Note the bits of a weight, whose ``data`` somebody takes, or sets."""
        if self._is_changing or (self._looks and not self._stays_in_place):
            return
        if self._places is None:
            groups = enumerate(self._groups)
            self._places = {id(x): (k, n) for k, group in groups for n, x in group.items()}
        place = self._places.get(id(p))
        if place is not None and place not in self._looked:
            self._looked[place] = get_data(p), sum_of_bits(p)

    @contextmanager
    def watching(self, t: int, groups: Sequence[Weights]) -> Iterator[None]:
        """Run the body, in which no weight may change.

        Raises:
            StepError: one has changed.
        """
        self.begin(t, groups)
        try:
            yield
        except RuntimeError:  # autograd says that something has changed, but not what
            self.stop()
            for k in range(len(groups)):
                self._check_counts(k)  # bits would take memory, of which there may be none
            raise
        except BaseException:
            self.stop()
            raise
        self.end()

    @contextmanager
    def changing(self, groups: Collection[int]) -> Iterator[None]:
        """Run the body, in which the package changes what weights of some groups are.

        Raises:
            StepError: somebody else has changed one of them before.
        """
        if not self._is_on:
            yield
            return
        for k in groups if not self._is_changing else ():
            self._check(k)
        outer, self._is_changing = self._is_changing, True
        try:
            yield
        finally:
            self._is_changing = outer
        for k in groups:
            self._noted[k] = self._note(k)

    def end(self) -> None:
        """Check all weights, and watch no longer.

        Raises:
            StepError: one has changed.
        """
        if not self._is_on:
            return
        self.stop()
        for k in range(len(self._groups)):
            self._check(k)
        self._check_seen()
        if self._looks:
            took_s = self._now() - self._began_s
            self._is_cheap = self._on_host and self._bits_s < _CHEAP * took_s
        self._noted, self._groups, self._places = [], (), None

    def stop(self) -> None:
        """Watch no longer, whatever has changed."""
        self._is_on = False
        WatchedData.remove(self)

    def _note(self, k: int) -> _Noted:
        group = self._groups[k]
        weights = group.values()
        for place in [x for x in self._looked if x[0] == k]:
            del self._looked[place]
        counts, bits = list(map(_count, weights)), self._bits(group) if self._looks else None
        return _Noted(counts, bits, [] if self._may_freeze else list(map(_is_trained, weights)))

    def _bits(self, group: Weights) -> list[Tensor | None]:
        began_s = self._now()
        bits = [None if is_absent(p) else sum_of_bits(p) for p in group.values()]
        self._bits_s += self._now() - began_s
        self._on_host &= all(x is None or x.is_cpu for x in bits)
        return bits

    def _check(self, k: int) -> None:
        self._check_counts(k)
        group, bits = self._groups[k], self._noted[k].bits
        if bits is not None:
            each = zip(group, bits, self._bits(group), strict=True)
            self._seen += [(n, a, b) for n, a, b in each if a is not None and b is not None]
        for n, p in [(n, group[n]) for j, n in self._looked if j == k]:
            place, before = self._looked[k, n]
            if self._stays_in_place and not p.is_set_to(place):
                raise self._changed(n)
            if not is_absent(p):
                self._seen.append((n, before, sum_of_bits(p)))

    def _check_counts(self, k: int) -> None:
        group, before = self._groups[k], self._noted[k]
        counts = list(map(_count, group.values()))
        if counts != before.counts and not self._may_change_back:
            raise self._changed(_differing(group, counts, before.counts))
        trained = list(map(_is_trained, group.values())) if before.trained else []
        if trained != before.trained:
            raise StepError(
                f"parameter {_differing(group, trained, before.trained)!r} was frozen or unfrozen "
                f"on rank {self._rank} while step {self._t} was under way, but ranks run its "
                "stages at different times; allowed: between steps; do it in "
                "on_train_batch_start, or use strategy='1f1b'"
            )

    def _check_seen(self) -> None:
        """Compare all bits at once: a GPU is waited for once, in few steps."""
        seen, self._seen = self._seen, []
        if not seen:
            return
        names, before, behind = zip(*seen, strict=True)
        differ = torch.stack(before).ne(torch.stack(behind)).tolist()
        if True in differ:
            raise self._changed(names[differ.index(True)])

    def _changed(self, name: str) -> Exception:
        self.stop()
        if any(name in w and isinstance(w[name], nn.Parameter) for w in self._groups):
            return self._error(name, self._rank, self._t)
        return self._buffer_error(name, self._rank, self._t)


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Say whether a buffer is part of checkpoints."""
    path, _, own = buffer.rpartition(".")
    return own not in module.get_submodule(path)._non_persistent_buffers_set


@dataclass(slots=True)
class _Still:
    """Hold a buffer that may not change: who holds it, by which name, and what it was."""

    held: dict[str, Tensor | None]
    name: str
    may_be_another: bool
    mark: Mark
    print: Tensor | None  # of its values

    def now(self) -> Tensor | None:
        return self.mark.value if self.may_be_another else self.held.get(self.name)


@final
class StillBuffers:
    """Refuse buffers that begin to change later than in the first step.

    Others are told of those alone that changed in it. Who holds one must hold the same values,
    unless it is no part of a checkpoint: caches may be made anew.

    Args:
        names: of the buffers.
        changed: makes the error, of a name, the rank and the step.
    """

    def __init__(
        self, module: nn.Module, names: Iterable[str], rank: int,
        changed: Callable[[str, int, int], StepError],
    ) -> None:  # fmt: skip
        self._rank = rank
        self._changed = changed
        self._known: dict[str, _Still] = {}
        for name in names:
            path, _, own = name.rpartition(".")
            held, x = module.get_submodule(path)._buffers, module.get_buffer(name)
            may_be_another = not is_persistent(module, name)
            self._known[name] = _Still(held, own, may_be_another, Mark.of(x), _print(x))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return those whose bits can be read, by name."""
        each = ((name, y.mark.value) for name, y in self._known.items())
        return {name: x for name, x in each if x.layout == torch.strided}

    def begin(self) -> None:
        """Take what buffers are now: what evaluation or a hook changes is not of a step."""
        for known in self._known.values():
            now = known.now()
            if now is not None and not known.mark.is_of(now):
                known.mark, known.print = Mark.of(now), _print(now)

    def check(self, t: int) -> None:
        """Refuse what has changed since.

        Raises:
            StepError: a buffer has.
        """
        for name, known in self._known.items():
            now = known.now()
            if known.mark.is_of(now):
                continue
            if now is None or not _is_alike(known, now):
                raise self._changed(name, self._rank, t)
            known.mark = Mark.of(now)


def _print(x: Tensor) -> Tensor | None:
    return digest(x) if x.layout == torch.strided else None


def _is_alike(known: _Still, now: Tensor) -> bool:
    x, before, behind = known.mark.value, known.print, _print(now)
    is_of_a_kind = (x.shape, x.dtype) == (now.shape, now.dtype)
    return is_of_a_kind and before is not None and behind is not None and before.equal(behind)


def _differing(names: Iterable[str], now: Sequence[int], before: Sequence[int]) -> str:
    return next(n for n, a, b in zip(names, now, before, strict=True) if a != b)
