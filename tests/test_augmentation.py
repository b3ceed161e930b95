"""Augmentation of recipes: what timm and torchvision make of the same draws."""

import random
from functools import partial

import numpy
import pytest
import torch
from PIL import Image
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import transforms_imagenet_train
from torchvision import transforms as tv
from torchvision.transforms import InterpolationMode, autoaugment, v2

import data
import transforms
from loading.policies import TimmPolicy
from presets import build_presets
from randomness import AUGMENTATION, seed_host
from tests import test_recipes
from tests.images import picture
from tests.test_recipes import RECIPES, options_by_name


def one_of_each(*names):
    """Return the first recipe of each set of values that recipes give these options, the first of which is on."""
    are_on = [name for name in RECIPES if options_by_name(name).flat()[names[0]]]
    found = test_recipes.one_of_each(lambda args: [args.flat()[name] for name in names], are_on)
    return [pytest.param(options_by_name(name), id=name) for name in found]


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


@pytest.mark.parametrize("args", one_of_each("random_erase", "random_erase_fill"))
def test_erasing_has_its_sources_statistics(args):
    erase, source = (
        data.build_batch_transforms(args.augmentation, args.precision.channels_last, 10, torch.device("cpu"))[0].erase,
        tv.RandomErasing(),
    )
    (min_area, max_area), (min_aspect, max_aspect) = source.scale, source.ratio
    theirs = RandomErasing(
        args.augmentation.random_erase, device="cpu",
        min_area=min_area, max_area=max_area, min_aspect=min_aspect, max_aspect=max_aspect,
    )  # fmt: skip
    marked = torch.full((2000, 3, 18, 14), 7.0)
    erased = erase.erase(marked, erase.draw(marked, random.Random(5)))
    random.seed(5)
    assert torch.equal(erased == 7, theirs(marked.clone()) == 7)
    fill = erased[erased != 7]
    deviation = 1.0 if args.augmentation.random_erase_fill == "pixel" else 0.0
    assert (fill.mean().item(), fill.std().item()) == pytest.approx((0.0, deviation), abs=0.02)


def reference_policy(args):
    kinds = {
        "ra": partial(autoaugment.RandAugment, magnitude=args.augmentation.ra_magnitude),
        "ta_wide": autoaugment.TrivialAugmentWide, "imagenet": autoaugment.AutoAugment,
    }  # fmt: skip
    if args.augmentation.auto_augment in kinds:
        return kinds[args.augmentation.auto_augment](interpolation=InterpolationMode(args.augmentation.interpolation))
    _, steps, _ = transforms_imagenet_train(
        args.augmentation.train_crop_size, auto_augment=args.augmentation.auto_augment.removeprefix("timm/"),
        separate=True, mean=args.augmentation.mean,
        interpolation=args.augmentation.interpolation, color_jitter=args.augmentation.color_jitter or None,
        force_color_jitter=True,  # beside RandAugment too
    )  # fmt: skip
    return steps


@pytest.mark.parametrize("args", one_of_each("auto_augment", "color_jitter", "interpolation"))
def test_policies_are_their_sources_for_the_same_seed(args):
    args = args.replaced(grayscale_prob=0.0, blur_prob=0.0)  # compared in test_transforms.py
    image, ours, theirs = (
        picture(120, 100),
        build_presets(args.data, args.augmentation)[0].policy,
        reference_policy(args),
    )
    num_changed = 0
    for seed in range(80):
        seed_host(AUGMENTATION, seed)
        found = ours(image)
        seed_host(AUGMENTATION, seed)
        if args.augmentation.auto_augment.startswith("timm/"):
            numpy.random.seed(int(torch.randint(1 << 32, ())))  # timm draws from its generator as well
        assert found.tobytes() == theirs(image).tobytes()
        num_changed += found.tobytes() != image.tobytes()
    assert num_changed > 20  # timm applies one of two


class TorchRandom(random.Random):
    def betavariate(self, alpha, beta):
        return float(torch.distributions.Beta(torch.tensor([alpha]), torch.tensor([beta])).sample())

    def randrange(self, stop):
        return int(torch.randint(stop, (1,)))


@pytest.mark.parametrize("args", one_of_each("mixup_alpha", "cutmix_alpha"))
def test_mixing_draws_as_its_source(args):
    image, mix = (
        torch.empty(1, 3, 224, 160, device="meta"),
        data.build_batch_transforms(args.augmentation, args.precision.channels_last, 10, torch.device("cpu"))[0].mix,
    )
    blend = v2.MixUp(alpha=args.augmentation.mixup_alpha or 1.0, num_classes=10)
    cut = v2.CutMix(alpha=args.augmentation.cutmix_alpha or 1.0, num_classes=10)
    num_cut = 0
    for seed in range(400):
        torch.manual_seed(seed)
        mixer, drawn = mix.draw(image, TorchRandom(seed))
        torch.manual_seed(seed)
        if mixer is mix.cutmix:
            made = cut.make_params([image])
            expected = [*made["box"], made["lam_adjusted"]]
        else:
            expected = [blend.make_params([image])["lam"]]
        assert drawn.tolist()[:-1] == pytest.approx(expected)  # the last is the rest of the share
        num_cut += mixer is mix.cutmix
    expected = (
        200
        if args.augmentation.mixup_alpha and args.augmentation.cutmix_alpha
        else 400 * bool(args.augmentation.cutmix_alpha)
    )
    assert num_cut == pytest.approx(expected, abs=45)  # 4.5 standard errors


@pytest.mark.parametrize("name", ["rand-m10-inc1", "rand-m10-mstd2-inc1", "original-mstd9", "augmix-m10-mstd9"])
def test_timms_policies_take_their_strongest_levels(name):
    """Pillow 13 refuses to keep none of the bits, which timm asks for at level 10: then each channel is 0."""
    policy = TimmPolicy(f"timm/{name}", 32, tv.InterpolationMode.BICUBIC, (0.5, 0.5, 0.5)).policy
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
