"""The host, `lightning` or `pytorch_lightning`, and what this package uses of it and of torch.

Both names are of the same code, with classes of their own: a process trains with one of them. It
is the one whose Trainer asks for a strategy by name, else the one that was imported first.

A release may drop private names. So all are looked for before a strategy is used: what is
missing is an error that names it and the version, in place of a training that does without.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from lightning_cyclic.errors import ConfigurationError

if TYPE_CHECKING:  # found below, in the host; tests compare both lists
    from lightning.fabric.plugins.environments.cluster_environment import (
        ClusterEnvironment as ClusterEnvironment,
    )
    from lightning.fabric.plugins.environments.lightning import (
        LightningEnvironment as LightningEnvironment,
    )
    from lightning.fabric.utilities.data import (
        _auto_add_worker_init_fn as _auto_add_worker_init_fn,
    )
    from lightning.fabric.utilities.load import _METADATA_FILENAME as _METADATA_FILENAME
    from lightning.fabric.utilities.seed import _collect_rng_states as _collect_rng_states
    from lightning.fabric.utilities.seed import _set_rng_states as _set_rng_states
    from lightning.fabric.utilities.types import Steppable as Steppable
    from lightning.pytorch import Callback as Callback
    from lightning.pytorch import LightningDataModule as LightningDataModule
    from lightning.pytorch import LightningModule as LightningModule
    from lightning.pytorch import Trainer as Trainer
    from lightning.pytorch.accelerators import Accelerator as Accelerator
    from lightning.pytorch.accelerators import MPSAccelerator as MPSAccelerator
    from lightning.pytorch.callbacks import BasePredictionWriter as BasePredictionWriter
    from lightning.pytorch.callbacks import Checkpoint as Checkpoint
    from lightning.pytorch.callbacks import EarlyStopping as EarlyStopping
    from lightning.pytorch.callbacks import (
        GradientAccumulationScheduler as GradientAccumulationScheduler,
    )
    from lightning.pytorch.callbacks import ModelCheckpoint as ModelCheckpoint
    from lightning.pytorch.callbacks import ModelPruning as ModelPruning
    from lightning.pytorch.callbacks import StochasticWeightAveraging as StochasticWeightAveraging
    from lightning.pytorch.callbacks import WeightAveraging as WeightAveraging
    from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher as _PrefetchDataFetcher
    from lightning.pytorch.loops.optimization.automatic import ClosureResult as ClosureResult
    from lightning.pytorch.plugins import AsyncCheckpointIO as AsyncCheckpointIO
    from lightning.pytorch.plugins import CheckpointIO as CheckpointIO
    from lightning.pytorch.plugins import HalfPrecision as HalfPrecision
    from lightning.pytorch.plugins import MixedPrecision as MixedPrecision
    from lightning.pytorch.plugins import Precision as Precision
    from lightning.pytorch.plugins import TorchCheckpointIO as TorchCheckpointIO
    from lightning.pytorch.plugins.precision import (
        TransformerEnginePrecision as TransformerEnginePrecision,
    )
    from lightning.pytorch.strategies import DDPStrategy as DDPStrategy
    from lightning.pytorch.strategies import SingleDeviceStrategy as SingleDeviceStrategy
    from lightning.pytorch.trainer import call as call
    from lightning.pytorch.trainer.states import TrainerFn as TrainerFn
    from lightning.pytorch.utilities import rank_zero_info as rank_zero_info
    from lightning.pytorch.utilities import rank_zero_warn as rank_zero_warn
    from lightning.pytorch.utilities.exceptions import SIGTERMException as SIGTERMException
    from lightning.pytorch.utilities.model_helpers import is_overridden as is_overridden
    from lightning.pytorch.utilities.signature_utils import (
        is_param_in_hook_signature as is_param_in_hook_signature,
    )

HOSTS: Final = {  # name -> where its Trainer is, where its Fabric is, and what pip calls it
    "lightning": ("lightning.pytorch", "lightning.fabric", "lightning"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric", "pytorch-lightning"),
}
_NAMES: Final = {  # module of the host -> names that are used of it
    "fabric.plugins.environments": "ClusterEnvironment LightningEnvironment",
    "fabric.utilities.data": "_auto_add_worker_init_fn",
    "fabric.utilities.seed": "_collect_rng_states _set_rng_states",
    "fabric.utilities.load": "_METADATA_FILENAME",
    "fabric.utilities.types": "Steppable",
    "pytorch": "Callback LightningDataModule LightningModule Trainer",
    "pytorch.accelerators": "Accelerator MPSAccelerator",
    "pytorch.callbacks": "BasePredictionWriter Checkpoint EarlyStopping "
    "GradientAccumulationScheduler ModelCheckpoint ModelPruning StochasticWeightAveraging "
    "WeightAveraging",
    "pytorch.loops.fetchers": "_PrefetchDataFetcher",
    "pytorch.loops.optimization.automatic": "ClosureResult",
    "pytorch.plugins": "AsyncCheckpointIO CheckpointIO HalfPrecision MixedPrecision Precision "
    "TorchCheckpointIO",
    "pytorch.plugins.precision": "TransformerEnginePrecision",
    "pytorch.strategies": "DDPStrategy SingleDeviceStrategy",
    "pytorch.trainer": "call",
    "pytorch.trainer.states": "TrainerFn",
    "pytorch.utilities": "rank_zero_info rank_zero_warn",
    "pytorch.utilities.exceptions": "SIGTERMException",
    "pytorch.utilities.model_helpers": "is_overridden",
    "pytorch.utilities.signature_utils": "is_param_in_hook_signature",
}
_MODULE_OF: Final = {name: where for where, names in _NAMES.items() for name in names.split()}
_LATE: Final = {"WeightAveraging": "Callback"}  # a release may lack it; what stands in for it
_host: list[str] = []  # the one of this process, as soon as it is known


def host() -> str:
    """Return the host of this process: the one that asked first, or was imported first."""
    if not _host:
        known = {where: name for name, (where, *_) in HOSTS.items()}
        imported = (known[where] for where in list(sys.modules) if where in known)  # in order
        _host.append(next(imported, "lightning"))
    return _host[0]


def use_host(name: str) -> None:
    """Train with a host from now on.

    Args:
        name: "lightning" or "pytorch_lightning".

    Raises:
        ConfigurationError: this process trains with the other one.
    """
    if not _host:
        _host.append(name)
    if _host[0] != name:
        raise of_other_host("a strategy", name)


def of_other_host(what: str, asking: str) -> ConfigurationError:
    """Return the error of a Trainer that is not the host's.

    Args:
        what: was asked of it.
        asking: name of its package.
    """
    return ConfigurationError(
        f"{what} was asked of a Trainer of `{asking}`, but lightning_cyclic was made for "
        f"`{_host[0]}` in this process, a second copy of the same code with classes of its own; "
        "allowed: one of them in a process; import Trainer and LightningModule from "
        f"`{HOSTS[_host[0]][0]}`; or, to train with `{asking}`, import it before our classes, or "
        "name the strategy, Trainer(strategy='cyclic_dp')"
    )


def _module(where: str) -> Any:
    """Import a module of the host, "pytorch.callbacks" say."""
    part, dot, rest = where.partition(".")
    pytorch, fabric, _ = HOSTS[host()]
    return import_module({"pytorch": pytorch, "fabric": fabric}[part] + dot + rest)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(_module(_MODULE_OF[name]), name, None)
    if found is None and name in _LATE:
        found = type(name, (__getattr__(_LATE[name]),), {})  # no object is of this class
    if found is None:
        _refuse(_MODULE_OF[name], name, "training", HOSTS[host()][2])
    globals()[name] = found
    return found


def logger() -> logging.Logger:
    """Return a logger that writes where the host does."""
    return logging.getLogger(f"{HOSTS[host()][0]}.lightning_cyclic")


@contextmanager
def quieted() -> Iterator[None]:
    """Keep what the host says of each Trainer and fit to itself; errors are still written."""
    pytorch, fabric, _ = HOSTS[host()]
    names = pytorch, fabric, f"{pytorch}.utilities.rank_zero", f"{fabric}.utilities.rank_zero"
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def check_versions() -> None:
    """Refuse versions that the package does not declare, as pip would have, had it been asked.

    Raises:
        ConfigurationError: with the version.
    """
    try:
        lines = requires("lightning-cyclic") or []
    except PackageNotFoundError:  # sources that are not installed declare nothing
        return
    from packaging.requirements import Requirement  # noqa: PLC0415  (the floors do without)
    from packaging.version import Version  # noqa: PLC0415

    for wanted in map(Requirement, lines):
        if wanted.name not in ("torch", "lightning"):
            continue
        package = HOSTS[host()][2] if wanted.name == "lightning" else "torch"
        found = version(package)
        # some vendors ship a release under the name of its alpha
        if not wanted.specifier.contains(Version(found).base_version):
            allowed = f"{package}{wanted.specifier}"
            raise ConfigurationError(
                f"{package} {found} is installed; allowed: {allowed}; use pip install '{allowed}'"
            )


class Private(NamedTuple):
    """Say where a private name is, and what for.

    Args:
        where: module that has it, or path to its holder from a Trainer.
        name: of the attribute.
        purpose: what does not work without it.
    """

    where: str
    name: str
    purpose: str


_STACK: Final = "telling which calls of a module's step are whose stage's"
_STORE: Final = "telling ranks why another one fails"

OF_TORCH: Final = (
    Private("torch._C", "_get_function_stack_at", _STACK),
    Private("torch._C", "_len_torch_function_stack", _STACK),
    Private("torch._C", "_pop_torch_function_stack", _STACK),
    Private("torch._C", "_push_on_torch_function_stack", _STACK),
    Private("torch._C", "DisableTorchFunctionSubclass", "stand-ins of what other stages have"),
    Private("torch._C._distributed_c10d", "PrefixStore", _STORE),
    Private("torch._C._distributed_c10d", "Store", _STORE),
    Private("torch._ops", "OpOverload", "counting the work of stages"),
    Private("torch._C._autograd", "_top_saved_tensors_default_hooks", "split backwards"),
    Private("torch._C._functorch", "peek_interpreter_stack", "split backwards"),
    Private("torch._C._autograd", "_enable_record_function", "messages that outlive a profiler"),
    Private("torch._C", "_will_engine_execute_node", "gradients of a low rank"),
    Private("torch._C", "_current_graph_task_id", "telling activations from other memory"),
    Private("torch.autograd.graph", "_engine_run_backward", "backwards of stages"),
    Private("torch.autograd.profiler", "_is_profiler_enabled", "names of actions in profiles"),
    Private("torch.autograd.grad_mode", "_unsafe_preserve_version_counter", "unseen changes"),
    Private("torch.distributed", "_functional_collectives", "collectives within steps"),
    Private(
        "torch.distributed.checkpoint.default_planner", "_EmptyStateDictLoadPlanner", "folders"
    ),
    Private("torch.distributed.checkpoint.state_dict_loader", "_load_state_dict", "folders"),
    Private("torch.distributed.distributed_c10d", "_get_default_store", _STORE),
    Private("torch.distributed.rendezvous", "_create_c10d_store", "a store for each attempt"),
    Private("torch.nn.modules.batchnorm", "_NormBase", "statistics of norms that are unfrozen"),
    Private("torch.utils._python_dispatch", "TorchDispatchMode", "counting the work of stages"),
    Private("torch.utils._python_dispatch", "_get_current_dispatch_mode_stack", "watching memory"),
    Private("torch.utils._pytree", "SUPPORTED_NODES", "walking through containers"),
    Private("torch.utils._pytree", "tree_flatten", "walking through containers"),
    Private("torch.utils._pytree", "tree_leaves", "walking through containers"),
    Private("torch.utils._pytree", "tree_map", "walking through containers"),
    Private("torch.utils._pytree", "tree_map_only", "walking through containers"),
)
OF_LIGHTNING: Final = (
    Private("fabric.utilities.data", "_auto_add_worker_init_fn", "seeds of loaders"),
    Private("fabric.utilities.seed", "_collect_rng_states", "random states in files"),
    Private("fabric.utilities.seed", "_set_rng_states", "random states in files"),
    Private("fabric.utilities.load", "_METADATA_FILENAME", "folders of checkpoints"),
    Private("pytorch.loops.fetchers", "_PrefetchDataFetcher", "places of loaders"),
    Private("pytorch.trainer.call", "_call_callback_hooks", "hooks of late updates"),
    Private("pytorch.trainer.call", "_call_lightning_module_hook", "the same"),
)

_EPOCH: Final = "fit_loop.epoch_loop"
OF_TRAINERS: Final = (
    Private("", "_accelerator_connector", "samplers of replicas"),
    Private("_checkpoint_connector", "_loaded_checkpoint", "states of pruned networks"),
    Private("_signal_connector", "_sigterm_notifier_fn", "stopping behind one step at SIGTERM"),
    Private("_signal_connector", "_slurm_sigusr_handler_fn", "requeueing jobs of SLURM"),
    Private("strategy", "_get_process_group_backend", "choosing how messages travel"),
    Private("strategy", "_layer_sync", "refusing BatchNorm over all ranks"),
    Private("fit_loop", "_combined_loader", "places of loaders"),
    Private("fit_loop", "_load_combined_loader_states", "places of loaders"),
    Private(_EPOCH, "_broadcast_sigterm_tensor", "stopping behind one step, without a barrier"),
    Private(_EPOCH, "_on_before_fetch", "places of loaders"),
    Private(f"{_EPOCH}.automatic_optimization", "_skip_backward", "batches that are left out"),
    Private(f"{_EPOCH}.val_loop", "_store_dataloader_outputs", "metrics of stages"),
    Private("validate_loop", "_store_dataloader_outputs", "metrics of stages"),
    Private("test_loop", "_store_dataloader_outputs", "metrics of stages"),
)


def check_modules(names: Iterable[Private] = OF_TORCH + OF_LIGHTNING) -> None:
    """Look for names in modules of torch and Lightning.

    Raises:
        ConfigurationError: one is missing.
    """
    for private in names:
        is_hosts = private.where.partition(".")[0] in ("pytorch", "fabric")
        try:
            module = _module(private.where) if is_hosts else import_module(private.where)
            # what nobody has imported yet is a module
            found = hasattr(module, private.name) or bool(
                import_module(f"{module.__name__}.{private.name}")
            )
        except ModuleNotFoundError:
            found = False
        if not found:
            package = HOSTS[host()][2] if is_hosts else "torch"
            _refuse(private.where, private.name, private.purpose, package)


def check_trainer(trainer: Any, names: Iterable[Private] = OF_TRAINERS) -> None:
    """Look for names in a Trainer, and in what it has.

    Raises:
        ConfigurationError: one is missing.
    """
    for private in names:
        holder = trainer
        for part in filter(None, private.where.split(".")):
            holder = getattr(holder, part, None)
        if not hasattr(holder, private.name):
            where = f"Trainer.{private.where}" if private.where else "Trainer"
            _refuse(where, private.name, private.purpose, HOSTS[host()][2])


def _refuse(where: str, name: str, purpose: str, package: str) -> NoReturn:
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "of an unknown version"
    raise ConfigurationError(
        f"{package} {found} has no {where}.{name}, which lightning_cyclic needs for "
        f"{purpose}; allowed: versions that have it, as those in docs/figures.md; use "
        f"pip install --upgrade lightning-cyclic, or another {package}"
    )
