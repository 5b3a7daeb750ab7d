"""Foreign weights: those of other workers' stages, absent until the user's code reads them.

between steps     a hook reads one: all are fetched, once; the next step lets them go again
  do not fit      what is read is fetched, and leaves when others come (lending.py)
inside a step     refused: who has them is in the middle of changing them
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, NoReturn, Protocol, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.absent import Home, come_back, home_of
from lightning_cyclic.runtime.bits import sum_of_bits
from lightning_cyclic.runtime.lending import Lending, num_bytes_of, without_memory
from lightning_cyclic.runtime.partial_step.ghosts import user_line
from lightning_cyclic.runtime.weight_service import Stamp, WeightService

if TYPE_CHECKING:
    from lightning_cyclic.runtime.transport.limit import Limit

_WHERE = (
    "between steps, as in on_train_batch_end of a pipeline with a flush, and in the hooks of "
    "validation and at the end of epochs"
)


class Holdings(Protocol):
    """Say what a worker has of a module, and let go of the rest."""

    @property
    def foreign(self) -> Sequence[str]:
        """Return the names of the parameters that other workers have."""

    @property
    def stale(self) -> Sequence[str]:
        """Return the names of the buffers that other workers' steps change."""

    @property
    def stages(self) -> Sequence[int]:
        """Return the stages that this worker updates."""

    @property
    def own(self) -> Sequence[nn.Parameter]:
        """Return their parameters."""

    @property
    def is_freed(self) -> bool:
        """Say whether what others have has no memory here."""

    def free_foreign(self, home: Home | None) -> None:
        """Give up the memory of what other workers have; its home is told who reads it."""

    def restore(self) -> None:
        """Give it memory again, without values."""


@final
class ForeignWeights:
    """Keep what other workers have absent, and fetch it where it is read.

    Args:
        module: the whole module.
        stage_of: name -> stage, of parameters and of the buffers that training changes.
        holdings: which of them this worker has.
        rank_of_stage: stage -> rank of the worker that updates it.
        memory_limit_bytes: most bytes of parameters that this worker may have. [any number]
        say: tells the user, once.
        value: name -> what is given of an own parameter. [the parameter]
    """

    def __init__(
        self,
        module: nn.Module,
        stage_of: Mapping[str, int],
        holdings: Holdings,
        rank_of_stage: Callable[[int], int],
        memory_limit_bytes: int | None,
        say: Callable[[str], None],
        value: Callable[[str], Tensor] | None = None,
    ) -> None:
        self.stamp: Stamp | None = None  # of this worker's weights; None while they change
        self._module = module
        self._stage_of = stage_of
        self._holdings = holdings
        self._rank_of_stage = rank_of_stage
        self._memory_limit_bytes = memory_limit_bytes
        self._say = say
        self._service: WeightService | None = None
        self._parameters = dict(module.named_parameters())
        self._value = value or self._parameters.__getitem__
        changing = [n for n, j in stage_of.items() if j in holdings.stages]
        self._changing = [n for n in changing if n not in self._parameters]
        self._now: Stamp = (0, 0, 0)  # batches and steps that this worker has begun, and loads
        self._is_running = False
        self._has_said = False
        self.is_over = False  # training, but nobody has all weights
        self._buffers: dict[str, Tensor] = {}  # of own stages, as they were at the stamp
        self._lending: Lending | None = None
        self._here: dict[str, Tensor] = {}  # what has come -> its bits, as others keep it
        self._changed_by_hand: set[str] = set()  # while they were lent
        self._counts: dict[int, int] = {}  # own parameter -> how often it had been changed

    def serve(self, key: str, limit: Limit) -> None:
        """Begin to give and to get weights; all workers must call it."""
        self._service = WeightService(key, lambda: self.stamp, self._give, limit)

    def outlive(self) -> None:
        """Give and get behind the session, as no worker can have all; all workers must call it."""
        self.is_over = True
        if self._service is not None:
            self._service.stay()
        self._keep(self._holdings.stale)  # which take no room, and may be written to

    def close(self) -> None:
        """Give and get no more."""
        if self._service is not None:
            self._service.close()
            self._service = None

    # ------------------------------------------------------------------ how far training is

    def begin_batch(self) -> None:
        """Note that a batch is trained on, which changes buffers."""
        self._now = (self._now[0] + 1, self._now[1], 0)

    def begin_update(self) -> None:
        """Note that the parameters of this worker's stages are about to change."""
        self.stamp = None

    def settle(self, t: int) -> None:
        """Note that they are those of step ``t``, until the next update.

        Buffers are not: a worker may begin the next step while another one still reads. So they
        are copied, where anybody may ask.
        """
        if self._service is not None:
            self._keep_buffers()
        self._counts = {id(p): p._version for p in self._holdings.own}
        self.stamp = self._now = self._now[0], t, self._now[2]

    def settle_loaded(self, t: int) -> None:
        """Note that weights were loaded: who has loaded them waits for who has not yet."""
        self._now = (self._now[0], t, self._now[2] + 1)
        self.settle(t)

    def _keep_buffers(self) -> None:
        with torch.no_grad():
            for name in self._changing:
                now = self._module.get_buffer(name)
                kept = self._buffers.get(name)
                if kept is None or kept.shape != now.shape:
                    self._buffers[name] = now.detach().clone()
                else:
                    kept.copy_(now)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the body, a part of the program, without foreign weights."""
        self._free(self)
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def withdraw(self) -> None:
        """Let nothing be read from here on: a step begins, in which others tell who has what."""
        self._free(None)

    def offer(self, t: int) -> None:
        """Let weights of step ``t`` be read, until they are withdrawn."""
        self._free(self)
        self.settle(t)

    def _free(self, home: Home | None) -> None:
        self._end_lending()
        self._here.clear()
        self._changed_by_hand.clear()
        self._holdings.free_foreign(home)

    # ------------------------------------------------------------------ reading

    def read(self, names: Sequence[str], operands: Sequence[Tensor]) -> None:
        """Fetch foreign weights, since some are read: all, or these where all do not fit.

        Raises:
            StepError: inside a step, or where those that one operation reads do not fit.
        """
        j = self._stage_of[names[0]]
        self._check_place(f"{names[0]!r} of stage {j}, which rank {self._rank_of_stage(j)} has,")
        if self.fits:
            self.fetch()
        else:
            self._lend(names, operands)

    def keep(self, names: Sequence[str]) -> None:
        """Fetch weights that are this worker's from now on."""
        self._keep([n for n in names if home_of(self._named()[n]) is self])

    def _check_place(self, what: str) -> None:
        if self._is_running or self.stamp != self._now:
            raise StepError(
                f"{user_line()} reads {what} in the middle of a step; allowed: {_WHERE}; read it "
                "there, or let one stage have what is read and the code that reads it, "
                "CyclicStrategy(stages=[...])"
            )

    def read_gradient(self, name: str) -> None:
        """Refuse to read the gradient of a foreign parameter, which is None here.

        Raises:
            StepError: unless steps are under way, in which updates are made.
        """
        if not self._is_running:
            j = self._stage_of[name]
            raise StepError(
                f"{user_line()} reads the gradient of {name!r} of stage {j}, which rank "
                f"{self._rank_of_stage(j)} has; allowed: gradients of a rank's own stages, whose "
                "parameters are [n for n, j in trainer.strategy.stage_of.items() if j in "
                "trainer.strategy.own_stages]; read those, or use strategy='ddp' for this run"
            )

    def fetch(self, *, quietly: bool = False) -> None:
        """Make the module whole on this worker, until the next step."""
        foreign = {*self._holdings.foreign, *self._holdings.stale}
        if not (foreign and self._holdings.is_freed):
            return
        self._check_place("the module")
        self.check_memory(f"{user_line()} reads the module between steps")
        if not quietly:
            self._say_once(
                f"{user_line()} reads the module between steps, of which this rank has stages "
                f"{list(self._holdings.stages)}: the others are fetched now, and wherever that "
                "happens again, until the next step."
            )
        came = self._ask(foreign)
        named = self._named()
        with torch.inference_mode(mode=False), torch.no_grad():
            self._holdings.restore()
            for n in foreign:
                named[n].copy_(came[n])
            self._note_bits(foreign)

    def _say_once(self, text: str) -> None:
        if not self._has_said:
            self._has_said = True
            self._say(text)

    def _ask(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return values that other workers have, in the memory of the host."""
        if self._service is None:
            raise StepError(
                "weights of other workers were read where no process group joins them; allowed: "
                "runs that a Trainer has set up; use Trainer(strategy=...)"
            )
        by_rank: dict[int, list[str]] = {}
        for n in names:
            by_rank.setdefault(self._rank_of_stage(self._stage_of[n]), []).append(n)
        came: dict[str, Tensor] = {}
        named = self._named()
        with torch.inference_mode(mode=False), torch.no_grad():
            for rank, asked in sorted(by_rank.items()):
                into = [torch.empty(named[n].shape, dtype=named[n].dtype) for n in asked]
                self._service.ask(rank, self._now, asked, into)
                came.update(zip(asked, into, strict=True))
        return came

    # ------------------------------------------------------------------ changes by hand

    def check_unchanged(self) -> None:
        """Refuse to run the module on weights that hooks have changed behind the last step.

        Others may have fetched this rank's before or after it changed them.

        Raises:
            StepError: with the parameter.
        """
        for name, p in self._parameters.items():
            is_own_changed = self._counts.get(id(p), p._version) != p._version
            if is_own_changed or name in self._changed_by_hand or self._is_changed(name, p):
                _refuse_change(name)

    def _note_bits(self, names: Iterable[str]) -> None:
        named = self._named()
        with torch._C.DisableTorchFunctionSubclass():
            self._here |= {n: sum_of_bits(named[n]) for n in names}

    def _is_changed(self, name: str, x: Tensor) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return name in self._here and not torch.equal(self._here[name], sum_of_bits(x))

    # ------------------------------------------------------------------ what does not fit

    @contextmanager
    def present(self) -> Iterator[None]:
        """Let the body run the module; no backward follows it."""
        if self.fits:
            self.fetch(quietly=True)
        with nullcontext() if self.fits else self.lending(self._module):
            yield

    @contextmanager
    def lending(self, module: nn.Module) -> Iterator[None]:
        """Let the body run a module whose weights do not fit; no backward follows it."""
        self._end_lending()
        self._lending = self._make_lending()
        try:
            yield
        finally:
            self._end_lending()

    def _make_lending(self) -> Lending:
        own = sum(map(num_bytes_of, self._holdings.own))
        most = max((self._memory_limit_bytes or 0) - own, 0)
        return Lending(self._module, self._leave, most)

    def _end_lending(self) -> None:
        if self._lending is not None:
            self._lending.end()
            self._lending = None

    def _leave(self, x: Tensor, name: str) -> None:
        if isinstance(x, nn.Parameter):  # buffers are small, and keep their place
            if self._is_changed(name, x):  # as its owner has changed it, with the same hook
                self._changed_by_hand.add(name)
            x.data = without_memory(x)
        self._here.pop(name, None)

    def _lend(self, names: Sequence[str], operands: Sequence[Tensor]) -> None:
        """Have what an operation reads here; it stays absent by name, so that reads are seen."""
        if self._lending is None:
            self._lending = self._make_lending()
            self._say_once(
                f"{user_line()} reads the module between steps, which does not fit as a whole "
                f"(memory_limit_bytes={self._memory_limit_bytes}): each rank fetches what is read "
                "from the rank that has it, and gives it up again."
            )
        named = self._named()
        if self.is_over and torch.is_grad_enabled():
            self._refuse_graph([n for n in names if named[n].requires_grad])
        self._refuse_excess({n: named[n] for n in names}, self._lending)
        for n in self._changed_by_hand.intersection(names):
            _refuse_change(n)  # its owner may have changed it twice by now, or not yet
        brought = [n for n in names if n not in self._here]
        self._bring(brought)
        self._note_bits(brought)
        self._lending.lend({n: named[n] for n in names}, operands)

    def _refuse_graph(self, names: Sequence[str]) -> None:
        if names:  # an update of what is only lent would be lost
            raise StepError(
                f"{user_line()} reads {names[0]!r} for a gradient, but a fit is over that no rank "
                "can hold as a whole, and another rank has it; allowed: reads under "
                "torch.no_grad(); train on with a CyclicStrategy that has memory_limit_bytes, or "
                "load a checkpoint into a new module"
            )

    def _refuse_excess(self, read: Mapping[str, Tensor], lending: Lending) -> None:
        num_bytes = sum(map(num_bytes_of, read.values())) + lending.num_bytes_kept(read.values())
        if num_bytes > (self._memory_limit_bytes or 0):
            raise StepError(
                f"{user_line()} reads {next(iter(read))!r}, which other ranks have, and more with "
                f"it, {num_bytes} bytes at once, but memory_limit_bytes="
                f"{self._memory_limit_bytes}; allowed: what fits; read one after the other, under "
                "torch.no_grad(), or raise memory_limit_bytes"
            )

    def _bring(self, names: Sequence[str]) -> None:
        """Let absent weights have their values."""
        named = self._named()
        for n, value in self._ask(names).items():
            x = named[n]
            if isinstance(x, nn.Parameter):
                x.data = value.to(x.device)
            else:
                with torch._C.DisableTorchFunctionSubclass():
                    x.copy_(value)

    def _keep(self, names: Sequence[str]) -> None:
        with torch.inference_mode(mode=False), torch.no_grad():
            self._end_lending()
            self._bring(names)
            named = self._named()
            for n in names:
                come_back(named[n])

    @property
    def fits(self) -> bool:
        """Say whether a worker may have all parameters at once."""
        limit = self._memory_limit_bytes
        return limit is None or self._num_bytes() <= limit

    def _num_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self._module.parameters())

    def check_memory(self, who: str) -> None:
        """Refuse to have all parameters at once where they do not fit.

        Args:
            who: what needs them, in words.

        Raises:
            StepError: with both numbers of bytes.
        """
        if not self.fits:
            raise StepError(
                f"{who}, whose parameters have {self._num_bytes()} bytes together, but "
                f"memory_limit_bytes={self._memory_limit_bytes}; allowed: what a rank has itself, "
                "or a larger limit; do it behind training with a checkpoint, or raise "
                "memory_limit_bytes"
            )

    # ------------------------------------------------------------------ giving

    def _give(self, names: Sequence[str]) -> list[Tensor]:
        # who is asked may run a forward by now, with other versions in the module's places
        return [self._buffers[n] if n in self._buffers else self._value(n).detach() for n in names]

    def _named(self) -> dict[str, Tensor]:
        return {**self._parameters, **dict(self._module.named_buffers())}


def _refuse_change(name: str) -> NoReturn:
    raise StepError(
        f"parameter {name!r} was changed between steps by a hook or a callback, while ranks take "
        "it from one another, so that some would have it as it was; allowed: changes in the "
        "optimizer's step(), or before fit; leave weights as they are in hooks of validation, or "
        "use strategy='ddp' for this run"
    )
