"""Checkpoint folders: each rank writes what it has, and reads what it needs.

    FOLDER/meta.pt              what is neither weights nor optimizer state, by rank 0
    FOLDER/.metadata            which tensor lies where, by torch.distributed.checkpoint
    FOLDER/__R_0.distcp         what rank R has: "model", "optimizer_0", ..., by names
    FOLDER/delayed_R_of_N.pt    its part of what is delayed

So do Lightning's own strategies write theirs (FSDPStrategy), and ``python -m
lightning.pytorch.utilities.consolidate_checkpoint FOLDER`` makes one plain file of it.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_cyclic.compat import _METADATA_FILENAME as META
from lightning_cyclic.compat import CheckpointIO
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.checkpoint import KEY, TO_WRITE, in_order, is_local, together
from lightning_cyclic.plugin.checkpoint_file import (
    CheckpointFile,
    part_of,
    sync_folder,
    write_whole,
)
from lightning_cyclic.runtime.assembly import Assembly


def by_names(state: Mapping[str, Any], optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return an optimizer's state by names of parameters in place of their numbers."""
    if "state" not in state:  # Lightning's stand-in, where the module has no optimizer
        return dict(state)
    names = _names_of(optimizer, module)
    groups = [{**g, "params": [names[k] for k in g["params"]]} for g in state["param_groups"]]
    return {"state": {names[k]: x for k, x in state["state"].items()}, "param_groups": groups}


def check_folder(path: Any, checkpoint_io: CheckpointIO, storage_options: Any) -> None:
    """Refuse what cannot write folders."""
    given = ""
    if not is_local(path):
        given = f"the path {str(path)!r}"
    elif type(checkpoint_io) is not CheckpointFile:
        given = f"plugins=[{type(checkpoint_io).__name__}()]"
    elif storage_options is not None:
        given = f"storage_options={storage_options!r}"
    if given:
        raise ConfigurationError(
            f"save_distributed_checkpoint=True with {given}; allowed: folders on a file system "
            "that all ranks have, written without a CheckpointIO; choose such a folder and leave "
            "the rest out, or use save_distributed_checkpoint=False"
        )


def write_folder(
    checkpoint: dict[str, Any], path: Path, delayed: Mapping[str, Any] | None, assembly: Assembly
) -> None:
    """Write a folder; all ranks must call it. There is the whole folder, or the one before it.

    Args:
        checkpoint: of this rank, with its part of the weights and of the state of optimizers.
        path: of the folder, the same on all ranks.
        delayed: this rank's part of what is delayed, if anything is.
        assembly: all ranks.

    Raises:
        CheckpointException: on every rank, where one cannot write.
    """
    rank, part = assembly.rank, part_of(path)
    if rank == 0:
        _remove(part)
    assembly.meet(TO_WRITE)
    optimizers = {f"optimizer_{k}": x for k, x in enumerate(checkpoint.pop("optimizer_states"))}
    parts = {"model": checkpoint.pop("state_dict")} | {
        name: each if rank == 0 else {"state": each.get("state", {})}  # groups are alike
        for name, each in optimizers.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        with assembly.waiting(TO_WRITE):
            writer = FileSystemWriter(part)
            index = save(parts, storage_writer=writer, process_group=assembly.group)
    if delayed is not None:
        write_whole(delayed, part / f"delayed_{rank}_of_{assembly.num_ranks}.pt")
    if rank == 0:
        # torch keeps no empty dictionaries, without which no optimizer would be loaded
        keys = index.state_dict_metadata
        checkpoint |= {
            name: each
            for name, each in optimizers.items()
            if not any(key.startswith(f"{name}.state.") for key in keys)
        }
        write_whole(checkpoint, part / META)
    assembly.meet(TO_WRITE)
    if rank == 0:
        before = part.with_suffix(".before")
        _remove(before)
        sync_folder(part)
        if path.is_symlink() or path.exists():
            path.rename(before)
        part.rename(path)
        sync_folder(path.parent)
        _remove(before)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@final
class CheckpointFolder:
    """Read a folder; ranks do so without each other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stateless: dict[str, Any] = {}  # optimizers

    def read(self, *keys: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        planner = _EmptyStateDictLoadPlanner(keys=set(keys))  # type: ignore[no-untyped-call]
        _load_state_dict(
            found, storage_reader=FileSystemReader(self._path), planner=planner, no_dist=True
        )
        return found

    def completed(self, meta: dict[str, Any], *, lazily: bool) -> dict[str, Any]:
        """Return what a plain file would hold, but for the state of optimizers, as it is large.

        Args:
            lazily: whether weights are read where they are used, one by one.
        """
        index = FileSystemReader(self._path).read_metadata().state_dict_metadata
        model = "model" if any(key.startswith("model.") for key in index) else "state_dict"
        weights = self._unread(model, index) if lazily else self.read(model).get(model, {})
        names = sorted({key.partition(".")[0] for key in (*index, *meta)})
        optimizers = [
            name for name in names if name.startswith("optimizer_") and name[10:].isdigit()
        ]
        self._stateless = {name: meta.pop(name) for name in optimizers if name in meta}
        whole = {**meta, "state_dict": weights}
        if optimizers:
            whole["optimizer_states"] = [{}] * len(optimizers)
        return whole | self._delayed()

    def _delayed(self) -> dict[str, Any]:
        files = {int(x.stem.split("_")[1]): x for x in self._path.glob("delayed_*_of_*.pt")}
        if not files:
            return {}
        num_ranks = int(files[max(files)].stem.split("_")[-1])
        if len(files) < num_ranks:
            raise ConfigurationError(
                f"the checkpoint {self._path} has what is delayed of {len(files)} ranks out of "
                f"{num_ranks}; allowed: folders as they were written; copy it anew, or go on from "
                "another checkpoint, fit(ckpt_path=...)"
            )
        # mapped, so that a rank reads what it uses
        read = partial(torch.load, map_location="cpu", mmap=True, weights_only=True)
        return {KEY: together([read(files[rank]) for rank in sorted(files)])}

    def optimizer_state(
        self, k: int, optimizer: Optimizer, module: nn.Module,
        wanted: Collection[nn.Parameter] | None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return an optimizer's state, by names of its parameters.

        Args:
            wanted: parameters whose state is read. [all]
        """
        name, keys = f"optimizer_{k}", [f"optimizer_{k}"]
        if wanted is not None:
            kept = set(map(id, wanted))
            named = zip(in_order(optimizer), _names_of(optimizer, module), strict=True)
            keys = [f"{name}.state.{n}" for p, n in named if id(p) in kept]
            keys.append(f"{name}.param_groups")
        read = self.read(*keys).get(name, {})
        return {"state": {}, **read, **self._stateless.get(name, {})}

    def _unread(self, model: str, index: Mapping[str, Any]) -> dict[str, Any]:
        keys = {key.removeprefix(f"{model}."): key for key in index if key.startswith(f"{model}.")}
        return {
            name: UnreadTensor(about.size, about.properties.dtype, partial(self._one, model, name))
            if isinstance(about := index[key], TensorStorageMetadata)
            else self._one(model, name)
            for name, key in keys.items()
        }

    def _one(self, model: str, name: str) -> Tensor:
        value: Tensor = self.read(f"{model}.{name}")[model][name]
        return value


def _names_of(optimizer: Optimizer, module: nn.Module) -> list[str]:
    names = {id(p): n for n, p in module.named_parameters()}
    return [names.get(id(p), str(k)) for k, p in enumerate(in_order(optimizer))]


@final
class UnreadTensor(Tensor):
    """Stand for a tensor of a checkpoint's files, with its shape and dtype.

    Each operation on it reads the values anew and keeps none, so that loading a module needs
    memory for one tensor beside it; and who copies it nowhere, as a rank does with the stages of
    others, reads nothing.
    """

    _read: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls, shape: torch.Size, dtype: torch.dtype, read: Callable[[], Tensor]
    ) -> UnreadTensor:
        """Make one of what is read."""
        made: UnreadTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made._read = read
        return made

    @override
    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"UnreadTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        args, kwargs = tree_map_only(UnreadTensor, lambda x: x._read(), (args, kwargs or {}))
        return func(*args, **kwargs)
