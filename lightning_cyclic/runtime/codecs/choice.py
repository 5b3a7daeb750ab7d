"""The codecs that have a name: dtypes, in which sums travel, and those of gradients.

"fp32", "bf16", "fp16"    sums of gradients are rounded where they are sent (gradient_store.py)
other names               the gradient of each worker is encoded, and sent to its owner
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from lightning_cyclic.runtime.codecs.base import AbstractCodec
from lightning_cyclic.runtime.codecs.blocks import Int8
from lightning_cyclic.runtime.gradient_store import WIRE_DTYPES

CODECS: Final[Mapping[str, Callable[[], AbstractCodec]]] = {"int8": Int8}
NAMES: Final = (*WIRE_DTYPES, *CODECS)


def codec_of(compress: str | AbstractCodec | None) -> AbstractCodec | None:
    """Return what encodes single gradients; None where they, or sums of them, are as they are."""
    if compress is None or isinstance(compress, AbstractCodec):
        return compress
    return CODECS[compress]() if compress in CODECS else None
