"""What of a pipeline may lie on a disk, or in the memory of a GPU's host; before any process."""

from __future__ import annotations

from lightning_cyclic.errors import ConfigurationError


def check_disk(
    disk: object, checkpointing: str, preset: str, *, is_bounded: bool, predicts: bool,
    has_feedback: bool,
) -> None:  # fmt: skip
    """Refuse a folder for what stays in memory.

    Args:
        disk: the folder.
        checkpointing: what is made again for a backward, or lies there until then.
        is_bounded: whether a limit says how much optimizer state is to lie there.
        predicts: whether forwards read optimizer state.
        has_feedback: whether the weights of the step before are kept.
    """
    if checkpointing == "offload":
        return
    given = f"disk={disk!r} with activation_checkpointing={checkpointing!r} and preset {preset!r}"
    if checkpointing == "optimal" or not is_bounded:
        raise ConfigurationError(
            f"{given}, whose workers keep what they have in memory; allowed: "
            "activation_checkpointing='offload', by which activations lie there, or "
            "memory_limit_bytes with 'never', 'always' or 'except_last', by which optimizer state "
            "does; use one of them, or leave disk out"
        )
    if predicts:
        raise ConfigurationError(
            f"{given}, whose forwards read optimizer state, to predict weights, so that it stays "
            "in memory; allowed: rules that read weights alone; use preset='pipedream_2bw', or "
            "leave disk out"
        )
    if has_feedback:
        raise ConfigurationError(
            f"error_feedback=True with disk={disk!r}, on which optimizer state lies, and whose "
            "limit does not count the copy of the weights; allowed: one of them; leave one out"
        )
