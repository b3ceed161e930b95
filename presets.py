"""Transforms of one image: torchvision's presets, and a faster way to nearly the same pixels.

Called on an image, a preset returns normalised floats, as torchvision's does. Its `load` returns uint8: normalisation
and random erasing are cheaper on whole batches on the device, where `transforms.BatchTransform` does them.
"""

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar

import torch
from PIL import Image
from torch.nn import functional as F
from torchvision import transforms
from torchvision.transforms import InterpolationMode, autoaugment, functional, v2

from errors import UserError, in_one_line
from loading.decode import MODES, Decoding, ImageFile, decode_plainly, resized_size
from randomness import Draws, TorchDraws, seed_host, unit
from settings.choices import POLICIES
from settings.config import IMAGENET_MEAN, IMAGENET_STD
from settings.custom_code import load_function
from settings.options import split_custom

# torch resizes uint8 with antialiasing only in these modes; Pillow resizes in the others.
_RESIZABLE = {InterpolationMode.BILINEAR: "bilinear", InterpolationMode.BICUBIC: "bicubic"}

# Smallest and largest ratio of a crop's width to its height: torchvision's.
_RATIOS = 3 / 4, 4 / 3
_LOG_RATIOS = math.log(_RATIOS[0]), math.log(_RATIOS[1])


# Standard deviations of the blur: SimCLR's (Chen et al., arXiv 2002.05709, appendix A) and timm's. Their kernel, 23 px
# at 224 px, takes 1.6 times as long as this one of three deviations to either side, which is within a grey level of it.
_BLUR_SIGMAS, _BLUR_SIDE = (0.1, 2.0), 13


def get_module(use_v2: bool) -> Any:
    """Return the module of torchvision's transforms, version 1 or 2, for your own scripts."""
    return importlib.import_module("torchvision.transforms.v2" if use_v2 else "torchvision.transforms")


def resize(image: torch.Tensor, height: int, width: int, mode: str) -> torch.Tensor:
    """Resize (C, H, W) uint8 with antialiasing, mostly within one grey level of Pillow, at a third of its cost.

    Returns:
        (C, height, width) uint8, in channels-last order if the image is.
    """
    return F.interpolate(_as_batch(image), (height, width), mode=mode, antialias=True, align_corners=False)[0]


def _as_batch(image: torch.Tensor) -> torch.Tensor:
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
    for _ in range(10):
        area_bits, ratio_bits = draws.pair()
        area = height * width * (smallest + (1.0 - smallest) * unit(area_bits))
        ratio = math.exp(_LOG_RATIOS[0] + (_LOG_RATIOS[1] - _LOG_RATIOS[0]) * unit(ratio_bits))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            top_bits, left_bits = draws.pair()
            return top_bits % (height - box_height + 1), left_bits % (width - box_width + 1), box_height, box_width
    # Ten boxes did not fit: as much of the centre as the ratios allow.
    box_height, box_width = min(height, round(width / _RATIOS[0])), min(width, round(height * _RATIOS[1]))
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
    random_erase_prob: ClassVar[float] = 0.0
    crop_modes: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        self.backend = self.backend and self.backend.lower()
        for name, known in (("backend", ("pil", "tensor", None)), ("crop_mode", self.crop_modes)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r}: expected one of {', '.join(map(repr, known))}")
        steps, to_tensor = self._steps(), transforms.PILToTensor()
        steps = [to_tensor, *steps] if self.backend == "tensor" else [*steps, to_tensor]
        finish = [transforms.ConvertImageDtype(torch.float), transforms.Normalize(self.mean, self.std)]
        if self.random_erase_prob > 0:
            fill = "random" if self.random_erase_fill == "pixel" else 0
            finish.append(transforms.RandomErasing(self.random_erase_prob, value=fill))
        self.transforms = transforms.Compose([*steps, *finish])  # torchvision's; split in two below
        self.to_pixels, self.finish = transforms.Compose(steps), transforms.Compose(finish)
        # Pillow weighs colours by alpha when it resizes, and torch does not.
        is_fast = self.backend is None and self.in_chans != 4
        self.fast_mode = _RESIZABLE.get(self.interpolation) if is_fast else None
        self.decoding = Decoding(MODES[self.in_chans], self.exif, self.grey_range)

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """Return (in_chans, crop_size, crop_size) float32, normalised, as torchvision's preset does.

        Draws from the process's generators.
        """
        return self.finish(self.pixels(image))

    def pixels(self, image: Image.Image) -> torch.Tensor:
        """Return an image as (in_chans, crop_size, crop_size) uint8, drawing from the process's generators."""
        return self.to_pixels(image)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and the width to which an image is resized before the cut."""
        if self.crop_mode == "border":  # rounded as in timm
            ratio = max(height, width) / self.resize_size
            return max(round(height / ratio), 1), max(round(width / ratio), 1)
        if self.crop_mode == "center":
            return resized_size(height, width, self.resize_size)
        return self.resize_size, self.resize_size

    def _resize(self, image: Image.Image | torch.Tensor) -> Image.Image | torch.Tensor:
        _, height, width = functional.get_dimensions(image)
        return functional.resize(image, self._resized(height, width), self.interpolation, antialias=True)

    def _cut(self, image: Image.Image | torch.Tensor) -> Image.Image | torch.Tensor:
        """Return the centre of an image; beside a smaller one all is black or, with a `border`, the mean colour."""
        if self.crop_mode == "border":
            rows, columns = (max(self.crop_size - side, 0) for side in functional.get_dimensions(image)[1:])
            padding = [columns // 2, rows // 2, columns - columns // 2, rows - rows // 2]
            image = v2.functional.pad(image, padding, [round(255 * value) for value in self.mean])
        return functional.center_crop(image, self.crop_size)

    def load(self, payload: bytes, draws: Draws | None = None) -> torch.Tensor:
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
        return self._load_fast(ImageFile(payload, self.decoding), draws or TorchDraws())


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
        self.hflip_prob = self.hflip_prob if self.hflip_mode == "random" else 0.0
        super().__post_init__()

    def _steps(self) -> list:
        scale, how = (self.crop_scale, 1.0), {"interpolation": self.interpolation, "antialias": True}
        self.resize_size = self.crop_size
        is_random = self.crop_mode == "random"
        steps = [transforms.RandomResizedCrop(self.crop_size, scale, **how)] if is_random else [self._resize, self._cut]
        if self.hflip_prob > 0:
            steps.append(transforms.RandomHorizontalFlip(self.hflip_prob))
        on_images = []
        if self.auto_augment_policy is not None:
            on_images.append(self._build_policy(self.auto_augment_policy))
        if self.color_jitter > 0:
            on_images.append(transforms.ColorJitter(*3 * [self.color_jitter]))
        if self.grayscale_prob > 0:
            on_images.append(transforms.RandomGrayscale(self.grayscale_prob))
        if self.blur_prob > 0:
            blur = transforms.GaussianBlur(_BLUR_SIDE, _BLUR_SIGMAS)
            on_images.append(transforms.RandomApply([blur], self.blur_prob))
        self.policy = transforms.Compose(on_images) if on_images else None
        return steps + on_images

    def _build_policy(self, name: Any) -> Callable[[Image.Image], Image.Image]:
        """Return the augmentation policy with this name, or the function itself."""
        if callable(name):
            from loading.policies import own_policy

            return own_policy(name)
        if name.startswith("timm/"):
            from loading.policies import TimmPolicy

            return TimmPolicy(name, self.crop_size, self.interpolation, self.mean)
        name = getattr(name, "value", name)  # torchvision's own enumeration
        if name not in POLICIES:
            raise ValueError(f"augmentation policy {name!r}: expected {', '.join(POLICIES)} or timm/SPECIFICATION")
        policy = POLICIES[name]
        given = {option: getattr(self, option) for option in policy.options}
        return policy.load()(interpolation=self.interpolation, **given, **policy.constants)

    @property
    def takes_draws(self) -> bool:
        """Whether box and flip are all that is drawn."""
        return self.fast_mode is not None and self.policy is None

    def _load_fast(self, file: ImageFile, draws: Draws | TorchDraws) -> torch.Tensor:
        width, height = file.size
        is_random = self.crop_mode == "random"
        box = draw_box(height, width, self.crop_scale, draws) if is_random else (0, 0, height, width)
        is_mirrored = self.hflip_prob > 0 and draws.uniform() < self.hflip_prob
        pixels = file.decode(*box)
        if is_mirrored:
            pixels = pixels.flip(-1)  # before the resize, which would copy the box anyway
        pixels = resize(pixels, *self._resized(height, width), self.fast_mode)
        if self.crop_mode == "border":
            pixels = self._cut(pixels)
        if self.policy is None:
            return pixels
        return functional.pil_to_tensor(self.policy(Image.fromarray(pixels.permute(1, 2, 0).squeeze(-1).numpy())))


class ProgressivePreset:
    """A training preset whose crops grow during the run (Tan and Le, arXiv 2104.00298; Leclerc et al., FFCV).

    Args:
        build: makes the preset for a `crop_size`.
        smallest: crop size until epoch `first`, px.
        largest: crop size from epoch `last` on, px.
        first: epoch from which crops grow, linearly, rounded to multiples of 32 px.
        last: epoch from which crops no longer grow.
    """

    def __init__(
        self, build: Callable[..., ClassificationPresetTrain], *, smallest: int, largest: int, first: int, last: int
    ) -> None:
        self.build = cache(build)
        self.smallest, self.largest, self.first, self.last = smallest, largest, first, last

    def size_at(self, epoch: int) -> int:
        """Return the crop size of an epoch, px."""
        progress = min(max((epoch - self.first) / (self.last - self.first), 0.0), 1.0)
        if progress in (0.0, 1.0):
            return self.largest if progress else self.smallest
        size = round((self.smallest + (self.largest - self.smallest) * progress) / 32) * 32
        return min(max(size, self.smallest), self.largest)

    def at(self, epoch: int) -> ClassificationPresetTrain:
        """Return the preset of an epoch."""
        return self.build(crop_size=self.size_at(epoch))


def auto_augment(interpolation: InterpolationMode, dataset: str) -> autoaugment.AutoAugment:
    """Return the policy that was learned on a data set: cifar10, imagenet or svhn."""
    return autoaugment.AutoAugment(autoaugment.AutoAugmentPolicy(dataset), interpolation)


def rand_augment(interpolation: InterpolationMode, ra_magnitude: int) -> autoaugment.RandAugment:
    """Return RandAugment."""
    return autoaugment.RandAugment(magnitude=ra_magnitude, interpolation=interpolation)


def augmix(interpolation: InterpolationMode, augmix_severity: int) -> autoaugment.AugMix:
    """Return AugMix."""
    return autoaugment.AugMix(severity=augmix_severity, interpolation=interpolation)


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
    crop_mode: str = "center"
    crop_modes: ClassVar = ("center", "squash", "border")
    takes_draws: ClassVar = True  # it draws nothing at all

    def _steps(self) -> list:
        return [self._resize, self._cut]

    def _load_fast(self, file: ImageFile, draws: Draws | TorchDraws) -> torch.Tensor:
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
    return size if end * new_size // size == end else end, cut


def find_policy(args: Any) -> Any:
    """Return the value of `--auto-augment`; for FILE.py:FUNCTION what the function returns, tried on some images."""
    if not split_custom(args.auto_augment or ""):
        return args.auto_augment
    from loading.policies import own_policy

    with in_one_line(f"--auto-augment {args.auto_augment}"):
        policy = load_function("auto_augment", args)()
        image = Image.effect_noise((args.train_crop_size, args.train_crop_size), 64).convert("RGB")
        for seed in range(8):
            if len({seed_host(seed) or own_policy(policy)(image.copy()).tobytes() for _ in range(2)}) > 1:
                raise UserError("different pixels with the same seed: draw by torch, numpy or random; keep no state")
    return policy


def build_presets(args: Any) -> tuple[_Preset | ProgressivePreset, ClassificationPresetEval]:
    """Return the presets for training and for evaluation."""
    training = {"auto_augment_policy": find_policy(args), "random_erase_prob": args.random_erase, "crop_mode": "random"}
    if args.train_crop_mode == "whole":
        training["crop_mode"] = "border" if args.crop_mode == "border" else "squash"

    def build(preset: type[_Preset], **others: Any) -> _Preset:
        """Return a preset whose other arguments are the options of the same names."""
        options = {each.name: getattr(args, each.name) for each in fields(preset) if each.name in args}
        return preset(**options | {"interpolation": InterpolationMode(args.interpolation)} | others)

    def build_train(crop_size: int) -> _Preset:
        if args.augment:
            return build(ClassificationPresetTrain, crop_size=crop_size, **training)
        resize_size = round(crop_size * args.val_resize_size / args.val_crop_size)  # the centre that evaluation shows
        return build(ClassificationPresetEval, crop_size=crop_size, resize_size=resize_size)

    train = build_train(args.train_crop_size)
    if args.crop_ramp_epochs is not None:
        first, last = args.crop_ramp_epochs
        sizes = {"smallest": args.train_crop_size_min, "largest": args.train_crop_size}
        train = ProgressivePreset(build_train, **sizes, first=first, last=last)
    return train, build(ClassificationPresetEval, crop_size=args.val_crop_size, resize_size=args.val_resize_size)
