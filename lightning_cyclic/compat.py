"""The private names of torch and Lightning that this package relies on, and what each is for.

A release may drop any of them. So all are looked for before a strategy is used: what is missing is
an error that names it and the version, in place of a training that does without, and in silence.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NamedTuple

from lightning_cyclic.errors import ConfigurationError


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
    Private("torch._C", "_disabled_torch_function_impl", "stand-ins of what other stages have"),
    Private("torch._C", "_DisableTorchDispatch", "parameters that this rank does not have"),
    Private("torch._C._distributed_c10d", "PrefixStore", _STORE),
    Private("torch._C._distributed_c10d", "Store", _STORE),
    Private("torch._C._nn", "_parse_to", "moving what other stages have"),
    Private("torch._ops", "OpOverload", "counting the work of stages"),
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
    Private("torch.utils._pytree", "tree_flatten", "walking through containers"),
    Private("torch.utils._pytree", "tree_iter", "walking through containers"),
    Private("torch.utils._pytree", "tree_leaves", "walking through containers"),
    Private("torch.utils._pytree", "tree_map", "walking through containers"),
    Private("torch.utils._pytree", "tree_map_only", "walking through containers"),
    Private("torch.utils._pytree", "tree_unflatten", "walking through containers"),
)
OF_LIGHTNING: Final = (
    Private("lightning.fabric.utilities.data", "_auto_add_worker_init_fn", "seeds of loaders"),
    Private("lightning.fabric.utilities.seed", "_collect_rng_states", "random states in files"),
    Private("lightning.fabric.utilities.seed", "_set_rng_states", "random states in files"),
    Private("lightning.fabric.utilities.load", "_METADATA_FILENAME", "folders of checkpoints"),
    Private("lightning.pytorch.loops.fetchers", "_PrefetchDataFetcher", "places of loaders"),
    Private("lightning.pytorch.trainer.call", "_call_callback_hooks", "hooks of late updates"),
    Private("lightning.pytorch.trainer.call", "_call_lightning_module_hook", "the same"),
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
        try:
            found = hasattr(import_module(private.where), private.name)
        except ModuleNotFoundError:
            found = False
        if not found:
            _refuse(private.where, private, private.where.partition(".")[0])


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
            _refuse(where, private, "lightning")


def _refuse(where: str, private: Private, package: str) -> None:
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "of an unknown version"
    raise ConfigurationError(
        f"{package} {found} has no {where}.{private.name}, which lightning_cyclic needs for "
        f"{private.purpose}; allowed: versions that have it, as those in docs/versions.md; use "
        f"pip install --upgrade lightning-cyclic, or another {package}"
    )
