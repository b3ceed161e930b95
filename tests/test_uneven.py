"""Uneven classes: weights of the loss, the balanced order, and metrics, against scikit-learn, torch and plain loops."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

import metrics
from data import IndexedImageFolder, warn_of_uneven
from errors import UserError
from loading.index import ArraySource, encode
from models.losses import build_criterion, class_weights
from sampler import TrainSampler, VirtualShards

SIZES = [40, 30, 20, 1]
LABELS = numpy.repeat(range(4), SIZES)


class Uneven(ArraySource):
    form, classes, labels = "uneven", [f"class{number}" for number in range(4)], LABELS
    names = encode(f"class{label}/{number}.png" for number, label in enumerate(LABELS))


def sampler_of(epoch, seed=0):
    sampler = TrainSampler(91, VirtualShards(1, 1), seed, labels=torch.from_numpy(LABELS))
    sampler.set_epoch(epoch)
    return sampler


def test_a_balanced_epoch_shows_each_class_as_often_and_its_images_evenly():
    order = sampler_of(0).epoch_order().tolist()
    assert order not in (sampler_of(1).epoch_order().tolist(), sampler_of(0, seed=1).epoch_order().tolist())
    assert sorted(Counter(LABELS[order]).values()) == [22, 23, 23, 23]
    assert all(len(set(LABELS[order[i : i + 4]])) == 4 for i in range(0, 88, 4))  # in turn
    for label, size in enumerate(SIZES):
        times = Counter(image for image in order if LABELS[image] == label)
        missing = [0] * (size - len(times))
        assert max(times.values()) - min([*times.values(), *missing]) <= 1
    seen = Counter()
    for key in sampler_of(0):
        assert key.repetition == seen[int(key)]  # so that an image that comes again has other draws
        seen[int(key)] += 1


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_balanced_weights_are_scikit_learns_in_torchs_loss_of_probabilities(smoothing):
    args = SimpleNamespace(class_weights="balanced", bce_loss=False, device="cpu", criterion=None, model="resnet18",
                           label_smoothing=smoothing, bce_target_thresh=None)  # fmt: skip
    data = IndexedImageFolder("", None, source=Uneven(Path()))
    expected = compute_class_weight("balanced", classes=numpy.arange(4), y=LABELS)
    torch.testing.assert_close(class_weights(args, data).double().numpy(), expected, rtol=1e-6, atol=0)
    criterion = build_criterion(args, data)
    output, target = torch.randn(16, 4, requires_grad=True), torch.arange(16) % 4
    logs = output.double().log_softmax(1)
    spread = nn.functional.one_hot(target, 4) * (1 - smoothing) + smoothing / 4
    by_hand = -(torch.from_numpy(expected) * spread * logs).sum() / 16
    torch.testing.assert_close(criterion(output, target).double(), by_hand)
    soft = nn.functional.one_hot(target, 4).float()
    torch.testing.assert_close(criterion(output, soft), criterion(output, target))
    with torch.inference_mode():
        plain = nn.CrossEntropyLoss(label_smoothing=smoothing)
        assert torch.equal(criterion(output, target), plain(output, target))
    args.bce_loss = True
    criterion = build_criterion(args, data)
    weight = torch.tensor([(91 - size) / size for size in SIZES])
    expected = nn.BCEWithLogitsLoss(pos_weight=weight)(output, soft * (1 - smoothing) + smoothing / 4)
    torch.testing.assert_close(criterion(output, soft), expected)


def test_balanced_accuracy_and_f1_are_scikit_learns():
    rng = numpy.random.default_rng(0)
    truth = rng.choice(5, 200, p=[0.6, 0.2, 0.15, 0.05, 0])
    scores = torch.from_numpy(rng.normal(size=(200, 5)) + 1.5 * (truth[:, None] == numpy.arange(5)))
    scores[:, 3] -= 9  # never right
    tally = metrics.Tally([metrics.BalancedAccuracy(5), metrics.F1(5)])
    for i in range(0, 200, 30):
        tally.update(torch.tensor(0.0), scores[i : i + 30], torch.from_numpy(truth[i : i + 30]), None)
    tally.synchronize_between_processes()
    values, _ = tally.compute_and_reset()
    predicted = scores.argmax(1).numpy()
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        assert values["balanced_acc"] == pytest.approx(100 * balanced_accuracy_score(truth, predicted))
    assert values["never_right"] == 1
    assert values["f1"] == pytest.approx(100 * f1_score(truth, predicted, average="macro"))
    assert values["f1_micro"] == pytest.approx(100 * f1_score(truth, predicted, average="micro"))


def test_a_line_names_a_class_of_few_images_unless_an_option_is_about_it(capsys):
    args = SimpleNamespace(balanced_sampler=False, class_weights=None, synthetic=None)
    images = IndexedImageFolder("", None, source=Uneven(Path()))
    for name, value in {"": None, "balanced_sampler": True, "class_weights": "balanced", "synthetic": 9}.items():
        warn_of_uneven(images, SimpleNamespace(**vars(args) | {name: value}))
        line = "the classes are imbalanced: class3 has 1 image, the median class 25; see --balanced-sampler"
        assert (line in capsys.readouterr().out) == (name == "")


@pytest.mark.parametrize(("rows", "words"), [
    ("class0,1\nclass1,2\nclass2,3\n", "1 class missing, such as class3; give each class a weight"),
    ("class0,1\nclas1,2\n", "line 3: clas1 is no class; did you mean class1"),
    ("class0,1\nclass0,2\n", "line 3: class0 is listed twice"), ("class0,0\n", "line 2: the weight is 0; expected"),
    ("class0,1e-50\n", "line 2: the weight is 1e-50; expected"),
    ("class0,nan\n", "line 2: the weight is nan; expected"), ("class0,much\n", "could not convert"),
])  # fmt: skip
def test_weights_that_cannot_be_used_are_one_line(tmp_path, rows, words):
    (tmp_path / "w.csv").write_text("class,weight\n" + rows)
    with pytest.raises(UserError, match=words):
        class_weights(SimpleNamespace(class_weights=str(tmp_path / "w.csv")), Uneven(Path()))
