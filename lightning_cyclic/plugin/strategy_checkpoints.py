"""Checkpoints: what a strategy writes and reads, with what is delayed beside newest weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from lightning_cyclic.compat import _METADATA_FILENAME as META
from lightning_cyclic.compat import (
    AsyncCheckpointIO,
    CheckpointIO,
    DDPStrategy,
    TorchCheckpointIO,
)
from lightning_cyclic.plugin import checkpoint as ckpt
from lightning_cyclic.plugin import torn_weights
from lightning_cyclic.plugin.checkpoint_file import CheckpointFile, check_file
from lightning_cyclic.plugin.checkpoint_folder import (
    CheckpointFolder,
    by_names,
    check_folder,
    write_folder,
)
from lightning_cyclic.plugin.checks import refuse_file
from lightning_cyclic.plugin.hooks import Hooks
from lightning_cyclic.plugin.options import Options
from lightning_cyclic.plugin.training import AbstractTraining, agreed_seed
from lightning_cyclic.runtime.absent import num_bytes_of
from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.meta import MetaWeights, is_unmade

_READ_BY_TORCH = (CheckpointFile, TorchCheckpointIO)


class Checkpoints(DDPStrategy):
    """Write files or folders, and go on from them."""

    _training: Hooks
    _fitted: AbstractTraining | None  # behind whose fit another loop may have run
    _chosen: Options
    _unmade: MetaWeights | None
    _saved: Mapping[str, Any] | None
    _folder: CheckpointFolder | None
    assembly: Assembly

    def flush(self) -> None:
        raise NotImplementedError

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self.assembly.waiting(ckpt.TO_WRITE):
            return self._training.lightning_module_state_dict(super().lightning_module_state_dict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with self.assembly.waiting(ckpt.TO_WRITE):
            knows = self._fitted or self._training
            return knows.optimizer_state(super().optimizer_state, optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint with one more key for what is delayed: a file, or a folder."""
        with self.assembly.waiting(ckpt.TO_WRITE):
            state = (self._fitted or self._training).delayed_state()
        if self._chosen.save_distributed_checkpoint:
            self._save_folder(checkpoint, state, filepath, storage_options)
            return
        if state is not None:
            checkpoint[ckpt.KEY] = state
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _save_folder(
        self, checkpoint: dict[str, Any], state: Any, path: Any, storage_options: Any
    ) -> None:
        check_folder(path, self.checkpoint_io, storage_options)
        assert self.lightning_module is not None
        training = self._training
        if not isinstance(training, AbstractTraining) and not self.is_global_zero:
            checkpoint["state_dict"] = {}  # rank 0 has the same
        named = partial(by_names, module=self.lightning_module)
        states = checkpoint.get("optimizer_states", [])
        checkpoint["optimizer_states"] = list(map(named, states, self.optimizers))
        write_folder(checkpoint, Path(self.broadcast(path)), state, self.assembly)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Read a checkpoint, and keep what is delayed for the training."""
        path = checkpoint_path
        io: CheckpointIO | None = self.checkpoint_io
        if isinstance(io, AsyncCheckpointIO):  # which writes and reads as the one within it
            io = io.checkpoint_io
        is_ours = type(io) in _READ_BY_TORCH
        self._folder = CheckpointFolder(Path(path)) if is_ours and Path(path).is_dir() else None
        if self._folder is not None:
            path = Path(path) / META
        if is_ours and ckpt.is_local(path):
            # a rank of each host does, for the others
            check_file(Path(path), self.assembly, reads=self.local_rank == 0)
        loaded = super().load_checkpoint(path, *args, **kwargs)
        if self._folder is not None:
            module = self.lightning_module  # of which no rank reads more than the stages it makes
            loaded = self._folder.completed(
                loaded, lazily=module is not None and is_unmade(module)
            )
        saved = dict(loaded.get(ckpt.KEY) or {})
        ckpt.check_format(saved, checkpoint_path)
        saved.pop("format", None)
        self._saved = saved or None
        return loaded

    def _note_unmade(self) -> None:
        """Find layers on the meta device, to which a checkpoint may give values before setup."""
        module, is_plain = self.lightning_module, not isinstance(self._training, AbstractTraining)
        if is_plain and self._unmade is None and module is not None and is_unmade(module):
            self._unmade = MetaWeights(module, self.root_device, agreed_seed(self.assembly))

    @property
    def _exceeds_memory(self) -> bool:
        """Say whether no rank may have all parameters, and the plan needs none to."""
        options, limit = self._options, self._chosen.memory_limit_bytes
        if self.world_size == 1:  # it may have some elsewhere, when it is known how many
            return options.moves_state
        if limit is None or not options.makes_stages_apart:
            return False
        assert self.lightning_module is not None
        return sum(map(num_bytes_of, self.lightning_module.parameters())) > limit

    @property
    def _options(self) -> Options:
        raise NotImplementedError

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        self.flush()
        self._note_unmade()
        if self._training is not self._fitted:
            self._fitted = None  # whose weights they are no more
        is_file = self._unmade is not None and self._folder is None
        if is_file and self.world_size > 1 and self._exceeds_memory:
            refuse_file("a checkpoint to go on from")
        torn_weights.make_writable(self.lightning_module)
        with self._training.writable():
            super().load_model_state_dict(checkpoint, strict=strict)
        torn_weights.forget(self.lightning_module)
        self._resume()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._folder is not None:
            module, training = self.lightning_module, self._training
            assert module is not None
            wanted = training.with_state
            read = [
                self._folder.optimizer_state(k, optimizer, module, wanted)
                for k, optimizer in enumerate(self.optimizers)
            ]
            checkpoint = {**checkpoint, "optimizer_states": read}
            self._folder = None
        self._training.load_optimizer_state_dict(super().load_optimizer_state_dict, checkpoint)

    def _resume(self) -> None:
        if isinstance(self._training, AbstractTraining):
            self._training.resume(self._saved)
            self._saved = None
