"""Images and classes that are others, when a run goes on or is evaluated, than they were before."""

import json
import os
import shutil
import signal
import tarfile
from pathlib import Path

import numpy
import pytest
from torchvision import datasets

import config
import data
from checkpointing.archive import load_checkpoint
from loading.seen import SeenRecord
from tests.images import write_images
from tests.started import DAMAGES, SMALL, refused, run_train


class Run:
    """A run of one epoch of three steps, in which every image is read, and how to go on from it."""

    def __init__(self, images, out):
        self.images, self.out = images, out

    def copy(self, folder):
        """Return the run in folders of its own, with the times that its images had."""
        shutil.copytree(self.images, folder / "images")
        shutil.copytree(self.out, folder / "out", symlinks=True)
        return Run(folder / "images", folder / "out")

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


def begin(folder):
    write_images(folder / "images", {"train": [8, 8, 8], "val": [3, 2, 2]})
    run = Run(folder / "images", folder / "out")
    run.start("--epochs", 1).check()
    return run


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    return begin(tmp_path_factory.mktemp("begun"))


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


def add_a_byte(path):
    """Change a file's size in its place, which its folder does not tell, and no pixel of it."""
    status = path.stat()
    with open(path, "ab") as file:
        file.write(b"\0")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def touch(path, seconds=7):
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + seconds * 10**9))


def test_what_was_read_is_noted_for_the_next_start(begun):
    with numpy.load(begun.out / "images.npz") as file:
        found = {name.split("-")[0]: file[name].tolist() for name in file.files}
    for split in ("train", "val"):
        paths = [Path(path) for path, _ in datasets.ImageFolder(begun.images / split).samples]
        assert found[split] == [[path.stat().st_size + 1, int(path.stat().st_mtime)] for path in paths]


@pytest.mark.parametrize(("split", "name"), [("train", "class1/image003.jpg"), ("val", "class2/image001.jpg")])
def test_an_image_of_another_size_stops_the_run_by_name(run, split, name):
    path = run.images / split / name
    size = path.stat().st_size
    add_a_byte(path)
    refused(run.go_on(), f"{path} has {size + 1} bytes, and had {size} when this run", "--allow-change data", code=1)
    # Ended before it has seen the image again, if it is one to train on.
    run.go_on("--allow-change", "data", faults=[(0, "torch.optim.SGD.step", 1, "after", signal.SIGTERM)]).check()
    assert "finished 3 epochs" in run.go_on("--epochs", 3).check().output


def test_another_time_is_said_once_and_goes_on(run):
    paths = [run.images / "train" / f"class{label}" / "image002.jpg" for label in (2, 0)]
    for path in paths:
        touch(path)
    first = run.go_on().check()
    assert lines_of(first, " times ") == [
        f"2 images of {run.images / 'train'} with other times than when the run read them, such as {paths[1]}"
    ]
    assert lines_of(run.go_on("--epochs", 3).check(), " times ") == []


def test_a_run_whose_images_are_as_before_goes_on_without_a_word(run, tmp_path):
    outcome = run.go_on("--workers", 1).check()
    moved = run.copy(tmp_path / "moved")
    for path in moved.images.rglob("*"):
        touch(path)
    elsewhere = moved.go_on("--epochs", 3).check()
    for words in ("times", "changed since", "sizes"):
        assert lines_of(outcome, words) == lines_of(elsewhere, words) == []
    add_a_byte(moved.images / "train" / "class0" / "image000.jpg")
    refused(moved.go_on("--epochs", 4), "class0/image000.jpg has", code=1)
    path = moved.images / "val" / "class0" / "image001.jpg"
    add_a_byte(path)
    evaluated = moved.evaluate("--resume", run.checkpoint).check()
    assert lines_of(evaluated, "image of ") == [
        f"1 image of {moved.images / 'val'} with other sizes than when the run read them, such as {path}"
    ]


def test_all_ranks_and_loader_processes_note_what_they_read(begun, tmp_path):
    run = Run(begun.images, tmp_path / "out")
    run.start("--epochs", 1, "--workers", 2, world_size=2).check()
    assert (run.out / "images.npz").read_bytes() == (begun.out / "images.npz").read_bytes()


def test_what_was_read_before_a_preemption_is_noted(begun, tmp_path):
    run = Run(begun.images, tmp_path / "out")
    faults = [(rank, "torch.optim.SGD.step", 1, "after", signal.SIGTERM) for rank in (0, 1)]
    assert "saved" in run.start("--epochs", 1, faults=faults, world_size=2).check().output
    with numpy.load(run.out / "images.npz") as file:
        counts = sorted(int((file[name][:, 0] > 0).sum()) for name in file.files)
    assert counts == [0, 8]


def test_a_fresh_start_forgets_what_the_folder_held(run):
    path = run.images / "train" / "class1" / "image003.jpg"
    faults = [(0, "checkpointing.store.CheckpointManager.save", 3, "before")]
    add_a_byte(path)
    argv = ["--overwrite", "--checkpoint-steps", 1, "--epochs", 1]
    assert run.start(*argv, faults=faults).codes == [-9]
    assert "resumed step 2" in run.go_on("--epochs", 1).check().output


def test_a_run_that_goes_on_in_another_folder_takes_its_record_along(run, tmp_path):
    other = Run(run.images, tmp_path / "other")
    faults = [(0, "torch.optim.SGD.step", 1, "before")]
    assert other.start("--resume", run.checkpoint, "--epochs", 2, faults=faults).codes == [-9]
    assert (other.out / "images.npz").read_bytes() == (run.out / "images.npz").read_bytes()


@pytest.mark.parametrize("damage", DAMAGES)
def test_of_a_damaged_record_nothing_is_taken_that_is_not_whole(run, damage):
    good = {name: index.seen.states.copy() for name, index in open_record(run).watched.items()}
    damage(run.out / "images.npz")
    for name, index in open_record(run).watched.items():
        # The arrays have a checksum each.
        assert not index.seen.states.any() or numpy.array_equal(index.seen.states, good[name])
    assert not (run.out / "executed").exists()


def open_record(run):
    options = ["--data-path", str(run.images), "--device", "cpu", "--resume", "auto", "--output-dir", str(run.out)]
    args = config.parse_args(options)
    train, val = data.build_datasets(run.images / "train", run.images / "val", args)
    state = load_checkpoint(run.checkpoint, "it")
    return SeenRecord(args, state, train=train, val=val)


def test_a_record_that_is_whole_is_taken(run):
    record = open_record(run)
    assert [bool(index.seen.states.all()) for index in record.watched.values()] == [True, True]
    os.rename(run.out / "images.npz", run.out / "real.npz")
    for name in ("real.npz", "/dev/zero"):
        (run.out / "images.npz").unlink(missing_ok=True)
        (run.out / "images.npz").symlink_to(name)
        assert not any(index.seen.states.any() for index in open_record(run).watched.values())
    (run.out / "images.npz").unlink()
    os.mkfifo(run.out / "images.npz")
    assert not any(index.seen.states.any() for index in open_record(run).watched.values())


def add(val):
    shutil.copy(val / "class0" / "image000.jpg", val / "class0" / "new.jpg")


def remove(val):
    (val / "class1" / "image001.jpg").unlink()


def rename(val):
    (val / "class1" / "image001.jpg").rename(val / "class1" / "other.jpg")


@pytest.mark.parametrize("change", [add, remove, rename])
def test_other_validation_images_are_refused(run, change):
    change(run.images / "val")
    refused(run.go_on(), "cannot resume (--resume auto): data of val: ", "give --allow-change data")
    # To evaluate on other images is a choice; it is said.
    evaluated = run.evaluate("--resume", run.checkpoint).check()
    assert len(lines_of(evaluated, "files have other names or labels")) == 1
    allowed = run.go_on("--allow-change", "data").check()
    assert lines_of(allowed, "changed as --allow-change says: data of val: ")
    assert "finished" in run.go_on().check().output


def write_tars(images, target):
    """Pack each split as one tar, and return its folder."""
    target.mkdir(exist_ok=True)
    for split in ("train", "val"):
        with tarfile.open(target / f"{split}.tar", "w") as archive:
            archive.add(images / split, split)
    return target


def test_tars_tell_their_sizes_and_times_before_the_first_step(run, tmp_path):
    tars = Run(write_tars(run.images, tmp_path / "tars"), run.out)
    first = tars.go_on().check()  # from folders, which have other times and may have other sizes
    assert lines_of(first, "data of") == []
    touch(tars.images / "val.tar")
    assert lines_of(tars.go_on("--epochs", 3).check(), "data of") == [
        f"data of val: {tars.images / 'val'}: the tars have changed since the checkpoint, but no name in them"
    ]
    for split in ("train", "val"):
        path = run.images / split / "class1" / "image001.jpg"
        add_a_byte(path)
        write_tars(run.images, tars.images)
        refused(tars.go_on("--epochs", 4), f"data of {split}: sizes ", "images have other sizes", "--allow-change data")
        path.write_bytes(path.read_bytes()[:-1])
        write_tars(run.images, tars.images)
    assert tars.go_on("--epochs", 4).check()


def shift_labels(images):
    """Rename classes so that every one has another's label."""
    for split in ("train", "val"):
        (images / split / "class0").rename(images / split / "zebra")


def test_class_names_are_kept_and_compared(run):
    names = ["class0", "class1", "class2"]
    assert json.loads((run.out / "run.json").read_bytes())["data"]["classes"] == names
    assert load_checkpoint(run.checkpoint, "it")["data"]["classes"] == names
    shift_labels(run.images)
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
