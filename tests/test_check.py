"""scripts/check.py: every planted defect is found, and nothing else."""

import json
import os
import random
import shlex
import shutil
import struct
from pathlib import Path

import numpy
import pytest
from PIL import Image

import data
from errors import ImageError
from scripts import check, prepare
from settings import config
from tests import fuzz
from tests.images import FILES, ROTATED, encoded, files_of, pack, write_images
from tests.ranks import run_ranks, tool_rank
from tests.test_modes import CASES, FOUR16, png

COUNTS = ["--expect-train", 29, "--expect-val", 7, "--expect-classes", 3, "--workers", 2]


def look(tmp_path: Path, data_path: Path, *argv) -> tuple[int, dict, dict[str, list[str]]]:
    """Return the exit code, the JSON and the names of the images found, by kind."""
    outcome = run_ranks(
        tool_rank, 1, "check", [data_path, "--json", tmp_path / "report.json", *argv], log_folder=tmp_path
    )
    assert "Traceback" not in outcome.output, outcome.output
    # No control byte of a name reaches the terminal.
    assert not [c for c in outcome.output if (ord(c) < 32 and c not in "\n\r") or 127 <= ord(c) < 160]
    report, found = json.loads((tmp_path / "report.json").read_text()), {}
    assert report["healthy"] == (outcome.codes == [0])
    for finding in report["findings"]:
        images = [(each["image"], each["reason"]) for each in finding["images"]]
        found[finding["kind"]] = [Path(name.split(" in ")[0]).name if name else reason for name, reason in images]
        assert finding["count"] == len(images)
    return outcome.codes[0], report, found


@pytest.fixture
def images(tmp_path):
    """29 training and 7 validation images of three classes, of which no two have the same bytes."""
    return write_images(tmp_path / "images", {"train": [11, 10, 8], "val": [3, 2, 2]})


def test_a_healthy_set_is_healthy(images, tmp_path):
    code, report, found = look(tmp_path, images, *COUNTS)
    assert (code, found) == (0, {})
    num_bytes = sum(path.stat().st_size for path in (images / "train").rglob("*.jpg"))
    expected = {"images": 29, "classes": 3, "per_class": "8 to 11", "fewest": "class2", "looked_at": 29}
    assert report["splits"]["train"] == expected | {"bytes": num_bytes}


def plant(images: Path) -> dict[str, list[str]]:
    """Put every kind of defect into the training images, and return what is to be found."""
    folder = images / "train" / "class0"
    files = sorted(folder.iterdir())
    image = Image.open(files[0]).resize((64, 48))
    payload = files[1].read_bytes()
    files[1].write_bytes(payload[: len(payload) // 2])
    files[2].write_bytes(b"")
    files[3].write_bytes(b"<html>not found</html>")
    files[3] = files[3].rename(folder / "image003\x1b[31m\n.jpg")
    files[4].write_bytes(b"GIF89a" + bytes(100))
    image.convert("CMYK").save(files[5], "JPEG")
    image.save(files[6], "PNG")
    image.save(files[7], "JPEG", exif=ROTATED)
    shutil.copy(files[8], files[9])
    shutil.copy(images / "train" / "class1" / "image003.jpg", images / "val" / "class2" / "image001.jpg")
    # Samples of more than eight bits, and transparency.
    grey = numpy.arange(64 * 48, dtype=numpy.uint16).reshape(48, 64) * 20 >> 4
    others = sorted((images / "train" / "class2").iterdir())
    Image.new("RGBA", (64, 48)).save(others[0], "PNG")
    others[1] = others[1].rename(others[1].with_name("z.png"))  # the last, which is always looked at
    Image.fromarray(grey).save(others[1])
    Image.new("F", (64, 48)).save(others[2], "TIFF")
    payload = encoded(image, "AVIF")  # whose header says another size
    others[3].write_bytes(payload.replace(struct.pack(">II", 64, 48), struct.pack(">II", 16, 16)))
    others[4].write_bytes(encoded(image.rotate(90), "AVIF"))
    names = [path.name for path in files]
    return {
        "damaged": [*names[1:5], others[2].name], "leak": ["image001.jpg"], "duplicate": [names[9]],
        "alpha": [others[0].name], "deep": [others[1].name], "scaled": [others[3].name],
        "turned": [names[7]],
    }  # fmt: skip


def pack_into_tars(images: Path, folder: Path) -> Path:
    """Return a folder that holds the same data set as train.tar and val.tar."""
    for split in ("train", "val"):
        pack(folder / f"{split}.tar", files_of(images / split))
    return folder


@pytest.mark.parametrize("form", ["folder", "tar"])
def test_every_planted_defect_is_found(images, tmp_path, form):
    planted = plant(images)
    data_path = images if form == "folder" else pack_into_tars(images, tmp_path / "tars")
    code, report, found = look(tmp_path, data_path, *COUNTS)
    assert code == 1
    words = "train: samples with more than 8 bits use 6% of their range: loaded, their pixels are 0 to 14"
    assert [reason.startswith(words) for reason in found.pop("dark")] == [True]
    assert found == planted
    # ImageNet itself has some of these.
    harmless = {finding["kind"] for finding in report["findings"] if not finding["is_problem"]}
    assert harmless == {"duplicate", "alpha", "deep", "scaled", "turned"}
    reasons = {finding["kind"]: finding["images"][0]["reason"] for finding in report["findings"]}
    assert "truncated" in reasons["damaged"].lower()
    assert reasons["scaled"] == "from 64 x 48"
    assert "class1/image003.jpg" in reasons["leak"]
    assert reasons["leak"].endswith("another class")
    assert "image008.jpg" in reasons["duplicate"]


def test_a_file_that_the_disk_does_not_give_is_found_in_a_sample_too(images, tmp_path):
    path = images / "train" / "class0" / "image000.jpg"  # the first and the last are always in it
    path.unlink()
    path.symlink_to(path.name)
    code, report, found = look(tmp_path, images, *COUNTS, "--sample", 5)
    assert (code, found) == (1, {"unreadable": ["image000.jpg"]})
    assert [report["splits"][name]["looked_at"] for name in ("train", "val")] == [5, 5]


def test_counts_are_imagenets_of_synsets_alone_unless_others_are_given(images, tmp_path):
    assert look(tmp_path, images)[0] == 0  # three classes of somebody's own
    for number in range(600):
        (tmp_path / "many" / "train" / f"n{number:08d}").mkdir(parents=True)
        Image.new("L", (number + 1, 1)).save(tmp_path / "many" / "train" / f"n{number:08d}" / "a.png")
    code, _, found = look(tmp_path, tmp_path / "many", "--expect-val", 0)
    assert code == 1
    assert len(found["set"]) == 2  # images and classes of train
    anything = ["--expect-train", "any", "--expect-val", 0, "--expect-classes", "any"]
    assert look(tmp_path, tmp_path / "many", *anything)[0] == 0


def test_a_class_a_tar_and_a_split_that_are_not_whole(images, tmp_path):
    tars = pack_into_tars(images, tmp_path / "tars")
    (images / "val" / "class2").rename(images / "val" / "klass2")
    code, _, found = look(tmp_path, images, *COUNTS)
    assert code == 1
    assert [word in line for word, line in zip(["class2", "klass2"], found["set"], strict=True)] == [True, True]
    os.truncate(tars / "train.tar", (tars / "train.tar").stat().st_size // 2)
    code, _, found = look(tmp_path, tars, *COUNTS)
    assert code == 1
    assert "train.tar is truncated" in found["set"][0]


def odd_files():
    """Yield files of every kind and mode, as they are and damaged, and of extreme sides."""
    rng = random.Random(0)
    for payload in (*FILES.values(), *(case.values[0] for case in CASES), png(FOUR16[..., :3], 2, bytes(6))):
        yield from (payload, fuzz.scramble(payload, rng, head=300))
    for width, height in [(1, 1), (2, 1), (1, 349), (349, 1), (1, 1365), (1, 1366), (5000, 1), (65537, 1), (1, 65537)]:
        yield encoded(Image.new("RGBA", (width, height)), "PNG")


@pytest.mark.parametrize("options", [[], ["--val-resize-size", "512", "--in-chans", "4"]])
def test_what_is_healthy_is_what_training_and_evaluation_can_load(tmp_path, options):
    for place in (tmp_path / "train" / "a", tmp_path / "val" / "a"):
        place.mkdir(parents=True)
        for number, payload in enumerate(odd_files()):
            (place / f"{number:03d}.png").write_bytes(payload)
    report = look(tmp_path, tmp_path, *[word.replace("--in-chans", "--statistics") for word in options])[1]
    damaged = {each["image"] for kind in report["findings"] if kind["kind"] == "damaged" for each in kind["images"]}
    for backend in ([], ["--backend", "pil"]):
        argv = ["--data-path", str(tmp_path), "--train-crop-size", "24", "--val-crop-size", "24", *options, *backend]
        args, failed = config.parse_args(argv), set()
        for dataset in data.build_datasets(*config.split_dirs(args), args):
            for number in range(len(dataset)):
                try:
                    assert dataset.load(number)[0].shape == (args.in_chans, 24, 24)
                except ImageError:
                    failed.add(dataset.index.path(number))
        assert failed == damaged
        assert 50 < len(failed) < number


def test_every_example_of_the_help_is_a_command():
    for tool in (check, prepare):
        lines = [line for line in tool.get_args_parser().epilog.splitlines() if line.startswith(f"  {tool.PROG}")]
        assert len(lines) >= 4
        for line in lines:
            tool.get_args_parser().parse_args(shlex.split(line, comments=True)[3:])


def test_a_set_for_minival_needs_no_val(images, tmp_path):
    shutil.rmtree(images / "val")
    assert "--expect-val 0" in look(tmp_path, images, *COUNTS)[2]["set"][0]
    code, report, found = look(tmp_path, images, *COUNTS, "--expect-val", 0)
    assert (code, found, list(report["splits"])) == (0, {}, ["train"])
