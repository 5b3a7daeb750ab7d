"""The newest whole checkpoint: from where a run goes on that is started again.

SLURM starts a job anew behind a requeue, torchrun all ranks behind a failure, and both run the
user's script from its first line. Lightning itself looks for no other checkpoint there than that
of a requeue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from lightning_cyclic.compat import _METADATA_FILENAME as META
from lightning_cyclic.compat import Checkpoint, Trainer, rank_zero_warn
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.checkpoint import is_local
from lightning_cyclic.plugin.sealed_file import problem_of

_OF_TRAINING = b"lr_schedulers"  # a key of checkpoints that have more than weights


def newest_whole(paths: Iterable[Path]) -> Path | None:
    """Return the newest checkpoint from which training can go on; None if there is none.

    Args:
        paths: of files and folders. Those that are not as they were written are passed over with a
            warning, and so are those with weights alone, where there are no others.
    """
    there, weights = {path for path in paths if path.exists()}, []  # links may point nowhere
    for path in sorted(there, key=_age):
        if (problem := problem_of(path)) is not None:
            rank_zero_warn(f"The checkpoint {path} {problem}, and is passed over.")
        elif _has_training(path):
            return path
        else:
            weights.append(path)
    if weights:
        rank_zero_warn(
            f"The checkpoint {weights[0]} has weights alone, without the state of optimizers: "
            "training cannot go on from it, and does not. Write checkpoints of all, "
            "ModelCheckpoint(save_weights_only=False), or give it to load_from_checkpoint."
        )
    return None


def checkpoints_of(trainer: Trainer) -> Iterator[Path]:
    """Find what a run has written, when it ran before.

    Raises:
        ConfigurationError: its folders are not its own, or not of this host's file systems.
    """
    root = Path(trainer.default_root_dir)
    yield from root.glob("hpc_ckpt_*.ckpt")  # of SLURM's requeue
    callbacks = [x for x in trainer.callbacks if isinstance(x, Checkpoint)]  # type: ignore[attr-defined]
    folders = {getattr(callback, "dirpath", None) for callback in callbacks}
    for folder in sorted({str(x) for x in folders if x is not None}):
        _check_local(folder)
        yield from Path(folder).glob("*.ckpt")
    if None in folders:  # a logger's, of another number in every start
        logged = trainer.logger.save_dir if trainer.logger is not None else None
        above = logged or trainer.default_root_dir
        _check_local(above)
        _check_own(Path(above))
        yield from Path(above).rglob("*.ckpt")


def _check_local(folder: str) -> None:
    if not is_local(folder):
        raise ConfigurationError(
            f'resume="auto" with checkpoints in {folder!r}; allowed: folders of a file system '
            "that all hosts have; name the checkpoint itself: trainer.fit(..., ckpt_path=...)"
        )


def _check_own(folder: Path) -> None:
    if Path.cwd().is_relative_to(folder.resolve()):
        raise ConfigurationError(
            f'resume="auto" with checkpoints somewhere in {str(folder.resolve())!r}, in or above '
            "the working directory, where those of other runs may be; allowed: a folder of this "
            'run alone, the same in every start; use Trainer(default_root_dir="runs/mine"), or '
            'ModelCheckpoint(dirpath="runs/mine")'
        )


def _has_training(path: Path) -> bool:
    """Say so without unpickling: the key stands as it is in what is pickled."""
    file = path / META if path.is_dir() else path
    try:
        with ZipFile(file) as archive:
            pickled = [name for name in archive.namelist() if name.endswith("data.pkl")]
            return any(_OF_TRAINING in archive.read(name) for name in pickled)
    except (BadZipFile, OSError):
        return True  # of another writer, who knows


def _age(path: Path) -> tuple[int, str]:
    return -path.stat().st_mtime_ns, str(path)
