"""index.py: ImageFolder's images in its order, from folders and from tars, and a cache that is never stale."""

import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from torchvision import datasets

import data
from errors import BadImageError, ImageError, UserError
from loading import index
from loading.forms import open_source
from tests.images import pack, pack_shards, pack_whole, write_images, write_split
from tests.ranks import module_rank, run_ranks


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A split of two classes with nested folders, whose index may be cached although it was written just now."""
    monkeypatch.setattr(index, "RACY_NS", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return write_split(tmp_path / "images" / "train")


def scans(monkeypatch):
    """Return a list that grows with each scan."""
    done, original = [], index.ImageIndex._scan
    monkeypatch.setattr(index.ImageIndex, "_scan", lambda found: done.append(found) or original(found))
    return done


def samples(found):
    return [(found.name(number), found.label(number), found.read(number)) for number in range(len(found))]


def test_images_are_image_folders_with_links_and_odd_names(folder):
    elsewhere = folder.parent / "elsewhere"
    (elsewhere / "in").mkdir(parents=True)
    (elsewhere / "in" / "l.jpg").write_bytes(b"linked")
    (folder / "C").symlink_to(elsewhere)
    (folder / "b" / "ü\n.JPG").write_bytes(b"odd")
    os.mkdir(os.fsencode(folder) + b"/b/\xff")
    (folder / "b" / os.fsdecode(b"\xff") / "k.jpg").write_bytes(b"no UTF-8")
    (folder / "a" / "folder.jpg").mkdir()
    (folder / "a" / "folder.jpg" / "i.jpg").write_bytes(b"in it")
    (folder / "a" / "link.jpg").symlink_to(folder / "b" / "2.jpg")
    (folder / "a" / "gone").symlink_to(folder / "nowhere")
    (folder / "a" / "circle").symlink_to(folder / "a" / "circle")
    theirs, ours = datasets.ImageFolder(folder), open_source(folder)
    assert ours.classes == theirs.classes
    assert [(ours.path(number), ours.label(number)) for number in range(len(ours))] == theirs.samples
    assert [ours.read(number) for number in range(len(ours))] == [Path(path).read_bytes() for path, _ in theirs.samples]


def test_a_link_to_a_folder_above_is_refused(folder):
    (folder / "a" / "deep" / "up").symlink_to(folder / "a")
    with pytest.raises(UserError, match="deep/up is a link to a folder that holds it"):
        open_source(folder)


def test_a_second_start_does_not_scan_and_leaves_the_split_alone(folder, monkeypatch):
    before = folder.stat().st_mtime_ns
    done = scans(monkeypatch)
    first = open_source(folder)
    second = open_source(folder)
    assert len(done) == 1
    assert samples(first) == samples(second)
    assert folder.stat().st_mtime_ns == before
    assert sorted(os.listdir(folder.parent)) == [".touchstone-index-train.npz", "train"]


def test_a_changed_folder_is_scanned_anew(folder):
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "1.jpg").touch()
    (folder / "linked").symlink_to(elsewhere)
    changes = [
        lambda: (folder / "a" / "deep" / "er" / "new.jpg").write_bytes(b"new"),
        lambda: (folder / "b").rename(folder / "0"),
        (elsewhere / "more.jpg").touch,
    ]
    for change in changes:
        before = samples(open_source(folder))
        change()
        after = open_source(folder)
        assert samples(after) != before
        found = [(after.path(number), after.label(number)) for number in range(len(after))]
        assert found == datasets.ImageFolder(folder).samples


def test_a_changed_or_added_tar_is_scanned_anew(folder, tmp_path):
    target = tmp_path / "packed"
    pack_shards(folder, target)
    first = open_source(target / "train")
    pack(target / "train-000001.tar", {"b/5.jpg": folder / "b" / "2.jpg"}, "train/")
    second = open_source(target / "train")
    assert {second.name(number) for number in range(len(second))} > {"b/5.jpg"}
    assert all(second.read(number) is not None for number in range(len(second)))
    pack(target / "train-000003.tar", {"c/6.jpg": folder / "b" / "2.jpg"}, "train/")
    assert open_source(target / "train").classes == ["a", "b", "c"]
    with pytest.raises(ImageError, match=r"train-000001\.tar: the tar has changed"):
        samples(first)


def test_a_folder_changed_a_moment_ago_is_not_cached(folder, monkeypatch, capsys):
    monkeypatch.setattr(index, "RACY_NS", 2_000_000_000)
    done = scans(monkeypatch)
    open_source(folder)
    open_source(folder)
    assert len(done) == 2
    assert "modified less than two seconds ago" in capsys.readouterr().out
    assert not index.cache_paths(folder)[0].exists()


def test_a_link_that_leads_nowhere_yet_is_not_trusted(folder):
    (folder / "c").symlink_to(folder.parent / "unmounted")
    assert open_source(folder).classes == ["a", "b"]
    (folder.parent / "unmounted").mkdir()
    (folder.parent / "unmounted" / "1.jpg").touch()
    assert open_source(folder).classes == ["a", "b", "c"]


class Hostile:
    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return os.system, (f"touch {self.victim}",)


def test_a_damaged_foreign_or_hostile_cache_is_scanned_anew(folder, tmp_path, monkeypatch):
    expected = samples(open_source(folder))
    cache = index.cache_paths(folder)[0]
    good = cache.read_bytes()
    done = scans(monkeypatch)

    def check(content):
        cache.write_bytes(content)
        done.clear()
        assert samples(open_source(folder)) == expected
        return len(done)

    hostile, other = io.BytesIO(), io.BytesIO()
    numpy.savez(hostile, header=numpy.array([Hostile(tmp_path / "executed")], dtype=object))
    numpy.savez(other, header=numpy.zeros(3))
    for content in [b"", b"garbage", good[: len(good) // 2], bytes(len(good)), hostile.getvalue(), other.getvalue()]:
        assert check(content) == 1
    assert not (tmp_path / "executed").exists()
    for place in range(0, len(good), 31):
        damaged = bytearray(good)
        damaged[place] ^= 1 << place % 8
        check(bytes(damaged))
    assert check(good) == 0
    monkeypatch.setattr(index, "_FORMAT", "touchstone image index 3")
    assert check(good) == 1


def test_where_the_data_folder_cannot_be_written_the_cache_is_at_home(folder, tmp_path, monkeypatch, capsys):
    beside, home = index.cache_paths(folder)
    beside.mkdir()  # refused to root as well
    assert home.parent == tmp_path / "home" / "touchstone"
    done = scans(monkeypatch)
    open_source(folder)
    open_source(folder)
    assert len(done) == 1
    assert home.is_file()
    assert os.listdir(home.parent) == [home.name]
    home.unlink()
    home.mkdir()
    capsys.readouterr()
    open_source(folder)
    open_source(folder)
    assert len(done) == 3
    assert capsys.readouterr().out.count("is not cached, so every start scans") == 2


def test_a_time_in_the_future_is_no_reason_to_scan_again(folder, monkeypatch, capsys):
    time_s = 2**33
    monkeypatch.setattr(index, "RACY_NS", 300_000_000)
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (time_s, time_s))
    time.sleep(0.4)
    done = scans(monkeypatch)
    open_source(folder)
    open_source(folder)
    assert len(done) == 1
    assert capsys.readouterr().out == ""
    (folder / "a" / "new.jpg").touch()
    os.utime(folder / "a", (time_s, time_s))  # as it was: the time of the change itself cannot be set
    assert any("new.jpg" in name for name in open_source(folder).names)


def open_rank(root, marker):
    """Open an index, with a line for each scan, which takes long enough for another process to come in between."""
    original = index.ImageIndex._scan

    def slow(found):
        with open(marker, "a") as file:
            file.write("scan\n")
        time.sleep(0.3)
        return original(found)

    index.ImageIndex._scan, index.RACY_NS = slow, 0
    print(len(open_source(Path(root))))


def test_two_processes_that_start_together_scan_once(folder, tmp_path):
    marker = tmp_path / "scans"
    outcome = run_ranks(open_rank, 2, str(folder), str(marker), log_folder=tmp_path).check()
    assert [output.split()[-1] for output in outcome.outputs] == ["6", "6"]
    assert outcome.output.count("waiting for another process") == 1
    assert marker.read_text() == "scan\n"
    assert sorted(os.listdir(folder.parent)) == [".touchstone-index-train.npz", "train"]


def test_a_folder_is_used_before_tars_and_said(folder, capsys):
    pack_whole(folder, folder.parent)
    (folder / "b" / "2.jpg").unlink()
    assert len(open_source(folder)) == 5
    assert f"{folder} is used, and not {folder.parent / 'train.tar'}" in capsys.readouterr().out


def member(name, kind=tarfile.REGTYPE, content=b"content", **fields):
    """Return the bytes of one member."""
    entry = tarfile.TarInfo(name)
    entry.type, entry.size = kind, len(content) if kind == tarfile.REGTYPE else 0
    for key, value in fields.items():
        setattr(entry, key, value)
    padded = content + bytes(-len(content) % 512) if entry.size else b""
    return entry.tobuf(tarfile.PAX_FORMAT) + padded


END = bytes(1024)
GOOD = member("a/1.jpg")
BAD_TARS = {
    "empty": (b"", "truncated, damaged"),
    "garbage": (b"garbage" * 500, "truncated, damaged"),
    "gzipped": (gzip.compress(GOOD + END), "unpack it"),
    "cut in a header": (GOOD + GOOD[:100], "its end is missing"),
    "cut in an image": (GOOD + member("a/2.jpg")[:516], "not whole"),
    "cut before its end": (GOOD + GOOD, "its end is missing"),
    "damaged in the middle": (GOOD + b"x" * 512 + GOOD + END, "its end is missing"),
    "class tar that is cut": (member("a.tar", content=GOOD) + END, "its end is missing"),
    "class tar cut in an image": (member("a.tar", content=GOOD[:-506]) + END, "not whole"),
    "negative size": (GOOD + member("a/2.jpg", pax_headers={"size": "-4096"}) + END, "truncated, damaged"),
    "odd size": (GOOD + member("a/2.jpg", pax_headers={"size": "many"}) + END, "truncated, damaged"),
    "huge size": (GOOD + member("a/2.jpg", pax_headers={"size": str(1 << 70)}) + END, "not whole"),
    "leads out": (member("../a/1.jpg") + END, "points outside"),
    "leads out in the middle": (member("a/../../1.jpg") + END, "points outside"),
    "absolute": (member("/etc/a/1.jpg") + END, "points outside"),
    "a zero in a name": (member("x", pax_headers={"path": "a/1\0.jpg"}) + END, "points outside"),
    "link": (GOOD + member("a/2.jpg", tarfile.SYMTYPE, linkname="/etc/passwd") + END, "--dereference"),
    "hard link": (GOOD + member("a/2.jpg", tarfile.LNKTYPE, linkname="a/1.jpg") + END, "--dereference"),
    "device": (GOOD + member("a/2.jpg", tarfile.CHRTYPE, devmajor=1, devminor=5) + END, "--dereference"),
    "flat": (member("1.jpg") + member("2.jpg") + END, "holds 2 images and no class folders; this sorts them"),
    "no images": (member("a/1.txt") + END, "neither images nor class folders"),
    "empty class": (GOOD + member("b", tarfile.DIRTYPE) + END, "in class b of "),
    "empty class tar": (GOOD + member("b.tar", content=END) + END, "in class b of "),
}


@pytest.mark.parametrize("case", BAD_TARS)
def test_a_bad_tar_is_one_line_that_names_it(tmp_path, case):
    content, words = BAD_TARS[case]
    (tmp_path / "val.tar").write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        open_source(tmp_path / "val")
    assert str(tmp_path / "val.tar") in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_devices_and_links_that_are_no_images_are_ignored_and_said(tmp_path, capsys):
    links = member("a/x", tarfile.SYMTYPE, linkname="/etc") + member("a/y", tarfile.CHRTYPE) + member("a/notes.txt")
    (tmp_path / "val.tar").write_bytes(links + GOOD + END)
    assert samples(open_source(tmp_path / "val")) == [("a/1.jpg", 0, b"content")]
    assert "2 links and devices, such as 'a/x', are ignored" in capsys.readouterr().out


def test_of_members_of_one_name_the_last_counts_as_when_extracted(tmp_path):
    (tmp_path / "val.tar").write_bytes(GOOD + member("./a/1.jpg", content=b"newer") + END)
    assert samples(open_source(tmp_path / "val")) == [("a/1.jpg", 0, b"newer")]


def test_a_missing_shard_is_named(folder, tmp_path):
    pack_shards(folder, tmp_path / "packed")
    (tmp_path / "packed" / "train-000001.tar").unlink()
    with pytest.raises(UserError, match=r"train-000001\.tar is missing, but train-000002\.tar is there"):
        open_source(tmp_path / "packed" / "train")


@pytest.fixture(scope="module")
def written_pack(tmp_path_factory):
    """Two shards of train and one of val, with their manifest, as the packer writes them."""
    source, out = (tmp_path_factory.mktemp(name) for name in ("source", "pack"))
    write_images(source, {"train": [5, 4], "val": [2, 2]})
    for path in source.rglob("*.jpg"):
        os.truncate(path, 200_000)  # what follows the end of an image counts when files are divided into shards
    argv = ["--data-path", str(source), str(out), "--short-side", "32", "--shard-mib", "1", "--workers", "1"]
    run_ranks(module_rank, 1, "scripts.pack", argv, log_folder=source).check()
    return out


def test_an_incomplete_pack_is_refused(written_pack, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    out = tmp_path / "pack"
    shutil.copytree(written_pack, out)
    *_, last = sorted(out.glob("train-*.tar"))
    whole = open_source(out / "train")
    assert len(whole) == 9
    manifest = json.loads((out / "manifest.json").read_text())
    sums = "".join(shard["sha256"] for shard in manifest["splits"]["train"]["shards"])
    assert whole.identity()["checksums"] == hashlib.sha256(sums.encode()).hexdigest()[:16]
    last.unlink()
    with pytest.raises(UserError, match=rf"{last} is missing: 1 of the 2 shards that manifest\.json"):
        open_source(out / "train")
    (out / "manifest.json").write_text(json.dumps({**manifest, "state": "writing"}))
    with pytest.raises(UserError, match="is still being written, or was interrupted; run its"):
        open_source(out / "train")
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert len(open_source(out / "val")) == 4
    # The pack of another split, or another tool's file, says nothing about these.
    foreign = [{**manifest, "kind": "another"}, {**manifest, "splits": {}}, [], 1, {"kind": manifest["kind"]}]
    for content in [*(json.dumps(value).encode() for value in foreign), b"no JSON", b"\xff", b"[" * 100_000]:
        (out / "manifest.json").write_bytes(content)
        assert 0 < len(open_source(out / "train")) < 9


def test_a_thousand_class_tars_need_few_descriptors(tmp_path):
    for number in range(200):
        (tmp_path / "train").mkdir(exist_ok=True)
        (tmp_path / "train" / f"c{number:03d}.tar").write_bytes(member("1.jpg", content=b"%d" % number) + END)
    found = open_source(tmp_path / "train")
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert [found.read(number) for number in range(200)] == [b"%d" % number for number in range(200)]
    if before:
        assert len(os.listdir("/proc/self/fd")) - before <= 128


def test_a_read_that_fails_is_tried_again(folder, monkeypatch):
    dataset = data.IndexedImageFolder(folder, SimpleNamespace(load=lambda payload, draws: payload))
    monkeypatch.setattr(index, "RETRY_WAITS_S", (0, 0, 0))
    original, failures = dataset.index.read, [OSError(5, "Input/output error")] * 3

    def flaky(number):
        if failures:
            raise failures.pop()
        return original(number)

    dataset.index.read = flaky
    assert dataset.load(1) == (original(1), dataset.index.label(1))
    failures += [OSError(5, "Input/output error")] * 4
    with pytest.raises(ImageError, match=r"Input/output error \(tried 4 times\)"):
        dataset.load(1)
    failures[:] = [FileNotFoundError(2, "No such file"), MemoryError(), PermissionError(13, "Permission denied")]
    assert dataset.load(1) == (original(1), dataset.index.label(1))


@pytest.mark.parametrize("form", ["folder", "tar"])
def test_a_file_that_would_fill_memory_is_not_read(tmp_path, monkeypatch, form):
    monkeypatch.setattr(index, "RETRY_WAITS_S", (0, 0, 0))
    (tmp_path / "train" / "a").mkdir(parents=True)
    if form == "tar":
        header = tarfile.TarInfo("a/1.jpg")
        header.size = 200 << 30
        with open(tmp_path / "train" / "a.tar", "wb") as file:
            file.write(header.tobuf())
            file.truncate((200 << 30) + 10240)
        (tmp_path / "train" / "a").rmdir()
    else:
        (tmp_path / "train" / "a" / "1.jpg").touch()
        os.truncate(tmp_path / "train" / "a" / "1.jpg", 200 << 30)
    with pytest.raises(BadImageError, match="it has 214,748,364,800 bytes; an image has at most 1,073,741,824"):
        open_source(tmp_path / "train").read(0)


def test_nobody_waits_for_a_pipe_or_reads_a_device(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "RETRY_WAITS_S", (0, 0, 0))
    (tmp_path / "train" / "a").mkdir(parents=True)
    os.mkfifo(tmp_path / "train" / "a" / "1.jpg")
    (tmp_path / "train" / "a" / "2.jpg").symlink_to("/dev/zero")
    found = open_source(tmp_path / "train")
    for number in range(len(found)):
        with pytest.raises(OSError, match="is not a file"):
            found.read(number)
