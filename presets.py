"""What happens to one image on its way into a batch: torchvision's presets, ending in uint8.

Normalisation and random erasing are cheaper on whole batches on the device, where `transforms.BatchTransform` does
them; the presets take their keyword arguments, as torchvision's do, and leave the work to it.
"""

import importlib
import io
from collections.abc import Callable

import numpy
import torch
from PIL import Image
from torch.nn import functional as F
from torchvision import transforms
from torchvision.transforms import InterpolationMode, autoaugment
from torchvision.transforms.functional import pil_to_tensor

from decode import ImageFile
from errors import UserError
from extras import require_timm

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


# What torch resizes in uint8 with antialiasing; Pillow does the others.
_RESIZABLE = {InterpolationMode.BILINEAR: "bilinear", InterpolationMode.BICUBIC: "bicubic"}


def resize(image: torch.Tensor, height: int, width: int, mode: str) -> torch.Tensor:
    """Resize (3, H, W) uint8 with antialiasing: within one grey level of Pillow's resize, at a third of its cost."""
    return F.interpolate(image[None], (height, width), mode=mode, antialias=True, align_corners=False)[0]


class _Preset:
    """A list of transforms from a PIL image to a (3, H, W) uint8 tensor, and a faster way to nearly the same pixels."""

    def __init__(
        self,
        steps: list,
        backend: str | None,
        interpolation: InterpolationMode,
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> None:
        if backend is not None and backend.lower() not in ("pil", "tensor"):
            raise ValueError(f"backend {backend!r}: expected 'pil', 'tensor' or None")
        to_tensor = transforms.PILToTensor()
        is_tensor = backend is not None and backend.lower() == "tensor"
        self.transforms = transforms.Compose([to_tensor, *steps] if is_tensor else [*steps, to_tensor])
        self.fast_mode = _RESIZABLE.get(interpolation) if backend is None else None
        self.mean = mean
        self.std = std

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """Return the image as (3, crop_size, crop_size) uint8."""
        return self.transforms(image)

    def load(self, payload: bytes) -> torch.Tensor:
        """Return a file's image as (3, crop_size, crop_size) uint8, decoding no more of it than is needed."""
        if self.fast_mode is None:
            return self(Image.open(io.BytesIO(payload)).convert("RGB"))
        return self._load_fast(ImageFile(payload))

    def _load_fast(self, file: ImageFile) -> torch.Tensor:
        raise NotImplementedError


class ClassificationPresetTrain(_Preset):
    """Random crop and flip, then the augmentation policy, with torchvision's defaults, boxes and flips.

    Draws from torch's global generator, which `data.py` seeds for each image, in torchvision's order.

    Args:
        crop_size: side of the square that comes out, px.
        mean: of each channel, for the batch's normalisation.
        std: of each channel, likewise.
        interpolation: of the resize, and of the policy's geometric operations.
        hflip_prob: odds of a mirrored image.
        crop_scale: smallest share of the image's area that a crop shows.
        auto_augment_policy: ra, ta_wide, augmix, a value of torchvision's `AutoAugmentPolicy`, or timm/SPECIFICATION;
            None for none.
        ra_magnitude: of ra.
        augmix_severity: of augmix.
        random_erase_prob: odds of an erased rectangle, for the batch's erasing.
        backend: what resizes: pil (Pillow), tensor (torchvision's, antialiased), or None: the fast way of `load`, whose
            pixels are within one grey level of Pillow's.
        use_v2: accepted as torchvision's; both its versions draw and compute the same here.
    """

    def __init__(
        self,
        *,
        crop_size: int,
        mean: tuple[float, ...] = IMAGENET_MEAN,
        std: tuple[float, ...] = IMAGENET_STD,
        interpolation: InterpolationMode = InterpolationMode.BILINEAR,
        hflip_prob: float = 0.5,
        crop_scale: float = 0.08,
        auto_augment_policy: str | None = None,
        ra_magnitude: int = 9,
        augmix_severity: int = 3,
        random_erase_prob: float = 0.0,
        backend: str | None = None,
        use_v2: bool = False,
    ) -> None:
        scale = (crop_scale, 1.0)
        self.crop = transforms.RandomResizedCrop(crop_size, scale=scale, interpolation=interpolation, antialias=True)
        steps = [self.crop]
        if hflip_prob > 0:
            steps.append(transforms.RandomHorizontalFlip(hflip_prob))
        policy = _policy(auto_augment_policy, crop_size, interpolation, ra_magnitude, augmix_severity, mean)
        if policy is not None:
            steps.append(policy)
        super().__init__(steps, backend, interpolation, mean, std)
        self.crop_size = crop_size
        self.hflip_prob = hflip_prob
        self.policy = policy
        self.random_erase_prob = random_erase_prob

    def _load_fast(self, file: ImageFile) -> torch.Tensor:
        # torchvision draws the box of anything that has a size; an image on the meta device has nothing else.
        sized = torch.empty(3, *file.size[::-1], device="meta", dtype=torch.uint8)
        box = self.crop.get_params(sized, self.crop.scale, self.crop.ratio)
        pixels = resize(file.decode(*box), self.crop_size, self.crop_size, self.fast_mode)
        if self.hflip_prob > 0 and torch.rand(1) < self.hflip_prob:
            pixels = pixels.flip(-1)
        if self.policy is None:
            return pixels
        return pil_to_tensor(self.policy(Image.fromarray(pixels.permute(1, 2, 0).numpy())))

    def at(self, epoch: int) -> "ClassificationPresetTrain":
        """Return the preset of an epoch: this one."""
        return self


class ProgressivePreset:
    """A training preset whose crops grow during the run (Tan and Le, arXiv 2104.00298; Leclerc et al., FFCV).

    Args:
        build: makes the preset of a crop size, given as `crop_size`.
        smallest: crop size until epoch `first`, px.
        largest: crop size from epoch `last` on, px.
        first: epoch from which crops grow, linearly and in multiples of 32 px.
        last: epoch at which they have grown.
    """

    def __init__(
        self, build: Callable[..., ClassificationPresetTrain], *, smallest: int, largest: int, first: int, last: int
    ) -> None:
        self.build = build
        self.smallest, self.largest, self.first, self.last = smallest, largest, first, last
        self._presets = {}

    def size_at(self, epoch: int) -> int:
        """Return the crop size of an epoch, px."""
        progress = min(max((epoch - self.first) / (self.last - self.first), 0.0), 1.0)
        if progress in (0.0, 1.0):
            return self.largest if progress else self.smallest
        return round((self.smallest + (self.largest - self.smallest) * progress) / 32) * 32

    def at(self, epoch: int) -> ClassificationPresetTrain:
        """Return the preset of an epoch."""
        size = self.size_at(epoch)
        if size not in self._presets:
            self._presets[size] = self.build(crop_size=size)
        return self._presets[size]


def _policy(
    name: str | None,
    crop_size: int,
    interpolation: InterpolationMode,
    ra_magnitude: int,
    augmix_severity: int,
    mean: tuple[float, ...],
) -> Callable[[Image.Image], Image.Image] | None:
    """Return the augmentation policy of a name, or None."""
    if name is None:
        return None
    if name == "ra":
        return autoaugment.RandAugment(interpolation=interpolation, magnitude=ra_magnitude)
    if name == "ta_wide":
        return autoaugment.TrivialAugmentWide(interpolation=interpolation)
    if name == "augmix":
        return autoaugment.AugMix(interpolation=interpolation, severity=augmix_severity)
    if name.startswith("timm/"):
        return TimmPolicy(name, crop_size, interpolation, mean)
    return autoaugment.AutoAugment(policy=autoaugment.AutoAugmentPolicy(name), interpolation=interpolation)


class TimmPolicy:
    """One of timm's augmentation policies, such as rand-m7-mstd0.5-inc1, drawing from the process's CPU generators.

    Args:
        name: timm/ and the specification.
        crop_size: side of the images, px, of which timm takes its translations.
        interpolation: of the geometric operations.
        mean: of each channel; what they fill in.

    Raises:
        UserError: timm does not know it or is not there.
    """

    def __init__(
        self, name: str, crop_size: int, interpolation: InterpolationMode, mean: tuple[float, ...] = IMAGENET_MEAN
    ) -> None:
        timm = require_timm("--auto-augment", name)
        auto_augment = importlib.import_module(f"{timm.__name__}.data.auto_augment")
        resampling = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
        options = {
            "translate_const": int(crop_size * 0.45),
            "img_mean": tuple(min(255, round(255 * value)) for value in mean),
            "interpolation": resampling.get(interpolation.value, Image.Resampling.NEAREST),
        }
        specification = name.removeprefix("timm/")
        kinds = {"rand": "rand_augment_transform", "augmix": "augment_and_mix_transform"}
        build = getattr(auto_augment, kinds.get(specification.split("-")[0], "auto_augment_transform"))
        try:
            self.policy = build(specification, options)
        except (AssertionError, KeyError, ValueError) as error:
            raise UserError(f"--auto-augment {name}: timm does not know this specification ({error})") from error

    def __call__(self, image: Image.Image) -> Image.Image:
        """Augment one image. timm draws from numpy's generator as well, so that is seeded from torch's."""
        numpy.random.seed(int(torch.randint(1 << 32, ())))
        return self.policy(image)


class ClassificationPresetEval(_Preset):
    """Resize the shorter side and cut the centre, with torchvision's defaults and its pixels.

    Args:
        crop_size: side of the square that comes out, px.
        resize_size: shorter side before the cut, px.
        mean: of each channel, for the batch's normalisation.
        std: of each channel, likewise.
        interpolation: of the resize.
        backend: what resizes: pil (Pillow), tensor (torchvision's, antialiased), or None: the fast way of `load`, whose
            pixels are within one grey level of Pillow's.
        use_v2: accepted as torchvision's; changes nothing.
    """

    def __init__(
        self,
        *,
        crop_size: int,
        resize_size: int = 256,
        mean: tuple[float, ...] = IMAGENET_MEAN,
        std: tuple[float, ...] = IMAGENET_STD,
        interpolation: InterpolationMode = InterpolationMode.BILINEAR,
        backend: str | None = None,
        use_v2: bool = False,
    ) -> None:
        self.cut = transforms.CenterCrop(crop_size)
        steps = [transforms.Resize(resize_size, interpolation=interpolation, antialias=True), self.cut]
        super().__init__(steps, backend, interpolation, mean, std)
        self.resize_size = resize_size

    def _load_fast(self, file: ImageFile) -> torch.Tensor:
        width, height = file.size
        # torchvision's arithmetic: the shorter side exactly, the longer one rounded down.
        short, long = min(width, height), max(width, height)
        longer = int(self.resize_size * long / short)
        size = (longer, self.resize_size) if height >= width else (self.resize_size, longer)
        return self.cut(resize(file.decode(0, 0, height, width), *size, self.fast_mode))
