"""scripts/prepare.py: the same class folders from every source, whatever interrupts it."""

import gzip
import io
import os
import shutil
import signal
import tarfile
from pathlib import Path

import pytest
from torchvision.datasets import imagenet

from scripts import prepare
from tests import archives
from tests.exports import refused
from tests.ranks import Outcome, run_ranks, tool_rank

TRAIN, VAL, DEVKIT = prepare.TRAIN_TAR, prepare.VAL_TAR, prepare.DEVKIT


def run(tmp_path: Path, *argv, fault=None, largest_file=None) -> Outcome:
    """Run the tool in a process of its own, and return what became of it."""
    return run_ranks(tool_rank, 1, "prepare", argv, None, fault, largest_file, log_folder=tmp_path, timeout_s=60)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def error_line(outcome: Outcome, exit_code: int = 2) -> str:
    return refused(outcome, "prepare", exit_code)


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    pytest.importorskip("scipy")
    return archives.write_official(tmp_path_factory.mktemp("official") / "downloads")


@pytest.fixture(scope="module")
def kaggle(tmp_path_factory):
    return archives.write_kaggle(tmp_path_factory.mktemp("kaggle") / "unzipped")


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    pytest.importorskip("pyarrow")
    return archives.write_parquet(tmp_path_factory.mktemp("parquet") / "data")


@pytest.mark.parametrize("source", ["official", "kaggle", "parquet"])
def test_every_source_becomes_the_same_folders(source, tmp_path, request):
    folder, out = request.getfixturevalue(source), tmp_path / "of mine"
    before = content(folder)
    done = run(tmp_path, folder, out, "--skip-md5").check()
    assert content(out) == archives.tree()
    assert content(folder) == before
    assert f"train: {sum(name.startswith('train') for name in archives.tree())} images of 6 classes" in done.output
    assert f"{out / 'val'}: 12 images of 6 classes" in done.output
    assert f"scripts.pack --data-path '{out}' '{out}-256' --short-side 256" in done.output
    for path in folder.rglob("*.JPEG"):  # of Kaggle: files on the same disk take no space
        assert next(out.rglob(path.name)).samefile(path)


@pytest.mark.parametrize("source", ["kaggle", "parquet"])
def test_killed_and_run_again_it_gives_the_same_folders_and_another_source_is_refused(
    source, official, tmp_path, request
):
    """In test_power_cut.py the official archives, at any moment."""
    out = tmp_path / "out"
    command = [request.getfixturevalue(source), out, "--skip-md5"]
    # Before: a file is whole, and has no name yet.
    fault = ("scripts.prepare.os.replace", 9, "before" if source == "kaggle" else "after")
    killed = run(tmp_path, *command, fault=fault)
    assert killed.codes == [-signal.SIGKILL], killed.output
    assert_nothing_is_half_written(out)
    there = {path: path.stat().st_mtime_ns for path in out.rglob("*.JPEG")}
    assert str(out / "train.partial") in error_line(run(tmp_path, official, out, "--skip-md5"))
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.JPEG")} == there
    run(tmp_path, *command).check()
    assert content(out) == archives.tree()
    kept = {path.name: path.stat().st_mtime_ns for path in out.rglob("*.JPEG")}
    assert all(kept[path.name] == time for path, time in there.items())


def assert_nothing_is_half_written(out):
    """Check that a split that has its name is whole, and that every image that has its name is."""
    images = archives.tree()
    for split in ("train", "val"):
        if (out / split).exists():
            whole = {name: payload for name, payload in images.items() if name.startswith(split)}
            assert {f"{split}/{name}": payload for name, payload in content(out / split).items()} == whole
        for path in (out / f"{split}.partial").rglob("*.JPEG"):
            assert path.read_bytes() == images[f"{split}/{path.parent.name}/{path.name}"]


def test_a_finished_split_is_left_as_it_is(official, tmp_path):
    """Also where the archives lie in the folder that gets the images."""
    out = shutil.copytree(official, tmp_path / "out")
    archived = content(out)
    run(tmp_path, out, out, "--skip-md5", "--splits", "val").check()
    (out / "val" / "mark").touch()
    done = run(tmp_path, out, out, "--skip-md5").check()
    assert f"{out / 'val'} is there already" in done.output
    assert content(out) == {**archives.tree(), **archived, "val/mark": b""}


def test_what_is_in_the_way_is_named_and_kept(kaggle, tmp_path):
    """An OUT among the images, a file in place of a folder, a link in a half, and a pipe in place of an image."""
    source = shutil.copytree(kaggle / "ILSVRC/Data/CLS-LOC/train", tmp_path / "source" / "train").parent
    before = content(source)
    (tmp_path / "link").symlink_to(source / "train")
    for out in (source / "train" / "new", tmp_path / "link" / "new"):
        assert f"{out} is inside {source / 'train'}" in error_line(run(tmp_path, source, out))
    assert content(source) == before
    assert "is there already" in run(tmp_path, source, source).check().output
    for name in ("train", "train.partial"):
        (tmp_path / f"out of {name}").mkdir()
        (tmp_path / f"out of {name}" / name).write_text("kept")
        assert f"{name}" in error_line(run(tmp_path, source, tmp_path / f"out of {name}"))
        assert (tmp_path / f"out of {name}" / name).read_text() == "kept"
    half = tmp_path / "half" / "train.partial" / "train"
    half.mkdir(parents=True)
    (half / "n00000001").symlink_to(tmp_path / "source")
    assert f"{half / 'n00000001'} is a link" in error_line(run(tmp_path, kaggle, tmp_path / "half"))
    assert content(source) == before
    odd = next((source / "train").iterdir()) / "odd.JPEG"
    os.mkfifo(odd)
    assert f" {odd} " in error_line(run(tmp_path, source, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("truth", ["devkit", "table"])
def test_a_flat_val_is_sorted(official, kaggle, tmp_path, truth):
    """The folder that train.py refuses: class folders in train, and images in val."""
    flat = shutil.copytree(kaggle / "ILSVRC/Data/CLS-LOC", tmp_path / "flat")
    before = content(flat)
    file = official / DEVKIT if truth == "devkit" else kaggle / "LOC_val_solution.csv"
    assert DEVKIT in error_line(run(tmp_path, flat, tmp_path / "out"))
    run(tmp_path, flat, file, tmp_path / "out", "--skip-md5").check()
    assert content(tmp_path / "out") == archives.tree()
    assert "choose another OUT" in error_line(run(tmp_path, flat, file, flat, "--splits", "val", "--skip-md5"))
    assert content(flat) == before


def halved(payload: bytes) -> bytes:
    return payload[: len(payload) // 2]


def tar_of_a_link(_: bytes) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        member = tarfile.TarInfo("ILSVRC2012_val_00000001.JPEG")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(member)
    return content.getvalue()


IMAGE = archives.tar_of({"a.JPEG": b"a"})
DAMAGED = {
    "truncated train": (TRAIN, halved, "is truncated"),
    "cut between members": (VAL, lambda tar: tar[: tar.index(b"ILSVRC2012_val_00000005")], "end is missing"),
    "flat train": (TRAIN, lambda _: IMAGE, "holds no images where"),
    "leading out": (VAL, lambda _: archives.tar_of({"../a.JPEG": b"a"}), "points outside"),
    "bad class": (TRAIN, lambda _: archives.tar_of({"...tar": IMAGE}), "class '..'"),
    "an image twice": (TRAIN, lambda _: archives.tar_of({"n1.tar": IMAGE, "x/n1.tar": IMAGE}), "n1/a.JPEG twice"),
    "link": (VAL, tar_of_a_link, "as a link"),
    "unknown image": (VAL, lambda _: archives.tar_of({"ILSVRC2012_val_00000099.JPEG": b"a"}), "no class"),
    "gzip": (TRAIN, gzip.compress, "unpack it"),
    "truncated devkit": (DEVKIT, halved, "not a readable"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_archive_is_refused_in_one_line(official, tmp_path, kind):
    name, change, words = DAMAGED[kind]
    folder = shutil.copytree(official, tmp_path / "downloads")
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    line = error_line(run(tmp_path, folder, tmp_path / "out", "--skip-md5"))
    assert words in line
    assert name in line or "devkit" in line
    assert not (tmp_path / "out" / ("val" if "val" in name else "train")).exists()
    assert not (tmp_path / "a.JPEG").exists()


@pytest.mark.parametrize("name", [TRAIN, DEVKIT])
def test_another_archive_than_the_official_one_is_refused_before_anything_is_written(official, tmp_path, name):
    assert dict(imagenet.ARCHIVE_META.values()) == prepare.MD5
    source = [official / (VAL if name == DEVKIT else name), official / DEVKIT]
    assert f"{official / name} has the MD5" in error_line(run(tmp_path, *source, tmp_path / "out"))
    assert not list(tmp_path.glob("out/*"))


def test_what_is_missing_is_named(official, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "images.zip").touch()
    for argv, words in [
        ([official / VAL], DEVKIT), ([tmp_path], "there is no train and no val"),
        ([tmp_path / "nowhere"], "nowhere is no folder"), ([tmp_path / "images.zip"], f"none of {TRAIN}"),
        ([official / TRAIN, "--splits", "train", "val"], "there is no val in"),
    ]:  # fmt: skip
        assert words in error_line(run(tmp_path, argv[0], out, *argv[1:]))
    assert not out.exists()
    assert "val: left out" in run(tmp_path, official / TRAIN, out, "--skip-md5").check().output


def test_a_full_disk_is_one_line_and_leaves_nothing_half(official, tmp_path):
    """A limit on the size of a file stands for a full disk; and an archive with a hole of eight terabytes behind it."""
    out, largest = tmp_path / "out", max(map(len, archives.tree().values()))
    outcome = run(tmp_path, official, out, "--skip-md5", largest_file=largest - 1)
    assert "does not allow a file this large" in error_line(outcome, 1)
    assert_nothing_is_half_written(out)
    run(tmp_path, official, out, "--skip-md5").check()
    assert content(out) == archives.tree()
    folder = shutil.copytree(official, tmp_path / "downloads")
    os.truncate(folder / TRAIN, 1 << 43)
    assert "train needs 8192.0 GiB" in error_line(run(tmp_path, folder, tmp_path / "new", "--skip-md5"))
    assert not list((tmp_path / "new").rglob("*.JPEG"))


def test_odd_parquet_is_refused_in_one_line(tmp_path, parquet):
    pyarrow = pytest.importorskip("pyarrow")
    name, payload = "train-00000-of-00001.parquet", (parquet / "train-00000-of-00002.parquet").read_bytes()
    for folder in ("other", "truncated"):
        (tmp_path / folder).mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"img": [b"a"], "fine_label": [1]}), tmp_path / "other" / name)
    (tmp_path / "truncated" / name).write_bytes(halved(payload))
    nameless = archives.write_parquet(tmp_path / "data", has_paths=False)
    for source, words in [
        (tmp_path / "other" / name, "column `image`"), (tmp_path / "truncated" / name, "is truncated"),
        (nameless, "names its synset"),
        (parquet / "train-00000-of-00002.parquet", "train-00001-of-00002.parquet is missing"),
    ]:  # fmt: skip
        assert words in error_line(run(tmp_path, source, tmp_path / "out"))
    assert not (tmp_path / "out" / "train").exists()
