"""Workers that share a GPU: over NCCL from 2.30 on, where it is told to; else over gloo.

What is decided takes a version, a variable and names of devices, so that it needs no GPU. What
counts is the library that was loaded, which may be another one than torch was built with:
LD_PRELOAD puts a newer one in front of it, and torch.cuda.nccl.version() does not notice.
"""

from __future__ import annotations

import ctypes
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from lightning_cyclic.errors import ConfigurationError

SETTING = "NCCL_MULTI_RANK_GPU_ENABLE"
_SINCE = (2, 30)
_DUPLICATE = "Duplicate GPU"  # so NCCL calls it
_LIBRARY = "libnccl.so.2"
_OVER_GLOO = (
    'use process_group_backend="gloo", with which messages travel through the host\'s memory'
)


class Nccl(NamedTuple):
    """Say which NCCL a process has, and what it is told of ranks that share a GPU.

    Args:
        version: major, minor and patch of the library that was loaded; () where none was.
        setting: what NCCL_MULTI_RANK_GPU_ENABLE is; "" where it is not set.
    """

    version: tuple[int, ...]
    setting: str

    @property
    def missing(self) -> str:
        """Return what to do before ranks may share a GPU; nothing where they may.

        Example:
            >>> Nccl((2, 28, 9), "1").missing
            'load NCCL 2.30 or later in front of it (LD_PRELOAD=/path/to/libnccl.so.2)'
            >>> Nccl((2, 30, 0), "1").missing
            ''
        """
        todo = []
        if self.version < _SINCE:
            todo.append(f"load NCCL 2.30 or later in front of it (LD_PRELOAD=/path/to/{_LIBRARY})")
        if not _is_on(self.setting):
            todo.append(f"export {SETTING}=1")
        return " and ".join(todo)

    @property
    def refuses(self) -> str:
        """Return why ranks may not share a GPU, in words that stand behind their names."""
        has = ".".join(map(str, self.version)) or "of an unknown version"
        if self.version < _SINCE:
            return f"which NCCL {has} refuses"
        return f"which NCCL {has} refuses unless {SETTING} says 1 (it says {self.setting!r})"


def loaded_nccl() -> Nccl:
    """Look at the library that this process sends by, and at its environment."""
    return Nccl(_loaded_version(), os.environ.get(SETTING, ""))


def version_of(code: int) -> tuple[int, ...]:
    """Read a version as ncclGetVersion writes it; its digits have moved since 2.8.

    Example:
        >>> version_of(23203), version_of(22809), version_of(2804)
        ((2, 32, 3), (2, 28, 9), (2, 8, 4))
    """
    major, rest = divmod(code, 10_000 if code >= 10_000 else 1_000)
    return major, *divmod(rest, 100)


def refuse_sharing(devices: Sequence[str], nccl: Nccl) -> None:
    """Refuse that ranks share a GPU over an NCCL that does not let them.

    Args:
        devices: the GPU of each rank; several have one where it is the same.
        nccl: which all have.

    Raises:
        ConfigurationError: some do, and may not.
    """
    ranks = defaultdict(list)
    for rank, device in enumerate(devices):
        ranks[device].append(f"{rank}")
    if shared := next((each for each in ranks.values() if len(each) > 1), []):
        who = f"ranks {', '.join(shared[:-1])} and {shared[-1]} share a GPU"
        _refuse(who, nccl)


def refuse_shared_gpus(devices: Sequence[torch.device] | None, *, has_nccl: bool) -> None:
    """Refuse early that workers of one process's list share a GPU over NCCL.

    Raises:
        ConfigurationError: some device is named twice, and may not be.
    """
    on_gpus = [str(device) for device in devices or () if device.type == "cuda"]
    if has_nccl:
        refuse_sharing(on_gpus, loaded_nccl())


@contextmanager
def naming_shared_gpus() -> Iterator[None]:
    """Run the body, in which NCCL connects; where workers share a GPU, say what to do.

    Raises:
        ConfigurationError: NCCL has found two workers on a GPU.
    """
    try:
        yield
    except RuntimeError as error:
        if _DUPLICATE not in str(error):
            raise
        who = f"several workers share a GPU ({str(error).splitlines()[-1]})"
        _refuse(who, loaded_nccl(), error)


def _refuse(who: str, nccl: Nccl, error: Exception | None = None) -> None:
    if error is None and not nccl.missing:
        return
    todo = nccl.missing or f"export {SETTING}=1 on every rank"  # NCCL has refused some rank
    raise ConfigurationError(
        f"{who}, {nccl.refuses}; allowed: a GPU for each worker, NCCL 2.30 or later with "
        f"{SETTING}=1, or gloo in the place of NCCL; {todo}, or {_OVER_GLOO}"
    ) from error


def _is_on(setting: str) -> bool:
    with suppress(ValueError):  # NCCL, too, takes what is no number for its default
        return int(setting, 0) != 0
    return False


def _loaded_version() -> tuple[int, ...]:
    code = ctypes.c_int()
    for library in (_preloaded, _loaded_by_torch):
        with suppress(OSError, AttributeError):  # not loaded; loaded, but within torch itself
            library().ncclGetVersion(ctypes.byref(code))
            return version_of(code.value)
    if torch.distributed.is_nccl_available():
        built_with: Any = torch.cuda.nccl.version  # which is part of torch, then
        return tuple(built_with()[:3])
    return ()


def _preloaded() -> ctypes.CDLL:
    """Return what has all symbols that everybody sees, of which those of LD_PRELOAD come first."""
    return ctypes.CDLL(None)


def _loaded_by_torch() -> ctypes.CDLL:
    return ctypes.CDLL(_LIBRARY, mode=getattr(os, "RTLD_NOLOAD", 0))  # as there is on Linux
