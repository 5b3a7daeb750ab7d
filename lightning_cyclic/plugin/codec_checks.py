"""What codecs of activations do not go with, before any process starts."""

from __future__ import annotations

from typing import Any

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.codecs.activations import crossing_codec_of


def check_crossing_codec(
    given: Any, preset: str, stages: object, *, cuts_steps: bool, is_one: bool
) -> None:
    """Refuse a codec of activations where none cross from stage to stage.

    Args:
        given: by the user.
        stages: as they were given.
        cuts_steps: whether workers have single stages.
        is_one: whether there is one stage.
    """
    crossing_codec_of(given)  # which refuses those of gradients alone
    what = f"compress={{'activations': {given!r}}}"
    if not cuts_steps:
        raise ConfigurationError(
            f"{what} with preset {preset!r}, whose workers run whole micro-batches, so that no "
            "activations are sent; allowed: presets of PipelineStrategy; use "
            f"PipelineStrategy('1f1b', {what}), or leave it out"
        )
    if is_one:
        raise ConfigurationError(
            f"{what} with stages={stages!r}, one stage, from which nothing crosses to another; "
            "allowed: two or more; use stages=2, or leave it out"
        )
