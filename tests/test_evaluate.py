"""scripts/evaluate.py: every number against another computation, on any number of processes; evaluations of a run."""

import argparse
import csv
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from PIL import Image

from data import IndexedImageFolder
from errors import UserError
from loading.decode import AS_STORED
from loading.forms import open_source
from loading.index import ArraySource
from loading.source import first_of_each_class
from metrics import bootstrap_interval, calibration_error
from models.build import build_model
from scripts import evaluate
from scripts.evaluate import ImageSet, number_classes
from scripts.trained import open_trained
from settings import config
from tests.endings import differing, differing_results, read_metrics
from tests.images import pack_whole, write_images
from tests.ranks import Outcome, run_ranks, tool_rank
from tests.runs import FLAG, Runs, assert_same
from tests.started import SMALL, refused, run_train

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
    dataset = IndexedImageFolder(images, trained.preset)
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
    source = IndexedImageFolder(images, None).index
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
    page = (tmp_path / "page.html").read_text()
    assert "Acc@1    95% of Acc@1" in page  # and no Acc@5, which is 100
    wrong = [n for n in range(len(targets)) if predicted[n] != targets[n]]
    wrong.sort(key=lambda n: -confidence[n])
    lines = [f"{source.path(n)}<br>{confidence[n]:.1%} class{predicted[n]}<br>is class{targets[n]}" for n in wrong]
    assert re.findall(r"<figcaption>(.*?)</figcaption>", page) == lines
    accuracies = [(f"class{label}", str(n), f"{100 * whole[label, label] / n:.5g}") for label, n in enumerate(COUNTS)]
    found = re.findall(r"<tr><td>(class\d)<td>(\d+)<td>([\d.]+)<td>[^<]*", page)
    assert sorted(found) == accuracies
    assert [float(acc1) for *_, acc1 in found] == sorted(float(acc1) for *_, acc1 in found)  # the worst first
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


def test_the_interval_is_that_of_a_plain_bootstrap():
    hits = numpy.arange(60) < 41
    generator = numpy.random.default_rng(7)
    shares = sorted(hits[generator.integers(0, 60, 60)].mean() for _ in range(4000))
    # Resamples have shares a sixtieth apart; the percentiles of another drawing may be one of them off.
    assert bootstrap_interval(41, 60) == bootstrap_interval(41, 60)
    assert bootstrap_interval(41, 60) == pytest.approx([shares[100], shares[3900]], abs=1 / 60 + 1e-9)


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


def image_set(name: str, words: list[str]) -> ImageSet:
    source = ArraySource(Path())
    source.classes, source.labels = words, numpy.arange(len(words))
    return ImageSet(name, source, AS_STORED)


def found(each: ImageSet, names: list[str] | None, num_classes: int, sets=(), *, script="torchvision"):
    """Return the numbers of a set's classes in a model, and how they were found."""
    number_classes([each, *sets], SimpleNamespace(classes=names, script=script), num_classes)
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
