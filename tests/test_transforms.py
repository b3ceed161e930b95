"""Pixels of the presets and what happens to a batch: torchvision's own, in every bit."""

import io
import random
from collections import Counter
from functools import partial

import pytest
import torch
from PIL import Image
from timm.data.transforms_factory import transforms_imagenet_train
from torchvision import transforms as tv
from torchvision.transforms import InterpolationMode, autoaugment, v2
from torchvision.transforms.functional import pil_to_tensor

import data
import presets
import transforms
from loading.growing_crops import ProgressivePreset
from loading.on_device import BatchTransform, Normalize
from randomness import Draws, TorchDraws, seed_host, unit
from settings import config
from tests.images import encoded, picture

NUM_CLASSES = 7


def batch(size=6, height=20, width=14):
    generator = torch.Generator().manual_seed(size)
    image = torch.randn(size, 3, height, width, generator=generator)
    return image, torch.randint(0, NUM_CLASSES, (size,), generator=generator)


def mix(mixer, image, target, rng):
    if isinstance(mixer, transforms.RandomMix):
        drawn = mixer.draw(image, rng)
        return drawn[0].mix(image, target, drawn[1]) if drawn else (image, target)
    return mixer.mix(image, target, mixer.draw(image, rng))


def is_torchvisions(oracle, image, target, mixed, **drawn):
    parameters = {"labels": target, "batch_size": len(target), **drawn}
    for found, each in zip(mixed, (image, target), strict=True):
        assert torch.equal(found, oracle(num_classes=NUM_CLASSES).transform(each, parameters))
    assert mixed[1].dtype == torch.float32


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.73, 1.0])
@pytest.mark.parametrize("size", [1, 2, 6])
def test_mixup_is_torchvisions_for_the_same_share(share, size):
    image, target = batch(size)
    mixed = transforms.RandomMixUp(num_classes=NUM_CLASSES).mix(image, target, transforms.pack_share(share))
    is_torchvisions(v2.MixUp, image, target, mixed, lam=share)


@pytest.mark.parametrize("mixing", [transforms.RandomMixUp, transforms.RandomCutMix])
@pytest.mark.parametrize("wrong", [{"alpha": 0.0}, {"alpha": -1.0}, {"num_classes": 0}])
def test_mixing_without_a_distribution_or_classes_is_refused_when_it_is_built(mixing, wrong):
    with pytest.raises(ValueError, match="expected numbers above 0"):
        mixing(**{"num_classes": NUM_CLASSES, **wrong})


@pytest.mark.parametrize("box", [(0, 0, 14, 20), (3, 5, 3, 5), (2, 4, 9, 13), (0, 0, 1, 20), (13, 19, 14, 20)])
def test_cutmix_is_torchvisions_for_the_same_box(box):
    image, target = batch()
    left, top, right, bottom = box
    mixed = transforms.RandomCutMix(num_classes=NUM_CLASSES).mix(image, target, transforms.pack_box(box, 20, 14))
    share = 1.0 - (right - left) * (bottom - top) / (14 * 20)
    is_torchvisions(v2.CutMix, image, target, mixed, box=box, lam_adjusted=share)


def test_each_image_is_mixed_by_draws_of_its_own():
    odds = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "prob": 0.7, "switch_prob": 0.25}
    mixing = transforms.get_mixup_cutmix(**odds, num_classes=64, mode="elem")
    image, target = torch.rand(64, 3, 10, 12, generator=torch.Generator().manual_seed(0)), torch.arange(64)
    neighbours, kinds = image.roll(1, 0), Counter()
    for seed in range(20):
        mixed, soft = mix(mixing, image, target, random.Random(seed))
        own = soft[target, target]
        assert torch.allclose(soft[target, target.roll(1)], 1 - own, atol=1e-6)
        share = own.view(-1, 1, 1, 1)
        is_blended = torch.isclose(mixed, image * share + neighbours * (1 - share), atol=1e-6).flatten(1).all(1)
        is_pasted = (mixed == neighbours).all(1)
        kept = ((mixed == image).all(1) | is_pasted).flatten(1).all(1)
        assert (is_blended | kept).all()
        assert torch.allclose(1 - is_pasted[kept].double().mean((1, 2)), own[kept].double(), atol=1e-6)
        kinds += Counter(none=int((own == 1).sum()), cut=int((kept & (own < 1)).sum()))
    # Four standard errors of 1,280 images; a rectangle of one in twenty is empty.
    assert kinds == pytest.approx({"none": 384, "cut": 224}, abs=75)


def test_a_batch_is_mixed_as_often_as_asked_until_its_last_epoch():
    odds = {"mixup_alpha": 1.0, "cutmix_alpha": 1.0, "prob": 0.5, "switch_prob": 0.25}
    normalize = Normalize((0.5,), (0.5,), torch.device("cpu"))
    mixing = transforms.get_mixup_cutmix(**odds, num_classes=2)
    batch = BatchTransform(normalize, mix=mixing, mix_off_epoch=5)
    image, target = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(-1, 1, 8, 8), torch.tensor([0, 1])
    kinds = Counter()
    for seed in range(2000):
        mixed, soft = batch(image, target, random.Random(seed), epoch=4)
        kinds["none" if soft.ndim == 1 else "cut" if mixed.abs().eq(1).all() else "mixup"] += 1
        after, same = batch(image, target, random.Random(seed), epoch=5)
        assert torch.equal(after, normalize(image))
        assert torch.equal(same, target)
    # Four standard errors of 2,000 draws.
    assert kinds == pytest.approx({"none": 1000, "cut": 250, "mixup": 750}, abs=90)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_batches_are_normalised_then_erased_then_mixed_in_the_memory_order_that_is_asked_for(order):
    values = (0.4, 0.5, 0.6), (0.2, 0.3, 0.1)
    transform = BatchTransform(
        Normalize(*values, torch.device("cpu"), order),
        transforms.RandomErasing(0.5),
        transforms.get_mixup_cutmix(mixup_alpha=0.2, cutmix_alpha=1.0, num_classes=NUM_CLASSES),
    )
    generator, target = torch.Generator().manual_seed(8), torch.arange(6)
    pixels = torch.randint(0, 256, (6, 3, 20, 14), dtype=torch.uint8, generator=generator)
    kept = pixels.clone()
    normalise = tv.Compose([tv.ConvertImageDtype(torch.float), tv.Normalize(*values)])
    for seed in range(10):
        rng = random.Random(seed)
        expected = torch.stack([normalise(image) for image in pixels])
        for one in expected:
            top, left, height, width = transform.erase.draw_box(20, 14, rng)
            one[:, top : top + height, left : left + width] = 0
        expected = mix(transform.mix, expected, target, rng)
        image, soft = transform(pixels, target, random.Random(seed))
        assert image.is_contiguous(memory_format=order)
        assert torch.equal(image, expected[0])
        assert torch.equal(soft, expected[1])
    assert torch.equal(pixels, kept)


NORMALIZE = [tv.ConvertImageDtype(torch.float), tv.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
POLICIES = {
    None: None,
    "ra": partial(autoaugment.RandAugment, magnitude=7),
    "ta_wide": autoaugment.TrivialAugmentWide,
    "augmix": partial(autoaugment.AugMix, severity=2),
    **{each.value: partial(autoaugment.AutoAugment, each) for each in autoaugment.AutoAugmentPolicy},
}


@pytest.mark.parametrize("size", [(67, 45), (33, 80), (50, 50), (19, 24)])  # the last is smaller than the crop
@pytest.mark.parametrize("mode", ["BILINEAR", "BICUBIC", "NEAREST"])
@pytest.mark.parametrize("backend", ["pil", "PIL", "tensor"])
def test_evaluation_pixels_are_torchvisions(size, mode, backend):
    image, interpolation = picture(*size), InterpolationMode[mode]
    resize, crop = tv.Resize(36, interpolation=interpolation, antialias=True), tv.CenterCrop(32)
    steps = [tv.PILToTensor(), resize, crop] if backend == "tensor" else [resize, crop, tv.PILToTensor()]
    options = {"interpolation": interpolation, "backend": backend, "use_v2": backend == "tensor"}
    preset = presets.ClassificationPresetEval(crop_size=32, resize_size=36, **options)
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


@pytest.mark.parametrize("option", ["grayscale_prob", "blur_prob"])
def test_grey_and_blurred_images_are_timms_within_a_level(option):
    timms = option.replace("blur", "gaussian_blur")
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
    train, image = presets.build_presets(args.data, args.augmentation)[0], picture(67, 45)
    for epoch, (resized, crop) in enumerate([(16, 14), (32, 28)]):
        expected = tv.Compose([tv.Resize(resized), tv.CenterCrop(crop), tv.PILToTensor()])(image)
        assert torch.equal(train.at(epoch).load(encoded(image, "PNG"), Draws(0)), expected)
    assert (
        data.build_batch_transforms(args.augmentation, args.precision.channels_last, 10, torch.device("cpu"))[0].erase
        is None
    )


# The first numbers of splitmix64 from the state 0, as published with it (Vigna, splitmix64.c).
SPLITMIX64 = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_crops_of_any_size_grow_by_multiples_of_32_from_the_smallest_to_the_largest():
    crops = ProgressivePreset(int, smallest=120, largest=170, first=1, last=5)
    assert [crops.size_at(epoch) for epoch in range(8)] == [120, 120, 128, 160, 160, 170, 170, 170]


def test_draws_are_splitmix64s():
    draws = Draws()
    assert [high << 32 | low for high, low in (draws.pair() for _ in SPLITMIX64)] == SPLITMIX64
    assert Draws().uniform() == unit(SPLITMIX64[0] >> 32)


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
