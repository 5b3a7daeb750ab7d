"""Written together: what all ranks write a part of. Where one of them cannot, none goes on."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.unwritten import refusal
from lightning_cyclic.runtime.agreement import gather_texts

_REFUSED = "refused: "  # begins what a rank says in the place of what it has got


def on_all(do: Callable[[], str], path: Path, group: Any) -> list[str]:
    """Let every rank do its part; all must call it.

    Args:
        do: writes, and returns what the others are to know.
        path: of what is written.
        group: process group of all ranks; None for one rank, or the default group.

    Returns:
        What each rank has got.

    Raises:
        ConfigurationError: on every rank, where the file system has refused one.
    """
    try:
        mine = do()
    except OSError as error:
        mine = f"{_REFUSED}{error.errno or errno.EIO} {error.strerror or error}"
    each = gather_texts(mine, group) if dist.is_initialized() else [mine]
    said = {r: x.removeprefix(_REFUSED) for r, x in enumerate(each) if x.startswith(_REFUSED)}
    if said:
        parts = {r: x.partition(" ") for r, x in said.items()}
        raise unwritten(path, {r: OSError(int(n), why) for r, (n, _, why) in parts.items()})
    return each


def unwritten(path: Path, errors: Mapping[int, BaseException]) -> ConfigurationError:
    """Return what every rank raises; its cause is the disk's refusal, if it is nothing else.

    Args:
        path: of what was to be written.
        errors: of the ranks that could not.
    """
    each = "; ".join(f"rank {r}: {x}" for r, x in sorted(errors.items()))
    error = ConfigurationError(
        f"the checkpoint folder {str(path)!r} could not be written ({each}); allowed: a folder "
        "with room, in which every rank may write; choose another one, as "
        "ModelCheckpoint(dirpath=...)"
    )
    error.__cause__ = refusal(errors)
    return error
