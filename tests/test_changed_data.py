"""Images and classes that are others, when a run goes on or is evaluated, than they were before."""

import json
import shutil

import pytest

from checkpointing.archive import load_checkpoint
from tests.images import write_images
from tests.started import SMALL, refused, run_train


class Run:
    """A run of one epoch of three steps, in which every image is read, and how to go on from it."""

    def __init__(self, images, out):
        self.images, self.out = images, out

    def start(self, *argv, **options):
        argv = ["--data-path", self.images, "--output-dir", self.out, *SMALL, "--batch-size", 4, *argv]
        argv += ["--global-batch-size", 8, "--use-deterministic-algorithms"]
        return run_train(self.out.parent, *argv, **options)

    def go_on(self, *argv, **options):
        return self.start("--resume", "auto", "--epochs", 2, *argv, **options)

    def evaluate(self, *argv):
        argv = ["--test-only", "--data-path", self.images, *SMALL, "--batch-size", 4, *argv]
        return run_train(self.out.parent, *argv)

    @property
    def checkpoint(self):
        return self.out / "checkpoint.pth"


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("begun")
    run = Run(write_images(folder / "images", {"train": [8, 8, 8], "val": [3, 2, 2]}), folder / "out")
    run.start("--epochs", 1).check()
    return run


@pytest.fixture
def run(begun, tmp_path):
    """The run on images at the path that it began with, which are put back afterwards."""
    kept = shutil.copytree(begun.images, tmp_path / "kept")
    shutil.copytree(begun.out, tmp_path / "out", symlinks=True)
    yield Run(begun.images, tmp_path / "out")
    shutil.rmtree(begun.images)
    shutil.copytree(kept, begun.images)  # with their times


def lines_of(outcome, words):
    return [line for line in outcome.output.splitlines() if words in line]


def test_other_validation_images_are_refused(run):
    (run.images / "val" / "class1" / "image001.jpg").rename(run.images / "val" / "class1" / "other.jpg")
    refused(run.go_on(), "cannot resume (--resume auto): data of val: ", "give --allow-change data")
    # To evaluate on other images is a choice; it is said.
    evaluated = run.evaluate("--resume", run.checkpoint).check()
    assert len(lines_of(evaluated, "files have other names or labels")) == 1
    allowed = run.go_on("--allow-change", "data").check()
    assert lines_of(allowed, "changed as --allow-change says: data of val: ")
    assert "finished" in run.go_on().check().output


def test_class_names_are_kept_and_compared(run):
    names = ["class0", "class1", "class2"]
    assert json.loads((run.out / "run.json").read_bytes())["data"]["classes"] == names
    assert load_checkpoint(run.checkpoint, "it")["data"]["classes"] == names
    for split in ("train", "val"):  # every class has another's label then
        (run.images / split / "class0").rename(run.images / split / "zebra")
    words = ["3 of 3 classes have other names: class 0 is class0 in the checkpoint, class1 now", "--allow-change data"]
    refused(run.go_on(), "cannot resume (--resume auto): ", *words)
    for source in ("--resume", "--weights"):
        refused(run.evaluate(source, run.checkpoint), f"{source} {run.checkpoint}", *words)
        assert "Acc@1" in run.evaluate(source, run.checkpoint, "--allow-change", "data").check().output
    argv = ["--weights", run.checkpoint, "--epochs", 1, "--overwrite"]
    assert len(lines_of(run.start(*argv).check(), "classes have other names")) == 1


def test_weights_of_another_number_of_classes_are_not_evaluated(run, tmp_path):
    words = [f"--weights {run.checkpoint} holds a classifier of 3 classes and the images are of", "--test-only needs"]
    refused(run.evaluate("--weights", run.checkpoint, "--synthetic", 8), *words, "of 1000;")
    shutil.rmtree(run.images / "val" / "class2")
    refused(run.evaluate("--weights", run.checkpoint), *words, "of 2;")
    refused(run.evaluate("--resume", run.checkpoint), "holds 3 classes but", "give images of the checkpoint's classes")
    refused(run.evaluate("--resume", run.checkpoint, "--synthetic", 8), "but --synthetic 8 has 1000")
