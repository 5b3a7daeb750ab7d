"""Files of weights that are not as they were written, read by stages: every rank says so."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader

from tests import processes
from tests.conformance.harness import Batches, same
from tests.conformance.modules import vectors
from tests.corpus import make_trainer
from tests.rows import in_turn
from tests.test_deferred import CUT, Late, Pretrained, contents, gpt2, staged

pytestmark = pytest.mark.multi
FIRST = "transformer.h.0.attn.c_attn.weight"  # in the second of three files


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


# ---------------------------------------------------------------------- folders of Hugging Face's


class Spoiling(Pretrained):
    """Is read from files that rank 0 spoils when all have opened, and none has read them."""

    def configure_model(self) -> None:
        super().configure_model()
        (Path(self.folder) / f"opened.{processes.here().rank}").touch()
        while len(list(Path(self.folder).glob("opened.*"))) < 2:
            time.sleep(0.01)
        if processes.here().rank == 0:
            for file in parts(Path(self.folder)):
                self.spoil(file)

    def spoil(self, file: Path) -> None:
        os.truncate(file, 2000)


class Removing(Spoiling):
    def spoil(self, file: Path) -> None:
        file.unlink()


def fit(kind: type[Pretrained], source: Path, folder: Path, within: bool) -> None:
    seed_everything(3, verbose=False)  # of what is not in the files
    module, g = kind(str(source)), torch.Generator().manual_seed(0)
    if not within:
        module.configure_model()
    trainer = make_trainer(
        {"preset": "1f1b", **CUT, "stages": 2}, max_epochs=1, enable_checkpointing=True,
        default_root_dir=str(folder), callbacks=[ModelCheckpoint(folder, "{epoch}")],
    )  # fmt: skip
    data = [torch.randint(0, 256, (4, 17), generator=g) for _ in range(2)]
    trainer.fit(module, DataLoader(data, batch_size=None))


def attempt(*args: Any) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011  (what libraries raise, too)
        fit(*args, True)
    return str(caught.value)


def spoil(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change what the second file holds, and what the folder's index says of it."""
    file, about = parts(folder)[1], folder / "model.safetensors.index.json"
    values = load_file(file)
    change(values)
    save_file(values, file, metadata={"format": "pt"})
    index = json.loads(about.read_text())
    others = {n: f for n, f in index["weight_map"].items() if f != file.name}
    index["weight_map"] = others | dict.fromkeys(values, file.name)
    about.write_text(json.dumps(index))


def without(values: dict[str, Tensor]) -> None:
    del values[FIRST]


def with_more(values: dict[str, Tensor]) -> None:
    values["transformer.h.9.weight"] = torch.ones(3)


def reshaped(values: dict[str, Tensor]) -> None:
    values[FIRST] = torch.ones(5, 96)


@pytest.mark.parametrize("change", [without, with_more])
def test_a_folder_with_other_keys_gives_what_it_gives_to_one_device(
    change: Callable[[dict[str, Tensor]], None], tmp_path: Path
) -> None:
    """As ``from_pretrained`` does, which new heads are made by: it draws, and says so."""
    source, apart, one = tmp_path / "source", tmp_path / "apart", tmp_path / "one"
    gpt2(str(source), 32, 3)
    spoil(source, change)
    processes.run(fit, 2, Pretrained, source, apart, True)
    processes.run(fit, 2, Pretrained, source, one, False)
    found = contents(apart, 0)["state_dict"]
    assert same(found, contents(one, 0)["state_dict"])
    assert float(found[f"net.{FIRST}"].std()) > 0


@pytest.mark.parametrize("how", ["reshaped", "missing", "short"])
def test_a_folder_that_is_not_whole(how: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    gpt2(str(source), 32, 3)
    file = parts(source)[1]
    said = {"reshaped": "mismatch", "missing": file.name, "short": "not fully covered"}[how]
    if how == "reshaped":
        spoil(source, reshaped)
    elif how == "missing":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size // 2)
    for text in processes.run(attempt, 2, Pretrained, source, tmp_path):
        assert said in text


def test_a_file_that_becomes_shorter_before_it_is_read_is_named(tmp_path: Path) -> None:
    """The system would end each process that reads behind the end of a mapped file."""
    source = tmp_path / "source"
    gpt2(str(source), 32, 3)
    for text in processes.run(attempt, 2, Spoiling, source, tmp_path):
        assert f"the file {parts(source)[1]} has 2000 bytes, and net.transformer" in text


def test_a_file_that_is_removed_before_it_is_read_is_read_all_the_same(tmp_path: Path) -> None:
    source, apart, one = tmp_path / "source", tmp_path / "apart", tmp_path / "one"
    gpt2(str(source), 32, 3)
    processes.run(fit, 2, Pretrained, source, one, False)
    processes.run(fit, 2, Removing, source, apart, True)
    assert not parts(source)
    assert same(contents(apart, 0)["state_dict"], contents(one, 0)["state_dict"])


# ---------------------------------------------------------------------- checkpoints


def go_on(preset: str, folder: Path, file: Path | None) -> str:
    trainer = make_trainer(
        staged(preset), max_epochs=2 if file else 1, enable_checkpointing=True,
        default_root_dir=str(folder), callbacks=[ModelCheckpoint(folder, "{epoch}")],
    )  # fmt: skip
    data = DataLoader(Batches(vectors, [[0, 1], [2, 3]]), batch_size=None)
    try:
        trainer.fit(Late(), data, ckpt_path=file)
    except Exception as error:
        return str(error)
    return ""


def spoiled(saved: Any, how: str, file: Path) -> str:
    """Write a checkpoint that is spoiled; return what every rank is to say."""
    if how == "missing":
        del saved["state_dict"]["net.4.weight"]
    elif how == "extra":
        saved["state_dict"]["net.9.weight"] = torch.ones(3)
    elif how == "reshaped":
        saved["state_dict"]["net.4.weight"] = torch.ones(7, 7)
    torch.save(saved, file)
    if how == "short":
        os.truncate(file, file.stat().st_size // 2)
        return f"the checkpoint {file} has {file.stat().st_size} bytes and is no whole archive"
    said = {"missing": "Missing key(s)", "extra": "Unexpected key(s)", "reshaped": "size mismatch"}
    return said[how]


@pytest.mark.parametrize(
    ("preset", "how"),
    in_turn(["1f1b", "cyclic_zero"], ["missing", "extra", "reshaped", "short"]),
)
def test_a_checkpoint_with_other_keys_or_a_part_of_it(
    preset: str, how: str, tmp_path: Path
) -> None:
    assert processes.run(go_on, 2, preset, tmp_path, None) == ["", ""]
    file = tmp_path / "spoiled.ckpt"
    said = spoiled(contents(tmp_path, 0), how, file)
    for text in processes.run(go_on, 2, preset, tmp_path, file):
        assert said in text
        assert how == "short" or "net.4.weight" in text or "net.9.weight" in text
