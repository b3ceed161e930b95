"""loading/lists.py: train.csv and its kin against torchvision's ImageFolder and class folders' own bits."""

import csv
import json
import os
import shutil
import unicodedata
from pathlib import Path

import pytest
from torchvision import datasets

from errors import UserError
from loading import index, lists, source
from loading.forms import open_source
from loading.named import open_named
from tests.images import write_images
from tests.ranks import run_ranks, tool_rank
from tests.started import SMALL, run_train
from tests.test_index import samples


@pytest.fixture
def folder(tmp_path):
    write_images(tmp_path / "data", {"train": [3, 2, 4], "val": [2, 1, 2]})
    first = sorted((tmp_path / "data" / "train").iterdir())[0]
    (first / "in a").mkdir()
    shutil.copy(next(first.glob("*.*")), first / "in a" / "z.JPEG")
    return tmp_path / "data"


def write_list(path: Path, rows: list[dict]):
    with path.open("w", newline="") as file:
        if path.suffix == ".jsonl":
            file.writelines(json.dumps(row) + "\n" for row in rows[::-1])
            return
        writer = csv.DictWriter(file, list(rows[0]), delimiter="," if path.suffix == ".csv" else "\t")
        writer.writeheader()
        writer.writerows(rows[::-1])


def rows_of(folder: Path, split: str, base: Path | None = None) -> list[dict]:
    found = datasets.ImageFolder(folder / split)
    paths = [(os.path.relpath(path, base) if base else path, label) for path, label in found.samples]
    return [{"path": path, "label": found.classes[label]} for path, label in paths]


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl"])
def test_a_list_of_class_folders_files_is_their_index(folder, ending):
    expected = {split: open_source(folder / split) for split in ("val", "train")}
    for split in expected:
        write_list(folder / f"{split}{ending}", rows_of(folder, split, folder))
    for _ in range(2):  # by a scan, and from the cache
        for split, known in expected.items():
            found = open_source(folder / split)
            assert (found.form, found.classes, found.fingerprint()) == ("list", known.classes, known.fingerprint())
            assert samples(found) == samples(known)
            assert [found.size(number) for number in range(len(known))] == list(map(known.size, range(len(known))))
            assert found.path(0) == str(folder / split / found.name(0))


@pytest.mark.parametrize("is_absolute", [False, True])
def test_photographs_may_lie_anywhere_even_where_folders_hide_them(folder, tmp_path, is_absolute):
    expected, lists = [each[1:] for each in samples(open_source(folder / "train"))], tmp_path / "lists"
    lists.mkdir()
    (folder / "train" / "class0" / "image000.jpg").rename(folder / "train" / "class0" / "._x.jpg")
    base = None if is_absolute else (folder / "train").rename(lists / ".photographs").parent
    rows = rows_of(folder, "train") if is_absolute else rows_of(lists, ".photographs", base)
    write_list(lists / "train.csv", rows)
    found = open_source(lists / "train")
    assert [each[1:] for each in samples(found)] == expected
    assert [found.path(number) for number in range(len(found))] == [str(lists / row["path"]) for row in rows]
    assert all(name.startswith(found.classes[label] + "/") for name, label, _ in samples(found))


def test_one_list_holds_both_splits_if_it_says_of_which_each_image_is(folder):
    write_list(folder / "images.csv", rows_of(folder, "train", folder))
    assert len(open_source(folder / "train")) == 10
    with pytest.raises(UserError, match="no column split"):
        open_source(folder / "val")
    (folder / "images.csv").unlink()
    rows = [row | {"split": split} for split in ("train", "val") for row in rows_of(folder, split, folder)]
    expected = [open_source(folder / split).fingerprint() for split in ("train", "val")]
    write_list(folder / "images.csv", rows)
    assert [open_source(folder / split).fingerprint() for split in ("train", "val")] == expected


def test_numbers_are_those_of_classes_txt_or_all_from_0(folder):
    names = datasets.ImageFolder(folder / "train").classes
    rows = [row | {"label": names.index(row["label"])} for row in rows_of(folder, "train", folder)]
    write_list(folder / "train.csv", rows)
    found = open_source(folder / "train")
    assert found.classes == ["0", "1", "2"]
    assert [found.label(number) for number in range(len(found))] == [row["label"] for row in rows]
    (folder / "classes.txt").write_text("".join(f"{name} \n".replace(" ", "-like") for name in names))
    assert open_source(folder / "train").classes == [f"{name}-like" for name in names]  # the cache is not stale
    (folder / "classes.txt").unlink()
    write_list(folder / "train.csv", [row for row in rows if row["label"] != 1])
    with pytest.raises(UserError, match="its labels are numbers up to 2, and 1 has no image; write all classes into"):
        open_source(folder / "train")


def test_classes_txt_gives_the_order_and_an_evaluation_may_lack_some(folder, capsys):
    names = [*datasets.ImageFolder(folder / "train").classes[::-1], "unseen"]
    (folder / "classes.txt").write_text("\n".join(names))
    for split in ("train", "val"):
        write_list(folder / f"{split}.csv", rows_of(folder, split, folder))
    found = open_source(folder / "val")
    assert found.classes == names
    assert {(name.split("/")[0], label) for name, label, _ in samples(found)} == {(names[n], n) for n in range(3)}
    assert "1 class of" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"1 class of .*train.csv, such as unseen, without images"):
        open_source(folder / "train")


def edited(folder: Path, **changes) -> None:
    first, *rows = rows_of(folder, "train", folder)
    write_list(folder / "train.csv", [first | changes, *rows])


# A file and its content, or changes of the list of the class folders' images; and the line's words.
@pytest.mark.parametrize(("spoilt", "message"), [
    ({"path": "train/nowhere.jpg"}, "line 11: 'train/nowhere.jpg' is not a file; paths are relative"),
    ({"path": "../x.jpg"}, "contains .."),
    ({"path": "train/7"}, "has none of the extensions"),
    ({"label": ""}, "label is ''; expected one name or number"),
    ({"label": "a/b"}, "a class cannot be called 'a/b'"),
    ({"path": "{second}"}, "is listed twice"),
    ({"path": "{second}", "label": "class2"}, "is listed with two classes"),
    (("train.csv", "path,label\ntrain/class0/image000.jpg,-1\n"), "label -1 is negative; the first class is 0"),
    (("train.csv", "path,label\na.jpg,a\nb.jpg,a\nc.jpg,b\n"), "'a.jpg' is not .*; 2 other paths .*: lines 3, 4$"),
    (("train.csv", "id;breed\n1;cat\n"), "no column path; line 1 has id, b"),
    (("train.csv", "path,label\n"), "lists no images of train"),
    (("train.csv", "path,label\na.jpg\n"), "line 2: 1 values for 2 columns"),
    (("train.csv", 'path,label\n"a.jpg,b\n'), "line 2: unexpected end of data"),
    (("train.csv", "path,label\n\udce4.jpg,cat\n"), "line 2: not UTF-8"),
    (("train.csv", "path,label,label\n"), "duplicate column: path"),
    (("train.jsonl", "{\n"), "line 1: not JSON"),
    (("train.jsonl", '{"path": "a.jpg", "label": ["a", "b"]}\n'), r"\['a', 'b'\]; expected one name or number"),
    (("images.csv", "path,label,split\na.jpg,a,test\n"), "split 'test'; expected"),
    (("classes.txt", "class0\n"), "classes.txt has no class"),
    (("classes.txt", "a\na\n"), "lists a twice"),
    (("classes.txt", "\n"), "is empty"),
])  # fmt: skip
def test_a_list_that_cannot_be_used_is_named_with_its_line(folder, spoilt, message):
    second = rows_of(folder, "train", folder)[1]["path"]
    changes = spoilt if isinstance(spoilt, dict) else {}
    if not changes:
        (folder / spoilt[0]).write_text(spoilt[1], errors="surrogateescape")
    if changes or spoilt[0] == "classes.txt":
        edited(folder, **{key: value.format(second=second) for key, value in changes.items()})
    with pytest.raises(UserError, match=message) as raised:
        open_source(folder / "train")
    assert "\n" not in str(raised.value)


def test_labels_that_look_like_several_are_named(folder, capsys):
    edited(folder, label="tench,fish")
    assert "tench,fish" in open_source(folder / "train").classes
    assert "1 class with a separator in its name, such as 'tench,fish', is one label here" in capsys.readouterr().out
    assert len(open_named("--set", f"v={folder / 'train.csv'}")[1]) == len(open_source(folder / "train"))


@pytest.mark.parametrize("way", ["absolute", "link", "linked folder"])
def test_a_file_is_known_by_every_path_and_link_to_it(folder, tmp_path, monkeypatch, way):
    monkeypatch.setattr(index, "RACY_NS", 0)
    row, *others = rows_of(folder, "val", folder)
    (folder / "l.jpg").symlink_to(row["path"])
    (folder / "links").symlink_to("val")
    path = {"absolute": f"{folder}/{row['path']}", "link": "l.jpg", "linked folder": f"links/{row['path'][4:]}"}[way]
    write_list(folder / "train.csv", [*rows_of(folder, "train", folder), row | {"path": path}])
    with pytest.raises(UserError, match=r"train.csv and .*/val both hold 1 image, such as"):  # a list and a folder
        lists.check_disjoint(open_source(folder / "train"), open_source(folder / "val"))
    folder = folder if way == "absolute" else folder.rename(tmp_path / "moved")  # with the index in the cache
    write_list(folder / "val.csv", [row, *others])
    with pytest.raises(UserError, match=r"train.csv and .*val.csv both hold 1 image"):
        lists.check_disjoint(open_source(folder / "train"), open_source(folder / "val"))
    for label, words in ((row["label"], "twice with this class"), (others[-1]["label"], "with two classes")):
        write_list(folder / "val.csv", [{"path": path, "label": label}, row, *others])
        with pytest.raises(UserError, match=f"line {len(others) + 3}: {path} is listed {words}"):
            open_source(folder / "val")


def test_a_list_of_one_split_refuses_rows_of_the_other(folder, capsys):
    rows = [row | {"split": "train"} for row in rows_of(folder, "train", folder)]
    for ending in lists.SEPARATORS:
        write_list(folder / f"train{ending}", [*rows, rows[0] | {"split": "val"}])
        with pytest.raises(UserError, match=rf"train{ending}, line \d+: split 'val'; expected train"):
            open_source(folder / "train")
        write_list(folder / f"train{ending}", rows)
        assert len(open_source(folder / "train")) == len(rows)
        (folder / f"train{ending}").unlink()
    write_list(folder / "real.csv", [*rows[1:], rows[0] | {"split": ""}])  # of a split of its own
    capsys.readouterr()
    assert len(open_source(folder / "real")) == len(rows)
    assert "1 column not read: split" in capsys.readouterr().out


@pytest.mark.parametrize(("form", "is_said"), [("{}", True), ("{}.0", True), ("{}.5", True), ("{}th", False)])
def test_labels_that_are_all_numbers_are_in_their_order_and_a_line_says_so(tmp_path, capsys, form, is_said):
    names = [form.format(number) for number in range(12)]
    write_images(tmp_path, {"plain": [1] * 12})
    for number, name in enumerate(names):
        (tmp_path / "plain" / f"class{number}").rename(tmp_path / "plain" / name)
    write_list(tmp_path / "train.csv", rows_of(tmp_path, "plain", tmp_path))
    found, theirs = open_source(tmp_path / "train"), datasets.ImageFolder(tmp_path / "plain")
    assert found.classes == (names if is_said else theirs.classes)
    assert [Path(found.path(number)).parent.name for number in range(12)] == found.classes
    said = f"{tmp_path / 'train.csv'}: classes are in numeric order (2, 10), unlike class folders (10, 2)"
    assert (said in capsys.readouterr().out) == is_said


def test_data_in_another_layout_are_answered_with_what_helps(folder):
    with pytest.raises(UserError, match="is one split; give the folder that holds it"):
        open_source(folder / "val" / "train")
    (folder / "train").rename(folder / "photos")
    (folder / "labels.csv").write_text("path,label\n")
    words = "if labels.csv lists the images, rename it to train.csv, with the columns path"
    with pytest.raises(UserError, match=words):
        open_source(folder / "train")


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_umlauts_of_another_system_are_found(folder, forms):
    image = next((folder / "train").rglob("*.jpg"))
    stored, listed = (unicodedata.normalize(form, "Käfer.jpg") for form in forms)
    content = image.rename(folder / stored).read_bytes()
    (folder / "train.csv").write_text(f"path,label\n{listed},cat\n", encoding="utf-8")
    assert open_source(folder / "train").read(0) == content


def test_a_list_of_a_spreadsheet_on_windows_is_read(folder):
    """With semicolons, a byte order mark, line ends of two characters and backslashes, but for a name that has one."""
    odd = next((folder / "val").rglob("*.jpg"))
    odd.rename(odd.with_name("a\\b.jpg"))
    expected = {split: samples(open_source(folder / split)) for split in ("train", "val")}
    for split, known in expected.items():
        rows = [(row["path"], row["label"]) for row in rows_of(folder, split, folder)]
        rows = [(path if "\\" in path else path.replace("/", "\\"), label) for path, label in rows]
        lines = ["path;label", *map(";".join, rows), ""]
        (folder / f"{split}.csv").write_bytes("\r\n".join(lines).encode("utf-8-sig"))
        found = open_source(folder / split)
        assert found.form == "list"
        assert samples(found) == known


def test_labels_that_look_alike_are_told_by_every_start(folder, tmp_path):
    assert source.alike_classes(["a", "b", "ab", "ba"]) == ""
    forms = {unicodedata.normalize(form, "Käfer") for form in ("NFC", "NFD")}
    assert source.alike_classes([*forms, "x"]).startswith("classes 'K")
    edited(folder, label="CLASS0")
    argv = ["--data-path", folder, "--minival", "0.2", *SMALL, "--batch-size", 2, "--epochs", 1]
    starts = [run_train(tmp_path, *argv, *more, "--output-dir", tmp_path / "out") for more in ([], ["--dry-run"])]
    starts.append(run_ranks(tool_rank, 1, "check", [folder, "--expect-val", 0], log_folder=tmp_path))
    words = "classes 'CLASS0' and 'class0' differ in case, spaces or Unicode form alone"
    assert [done.output.count(words) for done in starts] == [1, 1, 1]
