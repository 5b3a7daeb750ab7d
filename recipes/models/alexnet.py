"""AlexNet without torchvision, in the form that torchvision made common.

Source: Krizhevsky, "One weird trick for parallelizing convolutional neural networks",
arXiv 1404.5997, section 5.
"""

from __future__ import annotations

from torch import nn

from recipes.models.resnet import Stem

_SMALLEST = 63  # pixels that survive all strides


def alexnet(
    *, channels: int, num_classes: int, stem: Stem, width: int = 64, dropout: float = 0.5
) -> nn.Sequential:
    """Make AlexNet (61.1 M parameters with 1,000 classes).

    Args:
        channels: Channels of the images.
        num_classes: Number of logits.
        stem: ``"imagenet"``; there is no form for the small images of ``"cifar"``.
        width: Channels of the first convolution; all other widths follow it.
        dropout: Share of the features that is dropped before the two large linear layers.

    Raises:
        ValueError: For small images.
    """
    if stem != "imagenet":
        raise ValueError(
            f"AlexNet takes images of at least {_SMALLEST} pixels, stem {stem!r} stands for "
            "smaller ones; allowed: data sets with stem imagenet (data=tiny_imagenet)"
        )
    sizes = [channels, width, 3 * width, 6 * width, 4 * width, 4 * width]
    hidden = 64 * width
    features = nn.Sequential(
        *(nn.Conv2d(sizes[0], sizes[1], 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(sizes[1], sizes[2], 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(sizes[2], sizes[3], 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(sizes[3], sizes[4], 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(sizes[4], sizes[5], 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
    )
    classifier = nn.Sequential(
        *(nn.Dropout(dropout), nn.Linear(sizes[5] * 6 * 6, hidden), nn.ReLU()),
        *(nn.Dropout(dropout), nn.Linear(hidden, hidden), nn.ReLU()),
        nn.Linear(hidden, num_classes),
    )
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(6), nn.Flatten(), classifier)
