"""loading/parquet.py: parquet files are the folder that they would be prepared to, and training on them is the same."""

import hashlib
import importlib.util
import os
from pathlib import Path

import pytest
import torch

import config
import data
from errors import BadImageError, ImageError, UserError
from loading import forms
from sampler import TrainSampler, VirtualShards
from tests import archives
from tests.ranks import run_ranks, train_rank
from tests.started import SMALL, refused

pytestmark = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The same images as a folder, written by us, and as parquet files."""
    folder = tmp_path_factory.mktemp("prepared")
    for name, content in archives.tree().items():
        (folder / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "folder" / name).write_bytes(content)
    archives.write_parquet(folder / "parquet")
    return folder


@pytest.mark.parametrize("split", ["train", "val"])
def test_it_is_the_folder(prepared, split):
    found = forms.open_source(prepared / "parquet" / split)
    expected = {name.removeprefix(f"{split}/"): content for name, content in archives.tree().items() if split in name}
    names = sorted(expected)
    assert found.form == "parquet"
    assert [found.name(number) for number in range(len(found))] == names
    assert [found.read(number) for number in range(len(found))] == [expected[name] for name in names]
    assert found.classes == sorted({name.split("/")[0] for name in names})
    lines = "".join(f"{name} {found.classes.index(name.split('/')[0])}\n" for name in names)
    assert found.fingerprint() == hashlib.sha256(lines.encode()).hexdigest()[:16]
    again = forms.open_source(prepared / "parquet" / split)  # from the cache
    assert again.fingerprint() == found.fingerprint()
    assert again.read(3) == found.read(3)


def batches(folder, workers):
    argv = ["--data-path", str(folder), "--device", "cpu", "--workers", str(workers), "--train-crop-size", "24"]
    args = config.parse_args([*argv, "--batch-size", "4"])
    dataset, _ = data.build_datasets(str(folder / "train"), str(folder / "val"), args)
    sampler = TrainSampler(len(dataset), VirtualShards(8, 2), seed=3)
    return [(image.clone(), target.tolist()) for image, target in data.build_loader(dataset, sampler, args)]


def test_loader_processes_read_the_same_batches(prepared):
    expected = batches(prepared / "folder", 0)
    for workers in (0, 2):
        found = batches(prepared / "parquet", workers)
        assert [target for _, target in found] == [target for _, target in expected]
        assert all(torch.equal(ours, theirs) for (ours, _), (theirs, _) in zip(found, expected, strict=True))


def test_a_run_on_a_folder_goes_on_with_parquet(prepared, tmp_path):
    def start(form, out, epochs, *argv):
        argv = ["--data-path", prepared / form, "--output-dir", tmp_path / out, "--epochs", epochs, *argv]
        argv += [*SMALL, "--batch-size", 8, "--use-deterministic-algorithms"]
        return run_ranks(train_rank, 1, [str(word) for word in argv], log_folder=tmp_path)

    start("folder", "whole", 2).check()
    start("folder", "cut", 1).check()
    start("parquet", "cut", 2, "--resume", "auto").check()
    ours, expected = (
        torch.load(tmp_path / out / "checkpoint.pth", weights_only=True)["model"] for out in ("cut", "whole")
    )
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def write(path, images, kind=None):
    import pyarrow
    from pyarrow import parquet

    kind = kind or pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    rows = [{"image": {"bytes": content, "path": name}, "label": label} for name, content, label in images]
    schema = pyarrow.schema([("image", kind), ("label", pyarrow.int64())])
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path, row_group_size=2)
    os.utime(path, (1e9, 1e9))


def test_images_without_synsets_are_named_by_label_and_row(tmp_path):
    images = [(None, archives.jpeg(number), number % 2) for number in range(5)]
    write(tmp_path / "train-00000-of-00001.parquet", images)
    found = forms.open_source(tmp_path / "train")
    assert found.classes == ["000000", "000001"]
    assert [found.name(number) for number in range(5)] == [
        "000000/00000000.JPEG", "000000/00000002.JPEG", "000000/00000004.JPEG", "000001/00000001.JPEG",
        "000001/00000003.JPEG",
    ]  # fmt: skip
    assert [found.read(number) for number in range(5)] == [archives.jpeg(number) for number in (0, 2, 4, 1, 3)]


def test_odd_files_are_refused_in_one_line(tmp_path):
    path, good = tmp_path / "train-00000-of-00001.parquet", archives.jpeg(1)
    write(path, [("a_n00000002.JPEG", good, 0), ("b_n00000001.JPEG", good, 1)])
    with pytest.raises(UserError, match="the labels do not number the classes in alphabetical order"):
        forms.open_source(tmp_path / "train")
    write(path, [("a_n00000002.JPEG", good, 0), ("b_n00000001.JPEG", good, 0)])
    with pytest.raises(UserError, match="label 0 is both n00000001 and n00000002"):
        forms.open_source(tmp_path / "train")
    write(path, [("a_n00000002.JPEG", good, 0), ("a_n00000002.JPEG", good, 0)])
    with pytest.raises(UserError, match="class n00000002 has two images of one name"):
        forms.open_source(tmp_path / "train")
    write(path, [(None, good, -1)])
    with pytest.raises(UserError, match="row 0 of row group 0 has no label"):
        forms.open_source(tmp_path / "train")
    path.rename(tmp_path / "train-00001-of-00002.parquet")
    with pytest.raises(UserError, match=r"train-00000-of-00002\.parquet is missing; all 2 files"):
        forms.open_source(tmp_path / "train")
    path.write_bytes(b"PAR1")
    with pytest.raises(UserError, match="is torn, or no parquet file; get it anew"):
        forms.open_source(tmp_path / "train")


def test_bad_rows_and_changed_files_are_named(tmp_path):
    path = tmp_path / "train-00000-of-00001.parquet"
    write(path, [(None, archives.jpeg(number) if number else None, 0) for number in range(4)])
    found = forms.open_source(tmp_path / "train")
    with pytest.raises(BadImageError, match="the row holds no bytes"):
        found.read(0)
    content = bytearray(path.read_bytes())
    content[4:60] = bytes(56)  # of the page of the first images' bytes
    path.write_bytes(content)
    os.utime(path, (1.5e9, 1.5e9))
    found = forms.open_source(tmp_path / "train")
    with pytest.raises(ImageError, match=r"row group 0 of .* is damaged"):
        found.read(1)
    os.utime(path, (2e9, 2e9))
    with pytest.raises(ImageError, match="the file has changed since it was scanned; start again"):
        found.read(2)


def test_a_run_says_what_is_wrong_once(tmp_path):
    Path(tmp_path / "data").mkdir()
    for split in ("train", "val"):
        (tmp_path / "data" / f"{split}-00000-of-00002.parquet").write_bytes(b"")
    argv = ["--data-path", tmp_path / "data", "--output-dir", tmp_path / "out", *SMALL]
    outcome = run_ranks(train_rank, 1, [str(word) for word in argv], log_folder=tmp_path)
    refused(outcome, "00001-of-00002.parquet is missing")
