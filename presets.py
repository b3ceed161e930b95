"""Transforms of one image: torchvision's presets, and a faster way to nearly the same pixels.

Called on an image, a preset returns normalised floats, as torchvision's does. Its `load` returns uint8: normalisation
and random erasing are cheaper on whole batches on the device, where `loading/on_device.py` does them.
"""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision import transforms
from torchvision.transforms import InterpolationMode, functional, v2

from errors import as_user_error
from loading.decode import MODES, Decoding, ImageFile, decode_plainly, resized_size
from randomness import Draws, TorchDraws, unit
from settings.config import IMAGENET_MEAN, IMAGENET_STD
from settings.custom_code import load_function
from settings.options import AugmentationOptions, DataOptions
from settings.rules import split_custom

# torch resizes uint8 with antialiasing only in these modes; Pillow resizes in the others.
_RESIZABLE = {InterpolationMode.BILINEAR: "bilinear", InterpolationMode.BICUBIC: "bicubic"}

# Smallest and largest ratio of a crop's width to its height: torchvision's.
_RATIOS = 3 / 4, 4 / 3
_LOG_RATIOS = math.log(_RATIOS[0]), math.log(_RATIOS[1])

Picture = TypeVar("Picture", Image.Image, Tensor)
Preset = TypeVar("Preset", bound="_Preset")


def get_module(use_v2: bool) -> Any:
    """Return the module of torchvision's transforms, version 1 or 2, for your own scripts."""
    return importlib.import_module("torchvision.transforms.v2" if use_v2 else "torchvision.transforms")


def resize(image: Tensor, height: int, width: int, mode: str) -> Tensor:
    """Resize (C, H, W) uint8 with antialiasing, mostly within one grey level of Pillow, at a third of its cost.

    Returns:
        (C, height, width) uint8, in channels-last order if the image is.
    """
    return F.interpolate(_as_batch(image), (height, width), mode=mode, antialias=True, align_corners=False)[0]


def _as_batch(image: Tensor) -> Tensor:
    """Return (1, C, H, W), with a first stride by which torch recognises the memory format."""
    strides = image.stride()
    return image.as_strided((1, *image.shape), (image.shape[1] * strides[1], *strides))


def draw_box(height: int, width: int, smallest: float, draws: Draws | TorchDraws) -> tuple[int, int, int, int]:
    """Draw the box of torchvision's `RandomResizedCrop`: with `TorchDraws` the same box, from as many random numbers.

    One box in 10,000 to 300,000 differs, more often in large images: torchvision computes in float32, rounded as the
    processor does it, and where that makes a side a pixel longer or shorter the box lies elsewhere. torchvision draws
    from the process's generator only, and takes several times as long.

    Args:
        height: of the image, px.
        width: of the image, px.
        smallest: smallest share of the image's area.
        draws: the source of random numbers.

    Returns:
        (top, left, height, width), px.
    """
    # As often as torchvision tries; an image that is much longer than wide may need more, or fit no box at all.
    for _ in range(10):
        # The share of the area is uniform, the ratio in its logarithm: 3 / 4 and 4 / 3 are then equally likely.
        area_bits, ratio_bits = draws.pair()
        area = height * width * (smallest + (1.0 - smallest) * unit(area_bits))
        ratio = math.exp(_LOG_RATIOS[0] + (_LOG_RATIOS[1] - _LOG_RATIOS[0]) * unit(ratio_bits))
        box_width = round(math.sqrt(area * ratio))
        box_height = round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            top_bits, left_bits = draws.pair()
            # By the remainder, as torch.randint does it, so that the same numbers give the same place.
            return top_bits % (height - box_height + 1), left_bits % (width - box_width + 1), box_height, box_width
    # Ten boxes did not fit: as much of the centre as the ratios allow.
    box_height = min(height, round(width / _RATIOS[0]))
    box_width = min(width, round(height * _RATIOS[1]))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


@dataclass(kw_only=True, eq=False)
class _Preset:
    """A list of transforms of a PIL image, those of `_steps`, and a faster way to nearly the same pixels: `_load_fast`.

    A preset's `takes_draws` tells whether `load` draws from its argument `draws` alone.
    """

    crop_size: int
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    interpolation: InterpolationMode = InterpolationMode.BILINEAR
    backend: str | None = None
    use_v2: bool = False
    in_chans: int = 3
    exif: bool = False
    grey_range: Sequence[int] | None = None
    crop_mode: str
    resize_size: int = field(init=False, repr=False)  # side before the cut
    crop_modes: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        if self.backend:
            self.backend = self.backend.lower()
        for name, known in [("backend", ("pil", "tensor", None)), ("crop_mode", self.crop_modes)]:
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name} {value!r}: expected one of {', '.join(map(repr, known))}")
        steps = self._steps()
        # An index: torchvision's tensor backend resizes tensors, and its other one PIL images.
        steps.insert(0 if self.backend == "tensor" else len(steps), transforms.PILToTensor())
        finish = [transforms.ConvertImageDtype(torch.float), transforms.Normalize(self.mean, self.std)]
        self.transforms = transforms.Compose([*steps, *finish])  # torchvision's name for all; split in two below
        self.to_pixels = transforms.Compose(steps)
        self.finish = transforms.Compose(finish)
        self.fast_mode = None
        # Pillow weighs colours by alpha when it resizes, and torch does not.
        if self.backend is None and self.in_chans != 4:
            self.fast_mode = _RESIZABLE.get(self.interpolation)
        self.decoding = Decoding(MODES[self.in_chans], self.exif, self.grey_range)

    def _steps(self) -> list:
        raise NotImplementedError

    def _load_fast(self, file: ImageFile, draws: Draws | TorchDraws) -> Tensor:
        raise NotImplementedError

    def __call__(self, image: Image.Image) -> Tensor:
        """Return (in_chans, crop_size, crop_size) float32, normalised, as torchvision's preset does.

        Draws from the process's generators.
        """
        return self.finish(self.pixels(image))

    def pixels(self, image: Image.Image) -> Tensor:
        """Return an image as (in_chans, crop_size, crop_size) uint8, drawing from the process's generators."""
        return self.to_pixels(image)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and the width to which an image is resized before the cut."""
        if self.crop_mode == "border":  # rounded as in timm
            ratio = max(height, width) / self.resize_size
            return max(round(height / ratio), 1), max(round(width / ratio), 1)
        if self.crop_mode == "center":
            return resized_size(height, width, self.resize_size)
        return self.resize_size, self.resize_size  # squash

    def _resize(self, image: Picture) -> Picture:
        _, height, width = functional.get_dimensions(image)
        # Pillow always smooths; tensors were resized without, by torchvision's default before 0.17.
        return functional.resize(image, self._resized(height, width), self.interpolation, antialias=True)

    def _cut(self, image: Picture) -> Picture:
        """Return the centre of an image; beside a smaller one all is black or, with a `border`, the mean colour."""
        if self.crop_mode == "border":
            _, height, width = functional.get_dimensions(image)
            rows = max(self.crop_size - height, 0)
            columns = max(self.crop_size - width, 0)
            padding = [columns // 2, rows // 2, columns - columns // 2, rows - rows // 2]
            # Version 1 fills a tensor with one number, and the mean has a number for each channel.
            image = v2.functional.pad(image, padding, [round(255 * value) for value in self.mean])
        return functional.center_crop(image, self.crop_size)

    def load(self, payload: bytes, draws: Draws | None = None) -> Tensor:
        """Return a file's image as (in_chans, crop_size, crop_size) uint8, decoding no more of it than is needed.

        Args:
            payload: the file's bytes.
            draws: the source of box and flip, where `takes_draws`; by default torch's process-wide generator.

        Raises:
            BadImageError: the file is no image, claims too many pixels, or is damaged.
            MemoryError: there is not enough memory.
        """
        if self.fast_mode is None:
            return self.pixels(decode_plainly(payload, how=self.decoding))
        return self._load_fast(ImageFile(payload, self.decoding), TorchDraws() if draws is None else draws)


@dataclass(kw_only=True, eq=False)
class ClassificationPresetTrain(_Preset):
    """Random crop and flip, then the augmentation policy, with torchvision's defaults, boxes and flips.

    It draws in torchvision's order from torch's process-wide generator, or from the `draws` of `load`; policies draw
    from the process-wide generators only. `data.py` seeds either for each image.

    Arguments are torchvision's, sizes in px, mean and deviation of values from 0 to 1; and:

    Args:
        crop_scale: smallest share of the image's area that a crop shows.
        auto_augment_policy: ra, ta_wide, augmix, a value of torchvision's `AutoAugmentPolicy`, timm/SPECIFICATION, or a
            function of an image.
        random_erase_fill: zero, or pixel for normal noise.
        color_jitter: brightness, contrast and saturation change by factors from 1 minus this to 1 plus this.
        grayscale_prob: probability that the colours go.
        blur_prob: probability of a Gaussian blur.
        backend: pil (resize by Pillow), tensor (by torchvision, antialiased), or None: the fast way of `load`, whose
            pixels are within one grey level of Pillow's, rarely two; bicubic ones, of Pillow's before version 13.
        use_v2: no effect, since both versions of torchvision's transforms draw and compute the same.
        in_chans: channels of an image: 1 grey, 3 colour, 4 with alpha. `load` converts files, a call no image.
        exif: `load` turns images as their EXIF orientation says.
        grey_range: samples of grey images of more than 8 bits that `load` makes 0 and 255.
        crop_mode: `random`, or the whole image: `squash` or `border`, as in `ClassificationPresetEval`.
        hflip_mode: `random`; or `alternating`: `data.py` flips each image in every second epoch, and a preset none.
    """

    hflip_prob: float = 0.5
    hflip_mode: str = "random"
    crop_scale: float = 0.08
    auto_augment_policy: Any = None
    ra_magnitude: int = 9
    augmix_severity: int = 3
    random_erase_prob: float = 0.0
    random_erase_fill: str = "zero"
    color_jitter: float = 0.0
    grayscale_prob: float = 0.0
    blur_prob: float = 0.0
    crop_mode: str = "random"
    crop_modes: ClassVar = ("random", "squash", "border")

    def __post_init__(self) -> None:
        if self.hflip_mode not in ("random", "alternating"):
            raise ValueError(f"hflip_mode {self.hflip_mode!r}: expected random or alternating")
        if self.hflip_mode == "alternating":
            self.hflip_prob = 0.0
        super().__post_init__()
        # After the normalisation, as in torchvision: 0 is then the mean colour.
        if self.random_erase_prob > 0:
            fill = "random" if self.random_erase_fill == "pixel" else 0
            for steps in (self.transforms, self.finish):
                steps.transforms.append(transforms.RandomErasing(self.random_erase_prob, value=fill))

    def _steps(self) -> list:
        self.resize_size = self.crop_size
        steps = [self._resize, self._cut]
        if self.crop_mode == "random":
            how = {"scale": (self.crop_scale, 1.0), "interpolation": self.interpolation, "antialias": True}
            steps = [transforms.RandomResizedCrop(self.crop_size, **how)]
        if self.hflip_prob > 0:
            steps.append(transforms.RandomHorizontalFlip(self.hflip_prob))
        on_images = []
        if self.auto_augment_policy is not None:
            from loading.augmentations import build_policy

            on_images.append(build_policy(self))
        if self.color_jitter > 0 or self.grayscale_prob > 0 or self.blur_prob > 0:
            from loading.augmentations import colour_steps

            on_images += colour_steps(self.color_jitter, self.grayscale_prob, self.blur_prob)
        self.policy = transforms.Compose(on_images) if on_images else None
        return steps + on_images

    @property
    def takes_draws(self) -> bool:
        """Whether box and flip are all that is drawn."""
        # `Draws` cost less than seeding torch's generator for each image, from which policies can draw alone.
        return self.fast_mode is not None and self.policy is None

    def _load_fast(self, file: ImageFile, draws: Draws | TorchDraws) -> Tensor:
        width, height = file.size
        box = 0, 0, height, width
        if self.crop_mode == "random":
            box = draw_box(height, width, self.crop_scale, draws)
        # Drawn after the box, and not at all if images are never flipped: the numbers of torchvision's transforms.
        is_mirrored = self.hflip_prob > 0 and draws.uniform() < self.hflip_prob
        # After the draws: the box is known from the file's header, and only the rows that it needs are decoded.
        pixels = file.decode(*box)
        if is_mirrored:
            pixels = pixels.flip(-1)  # before the resize, which would copy the box anyway
        pixels = resize(pixels, *self._resized(height, width), self.fast_mode)
        if self.crop_mode == "border":
            pixels = self._cut(pixels)
        if self.policy is None:
            return pixels
        image = Image.fromarray(pixels.permute(1, 2, 0).squeeze(-1).numpy())
        return functional.pil_to_tensor(self.policy(image))


@dataclass(kw_only=True, eq=False)
class ClassificationPresetEval(_Preset):
    """Resize, and cut the centre, with torchvision's defaults; draws nothing.

    Args:
        crop_size: side of the square that comes out, px.
        resize_size: shorter side before the cut, px; with other crop modes see there.
        mean: this and all other arguments but `crop_mode` are those of `ClassificationPresetTrain`.
        crop_mode: as timm's: `center`; `squash`, both sides are resized to `resize_size`; `border`, the longer side is,
            and the mean colour fills the rest of the square.
    """

    resize_size: int = 256
    random_erase_prob: ClassVar[float] = 0.0
    crop_mode: str = "center"
    crop_modes: ClassVar = ("center", "squash", "border")
    takes_draws: ClassVar = True  # it draws nothing at all

    def _steps(self) -> list:
        return [self._resize, self._cut]

    def _load_fast(self, file: ImageFile, draws: Draws | TorchDraws) -> Tensor:
        width, height = file.size
        resized = self._resized(height, width)
        if min(resized) < self.crop_size:  # smaller images are padded
            return self._cut(resize(file.decode(0, 0, height, width), *resized, self.fast_mode))
        # Decode the part that the cut shows, and all above and to the left of it, to keep the phase of the resize.
        bottom, top_cut = _span(height, resized[0], self.crop_size, self.fast_mode)
        right, left_cut = _span(width, resized[1], self.crop_size, self.fast_mode)
        pixels = _as_batch(file.decode(0, 0, bottom, right))
        # Slightly enlarged, lest torch round a side down to a pixel less.
        scale_factor = (resized[0] + 1e-6) / height, (resized[1] + 1e-6) / width
        pixels = F.interpolate(pixels, scale_factor=scale_factor, mode=self.fast_mode, antialias=True)[0]
        return pixels[:, top_cut : top_cut + self.crop_size, left_cut : left_cut + self.crop_size]


def _span(size: int, new_size: int, crop_size: int, mode: str) -> tuple[int, int]:
    """Return the pixels of a side that its resized centre of `crop_size` needs, and where the centre begins, resized.

    The side is resized from `size` to `new_size`.
    """
    cut = round((new_size - crop_size) / 2.0)  # torchvision's rounding
    scale = size / new_size
    # The filter's reach beside a pixel, and one more pixel for rounding.
    reach = math.ceil(max(scale, 1.0) * (1 if mode == "bilinear" else 2)) + 1
    end = min(math.ceil((cut + crop_size) * scale) + reach, size)
    # torch would copy, not resize, a part that is enlarged by less than a pixel; so take the whole side.
    if end * new_size // size == end:
        end = size
    return end, cut


def find_policy(augmentation: AugmentationOptions) -> Any:
    """Return the value of `--auto-augment`; for FILE.py:FUNCTION what the function returns, tried on some images."""
    if not split_custom(augmentation.auto_augment or ""):
        return augmentation.auto_augment
    from loading.augmentations import try_policy

    with as_user_error(f"--auto-augment {augmentation.auto_augment}"):
        # Before training: a policy that keeps a state would give a resumed run other images than an unbroken one.
        policy = load_function("auto_augment", augmentation.auto_augment)()
        try_policy(policy, augmentation.train_crop_size)
    return policy


def build_presets(data_options: DataOptions, augmentation: AugmentationOptions) -> tuple[Any, ClassificationPresetEval]:
    """Return the presets for training, one or a `ProgressivePreset` of them, and for evaluation."""
    crop_mode = "random"
    if augmentation.train_crop_mode == "whole":
        crop_mode = "border" if augmentation.crop_mode == "border" else "squash"
    training = {"random_erase_prob": augmentation.random_erase, "crop_mode": crop_mode}
    training["auto_augment_policy"] = find_policy(augmentation)
    values = {**vars(data_options), **vars(augmentation)}

    def build(preset: type[Preset], **others: Any) -> Preset:
        """Return a preset whose other arguments are the options of the same names."""
        options = {each.name: values[each.name] for each in fields(preset) if each.name in values}
        options["interpolation"] = InterpolationMode(augmentation.interpolation)
        return preset(**options | others)

    def build_train(crop_size: int) -> _Preset:
        if augmentation.augment:
            return build(ClassificationPresetTrain, crop_size=crop_size, **training)
        # The centre that evaluation shows.
        resize_size = round(crop_size * augmentation.val_resize_size / augmentation.val_crop_size)
        return build(ClassificationPresetEval, crop_size=crop_size, resize_size=resize_size)

    train: Any = build_train(augmentation.train_crop_size)
    if augmentation.crop_ramp_epochs is not None:
        from loading.growing_crops import ProgressivePreset

        first, last = augmentation.crop_ramp_epochs
        sizes = {"smallest": augmentation.train_crop_size_min, "largest": augmentation.train_crop_size}
        train = ProgressivePreset(build_train, **sizes, first=first, last=last)
    val = {"crop_size": augmentation.val_crop_size, "resize_size": augmentation.val_resize_size}
    return train, build(ClassificationPresetEval, **val)
