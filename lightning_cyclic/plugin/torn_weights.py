"""Torn weights: those of a module whose training has failed in the middle of steps.

Ranks have weights of several steps then, or those of their own stages alone. Plain training leaves
weights of one step behind, which may be trained on, validated and saved; these may not, until they
are loaded.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import nn

from lightning_cyclic.errors import ConfigurationError

_KEY: Final = "_lightning_cyclic_torn"  # on the module: whichever Trainer it is given to next


class _Torn(NamedTuple):
    """Hold how training ended, and how often each parameter had been written by then."""

    how: str
    versions: dict[str, int]


def note(module: nn.Module, how: str) -> None:
    """Note that a module's weights are torn from now on.

    Args:
        how: training ended, as "by ValueError in step 3".
    """
    vars(module)[_KEY] = _Torn(how, _versions(module))


def forget(module: nn.Module) -> None:
    """Take the weights for whole: they have been loaded."""
    vars(module).pop(_KEY, None)


def make_writable(module: nn.Module) -> None:
    """Give what other ranks had memory of its own, into which weights can be loaded."""
    torn: _Torn | None = vars(module).get(_KEY)
    if torn is not None:
        for p in (p for p in module.parameters() if 0 in p.stride()):
            p.data = p.data.contiguous()
        vars(module)[_KEY] = torn._replace(versions=_versions(module))


def check(module: nn.Module, what: str) -> None:
    """Refuse to use torn weights.

    Args:
        what: is to be done with them, as "save".

    Raises:
        ConfigurationError: not all of them have been loaded since.
    """
    torn: _Torn | None = vars(module).get(_KEY)
    if torn is None:
        return
    now = _versions(module)
    if all(now.get(name) != version for name, version in torn.versions.items()):
        forget(module)
        return
    raise ConfigurationError(
        f"{type(module).__name__} was given to {what}, but its training ended {torn.how}, in the "
        "middle of steps, so that this rank has weights of several steps, or parts of them; "
        "allowed: a new module, or weights that are loaded; use trainer.fit(module, "
        "ckpt_path=...) with the newest checkpoint, or module.load_state_dict(...) on all ranks"
    )


def _versions(module: nn.Module) -> dict[str, int]:
    with torch._C.DisableTorchFunctionSubclass():  # absent parameters know it, too
        return {name: p._version for name, p in module.named_parameters()}
