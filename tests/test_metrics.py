"""What is measured, by runs and scripts/evaluate.py: every number by another computation, on any processes."""

import argparse
import copy
import csv
import functools
import json
import math
import os
import random
import re
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import data
import metrics
import sampler
import train
import utils
from errors import UserError
from loading.decode import AS_STORED
from loading.forms import open_source
from loading.index import ArraySource, encode
from loading.remote import RemotePack
from loading.subset import first_of_each_class
from metrics.per_class import F1, BalancedAccuracy
from metrics.ranking import MeanAveragePrecision, average_precision, rank_classes
from models.build import build_model
from models.class_weights import class_weights
from models.losses import build_criterion
from scripts import evaluate
from scripts.scores import calibration_error, share_text, wilson_interval
from scripts.trained import open_trained
from settings import config
from settings.options import OptimizationOptions
from settings.stages import Parsed
from tests.endings import differing, differing_results, read_metrics, read_points
from tests.exports import run_tool
from tests.images import pack_whole, write_images
from tests.ranks import Outcome, run_check, run_ranks, tool_rank, train_rank
from tests.runs import FLAG, Runs, assert_same
from tests.servers import RangeServer
from tests.started import SMALL, refused, run_train


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


class Keyed(DataLoader):
    """A plain loader with the keys of the batch that it yielded last."""

    def __iter__(self):
        for keys, batch in zip(self.batch_sampler, super().__iter__(), strict=True):
            self.keys = keys
            yield batch


def device_loader(tensors, batch_size, keys):
    loader = Keyed(TensorDataset(*tensors), batch_size, sampler=keys)
    return data.DeviceLoader(loader, torch.device("cpu"), lambda image, target, *_: (image, target))


def measure(measured, print_freq=100):
    """Return what an evaluation of the scored images measures; test_train.py does so on several processes."""
    loader = device_loader(scored_images(), 4, sampler.EvalSampler(NUM_IMAGES, 4, 0, 1))
    return train.measure(nn.Identity(), nn.CrossEntropyLoss(), loader, "cpu", print_freq, metrics=measured)


def test_an_evaluation_and_a_metric_of_ones_own_have_the_numbers_counted_by_hand():
    result = measure([metrics.Accuracy(), ClassAccuracy(NUM_CLASSES), EvenImages()])
    scores, labels = scored_images()
    losses = [-math.log(row.exp()[label] / row.exp().sum()) for row, label in zip(scores, labels, strict=True)]
    assert result["loss"] == pytest.approx(sum(losses) / NUM_IMAGES, rel=1e-6)  # float32 means of batches
    assert result["acc5"] == 100.0  # four classes: every image's is among the best four
    loader = DataLoader(TensorDataset(scores, labels), 4)
    assert train.evaluate(nn.Identity(), nn.CrossEntropyLoss(), loader, "cpu") == result["acc1"]
    hits = [row.index(max(row)) == label for row, label in zip(scores.tolist(), labels.tolist(), strict=True)]
    by_class = [[hit for hit, label in zip(hits, labels.tolist(), strict=True) if label == c] for c in range(3)]
    assert result["by_class"][:3] == [100 * sum(each) / len(each) for each in by_class]
    assert result["by_class"][3] != result["by_class"][3]  # no image, no accuracy
    assert result["worst_class"] == min(result["by_class"][:3])
    assert result["even"] == 100 * sum(hits[::2]) / len(hits[::2])
    assert result["acc1"] == 100 * sum(hits) / NUM_IMAGES


def test_the_means_of_a_line_are_of_all_images_so_far(capsys):
    recall_score = pytest.importorskip("sklearn.metrics").recall_score
    measure([metrics.Accuracy(), BalancedAccuracy(NUM_CLASSES)], print_freq=2)
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
    assert torch.equal(F1(30).batch_sums(output, target, None)[1], first.bincount(minlength=30))
    rows = rank_classes(output, target, 3)
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


# Several labels an image: lists of them, the loss, mAP and F1 against scikit-learn, and what cannot be.
CLASSES = ["bird", "cat", "dog", "fish"]


def truth_of(number):
    return sorted(random.Random(number).sample(CLASSES, number % 4))  # 0 to 3 of them


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labelled")
    (folder / "photos").mkdir()
    for split, numbers in {"train": range(48), "val": range(100, 120)}.items():
        rows = []
        for number in numbers:
            Image.new("RGB", (32, 32), (5 * number % 256, 30, number)).save(folder / "photos" / f"{number}.png")
            rows.append(f'photos/{number}.png,"{", ".join(reversed(truth_of(number)))}"\n')
        (folder / f"{split}.csv").write_text("path,label\n" + "".join(rows))
    return folder


def options(folder, *argv):
    return config.parse_args(["--data-path", str(folder), "--multi-label", "--bce-loss", *argv])


def test_batches_hold_zeros_and_ones_as_the_list_says(labelled):
    args = options(labelled, *"--workers 0 --device cpu --train-crop-size 32 --val-crop-size 32".split())
    sets = data.build_datasets(str(labelled / "train"), str(labelled / "val"), args)
    args = config.assign(args.replaced(rank=0, world_size=1), None)
    samplers = (
        data.build_train_sampler(sets[0], args.augmentation, args.optimization, args.distributed),
        data.build_eval_sampler(sets[1], args.optimization, args.distributed),
    )
    for dataset, each in zip(sets, samplers, strict=True):
        assert dataset.classes == CLASSES
        loader = data.build_device_loader(
            args,
            data.build_loader(dataset, None, args.data, args.augmentation, args.optimization, args.distributed.device),
            each,
            torch.device("cpu"),
            4,
        )
        for (_, target), numbers in zip(loader, loader.numbers(), strict=True):
            for row, number in zip(target.tolist(), numbers.tolist(), strict=True):
                known = truth_of(int(Path(dataset.index.path(number)).stem))
                assert row == [float(name in known) for name in CLASSES]


def test_other_forms_of_the_same_list_are_the_same_set(labelled, tmp_path):
    (tmp_path / "photos").symlink_to(labelled / "photos")
    (tmp_path / "classes.txt").write_text("\n".join(CLASSES))
    expected = open_source(labelled / "train", ",")
    labels = {f"photos/{number}.png": truth_of(number) for number in range(48)}
    numbers = [[str(CLASSES.index(each)) for each in names] for names in labels.values()]
    for name, lines in {
        "a.jsonl": [json.dumps({"path": path, "label": names}) for path, names in labels.items()],
        "b.csv": ["path,label", *(f'{path},"{";".join(names)}"' for path, names in labels.items())],
        "c.csv": ["path,label", *(f'{path},"{",".join(each)}"' for path, each in zip(labels, numbers, strict=True))],
    }.items():
        (tmp_path / name).write_text("\n".join(lines))
        found = open_source(tmp_path / name[0], ";" if name == "b.csv" else ",")
        assert found.classes == CLASSES
        both = [{Path(each.path(n)).stem: each.class_name(n) for n in range(48)} for each in (found, expected)]
        assert both[0] == both[1]
        assert name != "a.jsonl" or found.fingerprint() == expected.fingerprint()


def test_map_and_f1_are_scikit_learns():
    sklearns = pytest.importorskip("sklearn.metrics")
    rng = numpy.random.default_rng(0)
    truth = rng.random((203, 6)) < [0.5, 0.2, 0.1, 0.02, 0.7, 0]
    truth[0, 3] = True
    scores = numpy.round(rng.normal(size=truth.shape) + truth - 0.5, 1).astype(numpy.float32)  # with ties
    counted, ranked = F1(6, is_multi_label=True), MeanAveragePrecision(6)
    tally = metrics.Tally([counted, ranked])
    for i in range(0, 203, 50):
        output, target = torch.from_numpy(scores[i : i + 50]), torch.from_numpy(truth[i : i + 50]).float()
        tally.update(torch.tensor(0.0), output, target, None)
        ranked.observe(output, target, None)
    tally.synchronize_between_processes()
    values = tally.compute_and_reset()[0] | ranked.gather()
    average = sklearns.average_precision_score(truth[:, :5], scores[:, :5], average="macro")
    assert values["map"] == pytest.approx(100 * average, rel=1e-12)
    assert values["f1_micro"] == pytest.approx(100 * sklearns.f1_score(truth, scores > 0, average="micro"))
    assert values["f1"] == pytest.approx(100 * sklearns.f1_score(truth, scores > 0, average="macro"))


def test_scores_without_an_order_have_no_precision_and_equal_infinite_ones_are_ties():
    ranked = MeanAveragePrecision(1)
    ranked.observe(torch.tensor([[1.0], [float("nan")]]), torch.tensor([[1.0], [0.0]]), None)
    assert math.isnan(ranked.gather()["map"])
    scores = numpy.array([numpy.inf, numpy.inf])
    assert average_precision(scores, numpy.array([True, False])) == 0.5
    assert average_precision(scores, numpy.array([False, True])) == 0.5


@pytest.mark.parametrize(("label", "words"), [
    (["tench, Tinca"], "label 'tench, Tinca' contains ','; give --multi-label another separator"),
    ([None], "expected one name or number"), ([True], "expected one name or number"), ([["x"]], "expected one name"),
    ([1.5], "expected one name or number"),
])  # fmt: skip
def test_labels_that_cannot_be_told_apart_are_refused(labelled, tmp_path, label, words):
    (tmp_path / "photos").symlink_to(labelled / "photos")
    (tmp_path / "train.jsonl").write_text(json.dumps({"path": "photos/1.png", "label": label}))
    with pytest.raises(UserError, match="line 1: .*" + re.escape(words)):
        open_source(tmp_path / "train", ",")


@pytest.fixture(scope="module")
def trained(started, labelled, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    argv = [*started.argv, "--data-path", labelled, "--multi-label", "--bce-loss", "--epochs", 2]
    run_train(folder, *argv, "--output-dir", folder / "out").check()
    return folder / "out"


def test_predictions_are_of_each_class_by_itself(trained, labelled, tmp_path):
    best, photo, exported = trained / "best.pth", labelled / "photos" / "1.png", tmp_path / "exported"
    model = timm.create_model("tiny_test", num_classes=4).eval()
    model.load_state_dict(torch.load(best, weights_only=True)["model"])
    pixels = torch.from_numpy(numpy.array(Image.open(photo))).permute(2, 0, 1)[None] / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.no_grad():
        expected = model((pixels - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)).sigmoid()[0]
    forms = ["weights", "safetensors", "torch-export"]
    run_tool(tmp_path, "export", best, "--format", *forms, "--output", exported)
    files = [path for path in sorted(exported.iterdir()) if path.suffix != ".json"]
    assert len(files) == len(forms)
    for file in [best, *files]:
        (image,) = json.loads(run_tool(tmp_path, "predict", file, photo, "--json", "--topk", 4)[1])["images"]
        found = {each["class"]: each["probability"] for each in image["top"]}
        assert [found[name] for name in CLASSES] == pytest.approx(expected.tolist(), rel=1e-4)
    run_tool(tmp_path, "predict", best, labelled / "train.csv", "--html", tmp_path / "p.html", "--device", "cpu")
    shown = (tmp_path / "p.html").read_text()
    assert all(", ".join(reversed(truth_of(number))) in shown for number in range(48))
    assert "known class" not in shown
    again = ["--test-only", "--weights", best, "--model", "timm/tiny_test", "--data-path", labelled, "--device", "cpu"]
    assert " map " in run_train(tmp_path, *again).check().output  # by the checkpoint's own options
    _, output = run_tool(tmp_path, "check", labelled, "--multi-label", "--expect-val", "any", "--workers", 1)
    assert "48 images of 4 classes" in output


def test_an_evaluation_has_scikit_learns_numbers_on_any_number_of_processes(trained, labelled, tmp_path):
    sklearns, last, results = pytest.importorskip("sklearn.metrics"), trained / "checkpoint.pth", []
    for world_size in (1, 2):
        files = ["--json", tmp_path / "r.json", "--predictions", tmp_path / "p.csv", "--html", tmp_path / "p.html"]
        argv = [last, "--set", f"val={labelled / 'val'}"]
        run(tmp_path, *argv, *files, world_size=world_size).check()
        results.append([(tmp_path / name).read_text(encoding="utf-8-sig") for name in ("r.json", "p.csv", "p.html")])
    assert results[0] == results[1]
    found = json.loads(results[0][0])["sets"]["val"]
    rows = list(csv.DictReader(results[0][1].splitlines()))
    assert len(rows) == found["images"] == 20
    truth = numpy.array([[name in row["label"].split() for name in CLASSES] for row in rows])
    numbers = [int(Path(row["file"]).stem) for row in rows]
    assert [sorted(row["label"].split()) for row in rows] == list(map(truth_of, numbers))
    shares = [{row[f"class{rank}"]: float(row[f"p{rank}"]) for rank in range(1, 5)} for row in rows]
    shares = numpy.array([[row[name] for name in CLASSES] for row in shares])
    assert found["map"] == pytest.approx(100 * sklearns.average_precision_score(truth, shares, average="macro"))
    assert found["f1"] == pytest.approx(100 * sklearns.f1_score(truth, shares > 0.5, average="macro"))
    assert found["bce"] == pytest.approx(-numpy.log(numpy.where(truth, shares, 1 - shares)).mean(), rel=1e-4)
    recorded = [each for each in read_metrics(trained / "metrics.jsonl") if each["kind"] == "val"][-1]
    assert found["map"] == pytest.approx(recorded["map"], rel=1e-6)
    assert found["bce"] == pytest.approx(recorded["loss"], rel=1e-5)
    assert "average precision,&nbsp;%" in results[0][2]
    outcome, _ = run_tool(tmp_path, "evaluate", *argv, "--confusion", tmp_path / "c.csv", code=2)
    assert "--confusion is of models of one class an image" in outcome.output


def test_a_pack_of_several_labels_is_the_list_on_a_disk_and_behind_an_address(started, labelled, tmp_path):
    packed = tmp_path / "packed"
    run_tool(tmp_path, "pack", "--data-path", labelled, packed, "--short-side", 32, "--multi-label", "--workers", 1)
    for path in packed.iterdir():
        os.utime(path, (0, 0))  # an index of what has just changed is not cached
    with RangeServer(packed) as server:
        for split in ("train", "val"):
            listed, remote = open_source(labelled / split, ","), RemotePack(server.url, split, str(tmp_path / "cache"))
            for pack in (open_source(packed / split, ";"), open_source(packed / split, ";"), remote):  # scanned, cached
                assert pack.classes == CLASSES
                assert [pack.name(number) for number in range(len(pack))] == listed.names.astype(str).tolist()
                assert pack.label_sets[pack.labels].tolist() == listed.label_sets[listed.labels].tolist()
                assert pack.fingerprint() == listed.fingerprint()
        server.shutdown()
    refused(run_train(tmp_path, *started.argv, "--data-path", packed, "--output-dir", tmp_path / "x"), "--multi-label")
    manifest = json.loads((packed / "manifest.json").read_text())
    for change in ({"classes": CLASSES[:2]}, {"classes": 3}, {"folders": {"bird": ["bird"]}}, {"folders": None}):
        damaged = copy.deepcopy(manifest)
        damaged["facts"]["train labels"].update(change)
        (packed / "manifest.json").write_text(json.dumps(damaged))
        with pytest.raises(UserError, match="pack again"):
            open_source(packed / "train", ",")


def test_class_folders_and_lists_of_one_label_are_told_what_to_do(started, tmp_path, labelled):
    argv = [*started.argv, "--multi-label", "--bce-loss", "--output-dir", tmp_path / "out"]
    refused(run_train(tmp_path, *argv), "--multi-label needs a list of labels, such as ")
    with pytest.raises(UserError, match="acc1 is not among --metrics; there are loss, f1, f1_micro, map"):
        metrics.build_metrics(options(labelled, "--best-metric", "acc1"), 4)
    (tmp_path / "photos").symlink_to(labelled / "photos")
    row = json.dumps({"path": "photos/1.png", "label": ["cat", "dog"]}) + "\n"
    for split in ("train", "val"):
        (tmp_path / f"{split}.jsonl").write_text(row)
    argv = [*started.argv, "--data-path", tmp_path, "--output-dir", tmp_path / "out"]
    refused(run_train(tmp_path, *argv), "line 1: label is ['cat', 'dog']; expected one name or number (several labels")


# Uneven classes: weights of the loss, the balanced order and metrics, against scikit-learn, torch and plain loops.
SIZES = [40, 30, 20, 1]
LABELS = numpy.repeat(range(4), SIZES)


class Uneven(ArraySource):
    form, classes, labels = "uneven", [f"class{number}" for number in range(4)], LABELS
    names = encode(f"class{label}/{number}.png" for number, label in enumerate(LABELS))


def sampler_of(epoch, seed=0):
    balanced = sampler.TrainSampler(91, sampler.VirtualShards(1, 1), seed, labels=torch.from_numpy(LABELS))
    balanced.set_epoch(epoch)
    return balanced


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
    args = Parsed().replaced(class_weights="balanced", device="cpu", label_smoothing=smoothing)
    images = data.IndexedImageFolder("", None, source=Uneven(Path()))
    compute_class_weight = pytest.importorskip("sklearn.utils.class_weight").compute_class_weight
    expected = compute_class_weight("balanced", classes=numpy.arange(4), y=LABELS)
    torch.testing.assert_close(
        class_weights(args.optimization, args.distributed.device, images).double().numpy(), expected, rtol=1e-6, atol=0
    )
    criterion = build_criterion(args, images)
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
    args = args.replaced(bce_loss=True)
    criterion = build_criterion(args, images)
    weight = torch.tensor([(91 - size) / size for size in SIZES])
    expected = nn.BCEWithLogitsLoss(pos_weight=weight)(output, soft * (1 - smoothing) + smoothing / 4)
    torch.testing.assert_close(criterion(output, soft), expected)


def test_balanced_accuracy_and_f1_are_scikit_learns():
    sklearns, rng = pytest.importorskip("sklearn.metrics"), numpy.random.default_rng(0)
    truth = rng.choice(5, 200, p=[0.6, 0.2, 0.15, 0.05, 0])
    scores = torch.from_numpy(rng.normal(size=(200, 5)) + 1.5 * (truth[:, None] == numpy.arange(5)))
    scores[:, 3] -= 9  # never right
    tally = metrics.Tally([BalancedAccuracy(5), F1(5)])
    for i in range(0, 200, 30):
        tally.update(torch.tensor(0.0), scores[i : i + 30], torch.from_numpy(truth[i : i + 30]), None)
    tally.synchronize_between_processes()
    values, _ = tally.compute_and_reset()
    predicted = scores.argmax(1).numpy()
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        assert values["balanced_acc"] == pytest.approx(100 * sklearns.balanced_accuracy_score(truth, predicted))
    assert values["never_right"] == 1
    assert values["f1"] == pytest.approx(100 * sklearns.f1_score(truth, predicted, average="macro"))
    assert values["f1_micro"] == pytest.approx(100 * sklearns.f1_score(truth, predicted, average="micro"))


def test_a_line_names_a_class_of_few_images_unless_an_option_is_about_it(capsys):
    given = {"balanced_sampler": False, "class_weights": None, "synthetic": None}
    images = data.IndexedImageFolder("", None, source=Uneven(Path()))
    for name, value in {"": None, "balanced_sampler": True, "class_weights": "balanced", "synthetic": 9}.items():
        data.warn_of_uneven(images, **given | ({name: value} if name else {}))
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
        class_weights(OptimizationOptions(class_weights=str(tmp_path / "w.csv")), "cpu", Uneven(Path()))


COUNTS, BATCH = [13, 12, 9], 4
NAMES = [f"class{number}" for number in range(5)]


def run(tmp_path: Path, *argv, world_size: int = 1, workers: int = 0, fault=None, stdout=None) -> Outcome:
    argv = [*argv, "--batch-size", BATCH, "--workers", workers, "--device", "cpu"]
    return run_ranks(tool_rank, world_size, "evaluate", argv, stdout, fault, log_folder=tmp_path, timeout_s=60)


def results(tmp_path: Path, *argv, **options) -> dict:
    run(tmp_path, *argv, "--json", tmp_path / "results.json", **options).check()
    return json.loads((tmp_path / "results.json").read_text())["sets"]


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def refusal(*argv) -> str:
    with pytest.raises(UserError) as error:
        evaluate.evaluate(evaluate.get_args_parser().parse_args(list(map(str, argv))))
    [line] = str(error.value).splitlines()
    return line


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"), {"val": COUNTS}) / "val"


def open_blank(num_classes: int) -> torch.nn.Module:
    given = argparse.Namespace(model="timm/test_resnet", test_only=True, resume="x", synthetic=1, val_crop_size=32)
    return build_model(config.resolve(given), num_classes)


def write_checkpoint(path: Path, names: list[str]) -> Path:
    """Write a model of drawn weights that is sure of much that is wrong."""
    model = open_blank(len(names))
    model.fc.weight.data.mul_(30)
    options = {"model": "timm/test_resnet", "val_resize_size": 32, "val_crop_size": 32}
    torch.save({"model": model.state_dict(), "args": options, "data": {"classes": names}}, path)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "five.pth", NAMES)


@pytest.fixture(scope="module")
def of_three(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "three.pth", NAMES[:3])


def logits_of(checkpoint: Path, images: Path, columns: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (N, len(columns)) scores of the given classes and the (N,) class of each image."""
    trained = open_trained(str(checkpoint))
    dataset = data.IndexedImageFolder(images, trained.preset)
    with torch.inference_mode():  # in the same batches, for kernels differ by their sizes
        batches = torch.stack([dataset[number][0] for number in range(len(dataset))]).split(BATCH)
        output = torch.cat([trained.model(batch)[:, columns] for batch in batches])
    return output.double(), torch.tensor(dataset.targets)


def plain_metrics(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    hits = logits.topk(2).indices == targets[:, None]
    found = {f"acc{k}": 100 * hits[:, :k].any(1).double().mean().item() for k in (1, 2)}
    confidence = logits.softmax(1).amax(1)
    bins = torch.bucketize(confidence, torch.arange(16, dtype=torch.float64) / 15)
    gaps = [(confidence - hits[:, 0].double())[bins == number].sum().abs() for number in range(1, 16)]
    nll = torch.nn.functional.cross_entropy(logits, targets)
    return {**found, "nll": nll.item(), "ece": sum(gaps).item() / len(targets)}


def test_metrics_are_torchs_without_classes_that_a_set_lacks(of_three, checkpoint, images, tmp_path):
    subset, path = tmp_path / "subset", tmp_path / "predictions.csv"
    shutil.copytree(images / "class1", subset / "class4")
    shutil.copytree(images / "class2", subset / "class0")
    for model, folder, columns in ((of_three, images, [0, 1, 2]), (checkpoint, subset, [0, 4])):
        found = results(tmp_path, model, "--set", f"a={folder}", "--topk", "1,2", "--predictions", path)["a"]
        logits, targets = logits_of(model, folder, columns)
        expected = plain_metrics(logits, targets)
        assert 0 < expected["acc1"] < 100  # otherwise this tells little
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)
        assert (found["images"], found["classes"], found["classes_found_by"]) == (len(targets), len(columns), "name")
        assert found["is_restricted_to_its_classes"] is (folder == subset)
        for row, scores, target in zip(read_csv(path), logits, targets, strict=True):
            assert list(row) == ["set", "file", "label", "class1", "p1", "class2", "p2"]
            assert row["label"] == f"class{columns[target]}"
            assert row["file"].startswith(f"{row['label']}/image")
            assert row["class1"] == f"class{columns[scores.argmax()]}"
            shares = scores.softmax(0).sort(descending=True).values.tolist()
            assert [float(row["p1"]), float(row["p2"])] == pytest.approx(shares[:2], rel=1e-6)


def test_the_page_and_the_confusion_are_those_of_the_scores(of_three, images, tmp_path):
    source = data.IndexedImageFolder(images, None).index
    argv = [of_three, "--set", f"val={images}", "--html", tmp_path / "page.html", "--confusion"]
    run(tmp_path, *argv, tmp_path / "counts.csv").check()
    run(tmp_path, *argv, tmp_path / "counts.png").check()
    logits, targets = logits_of(of_three, images, [0, 1, 2])
    confidence, predicted = logits.softmax(1).max(1)
    whole = pytest.importorskip("sklearn.metrics").confusion_matrix(targets, predicted)
    rows = [{"true class": NAMES[n], **dict(zip(NAMES, map(str, whole[n]), strict=False))} for n in range(3)]
    assert read_csv(tmp_path / "counts.csv") == rows
    with Image.open(tmp_path / "counts.png") as picture:
        assert min(picture.size) >= 600
    page = (tmp_path / "page.html").read_text().replace("&nbsp;", " ")
    measures = re.findall("<tr><td>([^<]+)", page)[: -len(COUNTS)]
    assert measures == ["images", "classes", "Acc@1", "95% of Acc@1", "NLL", "ECE"]  # no Acc@5, which is 100
    wrong = [n for n in range(len(targets)) if predicted[n] != targets[n]]
    wrong.sort(key=lambda n: -confidence[n])
    files = [Path(source.path(n)).name for n in wrong]
    pairs = zip(files, wrong, strict=True)
    lines = [f"{file}<br>{confidence[n]:.1%} class{predicted[n]}<br>is class{targets[n]}" for file, n in pairs]
    assert re.findall(r"<figcaption>(.*?)</figcaption>", page) == lines
    accuracies = [(f"class{label}", str(whole[label, label]), str(n)) for label, n in enumerate(COUNTS)]
    found = re.findall(r"<tr><td>(class\d)<td>[\d.]+ % \((\d+) of (\d+); 95 %: [\d.]+ to [\d.]+\)<td>[^<]*", page)
    assert sorted(found) == accuracies
    shares = [int(hits) / int(n) for _, hits, n in found]
    assert shares == sorted(shares)  # the worst first
    assert len(page) < 2e6


def test_results_are_the_same_on_any_number_of_processes_and_after_a_kill(checkpoint, images, tmp_path):
    files, whole = [tmp_path / "predictions.csv", tmp_path / "results.json"], []
    shutil.copytree(images / "class1", tmp_path / "part" / "class1")
    argv = [checkpoint, "--set", f"val={images}", "--set", f"part={tmp_path / 'part'}", "--predictions", files[0]]
    argv += ["--json", files[1]]
    assert run(tmp_path, *argv, fault=("os.replace", 1, "after")).codes == [-9]
    left = {path: path.read_bytes() for path in files if path.exists()}
    for world_size in (1, 3):
        outcome = run(tmp_path, *argv, world_size=world_size).check()
        assert sum("95% of Acc@1" in output for output in outcome.outputs) == 1, outcome.output
        whole.append({path: path.read_bytes() for path in files})
    assert whole[0] == whole[1]
    assert left.items() < whole[0].items()
    assert len(whole[0][files[0]].splitlines()) == 1 + 34 + 12


# The last is method 3 in table I of Newcombe, Statistics in Medicine 17 (1998), 857-872.
@pytest.mark.parametrize(("hits", "n", "published"), [
    (81, 263, (25.53, 36.62)), (15, 148, (6.24, 16.05)), (0, 20, (0, 16.11)), (1, 29, (0.61, 17.18)),
    (42, 42, (91.6, 100)), (1, 1, None), (38_065, 50_000, None),
])  # fmt: skip
def test_the_interval_is_wilsons(hits, n, published):
    found = wilson_interval(hits, n)
    whole = pytest.importorskip("scipy.stats").binomtest(hits, n).proportion_ci(0.95, "wilson")
    assert found == pytest.approx([100 * whole.low, 100 * whole.high], abs=1e-4)
    assert 0 <= found[0] < found[1] <= 100
    assert published is None or found == pytest.approx(published, abs=0.06 if n == 42 else 0.006)


def test_a_share_is_told_with_its_numbers_and_the_digits_that_its_interval_leaves():
    assert share_text(37, 42) == "88.1 % (37 of 42; 95 %: 75 to 95)"
    assert share_text(42, 42) == "100.00 % (42 of 42; 95 %: 91.6 to 100.0)"
    assert share_text(38_065, 50_000) == "76.130 % (38,065 of 50,000; 95 %: 75.75 to 76.50)"


def test_a_bin_of_the_calibration_error_holds_its_upper_edge():
    # 3/15 is in bin 3, of which both images are: their mean confidence is 0.19, and one of two is right.
    assert calibration_error(numpy.array([0.2, 0.18]), numpy.array([True, False])) == pytest.approx(0.31)
    assert calibration_error(numpy.array([1.0, 0.0]), numpy.array([True, False])) == 0


def test_a_tar_and_the_average(of_three, images, tmp_path):
    pack_whole(images, tmp_path)  # train.tar
    average = {f"module.{name}": tensor for name, tensor in open_blank(3).state_dict().items()}
    both = tmp_path / "both.pth"
    torch.save({**torch.load(of_three), "model_ema": {"n_averaged": torch.tensor(1), **average}}, both)
    raw = results(tmp_path, both, "--set", f"val={images}", f"tar={tmp_path / 'train'}")
    assert raw["tar"] == raw["val"]
    ema = results(tmp_path, both, "--ema", "--set", f"val={images}")["val"]
    assert ema["nll"] < 1.5 < raw["val"]["nll"]


@pytest.mark.parametrize("fold", [["--minival-fold", 2], pytest.param([], marks=pytest.mark.slow)])
def test_minival_is_what_training_has_held_out(image_folder, tmp_path, fold):
    options = ["--data-path", image_folder, *SMALL, "--batch-size", BATCH]
    held, last, train = ["--minival", 0.25], tmp_path / "out" / "checkpoint.pth", image_folder / "train"
    run_train(tmp_path, *options, *held, *fold, "--epochs", 1, "--output-dir", tmp_path / "out").check()
    line = {line["kind"]: line for line in read_metrics(tmp_path / "out" / "metrics.jsonl")}["minival"]
    found = results(tmp_path, last, "--set", f"minival={train}", *held, *fold)["minival"]
    assert found["images"] in (3 + 3 + 2, 2 + 3 + 2)
    assert (found["nll"], found["acc1"]) == pytest.approx((line["loss"], line["acc1"]))
    others = run(tmp_path, last, "--set", f"minival={train}", *held, "--minival-fold", 1).check()
    assert "the checkpoint was trained on these images" in others.output
    # And train.py, of weights and of a checkpoint.
    for word in ("--weights", "--resume"):
        seen, unseen = (
            run_train(tmp_path, *options, "--test-only", word, last, *held, *each).check().output
            for each in (["--minival-fold", 1], fold)
        )
        assert f"{word} {last} has trained on images that --minival 0.25 --minival-fold 1 holds out" in seen
        assert "has trained on images" not in unseen
    told = run(tmp_path, last, "--set", f"seen={train}", "--set", f"new={image_folder / 'val'}").check().output
    assert "seen: the checkpoint was trained on these images, unless --minival held some out" in told
    assert "new: the checkpoint" not in told


def image_set(name: str, words: list[str]) -> evaluate.ImageSet:
    source = ArraySource(Path())
    source.classes, source.labels = words, numpy.arange(len(words))
    return evaluate.ImageSet(name, source, AS_STORED)


def found(each: evaluate.ImageSet, names: list[str] | None, num_classes: int, sets=(), *, script="torchvision"):
    """Return the numbers of a set's classes in a model, and how they were found."""
    evaluate.number_classes([each, *sets], SimpleNamespace(classes=names, script=script), num_classes)
    return each.labels.tolist(), each.found_by


def test_classes_are_found_by_name_number_order_or_synset():
    synsets = [f"n{number:08d}" for number in (11, 22, 33, 44)]
    whole, part = image_set("val", synsets), image_set("a", [synsets[0], synsets[2]])
    numbered = image_set("v2", ["0", "1", "10", "2"])
    assert found(part, synsets, 4, [whole]) == ([0, 2], "name")
    assert part.columns.tolist() == [0, 2]
    assert found(numbered, synsets * 3, 11) == ([0, 1, 10, 2], "number")
    # ImageFolder calls folder 10 class 2, and weights without names may be torchvision's.
    for words in (["0", "1", "10", "2"], ["10", "11"], ["0", "1"]):
        with pytest.raises(UserError, match="leading zeros"):
            found(image_set("v2", words), None, 12)
    assert found(image_set("v2", ["00", "02", "10"]), None, 12) == ([0, 2, 10], "number")
    assert found(image_set("v2", ["1", "9"]), None, 10) == ([1, 9], "number")
    for names, script in [(None, "torchvision"), (["crane", "kite", "crane", "tench"], "")]:
        assert found(whole, names, 4, [part], script=script) == ([0, 1, 2, 3], "order")
        assert found(part, names, 4, [whole], script=script) == ([0, 2], "synset")
        with pytest.raises(UserError, match="is none of the 4 classes"):
            found(part, names, 4, script=script)
    part = image_set("a", ["n01440764", "n01443537", "n15075141"])  # tench, goldfish, toilet tissue
    assert found(part, None, 1000) == ([0, 1, 999], "synset")
    with pytest.raises(UserError, match="n00000055"):
        found(image_set("other", [*synsets, "n00000055"]), synsets, 4, [whole])


def test_what_is_given_wrongly_is_refused_in_one_line(checkpoint, images, tmp_path):
    val = f"val={images}"
    shutil.copytree(images / "class0", tmp_path / "other" / "dog")
    (tmp_path / "flat").mkdir()
    for number, path in enumerate(sorted((images / "class0").iterdir())[:3]):
        shutil.copy(path, tmp_path / "flat" / f"ILSVRC2012_val_{number:08d}.JPEG")
    picture = tmp_path / "mine.png"
    picture.touch()
    for argv, words in [
        (["val"], "expected NAME=DIR"), ([f"val={tmp_path / 'nowhere'}"], "holds no images"),
        ([val, val], "two sets are called val"),
        ([f"flat={tmp_path / 'flat'}"], "3 images and no class folders.* scripts.prepare"),
        ([f"a={tmp_path / 'other'}"], "dog is none of the 5 classes of the checkpoint, such as class0, class1"),
        ([val, "--json", tmp_path / "no" / "a.json"], "expected a file in a folder that is there"),
        ([val, "--predictions", tmp_path / "a", "--json", tmp_path / "a"], "one file"),
        ([val, "--minival", "0.1"], "are given together"),
        ([val, "--confusion", tmp_path / "a.txt"], "a.txt: expected FILE.csv or FILE.png, and a single --set"),
        ([val, f"b={images}", "--confusion", tmp_path / "a.csv"], "and a single --set"),
        ([val, "--confusion", picture], r"there already, and only files named \*.csv are replaced"),
        ([val, "--model", "resnet18"], "--model is resnet18"),
    ]:  # fmt: skip
        assert re.search(words, line := refusal(checkpoint, "--set", *argv)), line
    assert "no such file" in refusal(tmp_path / "none.pth", "--set", val)
    assert "above 0" in refusal(tmp_path / "none.pth", "--set", val, "--minival", 0)  # before the model is opened
    assert not list(tmp_path.glob("*.tmp*"))


@pytest.mark.parametrize(("world_size", "stdout"), [(2, "/dev/full"), (1, "/dev/full"), (2, None)])
def test_results_that_cannot_be_printed_and_a_bad_image_end_in_one_line(of_three, images, tmp_path, world_size, stdout):
    broken = shutil.copytree(images, tmp_path / "broken")
    if stdout is None:
        (broken / "class1" / "image002.jpg").write_bytes(b"<html>")
    argv = [of_three, "--set", f"a={broken}", "--json", tmp_path / "a.json"]
    outcome = run(tmp_path, *argv, world_size=world_size, workers=2 if stdout else 0, stdout=stdout)
    lines = [line for line in outcome.output.splitlines() if "error" in line or "Traceback" in line]
    words = "standard output cannot be written: No space left" if stdout else "image002.jpg (class class1): "
    assert any(words in line for line in lines)
    assert all(line.startswith("python -m scripts.evaluate: error") for line in lines)
    assert len(lines) == 1 or not stdout
    assert 1 in outcome.codes
    assert stdout or not (tmp_path / "a.json").exists()


# Evaluations of a run: when, on which images, and when it ends because nothing gets better.


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    runs = Runs(image_folder, tmp_path_factory.mktemp("runs"))
    runs.run("undisturbed", 4, *HELD).check()  # for three batches of the held-out images
    return runs


# 23 images are left, in two steps an epoch; epochs 1 and 3 and, as the last one, 4 are evaluated.
HELD = [FLAG, "--minival", 0.2, "--eval-every", 2, "--epochs", 5, "--print-freq", 4]


def test_every_second_epoch_and_the_last_one_are_evaluated(runs):
    kinds = {}
    for record in runs.metrics("undisturbed"):
        kinds.setdefault(record["kind"], []).append((record["epoch"], record["step"]))
    assert kinds.keys() == {"train", "minival", "minival_ema"}
    assert kinds["minival"] == kinds["minival_ema"] == [(1, 4), (3, 8), (4, 10)]
    final = runs.final("undisturbed")
    assert final["/best/metric"] == "minival/acc1"
    assert final["/best/step"] in (4, 8, 10)
    assert final["/data/val/num_images"] == 6
    assert (runs.folder / "undisturbed" / "best_ema.pth").is_file()


def test_a_run_that_stops_after_an_epoch_goes_on_as_if_it_had_not(runs):
    again = ["--resume", "auto"]
    for extra, status, step in [
        (["--stop-epoch", 3], "stopped", 6), ([*again, "--stop-epoch", 3], "stopped", 6), (again, "finished", 10),
        ([*again, "--stop-epoch", 3], "finished", 10),
    ]:  # fmt: skip
        output = runs.run("stopped", 2 - len(extra) // 4, *HELD, *extra).check().output
        found = runs.status("stopped")
        assert (found["state"], found["step"], found["requeue"]) == (status, step, False)
        assert (f"--stop-epoch {extra[-1]} of --epochs 5: " in output) is (status == "stopped")
    assert_same(runs, "stopped")
    # Drawn by 2 and by 4 processes.
    folders = [(runs.folder / name).glob("picture-*") for name in ("stopped", "undisturbed")]
    pictures = [{path.name: path.read_bytes() for path in paths} for paths in folders]
    assert pictures[0] == pictures[1]
    assert any("mistakes" in name for name in pictures[0])


def test_more_sets_are_evaluated_by_their_names_and_choose_nothing(runs, image_folder):
    twice = image_folder / "val"
    more = ["--eval-data", f"held.out={twice}", f"v2={image_folder / 'train'}", "--epochs", 1, "--lr-warmup-epochs", 0]
    output = runs.run("more", 2, FLAG, *more).check().output
    records = {record.pop("kind"): record for record in runs.metrics("more")}
    assert (records["held.out"], records["held.out_ema"]) == (records["val"], records["val_ema"])
    assert (records["val"]["n"], records["v2"]["n"]) == (7, 29)
    assert f"Test: held.out Acc@1 {records['val']['acc1']:.3f} " in output
    runs.run("without", 1, FLAG, *more[3:]).check()
    final = {name: value for name, value in runs.final("more").items() if not name.startswith("/eval_data/")}
    assert differing(final, runs.final("without")) == []
    argv = ["--test-only", "--resume", runs.folder / "more" / "checkpoint.pth", "--device", "cpu", "--workers", 0]
    alone = run_train(runs.folder, "--data-path", image_folder, *argv, "--batch-size", 2, "--eval-data", more[2])
    assert f"Test: v2 Acc@1 {records['v2']['acc1']:.3f} " in alone.check().output


def test_more_sets_must_be_there_and_have_the_same_classes(image_folder, tmp_path):
    few = shutil.copytree(image_folder / "val", tmp_path / "few")
    shutil.rmtree(few / "class1")
    argv = ["--data-path", image_folder, *SMALL, "--output-dir", tmp_path / "out", "--eval-data"]
    refused(run_train(tmp_path, *argv, f"few={few}"), "has 2 classes", "has 3", "(class1)")
    refused(run_train(tmp_path, *argv, f"few={few}er"), "--eval-data few=", "fewer holds no images")


def test_when_to_evaluate_may_change_in_a_resumed_run(started, tmp_path):
    outcome = started.go_on(tmp_path, started.copy(tmp_path / "out"), "--resume=auto", "--eval-every=0", "--epochs=4")
    assert "eval-every 1 in the checkpoint, 0 now" in outcome.check().output
    assert [record["step"] for record in evaluated(tmp_path)] == [3, 6, 12]


def test_a_minival_and_the_validation_set_are_both_evaluated_afterwards(runs, image_folder, tmp_path):
    best = ["--test-only", "--resume", runs.folder / "undisturbed" / "best.pth", "--device", "cpu", "--workers", 0]
    best += ["--data-path", image_folder, "--batch-size", 4]
    held = run_train(tmp_path, *best, "--minival", 0.2).check().output
    step = runs.final("undisturbed")["/best/step"]
    record = next(r for r in runs.metrics("undisturbed") if (r["kind"], r["step"]) == ("minival", step))
    assert f"Test: minival Acc@1 {record['acc1']:.3f} " in held
    on_val = run_train(tmp_path, *best).check().output
    assert " n=7" in on_val
    assert "more or fewer images" not in on_val  # it is another set, and none that has changed


# The mean size of the scores grows as a model trains, so the first evaluation stays the best.
GROWS = """
import metrics

class Size(metrics.Metric):
    curves = {"size": metrics.Curve(title="mean size of the scores", is_lower_better=True)}
    num_sums = 1

    def batch_sums(self, output, target, index):
        return [output.abs().mean(1).sum()]

    def compute(self, sums, count):
        return {"size": sums[0] / count}

size = lambda num_classes: Size()
"""


@pytest.fixture(scope="module")
def early(started, tmp_path_factory):
    folder = tmp_path_factory.mktemp("early")
    (folder / "mine.py").write_text(GROWS)
    run_early(started, folder, folder).check()
    return folder


def run_early(started, early, folder, *argv, faults=()):
    options = ["--epochs", 9, "--patience", 2, "--metrics", f"{early / 'mine.py'}:size", "--best-metric", "size"]
    return run_train(folder, *started.argv, "--output-dir", folder / "out", *options, *argv, faults=faults)


def evaluated(folder):
    return [record for record in read_metrics(folder / "out" / "metrics.jsonl") if record["kind"] == "val"]


def test_a_run_ends_after_evaluations_without_a_new_best(early):
    records = evaluated(early)
    assert len(records) == 3
    assert records[0]["size"] < min(record["size"] for record in records[1:])
    status = json.loads((early / "out" / "status.json").read_text())
    first, last = records[0]["step"], records[-1]["step"]
    assert (status["state"], status["step"], status["requeue"]) == ("finished", last, False)
    expected = f"stopped early after step {last}: no new best size in 2 evaluations since step {first} (--patience 2)"
    assert status["reason"] == expected


@pytest.mark.parametrize("fault", [
    ("train.evaluate_all", 3, "before"), ("checkpointing.status.StatusFile.finish", 1, "before"),
])  # fmt: skip
def test_evaluations_are_counted_over_restarts(started, early, tmp_path, fault):
    assert run_early(started, early, tmp_path, faults=[(0, *fault)]).codes == [-9]
    assert "stopped early after step" in run_early(started, early, tmp_path, "--resume", "auto").check().output
    assert differing_results(tmp_path / "out", early / "out") == []


def test_a_run_that_stopped_early_is_finished_and_goes_on_with_more_patience(started, early, tmp_path):
    again = shutil.copytree(early / "out", tmp_path / "out", symlinks=True)
    assert "stopped early after step" in run_early(started, early, tmp_path, "--resume", "auto").check().output
    assert (again / "metrics.jsonl").read_bytes() == (early / "out" / "metrics.jsonl").read_bytes()
    longer = run_early(started, early, tmp_path, "--resume", "auto", "--patience", 3).check()
    assert "patience 2 in the checkpoint, 3 now" in longer.output
    assert len(evaluated(tmp_path)) == 4


def test_a_trial_takes_the_first_images_of_each_class_in_turn(image_folder, tmp_path):
    trial = "--limit-train-images 8 --limit-val-images 5 --epochs 1 --eval-batch-size 3 --batch-size 4".split()
    argv = [*SMALL, "--data-path", image_folder, *trial, "--output-dir", tmp_path / "out", "--lr-warmup-epochs", 0]
    output = run_train(tmp_path, *argv).check().output
    for split, number, sizes in (("train", 8, [11, 10, 8]), ("val", 5, [3, 2, 2])):
        turns = sorted((turn, label) for label, size in enumerate(sizes) for turn in range(size))[:number]
        expected = sorted(sum(sizes[:label]) + turn for turn, label in turns)
        assert first_of_each_class(open_source(image_folder / split), number).tolist() == expected
    assert "--limit-train-images 8: a trial on 8 of 29 images" in output
    assert " n=5" in output
    described = json.loads((tmp_path / "out" / "run.json").read_bytes())["data"]
    assert (described["num_images"], described["val"]["num_images"]) == (8, 5)
