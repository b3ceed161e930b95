"""Augmentation policies of timm's, and the user's own."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy
import torch
from PIL import Image, ImageOps
from torchvision.transforms import InterpolationMode

from errors import ImageError, UserError, one_line
from settings.packages import require_timm


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Keep `bits` bits of each channel. timm's own function passes 0 on, which Pillow refuses from version 13 on."""
    if bits < 1:
        return Image.new(image.mode, image.size)
    return ImageOps.posterize(image, min(bits, 8))


class TimmPolicy:
    """One of timm's augmentation policies, timm/ and a specification such as rand-m7-mstd0.5-inc1.

    It draws from the process's CPU generators, translates by shares of the crop size, and fills gaps with the mean.
    UserError if timm does not know it.
    """

    def __init__(self, name: str, crop_size: int, interpolation: InterpolationMode, mean: tuple[float, ...]) -> None:
        timm = require_timm("--auto-augment", name)
        auto_augment = importlib.import_module(f"{timm.__name__}.data.auto_augment")
        resampling = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
        options = {
            "translate_const": int(crop_size * 0.45), "img_mean": tuple(min(255, round(255 * value)) for value in mean),
            "interpolation": resampling.get(interpolation.value, Image.Resampling.NEAREST),
        }  # fmt: skip
        specification = name.removeprefix("timm/")
        kinds = {"rand": "rand_augment_transform", "augmix": "augment_and_mix_transform"}
        build = getattr(auto_augment, kinds.get(specification.split("-")[0], "auto_augment_transform"))
        try:
            self.policy = build(specification, options)
        except (AssertionError, KeyError, ValueError) as error:
            raise UserError(f"--auto-augment {name}: timm does not know this specification ({error})") from error
        ops = getattr(self.policy, "ops", None) or [op for ops in getattr(self.policy, "policy", []) for op in ops]
        for op in ops:
            if getattr(op, "aug_fn", None) is auto_augment.posterize:
                op.aug_fn = _posterize

    def __call__(self, image: Image.Image) -> Image.Image:
        """Augment one image; seeds numpy's generator, from which timm draws as well, from torch's."""
        # An image's draws depend on its address alone, and that seeds torch's generator; numpy's would go on from image
        # to image.
        numpy.random.seed(int(torch.randint(1 << 32, ())))
        return self.policy(image)


def own_policy(function: Callable[[Image.Image], Image.Image]) -> Callable[[Image.Image], Image.Image]:
    """Return a function of the user's own, from one PIL image to another, with numpy's generator seeded before a call.

    It raises ImageError if that fails, or returns anything but an image of the same size and mode.
    """

    def augment(image: Image.Image) -> Image.Image:
        numpy.random.seed(int(torch.randint(1 << 32, ())))
        try:
            result = function(image)
        except (Exception, SystemExit) as error:  # no fault of the image
            raise ImageError(one_line(f"--auto-augment has failed: {type(error).__name__}: {error}")) from error
        found = (result.size, result.mode) if isinstance(result, Image.Image) else result
        if found != (image.size, image.mode):
            wanted = f"a PIL image of {image.size} in mode {image.mode}"
            raise ImageError(one_line(f"--auto-augment returned {found!r:.80}, expected {wanted}"))
        return result

    return augment
