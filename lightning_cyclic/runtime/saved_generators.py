"""Saved generators: where a process's random generators are, in types that a checkpoint can have.

They are those that code outside of steps draws from: steps leave them as they were, and have keys
of their own (randomness.py).
"""

from __future__ import annotations

import random
import sys
from typing import Any, Final, NotRequired, TypedDict

import torch
from torch import Tensor

_PYTHON: Final = 3  # the version of what random.getstate returns
_NUMPY: Final = "MT19937"  # of its generators the one that is there unless it is replaced


class Words(TypedDict):
    """Hold a Mersenne twister."""

    words: Tensor  # int64, shape (625,): the last is the position among the others
    normal: float | None  # drawn already, as these come in pairs


class Generators(TypedDict):
    """Hold the states of all generators; older files have torch's alone."""

    torch: Tensor
    device: NotRequired[Tensor]
    python: NotRequired[Words]
    numpy: NotRequired[Words]


def states_of(device: torch.device) -> Generators:
    """Return where this process's generators are.

    Args:
        device: whose own generator is looked at, too, if it is a GPU.
    """
    _, words, normal = random.getstate()
    python = Words(words=torch.tensor(words), normal=normal)
    found = Generators(torch=torch.get_rng_state(), python=python)
    if device.type == "cuda":
        found["device"] = torch.cuda.get_rng_state(device)
    if (state := _of_numpy()) is not None:
        key, position = state["state"]["key"], state["state"]["pos"]
        normal = float(state["gauss"]) if state["has_gauss"] else None
        found["numpy"] = Words(words=torch.tensor([*key.tolist(), position]), normal=normal)
    return found


def put_states(saved: Generators, device: torch.device) -> None:
    """Let this process's generators be where they were; those of which nothing is known stay."""
    torch.set_rng_state(saved["torch"])
    if device.type == "cuda" and "device" in saved:
        torch.cuda.set_rng_state(saved["device"], device)
    if "python" in saved:
        python = saved["python"]
        random.setstate((_PYTHON, tuple(python["words"].tolist()), python["normal"]))
    if "numpy" in saved and (state := _of_numpy()) is not None:
        normal, (*key, position) = saved["numpy"]["normal"], saved["numpy"]["words"].tolist()
        state["state"] = {"key": key, "pos": position}
        state |= {"has_gauss": int(normal is not None), "gauss": normal or 0.0}
        sys.modules["numpy"].random.set_state(state)


def _of_numpy() -> dict[str, Any] | None:
    """Return the state of numpy's own generator, if it is there, and the usual one."""
    if (numpy := sys.modules.get("numpy")) is None:
        return None
    state: dict[str, Any] = numpy.random.get_state(legacy=False)
    return state if state["bit_generator"] == _NUMPY else None
