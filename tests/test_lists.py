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
from loading import index, lists
from loading.forms import open_named, open_source
from loading.lists import alike_classes
from tests.images import write_images
from tests.ranks import run_ranks, tool_rank
from tests.started import SMALL_PLAIN, run_train


@pytest.fixture
def folder(tmp_path):
    """A data path with class folders, one of them with a folder of its own."""
    write_images(tmp_path / "data", {"train": [3, 2, 4], "val": [2, 1, 2]})
    first = sorted((tmp_path / "data" / "train").iterdir())[0]
    (first / "in a").mkdir()
    shutil.copy(next(first.glob("*.*")), first / "in a" / "z.JPEG")
    return tmp_path / "data"


def write_list(path: Path, rows: list[dict]):
    """Write rows in the form that the list's ending stands for, last row first."""
    with path.open("w", newline="") as file:
        if path.suffix == ".jsonl":
            file.writelines(json.dumps(row) + "\n" for row in rows[::-1])
            return
        writer = csv.DictWriter(file, list(rows[0]), delimiter="," if path.suffix == ".csv" else "\t")
        writer.writeheader()
        writer.writerows(rows[::-1])


def rows_of(folder: Path, split: str, base: Path | None = None) -> list[dict]:
    """Return the images that torchvision's ImageFolder finds, by paths relative to `base`, or absolute ones."""
    found = datasets.ImageFolder(folder / split)
    return [
        {"path": os.path.relpath(path, base) if base else path, "label": found.classes[label]}
        for path, label in found.samples
    ]


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl"])
def test_a_list_of_class_folders_files_is_their_index(folder, ending):
    expected = open_source(folder / "val"), open_source(folder / "train")
    for split in ("val", "train"):
        write_list(folder / f"{split}{ending}", rows_of(folder, split, folder))
    for _ in range(2):  # by a scan, and from the cache
        for known, split in zip(expected, ("val", "train"), strict=True):
            found = open_source(folder / split)
            assert (found.form, found.classes, len(found)) == ("list", known.classes, len(known))
            assert found.fingerprint() == known.fingerprint()
            for number in range(len(known)):
                assert found.name(number) == known.name(number)
                assert found.read(number) == known.read(number)
                assert found.size(number) == known.size(number)
            assert found.path(0) == str(folder / split / found.name(0))


@pytest.mark.parametrize("is_absolute", [False, True])
def test_photographs_may_lie_anywhere(folder, tmp_path, is_absolute):
    samples = datasets.ImageFolder(folder / "train").samples
    (tmp_path / "lists").mkdir()
    if not is_absolute:
        shutil.copytree(folder / "train", tmp_path / "lists" / "photographs")
    moved = folder / "train" if is_absolute else tmp_path / "lists" / "photographs"
    rows = rows_of(moved.parent, moved.name, None if is_absolute else tmp_path / "lists")
    write_list(tmp_path / "lists" / "train.csv", rows)
    found = open_source(tmp_path / "lists" / "train")
    contents = [(Path(path).read_bytes(), label) for path, label in samples]
    assert [(found.read(number), found.label(number)) for number in range(len(found))] == contents
    assert [found.path(number) for number in range(len(found))] == [
        row["path"] if is_absolute else str(tmp_path / "lists" / row["path"]) for row in rows
    ]
    assert all(found.name(number).startswith(found.classes[found.label(number)] + "/") for number in range(len(found)))


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
    names = datasets.ImageFolder(folder / "train").classes
    (folder / "classes.txt").write_text("\n".join([*names[::-1], "unseen"]))
    for split in ("train", "val"):
        write_list(folder / f"{split}.csv", rows_of(folder, split, folder))
    found = open_source(folder / "val")
    assert found.classes == [*names[::-1], "unseen"]
    assert {found.name(number).split("/")[0]: found.label(number) for number in range(len(found))} == {
        name: 2 - number for number, name in enumerate(names)
    }
    assert "1 class of" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"1 class of .*train.csv, such as unseen, without images"):
        open_source(folder / "train")


def edited(folder: Path, **changes) -> None:
    rows = rows_of(folder, "train", folder)
    write_list(folder / "train.csv", [rows[0] | changes, *rows[1:]])


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda folder: edited(folder, path="train/nowhere.jpg"), "'train/nowhere.jpg' is not a file; paths are relative"),
    (lambda folder: write_list(folder / "train.csv", [
        row | ({"path": f"{number}.jpg"} if number in (0, 2, 3) else {})
        for number, row in enumerate(rows_of(folder, "train", folder))
    ]), r"line \d+: '\d.jpg' is not a file; .*; 2 other paths of this list too: lines \d+, \d+$"),
    (lambda folder: edited(folder, path="../x.jpg"), "contains .."),
    (lambda folder: edited(folder, path="train/7"), "has none of the extensions"),
    (lambda folder: edited(folder, label=""), "label is ''; expected one name or number"),
    (lambda folder: edited(folder, label="a/b"), "a class cannot be called 'a/b'"),
    (lambda folder: write_list(folder / "train.csv", [row | {"label": -1} for row in rows_of(folder, "train", folder)]),
     "label -1 is negative; the first class is 0"),
    (lambda folder: edited(folder, label=rows_of(folder, "train")[-1]["label"], path=rows_of(folder, "train", folder)[1]
                           ["path"]), "is listed with two classes"),
    (lambda folder: edited(folder, path=rows_of(folder, "train", folder)[1]["path"]), "is listed twice"),
    (lambda folder: (folder / "train.csv").write_text("id;breed\n1;cat\n"), "no column path; line 1 has id, b"),
    (lambda folder: (folder / "train.csv").write_text("path,label\n"), "lists no images of train"),
    (lambda folder: (folder / "train.csv").write_text("path,label\na.jpg\n"), "line 2: 1 values for 2 columns"),
    (lambda folder: (folder / "train.csv").write_text('path,label\n"a.jpg,b\n'), "line 2: unexpected end of data"),
    (lambda folder: (folder / "train.csv").write_bytes(b"path,label\n\xe4.jpg,cat\n"), "line 2: not UTF-8"),
    (lambda folder: (folder / "train.jsonl").write_text("{\n"), "line 1: not JSON"),
    (lambda folder: (folder / "train.jsonl").write_text('{"path": "a.jpg", "label": ["a", "b"]}\n'),
     r"label is \['a', 'b'\]; expected one name or number"),
    (lambda folder: edited(folder) or (folder / "classes.txt").write_text("class0\n"), "classes.txt has no class"),
    (lambda folder: edited(folder) or (folder / "classes.txt").write_text("a\na\n"), "lists a twice"),
    (lambda folder: edited(folder) or (folder / "classes.txt").write_text("\n"), "is empty"),
    (lambda folder: (folder / "images.csv").write_text("path,label,split\na.jpg,a,test\n"), "split 'test'; expected"),
    (lambda folder: (folder / "train.csv").write_text("path,label,label\n"), "duplicate column: path"),
])  # fmt: skip
def test_a_list_that_cannot_be_used_is_named_with_its_line(folder, spoil, message):
    spoil(folder)
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
def test_labels_that_are_all_numbers_are_in_their_order_and_a_line_says_where_folders_have_another(
    tmp_path, capsys, form, is_said
):
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
    photos = (folder / "train").rename(folder / "photos")
    with pytest.raises(UserError, match="are the classes, move all of them into a folder train/"):
        open_source(photos / "train")
    with pytest.raises(UserError, match="is one split; give the folder that holds it"):
        open_source(folder / "val" / "train")
    (folder / "labels.csv").write_text("path,label\n")
    with pytest.raises(
        UserError, match=r"if labels.csv lists the images, rename it to train.csv, with the columns path"
    ):
        open_source(folder / "train")


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_umlauts_of_another_system_are_found(folder, forms):
    """A Mac writes Käfer as two characters, also where the file's name came from elsewhere as one."""
    image = next((folder / "train").rglob("*.jpg"))
    stored, listed = (unicodedata.normalize(form, "Käfer.jpg") for form in forms)
    content = image.rename(folder / stored).read_bytes()
    (folder / "train.csv").write_text(f"path,label\n{listed},cat\n", encoding="utf-8")
    assert open_source(folder / "train").read(0) == content


def test_a_list_of_a_spreadsheet_on_windows_is_read(folder, capsys):
    """With semicolons, a byte order mark, line ends of two characters and backslashes, but for a name that has one."""
    expected = {split: open_source(folder / split) for split in ("train", "val")}
    odd = next((folder / "val").rglob("*.jpg"))
    odd = odd.rename(odd.with_name("a\\b.jpg"))
    expected["val"] = open_source(folder / "val")
    for split, known in expected.items():
        rows = [(known.path(number), known.class_name(number)) for number in range(len(known))]
        paths = [os.path.relpath(path, folder) for path, _ in rows]
        paths = [path if "\\" in path else path.replace("/", "\\") for path in paths]
        lines = ["path;label", *(f"{path};{label}" for path, (_, label) in zip(paths, rows, strict=True))]
        (folder / f"{split}.csv").write_bytes("\r\n".join([*lines, ""]).encode("utf-8-sig"))
        found = open_source(folder / split)
        assert found.form == "list"
        assert [found.read(number) for number in range(len(found))] == [known.read(n) for n in range(len(known))]
        assert found.fingerprint() == known.fingerprint()


def test_labels_that_look_alike_are_told_by_every_start(folder, tmp_path):
    assert alike_classes(["a", "b", "ab", "ba"]) == ""
    forms = {unicodedata.normalize(form, "Käfer") for form in ("NFC", "NFD")}
    assert alike_classes([*forms, "x"]).startswith("classes 'K")
    rows = [{**row, "label": "CLASS0"} if number == 0 else row for number, row in enumerate(rows_of(folder, "train"))]
    write_list(folder / "train.csv", rows)
    words = "classes 'CLASS0' and 'class0' differ in case, spaces or Unicode form alone"
    argv = ["--data-path", folder, "--minival", "0.2", *SMALL_PLAIN, "--batch-size", 2, "--epochs", 1]
    for more in ([], ["--dry-run"]):
        done = run_train(tmp_path, *argv, *more, "--output-dir", tmp_path / "out").check()
        assert done.output.count(words) == 1
    done = run_ranks(tool_rank, 1, "check", [folder, "--expect-val", 0], log_folder=tmp_path)
    assert words in done.output
