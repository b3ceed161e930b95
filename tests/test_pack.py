"""scripts/pack.py and prepare.py: the same data set in tars or class folders, whatever interrupts it."""

import gzip
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
from pathlib import Path

import numpy
import pytest
from PIL import Image, ImageFile
from torchvision import datasets

from loading.forms import open_source
from scripts import pack, prepare
from tests import archives
from tests.exports import refused
from tests.images import FILES, encoded, run_pack, write_images
from tests.ranks import Outcome, run_ranks, tool_rank
from tests.test_index import member

NUM_ODD = len(FILES) + 1


def files_in(folder: Path) -> dict[str, bytes]:
    # Whoever reads a pack leaves an index beside it.
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".touchstone-index")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = write_images(tmp_path_factory.mktemp("source"), {"train": [12, 9], "val": [8, 7]}, size=(96, 64))
    for odd in (folder / "train" / "odd", folder / "val" / "odd"):
        (odd / "deeper").mkdir(parents=True)
        for name, payload in FILES.items():
            (odd / f"{name}.jpg").write_bytes(payload)
        Image.open(io.BytesIO(FILES["WebP"])).resize((200, 20)).save(odd / "deeper" / "ünïcode name.png")
    return folder


@pytest.fixture(scope="module")
def short_side(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("short")
    run_pack(folder, "--data-path", source, folder / "out", "--short-side", 48, "--workers", 1).check()
    (folder / "extracted").mkdir()
    for path in sorted((folder / "out").glob("*.tar")):
        subprocess.run(["tar", "xf", str(path), "-C", str(folder / "extracted")], check=True)
    return folder / "out", folder / "extracted"


def test_tar_gives_back_image_folders_listing(source, short_side):
    out, extracted = short_side
    manifest = json.loads((out / "manifest.json").read_text())
    for split in ("train", "val"):
        before, after = datasets.ImageFolder(source / split), datasets.ImageFolder(extracted / split)
        assert after.class_to_idx == before.class_to_idx
        names = [(os.path.relpath(path, source), label) for path, label in before.samples]
        assert [(os.path.relpath(path, extracted), label) for path, label in after.samples] == names
        assert open_source(source / split).fingerprint() == open_source(out / split).fingerprint()
        assert sum(shard["images"] for shard in manifest["splits"][split]["shards"]) == len(names)
        files = [f"{split}-{number:06d}.tar" for number in range(len(list(out.glob(f"{split}-*"))))]
        assert len(files) > 1
        members = []
        for file in files:
            with tarfile.open(out / file) as tar:
                members += tar.getnames()
        assert members == [name for name, _ in names]  # in ImageFolder's order
    assert manifest["state"] == "complete"
    command = ["sha256sum", "--check", "SHA256SUMS"]
    done = subprocess.run(command, check=True, cwd=out, capture_output=True, text=True)
    assert {line.split(":")[0] for line in done.stdout.splitlines()} >= {path.name for path in out.glob("*.tar")}


def test_short_side_has_pillows_pixels(source, short_side):
    sizes = {}
    for path in [path for path in sorted(source.rglob("*.*")) if path.is_file() and path.name[0] != "."]:  # no index
        with Image.open(path) as image, Image.open(short_side[1] / path.relative_to(source)) as after:
            width, height = image.size
            orientation = 1 if image.format == "TIFF" else image.getexif().get(274, 1)
            expected = image.convert("RGB")
            if min(width, height) > 48:
                # As torchvision's Resize: the longer side is rounded down.
                size = (48, 48 * height // width) if width <= height else (48 * width // height, 48)
                expected = expected.resize(size, Image.Resampling.BICUBIC)
            assert (after.format, after.mode, after.size) == ("JPEG", "RGB", expected.size), path
            plain = encoded(expected, "JPEG", quality=95, subsampling=0)
            assert after.tobytes() == Image.open(io.BytesIO(plain)).tobytes(), path
            assert dict(after.getexif()) == ({} if orientation == 1 else {274: orientation})
            assert "comment" not in after.info
        sizes[path.name] = expected.size
    assert sizes["progressive.jpg"] == (65, 48)
    assert sizes["ünïcode name.png"] == (200, 20)


def test_noise_is_not_too_much_for_pillows_buffer(monkeypatch):
    monkeypatch.setattr(ImageFile, "MAXBLOCK", 1 << 16)  # Pillow's own, which an earlier image has enlarged
    image = Image.fromarray(numpy.random.default_rng(0).integers(0, 2, (300, 300, 3), dtype=numpy.uint8) * 255)
    with pytest.raises(OSError, match="broken data stream"):
        encoded(image, "JPEG", quality=pack.QUALITY, subsampling=0, optimize=True)
    assert Image.open(io.BytesIO(pack.shrink(image, 300))).size == (300, 300)


def times(files) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in files}


def test_interrupted_and_run_again_it_writes_the_same_bytes(source, short_side, tmp_path):
    out = tmp_path / "out"
    command = ["--data-path", source, out, "--short-side", 48, "--workers", 3]  # the pack had one
    stopped = run_pack(tmp_path, *command, fault=("tarfile.TarFile.addfile", 17, "after", signal.SIGTERM))
    refused(stopped, "pack", 130)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["state"] == "writing"
    recorded = [out / shard["file"] for split in manifest["splits"].values() for shard in split["shards"]]
    assert {*out.iterdir()} == {out / "manifest.json", *recorded}
    before = times(recorded)
    run_pack(tmp_path, *command).check()
    assert files_in(out) == files_in(short_side[0])
    assert times(recorded) == before  # these were not written again


def test_a_complete_pack_is_left_alone_and_a_lost_or_damaged_shard_written_again(source, short_side, tmp_path):
    out = shutil.copytree(short_side[0], tmp_path / "copy")
    before = times(out.glob("*.tar"))
    command = ["--data-path", source, out, "--short-side", 48, "--workers", 1]
    run_pack(tmp_path, *command).check()
    assert times(out.glob("*.tar")) == before
    manifest = json.loads((out / "manifest.json").read_text())
    record = manifest["splits"]["train"]["shards"][1]
    record["images"] -= 1
    (out / "manifest.json").write_text(json.dumps(manifest))
    (out / record["file"]).write_bytes(bytes(record["bytes"]))
    (out / "train-000000.tar").unlink()
    os.truncate(out / "val-000000.tar", 1000)
    run_pack(tmp_path, *command).check()
    assert files_in(out) == files_in(short_side[0])


def test_another_source_or_other_settings_are_refused(source, short_side, tmp_path):
    """Version 1.0.0 wrote quality 90 at 4:2:0, and no word of the latter; such a pack is read."""
    out, changed = (shutil.copytree(each, tmp_path / each.name) for each in (short_side[0], source))
    (changed / "val" / "class0" / "image000.jpg").unlink()
    written = (out / "manifest.json").read_text()
    for folder, px, (old, new), words in [
        (source, 49, ("", ""), "px is 49 and was 48"),
        (changed, 48, ("", ""), f"val images is {14 + NUM_ODD} and was {15 + NUM_ODD}"),
        (source, 48, ('"quality": 95', '"quality": 90'), "quality is 95 and was 90"),
        (source, 48, ('"subsampling"', '"another"'), "subsampling is 4:4:4 and was None"),
    ]:
        (out / "manifest.json").write_text(written.replace(old, new))
        assert words in refused(run_pack(tmp_path, "--data-path", folder, out, "--short-side", px), "pack", 2)
        assert len(open_source(out / "val")) == 15 + NUM_ODD
    (out / "manifest.json").write_text(written)
    assert files_in(out) == files_in(short_side[0])


def test_the_original_val_beside_the_tars_is_read_in_their_place(source, short_side, tmp_path):
    out = shutil.copytree(short_side[0], tmp_path / "copy")
    (out / "val").symlink_to(source / "val")
    packed, read = open_source(short_side[0] / "val"), open_source(out / "val")
    assert read.fingerprint() == packed.fingerprint()
    payload = (source / "val" / "class0" / "image000.jpg").read_bytes()
    assert (read.read(0), packed.read(0) != payload) == (payload, True)


def test_what_stops_it_is_one_line_and_leaves_nothing_half(source, tmp_path):
    bad, out = shutil.copytree(source, tmp_path / "bad"), tmp_path / "out"
    truncated = bad / "train" / "class1" / "image004.jpg"
    os.truncate(truncated, 900)
    for folder, fault, words in [
        (bad, {}, [str(truncated), "truncated"]),
        (source, {"largest_file": 8000}, [f"{out / 'train-000000.tar'}: File too large"]),
        (source, {"fault": ("scripts.pack.shrink", 5, "before")}, ["a loader process was killed"]),
    ]:
        done = run_pack(tmp_path, out, "--short-side", 48, "--workers", 2, "--data-path", folder, **fault)
        line = refused(done, "pack", 1)
        assert all(word in line for word in words)
        assert not list(out.glob("*.tmp.*"))
        shutil.rmtree(out)


@pytest.mark.parametrize(("command", "words"), [
    ("--data-path {source} {source} --short-side 9", "train is not part of a pack"),
    ("--data-path {source} {source}/train/packed --short-side 9", "is inside"),
    ("--data-path {source} {tmp}/out", "--short-side"),
    ("{tmp}/out --short-side 9", "--data-path"),
    ("--data-path {source}/train {tmp}/out --short-side 9", "is one split; give the folder that holds it"),
    ("--data-path {tmp}/dots {tmp}/out --short-side 9", "'...tar' is hidden"),
    ("--data-path {source} {tmp}/tars --short-side 9", "is not part of a pack"),
    ("--data-path {source} {tmp}/damaged --short-side 9", "manifest.json is damaged; choose another OUT"),
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(source, tmp_path, command, words):
    for name in ("tars", "damaged", "dots"):
        (tmp_path / name).mkdir()
    (tmp_path / "tars" / "train-000000.tar").write_bytes(b"precious")
    (tmp_path / "damaged" / "manifest.json").write_text('{"kind": "touchstone pack", "format": 1, "splits": {}}')
    for name in ("train", "val"):
        (tmp_path / "dots" / f"{name}.tar").write_bytes(archives.tar_of({"...tar": archives.tar_of({"a.jpg": b"a"})}))
    assert words in refused(run_pack(tmp_path, *command.format(source=source, tmp=tmp_path).split()), "pack", 2)
    assert (tmp_path / "tars" / "train-000000.tar").read_bytes() == b"precious"


def test_a_shard_read_back_otherwise_than_written_is_not_kept(tmp_path):
    (tmp_path / "shard").write_bytes(b"content")
    pack.verify_written(hashlib.sha256(b"content").hexdigest(), tmp_path / "shard")
    with pytest.raises(OSError, match="read back is not"):
        pack.verify_written(hashlib.sha256(b"contenT").hexdigest(), tmp_path / "shard")


TRAIN, VAL, DEVKIT = prepare.TRAIN_TAR, prepare.VAL_TAR, prepare.DEVKIT


def run_prepare(tmp_path: Path, *argv, fault=None, largest_file=None) -> Outcome:
    return run_ranks(tool_rank, 1, "prepare", argv, None, fault, largest_file, log_folder=tmp_path, timeout_s=60)


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
    before = files_in(folder)
    done = run_prepare(tmp_path, folder, out, "--skip-md5").check()
    assert files_in(out) == archives.tree()
    assert files_in(folder) == before
    assert f"train: {sum(name.startswith('train') for name in archives.tree())} images of 6 classes" in done.output
    assert f"{out / 'val'}: 12 images of 6 classes" in done.output
    assert f"scripts.pack --data-path '{out}' '{out}-256' --short-side 256" in done.output
    for path in folder.rglob("*.JPEG"):  # of Kaggle: files on the same disk take no space
        assert next(out.rglob(path.name)).samefile(path)


@pytest.mark.parametrize("source", ["kaggle", "parquet"])
def test_killed_and_run_again_it_gives_the_same_folders_and_refuses_others(source, official, tmp_path, request):
    out = tmp_path / "out"
    command = [request.getfixturevalue(source), out, "--skip-md5"]
    # Before: a file is whole, and has no name yet.
    fault = ("scripts.prepare.os.replace", 9, "before" if source == "kaggle" else "after")
    killed = run_prepare(tmp_path, *command, fault=fault)
    assert killed.codes == [-signal.SIGKILL], killed.output
    assert_nothing_is_half_written(out)
    there = {path: path.stat().st_mtime_ns for path in out.rglob("*.JPEG")}
    other = error_line(run_prepare(tmp_path, official, out, "--skip-md5"))
    assert "out/train.partial was begun from another source" in other
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.JPEG")} == there
    run_prepare(tmp_path, *command).check()
    assert files_in(out) == archives.tree()
    kept = {path.name: path.stat().st_mtime_ns for path in out.rglob("*.JPEG")}
    assert all(kept[path.name] == time for path, time in there.items())


def assert_nothing_is_half_written(out):
    images = archives.tree()
    for split in ("train", "val"):
        if (out / split).exists():
            whole = {name: payload for name, payload in images.items() if name.startswith(split)}
            assert {f"{split}/{name}": payload for name, payload in files_in(out / split).items()} == whole
        for path in (out / f"{split}.partial").rglob("*.JPEG"):
            assert path.read_bytes() == images[f"{split}/{path.parent.name}/{path.name}"]


def test_a_finished_split_is_left_as_it_is(official, tmp_path):
    out = shutil.copytree(official, tmp_path / "out")
    archived = files_in(out)
    run_prepare(tmp_path, out, out, "--skip-md5", "--splits", "val").check()
    (out / "val" / "mark").touch()
    done = run_prepare(tmp_path, out, out, "--skip-md5").check()
    assert f"{out / 'val'} is there already" in done.output
    assert files_in(out) == {**archives.tree(), **archived, "val/mark": b""}


def test_what_is_in_the_way_is_named_and_kept(kaggle, tmp_path):
    source = shutil.copytree(kaggle / "ILSVRC/Data/CLS-LOC/train", tmp_path / "source" / "train").parent
    before = files_in(source)
    (tmp_path / "link").symlink_to(source / "train")
    for out in (source / "train" / "new", tmp_path / "link" / "new"):
        assert f"{out} is inside {source / 'train'}" in error_line(run_prepare(tmp_path, source, out))
    assert files_in(source) == before
    assert "is there already" in run_prepare(tmp_path, source, source).check().output
    for name in ("train", "train.partial"):
        (tmp_path / f"out of {name}").mkdir()
        (tmp_path / f"out of {name}" / name).write_text("kept")
        assert f"{name}" in error_line(run_prepare(tmp_path, source, tmp_path / f"out of {name}"))
        assert (tmp_path / f"out of {name}" / name).read_text() == "kept"
    half = tmp_path / "half" / "train.partial" / "train"
    half.mkdir(parents=True)
    (half / "n00000001").symlink_to(tmp_path / "source")
    assert f"{half / 'n00000001'} is a link" in error_line(run_prepare(tmp_path, kaggle, tmp_path / "half"))
    assert files_in(source) == before
    odd = next((source / "train").iterdir()) / "odd.JPEG"
    os.mkfifo(odd)
    assert f" {odd} " in error_line(run_prepare(tmp_path, source, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("truth", ["devkit", "table"])
def test_a_flat_val_is_sorted(official, kaggle, tmp_path, truth):
    flat = shutil.copytree(kaggle / "ILSVRC/Data/CLS-LOC", tmp_path / "flat")
    before = files_in(flat)
    file = official / DEVKIT if truth == "devkit" else kaggle / "LOC_val_solution.csv"
    assert DEVKIT in error_line(run_prepare(tmp_path, flat, tmp_path / "out"))
    run_prepare(tmp_path, flat, file, tmp_path / "out", "--skip-md5").check()
    assert files_in(tmp_path / "out") == archives.tree()
    assert "choose another OUT" in error_line(run_prepare(tmp_path, flat, file, flat, "--splits", "val", "--skip-md5"))
    assert files_in(flat) == before


def halved(payload: bytes) -> bytes:
    return payload[: len(payload) // 2]


IMAGE, IMAGES = archives.tar_of({"a.JPEG": b"a"}), "ILSVRC2012_val_000000"
DAMAGED = {
    "truncated train": (TRAIN, halved, "is truncated"),
    "cut between members": (VAL, lambda tar: tar[: tar.index(b"ILSVRC2012_val_00000005")], "end is missing"),
    "flat train": (TRAIN, lambda _: IMAGE, "holds no images where"),
    "leading out": (VAL, lambda _: archives.tar_of({"../a.JPEG": b"a"}), "points outside"),
    "bad class": (TRAIN, lambda _: archives.tar_of({"...tar": IMAGE}), "class '..'"),
    "an image twice": (TRAIN, lambda _: archives.tar_of({"n1.tar": IMAGE, "x/n1.tar": IMAGE}), "n1/a.JPEG twice"),
    "link": (VAL, lambda _: member(f"{IMAGES}01.JPEG", tarfile.SYMTYPE) + bytes(1024), "as a link"),
    "unknown image": (VAL, lambda _: archives.tar_of({f"{IMAGES}99.JPEG": b"a"}), "no class"),
    "gzip": (TRAIN, gzip.compress, "unpack it"),
    "truncated devkit": (DEVKIT, halved, "not a readable"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_archive_is_refused_in_one_line(official, tmp_path, kind):
    name, change, words = DAMAGED[kind]
    folder = shutil.copytree(official, tmp_path / "downloads")
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    line = error_line(run_prepare(tmp_path, folder, tmp_path / "out", "--skip-md5"))
    assert words in line
    assert name in line or "devkit" in line
    assert not (tmp_path / "out" / ("val" if "val" in name else "train")).exists()
    assert not (tmp_path / "a.JPEG").exists()


@pytest.mark.parametrize("name", [TRAIN, DEVKIT])
def test_another_archive_than_the_official_one_is_refused_before_anything_is_written(official, tmp_path, name):
    assert dict(datasets.imagenet.ARCHIVE_META.values()) == prepare.MD5
    source = [official / (VAL if name == DEVKIT else name), official / DEVKIT]
    assert f"{official / name} has the MD5" in error_line(run_prepare(tmp_path, *source, tmp_path / "out"))
    assert not list(tmp_path.glob("out/*"))


def test_what_is_missing_is_named(official, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "images.zip").touch()
    for argv, words in [
        ([official / VAL], DEVKIT), ([tmp_path], "there is no train and no val"),
        ([tmp_path / "nowhere"], "nowhere is no folder"), ([tmp_path / "images.zip"], f"none of {TRAIN}"),
        ([official / TRAIN, "--splits", "train", "val"], "there is no val in"),
    ]:  # fmt: skip
        assert words in error_line(run_prepare(tmp_path, argv[0], out, *argv[1:]))
    assert not out.exists()
    assert "val: left out" in run_prepare(tmp_path, official / TRAIN, out, "--skip-md5").check().output


def test_a_full_disk_is_one_line_and_leaves_nothing_half(official, tmp_path):
    """A limit on the size of a file stands for a full disk; and an archive with a hole of eight terabytes behind it."""
    out, largest = tmp_path / "out", max(map(len, archives.tree().values()))
    outcome = run_prepare(tmp_path, official, out, "--skip-md5", largest_file=largest - 1)
    assert "does not allow a file this large" in error_line(outcome, 1)
    assert_nothing_is_half_written(out)
    run_prepare(tmp_path, official, out, "--skip-md5").check()
    assert files_in(out) == archives.tree()
    folder = shutil.copytree(official, tmp_path / "downloads")
    os.truncate(folder / TRAIN, 1 << 43)
    assert "train needs 8192.0 GiB" in error_line(run_prepare(tmp_path, folder, tmp_path / "new", "--skip-md5"))
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
        assert words in error_line(run_prepare(tmp_path, source, tmp_path / "out"))
    assert not (tmp_path / "out" / "train").exists()
