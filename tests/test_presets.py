"""Pixels of the presets: torchvision's own, in every bit."""

import io
from functools import partial

import pytest
import torch
from PIL import Image
from timm.data.transforms_factory import transforms_imagenet_train
from torchvision import transforms as tv
from torchvision.transforms import InterpolationMode, autoaugment
from torchvision.transforms.functional import pil_to_tensor

import data
import presets
from randomness import Draws, TorchDraws, seed_host, unit
from settings import config
from tests.images import encoded, picture

SIZES = [(67, 45), (33, 80), (50, 50), (19, 24)]  # width, height; the last is smaller than the crop
MODES = ["BILINEAR", "BICUBIC", "NEAREST"]
NORMALIZE = [tv.ConvertImageDtype(torch.float), tv.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
# As torchvision's reference preset builds them.
POLICIES = {
    None: None,
    "ra": partial(autoaugment.RandAugment, magnitude=7),
    "ta_wide": autoaugment.TrivialAugmentWide,
    "augmix": partial(autoaugment.AugMix, severity=2),
    **{each.value: partial(autoaugment.AutoAugment, each) for each in autoaugment.AutoAugmentPolicy},
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["pil", "PIL", "tensor"])
def test_evaluation_pixels_are_torchvisions(size, mode, backend):
    image, interpolation = picture(*size), InterpolationMode[mode]
    resize, crop = tv.Resize(36, interpolation=interpolation, antialias=True), tv.CenterCrop(32)
    steps = [tv.PILToTensor(), resize, crop] if backend == "tensor" else [resize, crop, tv.PILToTensor()]
    preset = presets.ClassificationPresetEval(
        crop_size=32, resize_size=36, interpolation=interpolation, backend=backend, use_v2=backend == "tensor"
    )
    pixels = preset.pixels(image)
    assert (pixels.shape, pixels.dtype) == ((3, 32, 32), torch.uint8)
    assert torch.equal(pixels, tv.Compose(steps)(image))
    assert torch.equal(preset(image), tv.Compose([*steps, *NORMALIZE])(image))


@pytest.mark.parametrize("backend", ["pil", "tensor"])
@pytest.mark.parametrize("policy", POLICIES)
def test_training_pixels_are_torchvisions_for_the_same_seed(policy, backend):
    interpolation = InterpolationMode.BICUBIC if policy is None else InterpolationMode.BILINEAR
    has_jitter = policy == "ta_wide"
    steps = [
        tv.RandomResizedCrop(32, scale=(0.3, 1.0), interpolation=interpolation, antialias=True),
        tv.RandomHorizontalFlip(0.4),
        *([POLICIES[policy](interpolation=interpolation)] if policy else []),
        *([tv.ColorJitter(0.3, 0.3, 0.3), tv.RandomGrayscale(0.4)] if has_jitter else []),
        *([tv.RandomApply([tv.GaussianBlur(13, (0.1, 2.0))], 0.6)] if has_jitter else []),
    ]
    steps = [tv.PILToTensor(), *steps] if backend == "tensor" else [*steps, tv.PILToTensor()]
    oracle = tv.Compose([*steps, *NORMALIZE, tv.RandomErasing(0.5)])
    preset = presets.ClassificationPresetTrain(
        crop_size=32, interpolation=interpolation, hflip_prob=0.4, crop_scale=0.3, auto_augment_policy=policy,
        ra_magnitude=7, augmix_severity=2, random_erase_prob=0.5, color_jitter=0.3 * has_jitter,
        grayscale_prob=0.4 * has_jitter, blur_prob=0.6 * has_jitter, backend=backend,
        use_v2=backend == "tensor",  # which changes no pixel
    )  # fmt: skip
    image, results = picture(67, 45), []
    for seed in range(8):
        torch.manual_seed(seed)
        results.append(preset(image))
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(results[-1], oracle(image))
        assert torch.equal(state, torch.get_rng_state())  # and nothing more was drawn
    assert (results[0].dtype, results[0].shape) == (torch.float32, (3, 32, 32))
    assert not torch.equal(results[0], results[1])


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (20, 300), (300, 20), (1, 1), (3, 2), (224, 224)])
@pytest.mark.parametrize("scale", [0.08, 0.9])
def test_boxes_are_torchvisions_for_the_same_state(size, scale):
    height, width = size
    image = torch.empty(3, height, width, device="meta")
    num_others = 0
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        expected = tv.RandomResizedCrop.get_params(image, (scale, 1.0), (3 / 4, 4 / 3))
        num_others += presets.draw_box(height, width, scale, TorchDraws(generator)) != tuple(expected)
        assert torch.equal(generator.get_state(), torch.get_rng_state())
    assert num_others <= 1  # rounded otherwise: none on most processors, 1 of 300,000 where it was counted


@pytest.mark.parametrize(
    ("option", "timms"), [("grayscale_prob", "grayscale_prob"), ("blur_prob", "gaussian_blur_prob")]
)
def test_grey_and_blurred_images_are_timms_within_a_level(option, timms):
    image = picture(224, 224)
    ours = presets.ClassificationPresetTrain(crop_size=224, **{option: 0.5}).policy
    theirs = transforms_imagenet_train(224, color_jitter=None, **{timms: 0.5}, separate=True)[1]
    changed = 0
    for seed in range(16):
        found, expected = (pil_to_tensor(seed_host(seed) or policy(image)).int() for policy in (ours, theirs))
        assert (found - expected).abs().max() <= 1
        changed += not torch.equal(found, pil_to_tensor(image).int())
    assert 3 <= changed <= 13


def test_without_augmentation_training_images_are_those_of_an_evaluation():
    others = "--hflip-prob 1 --auto-augment ra --color-jitter 1 --grayscale-prob 1 --blur-prob 1 --random-erase 1"
    sizes = "--train-crop-size 28 --val-crop-size 56 --val-resize-size 64 --train-crop-size-min 14"
    argv = f"--data-path d --device cpu --workers 0 --backend pil --no-augment --crop-ramp-epochs 0 1 {sizes} {others}"
    args, lines = config.on_machine(config.parse_args(argv.split()))
    assert sum(line.endswith("no effect without --augment") for line in lines) == 6
    train, image = presets.build_presets(args)[0], picture(67, 45)
    for epoch, (resized, crop) in enumerate([(16, 14), (32, 28)]):
        expected = tv.Compose([tv.Resize(resized), tv.CenterCrop(crop), tv.PILToTensor()])(image)
        assert torch.equal(train.at(epoch).load(encoded(image, "PNG"), Draws(0)), expected)
    assert data.build_batch_transforms(args, 10)[0].erase is None


@pytest.mark.parametrize("mode", ["BILINEAR", "BICUBIC"])
@pytest.mark.parametrize(("resize_size", "crop_size"), [(256, 224), (40, 32)])
def test_images_of_nearly_the_size_they_are_resized_to_are_torchvisions(resize_size, crop_size, mode):
    interpolation = InterpolationMode[mode]
    oracle = tv.Compose([tv.Resize(resize_size, interpolation), tv.CenterCrop(crop_size), tv.PILToTensor()])
    preset = presets.ClassificationPresetEval(crop_size=crop_size, resize_size=resize_size, interpolation=interpolation)
    generator = torch.Generator().manual_seed(resize_size)
    small = torch.randint(0, 256, (40, 40, 3), dtype=torch.uint8, generator=generator).numpy()
    for number, short in enumerate(range(resize_size - 3, resize_size + 4)):
        for size in [(short, short), (short, short * 4 // 3), (short + 1, short), (short * 9 // 5, short)]:
            image = Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)
            payload = encoded(image, "JPEG", quality=95, progressive=number % 2 == 1)
            difference = (preset.load(payload).int() - oracle(Image.open(io.BytesIO(payload))).int()).abs()
            # Both round twice, with weights of another precision: one pixel of a few 100,000 is off by two levels.
            assert difference.max() <= 2, size
            assert (difference > 1).sum() <= (1 if mode == "BILINEAR" else 50), size
            assert difference.float().mean() < 0.05, size


# The first numbers of splitmix64 from the state 0, as published with it (Vigna, splitmix64.c).
SPLITMIX64 = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_crops_of_any_size_grow_by_multiples_of_32_from_the_smallest_to_the_largest():
    """Both ends are as they were given, before, at and after the ramp."""
    crops = presets.ProgressivePreset(int, smallest=120, largest=170, first=1, last=5)
    assert [crops.size_at(epoch) for epoch in range(8)] == [120, 120, 128, 160, 160, 170, 170, 170]


def test_draws_are_splitmix64s():
    draws = Draws()
    assert [high << 32 | low for high, low in (draws.pair() for _ in SPLITMIX64)] == SPLITMIX64
    assert Draws().uniform() == unit(SPLITMIX64[0] >> 32)
