"""A batch on the device: uint8 becomes normalised floats there, and is erased and mixed where that is chosen.

Images travel as uint8 for a quarter of the bytes of floats, from the loader's processes as well as to the device.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Normalize:
    """Turn (B, C, H, W) uint8 into float32 with the given mean and standard deviation of each channel.

    Args:
        mean: mean of each channel, of values from 0 to 1; `std` likewise.
        device: the device of the images.
        memory_format: the memory format of the result.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], device: torch.device,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:  # fmt: skip
        self.mean = torch.tensor(mean, device=device).view(-1, 1, 1)
        self.std = torch.tensor(std, device=device).view(-1, 1, 1)
        self.memory_format = memory_format

    def __call__(self, image: Tensor) -> Tensor:
        """Divide by 255 first, then normalise: the same order as in torchvision's presets, and so the same bits."""
        image = image.to(torch.float32, memory_format=self.memory_format)
        return image.div_(255).sub_(self.mean).div_(self.std)


@dataclass(eq=False)
class BatchTransform:
    """The device's half of a preset: uint8 in; normalised floats out, erased and mixed as `erase` and `mix` say.

    These are a `RandomErasing` and a `RandomMix` of `transforms.py`, or None. From the epoch `mix_off_epoch` on, if it
    is not 0, nothing is mixed.
    """

    normalize: Normalize
    erase: Any = None
    mix: Any = None
    mix_off_epoch: int = 0

    def __call__(self, image: Tensor, target: Tensor, rng: random.Random, epoch: int = 0) -> tuple[Tensor, Tensor]:
        """Transform (B, C, H, W) uint8 and (B,) int64 on the device, drawing from `rng`."""
        image = self.normalize(image)
        # torchvision's order: its preset erases each image after it is normalised, and its collate function then mixes.
        if self.erase is not None:
            image = self.erase(image, rng)
        is_over = self.mix_off_epoch and epoch >= self.mix_off_epoch
        if self.mix is not None and not is_over:
            image, target = self.mix.draw_and_mix(image, target, rng)
        return image.contiguous(memory_format=self.normalize.memory_format), target


def one_hot(target: Tensor, num_classes: int) -> Tensor:
    """Return (B, num_classes) bool of (B,) class indices. torch's `one_hot` reads them on a CPU, to check them."""
    return target[:, None] == torch.arange(num_classes, device=target.device)
