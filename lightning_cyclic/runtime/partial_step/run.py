"""A run: the user's step, from its start to the end of one stage.

    region 0 .. target-1   ghosts: units are skipped, what depends on the batch alone is real
    region target          real: the ghosts that crossed are filled when it begins
    region target+1        never: its first call ends the step with a private exception

The last stage's run goes to the end of the user's step.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _pop_mode,
    _push_mode,
)

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.partial_step.chance import Chance, is_random
from lightning_cyclic.runtime.partial_step.ghosts import (
    Ghost,
    Handle,
    ask,
    reads_metadata,
    real,
    user_line,
)
from lightning_cyclic.runtime.partial_step.sharing import Sharing
from lightning_cyclic.runtime.partial_step.site import Site
from lightning_cyclic.runtime.partial_step.tape import Alias, Event, Plain, Tape, describe
from lightning_cyclic.runtime.values.plain import encode_leaf
from lightning_cyclic.runtime.values.trees import LEAF, flatten, unflatten

_run_numbers = itertools.count(1)
_MARK = "_cyclic_made"  # on a tensor: (number of the run, handle)
_READS_VALUE = frozenset(
    {"item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__"}
    | {"__complex__", "equal", "allclose", "is_nonzero", "__contains__"}
)
_NO_CONTAINERS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})
_TENSORS = frozenset({Tensor, nn.Parameter, Ghost})


class StageDone(BaseException):
    """End a step where its stage ends; no error, and not caught by ``except Exception``."""


@final
class Run:
    """Run a step for one stage and one micro-batch.

    Args:
        site: the module.
        target: the stage that is run for real.
        tapes: of the regions before it.
        received: the tensors that crossed, by handle.
        wanted: handles of what later stages need; None while that is being learnt: everything
            that is alive when the stage ends.
        path: names of the stage's events for which that holds; None for any.
        sharing: looks after received tensors that shared memory.
        chance: the randomness of this step and micro-batch.
    """

    def __init__(
        self,
        site: Site,
        target: int,
        *,
        tapes: Sequence[Tape] = (),
        received: Mapping[Handle, Tensor] | None = None,
        wanted: frozenset[Handle] | None = None,
        path: tuple[str, ...] | None = None,
        sharing: Sharing | None = None,
        chance: Chance,
    ) -> None:
        self.site = site
        self.target = target
        self.region = 0
        self.depth = 0
        self.logs: list[tuple[str, Any, dict[str, Any]]] = []
        self.used: set[Handle] = set()
        self.captured: dict[Handle, Tensor] = {}
        self.tape: list[Event] = []
        self._tapes = tapes
        self._received = dict(received or {})
        self._wanted = wanted
        self._path = path
        self.sharing = sharing or Sharing({}, {})
        self.has_strayed = False
        self._chance = chance
        self._number = next(_run_numbers)
        self._position = 0  # in the region's tape
        self._made: list[tuple[Handle, weakref.ref[Tensor]]] = []
        self._changed: dict[Handle, Tensor] = {}  # tensors of the batch that an event changed
        self._is_last = target == site.num_stages - 1
        self._came: frozenset[Handle] = frozenset()  # what has crossed
        self._watch = _Watch(self)
        self._done = False

    @property
    def is_real(self) -> bool:
        """Say whether the stage itself is under way."""
        return self.region == self.target

    def __call__(self, step: Callable[[], Any]) -> Any:
        """Run the step; return what it returned, or None where the stage is not the last.

        Raises:
            StepError: the stage never began, or never ended.
        """
        self._chance.begin_region(0)
        if self.target == 0:
            self._chance.begin_stage(0)
        self.site.run = self
        try:
            with self._watch:
                output = step()
        except StageDone:
            output = None
        finally:
            self.site.run = None
            del self._watch  # the two would keep each other alive, and all that this run holds
        return self._check_end(output)

    # ------------------------------------------------------------------ calls

    def call(self, path: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answer a call of a module with parameters, or of a metric."""
        if self._done:
            raise StageDone
        begun = self.site.begins.get(path)
        if begun is not None and begun > self.region:
            self._begin(begun, path)
        if path in self.site.cuts.split:
            return original(*args, **kwargs)
        if not self.is_real:
            with torch._C.DisableTorchFunction():
                return self._read(f"{path}()", _tensors((args, kwargs)))
        self._check_home(path)
        return self._call_unit(path, original, args, kwargs)

    def _call_unit(self, path: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        args, kwargs, inputs = self._given(args, kwargs)
        with torch._C.DisableTorchFunction():
            before = [x._version for x in inputs]
        with self._inside_unit():
            result = original(*args, **kwargs)
        self._look()
        with torch._C.DisableTorchFunction():
            mutated = tuple(
                k
                for k, (x, version) in enumerate(zip(inputs, before, strict=True))
                if x._version != version and not self._depends(x)
            )
            return self._write(f"{path}()", result, inputs, mutated)

    @contextmanager
    def _inside_unit(self) -> Iterator[None]:
        """Do not look at torch functions: where nobody does, they cost nothing."""
        self.depth += 1
        is_top = _get_current_function_mode() is self._watch  # type: ignore[no-untyped-call]
        if is_top:
            _pop_mode()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            if is_top:
                _push_mode(self._watch)  # type: ignore[no-untyped-call]
            self.depth -= 1

    def _check_home(self, path: str) -> None:
        stages = self.site.stages_of(path) if path in self.site._stages_of_unit else (self.region,)
        if self.region not in stages:
            raise StepError(
                f"module {path!r}, whose parameters belong to stage {list(stages)}, is called in "
                f"stage {self.region} at {user_line()}; allowed: calls in the order in which the "
                "stages were found; keep all its calls in one stage, "
                "CyclicStrategy(stages=[...])"
            )

    # ------------------------------------------------------------------ torch functions

    def function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer a call of a torch function outside all units."""
        known = _known(func)
        if known.is_metadata:
            return self._metadata(func, args, kwargs)
        inputs = _tensors((args, kwargs) if kwargs else args)
        if not any(map(self._depends, inputs)):  # also what leaves contexts behind the end
            return self._call(known, func, args, kwargs)
        if self._done:
            raise StageDone
        name = known.name
        if not self.is_real:
            return self._pretend_function(known, inputs)
        args, kwargs, inputs = self._given(args, kwargs, inputs)
        result = self._call(known, func, args, kwargs)
        self._look()
        if known.reads_value:
            self.tape.append(Event(name, LEAF, (), (), True))
            self._position += 1
            return result
        return self._write(name, result, inputs, self._changed_by(name, inputs))

    def _metadata(self, func: Any, args: Any, kwargs: Any) -> Any:
        if args and type(args[0]) is Ghost:
            ghost = args[0]
            if ghost.value is None:
                return ask(func, args, kwargs)
            args = (ghost.value, *args[1:])
        return func(*args, **kwargs)

    def _call(self, known: _Known, func: Any, args: Any, kwargs: Any) -> Any:
        if known.is_random:
            with self._chance.of_glue():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _pretend_function(self, known: _Known, inputs: Sequence[Tensor]) -> Any:
        if known.is_random:
            self._chance.skip_glue()
        if known.reads_value:
            self._refuse_read()
        return self._read(known.name, inputs)

    def _changed_by(self, name: str, inputs: Sequence[Tensor]) -> tuple[int, ...]:
        in_place = name in ("__setitem__", "__set__") or (
            name.endswith("_") and not name.endswith("__")
        )
        return (0,) if in_place and inputs and not self._depends(inputs[0]) else ()

    # ------------------------------------------------------------------ the tape

    def _write(
        self, name: str, result: Any, inputs: Sequence[Tensor], mutated: tuple[int, ...]
    ) -> Any:
        event, leaves = describe(name, result, inputs, mutated)
        n = len(self.tape)
        if not self._is_last:
            _check_plain(event)
        self.tape.append(event)
        for k, (out, leaf) in enumerate(zip(event.outs, leaves, strict=True)):
            if not isinstance(out, Alias | Plain):
                self._note((self.region, n, k), leaf)
        for k in mutated:
            self._note((self.region, n, -1 - k), inputs[k])
        return result

    def _note(self, handle: Handle, x: Tensor) -> None:
        setattr(x, _MARK, (self._number, handle))
        self._made.append((handle, weakref.ref(x)))
        if self._wanted is not None and handle in self._wanted:
            self.captured[handle] = x

    def _read(self, name: str, inputs: Sequence[Tensor]) -> Any:
        event, n = self._expect(name), self._position
        self._position += 1
        for k in event.mutated:
            handle = (self.region, n, -1 - k)
            setattr(inputs[k], _MARK, (self._number, handle))
            self._changed[handle] = inputs[k]
        leaves = [self._leaf(out, (self.region, n, k), inputs) for k, out in enumerate(event.outs)]
        return unflatten(event.structure, leaves)

    def _leaf(self, out: Any, handle: Handle, inputs: Sequence[Tensor]) -> Any:
        if isinstance(out, Plain):
            return out.value
        if isinstance(out, Alias):
            return inputs[out.place]
        ghost = Ghost(out, handle, self.site.device)
        self._made.append((handle, weakref.ref(ghost)))
        return ghost

    def _expect(self, name: str) -> Event:
        tape = self._tapes[self.region]
        if self._position < len(tape):
            event = tape[self._position]
            if event.is_read:
                self._refuse_read()
            if event.name == name:
                return event
        self._refuse_path(name)
        raise AssertionError

    # ------------------------------------------------------------------ from stage to stage

    def _begin(self, stage: int, path: str) -> None:
        if stage != self.region + 1:
            raise StepError(
                f"stage {stage} begins ({path!r}, {user_line()}) before stage {self.region + 1}; "
                "allowed: the order in which the stages were found; name module paths in the "
                "order of their calls, CyclicStrategy(stages=[...])"
            )
        if self.is_real:
            self._end()
        elif self._position < len(self._tapes[self.region]):
            self._refuse_path(f"the begin of stage {stage}")
        self.region, self._position = stage, 0
        self._chance.begin_region(stage)
        if self.is_real:
            self._chance.begin_stage(stage)
            self._fill()

    def _fill(self) -> None:
        for handle, x in self._received.items():
            setattr(x, _MARK, (self._number, handle))
            if handle in self._changed:
                with torch._C.DisableTorchFunction():  # not an event of the user's
                    self._changed[handle].copy_(x)
        for handle, reference in self._made:
            ghost = reference()
            if ghost is not None and type(ghost) is Ghost:
                ghost.value = self._received.get(handle)
        # in-place functions give back the tensor, not its ghost: either may live on
        self._made += [(handle, weakref.ref(x)) for handle, x in self._received.items()]
        self._came = frozenset(self._received)
        self.sharing.begin(self._received)
        self._received.clear()

    def _end(self) -> None:
        """Keep what later stages need, while the frames of the user's code still hold it."""
        if self._path is not None and tuple(e.name for e in self.tape) != self._path:
            self.has_strayed, self._wanted = True, None
            self.captured.clear()
        for handle, reference in self._made:
            x = reference()
            if x is None or (self._wanted is not None and handle not in self._wanted):
                continue
            value = x.value if type(x) is Ghost else x
            if value is not None:
                self.captured[handle] = value
        for handle, x in self._changed.items():
            if handle in self._came and (self._wanted is None or handle in self._wanted):
                self.captured[handle] = x
        self._look()
        if self._wanted is not None:
            self.sharing.check(self.captured)
        self._done = True
        raise StageDone

    def _check_end(self, output: Any) -> Any:
        if self._done:
            return None
        if not self.is_real:
            raise StepError(
                f"stage {self.region + 1} never began: {self.site.cuts.starts[self.region]!r} was "
                "not called; allowed: steps that call the first module of every stage; begin the "
                "stage elsewhere, CyclicStrategy(stages=[...])"
            )
        if not self._is_last:
            raise StepError(
                f"stage {self.target} never ended: {self.site.cuts.starts[self.target]!r} was not "
                "called; allowed: steps that call the first module of every stage; begin the "
                "next stage elsewhere, CyclicStrategy(stages=[...])"
            )
        self._look()
        leaves, structure = flatten(output)
        return unflatten(structure, [self._filled(x) for x in leaves])

    # ------------------------------------------------------------------ small things

    def _depends(self, x: Tensor) -> bool:
        """Say whether a tensor depends on parameters, so that it belongs to a region."""
        kind = type(x)
        if kind is Ghost or kind is nn.Parameter:
            return True
        mark = getattr(x, _MARK, None)
        if mark is not None and mark[0] == self._number:
            return True
        return kind is not Tensor and isinstance(x, nn.Parameter)

    def _given(
        self, args: Any, kwargs: Any, inputs: list[Tensor] | None = None
    ) -> tuple[Any, Any, list[Tensor]]:
        """Return arguments without ghosts, and their tensors."""
        if inputs is None:
            inputs = _tensors((args, kwargs))
        if not self._changed and Ghost not in map(type, inputs):
            return args, kwargs, inputs
        args, kwargs = self._filled(args), self._filled(kwargs)
        return args, kwargs, _tensors((args, kwargs))

    def _filled(self, value: Any) -> Any:
        for x in _tensors(value):
            if type(x) is Ghost:
                self.used.add(x.handle)
                if self.sharing.stale:
                    self.sharing.check((x.handle,))
            elif self._changed:
                mark = getattr(x, _MARK, None)
                if mark is not None and mark[0] == self._number and mark[1] in self._changed:
                    self.used.add(mark[1])
        return real(value)

    def filled(self, value: Any) -> Any:
        """Replace ghosts by the tensors that came, and note that they were used."""
        return self._filled(value)

    def _look(self) -> None:
        if self.sharing.groups:
            self.sharing.look(self.used)

    def _refuse_read(self) -> None:
        raise StepError(
            f"{user_line()} reads a value of stage {self.region}, which the worker of stage "
            f"{self.target} does not have; allowed: values of the last stage, and of the batch; "
            "let no stage begin behind that line, CyclicStrategy(stages=[...]); "
            "`lightning-cyclic doctor` lists the places that work"
        )

    def _refuse_path(self, name: str) -> None:
        tape = self._tapes[self.region]
        expected = tape[self._position].name if self._position < len(tape) else "the stage's end"
        raise StepError(
            f"the step took another way on the worker of stage {self.target} than on that of "
            f"stage {self.region}: {name} at {user_line()} where {expected} was; allowed: control "
            "flow that depends on the batch and on shapes alone; keep what decides it and what "
            "follows in one stage, CyclicStrategy(stages=[...])"
        )


@final
class _Watch(TorchFunctionMode):
    """Show every torch function outside units to the run."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._run.depth:
            return func(*args, **(kwargs or {}))
        return self._run.function(func, args, kwargs or {})


class _Known(NamedTuple):
    """Hold what is known of a torch function."""

    name: str
    is_metadata: bool
    is_random: bool
    reads_value: bool


@functools.lru_cache(maxsize=4096)
def _known(func: Any) -> _Known:
    name: str = func.__name__
    if name == "__get__":
        name = f"{func.__self__.__name__}.get"
    return _Known(name, reads_metadata(func), is_random(func), name in _READS_VALUE)


def _check_plain(event: Event) -> None:
    """Refuse outputs that the workers of later stages cannot be told of."""
    for out in event.outs:
        if isinstance(out, Plain):
            encode_leaf(out.value, f"what {event.name} returned")


def _tensors(value: Any) -> list[Tensor]:
    """List the tensors in plain containers."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, tuple | list):
        parts: Any = value
    elif isinstance(value, dict):
        parts = value.values()
    elif type(value) is slice:
        parts = (value.start, value.stop, value.step)
    else:
        parts = (value,) if isinstance(value, Tensor) else ()
    for x in parts:  # the commonest cost no call
        kind = type(x)
        if kind in _TENSORS:
            found.append(x)
        elif kind not in _NO_CONTAINERS:
            if isinstance(x, Tensor):
                found.append(x)
            else:
                _collect(x, found)
