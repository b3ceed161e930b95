"""What is measured: values in equal bits on any number of processes, and known by their names alone."""

import functools
import json
import re

import pytest
import torch
from sklearn.metrics import recall_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import data
import metrics
import sampler
import train
import utils
from tests.endings import read_points
from tests.ranks import run_check, run_ranks, train_rank
from tests.started import SMALL


class ClassAccuracy(metrics.Metric):
    """All that somebody writes who wants the accuracy of each class."""

    def __init__(self, num_classes):
        self.num_classes, self.num_sums = num_classes, 2 * num_classes

    def batch_sums(self, output, target, index):
        target = target.argmax(dim=1) if target.ndim == 2 else target
        is_hit = output.argmax(dim=1) == target
        return [torch.bincount(target, is_hit, self.num_classes), torch.bincount(target, None, self.num_classes)]

    def compute(self, sums, count):
        pairs = zip(sums[: self.num_classes], sums[self.num_classes :], strict=True)
        by_class = [100 * hits / count if count else float("nan") for hits, count in pairs]
        return {"by_class": by_class, "worst_class": min(value for value in by_class if value == value)}


class EvenImages(metrics.Metric):
    """Something of images that their numbers tell: how many percent of those with an even number are hit."""

    num_sums = 2

    def batch_sums(self, output, target, index):
        target = target.argmax(dim=1) if target.ndim == 2 else target
        is_even = index % 2 == 0
        return [((output.argmax(dim=1) == target) & is_even).sum(), is_even.sum()]

    def compute(self, sums, count):
        return {"even": 100 * sums[0] / max(sums[1], 1)}


NUM_IMAGES, NUM_CLASSES = 23, 4


def scored_images():
    """Scores of images, which a model returns as they are, and their classes; none is of the last class."""
    scores = torch.randn(NUM_IMAGES, NUM_CLASSES, generator=torch.Generator().manual_seed(5))
    return scores, torch.arange(NUM_IMAGES) // 2 % (NUM_CLASSES - 1)


def loader_of(rank, world_size, batch_size=4):
    keys = sampler.EvalSampler(NUM_IMAGES, batch_size, rank, world_size)
    loader = DataLoader(TensorDataset(*scored_images()), batch_size, sampler=keys)
    return data.DeviceLoader(loader, torch.device("cpu"), lambda image, target, *_: (image, target))


def check_evaluation(rank, world_size, folder):
    measured = [metrics.Accuracy(), ClassAccuracy(NUM_CLASSES), EvenImages()]
    loader = loader_of(rank, world_size)
    result = train.measure(nn.Identity(), nn.CrossEntropyLoss(), loader, torch.device("cpu"), metrics=measured)
    (folder / f"{world_size}.{rank}.json").write_text(json.dumps(result))


@pytest.mark.dist
def test_a_metric_of_ones_own_is_the_same_in_every_bit_at_any_world_size(tmp_path):
    found = []
    for world_size in (1, 3):
        run_check(world_size, check_evaluation, tmp_path, tmp_path)
        found += [(tmp_path / f"{world_size}.{rank}.json").read_text() for rank in range(world_size)]
    assert found == [found[0]] * 4

    scores, labels = scored_images()
    hits = [row.index(max(row)) == label for row, label in zip(scores.tolist(), labels.tolist(), strict=True)]
    by_class = [[hit for hit, label in zip(hits, labels.tolist(), strict=True) if label == c] for c in range(3)]
    result = json.loads(found[0])
    assert result["by_class"][:3] == [100 * sum(each) / len(each) for each in by_class]
    assert result["by_class"][3] != result["by_class"][3]  # no image, no accuracy
    assert result["worst_class"] == min(result["by_class"][:3])
    assert result["even"] == 100 * sum(hits[::2]) / len(hits[::2])
    assert result["acc1"] == 100 * sum(hits) / NUM_IMAGES


def test_the_means_of_a_line_are_of_all_images_so_far(capsys):
    measured = [metrics.Accuracy(), metrics.BalancedAccuracy(NUM_CLASSES)]
    train.measure(nn.Identity(), nn.CrossEntropyLoss(), loader_of(0, 1), torch.device("cpu"), 2, metrics=measured)
    lines = [line for line in capsys.readouterr().out.splitlines() if "balanced_acc: " in line]
    scores, labels = scored_images()
    for line, number in zip(lines, (4, 12, 20, NUM_IMAGES), strict=False):
        there = labels[:number].unique()
        shares = recall_score(labels[:number], scores[:number].argmax(1), labels=there, average=None, zero_division=0)
        means = 100 * shares.mean(), (shares == 0).sum()
        assert re.search(r"balanced_acc: \S+ \({:.4f}\)  never_right: \S+ \({:.4f}\)".format(*means), line)


def test_of_equal_scores_acc1_is_torchs_topk_and_all_else_takes_the_first_class():
    output = torch.randint(0, 3, (400, 30), generator=torch.Generator().manual_seed(0)).float()  # many ties
    target = torch.arange(400) % 30
    first = torch.tensor([row.index(max(row)) for row in output.tolist()])
    hits = metrics.Accuracy((1, 5)).batch_sums(output, target, None)[0]
    assert hits == (output.topk(5).indices[:, 0] == target).sum()
    assert torch.equal(metrics.F1(30).batch_sums(output, target, None)[1], first.bincount(minlength=30))
    rows = metrics.rank_classes(output, target, 3)
    order = [sorted(range(30), key=lambda label, row=row: -row[label]) for row in output.tolist()]
    assert rows[:, 0].tolist() == [each.index(label) for each, label in zip(order, target.tolist(), strict=True)]
    assert rows[:, 2:5].tolist() == [each[:3] for each in order]
    assert torch.equal(output.softmax(dim=1).max(dim=1).indices, first)  # as for pictures


def test_a_plain_loader_tells_no_numbers():
    seen, measured = [], EvenImages()
    measured.batch_sums = lambda output, target, index: seen.append(index) or [torch.tensor(0.0)] * 2
    loader = DataLoader(TensorDataset(*scored_images()), 4)
    train.measure(nn.Identity(), nn.CrossEntropyLoss(), loader, "cpu", metrics=[metrics.Accuracy(), measured])
    assert seen == [None] * 6


def measured_rank(argv):
    """Train as `train_rank` does, after adding two metrics to the one list."""
    original = metrics.build_metrics
    train.build_metrics = lambda args, n: [*original(args, n), ClassAccuracy(n), EvenImages()]
    train_rank(argv)


def test_what_is_measured_reaches_console_records_and_curves_by_its_name(image_folder, tmp_path):
    argv = ["--data-path", str(image_folder), *SMALL, *"--batch-size 8 --epochs 1 --print-freq 2 --model-ema".split()]
    outcome = run_ranks(measured_rank, 1, [*argv, "--output-dir", str(tmp_path / "out")], log_folder=tmp_path).check()
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in records] == ["train", "train", "epoch", "val", "val_ema"]
    record, lines = records[3], outcome.output.splitlines()
    # 3, 2 and 2 images of the classes, so that their accuracies and Acc@1 must agree.
    hits = [accuracy * count / 100 for accuracy, count in zip(record["by_class"], (3, 2, 2), strict=True)]
    assert record["acc1"] == pytest.approx(100 * sum(hits) / 7)
    shown = [f"{name} {record[name]:.3f}" for name in ("acc1", "loss", "worst_class", "even")]
    assert "Test: " + " ".join([*shown, "n=7"]).replace("acc", "Acc@") in lines
    means = re.compile(r"acc1: \S+ \(\S+\)  worst_class: \S+ \(\S+\)  even: \S+ \(\S+\)  img/s")
    assert [bool(means.search(line)) for line in lines if re.match(r"Epoch: \[0\]  \[", line)] == [True, True]
    assert not [each for each in records if "acc5" in each]  # of three classes
    points = read_points(tmp_path / "out")
    for name in ("loss", "acc1", "worst_class", "even"):
        assert [value for _, value in points.pop(f"val/{name}")] == pytest.approx([record[name]])
    assert not [tag for tag in points if tag.startswith("val/")]


def check_order(rank, world_size):
    totals = [1e16, 1.0, 1.0, -1e16, 0.1, 0.2, 0.3, 1e16]  # whose sum is another in another order
    num_local = 4 // world_size
    tally = metrics.Tally([], num_local)
    for step in (0, 1):
        for shard in range(rank * num_local, (rank + 1) * num_local):
            loss = torch.tensor(totals[4 * step + shard], dtype=torch.float64)
            tally.update(loss, torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), None)
    assert tally.synchronize_between_processes()[:, 0].tolist() == totals
    assert tally.state_dict() == {
        "sums": [functools.reduce(lambda sum, value: sum + value, totals, 0.0), 8.0], "metrics": ["Loss 1"],
    }  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [1, 4])
def test_a_tally_adds_in_the_order_of_steps_and_shards(tmp_path, world_size):
    run_check(world_size, check_order, tmp_path)


@pytest.mark.parametrize("num_classes", [2, 3, 5, 20])
def test_count_correct_and_accuracy_agree_with_ranks(num_classes):
    output = torch.randn(64, num_classes, generator=torch.Generator().manual_seed(2))
    target = torch.arange(64) % num_classes
    soft = torch.full((64, num_classes), 0.05).scatter_(1, target[:, None], 0.55)
    places = (output > output.gather(1, target[:, None])).sum(1)  # how many classes have a higher score than the target
    expected = [(places < k).sum().item() for k in (1, 3, 5)]
    for labels in (target, soft):
        counts = metrics.count_correct(output, labels, topk=(1, 3, 5))
        assert [count.item() for count in counts] == expected
        assert all(count.dtype == torch.int64 and count.ndim == 0 for count in counts)
    percent = utils.accuracy(output, target, topk=(1, 3, 5))
    assert [share.item() for share in percent] == [count * 100 / 64 for count in expected]  # / 64 is exact
