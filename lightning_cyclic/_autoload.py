"""Register the strategy names once Lightning's own strategies have been imported.

torch calls :func:`register_when_lightning_is_imported` while it is itself being imported (entry
point group ``torch.backends``), so this file imports nothing heavy and never raises. Lightning
has no entry point for strategies; a finder on ``sys.meta_path`` that waits for one module is the
only way to make ``Trainer(strategy="cyclic_dp")`` work without ``import lightning_cyclic``.

``pytorch_lightning`` is a second copy of Lightning, with classes of its own; the names are known
to both, and a process trains with one of them (compat.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_AWAITED = ("lightning.pytorch.strategies", "pytorch_lightning.strategies")


def register_when_lightning_is_imported() -> None:
    """Register now if Lightning is there, else as soon as it has been imported; never raise."""
    try:
        waiting = {finder.awaited for finder in sys.meta_path if isinstance(finder, _Waiter)}
        for awaited in _AWAITED:
            module = sys.modules.get(awaited)
            if module is not None and hasattr(module, "StrategyRegistry"):
                _register(module)
            elif awaited not in waiting:
                sys.meta_path.insert(0, _Waiter(awaited))
    except Exception as error:  # a failing entry point would abort `import torch`
        print(f"lightning_cyclic: names not registered: {error!r}", file=sys.stderr)


def _register(strategies: ModuleType) -> None:
    from lightning_cyclic import registration  # noqa: PLC0415  (kept lazy)

    host = strategies.__name__.partition(".")[0]
    registration.register(strategies.StrategyRegistry, host)
    registration.refuse_instances(strategies.Strategy, host)


class _Waiter(MetaPathFinder):
    """Find the awaited module once, and register after it has been executed."""

    def __init__(self, awaited: str) -> None:
        self.awaited = awaited

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.awaited:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(Loader):
    """Execute a module with its own loader, then register."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        try:
            _register(module)
        except Exception as error:  # an import of Lightning must not fail because of us
            print(f"lightning_cyclic: names not registered: {error!r}", file=sys.stderr)
