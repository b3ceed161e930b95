"""Every promise at every door: DOORS go down, PROMISES across."""

import io
import json
import re
import shutil
from collections.abc import Callable
from hashlib import sha256
from typing import NamedTuple

import numpy
import pytest
from PIL import Image

import data
import train
from settings import config
from tests.archives import tar_of
from tests.endings import Ending
from tests.exports import run_tool
from tests.images import class_tars, files_of, pack, run_pack, write_images
from tests.ranks import REPOSITORY
from tests.servers import RangeServer
from tests.started import SMALL, refused, run_train

PROMISES = {
    "labels": "each image has its class, by its colour; each is read once, by its SHA-256",
    "processes": "1 and 2 processes end in the same bits: checkpoints, records, curves, status, recipe",
    "kill": "so do runs that were killed and resumed",
    "change": "what changes numbers is refused by its name when it has changed between two starts",
    "agree": "training, --test-only and scripts.evaluate give one result",
    "bad": "bad input is one line with exit code 2",
    "inside": "nothing outside of the output folder is written to",
}
COUNTS = {"train": [7, 7, 6], "val": [3, 2, 2]}
START = """
    --batch-size 4 --global-batch-size 8 --epochs 2 --print-freq 1 --checkpoint-steps 1 --lr 0.05
    --use-deterministic-algorithms
"""

# How the images of class folders are written in each form, by a split; all are oracles' own: plain tarfile, csv, json.


def by_shards(images, there, split):
    files = list(files_of(images).items())
    for number in range(2):
        pack(there / f"{split}-{number:06d}.tar", dict(files[number::2]), f"{split}/")


def by_samples(images, there, split):
    there.mkdir(exist_ok=True)
    members = {}
    for number, (name, path) in enumerate(sorted(files_of(images).items(), key=lambda item: item[0][-6:])):
        text = json.dumps({"label": name.split("/")[0]})
        members |= {f"photos/{number:05d}.jpg": path.read_bytes(), f"photos/{number:05d}.json": text.encode()}
    (there / f"{split}-000000.tar").write_bytes(tar_of(members))


def by_lists(images, there, split):
    there.mkdir(exist_ok=True)
    shutil.copytree(images, there / "photos" / split)
    rows = [{"path": f"photos/{split}/{name}", "label": name.split("/")[0]} for name in files_of(images)]
    (there / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def by_pack(images, there, split):
    if split == "val":  # the last one
        run_pack(there.parent, "--data-path", images.parent, there, "--short-side", 64, "--workers", 1).check()


def of_several_labels(images, there, split):
    by_lists(images, there, split)
    path = there / f"{split}.jsonl"
    path.write_text(re.sub('"label": "(class[12])"', r'"label": ["\1", "class0"]', path.read_text()))


def again(walk):
    other = walk.folder / "logs" / "images"
    shutil.copytree(walk.images, other)
    (other / "train" / "class1" / "image005.jpg").rename(other / "train" / "class2" / "z.jpg")
    shutil.rmtree(walk.folder / "data")
    for split in COUNTS:
        walk.door.write(other / split, walk.folder / "data", split)


def moved(walk):
    (walk.folder / "more" / "val" / "class1" / "image000.jpg").rename(walk.folder / "more" / "val" / "class2" / "z.jpg")


class Door(NamedTuple):
    """A way in: options, in which {} is a folder of its own; how its images are written; a change; bad input."""

    options: str = ""
    write: Callable = lambda images, there, split: shutil.copytree(images, there / split)
    change: tuple[Callable, str] = (again, "data of")  # and words of the refusal
    bad: tuple[str, str] | None = None  # options, and words of the refusal
    path: str = "{}/data"
    prepare: Callable | None = None
    elsewhere: dict[str, str] = {}  # noqa: RUF012


def kept_by(words):
    """Return a way in whose promises other tests keep, or why it makes none."""
    return Door(elsewhere=dict.fromkeys(PROMISES, words))


def taught(there):
    words = ["--data-path", there / "data", *SMALL, "--batch-size", 4, "--epochs", 1, "--output-dir"]
    for seed, name in enumerate(("teacher", "other")):
        run_train(there, *words, there / name, "--seed", seed).check()


DOORS = {
    "class folders": Door(bad=("--data-path {}/nowhere", "nowhere")),
    "class tars": Door(
        write=lambda images, there, split: class_tars(images, there / split), bad=("--data-path {}/data/train", "val")
    ),
    "shards of ours": Door(write=by_shards, bad=("--multi-label --bce-loss", "--multi-label")),
    "WebDataset, .json in a folder": Door(
        write=by_samples,
        elsewhere={"bad": "test_index.py::test_bad_labels_are_one_line_that_names_shard_and_member"},
    ),
    "WebDataset, .cls": kept_by(
        "as .json, by test_index.py::test_shards_with_labels_are_the_class_folders_of_their_images"
    ),
    "list, .jsonl": Door(
        write=by_lists, elsewhere={"bad": "test_lists.py::test_a_list_that_cannot_be_used_is_named_with_its_line"},
    ),
    "list, .csv, .tsv, one of both splits": kept_by(
        "as .jsonl, by test_lists.py::test_a_list_of_class_folders_files_is_their_index"
    ),
    "pack": Door(write=by_pack, bad=("--data-path {}/data/train", "val")),
    "pack over HTTP, cold and warm": Door(
        "--cache {}/cache", by_pack, path="URL", bad=("--data-path URL/nowhere", "no such object"),
    ),
    "several labels": Door(
        "--multi-label --bce-loss --class-weights balanced --mixup-alpha 0.2 --cutmix-alpha 1", of_several_labels,
        bad=("--label-smoothing 0.1", "--label-smoothing"),
        elsewhere={
            "labels": "test_metrics.py::test_batches_hold_zeros_and_ones_as_the_list_says",
            "agree": "scripts.evaluate refuses it; test_metrics.py::test_predictions_are_of_each_class_by_itself",
        },
    ),
    "class weights and channels": Door(
        "--class-weights balanced --in-chans 1 --random-erase 0.3", change=(lambda _: "--in-chans 4", "in-chans"),
        bad=("--class-weights {}/none.csv", "no such file"),
    ),
    "balanced sampler, average and more sets": Door(
        """--balanced-sampler --metrics balanced_acc f1 --best-metric balanced_acc --model-ema --model-ema-steps 1
        --eval-data more={}/more/val""",
        prepare=lambda there: write_images(there / "more", {"val": [2, 2, 2]}, size=(32, 40)),
        change=(moved, "data of more"), bad=("--ra-sampler", "--ra-sampler"),
    ),
    "part of train held out": Door(
        "--minival 0.1", change=(lambda _: "--minival 0.5", "minival"), bad=("--minival 2", "--minival"),
    ),
    "teacher": Door(
        "--teacher {}/teacher/best.pth", prepare=taught, change=(lambda _: "--teacher {}/other/best.pth", "teacher"),
        bad=("--teacher {}/none.pth", "none.pth"),
    ),
    "own code": Door(elsewhere={
        **dict.fromkeys(PROMISES, "test_extending.py::test_every_part_of_the_examples_trains_is_killed_and_resumes"),
        "agree": "tools read folders, lists, tars and packs alone",
        "bad": "test_extending.py::test_own_code_that_cannot_be_used_is_refused",
        "change": "test_extending.py::test_a_changed_file_is_refused_unless_allowed_and_a_moved_one_is_the_same",
    }),
    "own code that draws": kept_by(
        "test_extending.py::test_draws_and_buffers_of_own_code_have_the_same_bits_on_any_ranks_and_after_a_kill"
    ),
    "weights of this project": Door(
        "--weights {}/teacher/best.pth", prepare=taught, bad=("--weights {}/none.pth", "none.pth"),
        elsewhere={"change": "a saved run holds its own weights, and does not read the file again"},
    ),
    "weights by name": kept_by("a download; test_models.py, test_preprocessing.py"),
    "weights of torchvision's, timm's and PyTorch's scripts": kept_by(
        "so, by test_weights.py::test_files_of_other_scripts_give_the_models_own_weights_and_their_average"
    ),
    "weights, safetensors": kept_by(
        "so, by test_weights.py::test_a_safetensors_file_is_a_state_dict_and_a_damaged_one_is_refused"
    ),
}  # fmt: skip


class Walk:
    def __init__(self, door, folder, images):
        self.door, self.folder, self.images = door, folder, images
        for split in COUNTS:
            door.write(images / split, folder / "data", split)
        (folder / "logs").mkdir()
        if door.prepare:
            door.prepare(folder)
        self.server = RangeServer(folder / "data") if door.path == "URL" else None

    def argv(self, *more):
        words = [*SMALL, *START.split(), "--data-path", self.door.path, *self.door.options.split(), *map(str, more)]
        url = self.server.url if self.server else ""
        return [word.replace("{}", str(self.folder)).replace("URL", url) for word in words]

    def train(self, out, *more, **how):
        return run_train(self.folder / "logs", *self.argv("--output-dir", self.folder / out, *more), **how)

    def inputs(self):
        kept = ("out-", "logs", "cache", "stdout")
        return {
            str(path): (path.stat().st_mtime_ns, sha256(path.read_bytes()).hexdigest())
            for path in self.folder.rglob("*")
            if path.is_file()
            and not path.relative_to(self.folder).parts[0].startswith(kept)
            and not path.name.startswith(".touchstone-index")  # the cache of the index, which the pages tell of
        }


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("colours"), COUNTS)


@pytest.mark.parametrize("name", [name for name, door in DOORS.items() if len(door.elsewhere) < len(PROMISES)])
def test_a_door_keeps_its_promises(name, images, tmp_path):
    door = DOORS[name]
    walk, here = Walk(door, tmp_path, images), [promise for promise in PROMISES if promise not in door.elsewhere]
    before = walk.inputs()
    whole = walk.train("out-whole").check()
    if "labels" in here:
        check_labels(walk, images)
    kill = [(rank, "run.Run.end_step", 3, "after") for rank in (0, 1)]
    assert -9 in walk.train("out-killed", world_size=2, faults=kill).codes
    shutil.copytree(tmp_path / "out-killed", tmp_path / "out-changed", symlinks=True)
    walk.train("out-killed", "--resume", "auto").check()
    assert Ending(tmp_path / "out-killed").differences(Ending(tmp_path / "out-whole")) == []
    if "agree" in here:
        check_agreement(walk, whole.output)
    assert walk.inputs() == before
    if "bad" in here:
        options, words = door.bad
        refused(walk.train("out-bad", *options.split()), *words.split("|"))
    if "change" in here:
        change, words = door.change
        refused(walk.train("out-changed", *(change(walk) or "").split(), "--resume", "auto"), words)
    if walk.server:
        walk.server.shutdown()


def check_labels(walk, images):
    """The colour of an image is that of its class, and the images are those of the class folders, each once."""
    args, _ = train.resolve(config.parse_args(walk.argv()))
    for split, dataset in zip(COUNTS, data.build_datasets(*config.split_dirs(args.data.data_path), args), strict=True):
        found = [dataset.index.read(number) for number in range(len(dataset))]
        if walk.door.write is by_pack:
            assert len(found) == sum(COUNTS[split])  # which shrinks its images
        elif "--minival" not in walk.door.options:
            files = [path.read_bytes() for path in (images / split).rglob("*.jpg")]
            assert sorted(found) == sorted(files)
        for number, content in enumerate(found):
            colour = numpy.asarray(Image.open(io.BytesIO(content))).mean(axis=(0, 1)).argmax()
            assert dataset.classes[dataset.index.label(number)] == f"class{colour}"


def check_agreement(walk, output):
    lines = [each for each in output.splitlines() if re.match("Test: .* n=[37]$", each)]
    lines = lines[len(lines) // 2 :]  # of the last epoch
    checkpoint = walk.folder / "out-whole" / "checkpoint.pth"
    words = ["--test-only", "--resume", checkpoint, "--output-dir", walk.folder / "out-test"]
    found = walk.train("out-test", *words, world_size=2).check().output
    assert [line for line in lines if line not in found] == []
    if "Acc@1" in lines[0] and walk.door.path != "URL" and not walk.door.options.startswith("--minival"):
        where = f"val={walk.folder / 'data' / 'val'}"
        file = walk.folder / "logs" / "e.json"
        run_tool(file.parent, "evaluate", checkpoint, "--set", where, "--device", "cpu", "--json", file)
        found = json.loads(file.read_text())
        assert f"{found['sets']['val']['acc1']:.3f}" in lines[0]


def test_every_cell_has_a_test_that_is_there_or_a_reason():
    texts = {path.name: path.read_text() for path in (REPOSITORY / "tests").glob("test_*.py")}
    for door in DOORS.values():
        assert door.elsewhere.keys() <= PROMISES.keys()
        for words in door.elsewhere.values():
            for file, test in re.findall(r"(test_\w+\.py)(?:::(\w+))?", words):
                assert not test or f"def {test}(" in texts[file], words
        assert {"change", "bad"} - door.elsewhere.keys() <= {name for name in ("change", "bad") if getattr(door, name)}
