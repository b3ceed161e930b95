"""What every row of a table of choices promises, whatever its name: a new row without an oracle here fails."""

import itertools
import math
import random
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from sklearn import metrics as sklearns

from models.losses import build_criterion
from models.optim import lr_at
from presets import build_presets
from randomness import AUGMENTATION, seed_host
from settings import config
from settings.choices import CURVES, LOSSES, METRICS, POLICIES, SCHEDULES
from settings.options import BY_NAME

CLASSES = 6


def parse(*words):
    return config.parse_args(["--synthetic", "64", *map(str, words)])


def drawn(seed, num_images=7):
    """Return scores in float64, classes, and soft targets of two classes each, as mixing makes them."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_images, CLASSES, generator=generator, dtype=torch.float64)
    target = torch.arange(num_images) % CLASSES
    share = torch.rand(num_images, 1, generator=generator, dtype=torch.float64)
    hard = torch.eye(CLASSES, dtype=torch.float64)[target]
    return scores, target, share * hard + (1 - share) * hard.roll(1, 0)


def cross_entropy(row, target):
    return -sum(t * (score - math.log(sum(map(math.exp, row)))) for score, t in zip(row, target, strict=True))


def binary_cross_entropy(row, target):
    pairs = [(1 / (1 + math.exp(-score)), t) for score, t in zip(row, target, strict=True)]
    return -sum(t * math.log(p) + (1 - t) * math.log(1 - p) for p, t in pairs) / len(row)


def focal(row, target):
    shares = [math.exp(score) / sum(map(math.exp, row)) for score in row]
    return -sum(t * (1 - p) ** 2 * math.log(p) for t, p in zip(target, shares, strict=True))


# The loss of one image, from its scores and its smoothed target.
LOSS_OF_IMAGE = {"cross_entropy": cross_entropy, "bce": binary_cross_entropy, "focal": focal}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_the_mean_over_images_of_its_formula_for_smoothed_mixed_targets(name, smoothing):
    criterion = build_criterion(parse("--criterion", name, "--label-smoothing", smoothing))
    scores, target, soft = drawn(1)
    smooth = (soft * (1 - smoothing) + smoothing / CLASSES).tolist()
    each = [LOSS_OF_IMAGE[name](*pair) for pair in zip(scores.tolist(), smooth, strict=True)]
    assert criterion(scores, soft).item() == pytest.approx(sum(each) / len(each), rel=1e-12)
    hard = torch.eye(CLASSES, dtype=torch.float64)[target]
    assert criterion(scores, target).item() == pytest.approx(criterion(scores, hard).item(), rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_a_loss_is_that_of_its_differences(name):
    criterion = build_criterion(parse("--criterion", name, "--label-smoothing", 0.1))
    scores, target, soft = drawn(2)
    for each in (target, soft):
        assert torch.autograd.gradcheck(lambda scores, each=each: criterion(scores, each), scores.requires_grad_())


# The rate after the warm-up as a share of the peak, less --lr-min: of epochs since its end, and of all that are left.
SHARES = {
    "cosineannealinglr": lambda t, left: math.cos(math.pi * t / left / 2) ** 2,
    "exponentiallr": lambda t, left: 0.3**t,
    "linearlr": lambda t, left: 1 - t / left,
    "multisteplr": lambda t, left: 0.3 ** ((t >= 3) + 2 * (t >= 7)),
    "polylr": lambda t, left: (1 - t / left) ** 2,
    "steplr": lambda t, left: 0.3 ** math.floor(t / 3),
    "wsd": lambda t, left: min(1, (left - t) / 4),
}


@pytest.mark.parametrize(("warmup", "method"), [(0, "linear"), (2, "linear"), (2, "constant")])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_has_its_rate_at_every_edge(name, warmup, method):
    least = 0.001 if "lr_min" in SCHEDULES[name].options else 0.0
    words = f"--lr-scheduler {name} --epochs 14 --lr-warmup-epochs {warmup} --lr-warmup-method {method}"
    words += " --lr-warmup-decay 0.02 --lr-gamma 0.3 --lr-step-size 3 --lr-power 2 --lr-milestones 3 7 7"
    args = parse(*words.split(), "--lr-cooldown-epochs", 4, *(["--lr-min", least] if least else []))
    for edge in range(15):
        for epoch in (edge - 1e-6, edge):
            if 0 <= epoch < warmup:
                share = 0.02 + 0.98 * epoch / warmup * (method == "linear")
                assert lr_at(args, epoch, 0.5) == pytest.approx(0.5 * share, abs=1e-12)
            elif 0 <= epoch < 14:
                share = SHARES[name](epoch - warmup, 14 - warmup)
                assert lr_at(args, epoch, 0.5) == pytest.approx(least + (0.5 - least) * share, abs=1e-12)


def precision_by_class(scores, target):
    hard = numpy.eye(CLASSES)[target]
    return numpy.mean([sklearns.average_precision_score(hard[:, k], scores[:, k]) for k in range(CLASSES)])


# By other people's code, of scores and classes.
VALUES = {
    "acc1": lambda scores, target: sklearns.top_k_accuracy_score(target, scores, k=1),
    "acc5": lambda scores, target: sklearns.top_k_accuracy_score(target, scores, k=5),
    "balanced_acc": lambda scores, target: sklearns.balanced_accuracy_score(target, scores.argmax(1)),
    "f1": lambda scores, target: sklearns.f1_score(target, scores.argmax(1), average="macro"),
    "f1_micro": lambda scores, target: sklearns.f1_score(target, scores.argmax(1), average="micro"),
    "map": precision_by_class,
}


def measured(metric, batches):
    """Return what a metric says of some batches, as an evaluation asks it."""
    sums = torch.zeros(metric.num_sums, dtype=torch.float64)
    for scores, target in batches:
        metric.observe(scores, torch.eye(CLASSES)[target], None)
        rows = metric.batch_sums(scores, target, None)
        if rows:
            sums += torch.cat([row.double().reshape(-1) for row in rows])
    return {**metric.compute(sums.tolist(), sum(len(target) for _, target in batches)), **metric.gather()}


@pytest.mark.parametrize("name", sorted(CURVES.keys() - {"loss"}))
def test_a_metric_is_that_of_other_code_over_any_split_into_batches(name):
    generator = random.Random(3)
    scores = torch.randn(60, CLASSES, generator=torch.Generator().manual_seed(3)).round(decimals=1)
    scores += torch.arange(CLASSES) * 1e-4  # no ties within an image, whose order is a metric's own
    target = torch.tensor([generator.choice([0, *range(CLASSES)]) for _ in range(60)])
    metric = CURVES[name].load()(*[CLASSES] * (name in METRICS))
    for _ in range(3):
        cuts = [0, *sorted(generator.sample(range(1, 60), 4)), 60]
        found = measured(metric, [(scores[a:b], target[a:b]) for a, b in itertools.pairwise(cuts)])
        assert found[name] == pytest.approx(100 * VALUES[name](scores.numpy(), target.numpy()), rel=1e-6)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_draws_its_pixels_from_the_seed_and_the_images_place_alone(name):
    policy = build_presets(parse("--auto-augment", name))[0].policy
    image = Image.fromarray(numpy.random.default_rng(4).integers(0, 256, (24, 24, 3), dtype=numpy.uint8))

    def pixels(place, seed=0):
        seed_host(AUGMENTATION, seed, *place)
        return numpy.asarray(policy(image)).tobytes()

    places = [(0, 0, number, 0) for number in range(12)]
    forwards = [pixels(place[1:]) for place in places]
    assert [pixels(place[1:]) for place in reversed(places)] == forwards[::-1]
    assert len(set(forwards)) > 3
    assert [pixels(place[1:], seed=1) for place in places] != forwards


def test_every_option_is_named_in_a_test_beyond_the_generated_ones():
    generated = {"test_tables.py", "test_agreement.py"}
    texts = [path.read_text() for path in Path(__file__).parent.glob("*.py") if path.name not in generated]
    text = "\n".join(texts)
    unnamed = [option.flag for option in BY_NAME.values() if option.flag not in text and option.dest not in text]
    assert unnamed == []
