"""loading/samples.py: WebDataset's shards against torchvision's ImageFolder of the same images."""

import json
import random
from pathlib import Path

import pytest

from errors import UserError
from loading import index
from loading.forms import open_source
from tests.archives import jpeg, tar_of
from tests.started import SMALL, run_train
from tests.test_index import image_folders, samples

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


GOOD = {"1.jpg": "", "1.cls": "0"}
BAD = {
    "an image without a label": ({**GOOD, "2.jpg": ""}, "holds '2.jpg' without a label"),
    "a label without an image": ({**GOOD, "2.gif": "", "2.cls": "1"}, "'2.cls': there are 1 such .* 0 images"),
    "two images of a key": ({**GOOD, "1.mask.png": ""}, "'1.cls': there are 1 such labels and 2 images with this key"),
    "two labels of a key": ({**GOOD, "1.CLS": "1"}, "'1.cls': there are 2 such labels"),
    "a key in two folders": ({**GOOD, "val/1.jpg": ""}, "2 images with this key"),
    "a fact of an image without a label": ({**GOOD, "2.jpg": "", "2.fine.cls": "1"}, "holds '2.jpg' without a label"),
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
        write_tar(tmp_path / f"x-train-{number}.tar", GOOD)
        write_tar(tmp_path / "val" / f"{number:05d}.tar", GOOD)
        write_tar(tmp_path / "test" / f"part{number}.tar", {"1.jpg": "", "1.json": '{"label": 0}'})
    write_tar(tmp_path / "train-2024.tar", GOOD)  # the year makes it no shard
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
