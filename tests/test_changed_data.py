"""Images and classes that are others, when a run goes on or is evaluated, than they were before."""

import json
import re
import shutil

import pytest

from checkpointing.archive import load_checkpoint
from tests.images import FILES, run_pack, write_images
from tests.ranks import run_ranks, tool_rank
from tests.started import SMALL, refused, run_train
from tests.test_resume import check_same_weights


class Run:
    def __init__(self, images, out):
        self.images, self.out, self.checkpoint = images, out, out / "checkpoint.pth"

    def train(self, *argv, **options):
        argv = ["--data-path", self.images, *SMALL, "--batch-size", 4, *argv]
        return run_train(self.out.parent, *argv, **options)

    def start(self, *argv, **options):
        argv = ["--output-dir", self.out, *argv, "--global-batch-size", 8, "--use-deterministic-algorithms"]
        return self.train(*argv, **options)

    def go_on(self, *argv, **options):
        return self.start("--resume", "auto", "--epochs", 2, *argv, **options)

    def evaluate(self, *argv):
        return self.train("--test-only", *argv)


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
    evaluated = run.evaluate("--resume", run.checkpoint).check()
    assert len(lines_of(evaluated, "files have different names or labels")) == 1
    allowed = run.go_on("--allow-change", "data").check()
    assert lines_of(allowed, "changed as --allow-change says: data of val: ")
    assert "finished" in run.go_on().check().output
    (run.images / "train" / "class1" / "image001.jpg").unlink()
    words = ["num-images 24 in the checkpoint, 23 now", "cannot be changed"]
    refused(run.go_on("--allow-change", "data", "--epochs", 3), *words)


def test_class_names_are_kept_and_compared(run):
    names = ["class0", "class1", "class2"]
    assert json.loads((run.out / "run.json").read_bytes())["data"]["classes"] == names
    assert load_checkpoint(run.checkpoint, "it")["data"]["classes"] == names
    for split in ("train", "val"):  # every class has another's label then
        (run.images / split / "class0").rename(run.images / split / "zebra")
    words = ["3 of 3 classes have different names: class 0 is class0 in the checkpoint, class1 now"]
    words += ["--allow-change data"]
    refused(run.go_on(), "cannot resume (--resume auto): ", *words)
    for source in ("--resume", "--weights"):
        refused(run.evaluate(source, run.checkpoint), f"{source} {run.checkpoint}", *words)
        assert "Acc@1" in run.evaluate(source, run.checkpoint, "--allow-change", "data").check().output
    argv = ["--weights", run.checkpoint, "--epochs", 1, "--overwrite"]
    assert len(lines_of(run.start(*argv).check(), "classes have different names")) == 1


def test_weights_of_another_number_of_classes_are_not_evaluated(run, tmp_path):
    words = [f"--weights {run.checkpoint} has a classifier for 3 classes, but the data has", "--test-only needs"]
    refused(run.evaluate("--weights", run.checkpoint, "--synthetic", 8), *words, "has 1000;")
    shutil.rmtree(run.images / "val" / "class2")
    refused(run.evaluate("--weights", run.checkpoint), *words, "has 2;")
    refused(run.evaluate("--resume", run.checkpoint), "holds 3 classes but", "give images of the checkpoint's classes")
    refused(run.evaluate("--resume", run.checkpoint, "--synthetic", 8), "but --synthetic 8 has 1000")


def test_another_set_of_eval_data_is_refused(run, tmp_path):
    more = shutil.copytree(run.images / "val", tmp_path / "more")
    argv = ["--resume", "auto", "--eval-data", f"v2={more}", "--epochs"]
    run.start(*argv, 2).check()  # sets may come
    (more / "class1" / "image001.jpg").unlink()
    refused(run.start(*argv, 3), "data of v2: num-images 7 in the checkpoint, 6 now", "give --allow-change data")
    assert "n=6" in run.start(*argv, 3, "--allow-change", "data").check().output
    run.start("--resume", "auto", "--epochs", 4).check()  # and go


def test_images_of_a_lossy_pack_are_others(begun, tmp_path):
    run_pack(tmp_path, "--data-path", begun.images, tmp_path / "pack", "--short-side", 16, "--workers", 1).check()
    out = shutil.copytree(begun.out, tmp_path / "out", symlinks=True)
    packed = Run(tmp_path / "pack", out)
    words = "data of train: most of 24 compared images have different sizes", "data of val: most of 7 compared images"
    refused(packed.go_on(), *words, "give --allow-change data")
    assert lines_of(packed.go_on("--allow-change", "data").check(), "changed as --allow-change says: data of train")
    refused(Run(begun.images, out).go_on("--epochs", 3), "data of train: most of 24 compared images")
    words = "val: a pack of images resized to short side 16, not the originals"
    argv = [packed.checkpoint, "--set", f"val={tmp_path / 'pack' / 'val'}", "--device", "cpu", "--workers", 0]
    evaluations = [packed.evaluate(source, packed.checkpoint) for source in ("--resume", "--weights")]
    for evaluated in [*evaluations, run_ranks(tool_rank, 1, "evaluate", argv, log_folder=tmp_path)]:
        (line,) = lines_of(evaluated.check(), words)
        assert line.endswith("; they are enlarged to 32 pixels")
    assert not lines_of(begun.evaluate("--weights", begun.checkpoint).check(), words)


def test_the_same_classes_in_another_order_are_refused_or_ordered_by_classes_txt(tmp_path):
    images = write_images(tmp_path / "images", {"train": [2] * 12, "val": [1] * 12})
    for folder in sorted(images.glob("*/*")):
        folder.rename(folder.with_name(folder.name.removeprefix("class")))
    folders, lists = (Run(images, tmp_path / name) for name in ("folders", "lists"))
    folders.start("--epochs", 1).check()
    shutil.copytree(folders.out, lists.out, symlinks=True)
    folders.go_on().check()
    for split in ("train", "val"):
        rows = [f"{path.relative_to(images)},{path.parent.name}" for path in sorted((images / split).glob("*/*"))]
        (images / f"{split}.csv").write_text("\n".join(["path,label", *rows]))
    words = ["the same classes are in another order", "class 2 is 10 in the checkpoint, 2 now", "classes.txt"]
    for source, *allowed in (["--resume"], ["--weights", "--allow-change", "data"]):
        refused(lists.go_on(*allowed), *words)
        refused(lists.evaluate(source, lists.checkpoint, *allowed), f"{source} {lists.checkpoint}", *words)
    refused(lists.start("--weights", lists.checkpoint, "--overwrite"), *words)
    (images / "classes.txt").write_text("\n".join(sorted(map(str, range(12)))))
    lists.go_on().check()
    check_same_weights(lists.out, folders.out, "model")


def test_a_line_of_hashes_tells_two_machines_apart(run, tmp_path):
    """Hashes of data, options and first weights: each changes with its own kind of difference alone."""
    same, other = (Run(images, tmp_path / "new") for images in (run.images, tmp_path / "other"))
    shutil.copytree(run.images, other.images)
    (other.images / "val" / "class0" / "image000.jpg").write_bytes(FILES["PNG"])

    def hashes(*argv, run=same, **options):
        (line,) = lines_of(run.start("--epochs", 1, "--overwrite", *argv, **options).check(), "hashes: ")
        found = re.fullmatch(r"hashes: data (\w{8}), options (\w{8}), first weights (\w{8})", line).groups()
        assert tuple(json.loads((run.out / "run.json").read_bytes())["hashes"].values()) == found
        return found

    first = tuple(json.loads((run.out / "run.json").read_bytes())["hashes"].values())
    for changed, found in [
        ((False, False, False), hashes("--workers", 1, "--print-freq", 1, world_size=2)),
        ((False, False, False), hashes("--resume", run.checkpoint)),
        ((False, True, False), hashes("--lr", 0.3)),
        ((False, True, True), hashes("--seed", 1)),
        ((False, False, True), hashes("--weights", run.checkpoint)),
        ((True, False, False), hashes(run=other)),
    ]:
        assert tuple(a != b for a, b in zip(first, found, strict=True)) == changed
    lines = [lines_of(run.evaluate("--weights", run.checkpoint).check(), "hashes: ") for _ in range(2)]
    assert lines[0] == lines[1]
