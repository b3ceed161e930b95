"""Augmentation of recipes: the policies of timm and torchvision, and statistics of 5,000 draws against theirs."""

import math
import random
from functools import cache, partial

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
from presets import TimmPolicy, build_presets
from randomness import AUGMENTATION, MIXING, fold_seed, seed_host
from settings import config
from tests.images import picture
from tests.runs import argv_of_recipe

COUNT = 5_000

# Standard errors by which two means or rates may differ: chance alone exceeds them once in 150,000 comparisons, of
# which there are a thousand here; and the seeds are fixed.
ERRORS = 4.5


def assert_same_rate(ours, theirs):
    """Compare how often something happened in `COUNT` draws each."""
    rate = (ours + theirs) / (2 * COUNT)
    assert abs(ours - theirs) <= ERRORS * math.sqrt(2 * COUNT * rate * (1 - rate)), (ours, theirs)


def assert_same_distribution(ours, theirs):
    """Compare means and spreads, and the whole distributions by the test of Kolmogorov and Smirnov.

    The largest distance of two empirical distributions of n draws each is above 2.7 x sqrt(2 / n) once in a million: of
    5,000 that is 0.054, so that the end of a range of even draws may be off by 5 % of it.
    """
    # Ours may have been rounded to float32.
    ours, theirs = (numpy.sort(numpy.round(numpy.asarray(side, float), 6)) for side in (ours, theirs))
    for one, other in ((ours, theirs), ((ours - theirs.mean()) ** 2, (theirs - theirs.mean()) ** 2)):
        error = math.sqrt(one.var() / len(one) + other.var() / len(other))
        assert abs(one.mean() - other.mean()) <= ERRORS * error + 1e-6, (one.mean(), other.mean(), error)
    places = numpy.concatenate((ours, theirs))
    shares = [numpy.searchsorted(part, places, side="right") / len(part) for part in (ours, theirs)]
    most = 2.7 * math.sqrt(1 / len(ours) + 1 / len(theirs))
    assert numpy.abs(shares[0] - shares[1]).max() <= most


@cache
def recipes():
    paths = sorted(config.RECIPES_DIR.glob("*.toml"))
    return [config.parse_args([*argv_of_recipe(str(path)), "--device", "cpu"]) for path in paths]


def one_of_each(*names):
    """Return the first recipe of each set of values that recipes give these options, the first of which is on."""
    found = {}
    for args in recipes():
        if getattr(args, names[0]):
            found.setdefault(tuple(map(str, (getattr(args, name) for name in names))), args)
    return [pytest.param(args, id=" ".join(values)) for values, args in found.items()]


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
    """Rate, area, sides, place and fill: torchvision's, or timm's where noise is filled in."""
    erase = data.build_batch_transforms(args, 10)[0].erase
    random.seed(0)
    torch.manual_seed(0)
    marked = torch.full((COUNT, 3, 18, 14), 7.0)
    if args.random_erase_fill == "pixel":
        theirs = RandomErasing(args.random_erase, mode="pixel", device="cpu")(marked.clone())
    else:
        theirs = torch.stack(list(map(tv.RandomErasing(args.random_erase), marked)))
    ours = erase.erase(marked, erase.draw(marked, random.Random(0)))

    def measures(image):
        is_erased = image[:, 0] != 7
        areas = is_erased.sum((1, 2))
        is_erased, values = is_erased[areas > 0], image[image != 7]
        rows, columns = is_erased.any(2), is_erased.any(1)
        places = {"rows": rows.sum(1), "columns": columns.sum(1), "top": rows.int().argmax(1),
                  "left": columns.int().argmax(1), "values": values[::13][:COUNT],
                  "ratio": (rows.sum(1) / columns.sum(1)).log()}  # fmt: skip
        return len(is_erased), {"areas": areas[areas > 0], **places}

    (num_ours, ours), (num_theirs, theirs) = measures(ours), measures(theirs)
    assert_same_rate(num_ours, num_theirs)
    assert abs(num_ours - COUNT * args.random_erase) < ERRORS * math.sqrt(COUNT * args.random_erase)
    for name, values in ours.items():
        assert_same_distribution(values, theirs[name])


def reference_policy(args):
    """Return the policy of a recipe as its source builds it."""
    kinds = {
        "ra": partial(autoaugment.RandAugment, magnitude=args.ra_magnitude), "ta_wide": autoaugment.TrivialAugmentWide,
        "imagenet": autoaugment.AutoAugment,
    }  # fmt: skip
    if args.auto_augment in kinds:
        return kinds[args.auto_augment](interpolation=InterpolationMode(args.interpolation))
    _, steps, _ = transforms_imagenet_train(
        args.train_crop_size, auto_augment=args.auto_augment.removeprefix("timm/"), separate=True, mean=args.mean,
        interpolation=args.interpolation, color_jitter=args.color_jitter or None,
    )  # fmt: skip
    return steps


@pytest.mark.parametrize("args", one_of_each("auto_augment", "color_jitter", "interpolation"))
def test_policies_are_their_sources_for_the_same_seed(args):
    """Operations, their levels, fill and interpolation; likewise those of colour jitter, and its order."""
    args = args.replaced(grayscale_prob=0.0, blur_prob=0.0)  # compared in test_presets.py
    image, ours, theirs = picture(120, 100), build_presets(args)[0].policy, reference_policy(args)
    num_changed = 0
    for seed in range(80):
        seed_host(AUGMENTATION, seed)
        found = ours(image)
        seed_host(AUGMENTATION, seed)
        if args.auto_augment.startswith("timm/"):
            numpy.random.seed(int(torch.randint(1 << 32, ())))  # timm draws from its generator as well
        assert found.tobytes() == theirs(image).tobytes()
        num_changed += found.tobytes() != image.tobytes()
    assert num_changed > 20  # timm applies one of two


def mixings_of_torchvision(args, image):
    """As its script chooses: one of the two, each as often."""
    torch.manual_seed(3)
    alphas = [(v2.MixUp, args.mixup_alpha), (v2.CutMix, args.cutmix_alpha)]
    ways = [build(alpha=alpha, num_classes=10) for build, alpha in alphas if alpha > 0]
    for _ in range(COUNT):
        drawn = ways[int(torch.randint(len(ways), ()))].make_params([image])
        yield (drawn["lam"],) if "lam" in drawn else (*drawn["box"], drawn["lam_adjusted"])


@pytest.mark.parametrize("args", one_of_each("mixup_alpha", "cutmix_alpha"))
def test_mixing_draws_as_its_source(args):
    """How often which of the two, the shares of both, and the boxes."""
    image, mix = torch.empty(1, 3, 224, 160, device="meta"), data.build_batch_transforms(args, 10)[0].mix
    ours = [mix.draw(image, random.Random(fold_seed(MIXING, args.seed, step, 0)))[1].tolist() for step in range(COUNT)]
    ours = [drawn[:-1] for drawn in ours]  # the last is the rest of the share
    theirs = list(mixings_of_torchvision(args, image))
    kinds = {len(drawn) for drawn in ours}
    assert kinds == {len(drawn) for drawn in theirs}
    for kind in kinds:
        sides = [[drawn for drawn in all_drawn if len(drawn) == kind] for all_drawn in (ours, theirs)]
        assert_same_rate(*map(len, sides))
        for one, other in zip(*(numpy.array(side).T for side in sides), strict=True):
            assert_same_distribution(one, other)


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
