"""The recipe that prunes: a ticket, a table, and what is said where no ticket is drawn."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from recipes.pruned import train_pruned
from tests.harness.commands import Command, Commands

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]
DIGITS = ["experiment=samo_digits", "model.net.width=8"]
GPT = [
    "experiment=samo_gpt", "model.net.layers=1", "model.net.width=32", "task.block_size=16",
    "data.max_bytes=20_000", "data.batch_size=4",
]  # fmt: skip
SMALL = [
    "trainer.max_epochs=3", "pruned.ticket.window=2",
    "trainer.limit_train_batches=4", "trainer.limit_val_batches=2", "trainer.logger=false",
    "+trainer.enable_checkpointing=false", "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
]  # fmt: skip


@pytest.fixture
def nothing_left():
    """Take back what a seed, and a distributed strategy, set for the whole process."""
    before, threads = dict(os.environ), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(before)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def run(compose_recipe, tmp_path, monkeypatch, nothing_left):
    def run(*changes, recipe=DIGITS):
        console = Console(record=True, width=100)
        monkeypatch.setattr("recipes.pruned.get_console", lambda: console)
        cfg = compose_recipe(*recipe, *SMALL, *changes)
        cfg.trainer.default_root_dir = str(tmp_path)
        metric = train_pruned(cfg)
        return metric, console.export_text()

    return run


def bytes_of(table):
    """Training -> bytes for each parameter, of a table that was printed."""
    rows = re.findall(r"│ (search|sparse|dense) .*│ +([\d.]+) │\n", table)
    return {name: float(number) for name, number in rows}


def test_a_pruned_network_is_trained_beside_the_dense_one(run, tmp_path):
    metric, table = run("pruned.ticket.tolerance=0.9")
    assert 0 <= metric <= 1
    rows = bytes_of(table)
    assert rows["search"] == rows["dense"] == 16.0  # float32 and AdamW
    # 22 f + 2, and 20 where nothing is pruned: the few biases and norms of so small a network
    assert 4.2 < rows["sparse"] < 4.6
    masks = torch.load(tmp_path / "mask.pt")
    kept, of = (sum(int(f(m)) for m in masks.values()) for f in (torch.sum, torch.numel))
    assert kept / of == pytest.approx(0.1, abs=1e-4)
    assert "90.0% of" in table


def test_a_pruned_gpt_is_trained_beside_the_dense_one_in_mixed_precision(run, tmp_path):
    metric, table = run("pruned.ticket.tolerance=0.9", recipe=GPT)
    assert 0 < metric < 10  # bits; 8 would be a guess
    assert "val bits per byte" in table
    rows = bytes_of(table)
    assert rows["search"] == rows["dense"] == 16.0  # weights and gradients are float32
    masks = torch.load(tmp_path / "mask.pt")
    assert all(".h.0." in name for name in masks)  # neither embeddings nor norms
    # 22 f + 2 in the block, 20 in the tied embedding, which is large beside one block
    of = sum(mask.numel() for mask in masks.values())
    rest = 256 * 32 + 16 * 32 + 13 * 32 + 2 * 32
    assert rows["sparse"] == pytest.approx((4.2 * of + 20 * rest) / (of + rest), abs=0.02)


@pytest.mark.multi
@pytest.mark.exhaustive
def test_a_pruned_gpt_is_trained_in_a_pipeline_whose_ends_share_the_embedding(tmp_path):
    changes = [*GPT, "model.net.layers=2", "data.batch_size=8", *SMALL]
    changes += ["strategy=1f1b", "workers=2", "pruned.ticket.tolerance=0.9"]
    train = [sys.executable, "recipes/train.py", f"hydra.run.dir={tmp_path}", *changes]
    train += [f"trainer.default_root_dir={tmp_path}", "stages=[net.transformer.h.1]"]
    env = {"COLUMNS": "120", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with Commands({"train": Command(arguments=train, env=env, folder=ROOT)}) as commands:
        text = commands.output("train")
    rows = bytes_of(text)  # printed once, by rank 0, which has the last block and the head
    assert text.count("bytes per parameter") == 1
    assert rows.keys() == {"search", "sparse", "dense"}
    block, norms, tied = 12 * 32 * 32, 13 * 32 + 2 * 32, 256 * 32
    of = block + norms + tied  # what it has of the embedding is the weight alone
    assert rows["dense"] == pytest.approx((16 * (block + norms) + 4 * tied) / of, abs=0.01)
    masks = torch.load(tmp_path / "mask.pt")
    own, other = (
        sum(int(m.sum()) for n, m in masks.items() if x in n) for x in (".h.1.", ".h.0.")
    )
    expected = (2 * block + 22 * own + 4 * other + 20 * norms + 2 * tied) / of  # all of the index
    assert rows["sparse"] == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("name", ["samo_vgg", "samo_wideresnet"])
def test_large_networks_are_trained_so_by_momentum(run, cifar10_folder, tmp_path, name):
    images = [f"data.path={cifar10_folder}", "data.batch_size=4", "data.num_workers=0"]
    recipe = [f"experiment={name}", "data=cifar10", "model.net.width=8", *images]
    _, table = run("pruned.ticket.tolerance=0.9", recipe=recipe)
    rows = bytes_of(table)
    assert rows["search"] == rows["dense"] == 12.0  # weights, gradients and momentum are float32
    masks = torch.load(tmp_path / "mask.pt")
    assert sum(int(m.sum()) for m in masks.values()) < 0.11 * sum(
        m.numel() for m in masks.values()
    )
    assert 3.8 < rows["sparse"] < 4.4  # 18 f + 2, and 16 where nothing is pruned


@pytest.mark.filterwarnings("ignore:EarlyBirdPruning has drawn no ticket")
def test_where_no_ticket_is_drawn_it_says_how_far_masks_were_apart(run):
    with pytest.raises(SystemExit, match=r"no ticket was drawn in 2 epochs: .*1\.000, 0\.\d+; "):
        run("pruned.search_epochs=2", "pruned.ticket.tolerance=0")


def test_ddp_is_refused_by_name(run):
    with pytest.raises(Exception, match="SparseStatePrecision was given with DDPStrategy"):
        run("strategy=ddp", "workers=1", "pruned.ticket.tolerance=0.9")
