"""ResNets without torchvision: ResNet-18, -50, -101, Wide ResNet-101, a small one for 8x8 digits.

Shapes: N images, C channels, H x W pixels.
Source: He et al., "Deep Residual Learning for Image Recognition", arXiv 1512.03385; Zagoruyko and
Komodakis, "Wide Residual Networks", arXiv 1605.07146.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

from torch import Tensor, nn

Stem = Literal["imagenet", "cifar"]


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Make a convolution that keeps H x W (over the stride), and the BatchNorm behind it."""
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Residual(nn.Module):
    """Add a branch to its input, and to a projection of it where the shapes differ."""

    def __init__(self, branch: nn.Module, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        same_shape = inputs == outputs and stride == 1
        self.branch = branch
        self.shortcut = nn.Identity() if same_shape else convolution(inputs, outputs, 1, stride)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, outputs, H / stride, W / stride)."""
        return self.activation(self.branch(x) + self.shortcut(x))


@final
class BasicBlock(Residual):
    """Two 3x3 convolutions: the block of ResNet-18."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        branch = nn.Sequential(
            convolution(inputs, width, 3, stride), nn.ReLU(), convolution(width, width, 3)
        )
        super().__init__(branch, inputs, width, stride)


@final
class Bottleneck(Residual):
    """1x1, 3x3, 1x1 convolutions with four times the width at the end: ResNet-50's block."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__(*_bottleneck(inputs, width, width * self.expansion, stride))


@final
class WideBottleneck(Residual):
    """The same, with 1x1 and 3x3 convolutions of twice the width: the block of wide ResNets."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__(*_bottleneck(inputs, 2 * width, width * self.expansion, stride))


def _bottleneck(
    inputs: int, inner: int, outputs: int, stride: int
) -> tuple[nn.Module, int, int, int]:
    """Return a branch, and what a residual block is told of it."""
    branch = nn.Sequential(
        convolution(inputs, inner, 1),
        nn.ReLU(),
        convolution(inner, inner, 3, stride),
        nn.ReLU(),
        convolution(inner, outputs, 1),
    )
    return branch, inputs, outputs, stride


@final
class ResNet(nn.Module):
    """Stack groups of residual blocks; each group but the first halves H and W.

    Args:
        block: Class of the residual blocks.
        depths: Number of blocks of each group; the width doubles from group to group.
        channels: Channels of the images.
        num_classes: Number of logits.
        width: Width of the first group.
        stem: ``"imagenet"`` shrinks the image four times before the first group (7x7
            convolution and pooling, both of stride 2); ``"cifar"`` keeps small images as they are.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck] | type[WideBottleneck],
        depths: Sequence[int],
        *,
        channels: int,
        num_classes: int,
        width: int,
        stem: Stem,
    ) -> None:
        super().__init__()
        self.stem = _stem(channels, width, stem)
        self.groups = nn.Sequential()
        inputs = width
        for index, depth in enumerate(depths):
            inner = width * 2**index
            strides = [1 if index == 0 else 2] + [1] * (depth - 1)
            blocks = []
            for stride in strides:
                blocks.append(block(inputs, inner, stride))
                inputs = inner * block.expansion
            self.groups.append(nn.Sequential(*blocks))
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, C, H, W) to logits (N, num_classes)."""
        return self.head(self.groups(self.stem(images)))


def _stem(channels: int, width: int, stem: Stem) -> nn.Sequential:
    if stem == "cifar":
        return nn.Sequential(convolution(channels, width, 3), nn.ReLU())
    if stem == "imagenet":
        pool = nn.MaxPool2d(3, stride=2, padding=1)
        return nn.Sequential(convolution(channels, width, 7, stride=2), nn.ReLU(), pool)
    raise ValueError(f"stem {stem!r} is unknown; allowed: imagenet, cifar")


def digits_resnet(*, channels: int, num_classes: int, stem: Stem, width: int = 16) -> ResNet:
    """Make a ResNet of three groups of one block each, for images of a few pixels."""
    return ResNet(
        BasicBlock, (1, 1, 1), channels=channels, num_classes=num_classes, width=width, stem=stem
    )


def resnet18(*, channels: int, num_classes: int, stem: Stem, width: int = 64) -> ResNet:
    """Make ResNet-18 (11.7 M parameters with 1,000 classes)."""
    return ResNet(
        BasicBlock,
        (2, 2, 2, 2),
        channels=channels,
        num_classes=num_classes,
        width=width,
        stem=stem,
    )


def resnet50(*, channels: int, num_classes: int, stem: Stem, width: int = 64) -> ResNet:
    """Make ResNet-50 (25.6 M parameters with 1,000 classes)."""
    return ResNet(
        Bottleneck,
        (3, 4, 6, 3),
        channels=channels,
        num_classes=num_classes,
        width=width,
        stem=stem,
    )


def resnet101(*, channels: int, num_classes: int, stem: Stem, width: int = 64) -> ResNet:
    """Make ResNet-101 (44.5 M parameters with 1,000 classes)."""
    return ResNet(
        Bottleneck,
        (3, 4, 23, 3),
        channels=channels,
        num_classes=num_classes,
        width=width,
        stem=stem,
    )


def wide_resnet101(*, channels: int, num_classes: int, stem: Stem, width: int = 64) -> ResNet:
    """Make Wide ResNet-101, of factor 2 (126.9 M parameters with 1,000 classes)."""
    return ResNet(
        WideBottleneck,
        (3, 4, 23, 3),
        channels=channels,
        num_classes=num_classes,
        width=width,
        stem=stem,
    )
