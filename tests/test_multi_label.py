"""Several labels an image: lists of them, the loss, mAP and F1 against scikit-learn, and what cannot be."""

import copy
import csv
import json
import math
import os
import random
import re
from pathlib import Path

import numpy
import pytest
import timm
import torch
from PIL import Image
from sklearn.metrics import average_precision_score, f1_score

import data
import metrics
from errors import UserError
from loading.forms import open_source
from loading.remote import RemotePack
from settings import config
from tests.endings import read_metrics
from tests.exports import run_tool
from tests.ranks import run_ranks, tool_rank
from tests.servers import RangeServer
from tests.started import refused, run_train

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
    for dataset, sampler in zip(sets, samplers, strict=True):
        assert dataset.classes == CLASSES
        loader = data.build_device_loader(args, data.build_loader(dataset, None, args), sampler, torch.device("cpu"), 4)
        for (_, target), numbers in zip(loader, loader.numbers(), strict=True):
            for row, number in zip(target.tolist(), numbers.tolist(), strict=True):
                known = truth_of(int(Path(dataset.index.path(number)).stem))
                assert row == [float(name in known) for name in CLASSES]


def test_other_forms_of_the_same_list_are_the_same_set(labelled, tmp_path):
    (tmp_path / "photos").symlink_to(labelled / "photos")
    (tmp_path / "classes.txt").write_text("\n".join(CLASSES))
    expected = open_source(labelled / "train", ",")
    labels = {f"photos/{number}.png": truth_of(number) for number in range(48)}
    numbers = {path: [str(CLASSES.index(each)) for each in names] for path, names in labels.items()}
    rows = {"a.jsonl": [json.dumps({"path": path, "label": names}) for path, names in labels.items()]}
    for name, separator, table in (("b.csv", ";", labels), ("c.csv", ",", numbers)):
        rows[name] = ["path,label", *(f'{path},"{separator.join(names)}"' for path, names in table.items())]
    for name, lines in rows.items():
        (tmp_path / name).write_text("\n".join(lines))
        found = open_source(tmp_path / name[0], ";" if name == "b.csv" else ",")
        assert found.classes == CLASSES
        both = [{Path(each.path(n)).stem: each.class_name(n) for n in range(48)} for each in (found, expected)]
        assert both[0] == both[1]
        assert name != "a.jsonl" or found.fingerprint() == expected.fingerprint()


def test_map_and_f1_are_scikit_learns():
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
    average = average_precision_score(truth[:, :5], scores[:, :5], average="macro")
    assert values["map"] == pytest.approx(100 * average, rel=1e-12)
    assert values["f1_micro"] == pytest.approx(100 * f1_score(truth, scores > 0, average="micro"))
    assert values["f1"] == pytest.approx(100 * f1_score(truth, scores > 0, average="macro"))


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
    """The folder of a run of two epochs on several labels."""
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
    last, results = trained / "checkpoint.pth", []
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
    assert found["map"] == pytest.approx(100 * average_precision_score(truth, shares, average="macro"))
    assert found["f1"] == pytest.approx(100 * f1_score(truth, shares > 0.5, average="macro"))
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
