"""Names that options choose by: every row can be imported, takes its options, and nothing of the table needs torch."""

import inspect
import math

import pytest
import torch
from torch import Tensor

from errors import UserError
from metrics import Metric
from models.losses import build_criterion
from settings import choices, config
from settings.choices import CURVES, FORMS, TABLES
from settings.custom_code import load_function
from settings.options import BY_NAME

ROWS = [
    *((option, name, choice) for option, (_, table) in TABLES.items() for name, choice in table.items()),
    *(("form", name, choice) for name, choice in FORMS.items()),
    *(("curve", name, choice) for name, choice in CURVES.items()),
]


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


def parse(*words):
    return config.parse_args(["--synthetic", "64", *words])


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
    assert args.bce_loss is is_bce  # as in checkpoints and recipes of either spelling
    assert criterion.label_smoothing == args.label_smoothing


@pytest.mark.parametrize("words", [
    "--criterion foacl", "--criterion focal --bce-loss", "--criterion cross_entropy --bce-loss", "--focal-gamma 1",
    "--criterion focal --focal-gamma -1", "--criterion focal --multi-label", "--lr-scheduler cosin", "--metrics f2",
])  # fmt: skip
def test_a_loss_or_name_that_misfits_is_refused(words):
    with pytest.raises(UserError, match="|".join(word for word in words.split() if word.startswith("--"))):
        parse(*words.split())


def focal(scores: Tensor, targets: list[list[float]], gamma: float, weights: list[float]) -> float:
    """The focal loss by the formula, image by image, in Python's numbers."""
    losses = []
    for row, target in zip(scores.tolist(), targets, strict=True):
        total = sum(map(math.exp, row))
        shares = [math.exp(score) / total for score in row]
        terms = zip(target, shares, weights, strict=True)
        losses.append(-sum(t * w * (1 - p) ** gamma * math.log(p) for t, p, w in terms))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("is_soft", [False, True])
def test_the_focal_loss_is_that_of_its_formula(gamma, smoothing, is_soft):
    build = load_function("criterion", parse("--criterion", "focal"))
    weights = [0.5, 1.0, 3.0, 2.0]
    scores, target = torch.randn(6, 4), torch.tensor([0, 3, 1, 1, 2, 0])
    soft = torch.rand(6, 4).softmax(dim=1) if is_soft else torch.eye(4)[target]
    smooth = (soft * (1 - smoothing) + smoothing / 4).tolist()
    criterion = build(label_smoothing=smoothing, focal_gamma=gamma, weight=torch.tensor(weights))
    given = soft if is_soft else target
    assert criterion(scores, given).item() == pytest.approx(focal(scores, smooth, gamma, weights), rel=1e-5)
    with torch.no_grad():  # losses of evaluations are comparable
        assert criterion(scores, given).item() == pytest.approx(focal(scores, smooth, gamma, [1.0] * 4), rel=1e-5)


def test_the_gradient_of_the_focal_loss_is_finite_for_an_image_that_is_certain():
    scores = torch.tensor([[60.0, 0.0], [0.0, 60.0]], requires_grad=True)
    criterion = choices.LOSSES["focal"].load()(focal_gamma=0.5)
    criterion(scores, torch.tensor([0, 0])).backward()
    assert scores.grad.isfinite().all()
