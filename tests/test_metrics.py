"""What is measured: equal bits on any number of processes, known by names alone, of one or several labels an image."""

import copy
import csv
import functools
import json
import math
import os
import random
import re
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
from data import IndexedImageFolder, warn_of_uneven
from errors import UserError
from loading.forms import open_source
from loading.index import ArraySource, encode
from loading.remote import RemotePack
from models.losses import build_criterion, class_weights
from sampler import TrainSampler, VirtualShards
from settings import config
from tests.endings import read_metrics, read_points
from tests.exports import run_tool
from tests.ranks import run_check, run_ranks, tool_rank, train_rank
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


def device_loader(tensors, batch_size, keys):
    loader = DataLoader(TensorDataset(*tensors), batch_size, sampler=keys)
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
    measure([metrics.Accuracy(), metrics.BalancedAccuracy(NUM_CLASSES)], print_freq=2)
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
    samplers = data.build_train_sampler(sets[0], args), data.build_eval_sampler(sets[1], args)
    for dataset, each in zip(sets, samplers, strict=True):
        assert dataset.classes == CLASSES
        loader = data.build_device_loader(args, data.build_loader(dataset, None, args), each, torch.device("cpu"), 4)
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
    counted, ranked = metrics.F1(6, is_multi_label=True), metrics.MeanAveragePrecision(6)
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
    ranked = metrics.MeanAveragePrecision(1)
    ranked.observe(torch.tensor([[1.0], [float("nan")]]), torch.tensor([[1.0], [0.0]]), None)
    assert math.isnan(ranked.gather()["map"])
    scores = numpy.array([numpy.inf, numpy.inf])
    assert metrics.average_precision(scores, numpy.array([True, False])) == 0.5
    assert metrics.average_precision(scores, numpy.array([False, True])) == 0.5


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
        argv = [last, "--set", f"val={labelled / 'val'}", *files, "--workers", 0, "--device", "cpu", "--batch-size", 3]
        run_ranks(tool_rank, world_size, "evaluate", argv, None, None, log_folder=tmp_path, timeout_s=60).check()
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
    assert "average precision, %" in results[0][2]
    outcome, _ = run_tool(tmp_path, "evaluate", *argv[:3], "--confusion", tmp_path / "c.csv", code=2)
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
    compute_class_weight = pytest.importorskip("sklearn.utils.class_weight").compute_class_weight
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
    sklearns, rng = pytest.importorskip("sklearn.metrics"), numpy.random.default_rng(0)
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
        assert values["balanced_acc"] == pytest.approx(100 * sklearns.balanced_accuracy_score(truth, predicted))
    assert values["never_right"] == 1
    assert values["f1"] == pytest.approx(100 * sklearns.f1_score(truth, predicted, average="macro"))
    assert values["f1_micro"] == pytest.approx(100 * sklearns.f1_score(truth, predicted, average="micro"))


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
