"""The survey: one real run of a step, whole and without gradients, that notes what happens.

    with hands on every module's calls and every torch function:
        step()
    -> calls and their times, uses of parameters, every tensor with its maker and users,
       values read into Python, changes in place                        (evidence.py)

What a backward will need of it only a run with gradients can tell, of which nothing is kept.

What follows from it is decided elsewhere: :mod:`obstacles` and :mod:`cuts`.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple, final

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lightning_cyclic.errors import PlanError
from lightning_cyclic.runtime.bits import version
from lightning_cyclic.runtime.compiled import is_compiled, uncompiled
from lightning_cyclic.runtime.plain_copies import ours
from lightning_cyclic.runtime.snapshot import Snapshot, untouched, walk
from lightning_cyclic.runtime.stages.clocks import AbstractClock, CountedClock, MeasuredClock
from lightning_cyclic.runtime.stages.evidence import (
    Call,
    ClockName,
    Closed,
    Held,
    Kept,
    Moved,
    Survey,
    Use,
    Written,
    is_metric,
    quietest,
    with_kept,
)
from lightning_cyclic.runtime.stages.ledger import (
    Ledger,
    about_to_change,
    arguments,
    is_the_users,
)
from lightning_cyclic.runtime.stages.saved import SavedStorages
from lightning_cyclic.runtime.torch_functions import (
    NO_LINE,
    READS_VALUE,
    FunctionWatch,
    Line,
    callers,
    moves_nothing,
    reads_metadata,
    user_line,
)
from lightning_cyclic.runtime.values.trees import tensors

_SETS_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
_RUNS = 4  # of a step that is measured; the first one warms up


def survey(
    module: nn.Module,
    step: Callable[[], Any],
    *,
    clock: ClockName = "counted",
    for_backward: bool = False,
) -> Survey:
    """Run a step once, whole, and say what it did; leave everything as it was.

    Where the step changes buffers of modules without parameters, it is run once more: with these
    modules as units, and with what it writes into buffers as what the next step finds there.

    Random states, buffers, metrics, the ``training`` flags, plain attributes and tensors changed
    in place are restored, also when the step raises. The caller silences ``self.log``.

    Args:
        module: the whole module.
        step: runs e.g. ``module.training_step(batch, 0)``.
        clock: what times are: "counted", the same in every run, or "measured", for which the step
            is run several times: each stretch between two calls counts with its shortest, so
            that neither warm-up nor other processes disturb them.
        for_backward: run the step with gradients, too, for what autograd saves. Where that fails,
            or makes other calls, nobody knows.

    Returns:
        The evidence, plain data.
    """
    on_cuda = any(p.is_cuda for p in module.parameters())

    def run(state: _State, clock: AbstractClock, *, saves: bool = False) -> Survey:
        with untouched(module) as keeper:
            surveyor = _Surveyor(module, keeper, clock, state, saves=saves)
            surveyor.run(step)
            return surveyor.result()

    state = _State()
    seen = run(state, CountedClock())
    while (more := state.with_changes_of(seen)) != state:
        state = more
        seen = run(state, CountedClock())
    if for_backward and _leaves_no_graph(seen, module):
        with suppress(Exception):  # such as of a step that needs its graph at once
            seen = with_kept(seen, run(state, CountedClock(), saves=True))
    if clock == "counted":
        return seen
    clocks = (MeasuredClock(on_cuda=on_cuda) for _ in range(_RUNS))
    quiet = quietest([run(state, each) for each in clocks])
    return replace(quiet, clock=clock, kept=seen.kept)


def _leaves_no_graph(seen: Survey, module: nn.Module) -> bool:
    """Say whether what a step with gradients leaves of its graph can be taken away behind it.

    Not so where it writes into the batch, or into a buffer that is a view.
    """
    changed = (dict(module.named_buffers())[name] for name in seen.changed)
    return not any(c.by_derived for c in seen.changes) and not any(b._is_view() for b in changed)


class _State(NamedTuple):
    """Hold what a survey has to know of buffers before it begins.

    Args:
        units: paths of the modules without parameters whose buffers the step changes.
        derived: names of buffers, used outside of such calls, that derived values change.
    """

    units: frozenset[str] = frozenset()
    derived: frozenset[str] = frozenset()

    def with_changes_of(self, seen: Survey) -> _State:
        units = {c.path for c in seen.calls if c.is_unit}
        shut = {m.within for m in seen.changed.values() if m.is_leaf}
        return _State(
            self.units | {m.within for m in seen.changed.values()} - units - {""},
            self.derived
            | {
                n for n, m in seen.changed.items() if m.by_derived and m.within not in shut & units
            },
        )


@dataclass(slots=True)
class _Open:
    """Hold a call's record while it grows."""

    path: str
    n: int
    parent: int | None
    begin: int
    begin_ns: int
    unit: int | None  # number of the innermost unit call, itself included
    end: int = 0
    end_ns: int = 0
    outputs: frozenset[int] = frozenset()
    is_entered: bool = False  # its forward is under way


@dataclass(slots=True, eq=False)
class _Checkpoint:
    """Hold a call of activation checkpointing, and the ticks within it."""

    frame: FrameType
    begin: int
    end: int
    line: Line


_CHECKPOINTS = ("checkpoint",)
_TAKES_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


@final
class _Surveyor:
    def __init__(
        self,
        module: nn.Module,
        keeper: Snapshot,
        clock: AbstractClock,
        state: _State,
        *,
        saves: bool,
    ) -> None:
        self._module = module
        self._keeper = keeper
        self._clock = clock
        self._tick = 0
        self._end_ns = 0
        self._calls: list[_Open] = []
        self._counts: dict[str, int] = {}
        self._stack: list[int] = []
        self._metrics: dict[str, list[int]] = {}
        self._ledger = Ledger()
        self._parameters = {n: self._ledger.parameter(p) for n, p in module.named_parameters()}
        self._state = state
        self._buffers = {
            name: self._ledger.buffer(b, derived=name in state.derived)
            for name, b in module.named_buffers()
        }
        self._checkpoints: list[_Checkpoint] = []  # under way
        self._reruns: list[Closed] = []
        self._saved = SavedStorages(_tensors_of(module), lambda: self._tick) if saves else None

    # ------------------------------------------------------------------ running

    def run(self, step: Callable[[], Any]) -> None:
        watch = FunctionWatch(self._function)
        saving = torch.no_grad() if self._saved is None else self._saved.without_keeping()
        with _no_collection(), saving, uncompiled(self._module), _quiet(), \
                self._followed(), watch, self._clock.running():  # fmt: skip
            result = step()
            self._end_ns = self._clock.now_ns()
        end = self._use()
        for leaf in tensors(result):
            self._ledger.uses(self._ledger.number(leaf)).append(end)

    @contextmanager
    def _followed(self) -> Iterator[None]:
        wrappers = list(self._wrappers())
        before = [(m, name, m.__dict__.get(name)) for m, name, _ in wrappers]
        for m, name, wrapper in wrappers:
            m.__dict__[name] = ours(wrapper, m.__dict__.get(name))
        try:
            yield
        finally:
            for m, name, value in before:
                m.__dict__.pop(name)
                if value is not None:
                    m.__dict__[name] = value

    def _wrappers(self) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
        for path, m in self._module.named_modules():
            if isinstance(m, torch.jit.ScriptModule):
                continue
            metric = is_metric(m)
            has_state = metric or path in self._state.units
            is_unit = path != "" and (has_state or next(m.parameters(), None) is not None)
            yield m, "_call_impl", self._wrapper(path, m._call_impl, is_unit)
            yield m, "forward", self._direct(path, m.forward, is_unit)
            if metric:
                self._metrics[path] = []
                update: Callable[..., Any] = m.update
                yield m, "update", self._metric_door(path, update)

    def _wrapper(self, path: str, call: Callable[..., Any], is_unit: bool) -> Callable[..., Any]:
        def follow(*args: Any, **kwargs: Any) -> Any:
            number = self._begin(path, is_unit)
            result = None
            try:
                result = call(*args, **kwargs)
                return result
            finally:
                self._end(number, result)

        return follow

    def _direct(self, path: str, forward: Callable[..., Any], is_unit: bool) -> Callable[..., Any]:
        """Follow a ``forward``, also where it is called by itself: that is a call, too."""
        follow = self._wrapper(path, forward, is_unit)

        def called(*args: Any, **kwargs: Any) -> Any:
            call = self._calls[self._stack[-1]] if self._stack else None
            if call is None or call.path != path or call.is_entered:
                return follow(*args, **kwargs)
            call.is_entered = True
            return forward(*args, **kwargs)

        return called

    def _metric_door(self, path: str, update: Callable[..., Any]) -> Callable[..., Any]:
        def follow(*args: Any, **kwargs: Any) -> Any:
            number = self._begin(f"{path}.update", True)
            self._metrics[path].append(self._tick)
            try:
                return update(*args, **kwargs)
            finally:
                self._end(number, None)

        return follow

    # ------------------------------------------------------------------ calls

    def _begin(self, path: str, is_unit: bool) -> int:
        now = self._clock.now_ns()
        self._clock.pause()
        self._tick += 1
        number = len(self._calls)
        parent = self._stack[-1] if self._stack else None
        unit = number if is_unit else self._unit(parent)
        n = self._counts.get(path, 0)
        self._counts[path] = n + 1
        self._calls.append(_Open(path, n, parent, self._tick, now, unit))
        self._stack.append(number)
        self._look_for_checkpoint()
        self._clock.resume()
        return number

    def _end(self, number: int, result: Any) -> None:
        now = self._clock.now_ns()
        self._clock.pause()
        self._tick += 1
        call = self._calls[number]
        call.end, call.end_ns = self._tick, now
        self._stack.pop()
        if call.unit == number:
            call.outputs = frozenset(self._returned(x, number) for x in tensors(result))
        self._clock.resume()

    def _returned(self, x: Tensor, number: int) -> int:
        known = self._ledger.known(x)
        if known is None:
            known = self._ledger.unseen(x, Use(self._tick, number, user_line()), number)
        self._note_made(x, known)
        return known

    def _note_made(self, x: Tensor, number: int) -> None:
        if self._saved is not None:
            self._saved.make(x, number)

    def _unit(self, call: int | None) -> int | None:
        return None if call is None else self._calls[call].unit

    # ------------------------------------------------------------------ torch functions

    def _function(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self._clock.pause()
        if reads_metadata(func) or moves_nothing(func, args, kwargs):
            self._clock.resume()
            return func(*args, **kwargs)
        if func in _TAKES_GRADIENTS and not torch.is_grad_enabled():
            raise _takes_gradients(func)
        name = func.__name__
        inputs = list(arguments((args, kwargs)))
        replaced = inputs[:1] if func == _SETS_DATA and _replaces(inputs) else []
        for x in replaced or about_to_change(name, args, kwargs):
            if (given := self._ledger.given(x)) is not None:
                self._keeper.keep(given)
        if self._saved is not None:
            self._saved.give(inputs)
        versions = [version(x) for x in inputs]
        self._clock.resume()
        result = func(*args, **kwargs)
        self._clock.pause()
        counted = [x for x, v in zip(inputs, versions, strict=True) if version(x) != v]
        changed = replaced or counted  # torch does not count what is replaced
        outputs = list(arguments(result))
        if outputs or changed or name in READS_VALUE:
            use = self._use()
            self._ledger.note(name, use, self._unit(use.call), (inputs, changed, outputs))
        for x in outputs:
            self._note_made(x, self._ledger.number(x))
        self._clock.move(name, inputs, changed, outputs)
        self._clock.resume()
        return result

    def _look_for_checkpoint(self) -> None:
        """Note from when to when activation checkpointing runs what it will run again."""
        of_torch = torch.utils.checkpoint.__file__
        frames = list(filter(lambda f: f.f_code.co_filename == of_torch, callers()))
        # frames are held while they may be seen again: a new one could have an old one's id
        open_now = [x for x in self._checkpoints if any(x.frame is f for f in frames)]
        known = [x.frame for x in open_now]
        # the old way detaches what it is given: not even its first module can begin a stage
        begin = self._tick - any(f.f_code.co_name == "forward" for f in frames)
        open_now += [
            _Checkpoint(f, begin, self._tick, user_line())
            for f in frames
            if f.f_code.co_name in _CHECKPOINTS and not any(f is k for k in known)
        ]
        for x in open_now:
            x.end = self._tick
        self._reruns += [_closed(x) for x in self._checkpoints if x not in open_now]
        self._checkpoints = open_now

    def _use(self) -> Use:
        self._tick += 1
        self._look_for_checkpoint()
        return Use(self._tick, self._stack[-1] if self._stack else None, user_line())

    # ------------------------------------------------------------------ the result

    def result(self) -> Survey:
        first_calls: dict[str, int] = {}
        for call in reversed(self._calls):
            first_calls[call.path] = call.begin
        calling = {self._calls[c.parent].path for c in self._calls if c.parent is not None}
        return Survey(
            title=type(self._module).__name__,
            modules=tuple(path for path, _ in self._module.named_modules()),
            aliases=_aliases(self._module),
            calls=tuple(
                Call(
                    path=c.path, n=c.n, parent=c.parent, begin=c.begin, end=c.end,
                    begin_ns=c.begin_ns, end_ns=c.end_ns, is_unit=c.unit == k, outputs=c.outputs,
                )
                for k, c in enumerate(self._calls)
            ),
            values=self._ledger.values(),
            storages=self._ledger.storages(),
            reads=self._ledger.reads(),
            changes=tuple(self._ledger.changes),
            edits=tuple(self._ledger.edits),
            written=tuple(self._written()),
            closed=tuple(self._closed()),
            parameters={name: self._held(name, k) for name, k in self._parameters.items()},
            buffers={
                name: next((u.tick for u in self._ledger.uses(k)), first_calls.get(_owner(name)))
                for name, k in self._buffers.items()
            },
            changed={name: self._moved(name, calling) for name in self._keeper.changed_buffers()},
            metrics={path: tuple(ticks) for path, ticks in self._metrics.items()},
            end=self._tick,
            duration_ns=self._end_ns,
            stateful=self._state.units,
            kept=None if self._saved is None else tuple(self._kept(self._saved)),
        )  # fmt: skip

    def _kept(self, saved: SavedStorages) -> Iterator[Kept]:
        values = self._ledger.values()
        for x in saved.found():
            again_until = 0
            if x.made is None:  # each stage has a copy of the batch
                again_until = self._tick
            elif x.maker is not None and not self._ledger.is_derived(x.maker):
                # code around a stage's begin runs again for it
                units = values[x.maker].units
                again_until = min((self._calls[k].end for k in units), default=self._tick)
            yield Kept(x.num_bytes, x.made or 0, tuple(x.saves), again_until)

    def _written(self) -> Iterator[Written]:
        names = {k: name for name, k in self._parameters.items()}
        for k, use, itself in self._ledger.writes:
            yield Written(names[k], use, itself)

    def _closed(self) -> Iterator[Closed]:
        """Iterate over what stages cannot begin within."""
        yield from (*self._reruns, *map(_closed, self._checkpoints))
        compiled = {path for path, m in self._module.named_modules() if path and is_compiled(m)}
        for call in self._calls:
            if call.path in compiled:
                yield Closed(call.begin, call.end, f"is compiled, as {call.path!r}", NO_LINE)

    def _held(self, name: str, k: int) -> Held:
        uses = tuple(self._ledger.uses(k))
        if not uses:  # a kernel that Python does not see may have used it, within its module
            calls = (n for n, c in enumerate(self._calls) if c.path == _owner(name))
            uses = tuple(Use(self._calls[n].begin, n, Line("", 0)) for n in calls if _owner(name))
        return Held(self._ledger.num_bytes(k), uses)

    def _moved(self, buffer: str, calling: set[str]) -> Moved:
        """Return how a buffer changed; of modules that call others, the paths are given."""
        now = dict(self._module.named_buffers()).get(buffer)
        before = self._buffers[buffer]
        number = before if now is None else self._ledger.number(now)
        anew = None if number == before else self._ledger.made(number)
        uses = [use for k in {before, number} for use in self._ledger.uses(k)]
        uses += [] if anew is None else [anew]
        uses = uses or [Use(c.begin, k, NO_LINE) for k, c in self._calls_of(_owner(buffer))]
        uses = uses or [Use(0, None, NO_LINE), Use(self._tick, None, NO_LINE)]
        within = self._innermost(uses)
        by_derived, units = self._ledger.moved_by(number)
        return Moved(
            first=min(uses, key=_tick),
            last=max(uses, key=_tick),
            within=within,
            is_leaf=within not in calling,
            by_derived=by_derived,
            units=frozenset(self._calls[k].path for k in units),
            anew=anew,
        )

    def _innermost(self, uses: Sequence[Use]) -> str:
        """Return the path of the innermost module within whose calls all uses are."""
        paths, *others = [self._paths_around(use.call) for use in uses]
        return next((p for p in paths if all(p in other for other in others)), "")

    def _paths_around(self, call: int | None) -> list[str]:
        found = []
        while call is not None:
            found.append(self._calls[call].path)
            call = self._calls[call].parent
        return found

    def _calls_of(self, path: str) -> list[tuple[int, _Open]]:
        return [(k, c) for k, c in enumerate(self._calls) if path and c.path == path]


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield all tensors that a module has, its plain attributes included."""
    yield from module.parameters()
    yield from (x for _, x in walk(module) if isinstance(x, Tensor))


def _closed(x: _Checkpoint) -> Closed:
    what = "is checkpointed, and runs again in the backward"
    return Closed(x.begin, x.end, what, x.line)


def _replaces(inputs: Sequence[Tensor]) -> bool:
    """Say whether the user's code gives a tensor other data: Module.to may give it its own."""
    return is_the_users() and not all(x.is_set_to(inputs[0]) for x in inputs)


def _tick(use: Use) -> int:
    return use.tick


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's garbage collector, which would strike at the same call each time, out."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _quiet() -> Iterator[None]:
    """Let checkpointing not warn that there are no gradients: a survey wants none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        yield


def _aliases(module: nn.Module) -> dict[str, str]:
    first = {m: path for path, m in module.named_modules()}
    every = module.named_modules(remove_duplicate=False)
    return {path: first[m] for path, m in every if first[m] != path}


def _takes_gradients(func: Any) -> PlanError:
    return PlanError(
        f"training_step takes gradients itself, by {func.__name__}() ({user_line()}), through "
        "calls of which each rank runs a part; allowed: the backward of the loss that it returns; "
        "use a strategy whose ranks run whole steps, such as 'cyclic_dp'"
    )


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
