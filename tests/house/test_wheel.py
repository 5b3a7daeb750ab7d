"""A wheel in an empty environment: all that a user of the package alone has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset


class Tiny(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    trainer = Trainer(
        strategy="cyclic_dp", accelerator="cpu", devices=2, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(Tiny(), DataLoader(TensorDataset(torch.ones(32, 4)), 4))
    if trainer.is_global_zero:
        print("steps", trainer.global_step, type(trainer.strategy).__name__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Return what a command prints; with nothing of this environment but its path."""
    kept = {k: x for k, x in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=kept | {"OMP_NUM_THREADS": "1"}, text=True,
        capture_output=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_the_wheel_alone_trains_a_script_that_never_imports_it(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--quiet", "--no-deps", "-w", tmp_path / "wheels", ROOT, cwd=tmp_path)
    (wheel,) = (tmp_path / "wheels").glob("lightning_cyclic-*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    constraints = ROOT / "constraints.txt"  # which say that torch is the build for CPUs
    run(python, "-m", "pip", "install", "--quiet", "-c", constraints, wheel, cwd=tmp_path)
    installed = run(python, "-m", "pip", "list", "--format=freeze", cwd=tmp_path)
    assert "lightning-cyclic==" in installed
    assert "hydra" not in installed
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert "steps 4 CyclicStrategy" in run(python, script, cwd=tmp_path)
    drawn = run(
        python.with_name("lightning-cyclic"), "draw", "1f1b", "--workers", "2", cwd=tmp_path
    )
    assert "0F0" in drawn
