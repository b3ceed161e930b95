"""scripts/prepare.py: the same class folders from every source, whatever interrupts it."""

import gzip
import io
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from torchvision.datasets import imagenet
from torchvision.models._meta import _IMAGENET_CATEGORIES

from tests import archives
from tests.ranks import Outcome, run_ranks, strike_at

DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"


def prepare_process(argv, fault=None, largest_file=None, hidden=None):
    """Run the tool's command line in this process, where a package may be hidden."""
    if hidden:
        sys.modules[hidden] = None
    from scripts import prepare

    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    if fault:
        strike_at(*fault)
    sys.argv = ["prepare", *map(str, argv)]
    prepare.main()


def run(tmp_path: Path, *argv, fault=None, largest_file=None, hidden=None) -> Outcome:
    """Run the tool in a process of its own, and return what became of it."""
    arguments = (argv, fault, largest_file, hidden)
    return run_ranks(prepare_process, 1, *arguments, log_folder=tmp_path, timeout_s=60)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def error_line(outcome: Outcome, exit_code: int = 2) -> str:
    """Return the one line that a failed run must leave."""
    assert outcome.codes == [exit_code], outcome.output
    assert "Traceback" not in outcome.output, outcome.output
    lines = [line for line in outcome.output.splitlines() if line.startswith("python -m scripts.prepare: error: ")]
    assert len(lines) == 1, outcome.output
    return lines[0]


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
    folder = request.getfixturevalue(source)
    before = content(folder)
    out = tmp_path / "of mine"
    done = run(tmp_path, folder, out, "--skip-md5").check()
    assert content(out) == archives.tree()
    assert content(folder) == before
    assert f"train: {sum(name.startswith('train') for name in archives.tree())} images of 6 classes" in done.output
    assert re.search(r"val: 12 images, \S+ MiB of \S+ MiB \(100.0%\), 0:00:00 left", done.output)
    assert f"scripts.pack --data-path '{out}' '{out}-256' --short-side 256" in done.output


def test_the_official_archives_become_what_torchvision_makes_of_them(official, tmp_path, monkeypatch):
    """torchvision's own code, with scipy for meta.mat, is the oracle; it checks the MD5 that it is given."""
    theirs = shutil.copytree(official, tmp_path / "theirs")
    for split, (file, _) in imagenet.ARCHIVE_META.items():
        digest = subprocess.run(["md5sum", theirs / file], capture_output=True, text=True, check=True).stdout.split()[0]
        monkeypatch.setitem(imagenet.ARCHIVE_META, split, (file, digest))
    imagenet.parse_devkit_archive(theirs)
    imagenet.parse_train_archive(theirs)
    imagenet.parse_val_archive(theirs)
    run(tmp_path, official, tmp_path / "ours", "--skip-md5").check()
    for split in ("train", "val"):
        assert content(tmp_path / "ours" / split) == content(theirs / split)


def test_published_md5s_are_torchvisions():
    from scripts import prepare

    assert dict(imagenet.ARCHIVE_META.values()) == prepare.MD5


def test_alphabetical_synsets_are_the_classes_of_torchvisions_weights(tmp_path):
    """WordNet's words for the 1,000 synsets, by timm's table, against the categories of torchvision's weights."""
    pytest.importorskip("scipy")
    from scripts.prepare import read_devkit

    info = Path(pytest.importorskip("timm").__file__).parent / "data" / "_info"
    lemmas = dict(line.split("\t") for line in (info / "imagenet_synset_to_lemma.txt").read_text().splitlines())
    synsets = (info / "imagenet_synsets.txt").read_text().split()
    random.Random(0).shuffle(synsets)  # as the devkit's numbers are
    numbered = {number: (synset, lemmas[synset]) for number, synset in enumerate(synsets, 1)}
    (tmp_path / DEVKIT).write_bytes(archives.devkit(numbered, [*numbered]))
    truth = read_devkit(tmp_path / DEVKIT)
    classes = sorted({*truth.synset_of.values()})
    assert [truth.class_of(f"ILSVRC2012_val_{number:08d}.JPEG") for number in numbered] == synsets
    assert [classes[0], classes[1], classes[-1]] == ["n01440764", "n01443537", "n15075141"]
    assert [_IMAGENET_CATEGORIES[0], _IMAGENET_CATEGORIES[1], _IMAGENET_CATEGORIES[-1]] == [
        "tench", "goldfish", "toilet tissue",
    ]  # fmt: skip
    same = [
        category.lower() in lemmas[synset].lower()
        for category, synset in zip(_IMAGENET_CATEGORIES, classes, strict=True)
    ]
    assert sum(same) > 990  # some words are spelt otherwise there


KILLS = [
    ("scripts.prepare.os.replace", 9, "before"),  # a file is whole, and has no name yet
    ("scripts.prepare.os.replace", 9, "after"),
    ("scripts.prepare.os.sync", 1, "after"),  # train is whole, and has no name yet
    ("scripts.prepare.os.rename", 2, "before"),
]


@pytest.mark.parametrize(
    ("source", "fault"),
    [*(("official", fault) for fault in KILLS), ("kaggle", KILLS[0]), ("parquet", KILLS[1])],
    ids=lambda value: value if isinstance(value, str) else f"{value[2]}-{value[0].rpartition('.')[2]}-{value[1]}",
)
def test_killed_and_run_again_it_gives_the_same_folders(source, tmp_path, request, fault):
    command = [request.getfixturevalue(source), tmp_path / "out", "--skip-md5"]
    killed = run(tmp_path, *command, fault=fault)
    assert killed.codes == [-signal.SIGKILL], killed.output
    assert_nothing_is_half_written(tmp_path / "out")
    there = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.JPEG")}
    run(tmp_path, *command).check()
    assert content(tmp_path / "out") == archives.tree()
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.JPEG")}
    assert {path.name: after[path.name] for path in there} == {path.name: there[path] for path in there}


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
    before = {path: path.stat().st_mtime_ns for path in (out / "val").rglob("*")}
    done = run(tmp_path, out, out, "--skip-md5").check()
    assert f"{out / 'val'} is there already" in done.output
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert content(out) == {**archives.tree(), **archived}


def test_another_source_does_not_go_on_with_a_half(official, kaggle, tmp_path):
    command = [tmp_path / "out", "--skip-md5"]
    run(tmp_path, official, *command, fault=("scripts.prepare.os.replace", 9, "after"))
    line = error_line(run(tmp_path, kaggle, *command))
    assert str(tmp_path / "out" / "train.partial") in line
    assert "ILSVRC2012_img_train.tar" in line
    shutil.rmtree(tmp_path / "out" / "train.partial")
    run(tmp_path, kaggle, *command).check()
    assert content(tmp_path / "out") == archives.tree()


def test_images_are_not_written_among_their_source(kaggle, tmp_path):
    source = shutil.copytree(kaggle / "ILSVRC/Data/CLS-LOC/train", tmp_path / "source" / "train").parent
    before = content(source)
    (tmp_path / "link").symlink_to(source / "train")
    for out in (source / "train", source / "train" / "new", tmp_path / "link" / "new"):
        line = error_line(run(tmp_path, source, out))
        assert line.endswith(f"{out} is inside {source / 'train'}; choose a folder outside the images")
    assert content(source) == before
    assert not (source / "train" / "new").exists()
    assert "is there already" in run(tmp_path, source, source).check().output


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_an_image_that_is_no_file(kaggle, tmp_path, kind):
    source = shutil.copytree(kaggle / "ILSVRC/Data/CLS-LOC/train", tmp_path / "source" / "train").parent
    odd = next((source / "train").iterdir()) / "odd.JPEG"
    {"folder": odd.mkdir, "pipe": lambda: os.mkfifo(odd), "link": lambda: odd.symlink_to("nowhere")}[kind]()
    assert f" {odd} " in error_line(run(tmp_path, source, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "is_folder"),
    [
        ("train", False), (".prepare.lock", True), ("train.partial", False), ("train.partial/source.json", True),
        ("train.partial/train/{synset}", False), ("train.partial/train/{synset}/a.JPEG", True),
    ],
)  # fmt: skip
def test_a_file_or_folder_in_the_way_is_named_and_kept(kaggle, tmp_path, name, is_folder):
    source, out = kaggle / "ILSVRC/Data/CLS-LOC", tmp_path / "out"
    path = out / name.format(synset=next((source / "train").iterdir()).name)
    path.parent.mkdir(parents=True)
    path.mkdir() if is_folder else path.write_text("kept")
    assert str(path) in error_line(run(tmp_path, source, out, "--splits", "train"))
    assert path.exists()


def test_files_on_the_same_disk_take_no_space(kaggle, tmp_path):
    run(tmp_path, kaggle, tmp_path / "linked").check()
    run(tmp_path, kaggle, tmp_path / "copied", "--copy").check()
    for path in (kaggle / "ILSVRC").rglob("*.JPEG"):
        linked, copied = (next((tmp_path / name).rglob(path.name)) for name in ("linked", "copied"))
        assert linked.samefile(path)
        assert not copied.samefile(path)
    assert content(tmp_path / "copied") == archives.tree()


@pytest.mark.parametrize("truth", ["devkit", "table"])
def test_a_flat_val_is_sorted(official, kaggle, tmp_path, truth):
    """The folder that train.py refuses: class folders in train, and images in val."""
    flat = tmp_path / "flat"
    shutil.copytree(kaggle / "ILSVRC/Data/CLS-LOC", flat)
    before = content(flat)
    file = official / DEVKIT if truth == "devkit" else kaggle / "LOC_val_solution.csv"
    assert DEVKIT in error_line(run(tmp_path, flat, tmp_path / "out"))
    run(tmp_path, flat, file, tmp_path / "out", "--skip-md5").check()
    assert content(tmp_path / "out") == archives.tree()
    assert content(flat) == before
    assert "choose another OUT" in error_line(run(tmp_path, flat, file, flat, "--splits", "val", "--skip-md5"))
    assert content(flat) == before


def damage(official, folder, name, change):
    """Return a copy of the archives of which one is changed."""
    shutil.copytree(official, folder)
    payload = bytearray((folder / name).read_bytes())
    (folder / name).write_bytes(change(payload))
    return folder


TRAIN, VAL = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"

DAMAGED = {
    "truncated train": (TRAIN, lambda payload: payload[: len(payload) // 2], "is truncated"),
    "cut between members": (
        VAL,
        lambda payload: payload[: payload.index(b"ILSVRC2012_val_00000005")],
        "end is missing",
    ),
    "no tar": (TRAIN, lambda _: b"<html>" * 1000, "no tar"),
    "empty": (TRAIN, lambda _: b"", "truncated"),
    "flat train": (TRAIN, lambda _: archives.tar_of({"a.JPEG": b"a"}), "holds no images where"),
    "leading out": (VAL, lambda _: archives.tar_of({"../a.JPEG": b"a"}), "points outside"),
    "absolute": (VAL, lambda _: archives.tar_of({"/tmp/a.JPEG": b"a"}), "points outside"),
    "bad class": (TRAIN, lambda _: archives.tar_of({"...tar": archives.tar_of({"a.JPEG": b"a"})}), "class '..'"),
    "link": (VAL, lambda _: tar_of_a_link(), "as a link"),
    "unknown image": (VAL, lambda _: archives.tar_of({"ILSVRC2012_val_00000099.JPEG": b"a"}), "no class"),
    "gzip": (TRAIN, gzip.compress, "unpack it"),
    "name too long": (
        TRAIN,
        lambda _: archives.tar_of({f"{'n' * 300}.tar": archives.tar_of({"a.JPEG": b"a"})}),
        "long",
    ),
    "empty image": (TRAIN, lambda _: archives.tar_of({"n01440764.tar": archives.tar_of({"a.JPEG": b""})}), "is empty"),
    "truncated devkit": (DEVKIT, lambda payload: payload[: len(payload) // 2], "not a readable"),
    "devkit of another kind": (DEVKIT, lambda _: gzip.compress(archives.tar_of({"a": b"b"})), "not a readable"),
}


def tar_of_a_link() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        member = tarfile.TarInfo("ILSVRC2012_val_00000001.JPEG")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(member)
    return content.getvalue()


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_archive_is_refused_in_one_line(official, tmp_path, kind):
    name, change, words = DAMAGED[kind]
    folder = damage(official, tmp_path / "downloads", name, change)
    line = error_line(run(tmp_path, folder, tmp_path / "out", "--skip-md5"))
    assert words in line
    assert name in line or "devkit" in line
    split = "val" if "val" in name else "train"
    assert not (tmp_path / "out" / split).exists()
    assert not (tmp_path / "a.JPEG").exists()


@pytest.mark.parametrize("name", ["ILSVRC2012_img_train.tar", DEVKIT])
def test_another_archive_than_the_official_one_is_refused_before_anything_is_written(official, tmp_path, name):
    source = [official / ("ILSVRC2012_img_val.tar" if name == DEVKIT else name), official / DEVKIT]
    line = error_line(run(tmp_path, *source, tmp_path / "out"))
    assert f"{official / name} has the MD5" in line
    assert "--skip-md5" in line
    assert not list(tmp_path.glob("out/*"))


def test_what_is_missing_is_named(official, tmp_path):
    out = tmp_path / "out"
    assert DEVKIT in error_line(run(tmp_path, official / "ILSVRC2012_img_val.tar", out))
    assert "there is no train and no val" in error_line(run(tmp_path, tmp_path, out))
    assert "is not there" in error_line(run(tmp_path, tmp_path / "nowhere", out))
    (tmp_path / "images.zip").touch()
    assert "is none of ILSVRC2012_img_train.tar" in error_line(run(tmp_path, tmp_path / "images.zip", out))
    line = error_line(run(tmp_path, official / "ILSVRC2012_img_train.tar", out, "--splits", "train", "val"))
    assert "there is no val in" in line
    assert not out.exists()
    (tmp_path / "file").touch()
    assert "cannot be made a folder" in error_line(run(tmp_path, official, tmp_path / "file" / "out", "--skip-md5"))
    done = run(tmp_path, official / "ILSVRC2012_img_train.tar", out, "--skip-md5").check()
    assert "val: left out" in done.output


def test_no_room_is_one_line_and_leaves_nothing_half(official, tmp_path):
    """A limit on the size of a file stands for a full disk: the system refuses to write on."""
    images = archives.tree()
    largest = max(len(payload) for payload in images.values())
    outcome = run(tmp_path, official, tmp_path / "out", "--skip-md5", largest_file=largest - 1)
    assert "allows no file so large" in error_line(outcome)
    assert_nothing_is_half_written(tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.tmp"))
    run(tmp_path, official, tmp_path / "out", "--skip-md5").check()
    assert content(tmp_path / "out") == images


def test_what_does_not_fit_is_refused_before_it_is_written(official, tmp_path):
    """An archive with a hole of a petabyte behind it: more than any disk has free."""
    folder = shutil.copytree(official, tmp_path / "downloads")
    try:
        os.truncate(folder / "ILSVRC2012_img_train.tar", 1 << 43)
    except OSError:
        pytest.skip("the disk has no files so large")
    line = error_line(run(tmp_path, folder, tmp_path / "out", "--skip-md5"))
    assert "free" in line
    assert "needs about 8192.0 GiB" in line
    assert not list((tmp_path / "out").rglob("*.JPEG"))


def test_odd_parquet_is_refused_in_one_line(tmp_path, parquet):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as pyarrow_parquet

    file = tmp_path / "train-00000-of-00001.parquet"
    pyarrow_parquet.write_table(pyarrow.table({"img": [b"a"], "fine_label": [1]}), file)
    line = error_line(run(tmp_path, file, tmp_path / "out"))
    assert "img (binary), fine_label (int64)" in line
    payload = (parquet / "train-00000-of-00002.parquet").read_bytes()
    file.write_bytes(payload[: len(payload) // 2])
    assert "not a parquet file" in error_line(run(tmp_path, file, tmp_path / "out"))
    assert "pip install pyarrow" in error_line(run(tmp_path, file, tmp_path / "out", hidden="pyarrow"))
    source = archives.write_parquet(tmp_path / "data", has_paths=False)
    assert "names its synset" in error_line(run(tmp_path, source, tmp_path / "out"))
    line = error_line(run(tmp_path, parquet / "train-00000-of-00002.parquet", tmp_path / "out"))
    assert "train-00001-of-00002.parquet is missing" in line
    assert not (tmp_path / "out" / "train").exists()
