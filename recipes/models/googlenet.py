"""GoogLeNet with BatchNorm and without auxiliary heads, for large and for small images.

Source: Szegedy et al., "Going Deeper with Convolutions", arXiv 1409.4842, table 1. As in
torchvision and in PipeOptim's code, 3x3 convolutions take the place of the 5x5 ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from recipes.models.branches import Branches, convolution
from recipes.models.resnet import Stem

# Channels of each block: 1x1; 3x3 reduced, 3x3; 5x5 reduced, 5x5; behind the pooling.
_GROUPS = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)
_WIDTH = 192  # channels before the first block


def googlenet(*, channels: int, num_classes: int, stem: Stem, width: int = _WIDTH) -> nn.Module:
    """Make GoogLeNet (6.6 M parameters with 1,000 classes).

    Args:
        channels: Channels of the images.
        num_classes: Number of logits.
        stem: ``"imagenet"`` shrinks the image eight times before the first block; ``"cifar"``
            keeps small images as they are, and has two 3x3 convolutions for each 5x5.
        width: Channels before the first block; all other widths follow it.
    """

    def scale(published: int) -> int:
        return max(1, published * width // _WIDTH)

    net = nn.Sequential(_stem(channels, width, scale(64), stem))
    inputs = width
    padding = 0 if stem == "imagenet" else 1
    for index, group in enumerate(_GROUPS):
        if index > 0:
            net.append(nn.MaxPool2d(3, stride=2, padding=padding, ceil_mode=stem == "imagenet"))
        for published in group:
            sizes = [scale(size) for size in published]
            net.append(_block(inputs, sizes, deep=stem == "cifar"))
            inputs = sizes[0] + sizes[2] + sizes[4] + sizes[5]
    net.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    net.append(nn.Linear(inputs, num_classes))
    return net


def _stem(channels: int, width: int, first: int, stem: Stem) -> nn.Sequential:
    if stem == "cifar":
        return convolution(channels, width, 3, padding=1)
    return nn.Sequential(
        convolution(channels, first, 7, stride=2, padding=3),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        convolution(first, first, 1),
        convolution(first, width, 3, padding=1),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
    )


def _block(inputs: int, sizes: Sequence[int], *, deep: bool) -> Branches:
    one, three_in, three, five_in, five, pooled = sizes
    wide = nn.Sequential(convolution(inputs, five_in, 1), convolution(five_in, five, 3, padding=1))
    if deep:
        wide.append(convolution(five, five, 3, padding=1))
    return Branches(
        [
            convolution(inputs, one, 1),
            nn.Sequential(
                convolution(inputs, three_in, 1), convolution(three_in, three, 3, padding=1)
            ),
            wide,
            nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), convolution(inputs, pooled, 1)),
        ]
    )
