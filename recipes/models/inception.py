"""Inception-V3 without torchvision and without the auxiliary head.

Source: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision",
arXiv 1512.00567, section 6; the widths are those of torchvision. The blocks are named A to E as
they are there. Shapes: N images, C channels, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torch import nn

from recipes.models.branches import Branches, convolution
from recipes.models.resnet import Stem

_WIDTH = 32  # channels of the first convolution
_SMALLEST = 75  # pixels that survive all strides


def inception_v3(
    *, channels: int, num_classes: int, stem: Stem, width: int = _WIDTH, dropout: float = 0.5
) -> nn.Sequential:
    """Make Inception-V3 (23.8 M parameters with 1,000 classes).

    Args:
        channels: Channels of the images.
        num_classes: Number of logits.
        stem: ``"imagenet"``; there is no form for the small images of ``"cifar"``.
        width: Channels of the first convolution; all other widths follow it.
        dropout: Share of the features that is dropped before the logits.

    Raises:
        ValueError: For small images.
    """
    if stem != "imagenet":
        raise ValueError(
            f"Inception-V3 takes images of at least {_SMALLEST} pixels, stem {stem!r} stands for "
            "smaller ones; allowed: data sets with stem imagenet (data=tiny_imagenet)"
        )
    blocks = _Blocks(lambda published: max(1, published * width // _WIDTH))
    net = nn.Sequential(*blocks.stem(channels))
    for pooled in (32, 64, 64):
        net.append(blocks.a(pooled))
    net.append(blocks.b())
    for inner in (128, 160, 160, 192):
        net.append(blocks.c(inner))
    net.extend([blocks.d(), blocks.e(), blocks.e()])
    net.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Dropout(dropout), nn.Flatten()))
    net.append(nn.Linear(blocks.inputs, num_classes))
    return net


@final
class _Blocks:
    """Make one block after the other; each takes the channels that the last one gave.

    Args:
        scale: Maps a published number of channels to that of this network.
    """

    def __init__(self, scale: Callable[[int], int]) -> None:
        self.scale = scale
        self.inputs = 0

    def stem(self, channels: int) -> list[nn.Module]:
        """Shrink the image eight times, to 192 channels."""
        first, second, third, last = (self.scale(size) for size in (32, 64, 80, 192))
        self.inputs = last
        return [
            convolution(channels, first, 3, stride=2),
            convolution(first, first, 3),
            convolution(first, second, 3, padding=1),
            nn.MaxPool2d(3, stride=2),
            convolution(second, third, 1),
            convolution(third, last, 3),
            nn.MaxPool2d(3, stride=2),
        ]

    def a(self, pooled: int) -> Branches:
        """1x1, 5x5 and twice 3x3."""
        return self._join(
            self._chain((64, 1)),
            self._chain((48, 1), (64, 5)),
            self._chain((64, 1), (96, 3), (96, 3)),
            self._pooled(pooled),
        )

    def b(self) -> Branches:
        """Halve H and W."""
        kept = self.inputs
        return self._join(
            self._chain((384, 3), halve=True),
            self._chain((64, 1), (96, 3), (96, 3), halve=True),
            (nn.MaxPool2d(3, stride=2), kept),
        )

    def c(self, inner: int) -> Branches:
        """7x7 cut into rows and columns, once and twice."""
        row, column = (1, 7), (7, 1)
        return self._join(
            self._chain((192, 1)),
            self._chain((inner, 1), (inner, row), (192, column)),
            self._chain((inner, 1), (inner, column), (inner, row), (inner, column), (192, row)),
            self._pooled(192),
        )

    def d(self) -> Branches:
        """Halve H and W once more."""
        kept = self.inputs
        return self._join(
            self._chain((192, 1), (320, 3), halve=True),
            self._chain((192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3), halve=True),
            (nn.MaxPool2d(3, stride=2), kept),
        )

    def e(self) -> Branches:
        """3x3 whose rows and columns stand side by side."""
        return self._join(
            self._chain((320, 1)),
            self._forked((384, 1)),
            self._forked((448, 1), (384, 3)),
            self._pooled(192),
        )

    def _join(self, *branches: tuple[nn.Module, int]) -> Branches:
        self.inputs = sum(outputs for _, outputs in branches)
        return Branches(branch for branch, _ in branches)

    def _chain(
        self, *layers: tuple[int, int | tuple[int, int]], halve: bool = False
    ) -> tuple[nn.Sequential, int]:
        """Put convolutions (channels, size) behind each other; the last one may halve H and W."""
        chain = nn.Sequential()
        inputs = self.inputs
        for index, (published, size) in enumerate(layers):
            outputs = self.scale(published)
            if halve and index == len(layers) - 1:
                chain.append(convolution(inputs, outputs, size, stride=2))
            else:
                chain.append(convolution(inputs, outputs, size, padding=_same(size)))
            inputs = outputs
        return chain, inputs

    def _forked(self, *layers: tuple[int, int]) -> tuple[nn.Sequential, int]:
        chain, inputs = self._chain(*layers)
        outputs = self.scale(384)
        fork = [
            convolution(inputs, outputs, size, padding=_same(size)) for size in ((1, 3), (3, 1))
        ]
        return chain.append(Branches(fork)), 2 * outputs

    def _pooled(self, published: int) -> tuple[nn.Sequential, int]:
        outputs = self.scale(published)
        pool = nn.AvgPool2d(3, stride=1, padding=1)
        return nn.Sequential(pool, convolution(self.inputs, outputs, 1)), outputs


def _same(size: int | tuple[int, int]) -> int | tuple[int, int]:
    """Return the padding that keeps H and W."""
    return size // 2 if isinstance(size, int) else (size[0] // 2, size[1] // 2)
