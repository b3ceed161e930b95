"""scripts/pack.py: the same data set in tars, whatever interrupts it."""

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
from scripts import pack
from tests.archives import tar_of
from tests.exports import refused
from tests.images import FILES, encoded, write_images
from tests.images import run_pack as run

NUM_ODD = len(FILES) + 1


def write_odd_images(folder: Path) -> None:
    """Write every kind of image file that ImageNet and others hold, whatever their names say."""
    (folder / "deeper").mkdir(parents=True)
    for name, payload in FILES.items():
        (folder / f"{name}.jpg").write_bytes(payload)
    Image.open(io.BytesIO(FILES["WebP"])).resize((200, 20)).save(folder / "deeper" / "ünïcode name.png")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """36 ordinary images, and as many odd ones in each split."""
    folder = write_images(tmp_path_factory.mktemp("source"), {"train": [12, 9], "val": [8, 7]}, size=(96, 64))
    write_odd_images(folder / "train" / "odd")
    write_odd_images(folder / "val" / "odd")
    return folder


def extract(out: Path, folder: Path) -> Path:
    """Unpack every tar by the real tar program."""
    folder.mkdir()
    for path in sorted(out.glob("*.tar")):
        subprocess.run(["tar", "xf", str(path), "-C", str(folder)], check=True)
    return folder


def content(out: Path) -> dict[str, bytes]:
    # Whoever reads a pack leaves an index beside it.
    return {path.name: path.read_bytes() for path in out.iterdir() if not path.name.startswith(".touchstone-index")}


@pytest.fixture(scope="module")
def short_side(source, tmp_path_factory):
    """A pack of images of short side 48, and the image folder that tar makes of it."""
    folder = tmp_path_factory.mktemp("short")
    run(folder, "--data-path", source, folder / "out", "--short-side", 48, "--workers", 1).check()
    return folder / "out", extract(folder / "out", folder / "extracted")


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
    """In the middle of a shard; test_power_cut.py has a kill at any moment."""
    out = tmp_path / "out"
    command = ["--data-path", source, out, "--short-side", 48, "--workers", 3]  # the pack had one
    stopped = run(tmp_path, *command, fault=("tarfile.TarFile.addfile", 17, "after", signal.SIGTERM))
    refused(stopped, "pack", 130)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["state"] == "writing"
    recorded = [out / shard["file"] for split in manifest["splits"].values() for shard in split["shards"]]
    assert {*out.iterdir()} == {out / "manifest.json", *recorded}
    before = times(recorded)
    run(tmp_path, *command).check()
    assert content(out) == content(short_side[0])
    assert times(recorded) == before  # these were not written again


def copy_of(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "copy")


def test_a_complete_pack_is_left_alone_and_a_lost_or_damaged_shard_written_again(source, short_side, tmp_path):
    """Also one of an earlier version that lacks an image."""
    out = copy_of(short_side[0], tmp_path)
    before = times(out.glob("*.tar"))
    command = ["--data-path", source, out, "--short-side", 48, "--workers", 1]
    run(tmp_path, *command).check()
    assert times(out.glob("*.tar")) == before
    manifest = json.loads((out / "manifest.json").read_text())
    record = manifest["splits"]["train"]["shards"][1]
    record["images"] -= 1
    (out / "manifest.json").write_text(json.dumps(manifest))
    (out / record["file"]).write_bytes(bytes(record["bytes"]))
    (out / "train-000000.tar").unlink()
    os.truncate(out / "val-000000.tar", 1000)
    run(tmp_path, *command).check()
    assert content(out) == content(short_side[0])


def test_another_source_or_other_settings_are_refused(source, short_side, tmp_path):
    """Version 1.0.0 wrote quality 90 at 4:2:0, and no word of the latter; such a pack is read."""
    out, changed = copy_of(short_side[0], tmp_path), shutil.copytree(source, tmp_path / "changed")
    (changed / "val" / "class0" / "image000.jpg").unlink()
    written = (out / "manifest.json").read_text()
    for folder, px, (old, new), words in [
        (source, 49, ("", ""), "px is 49 and was 48"),
        (changed, 48, ("", ""), f"val images is {14 + NUM_ODD} and was {15 + NUM_ODD}"),
        (source, 48, ('"quality": 95', '"quality": 90'), "quality is 95 and was 90"),
        (source, 48, ('"subsampling"', '"another"'), "subsampling is 4:4:4 and was None"),
    ]:
        (out / "manifest.json").write_text(written.replace(old, new))
        assert words in refused(run(tmp_path, "--data-path", folder, out, "--short-side", px), "pack", 2)
        assert len(open_source(out / "val")) == 15 + NUM_ODD
    (out / "manifest.json").write_text(written)
    assert content(out) == content(short_side[0])


def test_the_original_val_beside_the_tars_is_read_in_their_place(source, short_side, tmp_path):
    out = copy_of(short_side[0], tmp_path)
    (out / "val").symlink_to(source / "val")
    packed, read = open_source(short_side[0] / "val"), open_source(out / "val")
    assert read.fingerprint() == packed.fingerprint()
    payload = (source / "val" / "class0" / "image000.jpg").read_bytes()
    assert (read.read(0), packed.read(0) != payload) == (payload, True)


def test_what_stops_it_is_one_line_and_leaves_nothing_half(source, tmp_path):
    """An unreadable image, a limit on the size of a file (as a full disk), and a worker that is killed."""
    bad, out = shutil.copytree(source, tmp_path / "bad"), tmp_path / "out"
    truncated = bad / "train" / "class1" / "image004.jpg"
    os.truncate(truncated, 900)
    for folder, fault, words in [
        (bad, {}, [str(truncated), "truncated"]),
        (source, {"largest_file": 8000}, [f"{out / 'train-000000.tar'}: File too large"]),
        (source, {"fault": ("scripts.pack.shrink", 5, "before")}, ["a loader process was killed"]),
    ]:
        done = run(tmp_path, out, "--short-side", 48, "--workers", 2, "--data-path", folder, **fault)
        line = refused(done, "pack", 1)
        assert all(word in line for word in words)
        assert not list(out.glob("*.tmp.*"))
        shutil.rmtree(out)


BAD_COMMANDS = [
    ("--data-path {source} {source} --short-side 9", "train is not part of a pack"),
    ("--data-path {source} {source}/train/packed --short-side 9", "is inside"),
    ("--data-path {source} {tmp}/out", "--short-side"),
    ("{tmp}/out --short-side 9", "--data-path"),
    ("--data-path {source}/train {tmp}/out --short-side 9", "is one split; give the folder that holds it"),
    ("--data-path {tmp}/dots {tmp}/out --short-side 9", "'...tar' is hidden"),
    ("--data-path {source} {tmp}/tars --short-side 9", "is not part of a pack"),
    ("--data-path {source} {tmp}/damaged --short-side 9", "manifest.json is damaged; choose another OUT"),
]


@pytest.mark.parametrize(("command", "words"), BAD_COMMANDS)
def test_bad_input_is_one_line_and_exit_code_2(source, tmp_path, command, words):
    for name in ("tars", "damaged", "dots"):
        (tmp_path / name).mkdir()
    (tmp_path / "tars" / "train-000000.tar").write_bytes(b"precious")
    (tmp_path / "damaged" / "manifest.json").write_text('{"kind": "touchstone pack", "format": 1, "splits": {}}')
    for name in ("train", "val"):
        (tmp_path / "dots" / f"{name}.tar").write_bytes(tar_of({"...tar": tar_of({"a.jpg": b"a"})}))
    assert words in refused(run(tmp_path, *command.format(source=source, tmp=tmp_path).split()), "pack", 2)
    assert (tmp_path / "tars" / "train-000000.tar").read_bytes() == b"precious"


def test_a_shard_read_back_otherwise_than_written_is_not_kept(tmp_path):
    (tmp_path / "shard").write_bytes(b"content")
    pack.verify_written(hashlib.sha256(b"content").hexdigest(), tmp_path / "shard")
    with pytest.raises(OSError, match="read back is not"):
        pack.verify_written(hashlib.sha256(b"contenT").hexdigest(), tmp_path / "shard")
