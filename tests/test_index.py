"""Sources of images: ImageFolder's images in its order, from every format, and a cache that is never stale."""

import gzip
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy
import pytest
from torchvision import datasets

from errors import BadImageError, ImageError, UserError
from loading import forms, index
from loading.forms import open_source
from tests.archives import jpeg, tar_of
from tests.images import FORMS, pack, pack_as_tar_does, pack_classes, pack_shards, pack_whole, write_split
from tests.started import SMALL, Hostile, run_train


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "RACY_NS", 0)
    return write_split(tmp_path / "images" / "train")


def samples(found):
    return [(found.name(number), found.label(number), found.read(number)) for number in range(len(found))]


def image_folders(folder):
    theirs = datasets.ImageFolder(folder)
    return [(os.path.relpath(path, folder), label, Path(path).read_bytes()) for path, label in theirs.samples]


def test_images_are_image_folders_with_links_and_odd_names(folder, capsys):
    elsewhere, odd = folder.parent / "elsewhere", os.fsdecode(b"\xff")
    for name in ("elsewhere/in", f"train/b/{odd}", "train/a/folder.jpg"):
        (folder.parent / name).mkdir(parents=True)
    for name in ("elsewhere/in/l.jpg", "train/b/ü\n.JPG", f"train/b/{odd}/k.jpg", "train/a/folder.jpg/i.jpg"):
        (folder.parent / name).write_bytes(os.fsencode(name))
    (folder / "C").symlink_to(elsewhere)
    (folder / "a" / "link.jpg").symlink_to(folder / "b" / "2.jpg")
    (folder / "a" / "gone").symlink_to(folder / "nowhere")
    (folder / "a" / "circle").symlink_to(folder / "a" / "circle")
    (folder / "a" / "phone.heic").write_bytes(b"not read")
    ours = open_source(folder)
    assert f"4 files not read, such as {folder}/a/circle, whose extensions are not .jpg" in capsys.readouterr().out
    assert ours.classes == ["C", "a", "b"]
    assert samples(ours) == image_folders(folder)
    (folder / "a" / "deep" / "up").symlink_to(folder / "a")
    with pytest.raises(UserError, match="deep/up is a link to one of its own parent folders"):
        open_source(folder)


def copy_folder(root, target):
    shutil.copytree(root, target / root.name)


HIDDEN = {
    ".ipynb_checkpoints/x.jpg": ".ipynb_checkpoints", "a/._x.jpg": "._x.jpg", "a/deep/.t/x.jpg": ".t",
    "b/@eaDir/2.jpg/SYNO.jpg": "@eaDir", "__MACOSX/a/x.jpg": "__MACOSX",
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("write", [copy_folder, pack_as_tar_does, pack_classes])
def test_a_hidden_class_or_image_is_refused_with_the_command_that_removes_it(folder, tmp_path, write, name):
    target = tmp_path / "it's {here} %s"
    target.mkdir()
    expected = [(f"{path.parent.name}/{path.name}", path.read_bytes()) for path in folder.glob("b/*.*")]
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"hidden")
    for harmless in ("a/.DS_Store", "b/.gitkeep", "b/Thumbs.db"):
        (folder / harmless).write_bytes(b"no image")
    write(folder, target)
    with pytest.raises(UserError, match=rf"^'{HIDDEN[name]}(\.tar)?' is hidden") as caught:
        open_source(target / "train")
    subprocess.run(str(caught.value).partition("remove all such: ")[2], shell=True, check=True)
    found = samples(open_source(target / "train"))
    assert sorted((name, content) for name, label, content in found if label == 1) == sorted(expected)
    assert len(found) == 6


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("write", [copy_folder, *FORMS])
def test_every_format_gives_image_folders_images(folder, tmp_path, write, is_cached, capsys):
    write(folder, tmp_path)
    for _ in range(1 + is_cached):
        found = open_source(tmp_path / "train")
    expected = image_folders(folder)
    assert found.classes == datasets.ImageFolder(folder).classes
    assert samples(found) == expected
    assert [found.size(number) for number in range(len(found))] == [len(content) for _, _, content in expected]
    assert all(found.name(number) in found.path(number) for number in range(len(found)))
    lines = "".join(f"{name} {label}\n" for name, label, _ in expected)
    assert found.fingerprint() == hashlib.sha256(lines.encode()).hexdigest()[:16]
    identity = found.identity()
    assert identity.keys() == {"form", "path", "sizes", "times", "checksums", "sample"}
    assert identity["path"] == str(tmp_path / "train")
    assert identity["sample"] == " ".join(f"{number}:{len(each[2])}" for number, each in enumerate(expected))
    assert "is used, not" not in capsys.readouterr().out


def test_a_second_start_does_not_scan_but_where_the_index_cannot_be_cached_or_may_be_stale(folder, monkeypatch, capsys):
    before, scan, scans = folder.stat().st_mtime_ns, index.ImageIndex._scan, []
    monkeypatch.setattr(index.ImageIndex, "_scan", lambda found: scans.append(1) or scan(found))
    assert samples(open_source(folder)) == samples(open_source(folder))
    assert len(scans) == 1
    assert folder.stat().st_mtime_ns == before
    assert sorted(os.listdir(folder.parent)) == [".touchstone-index-train.npz", "train"]
    index.cache_path(folder).unlink()
    index.cache_path(folder).mkdir()  # refused to root as well
    assert samples(open_source(folder)) == samples(open_source(folder))
    assert len(scans) == 3
    assert "is not cached" in capsys.readouterr().out
    index.cache_path(folder).rmdir()
    monkeypatch.setattr(index, "RACY_NS", 60_000_000_000)
    assert samples(open_source(folder)) == samples(open_source(folder))
    assert len(scans) == 5
    assert "modified less than two seconds ago" in capsys.readouterr().out
    assert os.listdir(folder.parent) == ["train"]


def test_a_changed_folder_is_scanned_anew(folder):
    elsewhere = folder.parent / "elsewhere"
    (folder / "linked").symlink_to(elsewhere)
    assert open_source(folder).classes == ["a", "b"]  # a link that leads nowhere yet
    for change in [
        elsewhere.mkdir,
        lambda: (folder / "a" / "deep" / "er" / "new.jpg").write_bytes(b"new"),
        lambda: (folder / "b").rename(folder / "0"),
        lambda: (elsewhere / "more.jpg").write_bytes(b"more"),
    ]:
        change()
        (elsewhere / "1.jpg").touch()
        assert samples(open_source(folder)) == image_folders(folder)


def test_a_changed_or_added_tar_is_scanned_anew(folder, tmp_path):
    target = tmp_path / "packed"
    pack_shards(folder, target)
    first = open_source(target / "train")
    pack(target / "train-000001.tar", {"b/5.jpg": folder / "b" / "2.jpg"}, "train/")
    second = open_source(target / "train")
    for fact in ("sizes", "times"):  # by which a resumed run notices it
        assert second.identity()[fact] != first.identity()[fact]
    assert "b/5.jpg" in {name for name, _, _ in samples(second)}
    pack(target / "train-000003.tar", {"c/6.jpg": folder / "b" / "2.jpg"}, "train/")
    assert open_source(target / "train").classes == ["a", "b", "c"]
    words = r"train-000001\.tar: the tar has changed"
    with pytest.raises(ImageError, match=words):  # no bad image, which may be skipped
        samples(first)


def test_a_damaged_foreign_or_hostile_cache_is_scanned_anew(folder, tmp_path, monkeypatch):
    expected, cache = samples(open_source(folder)), index.cache_path(folder)
    good, hostile, bomb = cache.read_bytes(), io.BytesIO(), io.BytesIO()
    numpy.savez_compressed(bomb, zeros=numpy.zeros(1 << 20), **numpy.load(cache))
    numpy.savez(hostile, header=numpy.array([Hostile(tmp_path / "executed")], dtype=object))
    damaged = [b"", b"garbage", good[: len(good) // 2], bytes(len(good)), hostile.getvalue(), bomb.getvalue()]
    flipped = (good[:n] + bytes([good[n] ^ 1 << n % 8]) + good[n + 1 :] for n in range(0, len(good), 31))
    for content in [*damaged, *flipped]:
        cache.write_bytes(content)
        assert samples(open_source(folder)) == expected
        assert content not in damaged or cache.read_bytes() != content
    assert not (tmp_path / "executed").exists()
    monkeypatch.setattr(index, "_FORMAT", "touchstone image index 0")
    cache.write_bytes(good)
    assert samples(open_source(folder)) == expected
    assert cache.read_bytes() != good


@pytest.mark.parametrize("name", ["train.csv", "classes.txt", "train-000002.tar", "train/b.tar"])
def test_a_file_of_the_data_set_that_is_a_link_to_nowhere_is_no_file_less(folder, tmp_path, name):
    data = tmp_path / "data"
    (pack_classes if "/" in name else pack_shards)(folder, data)
    (data / name).unlink(missing_ok=True)
    (data / "train.csv").write_text(f"path,label\n{folder}/b/1.png,a\n") if name == "classes.txt" else None
    (data / name).symlink_to("nowhere")
    with pytest.raises(UserError, match=f"{name} cannot be read: No such file or directory"):
        open_source(data / "train")


def member(name, kind=tarfile.REGTYPE, content=b"content", **fields):
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
    "gzipped": (gzip.compress(GOOD + END), "unpack it"),
    "cut in a header": (GOOD + GOOD[:100], "its end is missing"),
    "cut in an image": (GOOD + member("a/2.jpg")[:516], "is incomplete"),
    "cut before its end": (GOOD + GOOD, "its end is missing"),
    "class tar that is cut": (member("a.tar", content=GOOD) + END, "its end is missing"),
    "class tar cut in an image": (member("a.tar", content=GOOD[:-506]) + END, "is incomplete"),
    "negative size": (GOOD + member("a/2.jpg", pax_headers={"size": "-4096"}) + END, "truncated, damaged"),
    "huge size": (GOOD + member("a/2.jpg", pax_headers={"size": str(1 << 70)}) + END, "is incomplete"),
    "leads out": (member("a/../../1.jpg") + END, "points outside"),
    "absolute": (member("/etc/a/1.jpg") + END, "points outside"),
    "a zero in a name": (member("x", pax_headers={"path": "a/1\0.jpg"}) + END, "points outside"),
    "link": (GOOD + member("a/2.jpg", tarfile.SYMTYPE, linkname="/etc/passwd") + END, "--dereference"),
    "flat": (member("1.jpg") + member("2.jpg") + END, "holds 2 images and no class folders; list them"),
    "no images": (member("a/1.txt") + END, "neither images nor class folders"),
    "empty class": (GOOD + member("b", tarfile.DIRTYPE) + END, "such as b, without images"),
    "empty class tar": (GOOD + member("b.tar", content=END) + END, "such as b, without images"),
}


@pytest.mark.parametrize("case", BAD_TARS)
def test_a_bad_tar_is_one_line_that_names_it(tmp_path, case):
    content, words = BAD_TARS[case]
    (tmp_path / "val.tar").write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        open_source(tmp_path / "val")
    assert str(tmp_path / "val.tar") in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_of_members_of_one_name_the_last_counts_and_links_that_are_no_images_are_ignored(tmp_path, capsys):
    links = member("a/x", tarfile.SYMTYPE, linkname="/etc") + member("a/y", tarfile.CHRTYPE) + member("a/notes.txt")
    (tmp_path / "val.tar").write_bytes(links + GOOD + member("./a/1.jpg", content=b"newer") + END)
    assert samples(open_source(tmp_path / "val")) == [("a/1.jpg", 0, b"newer")]
    assert "2 links and devices, such as 'a/x', are ignored" in capsys.readouterr().out


def test_an_incomplete_set_of_shards_or_pack_is_refused(folder, tmp_path):
    pack_shards(folder, tmp_path)
    shards = [{"file": f"train-00000{number}.tar", "sha256": str(number) * 64} for number in range(3)]
    manifest = {"kind": "touchstone pack", "format": 1, "state": "complete", "splits": {"train": {"shards": shards}}}
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(manifest))
    sums = "".join(shard["sha256"] for shard in shards)
    whole = open_source(tmp_path / "train")
    assert whole.identity()["checksums"] == hashlib.sha256(sums.encode()).hexdigest()[:16]
    (tmp_path / "train-000002.tar").unlink()
    for state, words in (("complete", r"train-000002\.tar is missing: 1 of the 3 shards"), ("writing", "run its")):
        path.write_text(json.dumps({**manifest, "state": state}))
        with pytest.raises(UserError, match=words):
            open_source(tmp_path / "train")
    foreign = [{**manifest, "kind": "another"}, {**manifest, "splits": {}}, [], {"kind": manifest["kind"]}]
    for content in [*(json.dumps(value).encode() for value in foreign), b"no JSON", b"\xff", b"[" * 100_000]:
        path.write_bytes(content)
        assert 0 < len(open_source(tmp_path / "train")) < len(whole)
    path.unlink()
    (tmp_path / "train-000000.tar").unlink()
    with pytest.raises(UserError, match=r"train-000000\.tar is missing, but train-000001\.tar exists"):
        open_source(tmp_path / "train")


def test_a_thousand_class_tars_need_few_descriptors(tmp_path):
    (tmp_path / "train").mkdir()
    for number in range(200):
        (tmp_path / "train" / f"c{number:03d}.tar").write_bytes(member("1.jpg", content=b"%d" % number) + END)
    found, descriptors = open_source(tmp_path / "train"), Path("/proc/self/fd")
    before = len(list(descriptors.glob("*")))
    assert [found.read(number) for number in range(200)] == [b"%d" % number for number in range(200)]
    assert len(list(descriptors.glob("*"))) - before <= 128


def test_a_file_that_would_fill_memory_or_is_no_file_is_not_read(tmp_path):
    folder = tmp_path / "train" / "a"
    folder.mkdir(parents=True)
    header = tarfile.TarInfo("a/1.jpg")
    header.size = 200 << 30
    (tmp_path / "val.tar").write_bytes(header.tobuf())
    (folder / "1.jpg").touch()
    os.truncate(tmp_path / "val.tar", (200 << 30) + 10240)
    os.truncate(folder / "1.jpg", 200 << 30)
    os.mkfifo(folder / "2.jpg")
    (folder / "3.jpg").symlink_to("/dev/zero")
    words = "it has 214,748,364,800 bytes; an image may have at most 1,073,741,824"
    for split in ("train", "val"):
        with pytest.raises(BadImageError, match=words):
            open_source(tmp_path / split).read(0)
    for number in (1, 2):
        with pytest.raises(OSError, match="is not a file"):
            open_source(tmp_path / "train").read(number)


@pytest.mark.parametrize(("names", "words"), [
    (["train/a/1.jpg", "valid/a/1.jpg", "test/a/1.jpg"], "mv valid val"),
    (["training/a/1.jpg", "validation/a/1.jpg"], "mv training train && mv validation val"),
    (["Train/a/1.jpg", "val/a/1.jpg"], "mv Train train"),
    (["train/a/1.jpg", "val.tar.gz"], "has no val/, but val.tar.gz; unpack it"),
    (["images.TGZ"], "has no train/, but images.TGZ; unpack it"),
    (["cats/1.jpg", "dogs/1.jpg", "old.zip"], "dogs ... are the classes, move all of them into a folder train/"),
])  # fmt: skip
def test_a_split_of_another_name_or_in_an_archive_is_named_with_what_helps(tmp_path, names, words):
    root = tmp_path / "my images"
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    split = "val" if (root / "train").exists() else "train"
    with pytest.raises(UserError) as caught:
        forms.check_source(root / split)
    assert words in str(caught.value)
    if "mv " in words:  # the command makes the folder one that can be read
        subprocess.run(str(caught.value).partition("what is there: ")[2], shell=True, check=True)
        assert open_source(root / "train").classes == open_source(root / "val").classes == ["a"]


def test_what_is_missing_what_is_unread_and_which_of_several_is_used_is_said(folder, tmp_path, capsys):
    with pytest.raises(UserError) as caught:
        forms.check_source(tmp_path / "val")
    assert all(words in str(caught.value) for words in ("has no val/", "or val.tar", "or val.csv"))
    with pytest.raises(UserError, match=f"--data-path {tmp_path / 'nowhere'} is not a folder"):
        forms.check_source(tmp_path / "nowhere" / "val")
    (tmp_path / "train-00000-of-00001.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=f"python -m scripts.prepare {tmp_path} NEW_FOLDER"):
        forms.check_source(tmp_path / "train")
    pack_whole(folder, folder.parent)
    (folder.parent / "classes.txt").write_text("b\na\n")
    for _ in range(2):  # a scan, and the cache
        found = open_source(folder)
        assert (found.form, found.classes) == ("folder", ["a", "b"])
        said = capsys.readouterr().out
        assert f"{folder.parent}/classes.txt is not read: " in said
        assert f"train is used, not {folder.parent / 'train.tar'}" in said


KINDS = {
    ".cls": lambda label: {".cls": f" {label}\n"},
    ".json": lambda label: {".json": json.dumps({"width": 5, "label": label})},
    "both": lambda label: {".CLS": str(label), ".json": '{"label": "another"}'},
}


def write_tar(path: Path, members: dict[str, str]):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_of({name: text.encode() for name, text in members.items()}))


def write_both(folder: Path, labels: list, kind: str, shards: list[str], prefix=""):
    images = [(f"{number:04d}", label) for number, label in enumerate(labels * 3)]
    random.Random(1).shuffle(images)
    for number, shard in enumerate(shards):
        members = {}
        for key, label in images[number :: len(shards)]:
            parts = {".jpg": f"the image {key}", ".txt": "a caption", **KINDS[kind](label)}
            members |= {f"{prefix.format(number)}{key}{ending}": parts[ending] for ending in sorted(parts)}
            path = folder / "plain" / str(label) / f"{prefix.format(number).removeprefix('train/')}{key}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(parts[".jpg"])
        write_tar(folder / shard, members)


@pytest.mark.parametrize(("labels", "kind", "shards", "prefix"), [
    ([2, 0, 1], ".cls", ["train-000000.tar"], ""),
    ([2, 0, 1], ".json", [f"imagenet1k-train-{number:04d}.tar" for number in range(2)], "./"),
    (["bee", "ant", "cat"], ".json", ["train.tar"], "train/"),
    (["bee", "ant", "cat"], "both", [f"train/train-{number}.tar" for number in range(11)], ""),
    (["bee", "ant", "cat"], ".json", [f"train-{number:06d}.tar" for number in range(2)], "train/{:05d}/in/"),
    ([2, 0, 1], ".cls", ["train.tar"], "v1.2/IMG_22.05."),
])  # fmt: skip
def test_shards_with_labels_are_the_class_folders_of_their_images(tmp_path, monkeypatch, labels, kind, shards, prefix):
    monkeypatch.setattr(index, "RACY_NS", 0)
    write_both(tmp_path, labels, kind, shards, prefix)
    for _ in range(2):  # by a scan, and from the cache
        found = open_source(tmp_path / "train")
        assert found.classes == sorted(map(str, labels))
        assert samples(found) == image_folders(tmp_path / "plain")
        assert found.fingerprint() == open_source(tmp_path / "plain").fingerprint()
    assert index.cache_path(tmp_path / "train").is_file()


def test_classes_txt_names_the_numbers_and_an_evaluation_may_lack_some(tmp_path):
    write_both(tmp_path, [11, 2], ".cls", ["imagenet1k-validation-00.tar"])
    (tmp_path / "classes.txt").write_text("\n".join(f"n{number}" for number in range(12)))
    found = open_source(tmp_path / "val")
    known = [*((f"n2/000{key}.jpg", 2) for key in (1, 3, 5)), *((f"n11/000{key}.jpg", 11) for key in (0, 2, 4))]
    assert [(found.name(number), found.label(number)) for number in range(6)] == known


PAIR = {"1.jpg": "", "1.cls": "0"}
BAD = {
    "an image without a label": ({**PAIR, "2.jpg": ""}, "holds '2.jpg' without a label"),
    "a label without an image": ({**PAIR, "2.gif": "", "2.cls": "1"}, "'2.cls': there are 1 such .* 0 images"),
    "two images of a key": (
        {**PAIR, "1.mask.png": ""},
        "'1.cls': there are 1 such labels and 2 images with this key",
    ),
    "two labels of a key": ({**PAIR, "1.CLS": "1"}, "'1.cls': there are 2 such labels"),
    "a key in two folders": ({**PAIR, "val/1.jpg": ""}, "2 images with this key"),
    "a fact of an image without a label": (
        {**PAIR, "2.jpg": "", "2.fine.cls": "1"},
        "holds '2.jpg' without a label",
    ),
    "JSON without a label": ({"1.jpg": "", "1.json": '{"class": 1}'}, "'1.json': expected a JSON object with label"),
    "deep JSON": ({"1.jpg": "", "1.json": "[" * 100_000}, "expected a JSON object with label"),
    "a list": ({"1.jpg": "", "1.json": '{"label": [1, 2]}'}, r"label is \[1, 2\]; expected one name or number"),
    "a long label": ({"1.jpg": "", "1.cls": "9" * 5000}, "label is '9{79}; expected one name"),
    "a path": ({"1.jpg": "", "1.cls": "../x"}, "a class cannot be called '../x'"),
    "no class of classes.txt": ({"1.jpg": "", "1.cls": "ape"}, "'1.jpg': classes.txt has no class ape"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_labels_are_one_line_that_names_shard_and_member(tmp_path, case):
    (tmp_path / "classes.txt").write_text("bee\nant\n")
    write_tar(tmp_path / "val.tar", BAD[case][0])
    with pytest.raises(UserError, match=BAD[case][1]) as caught:
        open_source(tmp_path / "val")
    assert "val.tar" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_of_an_earlier_shard_a_hole_and_shards_that_look_like_class_tars_are_refused(tmp_path):
    for number in (0, 1):
        write_tar(tmp_path / f"x-train-{number}.tar", PAIR)
        write_tar(tmp_path / "val" / f"{number:05d}.tar", PAIR)
        write_tar(tmp_path / "test" / f"part{number}.tar", {"1.jpg": "", "1.json": '{"label": 0}'})
    write_tar(tmp_path / "train-2024.tar", PAIR)  # the year makes it no shard
    with pytest.raises(UserError, match=r"x-train-1.tar, '1.cls': an earlier tar has this key"):
        open_source(tmp_path / "train")
    for split, first in (("val", "00000"), ("test", "part0")):
        with pytest.raises(UserError, match=rf"{first}.tar holds images with labels; .* {split}-000000.tar"):
            open_source(tmp_path / split)
    (tmp_path / "x-train-1.tar").rename(tmp_path / "x-train-2.tar")
    with pytest.raises(UserError, match=r"x-train-1.tar is missing, but x-train-2.tar exists"):
        open_source(tmp_path / "train")


def test_json_without_a_label_leaves_the_class_to_folder_or_tar_and_a_line_says_so(tmp_path, capsys):
    other = {"1.jpg": "", "1.png": "", "1.json": '{"shapes": [{"label": "wing"}]}', "2.jpg": ""}
    write_tar(tmp_path / "train.tar", {f"{name}/{key}": other[key] for name in ("ant", "bee") for key in other})
    for name in ("ant", "bee"):
        write_tar(tmp_path / "val" / f"{name}.tar", other)
    for split, where in (("train", "train.tar, 'ant/1.json'"), ("val", "val/ant.tar, 'ant/1.json'")):
        found = open_source(tmp_path / split)
        assert (found.classes, found.labels.tolist()) == (["ant", "bee"], [0, 0, 0, 1, 1, 1])
        assert f"{where} and files like it hold no label: the folder" in capsys.readouterr().out


def test_one_class_is_trained_on_with_a_line(tmp_path):
    for split in ("train", "val"):
        members = {"1.jpg": jpeg(1), "1.cls": b"0", "2.jpg": jpeg(2), "2.cls": b"0"}
        (tmp_path / f"{split}-000000.tar").write_bytes(tar_of(members))
    argv = ["--data-path", tmp_path, *SMALL, "--batch-size", 2, "--epochs", 1, "--output-dir", tmp_path / "out"]
    assert "there is only one class, 0: accuracy is 100 %" in run_train(tmp_path, *argv).check().output
