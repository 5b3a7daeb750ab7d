"""LowRankGradients: factors in the place of weights' gradients, from the backward to the update.

setup           layers are found, and tapped (runtime/codecs/taps.py)
each backward   the stream of each weight goes on; ``p.grad`` holds factors
exchange        factors are sent, and their owner makes matrices of them
update          on one device: matrices, where the optimizer is about to read them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any, final

from torch import nn
from typing_extensions import override

from lightning_cyclic.compat import Callback, SingleDeviceStrategy
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.checks import scaler_of
from lightning_cyclic.plugin.compression import put_state, state_of
from lightning_cyclic.plugin.precision.sparse_state import SparseStatePrecision
from lightning_cyclic.runtime.codecs.coded import Codes
from lightning_cyclic.runtime.codecs.factored import FactoredGradient
from lightning_cyclic.runtime.codecs.low_rank import LowRank, sides
from lightning_cyclic.runtime.codecs.taps import obstacle, tap
from lightning_cyclic.runtime.compiled import named_modules
from lightning_cyclic.runtime.plain_copies import plain_copies


@final
class LowRankGradients(Callback):
    """Train linear layers and convolutions with gradients of a low rank, which backwards make.

    In the backward each layer's rows go into factors of its weight's gradient, block by block; the
    gradient itself, as large as the weight, is not made there. Workers that run whole
    micro-batches (``cyclic_dp``, ``cyclic_dp_v1``, ``lockstep_dp``, ``cyclic_zero``) send the
    factors, and the owner of each stage makes matrices of them. On one device matrices are made
    where the optimizer reads them, when activations are gone. Biases, and all other parameters,
    have the gradients that they always have.

    Args:
        rank: of the factors, at least 1.
        block: rows (samples, tokens, places of an image) that are taken at once, at least 1. More
            of them take less time, and follow the gradient less closely. A block of a convolution
            has one image at least.
        modules: paths of layers, or patterns of them ("encoder.*"). [all whose factors take less
            than half of the gradient]

    Raises:
        ConfigurationError: a number out of range, a name that no layer has, layers that cannot be
            taken, or a strategy, precision or option that it does not go with.

    Source: Huang et al., "Low-Rank Gradient Descent for Memory-Efficient Training of Deep
        In-Memory Arrays", ACM JETC 2023, arXiv 2004.12041.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> gradients = LowRankGradients(rank=4)
        >>> trainer = Trainer(callbacks=[gradients], accelerator="cpu", logger=False)
    """

    def __init__(
        self, rank: int = 4, block: int = 32, modules: Sequence[str] | None = None
    ) -> None:
        for name, value in (("rank", rank), ("block", block)):
            if type(value) is not int or value < 1:
                raise ConfigurationError(
                    f"LowRankGradients({name}={value!r}); allowed: whole numbers from 1 on; use "
                    "LowRankGradients(rank=4, block=32)"
                )
        if modules is not None and (isinstance(modules, str) or not modules):
            raise ConfigurationError(
                f"LowRankGradients(modules={modules!r}); allowed: a list of paths of layers, or "
                "of patterns; use LowRankGradients(modules=['encoder.*'])"
            )
        self._rank = rank
        self._block = block
        self._modules = None if modules is None else tuple(modules)
        self._codec: LowRank | None = None
        self._codes: Codes | None = None  # unless a training has the states, of all its workers
        self._saved: dict[str, Any] = {}  # that a checkpoint has brought
        self._undo = ExitStack()
        self._weights: list[nn.Parameter] = []

    def __repr__(self) -> str:
        """Return what it was made with."""
        given = "" if self._modules is None else f", modules={list(self._modules)}"
        return f"LowRankGradients(rank={self._rank}, block={self._block}{given})"

    @property
    def names(self) -> list[str]:
        """Return the names of the weights whose gradients are factors, in a fit."""
        return [] if self._codec is None else sorted(self._codec.names)

    # ------------------------------------------------------------------ the begin of a fit

    def prepare(self, trainer: Any, *, sends_whole: bool = True) -> LowRank:
        """Find the layers of a fit and tap them; a strategy of ours does so before it makes plans.

        Args:
            trainer: of the fit.
            sends_whole: whether the strategy sends whole gradients, unless it is of one device.

        Returns:
            What encodes their gradients.
        """
        _refuse(trainer, repr(self), sends_whole=sends_whole)
        module = trainer.lightning_module
        layers = self._layers(module)
        names = [f"{path}.weight" for path in layers]
        codec = self._codec = LowRank(repr(self), self._rank, names)
        self._weights = [layer.get_parameter("weight") for layer in layers.values()]
        for name, layer in zip(names, layers.values(), strict=True):
            end = tap(layer, name, codec, self._block, lambda: bool(trainer.training))
            self._undo.callback(end)
        self._codes = Codes(codec)
        self._codes.begin(0)
        return codec

    @override
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self._codec is None:  # no strategy of ours
            self._undo.enter_context(plain_copies(pl_module))
            self.prepare(trainer)
        put_state(self._codes, self._saved, 1)
        self._saved = {}

    def _layers(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return path -> layer, of those that are taken.

        Raises:
            ConfigurationError: there are none, or one that was named cannot be taken.
        """
        found = {
            path: (layer, why)
            for path, layer in named_modules(module)
            if (why := obstacle(layer)) is not None
        }
        users = Counter(id(p) for m in module.modules() for p in m._parameters.values())
        for path, (layer, why) in found.items():
            if not why:
                found[path] = layer, self._obstacle(layer.get_parameter("weight"), users)
        if self._modules is None:
            taken = {path: layer for path, (layer, why) in found.items() if not why}
            if not taken:
                raise self._none(module, found)
            return taken
        return self._named(module, self._modules, found)

    def _obstacle(self, weight: nn.Parameter, users: Counter[int]) -> str:
        n, m = sides(weight.shape)
        if users[id(weight)] > 1:
            return "a weight that other modules have, too"
        if not weight.requires_grad:
            return "a weight that is frozen"
        if weight.is_complex():
            return "a weight of complex numbers"
        if self._rank > min(n, m):
            return f"a weight of {n} x {m}, whose rank is at most {min(n, m)}"
        if self._modules is None and 2 * self._rank * (n + m) >= n * m:
            return f"a weight of {n} x {m}, whose factors take half of that or more"
        return ""

    def _named(
        self, module: nn.Module, names: Sequence[str], found: dict[str, tuple[nn.Module, str]]
    ) -> dict[str, nn.Module]:
        taken: dict[str, nn.Module] = {}
        for name in names:
            fitting = {path: x for path, x in found.items() if fnmatchcase(path, name)}
            if not fitting:
                raise ConfigurationError(
                    f"LowRankGradients(modules=[..., {name!r}]), but {type(module).__name__} has "
                    f"no nn.Linear or nn.Conv2d of this name (in what is not compiled); allowed: "
                    f"{', '.join(found) or 'none'}; use modules=None for all"
                )
            good = {path: layer for path, (layer, why) in fitting.items() if not why}
            path, (_, why) = next(iter(fitting.items()))
            if not good:
                raise ConfigurationError(
                    f"LowRankGradients(rank={self._rank}, modules=[..., {name!r}]), but {path!r} "
                    f"has {why}; allowed: nn.Linear and nn.Conv2d as they are, with trained "
                    "weights of their own; leave it out, or lower the rank"
                )
            taken |= good
        return taken

    def _none(
        self, module: nn.Module, found: dict[str, tuple[nn.Module, str]]
    ) -> ConfigurationError:
        each = "; ".join(f"{path!r} has {why}" for path, (_, why) in list(found.items())[:3])
        return ConfigurationError(
            f"{self!r} with {type(module).__name__}, of whose layers it takes none: "
            f"{each or 'there is no nn.Linear or nn.Conv2d'}; allowed: layers with trained "
            "weights of their own whose factors take less than half of them; lower the rank, or "
            "remove the callback"
        )

    # ------------------------------------------------------------------ steps

    @override
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._codec is not None and batch_idx % trainer.accumulate_grad_batches == 0:
            self._codec.begin_step()

    @override
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Make matrices for the optimizer, and for who clips them, where there are factors yet."""
        shown = getattr(trainer.strategy, "updated_parameters", None)
        for p in self._weights if shown is None else shown:
            if isinstance(p.grad, FactoredGradient):
                p.grad = p.grad.matrix()

    # ------------------------------------------------------------------ checkpoints, the end

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the streams of one device; strategies keep those of several workers."""
        found = self._saved or state_of(self._codes)
        return found if found.get("codec", {}).get("workers") else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave()

    @override
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._leave()

    def _leave(self) -> None:
        self._undo.close()
        self._codec, self._weights = None, []


def low_rank_of(trainer: Any) -> LowRankGradients | None:
    """Return the callback of a Trainer, which has one at most, as it has a state; or None."""
    return next((c for c in trainer.callbacks if isinstance(c, LowRankGradients)), None)


def _refuse(trainer: Any, what: str, *, sends_whole: bool) -> None:
    """Refuse what would make gradients of its own, or has to see them before the update."""
    strategy = trainer.strategy
    found = {
        f"{type(strategy).__name__}, which sends whole gradients": (
            sends_whole and not isinstance(strategy, SingleDeviceStrategy)
        ),
        "automatic_optimization=False, by which nobody knows what is one step": (
            not trainer.lightning_module.automatic_optimization
        ),
        f"precision={trainer.precision!r}, whose loss scale changes, and factors with it": (
            scaler_of(trainer) is not None
        ),
        "SparseStatePrecision, which keeps parts of gradients": (
            isinstance(trainer.precision_plugin, SparseStatePrecision)
        ),
    }
    for given, is_so in found.items():
        if is_so:
            raise ConfigurationError(
                f"{what} with {given}; allowed: one device, or CyclicStrategy with 'cyclic_dp', "
                "'cyclic_dp_v1', 'lockstep_dp' or 'cyclic_zero', automatic optimization, and "
                "'32-true', 'bf16-mixed' or 'bf16-true'; use one of these, or remove the callback"
            )
