"""Coded weights: an owner sends what a new version adds to the last one, made smaller by a codec.

    version   what all have alike, and compute with
    left      what it lacks: the owner's alone
    exact     version + left, for as long as the optimizer updates it
    sent      codec(exact - version v), which all add to version v, the owner as well

What a codec leaves out of one version is in the next difference, so it needs no memory of its own.
Parameters that a codec does not take lack nothing. What others change of weights between steps,
where nobody refuses it, counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.codecs.base import AbstractCodec
from lightning_cyclic.runtime.codecs.choice import CODECS
from lightning_cyclic.runtime.codecs.coded import check_sent
from lightning_cyclic.runtime.codecs.sparse import TopK

NAMES: Final = tuple(CODECS)


def weight_codec_of(given: str | AbstractCodec) -> AbstractCodec:
    """Return the codec of weights that a user chose.

    Raises:
        ConfigurationError: it keeps what it leaves out by itself.
    """
    codec = CODECS[given]() if isinstance(given, str) else given
    if codec.has_memory and not isinstance(codec, TopK):  # whose memory is as good as empty
        raise ConfigurationError(
            f"compress={{'weights': {codec!r}}}, which keeps what it leaves out, as new weights "
            "do already: it would be sent twice; allowed: codecs without a memory, "
            f"{', '.join(map(repr, NAMES))}, and TopK; use TopK(density=0.01)"
        )
    return codec


@final
class CodedWeights:
    """Keep what versions lack of the weights that a worker updates, and encode what they add.

    Args:
        codec: by which.
    """

    def __init__(self, codec: AbstractCodec) -> None:
        self.codec = codec
        self._left: dict[nn.Parameter, Tensor] = {}
        self._sent: dict[nn.Parameter, list[Tensor]] = {}  # of the newest version

    @contextmanager
    def updating(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Let the body, which updates parameters, have exact ones; then make a version of them.

        Args:
            parameters: hold the version before.
        """
        coded = [p for p in parameters if self.codec.takes(p)]
        versions = [p.detach().clone() for p in coded]
        for p in coded:
            if p in self._left:
                p.data.add_(self._left[p])
        yield
        for p, version in zip(coded, versions, strict=True):
            added = p.detach() - version
            self._sent[p] = sent = list(self.codec.encode(added, {}))
            check_sent(self.codec, "what a weight has changed by", added, sent)
            like = torch.empty_like(version, device="meta")
            new = version + self.codec.decode(sent, like)
            self._left[p] = p.detach() - new
            p.data.copy_(new)

    def take_sent(self, p: nn.Parameter) -> list[Tensor]:
        """Return what is to be sent of the version that has just been made."""
        return self._sent.pop(p)

    def state(self, named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return name -> what it lacks, of the weights that this worker updates."""
        return {n: self._left[p] for n, p in named.items() if p in self._left}

    def put_state(self, state: Mapping[str, Tensor], named: Mapping[str, nn.Parameter]) -> None:
        """Take what weights lack from a checkpoint, and forget all else."""
        self._left = {p: state[n].to(p.device, copy=True) for n, p in named.items() if n in state}

    def keep_trained(self) -> None:
        """Forget what weights lack that are trained no longer, and stay as all have them."""
        self._left = {p: x for p, x in self._left.items() if p.requires_grad}
