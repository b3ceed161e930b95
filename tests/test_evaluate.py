"""scripts/evaluate.py: every number against another computation, on any number of processes, and what is refused."""

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
from sklearn.metrics import confusion_matrix

from data import IndexedImageFolder
from errors import UserError
from loading.decode import AS_STORED
from loading.index import ArraySource
from metrics import bootstrap_interval, calibration_error
from models.build import build_model
from scripts import evaluate
from scripts.evaluate import ImageSet, number_classes
from scripts.trained import open_trained
from settings import config
from tests.endings import read_metrics
from tests.images import pack_whole, write_images
from tests.ranks import Outcome, run_ranks, tool_rank
from tests.started import SMALL, run_train

COUNTS, BATCH = [13, 12, 9], 4
NAMES = [f"class{number}" for number in range(5)]


def run(tmp_path: Path, *argv, world_size: int = 1, workers: int = 0, fault=None, stdout=None) -> Outcome:
    argv = [*argv, "--batch-size", BATCH, "--workers", workers, "--device", "cpu"]
    return run_ranks(tool_rank, world_size, "evaluate", argv, stdout, fault, log_folder=tmp_path, timeout_s=60)


def results(tmp_path: Path, *argv, **options) -> dict:
    """Return the JSON of a run."""
    run(tmp_path, *argv, "--json", tmp_path / "results.json", **options).check()
    return json.loads((tmp_path / "results.json").read_text())["sets"]


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def refusal(*argv) -> str:
    """Return the line of a command that is refused."""
    with pytest.raises(UserError) as error:
        evaluate.evaluate(evaluate.get_args_parser().parse_args(list(map(str, argv))))
    [line] = str(error.value).splitlines()
    return line


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """34 images of three classes in val."""
    return write_images(tmp_path_factory.mktemp("images"), {"val": COUNTS}) / "val"


def open_blank(num_classes: int) -> torch.nn.Module:
    """Return the model with its first weights."""
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
    """Of five classes, of which the images are three."""
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
    """Compute all metrics by torch's own functions."""
    hits = logits.topk(2).indices == targets[:, None]
    found = {f"acc{k}": 100 * hits[:, :k].any(1).double().mean().item() for k in (1, 2)}
    confidence = logits.softmax(1).amax(1)
    bins = torch.bucketize(confidence, torch.arange(16, dtype=torch.float64) / 15)
    gaps = [(confidence - hits[:, 0].double())[bins == number].sum().abs() for number in range(1, 16)]
    nll = torch.nn.functional.cross_entropy(logits, targets)
    return {**found, "nll": nll.item(), "ece": sum(gaps).item() / len(targets)}


def test_metrics_are_those_of_torchs_own_functions_without_classes_that_a_set_lacks(
    of_three, checkpoint, images, tmp_path
):
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
    whole = confusion_matrix(targets, predicted)
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


def test_results_are_the_same_on_any_number_of_processes(checkpoint, images, tmp_path):
    files, whole = [tmp_path / "results.json", tmp_path / "predictions.csv"], []
    shutil.copytree(images / "class1", tmp_path / "part" / "class1")
    argv = [checkpoint, "--set", f"val={images}", "--set", f"part={tmp_path / 'part'}", "--predictions", files[1]]
    for world_size in (1, 3):
        outcome = run(tmp_path, *argv, "--json", files[0], world_size=world_size).check()
        assert sum("95% of Acc@1" in output for output in outcome.outputs) == 1, outcome.output
        whole.append([path.read_bytes() for path in files])
    assert whole[0] == whole[1]
    assert len(whole[0][1].splitlines()) == 1 + 34 + 12


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
    """Return a set of classes with these names and one image each."""
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


def test_a_killed_evaluation_leaves_whole_files_and_can_be_started_again(checkpoint, images, tmp_path):
    files = [tmp_path / "predictions.csv", tmp_path / "results.json"]
    argv = [checkpoint, "--set", f"val={images}", "--predictions", files[0], "--json", files[1]]
    assert run(tmp_path, *argv, fault=("os.replace", 1, "after")).codes == [-9]
    left = {path: path.read_bytes() for path in files if path.exists()}
    run(tmp_path, *argv).check()
    assert left.items() < {path: path.read_bytes() for path in files}.items()
    assert files[1] not in left
