"""What happens to a batch: torchvision's mixing and erasing, drawn from an address."""

import random
from collections import Counter

import pytest
import torch
from torchvision import transforms as tv
from torchvision.transforms import v2

import transforms

NUM_CLASSES = 7


def batch(size=6, height=20, width=14):
    generator = torch.Generator().manual_seed(size)
    image = torch.randn(size, 3, height, width, generator=generator)
    return image, torch.randint(0, NUM_CLASSES, (size,), generator=generator)


def mix(mixer, image, target, rng):
    """Mix a batch with the next draws, by one way or one of two, or neither."""
    if isinstance(mixer, transforms.RandomMix):
        drawn = mixer.draw(image, rng)
        return drawn[0].mix(image, target, drawn[1]) if drawn else (image, target)
    return mixer.mix(image, target, mixer.draw(image, rng))


def is_torchvisions(oracle, image, target, mixed, **drawn):
    """Check a mixed batch against one of v2's transforms with given draws instead of its own."""
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
    """Each is its own blend with its neighbour, or has a rectangle of it, or neither; its target says how much."""
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
    normalize = transforms.Normalize((0.5,), (0.5,), torch.device("cpu"))
    mixing = transforms.get_mixup_cutmix(**odds, num_classes=2)
    batch = transforms.BatchTransform(normalize, mix=mixing, mix_off_epoch=5)
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
    transform = transforms.BatchTransform(
        transforms.Normalize(*values, torch.device("cpu"), order),
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
