"""What may be done to a training image beside crop and flip: a policy, other colours, a blur."""

from collections.abc import Callable
from typing import Any

from PIL import Image
from torchvision import transforms
from torchvision.transforms import InterpolationMode, autoaugment

from errors import UserError
from randomness import seed_host
from settings.choices import POLICIES

# Standard deviations of the blur: SimCLR's (Chen et al., arXiv 2002.05709, appendix A) and timm's. Their kernel, 23 px
# at 224 px, takes 1.6 times as long as this one of three deviations to either side, which is within a grey level of it.
_BLUR_SIGMAS = 0.1, 2.0
_BLUR_SIDE = 13


def build_policy(preset: Any) -> Callable[[Image.Image], Image.Image]:
    """Return the policy that a `ClassificationPresetTrain` names, or the function that it has, with its options."""
    name = preset.auto_augment_policy
    if callable(name):
        from loading.policies import own_policy

        return own_policy(name)
    if name.startswith("timm/"):
        from loading.policies import TimmPolicy

        return TimmPolicy(name, preset.crop_size, preset.interpolation, preset.mean)
    name = getattr(name, "value", name)  # torchvision's own enumeration
    if name not in POLICIES:
        raise ValueError(f"augmentation policy {name!r}: expected {', '.join(POLICIES)} or timm/SPECIFICATION")
    policy = POLICIES[name]
    given = {option: getattr(preset, option) for option in policy.options}
    return policy.load()(interpolation=preset.interpolation, **given, **policy.constants)


def colour_steps(jitter: float, grayscale_prob: float, blur_prob: float) -> list[Callable]:
    """Return transforms of a PIL image, each if its number is above 0: jitter of colours, grey, Gaussian blur."""
    steps = []
    if jitter > 0:
        steps.append(transforms.ColorJitter(brightness=jitter, contrast=jitter, saturation=jitter))
    if grayscale_prob > 0:
        steps.append(transforms.RandomGrayscale(grayscale_prob))
    if blur_prob > 0:
        steps.append(transforms.RandomApply([transforms.GaussianBlur(_BLUR_SIDE, _BLUR_SIGMAS)], blur_prob))
    return steps


def auto_augment(interpolation: InterpolationMode, dataset: str) -> autoaugment.AutoAugment:
    """Return the policy that was learned on a data set: cifar10, imagenet or svhn."""
    return autoaugment.AutoAugment(autoaugment.AutoAugmentPolicy(dataset), interpolation)


def rand_augment(interpolation: InterpolationMode, ra_magnitude: int) -> autoaugment.RandAugment:
    """Return RandAugment."""
    return autoaugment.RandAugment(magnitude=ra_magnitude, interpolation=interpolation)


def augmix(interpolation: InterpolationMode, augmix_severity: int) -> autoaugment.AugMix:
    """Return AugMix."""
    return autoaugment.AugMix(severity=augmix_severity, interpolation=interpolation)


def try_policy(policy: Callable[[Image.Image], Image.Image], side: int) -> None:
    """Raise UserError if a policy of the user's own gives other pixels for the same seed, on noise with that side."""
    from loading.policies import own_policy

    augment = own_policy(policy)
    image = Image.effect_noise((side, side), 64).convert("RGB")
    # A few seeds, as a policy may do nothing to most images.
    for seed in range(8):
        results = set()
        for _ in range(2):
            seed_host(seed)
            results.add(augment(image.copy()).tobytes())
        if len(results) > 1:
            raise UserError("different pixels with the same seed: draw by torch, numpy or random; keep no state")
