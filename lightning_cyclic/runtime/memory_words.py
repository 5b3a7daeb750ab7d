"""Memory words: that a rank ran out of memory, of which kind, how much it asked for, what to do.

    out of the device's memory (asked for 2.00 GiB)
    To need less memory, use one of: smaller batches; remat="always"; ...

Torch says so in a class of its own for devices, and in the text of a RuntimeError for the host.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

import torch

from lightning_cyclic.errors import CyclicError
from lightning_cyclic.plan import Plan
from lightning_cyclic.simulate.units import show_bytes

_OF_DEVICE = ("CUDA error: out of memory", "HIP error: out of memory", "CUDA out of memory")
_OF_HOST = ("DefaultCPUAllocator", "Cannot allocate memory", "can't allocate memory")
_MOST_CAUSES = 10
_ASKED = re.compile(r"(?:tried|unable) to allocate (\d+(?:\.\d+)? ?(?:bytes|[KMGTPE]i?B))", re.I)


def lack_of_memory(error: BaseException) -> str:
    """Say of what memory a rank ran out, and how much it asked for; "" for any other error.

    Example:
        >>> lack_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. ..."))
        "out of the device's memory (asked for 2.00 GiB)"
        >>> lack_of_memory(MemoryError())
        "out of the host's memory"
        >>> lack_of_memory(RuntimeError("no memory of that"))
        ''
    """
    found = next(((e, where) for e in _chain(error) if (where := _memory_of(e))), None)
    if found is None:
        return ""
    asked = _ASKED.search(str(found[0]))
    much = f" (asked for {_shown(asked[1])})" if asked else ""
    return f"out of the {found[1]}'s memory{much}"


def relief(plan: Plan, remat: str) -> str:
    """Say what needs less memory under a plan.

    Args:
        plan: of the run.
        remat: what activation_checkpointing is.

    Example:
        >>> from lightning_cyclic import make_plan
        >>> relief(make_plan("cyclic_zero", num_stages=2, num_workers=2), "never")
        'To need less memory, use one of: smaller batches, with Trainer(accumulate_grad_batches=...); more ranks.'
    """  # noqa: E501  (as it is)
    again = [] if remat == "always" else ['activation_checkpointing="always"']
    shares = plan.axes.sharding.gathers
    ways = {
        "single": ["smaller batches", "a larger num_microbatches", *again],
        "shared": ["smaller batches", *again],
        "pipelined": [
            "smaller batches",
            *again,
            "more stages, each on a rank of its own",
            "memory_limit_bytes=..., by which stages are cut",
        ],
        "replicated": [
            "smaller batches, with Trainer(accumulate_grad_batches=...)",
            "more ranks" if shares else 'preset="cyclic_zero", whose ranks share weights',
        ],
    }
    return f"To need less memory, use one of: {'; '.join(ways[plan.placement])}."


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes: what fails beside the compute is named by another."""
    at: BaseException | None = error
    for _ in range(_MOST_CAUSES):  # one may be its own
        if at is None:
            return
        yield at
        at = at.__cause__


def _memory_of(error: BaseException) -> str:
    text = str(error)
    if isinstance(
        error, CyclicError
    ):  # which may repeat what another rank says; its cause may not
        return ""
    if isinstance(error, torch.OutOfMemoryError) or any(words in text for words in _OF_DEVICE):
        return "device"
    is_of_host = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    return "host" if is_of_host or any(words in text for words in _OF_HOST) else ""


def _shown(asked: str) -> str:
    number, _, unit = asked.partition(" ")
    return show_bytes(int(number)) if unit == "bytes" else asked
