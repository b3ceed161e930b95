"""What every row of a table of choices promises, whatever its name: a new row without an oracle here fails."""

import inspect
import itertools
import math
import random
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from torch import nn

from errors import UserError
from metrics import Metric
from models.losses import build_criterion
from models.optim import lr_at
from presets import build_presets
from randomness import AUGMENTATION, seed_host
from settings import config
from settings.choices import CURVES, FORMS, LOSSES, METRICS, POLICIES, SCHEDULES, TABLES
from settings.options import BY_NAME

CLASSES = 6
ROWS = [
    *((option, name, choice) for option, (_, table) in TABLES.items() for name, choice in table.items()),
    *(("form", name, choice) for name, choice in FORMS.items()),
    *(("curve", name, choice) for name, choice in CURVES.items()),
]


def parse(*words):
    return config.parse_args(["--synthetic", "64", *map(str, words)])


@pytest.mark.parametrize(("option", "name", "choice"), ROWS, ids=lambda value: value if isinstance(value, str) else "")
def test_every_row_can_be_imported_and_takes_its_options(option, name, choice):
    function = choice.load()
    assert callable(function)
    assert {*choice.options} <= BY_NAME.keys()
    parameters = inspect.signature(function).parameters
    taken = {each.removeprefix("opt_") if option == "opt" else each for each in (*choice.options, *choice.constants)}
    assert taken <= parameters.keys()
    if option == "curve":
        assert issubclass(function, Metric)
        assert function.curves[name] is choice
        assert choice.title


@pytest.mark.parametrize(("words", "kind", "is_bce"), [
    ("", "CrossEntropy", False), ("--criterion cross_entropy", "CrossEntropy", False),
    ("--bce-loss", "BinaryCrossEntropy", True), ("--criterion bce", "BinaryCrossEntropy", True),
    ("--criterion bce --bce-loss", "BinaryCrossEntropy", True), ("--criterion focal", "FocalLoss", False),
    ("--recipe deit3-b --criterion cross_entropy", "CrossEntropy", False),
    ("--recipe deit3-b --criterion focal", "FocalLoss", False),
])  # fmt: skip
def test_a_loss_has_a_name(words, kind, is_bce):
    args = parse(*words.split())
    criterion = build_criterion(args)
    assert type(criterion).__name__ == kind
    assert args.optimization.bce_loss is is_bce  # as in checkpoints and recipes of either spelling
    assert criterion.label_smoothing == args.optimization.label_smoothing


@pytest.mark.parametrize("words", [
    "--criterion foacl", "--criterion focal --bce-loss", "--criterion cross_entropy --bce-loss", "--focal-gamma 1",
    "--criterion focal --focal-gamma -1", "--criterion focal --multi-label", "--lr-scheduler cosin", "--metrics f2",
])  # fmt: skip
def test_a_loss_or_name_that_misfits_is_refused(words):
    with pytest.raises(UserError, match="|".join(word for word in words.split() if word.startswith("--"))):
        parse(*words.split())


# The terms of an image's classes, of scores z, probabilities p, shares of the target and weights of the classes.
BY_HAND = {
    "cross_entropy": lambda z, p, share, weight: -weight * share * p.log(),
    "bce": lambda z, p, share, weight: (
        -(weight * share * z.sigmoid().log() + (1 - share) * (1 - z.sigmoid()).log()) / 4
    ),
    "focal": lambda z, p, share, weight: -weight * share * (1 - p) ** 2 * p.log(),
    "focal --focal-gamma 0.5": lambda z, p, share, weight: -weight * share * (1 - p).sqrt() * p.log(),
}


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("target", [[3, 1, 1], [[0.0, 1.0, 0.0, 0.0]] * 3, [[0.2, 0.0, 0.8, 0.0]] * 3])
@pytest.mark.parametrize("name", [*LOSSES, "focal --focal-gamma 0.5"])
def test_each_loss_of_smoothed_classes_and_mixed_targets_is_the_mean_by_hand(name, target, smoothing, is_weighted):
    scores = torch.tensor([[1.0, -2.0, 0.5, 3.0], [0.0, 0.25, -1.0, 2.0], [-3.0, 4.0, 0.0, 1.0]], dtype=torch.float64)
    target, scores, none = torch.tensor(target), scores.requires_grad_(), torch.ones(4)
    criterion = build_criterion(parse("--criterion", *name.split(), "--label-smoothing", smoothing))
    criterion.weight = torch.tensor([0.5, 2.0, 1.0, 3.0]) if is_weighted else None
    shares = (target if target.ndim == 2 else nn.functional.one_hot(target, 4)).double()
    hand = partial(BY_HAND[name], scores, scores.softmax(1), shares * (1 - smoothing) + smoothing / 4)
    weight = criterion.weight if is_weighted else none
    assert criterion(scores, target).item() == pytest.approx(hand(weight).sum().item() / 3)
    assert torch.autograd.gradcheck(lambda scores: criterion(scores, target), scores)
    with torch.no_grad():  # losses of evaluations are comparable
        assert criterion(scores, target).item() == pytest.approx(hand(none).sum().item() / 3)


def test_the_gradient_of_the_focal_loss_is_finite_for_an_image_that_is_certain():
    scores = torch.tensor([[60.0, 0.0], [0.0, 60.0]], requires_grad=True)
    LOSSES["focal"].load()(focal_gamma=0.5)(scores, torch.tensor([0, 0])).backward()
    assert scores.grad.isfinite().all()


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


@pytest.mark.parametrize(("warmup", "method", "more"), [
    (0, "linear", ""), (2, "linear", ""), (2, "constant", ""), (2, "linear", "--no-lr-warmup-prefix"),
])  # fmt: skip
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_has_its_rate_at_every_edge(name, warmup, method, more):
    least = 0.001 if "lr_min" in SCHEDULES[name].options else 0.0
    words = f"--lr-scheduler {name} --epochs 14 --lr-warmup-epochs {warmup} --lr-warmup-method {method} {more}"
    words += " --lr-warmup-decay 0.02 --lr-gamma 0.3 --lr-step-size 3 --lr-power 2 --lr-milestones 3 7 7"
    args = parse(*words.split(), "--lr-cooldown-epochs", 4, *(["--lr-min", least] if least else []))
    begin = 0 if more else warmup
    for edge in range(15):
        for epoch in (edge - 1e-6, edge):
            if 0 <= epoch < warmup:
                share = 0.02 + 0.98 * epoch / warmup * (method == "linear")
                assert lr_at(args.schedule, epoch, 0.5) == pytest.approx(0.5 * share, abs=1e-12)
            elif 0 <= epoch < 14:
                share = SHARES[name](epoch - begin, 14 - begin)
                assert lr_at(args.schedule, epoch, 0.5) == pytest.approx(least + (0.5 - least) * share, abs=1e-12)


def sklearns():
    return pytest.importorskip("sklearn.metrics")  # here, or each process that collects tests would import it


def precision_by_class(scores, target):
    hard = numpy.eye(CLASSES)[target]
    return numpy.mean([sklearns().average_precision_score(hard[:, k], scores[:, k]) for k in range(CLASSES)])


# By other people's code, of scores and classes.
VALUES = {
    "acc1": lambda scores, target: sklearns().top_k_accuracy_score(target, scores, k=1),
    "acc5": lambda scores, target: sklearns().top_k_accuracy_score(target, scores, k=5),
    "balanced_acc": lambda scores, target: sklearns().balanced_accuracy_score(target, scores.argmax(1)),
    "f1": lambda scores, target: sklearns().f1_score(target, scores.argmax(1), average="macro"),
    "f1_micro": lambda scores, target: sklearns().f1_score(target, scores.argmax(1), average="micro"),
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


@pytest.mark.parametrize("name", [*POLICIES, "timm/rand-m7-mstd0.5-inc1"])
def test_a_policy_draws_its_pixels_from_the_seed_and_the_images_place_alone(name):
    args = parse("--auto-augment", name)
    policy = build_presets(args.data, args.augmentation)[0].policy
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
    texts = [path.read_text() for path in Path(__file__).parent.glob("*.py") if path.name != "test_agreement.py"]
    text = "\n".join(texts)
    assert [option.flag for option in BY_NAME.values() if option.flag not in text and option.dest not in text] == []
