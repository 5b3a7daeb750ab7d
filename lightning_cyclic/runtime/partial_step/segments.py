"""Segments: units of a stage that keep nothing but their inputs, and are run again when needed.

    F   keeps a segment's inputs; in the place of what autograd saves of its units lie places
    B   asks for what lies in the first such place: the segment is run again, unit by unit, as its
        schedule says, and fills its places; a segment inside leaves its own for later

The graph is that of a step that keeps all, so that gradients are added in the same order; what is
run again only makes the values anew, from graphs of its own that nobody goes back through. It ends
with the last value that was saved, as torch's own checkpoint does. What a unit does not do, the
code between units, is done once, and kept.

A run again finds what the first one found: generators, buffers and autocast as they were when the
unit was called, whatever has drawn since, and the weights of the version that the forward read,
which lie in place during a backward. It leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, NamedTuple, final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_cyclic.errors import StepError
from lightning_cyclic.planner.rematerialisation import Again, Schedule
from lightning_cyclic.runtime.bits import version
from lightning_cyclic.runtime.torch_functions import saving_hooks
from lightning_cyclic.runtime.values.trees import Structure, flatten, unflatten

Resumed = Callable[[], AbstractContextManager[None]]
"""Runs a body on what there was when this was made."""
Moments = Callable[[str], Resumed]
"""Notes what a unit, by its path, is about to find."""

_PLAIN_KINDS = (None, tuple, list, dict)
_PLAIN_LEAVES = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)


def is_plain(leaves: Sequence[Any], structure: Structure) -> bool:
    """Say whether arguments are tensors and values, in tuples, lists and dictionaries.

    A unit might change anything else, such as a cache, when it runs once more.
    """
    return _is_plain_structure(structure) and all(
        isinstance(x, (Tensor, *_PLAIN_LEAVES)) for x in leaves
    )


def _is_plain_structure(structure: Structure) -> bool:
    return structure.kind in _PLAIN_KINDS and all(map(_is_plain_structure, structure.children))


class Surroundings(NamedTuple):
    """Hold what a unit is called in, as far as the bits of what it gives depend on it."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    caches: bool
    attention: tuple[bool, ...]

    @classmethod
    def now(cls) -> Surroundings:
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        backend: Any = torch.backends.cuda
        return cls(
            tuple((x, torch.is_autocast_enabled(x), torch.get_autocast_dtype(x)) for x in kinds),
            torch.is_autocast_cache_enabled(),
            (
                backend.flash_sdp_enabled(), backend.mem_efficient_sdp_enabled(),
                backend.math_sdp_enabled(), backend.cudnn_sdp_enabled(),
            ),
        )  # fmt: skip

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run the body in them; gradients are made."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype, enabled=enabled, cache_enabled=self.caches)
                )
            yield


class _Made(NamedTuple):
    """Stand for a tensor that a unit of the same segment has made: a leaf of its output."""

    k: int
    leaf: int


class _Given(NamedTuple):
    """Hold a tensor that entered a segment, apart from its graph, which holds the segment."""

    value: Tensor
    requires_grad: bool
    version: int

    @classmethod
    def of(cls, x: Tensor) -> _Given:
        value = x if isinstance(x, nn.Parameter) else x.detach()
        return cls(value, x.requires_grad, version(x))

    def again(self) -> Tensor:
        if isinstance(self.value, nn.Parameter):
            return self.value
        return self.value.detach().requires_grad_(self.requires_grad)


class _Call(NamedTuple):
    """Hold one call of a unit.

    Args:
        leaves: of its arguments; tensors as _Made or _Given.
        resumed: runs a body on what it found.
        num_saved: how many tensors autograd saved of it, in F.
    """

    path: str
    original: Callable[..., Any]
    leaves: list[Any]
    structure: Structure
    around: Surroundings
    resumed: Resumed
    num_saved: list[int]


class _Enough(BaseException):
    """End a run again that has made all; no error, and not caught by ``except Exception``."""


@final
class _Segment:
    """Make what autograd saved of some units anew, when it is asked for.

    Args:
        first: number of the first unit.
        given: what these units are given that others of an outer segment have made.
    """

    def __init__(
        self,
        first: int,
        inside: Schedule,
        calls: list[_Call],
        given: Mapping[_Made, _Given],
    ) -> None:
        self.calls = calls
        self._first = first
        self._inside = inside
        self._given = given
        self._saved: dict[tuple[int, int], Tensor] = {}
        self._segments: list[_Segment] = []

    def saving(self, k: int, num_saved: list[int]) -> AbstractContextManager[Any]:
        """Let autograd save places in this segment."""

        def pack(_: Tensor) -> tuple[int, int]:
            num_saved[0] += 1
            return k, num_saved[0] - 1

        return saved_tensors_hooks(pack, self.tensor)

    def tensor(self, place: tuple[int, int]) -> Tensor:
        """Give what autograd saved; run the units again unless that has been done."""
        inner = self._around(place[0])
        if inner is not None:
            return inner.tensor(place)
        if place not in self._saved:  # for the first time, or once more
            self._run_again()
            inner = self._around(place[0])
            if inner is not None:
                return inner.tensor(place)
        return self._saved.pop(place)

    def _around(self, k: int) -> _Segment | None:
        for segment in self._segments:
            if segment._first <= k < segment._first + len(segment.calls):
                # those behind it have had their backward, and their inputs may go
                del self._segments[self._segments.index(segment) + 1 :]
                return segment
        return None

    def _run_again(self) -> None:
        self._saved, self._segments = {}, []
        env = dict(self._given)
        for node in self._inside:
            if isinstance(node, Again):
                self._run_inner(node, env)
            elif node.k - self._first < len(self.calls):  # else the step took another way
                self._run(node.k, env, self._keeping(node.k))
                self._check(node.k)

    def _run_inner(self, node: Again, env: dict[_Made, _Given]) -> None:
        calls = self.calls[node.first - self._first : node.last + 1 - self._first]
        wanted = {x for call in calls for x in call.leaves if isinstance(x, _Made)}
        given = {x: env[x] for x in wanted if x in env}
        self._segments.append(_Segment(node.first, node.inside, calls, given))
        for n in range(len(calls)):
            self._run(node.first + n, env, saved_tensors_hooks(_nothing, _unused))

    def _keeping(self, k: int) -> AbstractContextManager[Any]:
        n, num_saved = k - self._first, 0
        # what the last unit gives, nobody is given: it has run for what it keeps
        enough = self.calls[n].num_saved[0] if n + 1 == len(self.calls) else None

        def keep(x: Tensor) -> Tensor:
            nonlocal num_saved
            kept = x if isinstance(x, nn.Parameter) else x.detach()
            self._saved[k, num_saved] = kept
            num_saved += 1
            if num_saved == enough:
                raise _Enough
            return kept

        return saved_tensors_hooks(keep, lambda x: x)

    def _check(self, k: int) -> None:
        call = self.calls[k - self._first]
        num_saved = sum(place[0] == k for place in self._saved)
        if num_saved != call.num_saved[0]:
            raise StepError(
                f"{call.path!r}, run again for its backward, kept {num_saved} tensors where its "
                f"forward had kept {call.num_saved[0]}; allowed: modules that do the same when "
                "they are given the same; "
                'use activation_checkpointing="always", or "never"'
            )

    def _run(self, k: int, env: dict[_Made, _Given], hooks: AbstractContextManager[Any]) -> None:
        n = k - self._first
        call = self.calls[n]
        made = {id(x): x for x in call.leaves if isinstance(x, _Made | _Given)}
        found = {key: _value(x, env, call.path) for key, x in made.items()}
        args, kwargs = unflatten(call.structure, [found.get(id(x), x) for x in call.leaves])
        result = None
        with suppress(_Enough), call.resumed(), call.around.again(), hooks:
            result = call.original(*args, **kwargs)
        later = {x for c in self.calls[n + 1 :] for x in c.leaves if isinstance(x, _Made)}
        for x in [x for x in env if x not in later]:
            del env[x]
        for leaf, x in enumerate(flatten(result)[0]):
            if _Made(k, leaf) in later:
                env[_Made(k, leaf)] = _Given.of(x)


def _value(x: _Made | _Given, env: Mapping[_Made, _Given], path: str) -> Tensor:
    given = env[x] if isinstance(x, _Made) else x
    if version(given.value) != given.version:
        raise StepError(
            f"a tensor that {path!r} is given was changed in place behind its call, so that it "
            "cannot be run again; allowed: tensors that stay as they are; change a copy "
            '(x = x + y, not x += y), or use activation_checkpointing="always"'
        )
    return given.again()


def _nothing(_: Tensor) -> None:
    return None


def _unused(_: Any) -> Tensor:
    raise AssertionError("the graph of a run again was used")


# ---------------------------------------------------------------------- F


@final
class Recorder:
    """Follow the units of a stage through one forward, and take down what is run again.

    Args:
        paths: of the units, in the order in which they are expected.
        opened: paths of modules of which the units are parts.
        schedule: of the units.
        moments: notes what units are about to find.
    """

    def __init__(
        self, paths: Sequence[str], opened: Collection[str], schedule: Schedule, moments: Moments
    ) -> None:
        self._paths = paths
        self._opened = opened
        self._nodes = {
            k: node
            for node in schedule if isinstance(node, Again)
            for k in range(node.first, node.last + 1)
        }  # fmt: skip
        self._moments = moments
        self._hooks: Any = None
        self._k = 0
        self._is_inside = self._has_strayed = False
        self._segment: _Segment | None = None
        self._made: dict[int, tuple[ref[Tensor], _Made, int]] = {}

    @contextmanager
    def following(self) -> Iterator[None]:
        self._hooks = saving_hooks()
        yield
        self._made.clear()
        self._segment = None

    def call(self, path: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answer a call of a module."""
        if self._is_inside or path in self._opened or not is_seen(self._hooks):
            return original(*args, **kwargs)
        k, self._k = self._k, self._k + 1
        self._has_strayed |= k >= len(self._paths) or self._paths[k] != path
        node = None if self._has_strayed else self._nodes.get(k)
        self._is_inside = True
        try:
            if node is None:
                return original(*args, **kwargs)
            return self._taken_down(k, node, path, original, args, kwargs)
        finally:
            self._is_inside = False

    def _taken_down(
        self, k: int, node: Again, path: str, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        leaves, structure = flatten((args, kwargs))
        if not is_plain(leaves, structure):  # this time
            self._has_strayed = True
            return original(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if k == node.first or self._segment is None:
                self._made.clear()
                self._segment = _Segment(k, node.inside, [], {})
            seen: dict[int, Any] = {}
            told = [
                seen.setdefault(id(x), self._told(x)) if isinstance(x, Tensor) else x
                for x in leaves
            ]
            resumed = self._moments(path)
        call = _Call(path, original, told, structure, Surroundings.now(), resumed, [0])
        self._segment.calls.append(call)
        with self._segment.saving(k, call.num_saved):
            result = original(*args, **kwargs)
        if k < node.last:
            for leaf, x in enumerate(flatten(result)[0]):
                if isinstance(x, Tensor):
                    self._made[id(x)] = ref(x), _Made(k, leaf), version(x)
        return result

    def _told(self, x: Tensor) -> _Made | _Given:
        made = self._made.get(id(x))
        if made is not None and made[0]() is x and made[2] == version(x):
            return made[1]
        return _Given.of(x)


def is_seen(hooks: Any) -> bool:
    """Say whether what autograd saves now is for a stage, and not for others who lead it.

    Args:
        hooks: of what autograd saves, when the stage began.
    """
    return (
        torch.is_grad_enabled() and not torch.compiler.is_compiling() and saving_hooks() == hooks
    )
