"""Jobs of a thread: in order, with errors that are not lost; and copies that stay as they are."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_cyclic.plugin import sealed_file
from lightning_cyclic.plugin.background import Background, copied

LIMIT_S = 20


def test_jobs_are_done_in_order_by_another_thread() -> None:
    background, done, go = Background(), [], threading.Event()
    background.add(lambda: done.append(go.wait(LIMIT_S)))
    for k in range(5):
        background.add(lambda k=k: done.append((k, threading.current_thread().name)))
    background.wait(6)  # are as many as there are
    assert done == []
    go.set()
    background.wait(2)
    assert len(done) >= 4
    background.close()
    assert done[0] is True
    assert [k for k, _ in done[1:]] == [*range(5)]
    assert {name for _, name in done[1:]} != {threading.current_thread().name}
    background.add(lambda: done.append("a second fit"))
    background.close()
    assert done[-1] == "a second fit"


def fail() -> None:
    raise PermissionError("not yours")


def test_an_error_is_raised_where_somebody_waits_and_later_jobs_are_done() -> None:
    background, done = Background(), []
    background.add(fail)
    background.add(lambda: done.append(1))
    with pytest.raises(PermissionError, match="not yours"):
        background.wait()
    background.wait()
    background.add(fail)
    background.add(lambda: done.append(2))
    with pytest.raises(PermissionError, match="not yours"):
        background.close()
    assert done == [1, 2]
    background.close()  # once more, without


def test_a_copy_is_not_changed_any_more_and_makes_the_same_file(tmp_path: Path) -> None:
    embedding = nn.Embedding(50, 40)
    head = nn.Linear(40, 50, bias=False)
    head.weight = embedding.weight
    checkpoint = {
        "state_dict": {"a": embedding.weight.detach(), "b": head.weight.detach()},
        "of a graph": (embedding.weight * 2).sum(),
        "callbacks": {"best": ["a.ckpt"]},
    }
    sealed_file.write({k: v for k, v in checkpoint.items() if k != "of a graph"}, tmp_path / "a")
    copy = copied(checkpoint)
    assert copy.pop("of a graph") == checkpoint["of a graph"]
    with torch.no_grad():
        embedding.weight.zero_()
    checkpoint["callbacks"]["best"].append("b.ckpt")
    sealed_file.write(copy, tmp_path / "b")
    read = [torch.load(tmp_path / name, weights_only=True) for name in "ab"]
    for name in "ab":
        assert torch.equal(read[0]["state_dict"][name], read[1]["state_dict"][name])
    assert read[1]["state_dict"]["a"].abs().sum() > 0
    assert read[1]["callbacks"] == {"best": ["a.ckpt"]}
    assert (tmp_path / "a").stat().st_size == (tmp_path / "b").stat().st_size  # values lie once
