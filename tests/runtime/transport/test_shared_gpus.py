"""Who may share a GPU over NCCL, and what is missing; GPUs are names here."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_cyclic import CyclicStrategy
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.transport import shared_gpus
from lightning_cyclic.runtime.transport.shared_gpus import (
    SETTING,
    Nccl,
    loaded_nccl,
    naming_shared_gpus,
    refuse_shared_gpus,
    refuse_sharing,
    version_of,
)
from tests.harness.rows import more

USE_GLOO = 'or use process_group_backend="gloo"'
OLD, NEW = (2, 29, 7), (2, 30, 0)


@pytest.mark.parametrize(
    ("version", "setting", "missing"),
    [
        (NEW, "1", ""), ((3, 0, 0), "0x1", ""), (NEW, "2", ""),
        (NEW, "0", f"export {SETTING}=1"), (NEW, "", f"export {SETTING}=1"),
        (NEW, "yes", f"export {SETTING}=1"),
        (OLD, "1", "load NCCL 2.30 or later in front of it (LD_PRELOAD=/path/to/libnccl.so.2)"),
        (OLD, "", "load NCCL 2.30 or later in front of it (LD_PRELOAD=/path/to/libnccl.so.2) and "
                  f"export {SETTING}=1"),
    ],
)  # fmt: skip
def test_what_is_missing_before_ranks_may_share_a_gpu(
    version: tuple[int, ...], setting: str, missing: str
) -> None:
    assert Nccl(version, setting).missing == missing


def test_ranks_share_a_gpu_where_they_may_and_are_named_where_they_may_not() -> None:
    gpus = ["a", "b", "a", "b"]
    refuse_sharing(gpus, Nccl(NEW, "1"))
    refuse_sharing(["a", "b"], Nccl(OLD, ""))
    for nccl, text in (
        (Nccl(OLD, "1"), f"which NCCL 2.29.7 refuses; .*; load NCCL 2.30 .*, {USE_GLOO}"),
        (Nccl(NEW, "0"), rf"which NCCL 2.30.0 refuses unless {SETTING} says 1 \(it says '0'\)"),
        (Nccl((), ""), "which NCCL of an unknown version refuses"),
    ):
        with pytest.raises(ConfigurationError, match=f"^ranks 0 and 2 share a GPU, {text}"):
            refuse_sharing(gpus, nccl)


def test_one_gpu_named_twice_is_refused_before_anybody_connects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(SETTING, raising=False)
    gpu, other = torch.device("cuda", 0), torch.device("cuda", 1)
    refuse_shared_gpus(None, has_nccl=True)
    refuse_shared_gpus([gpu, other], has_nccl=True)
    refuse_shared_gpus([gpu, gpu], has_nccl=False)
    refuse_shared_gpus([torch.device("cpu")] * 2, has_nccl=True)
    for refuse in (
        partial(refuse_shared_gpus, [gpu, gpu, gpu], has_nccl=True),
        CyclicStrategy(parallel_devices=[gpu, gpu, gpu]).setup_distributed,
    ):
        with pytest.raises(
            ConfigurationError, match=f"ranks 0, 1 and 2 share a GPU.*{SETTING}=1, {USE_GLOO}"
        ):
            refuse()


def test_what_nccl_says_of_a_shared_gpu_is_told_with_what_to_do() -> None:
    said = "NCCL error\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on 1000"
    with pytest.raises(ConfigurationError, match=f"rank 1 and rank 0 both on.*, {USE_GLOO}"):  # noqa: SIM117
        with naming_shared_gpus():
            raise RuntimeError(said)
    with pytest.raises(RuntimeError, match="^something else$"), naming_shared_gpus():
        raise RuntimeError("something else")


def test_where_nccl_refuses_although_this_rank_has_all_another_one_lacks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_gpus, "loaded_nccl", lambda: Nccl(NEW, "1"))
    with pytest.raises(ConfigurationError, match=f"export {SETTING}=1 on every rank"):  # noqa: SIM117
        with naming_shared_gpus():
            raise RuntimeError("Duplicate GPU detected : rank 1 and rank 0")


def test_versions_are_read_as_nccl_writes_them() -> None:
    assert [version_of(code) for code in (2804, 20906, 23000, 23203, 30000)] == [
        (2, 8, 4), (2, 9, 6), (2, 30, 0), (2, 32, 3), (3, 0, 0),
    ]  # fmt: skip


def compiled(folder: Path) -> Path:
    """Build a library that says that it is NCCL 2.32.3."""
    source, library = folder / "nccl.c", folder / "libnccl.so.2"
    source.write_text("int ncclGetVersion(int *version) { *version = 23203; return 0; }")
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", str(source), "-o"]
    try:
        subprocess.run([*command, str(library)], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    return library


@pytest.mark.parametrize("how", ["LD_PRELOAD", more("ctypes")])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="how Linux loads libraries")
def test_the_version_is_that_of_the_library_that_was_loaded(how: str, tmp_path: Path) -> None:
    library = compiled(tmp_path)
    load = f"import ctypes; ctypes.CDLL({str(library)!r}); " if how == "ctypes" else ""
    code = (
        f"{load}from lightning_cyclic.runtime.transport.shared_gpus import loaded_nccl;"
        "print(tuple(loaded_nccl()))"
    )
    env = os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path)), SETTING: "1"}
    env |= {"LD_PRELOAD": str(library)} if how == "LD_PRELOAD" else {}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "((2, 32, 3), '1')"


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch brings NCCL")
def test_a_torch_without_nccl_has_no_version_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "1")
    assert loaded_nccl() == Nccl((), "1")
