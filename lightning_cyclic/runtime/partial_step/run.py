"""A run: the user's step, from its start to the end of one stage.

    region 0 .. target-1   replayed: units are skipped, what depends on the batch alone is real
    region target          real: what crossed is taken, and fills ghosts, when it begins
    region target+1        never: its first call ends the step with a private exception

The last stage's run goes to the end of the user's step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.absent import AbsentBuffer, AbsentParameter
from lightning_cyclic.runtime.partial_step.call_router import CallRouter, Unit
from lightning_cyclic.runtime.partial_step.evidence import Notes
from lightning_cyclic.runtime.partial_step.ghosts import (
    Ghost,
    Handle,
    ask,
    real,
    tensors_in,
)
from lightning_cyclic.runtime.partial_step.micro_batches import BatchReads
from lightning_cyclic.runtime.partial_step.replay import Replay
from lightning_cyclic.runtime.partial_step.sharing import NO_SHARING
from lightning_cyclic.runtime.partial_step.tape import MARK, OWNED, Delivery, Record
from lightning_cyclic.runtime.randomness import Randomness
from lightning_cyclic.runtime.snapshot import tensor_print
from lightning_cyclic.runtime.torch_functions import (
    Known,
    known,
    leave_modes,
    moves_nothing,
    num_modes,
    user_line,
)
from lightning_cyclic.runtime.values.trees import flatten, tensors, unflatten


def refuse_begin(path: str, stage: int, region: int) -> NoReturn:
    raise StepError(
        f"stage {stage} begins ({path!r}, {user_line()}) before stage {region + 1}; allowed: the "
        "order in which the stages were found; name module paths in the order of their calls, "
        "stages=[...]"
    )


def refuse_home(path: str, stages: Sequence[int], region: int, beside: str) -> NoReturn:
    what = f"module {path!r}, whose parameters or buffers belong to stage {list(stages)}"
    if beside:
        near = beside.rpartition(".")[0]
        raise StepError(
            f"{what}, is called in stage {region} at {user_line()}; it was not used in the first "
            f"micro-batch, so that it went with {beside!r}, which is defined beside it; allowed: "
            f"one stage for both; begin stage {region} at {near!r} or before, "
            "stages=[...], or let __init__ define it behind a module of stage "
            f"{region}"
        )
    raise StepError(
        f"{what}, is called in stage "
        f"{region} at {user_line()}; allowed: calls in the order in which the stages were found; "
        "keep all its calls in one stage, stages=[...]"
    )


def refuse_read(region: int, target: int) -> NoReturn:
    raise StepError(
        f"{user_line()} reads a value of stage {region}, which the worker of stage {target} does "
        "not have; allowed: values of the last stage, and of the batch; let no stage begin behind "
        "that line, stages=[...]; `lightning-cyclic doctor` lists the places that "
        "work"
    )


def refuse_path(name: str, expected: str | None, region: int, target: int) -> NoReturn:
    """Refuse another way than the region's own worker took; None is its end."""
    there = expected or "the stage's end"
    raise StepError(
        f"the step took another way on the worker of stage {target} than on that of stage "
        f"{region}: {name} at {user_line()} where {there} was; allowed: "
        "control flow that depends on the batch and on shapes alone; keep what decides it and "
        "what follows in one stage, stages=[...]"
    )


def refuse_end(starts: Sequence[str], region: int, target: int, *, gave_nothing: bool) -> NoReturn:
    if gave_nothing:
        raise StepError(
            f"the step returned None before {starts[region]!r} was called, with which stage "
            f"{region + 1} begins; allowed: steps that pass all stages, each time; to skip a "
            "batch, return 0 * loss; or begin the stage elsewhere, stages=[...]"
        )
    if region < target:
        raise StepError(
            f"stage {region + 1} never began: {starts[region]!r} was not called; allowed: steps "
            "that call the first module of every stage; begin the stage elsewhere, "
            "stages=[...]"
        )
    raise StepError(
        f"stage {target} never ended: {starts[target]!r} was not called; allowed: steps that call "
        "the first module of every stage; begin the next stage elsewhere, "
        "stages=[...]"
    )


_run_numbers = itertools.count(1)
_GHOSTS = frozenset({Ghost, AbsentParameter, AbsentBuffer})  # absent tensors let ghosts answer
_version_of = attrgetter("_version")
_INDEXING = ("__getitem__", "__setitem__")  # they do not ask a ghost that is an index


class StageDone(BaseException):
    """End a step where its stage ends; no error, and not caught by ``except Exception``."""


@final
class Run:
    """Run a step for one stage and one micro-batch.

    Args:
        take: waits for what crossed, when the stage begins; None if that does not fit the
            replays.
        reads: what Python has read of the micro-batch; None where that takes no time.
    """

    region = 0
    depth = 0
    was_misled = False
    _replay: Replay | None = None  # of the region, before the stage itself
    _is_watching = False
    _draws = False  # in this region, what depends on nothing
    _num_reads = 0  # in this region, of the batch
    _done = False
    _failure: Exception | None = None
    notes: Notes | None = None  # of a step that is compared with the plain one
    i = 0  # the micro-batch, for these

    is_plain = False  # but a run of a stage

    def __init__(
        self,
        router: CallRouter,
        target: int,
        replays: Sequence[Replay],
        take: Callable[[], Delivery | None],
        randomness: Randomness,
        reads: BatchReads | None = None,
    ) -> None:
        self.router = router
        self.target = target
        self.logs: list[tuple[str, Any, dict[str, Any]]] = []
        self.used: set[Handle] = set()
        self.sharing = NO_SHARING
        self._number = next(_run_numbers)
        self.record = Record(self._number, target, is_last=target == router.num_stages - 1)
        self._replays = replays
        self._take = take
        self._came: Mapping[Handle, Tensor] = {}
        self._changed: dict[Handle, Tensor] = {}  # tensors of the batch that an event changed
        self._randomness = randomness
        self._reads = reads
        self._modes = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            num_modes(),
        )

    @property
    def is_real(self) -> bool:
        """Say whether the stage itself is under way."""
        return self.region == self.target

    def __call__(self, step: Callable[[], Any]) -> Any:
        """Run the step; return what it returned, or None where the stage is not the last.

        Raises:
            StepError: the stage never began, or never ended.
        """
        self.router.begin(self)
        try:
            return self._check_end(self._output_of(step))
        finally:
            self.router.end()
            for replay in self._replays:
                replay.release()
            self._came = {}

    def _output_of(self, step: Callable[[], Any]) -> Any:
        try:
            self._enter(0)
            return step()
        except StageDone:
            return None
        finally:
            if self._is_watching:
                leave_modes(num_modes() - 1)

    # ------------------------------------------------------------------ calls

    def call(self, unit: Unit, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answer a call of a module with parameters, or of a metric."""
        self.reach(unit.path, unit.begins)
        replay = self._replay
        if replay is not None and not unit.is_split:
            ghost = replay.ghost(unit.event)
            return self._read(replay, unit.event, args, kwargs) if ghost is None else ghost
        if self._done:
            raise StageDone
        if unit.is_split:
            return original(*args, **kwargs)
        if unit.stages is not None and self.region not in unit.stages:
            refuse_home(unit.path, unit.stages, self.region, unit.beside)
        return self._call_unit(unit, original, args, kwargs)

    def _call_unit(self, unit: Unit, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a unit without looking at torch functions: where nobody does, they cost nothing."""
        inputs = tensors_in(args, kwargs)
        if self._changed or Ghost in map(type, inputs):
            args, kwargs, inputs = self._given(args, kwargs, inputs)
        router, self.depth = self.router, 1
        is_aside = router.watch.step_aside()
        router.look(None)
        given = None if self.notes is None else [tensor_print(x) for x in inputs]
        try:
            before = list(map(_version_of, inputs))
            result = router.called(unit.path, original, args, kwargs)
            mutated: Sequence[int] = ()
            if list(map(_version_of, inputs)) != before:
                pairs = enumerate(zip(inputs, before, strict=True))
                mutated = [k for k, (x, v) in pairs if x._version != v and not self._depends(x)]
            if self.sharing.groups:
                self._look()
            if self.notes is not None:
                with torch._C.DisableTorchFunction():
                    self.notes.call(self.i, self.target, unit.event, given or (), tensors(result))
            return self.record.write(unit.event, result, inputs, mutated)
        finally:
            router.look(self)
            self.depth = 0
            if is_aside:
                router.watch.come_back()

    # ------------------------------------------------------------------ torch functions

    def function(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Answer a call of a torch function outside all units that the watch saw."""
        about = known(func)
        if about.is_metadata:
            is_of_ghost = args and type(args[0]) is Ghost
            return self._metadata(func, args, kwargs) if is_of_ghost else func(*args, **kwargs)
        if about.may_move and moves_nothing(func, args, kwargs):
            return args[0]
        inputs = tensors_in(args, kwargs)
        for x in inputs:  # most are of the batch
            if (type(x) is not Tensor or hasattr(x, MARK)) and self._depends(x):
                break
        else:  # also what leaves contexts behind the end
            return self._of_batch(about, func, args, kwargs)
        if self._replay is not None:
            if not (_GHOSTS.issuperset(types) and _is_dispatched(about, types, args)):
                self._replay.note_unseen()
            return self.pretend(func, args, kwargs)
        if self._done:
            raise StageDone
        if self._changed or Ghost in map(type, inputs):
            args, kwargs, inputs = self._given(args, kwargs, inputs)
        result = self._call(func, args, kwargs) if about.is_random else func(*args, **kwargs)
        self._look()
        if about.reads_value:
            self.record.write_read(about.name)
            return result
        changes_batch = about.changes_first and inputs and not self._depends(inputs[0])
        return self.record.write(about.name, result, inputs, (0,) if changes_batch else ())

    def _of_batch(self, about: Known, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer a call of a torch function on what depends on the batch alone."""
        if about.reads_value and self._reads is not None:
            if self._replay is not None:
                self._replay.note_unseen()  # so that the next run is watched here, too
            number, self._num_reads = self._num_reads, self._num_reads + 1
            return self._reads.read(self.region, number, about.name, lambda: func(*args, **kwargs))
        if not about.is_random:
            return func(*args, **kwargs)
        self._draws = True
        return self._call(func, args, kwargs)

    def pretend(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer a call of a torch function on ghosts that have no values yet."""
        if self._done:
            raise StageDone
        about = known(func)
        if about.is_metadata:
            is_of_ghost = type(args[0]) is Ghost
            return self._metadata(func, args, kwargs) if is_of_ghost else ask(func, args, kwargs)
        if about.is_random:
            self._randomness.skip_glue()
        if about.reads_value:
            refuse_read(self.region, self.target)
        assert self._replay is not None
        ghost = self._replay.ghost(about.name)
        return self._read(self._replay, about.name, args, kwargs) if ghost is None else ghost

    @property
    def is_unwatched(self) -> bool:
        """Say whether ghosts alone see the torch functions of the region."""
        return not self._is_watching

    def _metadata(self, func: Any, args: Any, kwargs: Any) -> Any:
        if args[0].value is None:
            return ask(func, args, kwargs)
        return func(args[0].value, *args[1:], **kwargs)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self._randomness.of_glue():
            return func(*args, **kwargs)

    def _read(self, replay: Replay, name: str, args: Any, kwargs: Any) -> Any:
        event, expected = replay.next(name), replay.expected
        if event is None:
            if expected is not None and expected.is_read:
                refuse_read(self.region, self.target)
            refuse_path(name, expected and expected.name, self.region, self.target)
        with torch._C.DisableTorchFunction():  # none of this is the user's
            inputs = tensors_in(args, kwargs)
            for k in event.mutated:
                handle = replay.place(-1 - k)
                setattr(inputs[k], MARK, (self._number, handle))
                self._changed[handle] = inputs[k]
            return replay.value(inputs)

    # ------------------------------------------------------------------ from stage to stage

    def reach(self, path: str, stage: int) -> None:
        """Begin a stage with the call of a module, unless it has begun."""
        if stage <= self.region or self._done:
            return
        replay = self._replay
        if stage != self.region + 1:
            refuse_begin(path, stage, self.region)
        if replay is None:
            self._end()
        if not replay.end():
            name = replay.expected and replay.expected.name
            refuse_path(f"the begin of stage {stage}", name, self.region, self.target)
        self._enter(stage)

    def _enter(self, region: int) -> None:
        self.region, self._num_reads = region, 0
        if region == self.target:
            self._enter_stage()
            return
        self._replay = replay = self._replays[region]
        replay.begin()
        if replay.needs_watch:
            self._watch()
        if (
            replay.draws_plainly or self._randomness.has_held
        ):  # to seed costs more than all else that a replay does
            self._randomness.begin_region(region)

    def _enter_stage(self) -> None:
        self._receive()
        if self.notes is not None:
            self.notes.begin(self.i, self.target)
        self._replay, self._draws = None, False
        self._watch()
        self._randomness.begin_region(self.target)
        self._randomness.begin_stage(self.target)

    def _watch(self) -> None:
        if not self._is_watching:
            self.router.watch.insert(self._modes[2])
            self._is_watching = True

    def _receive(self) -> None:
        """Take what crossed; no error of this is for the user's code to catch."""
        delivery = None
        try:
            delivery = self._taken()
        except Exception as error:
            self._failure = error
        if delivery is None:
            self.was_misled, self._done = self._failure is None, True
            self._replay = None
            raise StageDone
        self._came, self.sharing = delivery.came, delivery.sharing
        self.record.expect(delivery)
        self._fill()

    def _taken(self) -> Delivery | None:
        """Call the callable as outside of the contexts that the user's code has entered."""
        with_grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if (with_grad, inference, num_modes()) == self._modes:
            return self._take()
        other = torch.inference_mode(self._modes[1]) if inference != self._modes[1] else None
        with (
            torch._C.DisableTorchFunction(),
            other or nullcontext(),
            torch.set_grad_enabled(self._modes[0]),
        ):
            return self._take()

    def _fill(self) -> None:
        for handle, x in self._came.items():
            setattr(x, MARK, (self._number, handle))
            self._replays[handle[0]].fill(handle, x)
            if handle in self._changed:
                with torch._C.DisableTorchFunction():  # not an event of the user's
                    self._changed[handle].copy_(x)
        self.sharing.begin(self._came)

    def _end(self) -> NoReturn:
        self._note_end()
        plainly = self._randomness.has_drawn_plainly(likely=self.record.likely_draws_plainly)
        is_known = self.record.end(self._came, draws=self._draws, draws_plainly=plainly)
        captured = self.record.captured
        for handle in self._changed.keys() & captured.keys():
            captured[handle] = self._changed[handle]
        self._look()
        if is_known:
            self.sharing.check(captured)
        self._done = True
        raise StageDone

    def _check_end(self, output: Any) -> Any:
        if self._failure is not None:
            raise self._failure
        if self._done:
            return None
        if self.region < self.router.num_stages - 1:
            starts = self.router.cuts.starts
            refuse_end(starts, self.region, self.target, gave_nothing=output is None)
        self._note_end()
        self._look()
        leaves, structure = flatten(output)
        return unflatten(structure, [self.filled(x) for x in leaves])

    def _note_end(self) -> None:
        if self.notes is not None:
            self.notes.end(self.i, self.target, self._randomness.num_draws)

    # ------------------------------------------------------------------ small things

    def _depends(self, x: Tensor) -> bool:
        """Say whether a tensor depends on parameters, so that it belongs to a region."""
        kind = type(x)
        if kind is Ghost or kind is nn.Parameter:
            return True
        mark = getattr(x, MARK, None)
        if mark is not None and mark[0] in (self._number, OWNED):
            return True
        return kind is not Tensor and isinstance(x, nn.Parameter)

    def _given(
        self, args: Any, kwargs: Any, inputs: Sequence[Tensor]
    ) -> tuple[Any, Any, list[Tensor]]:
        """Return arguments without ghosts, and their tensors; note which were used."""
        self._note_used(inputs)
        kwargs = real(kwargs) if kwargs else kwargs
        return real(args), kwargs, [real(x) for x in inputs]

    def filled(self, value: Any) -> Any:
        """Replace ghosts by the tensors that came, and note that they were used."""
        self._note_used(tensors_in((value,), None))
        return real(value)

    def _note_used(self, inputs: Sequence[Tensor]) -> None:
        for x in inputs:
            if type(x) is Ghost:
                self.used.add(x.handle)
                if self.sharing.stale:
                    self.sharing.check((x.handle,))
            elif self._changed:
                mark = getattr(x, MARK, None)
                if mark is not None and mark[0] == self._number and mark[1] in self._changed:
                    self.used.add(mark[1])

    def _look(self) -> None:
        if self.sharing.groups:
            self.sharing.look(self.used)


def _is_dispatched(about: Known, types: Any, args: Any) -> bool:
    """Say whether a function asks ghosts among its arguments, where no mode is entered."""
    return Ghost in types and (about.name not in _INDEXING or type(args[0]) is Ghost)
