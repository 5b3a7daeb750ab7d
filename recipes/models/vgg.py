"""VGG-16 and VGG-19 without torchvision, for large and for small images.

Source: Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image
Recognition", arXiv 1409.1556, table 1, columns D and E.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from recipes.models.resnet import Stem

# convolutions, width over the first width
_VGG16 = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))
_VGG19 = ((2, 1), (2, 2), (4, 4), (4, 8), (4, 8))


def vgg16(
    *,
    channels: int,
    num_classes: int,
    stem: Stem,
    width: int = 64,
    batch_norm: bool = True,
    dropout: float = 0.5,
) -> nn.Sequential:
    """Make VGG-16 (138.4 M parameters with 1,000 classes).

    Args:
        channels: Channels of the images.
        num_classes: Number of logits.
        stem: ``"imagenet"`` has the three linear layers of the paper; ``"cifar"`` has one, as
            small images leave one pixel of 512 features.
        width: Channels of the first convolution; all other widths follow it.
        batch_norm: Put BatchNorm behind each convolution.
        dropout: Share of the features that is dropped behind each large linear layer.
    """
    features = _features(_VGG16, channels, width, batch_norm=batch_norm)
    return nn.Sequential(features, _head(stem, 8 * width, 64 * width, num_classes, dropout))


def vgg19(
    *,
    channels: int,
    num_classes: int,
    stem: Stem,
    width: int = 64,
    batch_norm: bool = True,
    dropout: float = 0.5,
) -> nn.Sequential:
    """Make VGG-19 (143.7 M parameters with 1,000 classes); arguments are those of VGG-16."""
    features = _features(_VGG19, channels, width, batch_norm=batch_norm)
    return nn.Sequential(features, _head(stem, 8 * width, 64 * width, num_classes, dropout))


def _features(
    groups: Sequence[tuple[int, int]], channels: int, width: int, *, batch_norm: bool
) -> nn.Sequential:
    features = nn.Sequential()
    inputs = channels
    for count, factor in groups:
        for _ in range(count):
            features.extend(_convolution(inputs, factor * width, batch_norm))
            inputs = factor * width
        features.append(nn.MaxPool2d(2))
    return features


def _head(stem: Stem, inputs: int, hidden: int, num_classes: int, dropout: float) -> nn.Sequential:
    if stem == "cifar":
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes))
    return _large_head(inputs, hidden, num_classes, dropout)


def _convolution(inputs: int, outputs: int, batch_norm: bool) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    nn.init.zeros_(convolution.bias)
    return [convolution, *([nn.BatchNorm2d(outputs)] if batch_norm else []), nn.ReLU()]


def _large_head(inputs: int, hidden: int, num_classes: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        *(nn.AdaptiveAvgPool2d(7), nn.Flatten()),
        *(nn.Linear(inputs * 7 * 7, hidden), nn.ReLU(), nn.Dropout(dropout)),
        *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout)),
        nn.Linear(hidden, num_classes),
    )
