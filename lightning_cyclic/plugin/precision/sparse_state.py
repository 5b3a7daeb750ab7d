"""SparseStatePrecision: train a pruned network, and keep nothing of what is pruned but zeros.

convert_module   masks; weights become dense, of low precision, with zeros; master weights
connect          the optimizer gets master weights in the place of weights
backward         each gradient is compressed as it appears
optimizer_step   gradients as float32, hooks, clipping, the update; weights from master weights

In a checkpoint the optimizer's state has the shapes of the module's parameters, with zeros where
they are pruned, so that dense training loads it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cyclic.compat import (
    HalfPrecision,
    LightningModule,
    ModelPruning,
    Precision,
    SingleDeviceStrategy,
    Steppable,
    Trainer,
    TrainerFn,
)
from lightning_cyclic.errors import ConfigurationError, one_of
from lightning_cyclic.plugin.checkpoint import merged
from lightning_cyclic.plugin.optimizers import SAID_BY, updates_each
from lightning_cyclic.plugin.precision.compressed import Layout, ParameterState
from lightning_cyclic.plugin.precision.masks import (
    EXCLUDED,
    Masks,
    check_same,
    check_sparsity,
    layouts_of,
)
from lightning_cyclic.runtime.agreement import require_same_lines
from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.weight_forms import WeightForms

_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "32-true": torch.float32}


@final
class SparseStatePrecision(Precision):
    """Train a pruned network with compressed gradients, master weights and optimizer state.

    Weights stay dense, with zeros where they are pruned, so that forwards and backwards are those
    of dense training in the same precision. All else has the kept elements alone, and one int32
    index for each weight says where they are. With Adam a pruned parameter takes 22 f + 2 bytes
    at the optimizer's step, where a fraction f is kept, and dense training 20; 20 f + 4 and 16
    with compute="32-true". Parameters without a mask have float32 master weights, as dense as
    they are.

    The result is that of dense training with float32 master weights, in which weights and
    gradients are multiplied by the mask.

    With strategies of this package that predict no weights, gradients and new weights travel as
    the kept elements alone, and each worker has the master weights of what it updates.

    Args:
        mask: parameter's name -> bool tensor of its shape, True where an element is kept; or the
            path of a file of them, as ``torch.save`` writes it.
        sparsity: in place of a mask: the fraction of elements that are pruned when the fit
            begins, the smallest of all parameters together.
        compute: precision of forwards and backwards. "16-true" has no loss scaler, as in
            Lightning.
        exclude: what ``sparsity`` does not prune: words within the names of parameters or of the
            classes of their modules, or whole names with wildcards ("head.*").

    Attributes:
        masks: name -> mask of what is pruned, from the begin of the fit on.

    Raises:
        ConfigurationError: masks, numbers, a strategy, a module or an optimizer that do not fit.

    Source: Singh and Bhatele, "Exploiting Sparsity in Pruned Neural Networks to Optimize Large
        Model Training", IPDPS 2023, arXiv 2302.05045 (SAMO).

    Example:
        >>> from lightning.pytorch import Trainer
        >>> Trainer(plugins=[SparseStatePrecision(sparsity=0.9)], devices=1, accelerator="cpu",
        ...         logger=False, enable_checkpointing=False).precision
        'bf16-true'
    """

    def __init__(
        self,
        mask: Mapping[str, Tensor] | str | Path | None = None,
        sparsity: float | None = None,
        compute: Literal["bf16-true", "16-true", "32-true"] = "bf16-true",
        exclude: Sequence[str] = EXCLUDED,
    ) -> None:
        if compute not in _DTYPES:
            hint = "use SparseStatePrecision(compute='bf16-true')"
            raise ConfigurationError(one_of(compute, list(_DTYPES), "compute", hint))
        if isinstance(exclude, str):
            raise ConfigurationError(
                f"exclude={exclude!r} is one string; allowed: a sequence of them; use "
                f"exclude=({exclude!r},)"
            )
        self.precision = compute
        self._dtype = _DTYPES[compute]
        self._plain = Precision() if compute == "32-true" else HalfPrecision(compute)
        if sparsity is not None:
            check_sparsity(sparsity, "SparseStatePrecision")
            if mask is not None:
                raise ConfigurationError(
                    f"mask and sparsity={sparsity} were both given; allowed: one of them; leave "
                    "out sparsity, which the mask has already"
                )
        self._choice = mask, sparsity, tuple(exclude)
        self._states: list[ParameterState] = []
        self._names: dict[int, str] = {}  # of the module's parameters, by id
        self._optimizer: Optimizer | None = None  # of the fit, also behind it
        self._trained: list[ParameterState] = []  # that it updates
        self._is_fitting = False
        self._assembly = Assembly()  # one device

    @property
    def masks(self) -> Masks:
        """Return name -> mask of each pruned parameter."""
        return {name: layout.mask for name, layout in self._layouts.items()}

    @property
    def _layouts(self) -> dict[str, Layout]:
        return {s.name: s.layout for s in self._states if s.is_compressed}

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's gradient in the optimizer's step and in hooks before it.

        That of a pruned one is 1-D and has the kept elements alone.
        """
        state = next((s for s in self._trained if s.weight is parameter), None)
        return parameter.grad if state is None else state.master.grad

    def kept(self) -> list[Tensor]:
        """Return the tensors that are alive now beside weights and optimizer state.

        Indices, master weights, compressed gradients, and float32 ones in the optimizer's step.
        """
        return [x for state in self._states for x in state.kept]

    # ------------------------------------------------------------------ precision of the step

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        return self._plain.forward_context()

    @override
    def convert_input(self, data: Any) -> Any:
        return self._plain.convert_input(data)

    # ------------------------------------------------------------------ setting up

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Prune the weights, round them, and keep what rounding takes in master weights."""
        trainer = module._trainer if isinstance(module, LightningModule) else None
        self._is_fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if not self._is_fitting:
            return self._plain.convert_module(module)
        assert isinstance(module, LightningModule)
        _check_fit(module.trainer, module)
        parameters = {id(p) for p in module.parameters()}
        is_known = self._states and all(id(s.weight) in parameters for s in self._states)
        if is_known:
            self._plain.convert_module(module)
            for state in self._states:  # of the fit before this one
                state.reread()
            return module
        _check_weights(module, self._dtype)
        connector = module.trainer._checkpoint_connector
        checkpoint = getattr(connector, "_loaded_checkpoint", {})  # loaded, but not yet taken
        layouts = layouts_of(module, *self._choice, _own(checkpoint).get("index", {}))
        self._states = self._made(module, layouts)
        return self._plain.convert_module(module)

    def _made(self, module: nn.Module, layouts: Mapping[str, Layout]) -> list[ParameterState]:
        states = []
        for name, p in module.named_parameters():
            if name in layouts:
                states.append(ParameterState(name, p, layouts[name], self._dtype))
            elif p.requires_grad and p.is_floating_point() and self._dtype != torch.float32:
                states.append(ParameterState(name, p, Layout(None), self._dtype))
        return states

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Give the optimizer master weights, and watch for gradients."""
        if self._is_fitting:
            self._names = {id(p): name for name, p in model.named_parameters()}
            for state in self._states:
                state.to(state.weight.device)
            optimizer = check_optimizer(optimizers)
            self._trained = give_masters(optimizer, self._states)
            self._states = [s for s in self._states if s.is_compressed or s in self._trained]
            for state in self._trained:
                state.watch()
            self._optimizer = optimizer
        return model, optimizers, lr_schedulers

    @override
    def teardown(self) -> None:
        """Take gradients no more, and go to the host with the module."""
        for state in self._states:
            state.release()
            state.to(state.weight.device)

    # ------------------------------------------------------------------ a step

    @override
    def _after_closure(self, model: LightningModule, optimizer: Steppable) -> None:
        """Show float32 gradients to the optimizer, and to hooks and clipping before it."""
        for state in self._trained:
            state.show()
        self._check_gradients()
        super()._after_closure(model, optimizer)

    def _check_gradients(self) -> None:
        assert self._optimizer is not None
        _check_gradients(self._optimizer, self._names, self._dtype)

    @override
    def optimizer_step(  # type: ignore[override]  # as Lightning's own plugins do
        self,
        optimizer: Steppable,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Update master weights, then the weights."""
        result = super().optimizer_step(optimizer, model, closure, **kwargs)
        for state in self._trained:
            state.write()
        return result

    # ------------------------------------------------------------------ several workers

    def forms(self, assembly: Assembly) -> SparseForms:
        """Return what is trained on each of several workers, which must have the same masks."""
        lines = [f"{name}: {layout.digest}" for name, layout in self._layouts.items()]
        require_same_lines(
            "masks",
            assembly.share("\n".join(lines), "to start alike"),
            "the same masks on every rank; read one file of them everywhere, "
            "SparseStatePrecision(mask='ticket.pt')",
        )
        self._assembly = assembly
        return SparseForms(self._states, self._trained, self._check_gradients)

    # ------------------------------------------------------------------ checkpoints

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save optimizer state as dense training has it, and master weights and index besides."""
        if self._optimizer is None:
            return
        own = self._optimizer, self._trained
        states = checkpoint["optimizer_states"]
        checkpoint["optimizer_states"] = [expanded(saved, *own) for saved in states]
        checkpoint[type(self).__qualname__] = {
            "index": {name: layout.kept.cpu() for name, layout in self._layouts.items()},
            "masters": merged(
                {s.name: x for s in self._states if (x := s.saved) is not None}, self._assembly
            ),
        }

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take master weights, and compress the optimizer state of any checkpoint."""
        if not self._is_fitting or self._optimizer is None:
            return
        own = _own(checkpoint)
        if own:
            check_same(self._layouts, own["index"])
        by_name = {s.name: s for s in self._states}
        for state in self._states:
            state.reread()
        for name, values in own.get("masters", {}).items():
            if name in by_name:
                by_name[name].load(values)
        if "optimizer_states" in checkpoint:
            trained = self._optimizer, self._trained
            states = checkpoint["optimizer_states"]
            checkpoint["optimizer_states"] = [compressed(saved, *trained) for saved in states]


def _own(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    saved: Mapping[str, Any] = checkpoint.get(SparseStatePrecision.__qualname__, {})
    return saved


# ---------------------------------------------------------------------- refusals


def _check_fit(trainer: Trainer, module: LightningModule) -> None:
    """Refuse strategies, loops and callbacks that do not know of compressed gradients."""
    if (check := getattr(trainer.strategy, "check_compressed_states", None)) is not None:
        check()
    elif not isinstance(trainer.strategy, SingleDeviceStrategy):
        raise ConfigurationError(
            f"SparseStatePrecision was given with {type(trainer.strategy).__name__}, which "
            "exchanges dense gradients or parameters; allowed: one device, strategy='cyclic_dp', "
            "'cyclic_zero', '1f1b' and others of lightning_cyclic; use "
            "Trainer(strategy='cyclic_dp')"
        )
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{type(module).__name__}.automatic_optimization is False, but SparseStatePrecision "
            "takes gradients from the parameters as they appear, and toggle_optimizer does not "
            "see those; allowed: automatic optimization; return the loss from training_step, or "
            "leave SparseStatePrecision out"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelPruning):
            raise ConfigurationError(
                f"{type(callback).__name__} prunes while SparseStatePrecision trains, whose masks "
                "stay as they are; allowed: pruning before; fit with the callback first, then "
                "with SparseStatePrecision and without it"
            )


def _check_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Refuse weights of another dtype where they are to be trained as they are."""
    for name, p in module.named_parameters():
        if dtype == torch.float32 and p.is_floating_point() and p.dtype != dtype:
            raise ConfigurationError(
                f"parameter {name!r} is {p.dtype}, but SparseStatePrecision(compute='32-true') "
                "trains the module's own weights; allowed: torch.float32; use module.float(), or "
                "compute='bf16-true'"
            )


def check_optimizer(optimizers: Sequence[Optimizer]) -> Optimizer:
    """Return the optimizer; refuse those that do not update each element by itself."""
    if len(optimizers) != 1:
        raise ConfigurationError(
            f"configure_optimizers returned {len(optimizers)} optimizers; allowed: 1 under "
            "SparseStatePrecision; use parameter groups of one optimizer"
        )
    name = type(optimizers[0]).__name__
    if not updates_each("element", optimizers[0]):
        raise ConfigurationError(
            f"nothing says that {name} updates each element by its own gradient and state, and "
            "leaves a zero without a gradient at zero, as SparseStatePrecision needs; allowed: "
            "SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop and ASGD "
            "of torch.optim, and others that say so; if it has no norm and no mean over elements, "
            "and no use for the shape of a matrix, use "
            f"optimizer.{SAID_BY} = 'element'; else use torch.optim.AdamW(self.parameters())"
        )
    return optimizers[0]


def _check_gradients(optimizer: Optimizer, names: Mapping[int, str], dtype: torch.dtype) -> None:
    """Refuse low-precision parameters that the optimizer would train without a master weight."""
    if dtype == torch.float32:
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.dtype == dtype and p.grad is not None:
                raise ConfigurationError(
                    f"parameter {names.get(id(p), '?')!r} was unfrozen, or given to the "
                    "optimizer, after the fit began, and has no float32 master weight; allowed: "
                    "parameters that require gradients from the start; call requires_grad_() "
                    "before fit, or use SparseStatePrecision(compute='32-true')"
                )


_HOST = torch.device("cpu")


def give_masters(optimizer: Optimizer, states: Sequence[ParameterState]) -> list[ParameterState]:
    """Put master weights in the place of the weights that an optimizer was made for.

    Groups, their values, and what schedulers refer to stay as they are; what some optimizers
    (Adagrad) have as soon as they are made is compressed.

    Returns:
        The states of the parameters that the optimizer trains.
    """
    by_weight = {id(s.weight): s for s in states}
    trained = []
    for group in optimizer.param_groups:
        for k, p in enumerate(group["params"]):
            if (state := by_weight.get(id(p))) is not None:
                trained.append(state)
                group["params"][k] = state.master
                if p in optimizer.state:
                    optimizer.state[state.master] = _compressed(optimizer.state.pop(p), state)
    return trained


def expanded(
    saved: Mapping[str, Any], optimizer: Optimizer, states: Sequence[ParameterState]
) -> dict[str, Any]:
    """Return an optimizer's ``state_dict()`` with tensors of parameters' shapes, on the host."""
    return _each(saved, optimizer, states, _expanded)


def compressed(
    saved: Mapping[str, Any], optimizer: Optimizer, states: Sequence[ParameterState]
) -> dict[str, Any]:
    """Return a ``state_dict()`` of parameters' shapes as master weights have it."""
    return _each(saved, optimizer, states, _compressed)


def _each(
    saved: Mapping[str, Any], optimizer: Optimizer, states: Sequence[ParameterState],
    change: Callable[[Mapping[str, Any], ParameterState], dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    by_master = {id(s.master): s for s in states if s.is_compressed}
    every = [p for group in optimizer.param_groups for p in group["params"]]
    of = {k: by_master[id(p)] for k, p in enumerate(every) if id(p) in by_master}
    state = {k: change(v, of[k]) if k in of else v for k, v in saved["state"].items()}
    return {**saved, "state": state}


def _expanded(values: Mapping[str, Any], state: ParameterState) -> dict[str, Any]:
    layout, shape = state.layout.to(_HOST), state.trained_shape
    return {
        k: layout.expand(x.to(_HOST)) if isinstance(x, Tensor) and x.shape == shape else x
        for k, x in values.items()
    }


def _compressed(values: Mapping[str, Any], state: ParameterState) -> dict[str, Any]:
    layout, device, shape = state.layout, state.weight.device, state.weight.shape
    return {
        k: layout.compress(x.to(device)).to(torch.float32, copy=True)
        if isinstance(x, Tensor) and x.shape == shape else x
        for k, x in values.items()
    }  # fmt: skip


@final
class SparseForms(WeightForms):
    """Train master weights, and send the kept elements alone.

    Args:
        check: refuses gradients that the optimizer is not to have, before each update.
    """

    def __init__(
        self,
        states: Sequence[ParameterState],
        trained: Sequence[ParameterState],
        check: Callable[[], None],
    ) -> None:
        self._layouts = {id(s.weight): s.layout for s in states if s.is_compressed}
        self._by_weight = {id(s.weight): s for s in trained}
        self._by_master = {id(s.master): s for s in trained}
        self._check = check

    @override
    def trained(self, weight: nn.Parameter) -> nn.Parameter:
        state = self._by_weight.get(id(weight))
        return weight if state is None else state.master

    @override
    def weight(self, trained: nn.Parameter) -> nn.Parameter:
        state = self._by_master.get(id(trained))
        return trained if state is None else state.weight

    @override
    def stand_in(self, weight: nn.Parameter, other: nn.Parameter) -> nn.Parameter:
        state = self._by_weight.get(id(weight))
        if state is not None and other.requires_grad:
            other.register_post_accumulate_grad_hook(state.take)  # type: ignore[no-untyped-call]
        return other

    @override
    def sends_all(self, weight: nn.Parameter) -> bool:
        return id(weight) not in self._layouts

    @override
    def compress(self, weight: nn.Parameter, values: Tensor) -> Tensor:
        layout = self._layouts.get(id(weight))
        return values if layout is None else layout.compress(values)

    @override
    def expand_into(self, weight: nn.Parameter, sent: Tensor, values: Tensor) -> None:
        layout = self._layouts.get(id(weight))
        if layout is None:
            values.copy_(sent)
        else:
            values.zero_()  # its memory may have been another weight's, or a hook's
            layout.expand_into(sent, values)

    @override
    def as_weight(self, weight: nn.Parameter, gradient: Tensor) -> Tensor:
        state = self._by_weight.get(id(weight))  # else nothing has compressed it
        return gradient if state is None else state.layout.expand(gradient)

    @override
    @contextmanager
    def updating(
        self, trained: Sequence[nn.Parameter], *, follows: bool = False
    ) -> Iterator[None]:
        states = [s for p in trained if (s := self._by_master.get(id(p))) is not None]
        for state in states:
            state.show(follows=follows)  # else weights change with versions, and by nothing else
        self._check()
        yield
        for state in states:
            state.write()

    @override
    def leave(self, mine: Sequence[nn.Parameter]) -> None:
        kept = {id(p) for p in mine}
        for key, state in self._by_master.items():
            if key not in kept:
                state.leave()
