"""Where a rank's training loaders are in an epoch, so that a run goes on behind the same batch.

    loaders that all have state_dict    their own states; Lightning keeps those of rank 0 alone
    DataLoaders, shuffled by torch      the random states with which the epoch began: it is drawn
                                        again, and the batches that were trained are skipped
    others                              begin the epoch anew, as Lightning lets them

What is skipped is loaded, so that whatever datasets draw for a batch is drawn for the same one.
Behind it all generators are where they were when the file was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypedDict, final

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_cyclic.compat import (
    Trainer,
    _collect_rng_states,
    _PrefetchDataFetcher,
    _set_rng_states,
    rank_zero_warn,
)

_LIBRARIES: Final = ("torch.utils.data.", "lightning.", "pytorch_lightning.", "lightning_fabric.")


class Position(TypedDict):
    """Where loaders are, in plain types."""

    batches: int  # of the epoch under way; 0 between epochs
    now: dict[str, Any]  # states of generators
    began: dict[str, Any] | None  # before iter() of this epoch
    first: dict[str, Any] | None  # before its first batch: some samplers draw then
    states: list[Any] | None


@final
class LoaderPosition:
    """Note where the training loaders of this rank are, and bring them back there.

    Args:
        trainer: of which four methods are wrapped, on its own objects.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._saved: Position | None = None
        self._lacks = ""
        self._has_begun = False
        self._began: dict[str, Any] | None = None
        self._first: dict[str, Any] | None = None
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._wrapped: list[tuple[Any, str, Any]] = [
            (fit, "_load_combined_loader_states", self._load),  # before the first iter()
            (fit, "on_advance_start", self._advance),  # calls the hooks of an epoch's start
            (epoch, "on_run_start", self._begin),  # calls iter() in later epochs
            (epoch, "_on_before_fetch", self._fetch),
        ]
        self._own = {method: getattr(holder, name) for holder, name, method in self._wrapped}
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
        batches: Any = self._trainer.fit_loop.epoch_loop.batch_progress
        done = int(batches.current.processed)
        is_over = batches.is_last_batch or done >= self._trainer.num_training_batches
        return Position(
            batches=0 if is_over else done, now=self.now(), began=self._began, first=self._first,
            states=[x.state_dict() for x in self._loaders] if self._have_states else None,
        )  # fmt: skip

    def now(self) -> dict[str, Any]:
        """Return where this rank's generators are."""
        states = _collect_rng_states(include_cuda=False)
        if isinstance(numpy := states.pop("numpy", None), tuple):  # whose array no file may have
            states["numpy"] = [numpy[0], torch.tensor(numpy[1].tolist()), *numpy[2:]]
        device = self._trainer.strategy.root_device
        if device.type == "cuda":
            states["device"] = torch.cuda.get_rng_state(device)
        return states | {"own": [g.get_state() for g in self._generators()]}

    def put_state(self, saved: Position | None, lacks: str = "") -> None:
        """Go on from a file; one that is loaded in the middle of a fit moves no loader.

        Args:
            saved: this rank's; None of a file that has none for it.
            lacks: why there is none, if it has some for others.
        """
        self._saved, self._lacks = (None if self._has_begun else saved), lacks

    # ------------------------------------------------------------------ Lightning's loops

    def _load(self) -> None:
        self._own[self._load]()
        self._began, self._first = self.now(), None

    def _advance(self) -> None:
        if self._saved is not None and not self._saved["batches"]:
            self._set(self._saved["now"])
        self._own[self._advance]()
        # Behind a file of an epoch's last batch Lightning does not count that the next has begun.
        # It would end it early when it goes on from there again.
        progress: Any = self._trainer.fit_loop.epoch_progress
        for counts in (progress.total, progress.current):
            counts.ready = counts.started = counts.processed + 1

    def _begin(self, data_fetcher: Any) -> None:
        num_done = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        saved, self._saved, self._has_begun = self._saved, None, True
        if saved is None and num_done and (self._lacks or not self._have_states):
            self._warn_of(num_done, self._lacks or "does not say where the training loader was")
        elif saved is not None and (lacks := self._doubt(saved, num_done)):
            self._warn_of(saved["batches"], lacks)
            self._set(saved["now"])
        elif saved is not None:
            self._put_back(data_fetcher, saved)
        combined, before = data_fetcher.combined_loader, self.now()
        iterator = combined._iterator
        self._own[self._begin](data_fetcher)
        is_early = self._began is None and num_done == 0  # it was begun before this was made
        if is_early or combined._iterator is not iterator:
            self._began, self._first = before, None

    def _put_back(self, data_fetcher: Any, saved: Position) -> None:
        """Begin the epoch of a file, or the next one, behind the hooks of its start."""
        num_done, before = saved["batches"], self.now()
        if saved["states"] is not None and self._have_states:
            for loader, state in zip(self._loaders, saved["states"], strict=True):
                loader.load_state_dict(state)
                if not num_done and next(iter(loader), loader) is not loader:
                    loader.load_state_dict(state)  # it was over, and has begun the next by itself
            self._set(before)
        elif num_done:
            self._set(saved["began"] or {})
        iter(data_fetcher)
        self._began, self._first = before, None
        if not num_done:
            return
        if saved["states"] is None or not self._have_states:
            self._set(saved["first"] or {})
            is_ahead = isinstance(data_fetcher, _PrefetchDataFetcher)
            for _ in range(num_done):
                next(data_fetcher if is_ahead else data_fetcher.iterator)
            data_fetcher.fetched = 0  # the loop counts them itself
        self._began, self._first = saved["began"], saved["first"]
        self._set(saved["now"])

    def _fetch(self) -> None:
        if self._first is None:
            self._first = self.now()
        self._own[self._fetch]()

    # ------------------------------------------------------------------ loaders

    def _doubt(self, saved: Position, num_done: int) -> str:
        """Say why this epoch would be another one if it were drawn again; nothing if it is not."""
        if saved["batches"] != num_done:
            return f"the training loader has {self._trainer.num_training_batches}"
        if num_done == 0 or (saved["states"] is not None and self._have_states):
            return ""
        if saved["began"] is None or saved["first"] is None:
            return "does not say how the epoch began"
        return next(filter(None, map(_doubt, self._loaders)), "")

    def _warn_of(self, num_done: int, lacks: str) -> None:
        self._began = self._first = None
        rank_zero_warn(
            f"The checkpoint was written behind batch {num_done} of an epoch, and {lacks}: this "
            "run goes on with data as Lightning itself does, so that some may come twice in this "
            "epoch, others not at all. To go on from there use a DataLoader that torch shuffles, "
            "or torchdata's StatefulDataLoader, or save checkpoints at the end of epochs."
        )

    @property
    def _loaders(self) -> list[Any]:
        combined = self._trainer.fit_loop._combined_loader
        return [] if combined is None else combined.flattened

    @property
    def _have_states(self) -> bool:
        names = ("state_dict", "load_state_dict")
        return bool(self._loaders) and all(hasattr(x, n) for x in self._loaders for n in names)

    def _set(self, states: Mapping[str, Any]) -> None:
        numpy = states.get("numpy")
        array = {"numpy": (numpy[0], numpy[1].numpy(), *numpy[2:])} if numpy else {}
        _set_rng_states({**states, **array})
        if "device" in states and (device := self._trainer.strategy.root_device).type == "cuda":
            torch.cuda.set_rng_state(states["device"], device)
        for generator, state in zip(self._generators(), states["own"], strict=False):
            generator.set_state(state)

    def _generators(self) -> list[torch.Generator]:
        """Return the generators that loaders and their samplers draw from, each once."""
        parts = [part for loader in self._loaders for part in (loader, *_samplers(loader))]
        found = (getattr(part, "generator", None) for part in parts)
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def _samplers(loader: Any) -> Iterator[Any]:
    """Yield a loader's samplers, and those within them."""
    todo = [getattr(loader, name, None) for name in ("batch_sampler", "sampler")]
    while todo:
        if (sampler := todo.pop()) is not None:
            yield sampler
            # Lightning deals what another sampler draws
            dealt = getattr(getattr(sampler, "dataset", None), "_sampler", None)
            todo += [getattr(sampler, "sampler", None), dealt]


def _doubt(loader: Any) -> str:
    if not isinstance(loader, DataLoader):
        return f"{type(loader).__name__}, which is no DataLoader, has no state"
    if isinstance(loader.dataset, IterableDataset):
        return f"an IterableDataset ({type(loader.dataset).__name__}) has no state"
    if loader.persistent_workers:
        return "persistent_workers=True lets workers go on drawing from epoch to epoch"
    types = (type(sampler) for sampler in _samplers(loader))
    other = next((x for x in types if not x.__module__.startswith(_LIBRARIES)), None)
    return "" if other is None else f"a sampler has no state ({other.__name__})"
