"""Random and fixed crops of images, on tensors of shape (C, H, W), with torch alone."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class PadCropFlip(NamedTuple):
    """Pad with black, cut a window at a random place, mirror every second image (CIFAR-10).

    Args:
        size: Height and width of the window, in pixels.
        padding: Border added on each side, in pixels.
    """

    size: int
    padding: int

    def __call__(self, image: Tensor) -> Tensor:
        """Map (C, H, W) to (C, size, size)."""
        padded = F.pad(image, [self.padding] * 4)
        top = _randint(padded.shape[-2] - self.size)
        left = _randint(padded.shape[-1] - self.size)
        return _flip(padded[:, top : top + self.size, left : left + self.size])


class ResizedCropFlip(NamedTuple):
    """Cut a window of random area and shape, resize it, mirror every second image (ImageNet).

    Args:
        size: Height and width of the result, in pixels.
        scale: Smallest and largest share of the image's area.
        ratio: Narrowest and widest window, as width over height.
        tries: How often to draw before the middle of the image is taken.

    Source: Szegedy et al., "Going Deeper with Convolutions", section 6, arXiv 1409.4842.
    """

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    tries: int = 10

    def __call__(self, image: Tensor) -> Tensor:
        """Map (C, H, W) to (C, size, size)."""
        area = image.shape[-2] * image.shape[-1]
        for _ in range(self.tries):
            ratio = math.exp(_uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
            target = area * _uniform(*self.scale)
            height, width = round(math.sqrt(target / ratio)), round(math.sqrt(target * ratio))
            if 0 < height <= image.shape[-2] and 0 < width <= image.shape[-1]:
                top, left = _randint(image.shape[-2] - height), _randint(image.shape[-1] - width)
                window = image[:, top : top + height, left : left + width]
                return _flip(_resize(window, self.size, self.size))
        return _flip(CenterCrop(self.size, self.size)(image))


class CenterCrop(NamedTuple):
    """Resize the shorter side, then cut the middle: what validation on ImageNet sees.

    Args:
        shorter: The shorter side after resizing, in pixels.
        size: Height and width of the window, in pixels, at most ``shorter``.
    """

    shorter: int
    size: int

    def __call__(self, image: Tensor) -> Tensor:
        """Map (C, H, W) to (C, size, size)."""
        factor = self.shorter / min(image.shape[-2:])
        height, width = (round(side * factor) for side in image.shape[-2:])
        resized = _resize(image, height, width)
        top, left = (height - self.size) // 2, (width - self.size) // 2
        return resized[:, top : top + self.size, left : left + self.size]


def _resize(image: Tensor, height: int, width: int) -> Tensor:
    batch = image.float().unsqueeze(0)
    resized = F.interpolate(batch, (height, width), mode="bilinear", antialias=True)
    return resized.squeeze(0)


def _flip(image: Tensor) -> Tensor:
    return image.flip(-1) if torch.rand(()) < 0.5 else image


def _randint(highest: int) -> int:
    return int(torch.randint(highest + 1, ()))


def _uniform(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(()))
