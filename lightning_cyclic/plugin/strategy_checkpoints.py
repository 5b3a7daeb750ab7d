"""Checkpoints: what a strategy writes and reads, with what is delayed beside newest weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from lightning_cyclic.compat import CheckpointIO, DDPStrategy, TrainerFn, TrainerStatus
from lightning_cyclic.plugin import checkpoint as ckpt
from lightning_cyclic.plugin import sealed_file
from lightning_cyclic.plugin.checkpoint_files import CheckpointFiles
from lightning_cyclic.plugin.checkpoint_folder import (
    Apart,
    CheckpointFolder,
    by_names,
    check_folder,
    check_names,
    with_tensors,
    write_folder,
)
from lightning_cyclic.plugin.hooks import Hooks
from lightning_cyclic.plugin.options import Options
from lightning_cyclic.plugin.training import AbstractTraining
from lightning_cyclic.runtime.agreement import Together, put_together
from lightning_cyclic.runtime.deferred import Deferral

TO_WRITE = "to write a checkpoint"


class Checkpoints(DDPStrategy):
    """Write files or folders, and go on from them."""

    _training: Hooks
    _chosen: Options
    _files: CheckpointFiles
    _deferral: Deferral | None
    _saved: Mapping[str, Any] | None
    _folder: CheckpointFolder | None

    def naming(self, what: str) -> AbstractContextManager[None]:
        """Name the ranks that do not come while the body waits for all of them."""
        raise NotImplementedError

    def flush(self) -> None:
        """Finish updates in flight, so that the module holds the newest weights."""
        raise NotImplementedError

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self.naming(TO_WRITE):
            return self._training.lightning_module_state_dict(super().lightning_module_state_dict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with self.naming(TO_WRITE):
            return self._training.optimizer_state(super().optimizer_state, optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint with one more key for what is delayed: a file, or a folder."""
        if self._chosen.save_distributed_checkpoint:
            self._save_folder(checkpoint, filepath, storage_options)
            return
        self._add_delayed(checkpoint, partial(put_together, new=self._training.new))
        if not self._files.has(filepath) or storage_options is not None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self.is_global_zero:
            has_room = not self._training.is_larger_than_memory
            self._files.save(checkpoint, Path(filepath), has_room=has_room)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, but for one that the last should have replaced and could not."""
        self._files.remove(filepath, super().remove_checkpoint, writes=self.is_global_zero)

    def _get_checkpoint_io(self) -> CheckpointIO:
        return self.checkpoint_io  # by a method, as a Trainer may be pickled

    def _is_fitting(self) -> bool:
        state = self.lightning_module.trainer.state if self.lightning_module is not None else None
        return state is not None and (state.fn, state.status) == (
            TrainerFn.FITTING,
            TrainerStatus.RUNNING,
        )

    def _add_delayed(self, checkpoint: dict[str, Any], together: Together) -> None:
        with self.naming(TO_WRITE):
            state = self._training.delayed_state(together)
        if state is not None:
            checkpoint[ckpt.KEY] = {"format": ckpt.FORMAT} | state

    def _save_folder(self, checkpoint: dict[str, Any], path: Any, storage_options: Any) -> None:
        """Write this rank's part of a checkpoint."""
        check_folder(path, self.checkpoint_io, storage_options)
        assert self.lightning_module is not None
        apart, training = Apart(), self._training
        self._add_delayed(checkpoint, apart.together)
        if not isinstance(training, AbstractTraining) and not self.is_global_zero:
            checkpoint["state_dict"] = {}  # rank 0 has the same
        named = partial(by_names, module=self.lightning_module)
        states = checkpoint.get("optimizer_states", [])
        checkpoint["optimizer_states"] = list(map(named, states, self.optimizers))
        folder = Path(self.broadcast(path))
        with self._files.warning(folder), self.naming(TO_WRITE):
            write_folder(checkpoint, folder, apart.tensors, training.group)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Read a checkpoint, and keep what is delayed for the training."""
        if self._files.is_behind(checkpoint_path):  # it may be on its way
            self._files.wait()
            self.barrier("load_checkpoint")
        is_file, self._folder = self._files.has(checkpoint_path), None
        if is_file:
            with self.naming("to check a checkpoint"):
                sealed_file.check(checkpoint_path, together=True)
        if is_file and Path(checkpoint_path).is_dir():
            self._folder = CheckpointFolder(Path(checkpoint_path))
            meta = super().load_checkpoint(self._folder.meta, *args, **kwargs)
            loaded = self._folder.completed(meta)
        elif is_file:  # of which no rank reads more than it needs, if it makes its own stages
            read = super().load_checkpoint if self._deferral is None else ckpt.mapped
            loaded = read(checkpoint_path, *args, **kwargs)
        else:
            loaded = super().load_checkpoint(checkpoint_path, *args, **kwargs)  # from 2.6 on more
        saved = with_tensors(loaded)
        ckpt.check_format(saved, checkpoint_path)
        saved.pop("format", None)
        self._saved = saved or None
        return loaded

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights; versions in flight give way to them."""
        assert self.lightning_module is not None
        if self._folder is not None:
            check_names(self._folder.path, checkpoint["state_dict"], self.lightning_module, strict)
        self.flush()
        later = nullcontext() if self._deferral is None else self._deferral.loading()
        with self._training.writable(), later:
            super().load_model_state_dict(checkpoint, strict=strict)
        self._resume()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of optimizers; of a folder each rank reads what it needs of it."""
        if self._folder is not None:
            module, training = self.lightning_module, self._training
            assert module is not None
            wanted = training.with_state
            states = checkpoint["optimizer_states"]
            read = [
                self._folder.optimizer_state(k, saved, optimizer, module, wanted)
                for k, (saved, optimizer) in enumerate(zip(states, self.optimizers, strict=True))
            ]
            checkpoint = {**checkpoint, "optimizer_states": read}
            self._folder = None
        self._training.load_optimizer_state_dict(super().load_optimizer_state_dict, checkpoint)

    def _resume(self) -> None:
        if isinstance(self._training, AbstractTraining):
            self._training.resume(self._saved)
            self._saved = None
