"""Augmentation of recipes beyond torchvision's: statistics of 10,000 draws against timm's and torchvision's own."""

import io
import math
import random

import numpy
import pytest
import torch
from PIL import Image, ImageOps
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import transforms_imagenet_train
from torchvision import transforms as tv
from torchvision.transforms.functional import to_pil_image

import config
import data
import transforms
from presets import ClassificationPresetTrain, TimmPolicy, build_presets
from randomness import AUGMENTATION, seed_host

COUNT = 10_000


def assert_same_mean(ours, theirs):
    ours, theirs = numpy.asarray(ours, float), numpy.asarray(theirs, float)
    error = math.sqrt(ours.var() / len(ours) + theirs.var() / len(theirs))
    assert abs(ours.mean() - theirs.mean()) < 4 * error + 1e-12, (ours.mean(), theirs.mean(), error)


def mixed(number):
    """Return MurmurHash3's finaliser of a number, in integers of any size."""
    number ^= number >> 16
    number = number * 0x85EBCA6B % (1 << 32)
    number ^= number >> 13
    number = number * 0xC2B2AE35 % (1 << 32)
    return number ^ number >> 16


def test_noise_is_a_hash_of_seed_and_place_in_any_order_of_memory():
    seeds = torch.tensor([0, 1, 2**31 - 1])
    image = torch.empty(3, 2, 4, 5)
    noise = transforms.normal_noise(image, seeds)
    for number, seed in enumerate(seeds.tolist()):
        for place, value in enumerate(noise[number].flatten().tolist()):
            share = ((mixed(mixed(place) ^ seed) >> 9) + 0.5) / (1 << 23)
            expected = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(share, dtype=torch.float64))
            assert value == pytest.approx(expected.item(), abs=1e-5)
    last = transforms.normal_noise(image.contiguous(memory_format=torch.channels_last), seeds)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last, noise)


def test_noise_is_standard_normal_and_independent():
    seeds = torch.randint(1 << 31, (64,), generator=torch.Generator().manual_seed(0))
    noise = transforms.normal_noise(torch.empty(64, 3, 64, 64), seeds).double()
    assert noise.isfinite().all()
    flat = noise.flatten(1)
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert (noise**power).mean().item() == pytest.approx(moment, abs=5 * math.sqrt(105 / flat.numel()))
    correlations = torch.corrcoef(flat) - torch.eye(64)
    assert correlations.abs().max() < 5.5 / math.sqrt(flat.shape[1])
    for shift in ((0, 0, 1), (0, 1, 0), (1, 0, 0)):  # neighbours
        assert (noise * noise.roll(shift, (1, 2, 3))).mean().abs() < 5 / math.sqrt(flat.numel())


@pytest.mark.parametrize("fill", ["zero", "pixel"])
def test_erasing_has_timms_statistics(fill):
    side, p = 24, 0.25
    args = config.parse_args(["--synthetic", "--device", "cpu", "--random-erase", str(p), "--random-erase-fill", fill])
    erase = data.build_batch_transforms(args, 10)[0].erase
    marked = torch.full((COUNT, 3, side, side), 7.0)
    ours = erase.erase(marked, erase.draw(marked, random.Random(0)))
    random.seed(0)
    torch.manual_seed(0)
    theirs = RandomErasing(p, mode={"zero": "const", "pixel": "pixel"}[fill], device="cpu")(marked.clone())

    def measures(image):
        is_erased = image != 7
        areas = is_erased[:, 0].sum((1, 2))
        rows, columns = (is_erased[:, 0].any(axis).sum(1)[areas > 0] for axis in (2, 1))
        values = image[is_erased]
        return {
            "rate": areas > 0, "area": areas[areas > 0], "rows": rows, "columns": columns,
            "value": values[::17], "squared value": values[::17] ** 2,
            "top": is_erased[:, 0].any(2).int().argmax(1)[areas > 0],
        }  # fmt: skip

    for (name, one), other in zip(measures(ours).items(), measures(theirs).values(), strict=True):
        # timm's rectangles are of up to 1/3, and ratios of up to 1 / 0.3: a hundredth more.
        slack = 0.015 if name in ("area", "rows", "columns") else 0
        assert_same_mean(one.double() * (1 + slack / 2), other.double())
    assert measures(ours)["value"].numel() > 1000


def test_erasing_is_a_function_of_its_address_and_leaves_the_rest():
    erase = transforms.RandomErasing(1.0, is_noisy=True)
    batch = torch.full((8, 3, 32, 32), 7.0)
    one, same, other = (erase.erase(batch, erase.draw(batch, random.Random(seed))) for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert 0 < (one != 7).sum() < one.numel()
    assert ((one != 7).sum(1) % 3 == 0).all()  # of a pixel all channels or none


def test_the_preset_of_peoples_scripts_fills_with_noise_too():
    preset = ClassificationPresetTrain(crop_size=16, random_erase_prob=1.0, random_erase_fill="pixel")
    torch.manual_seed(0)
    image = preset(Image.new("RGB", (16, 16)))
    assert len(image.unique()) > 20  # black gives one value a channel


def test_colour_jitter_has_timms_statistics():
    """timm's transform of the same strength, behind the same policy: none."""
    image = Image.fromarray(numpy.random.default_rng(0).integers(0, 256, (6, 6, 3), dtype=numpy.uint8))
    args = config.parse_args(["--synthetic", "--color-jitter", "0.3", "--train-crop-size", "6"])
    ours = build_presets(args)[0].policy
    steps = transforms_imagenet_train(6, color_jitter=0.3, auto_augment=None).transforms
    (theirs,) = [step for step in steps if isinstance(step, tv.ColorJitter)]

    def measures(jitter):
        torch.manual_seed(len(repr(type(jitter))))
        pixels = numpy.stack([numpy.asarray(jitter(image)) for _ in range(COUNT // 2)]).astype(float)
        light = pixels.mean((1, 2, 3))
        return [light, light**2, pixels.std((1, 2, 3)), pixels.std(3).mean((1, 2)), pixels.std(3).mean((1, 2)) ** 2]

    for one, other in zip(measures(ours), measures(theirs), strict=True):
        assert_same_mean(one, other)


def test_jitter_comes_after_the_policy_and_from_the_address():
    file = io.BytesIO()
    Image.fromarray(numpy.random.default_rng(1).integers(0, 256, (20, 20, 3), dtype=numpy.uint8)).save(file, "PNG")
    preset = ClassificationPresetTrain(crop_size=12, auto_augment_policy="ta_wide", color_jitter=0.4)
    kinds = [type(step).__name__ for step in preset.transforms.transforms]
    assert kinds.index("TrivialAugmentWide") + 1 == kinds.index("ColorJitter") < kinds.index("PILToTensor")
    assert not preset.takes_draws  # its draws are those of the process, which an address seeds
    images = []
    for number in (5, 5, 6):
        seed_host(AUGMENTATION, 0, 0, number, 0)
        images.append(preset.load(file.getvalue()))
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])


def test_timms_3a_is_the_augmentation_of_deit_iii():
    """Grey, solarised from 128 on or blurred, one of the three, each as often: arXiv 2204.07118, section 3.3."""
    pytest.importorskip("timm")
    image = to_pil_image(
        torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    )
    policy = ClassificationPresetTrain(crop_size=8, auto_augment_policy="timm/3a").policy
    solarised, counts = ImageOps.solarize(image, 128), {"grey": 0, "solarised": 0, "blurred": 0}
    torch.manual_seed(0)
    for _ in range(COUNT):
        found = numpy.asarray(policy(image))
        if (found == found[..., :1]).all():
            counts["grey"] += 1
        elif (found == numpy.asarray(solarised)).all():
            counts["solarised"] += 1
        else:
            assert found.std() <= numpy.asarray(image).std()
            counts["blurred"] += 1
    for count in counts.values():
        assert abs(count - COUNT / 3) < 4.5 * math.sqrt(COUNT * 2 / 9)


def test_the_gpu_leaves_images_that_are_jittered():
    args = config.parse_args(
        ["--data-path", "x", "--color-jitter", "0.4", "--device", "cpu", "--decode-device", "cuda"]
    )
    args, notes = config.on_machine(args)
    assert args.decode_device == "cpu"
    assert "--decode-device cuda has no effect: --color-jitter 0.4 works on images on the CPU" in notes


@pytest.mark.parametrize(
    "specification", ["rand-m10-inc1", "rand-m10-mstd2-inc1", "original-mstd9", "augmix-m10-mstd9"]
)
def test_timms_policies_take_their_strongest_levels(specification):
    """Pillow 13 refuses to keep none of the bits, which timm asks for at level 10: then each channel is 0."""
    policy = TimmPolicy(f"timm/{specification}", 32, tv.InterpolationMode.BICUBIC).policy
    image = Image.fromarray(numpy.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=numpy.uint8))
    ops = getattr(policy, "ops", None) or [op for ops in policy.policy for op in ops]
    posterize = [op for op in ops if "Posterize" in op.name]
    assert posterize
    for op in posterize:
        for bits in range(9):
            kept = numpy.asarray(image) & (0xFF00 >> bits & 0xFF)
            assert numpy.array_equal(op.aug_fn(image, bits), kept), bits
    for seed in range(300):
        seed_host(AUGMENTATION, seed)
        policy(image)
