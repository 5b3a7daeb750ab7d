"""Checkpoint folders: each rank writes what it has, and reads what it needs.

    FOLDER/meta.pt          all that is neither weights nor optimizer state, by rank 0
    FOLDER/.metadata        which tensor lies where, by torch.distributed.checkpoint
    FOLDER/digests.b2       digests of all other files (sealed_file.py)
    FOLDER/__R_0.distcp     what rank R has, by names with dots between them:
        model, NAME                         parameters and buffers
        optimizer_0, state, NAME, ...       its state for a parameter
        optimizer_0, param_groups           by names of parameters
        lightning_cyclic_tensors, ...       older versions of weights, and the like

So do Lightning's own strategies write theirs (FSDPStrategy), and ``python -m
lightning.pytorch.utilities.consolidate_checkpoint FOLDER`` makes one plain file of it.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cyclic.compat import _METADATA_FILENAME as META
from lightning_cyclic.compat import CheckpointIO, TorchCheckpointIO
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin import sealed_file
from lightning_cyclic.plugin.checkpoint import KEY, in_order, is_local
from lightning_cyclic.plugin.sealed_file import INDEX
from lightning_cyclic.plugin.written_together import on_all, unwritten
from lightning_cyclic.runtime.agreement import merged
from lightning_cyclic.runtime.unread import UnreadMapping, UnreadTensor

TENSORS = f"{KEY}_tensors"
_MODELS = ("model", "state_dict")  # of FSDPStrategy and of ModelParallelStrategy
_OPTIMIZER = re.compile(r"optimizer_\d+")
_APART = "lies apart: "  # begins a word for a tensor of TENSORS
_WITH_TENSORS = ("previous", "feedback", "displacements")  # of what is delayed


# ---------------------------------------------------------------------- writing


@final
class Apart:
    """Take tensors out of what is delayed: each rank writes its own."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def together(self, what: str, mine: Mapping[str, Any], group: Any) -> dict[str, Any]:
        """Return on rank 0 what all ranks have, with a word for each tensor.

        Args:
            what: name of it.
            mine: what this rank has, by names of parameters.
            group: process group of all workers; None for one worker.
        """
        return merged(self._words(what, mine), group)

    def _words(self, path: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: self._words(f"{path}.{k}", x) for k, x in value.items()}
        if not isinstance(value, Tensor):
            return value
        self.tensors[path] = value
        return f"{_APART}{path}"


def by_names(state: Mapping[str, Any], optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return an optimizer's state by names of parameters in place of their numbers."""
    if "state" not in state:  # Lightning's stand-in, where the module has no optimizer
        return dict(state)
    names = _names_of(optimizer, module)
    groups = [{**g, "params": [names[k] for k in g["params"]]} for g in state["param_groups"]]
    return {"state": {names[k]: x for k, x in state["state"].items()}, "param_groups": groups}


def check_folder(path: Any, checkpoint_io: CheckpointIO, storage_options: Any) -> None:
    """Refuse what cannot write folders.

    Raises:
        ConfigurationError: with the path, or with who was to write.
    """
    given = ""
    if not is_local(path):
        given = f"the path {str(path)!r}"
    elif type(checkpoint_io) is not TorchCheckpointIO:
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
    checkpoint: dict[str, Any], path: Path, tensors: Mapping[str, Tensor], group: Any
) -> None:
    """Write a folder; all ranks must call it. There is the whole folder, or the one before it.

    Args:
        checkpoint: of this rank, with its part of the weights and of the state of optimizers.
        path: of the folder, the same on all ranks.
        tensors: what else is this rank's part.
        group: process group of all ranks; None for one rank, or the default group.

    Raises:
        ConfigurationError: on every rank, where one cannot write, of which nothing is left;
            caused by an OSError, if it is the disk that takes nothing.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    is_first = rank == 0
    parts: dict[str, Any] = {"model": checkpoint.pop("state_dict"), TENSORS: dict(tensors)}
    optimizers = {f"optimizer_{k}": x for k, x in enumerate(checkpoint.pop("optimizer_states"))}
    for name, each in optimizers.items():
        # groups are alike on all ranks
        parts[name] = each if is_first else {"state": each.get("state", {})}
    unfinished = path.with_name(f"{path.name}.part")
    try:
        on_all(lambda: _remove(unfinished) if is_first else "", path, group)
        index = _save(parts, unfinished, path, group)
        if is_first:
            # a folder keeps no empty dictionaries, without which a file would not be loaded
            keys = index.state_dict_metadata
            checkpoint |= {
                name: each
                for name, each in optimizers.items()
                if not any(key.startswith(f"{name}.state.") for key in keys)
            }
        lines = on_all(lambda: _digests(checkpoint, unfinished, rank), path, group)
        on_all(lambda: _seal(unfinished, path, lines) if is_first else "", path, group)
    except ConfigurationError:
        if is_first:
            with suppress(OSError):  # nothing can be written there: the next one begins with it
                _remove(unfinished)
        raise


def _save(parts: dict[str, Any], unfinished: Path, path: Path, group: Any) -> Metadata:
    """Write what each rank has, and the index of it."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            index: Metadata = save(parts, storage_writer=_Writer(unfinished), process_group=group)
            return index
    except CheckpointException as error:
        failures = {r: x[0] for r, x in error.failures.items()}
    raise unwritten(path, failures)


@final
class _Writer(FileSystemWriter):
    """Say what the disk says, where torch speaks of its archive alone."""

    @override
    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        with sealed_file.naming_disk():
            return super().write_data(*args, **kwargs)


def _digests(checkpoint: Mapping[str, Any], folder: Path, rank: int) -> str:
    """Return the digests of what this rank has written, rank 0 all that is nobody's part."""
    names = sorted(p.name for p in folder.glob(f"__{rank}_*"))
    if rank == 0:
        sealed_file.write(checkpoint, folder / META)
        names = [INDEX, META, *names]
    return sealed_file.digests_of(folder, names)


def _seal(unfinished: Path, path: Path, lines: Sequence[str]) -> str:
    """Let a whole folder take its name; what had the name goes when it is free."""
    before = path.with_name(f"{path.name}.before")
    _remove(before)
    sealed_file.seal_folder(unfinished, path, "".join(lines), before)
    with suppress(OSError):  # the new one is there
        _remove(before)
    return ""


def _remove(path: Path) -> str:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
    return ""


# ---------------------------------------------------------------------- reading


@final
class CheckpointFolder:
    """Read a folder, each value where it is asked for; ranks do so without each other.

    Args:
        path: of the folder, which :func:`sealed_file.check` has found whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.meta = path / META
        self._reader = FileSystemReader(path)
        self._index = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._index, is_coordinator=True)
        paths = self._index.planner_data or {}
        self._paths = {key: paths.get(key, (key,)) for key in self._index.state_dict_metadata}

    # ------------------------------------------------------------------ values

    def _values(self, keys: Sequence[str]) -> dict[str, Any]:
        """Read some values."""
        state: dict[str, Any] = {key: self._room(key) for key in keys}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, self._index, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        self._reader.read_data(planner.finish_plan(plan), planner).wait()
        return planner.state_dict

    def _room(self, key: str) -> Tensor | None:
        about = self._index.state_dict_metadata[key]
        if not isinstance(about, TensorStorageMetadata):
            return None
        return torch.empty(about.size, dtype=about.properties.dtype)

    def _value(self, key: str) -> Any:
        return self._values([key])[key]

    def _unread(self, key: str) -> Any:
        about = self._index.state_dict_metadata[key]
        if not isinstance(about, TensorStorageMetadata):
            return self._value(key)
        return UnreadTensor(about.size, about.properties.dtype, partial(self._value, key))

    # ------------------------------------------------------------------ parts

    def completed(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Return what a plain file would hold, but for the state of optimizers, as it is large.

        Tensors are read where they are used.

        Args:
            meta: what ``meta.pt`` holds.
        """
        keys = [k for k, path in self._paths.items() if path[1:2] == ("param_groups",)]
        values, found = self._values(keys), dict[str, Any]()
        for key in keys:
            set_element(found, self._paths[key], values[key])
        found |= {name: meta.pop(name) for name in [*meta] if _OPTIMIZER.fullmatch(name)}
        whole = {**meta, "state_dict": self._state_dict()}
        if found:
            each = sorted(found, key=_number)
            whole["optimizer_states"] = [{"state": {}, **found[name]} for name in each]
        apart = {path[1]: key for key, path in self._paths.items() if path[0] == TENSORS}
        if apart:
            whole[TENSORS] = UnreadMapping(apart, self._value)
        return whole

    def _state_dict(self) -> dict[str, Any]:
        model = next((m for m in _MODELS if any(p[0] == m for p in self._paths.values())), "")
        found: dict[str, Any] = {}
        for key, path in self._paths.items():
            if path[0] == model:
                set_element(found, path[1:], self._unread(key))
        return found

    def optimizer_state(
        self, k: int, saved: Mapping[str, Any], optimizer: Optimizer, module: nn.Module,
        wanted: Collection[nn.Parameter] | None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return an optimizer's state, by numbers of its parameters.

        Args:
            k: number of the optimizer.
            saved: its groups, by names.
            optimizer: that is to have the state.
            module: of its parameters.
            wanted: parameters whose state is read. [all]

        Raises:
            ConfigurationError: the optimizer has other parameters.
        """
        if "param_groups" not in saved:  # Lightning's stand-in
            return dict(saved)
        names = _names_of(optimizer, module)
        groups = _matched(self.path, saved["param_groups"], optimizer, names)
        kept = None if wanted is None else set(map(id, wanted))
        parameters = in_order(optimizer)
        numbers = {n: m for m, n in enumerate(names) if kept is None or id(parameters[m]) in kept}
        part = (f"optimizer_{k}", "state")
        paths = {key: p[2:] for key, p in self._paths.items() if p[:2] == part}
        paths = {key: (numbers[p[0]], *p[1:]) for key, p in paths.items() if p[0] in numbers}
        values, state = self._values([*paths]), dict[Any, Any]()
        for key, path in paths.items():
            set_element(state, path, values[key])
        return {"state": state, "param_groups": groups}


def with_tensors(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Take what is delayed out of a checkpoint: of a folder, of a file that was made of one, any.

    Returns:
        What :meth:`AbstractTraining.delayed_state` has returned, of which tensors that lie apart
        are read where they are asked for.
    """
    saved = dict(checkpoint.get(KEY) or {})
    tensors = checkpoint.pop(TENSORS, None)
    if tensors is None:
        return saved

    def value(x: Any) -> Any:
        is_apart = isinstance(x, str) and x.startswith(_APART)
        return tensors[x.removeprefix(_APART)] if is_apart else x

    lazy = {k: UnreadMapping(saved[k], value) for k in _WITH_TENSORS if k in saved}
    return saved | lazy


def check_names(path: Path, state: Mapping[str, Any], module: nn.Module, strict: bool) -> None:
    """Refuse weights of another module.

    Args:
        path: of the folder that they are from.
        state: its weights.
        module: that is to have them.
        strict: whether both have to have the same names.

    Raises:
        ConfigurationError: with the first parameter or buffer that does not fit, and both shapes.
    """
    mine = module.state_dict(keep_vars=True)
    for name in [*mine, *(n for n in state if n not in mine)]:
        here, there = _shape(mine, name), _shape(state, name)
        if here != there and (strict or (name in mine and name in state)):
            raise ConfigurationError(
                f"{name!r} {there} in the checkpoint folder {str(path)!r}, and {here} in "
                f"{type(module).__name__}; allowed: the names and shapes of the module that was "
                "saved; make the module as it was, or set its strict_loading=False to leave out "
                "names that one of them lacks"
            )


def _shape(state: Mapping[str, Any], name: str) -> str:
    if name not in state:
        return "is missing"
    x = state[name]
    return f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else "is no tensor"


def _matched(
    path: Path, saved: Sequence[Mapping[str, Any]], optimizer: Optimizer, names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return saved groups by numbers of an optimizer's parameters, which are the same by name."""
    of = {id(p): k for k, p in enumerate(in_order(optimizer))}
    numbers = [[of[id(p)] for p in g["params"]] for g in optimizer.param_groups]
    there = {n: j for j, group in enumerate(saved) for n in group["params"]}
    here = {names[k]: j for j, ks in enumerate(numbers) for k in ks}
    for n in [*here, *(n for n in there if n not in here)]:
        if here.get(n) != there.get(n):
            raise ConfigurationError(
                f"{n!r} is {_group(there.get(n))} in the checkpoint folder {str(path)!r}, and "
                f"{_group(here.get(n))} here; allowed: the optimizer's parameters when it was "
                "saved, in the same groups; make the optimizer as it was, or load weights alone, "
                "as trainer.validate(ckpt_path=...) does, and fit without ckpt_path"
            )
    return [{**group, "params": ks} for group, ks in zip(saved, numbers, strict=True)]


def _group(j: int | None) -> str:
    return "in no group of the optimizer" if j is None else f"in group {j} of the optimizer"


def _names_of(optimizer: Optimizer, module: nn.Module) -> list[str]:
    """Return the names of an optimizer's parameters, in its order; else their numbers."""
    names = {id(p): n for n, p in module.named_parameters()}
    return [names.get(id(p), str(k)) for k, p in enumerate(in_order(optimizer))]


def _number(optimizer: str) -> int:
    return int(optimizer.rpartition("_")[2])
