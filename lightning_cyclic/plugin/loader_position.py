"""Where a rank's training loaders are in an epoch, so that a run goes on behind the same batch.

    loaders that all have state_dict   their own states; Lightning keeps those of rank 0 alone
    others                             the random states with which the epoch began: it is drawn
                                       again, and the batches that were trained are skipped

What is skipped is loaded, so that whatever datasets draw for a batch is drawn for the same one.
Behind it all generators are where they were when the file was written, so that hooks draw what
they would have drawn, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypedDict, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, IterableDataset

from lightning_cyclic.compat import (
    Trainer,
    _PrefetchDataFetcher,
    _set_sampler_epoch,
    rank_zero_warn,
)
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.epoch_counts import count_epoch_begun, mend_epoch_counts
from lightning_cyclic.runtime.saved_generators import Generators, put_states, states_of

_LOAD: Final = "_load_combined_loader_states"  # of the fit loop: called before its first iter()
_SETUP: Final = "setup_data"  # of the same: calls that, and iter()
_ADVANCE: Final = "on_advance_start"  # of the same: calls the hooks of an epoch's start
_BEGIN: Final = "on_run_start"  # of the epoch loop: calls iter() in later epochs
_FETCH: Final = "_on_before_fetch"  # of the same
_LIBRARIES: Final = ("torch.utils.data.", "lightning.")
_TODO: Final = (
    "give the loader state_dict and load_state_dict, as torchdata's StatefulDataLoader has them, "
    "or save checkpoints at the end of epochs"
)


class Randomness(Generators):
    """What the next order is drawn from, and whatever hooks draw."""

    own: list[Tensor]  # of generators that loaders and samplers were given


class Position(TypedDict):
    """Where loaders are, in plain types."""

    epoch: int  # under way, or the next one
    batches: int  # of the epoch under way; 0 between epochs
    now: Randomness
    began: Randomness | None  # before iter() of this epoch
    first: Randomness | None  # before its first batch: some samplers draw then
    states: list[Any] | None


@final
class LoaderPosition:
    """Note where the training loaders of this rank are, and bring them back there.

    Args:
        trainer: of which five methods are wrapped, on its own objects.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._saved: Position | None = None
        self._num_saved = 0  # loaders of a file that fits none of this run; 0 for no such file
        self._began: Randomness | None = None
        self._first: Randomness | None = None
        self._is_begun = False  # with the random state of the file
        self._is_first = True  # no epoch of this run has begun
        self._begun: Randomness | None = None  # behind iter()
        self._begins_anew = False  # the first epoch of this run: hooks have drawn before it
        self._epoch = 0
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._wrapped: list[tuple[Any, str, Any]] = [
            (fit, _LOAD, self._load), (fit, _SETUP, self._set_up), (fit, _ADVANCE, self._advance),
            (epoch, _BEGIN, self._begin), (epoch, _FETCH, self._fetch),
        ]  # fmt: skip
        self._own = {name: getattr(holder, name) for holder, name, _ in self._wrapped}
        for holder, name, method in self._wrapped:
            setattr(holder, name, method)

    def close(self) -> None:
        """Take everything off the Trainer again."""
        for holder, name, _ in self._wrapped:
            vars(holder).pop(name, None)
        self._wrapped = []

    # ------------------------------------------------------------------ files

    def state(self) -> Position:
        """Return where the loaders are."""
        batches = self._trainer.fit_loop.epoch_loop.batch_progress
        done, loaders = _processed(batches), self._loaders
        is_over = batches.is_last_batch or done >= self._trainer.num_training_batches
        return Position(
            epoch=self._epoch + is_over,
            batches=0 if is_over else done,
            now=self.now(),
            began=self._began,
            first=self._first,
            states=[x.state_dict() for x in loaders] if self._have_states else None,
        )

    def now(self) -> Randomness:
        """Return where this rank's generators are."""
        return self._randomness()

    def put_state(
        self,
        positions: Mapping[str, Position],
        replica: int,
        num_replicas: int,
        own: Randomness | None = None,
    ) -> None:
        """Go on from a file.

        Args:
            positions: of all replicas, by number; none of a file that has no such thing.
            replica: number of this rank's.
            num_replicas: that have loaders of their own.
            own: where this rank's generators were. [where those of its replica's loader were]
        """
        fits = len(positions) == num_replicas
        self._saved = positions[str(replica)].copy() if fits else None
        if self._saved is not None and own is not None:
            self._saved["now"] = own
        self._num_saved = 0 if fits else len(positions)
        self._num_replicas = num_replicas
        self._is_begun = False

    def draw_again(self) -> None:
        """Let generators be where they were, if the file says so; those of loaders come later."""
        if self._saved is not None:
            put_states(self._saved["now"], self._device)

    # ------------------------------------------------------------------ Lightning's loops

    def _load(self) -> None:
        """Before the first iter(): load states, or what the epoch is drawn from."""
        self._begun = None
        if self._saved is not None and self._is_first:
            self._put_back(self._saved)
        else:
            self._own[_LOAD]()
        self._note()

    def _put_back(self, saved: Position) -> None:
        self._is_begun = True
        for loader in self._loaders:
            # Lightning does so behind iter(), when workers have drawn by the order of epoch 0
            _set_sampler_epoch(loader, saved["epoch"])
        if saved["states"] is not None and self._have_states:
            self._load_states(saved["states"], is_over=not saved["batches"])
        elif saved["batches"] and saved["began"] is not None:
            self._set(saved["began"])
            return
        self._set(saved["now"])

    def _load_states(self, states: list[Any], *, is_over: bool) -> None:
        for loader, state in zip(self._loaders, states, strict=True):
            _load_state(loader, state, is_over=is_over)
        self._trainer.fit_loop._combined_loader_states_to_load = []

    def _set_up(self) -> None:
        if self._is_first:
            mend_epoch_counts(self._trainer.fit_loop)
        self._own[_SETUP]()
        if self._begun is None:
            self._begun = self._randomness()

    def _advance(self) -> None:
        self._call_hooks()
        count_epoch_begun(self._trainer.fit_loop)

    def _call_hooks(self) -> None:
        """Let the hooks of an epoch's start draw what they would have drawn behind the file.

        The first iter() has drawn before them, and so have hooks of the start of training. In a
        run that was not stopped iter() comes behind these hooks.
        """
        saved = self._saved if self._is_first else None
        if saved is None or saved["batches"]:
            self._own[_ADVANCE]()
            return
        if not self._is_begun:  # the loaders were there before the file was read
            self._begins_anew = True
            self._put_back(saved)
        self._set(saved["now"])
        before = self._randomness()  # a file need not know of all generators
        self._own[_ADVANCE]()
        self._begins_anew |= not _same(before, self._randomness())
        if not self._begins_anew and self._begun is not None:
            self._set(self._begun)

    def _begin_anew(self, data_fetcher: Any, saved: Position) -> None:
        drawn = self._randomness()
        if saved["states"] is not None and self._have_states:
            self._load_states(saved["states"], is_over=True)
            self._set(drawn)
        iter(data_fetcher)

    def _begin(self, data_fetcher: Any) -> None:
        """Begin an epoch, or go on in its middle."""
        # here, as counters of epochs begun differ behind a file of the end of one
        self._epoch = _processed(self._trainer.fit_loop.epoch_progress)
        loop = self._trainer.fit_loop.epoch_loop
        num_done = loop.batch_progress.current.ready
        # a file that is loaded in the middle of a fit moves no loader
        saved, self._saved = self._saved if self._is_first else None, None
        self._is_first = False
        if num_done:
            self._go_on(data_fetcher, saved, num_done)
            self._own[_BEGIN](data_fetcher)
            return
        if saved is not None and saved["batches"]:  # Lightning takes the epoch for over
            rank_zero_warn(
                f"The checkpoint was written behind batch {saved['batches']} of an epoch, and the "
                f"training loader has {self._trainer.num_training_batches}: this run goes on with "
                "the next epoch. To go on in this one give the dataset and the batch size with "
                "which it was written."
            )
        combined, before = data_fetcher.combined_loader, self._randomness()
        iterator = combined._iterator
        if saved is not None and self._begins_anew:
            self._begin_anew(data_fetcher, saved)
        self._own[_BEGIN](data_fetcher)
        if combined._iterator is not iterator or self._began is None:  # it was begun here
            self._began = before
        self._first = None

    def _go_on(self, data_fetcher: Any, saved: Position | None, num_done: int) -> None:
        if saved is None or saved["batches"] != num_done:
            self._warn_of_other_loaders(num_done)
            return
        if not self._is_begun:  # the loaders were there before the file was read
            self._put_back(saved)
            iter(data_fetcher)
        if saved["states"] is None or not self._have_states:
            if saved["began"] is None or saved["first"] is None:
                self._warn_of_other_loaders(num_done)
                return
            self._warn_of_doubt(num_done)
            self._set(saved["first"])
            self._skip(data_fetcher, num_done)
        self._began, self._first = saved["began"], saved["first"]
        self._set(saved["now"])

    def _skip(self, data_fetcher: Any, num_done: int) -> None:
        """Take the batches that were trained; the loop counts them itself."""
        is_ahead = isinstance(data_fetcher, _PrefetchDataFetcher)
        source: Iterator[Any] = data_fetcher if is_ahead else data_fetcher.iterator
        for k in range(num_done):
            if next(source, self) is self:
                raise ConfigurationError(
                    f"the checkpoint was written behind batch {num_done} of an epoch, but the "
                    f"training loader has {k}; allowed: the loader with which it was written; "
                    "give the same dataset and batch size, or a checkpoint of the end of an epoch"
                )
        if is_ahead:
            data_fetcher.fetched -= num_done

    def _fetch(self) -> None:
        if self._first is None:
            self._first = self._randomness()
        self._own[_FETCH]()

    # ------------------------------------------------------------------ loaders

    @property
    def _loaders(self) -> list[Any]:
        combined = self._trainer.fit_loop._combined_loader
        return [] if combined is None else combined.flattened

    @property
    def _have_states(self) -> bool:
        return bool(self._loaders) and all(map(_has_state, self._loaders))

    def _note(self) -> None:
        self._began, self._first = self._randomness(), None

    def _randomness(self) -> Randomness:
        own = [g.get_state() for g in self._generators()]
        return Randomness(**states_of(self._device), own=own)

    def _set(self, randomness: Randomness) -> None:
        put_states(randomness, self._device)
        for generator, state in zip(self._generators(), randomness["own"], strict=False):
            generator.set_state(state)

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._trainer.strategy.root_device
        return device

    def _generators(self) -> list[torch.Generator]:
        """Return the generators that loaders and their samplers draw from, each once."""
        parts = [part for loader in self._loaders for part in (loader, *_samplers(loader))]
        found = (getattr(part, "generator", None) for part in parts)
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    # ------------------------------------------------------------------ warnings

    def _warn_of_other_loaders(self, num_done: int) -> None:
        if self._num_saved:
            then = (
                "every loader has the state of the first one of these"
                if self._have_states  # which Lightning has loaded
                else "begins this epoch's data anew"
            )
            rank_zero_warn(
                f"The checkpoint was written behind batch {num_done} of an epoch, by "
                f"{self._num_saved} ranks with loaders of their own; this run has "
                f"{self._num_replicas}, and {then}: some data may come twice in this epoch, "
                "others not at all. To change their number save at the end of an epoch."
            )
        elif not self._have_states:
            rank_zero_warn(
                f"The checkpoint was written behind batch {num_done} of an epoch, and does not "
                "say where the training loader was: this run begins the epoch's data anew, so "
                f"that some of them come twice, others not at all. To go on from there {_TODO}."
            )

    def _warn_of_doubt(self, num_done: int) -> None:
        """Warn of loaders of which nobody knows that they give the same epoch again."""
        for doubt in filter(None, map(_doubt, self._loaders)):
            rank_zero_warn(
                f"The checkpoint was written behind batch {num_done} of an epoch, and the "
                f"training loader has {doubt}: its epoch is begun anew and {num_done} batches are "
                f"skipped, which goes on from there only if it gives the same again. To be sure "
                f"{_TODO}."
            )


def _same(a: Any, b: Any) -> bool:
    """Say whether states are the same, bit by bit."""
    (xs, form), (ys, other) = tree_flatten(a), tree_flatten(b)
    pairs = zip(xs, ys, strict=False)
    return form == other and all(
        torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs
    )


def _processed(progress: Any) -> int:
    """Return how many of an epoch, or of all epochs, have been run, if not to the last hook."""
    return int(progress.current.processed)


def _has_state(x: Any) -> bool:
    return hasattr(x, "state_dict") and hasattr(x, "load_state_dict")


def _load_state(loader: Any, state: Any, *, is_over: bool) -> None:
    """Load a loader's state; the next iter() begins an epoch if the one of the state is over.

    torchdata's loaders are at the end of theirs until somebody asks for one batch more, which
    Lightning does not where it knows how many there are.
    """
    loader.load_state_dict(state)
    if is_over and next(iter(loader), loader) is not loader:
        loader.load_state_dict(state)  # it has begun the next one by itself


def _samplers(loader: Any) -> Iterator[Any]:
    """Yield a loader's samplers, and those within them."""
    todo = [getattr(loader, name, None) for name in ("batch_sampler", "sampler")]
    seen: set[int] = set()
    while todo:
        sampler = todo.pop()
        if sampler is None or id(sampler) in seen:
            continue
        seen.add(id(sampler))
        yield sampler
        todo.append(getattr(sampler, "sampler", None))
        # Lightning deals what another sampler draws
        todo.append(getattr(getattr(sampler, "dataset", None), "_sampler", None))


def _doubt(loader: Any) -> str | None:
    """Say why a loader's epoch may be another one when it is drawn again; None if it is not."""
    if not isinstance(loader, DataLoader):
        return f"no state ({type(loader).__name__} is no DataLoader)"
    if isinstance(loader.dataset, IterableDataset):
        return f"an IterableDataset without state ({type(loader.dataset).__name__})"
    for sampler in _samplers(loader):
        if not type(sampler).__module__.startswith(_LIBRARIES):
            return f"a sampler without state ({type(sampler).__name__})"
    if loader.persistent_workers:
        return "workers that go on drawing from epoch to epoch (persistent_workers=True)"
    return None
