"""loading/source.py and forms.py: every form of images answers alike, and a new one is one class and one entry."""

import hashlib
import itertools
import json
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from torchvision import datasets

import config
import data
from errors import UserError
from loading import forms, index
from loading.decode import decode_plainly
from loading.source import Source
from sampler import SampleKey, TrainSampler, VirtualShards
from tests.images import FORMS, write_split


class ConcatenatedSource(Source):
    """A form that nobody else has: one file of images, one after the other, and a list of their names and sizes."""

    form = "concatenated"
    layout = "{split}/all.images with {split}/all.json"

    @classmethod
    def find(cls, root):
        return [cls(root)] if (root / "all.images").is_file() else []

    @property
    def where(self):
        return str(self.root / "all.images")

    def open(self):
        entries = json.loads((self.root / "all.json").read_bytes())
        self.names = [name for name, _ in entries]
        self.places = [*itertools.accumulate((size for _, size in entries), initial=0)]
        self.classes = sorted({name.split("/")[0] for name in self.names})
        return self

    def __len__(self):
        return len(self.names)

    def label(self, number):
        return self.classes.index(self.name(number).split("/")[0])

    def name(self, number):
        return self.names[number]

    def read(self, number):
        with open(self.where, "rb") as file:
            file.seek(self.places[number])
            return file.read(self.places[number + 1] - self.places[number])


def concatenate(root, target):
    """Write a folder of class folders in the form that nobody else has."""
    (target / root.name).mkdir(parents=True)
    paths = [Path(path) for path, _ in datasets.ImageFolder(root).samples]
    (target / root.name / "all.images").write_bytes(b"".join(path.read_bytes() for path in paths))
    entries = [(str(path.relative_to(root)), path.stat().st_size) for path in paths]
    (target / root.name / "all.json").write_text(json.dumps(entries))


def arguments(folder, *argv):
    return config.parse_args(["--data-path", str(folder), "--device", "cpu", *argv])


def batches_of(folder, workers):
    """Return the batches of an epoch, as they are loaded."""
    args = arguments(folder, "--workers", str(workers), "--train-crop-size", "24", "--batch-size", "4")
    dataset, _ = data.build_datasets(str(folder / "train"), str(folder / "val"), args)
    sampler = TrainSampler(len(dataset), VirtualShards(8, 2), seed=3)
    return [(image.clone(), target.tolist()) for image, target in data.build_loader(dataset, sampler, args)]


@pytest.fixture
def new_form(monkeypatch):
    monkeypatch.setattr(forms, "FORMS", [*forms.FORMS, ConcatenatedSource])


def copy_folder(root, target):
    shutil.copytree(root, target / root.name)


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("write", [copy_folder, *FORMS, concatenate])
def test_every_form_gives_image_folders_images(tmp_path, monkeypatch, new_form, write, is_cached, capsys):
    monkeypatch.setattr(index, "RACY_NS", 0)
    root = write_split(tmp_path / "images" / "train")
    write(root, tmp_path)
    for _ in range(1 + is_cached):
        found = forms.open_source(tmp_path / "train")
    theirs = datasets.ImageFolder(root)
    expected = [(str(Path(path).relative_to(theirs.root)), label) for path, label in theirs.samples]
    numbers = range(len(found))
    assert found.classes == theirs.classes
    assert [(found.name(number), found.label(number)) for number in numbers] == expected
    contents = [Path(path).read_bytes() for path, _ in theirs.samples]
    assert [found.read(number) for number in numbers] == contents
    assert [found.size(number) for number in numbers] == [len(content) for content in contents]
    assert all(found.name(number) in found.path(number) for number in numbers)
    lines = "".join(f"{name} {label}\n" for name, label in expected)
    assert found.fingerprint() == hashlib.sha256(lines.encode()).hexdigest()[:16]
    assert found.identity()["path"] == str(tmp_path / "train")
    assert found.identity().keys() == {"form", "path", "sizes", "times", "checksums"}
    assert "is used, and not" not in capsys.readouterr().out


def test_the_fingerprint_of_two_images_is_this_one(tmp_path):
    """Checkpoints of any age hold such a value."""
    for name in ("cat/1.jpg", "dög/in/2.JPEG"):
        (tmp_path / "train" / name).parent.mkdir(parents=True)
        (tmp_path / "train" / name).touch()
    assert forms.open_source(tmp_path / "train").fingerprint() == "95f6fa071d4a7826"


def test_a_made_up_image_is_the_same_as_pixels_and_as_a_file():
    images = data.SyntheticImages(130, 8, 10)
    for number in (0, 63, 64, 129):
        pixels, label = images.load(SampleKey(number, 0, 0))
        decoded = torch.from_numpy(numpy.array(decode_plainly(images.index.read(number))))
        assert torch.equal(decoded.permute(2, 0, 1), pixels)
        assert images.index.label(number) == label
    assert len({images.index.name(number) for number in range(130)}) == 130
    assert images.fingerprint() == "synthetic-130-10"
    assert images.identity() == {"form": "synthetic", "path": "", "sizes": None, "times": None, "checksums": None}


@pytest.mark.parametrize("write", [concatenate, *FORMS[:2]])
def test_every_form_has_the_folders_batches_in_any_process(image_folder, tmp_path, new_form, write):
    write(image_folder / "train", tmp_path)
    shutil.copytree(image_folder / "val", tmp_path / "val")
    expected = batches_of(image_folder, workers=0)
    assert len(expected) == 6
    for workers in (0, 2):
        for ours, theirs in zip(batches_of(tmp_path, workers), expected, strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert ours[1] == theirs[1]


def test_what_is_missing_is_said_with_every_form(tmp_path, new_form):
    with pytest.raises(UserError) as caught:
        forms.check_source(tmp_path / "val")
    assert all(words in str(caught.value) for words in ("has no val/", "or val.tar", "or val/all.images"))
    with pytest.raises(UserError, match=f"--data-path {tmp_path / 'nowhere'} is not a folder"):
        forms.check_source(tmp_path / "nowhere" / "val")
    (tmp_path / "train-00000-of-00001.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=f"python -m scripts.prepare {tmp_path} NEW_FOLDER"):
        forms.check_source(tmp_path / "train")
