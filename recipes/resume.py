"""What a run finds of itself in its folder when it is started again there.

SLURM does so behind a requeue, torchrun behind a failure. Lightning itself looks for no other
checkpoint than that of a requeue, and for this only where the user has named none.
"""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig


def checkpoint_of(cfg: DictConfig) -> str | None:
    """Return the newest checkpoint of the run's own, or the one that is asked for.

    Args:
        cfg: a recipe's, of which ``resume`` says whether to look at all.

    Returns:
        Its path, or None for the first weights.
    """
    asked: str | None = cfg.ckpt_path
    if not cfg.resume:
        return asked
    found = Path(cfg.trainer.default_root_dir).rglob("*.ckpt")  # each is whole, or not there
    newest = max(found, key=lambda path: path.stat().st_mtime_ns, default=None)
    return asked if newest is None else str(newest)


@rank_zero_only
def keep_rows(cfg: DictConfig) -> None:
    """Put aside what was logged before: Lightning's logger begins with an empty file."""
    if not cfg.resume:
        return
    rows = Path(cfg.trainer.default_root_dir, "metrics", "metrics.csv")
    if rows.exists():
        before = len(list(rows.parent.glob("metrics-*.csv")))
        rows.rename(rows.with_name(f"metrics-{before}.csv"))
