"""--minival on a folder of class folders alone, which is its train/: the same bits as train/ has, and never a split."""

import re
import shutil
import unicodedata
from pathlib import Path

import pytest
from torchvision import datasets

from errors import UserError
from loading import forms
from settings import config
from tests.endings import Ending
from tests.images import write_images
from tests.ranks import run_ranks, tool_rank
from tests.started import SMALL, refused, run_train


@pytest.fixture
def photos(tmp_path):
    (write_images(tmp_path / "made", {"train": [11, 10, 8]}) / "train").rename(tmp_path / "photos")
    return tmp_path / "photos"


def argv(path, out, *more):
    words = [*SMALL, "--batch-size", 8, "--epochs", 2, "--lr", 0.05, "--use-deterministic-algorithms", *more]
    return ["--data-path", path, "--minival", 0.2, "--output-dir", out, *words]


def test_it_trains_resumes_and_is_evaluated_with_the_bits_of_train(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "moved" / "train")
    whole = run_train(tmp_path, *argv(tmp_path / "moved", tmp_path / "a")).check().output
    first = run_train(tmp_path, *argv(photos, tmp_path / "b", "--stop-epoch", 1)).check().output
    said = f"{photos} has no train/ and is taken as it: the classes are its folders, class0, class1, class2\n"
    assert (said in first, "is taken as it" in whole) == (True, False)
    assert "minival: 6 of 29 training images are held out" in first
    # A run goes on when its owner has moved the classes into train/, and the other way round.
    run_train(tmp_path, *argv(tmp_path / "moved", tmp_path / "b", "--resume", "auto")).check()
    differing = Ending(tmp_path / "a").differences(Ending(tmp_path / "b"))
    assert [each for each in differing if not re.search("data_?(/val)?/path: ", each)] == []
    best = ["--test-only", "--resume", tmp_path / "b" / "best.pth"]
    assert "n=6" in run_train(tmp_path, *argv(photos, tmp_path / "c", *best)).check().output
    scored = ["evaluate", [str(tmp_path / "b" / "best.pth"), f"--set=new={photos}", "--device=cpu"]]
    warned = "new: the checkpoint was trained on these images"
    assert warned not in run_ranks(tool_rank, 1, *scored, log_folder=tmp_path).check().output  # of the other folder
    run_train(tmp_path, *argv(photos, tmp_path / "b", "--overwrite", "--epochs", 1)).check()
    assert warned in run_ranks(tool_rank, 1, *scored, log_folder=tmp_path).check().output
    (photos / "class3").mkdir()
    shutil.copy(next(photos.rglob("*.jpg")), photos / "class3")
    changed = run_train(tmp_path, *argv(photos, tmp_path / "b", "--resume", "auto", "--epochs", 1))
    refused(changed, "3 classes but", "has 4")


def test_the_tools_take_it_too_and_no_output_becomes_a_class(photos, tmp_path, monkeypatch):
    healthy = run_ranks(tool_rank, 1, "check", [photos, "--expect-val", 0], log_folder=tmp_path).check().output
    assert "train: 29 images of 3 classes (8 to 11 each" in healthy
    preview = run_train(tmp_path, *argv(photos, tmp_path / "a", "--dry-run")).check().output
    assert f"# {photos}: 29 images in 3 classes, 6 of them held out" in preview
    within = [str(word) for word in argv(photos, photos / "runs")]
    with pytest.raises(UserError, match=r"lies inside .*photos/ of the images, where it would count as a class"):
        config.parse_args(within)
    (photos / "train.csv").touch()  # a list, and then no folder is a class
    config.parse_args(within)
    (photos / "train.csv").unlink()
    # From within it, by a name that the folder itself does not have, and beside an archive of its own name.
    (tmp_path / "photos.tar").touch()
    monkeypatch.chdir(photos)
    assert (len(forms.open_source(Path("train"), is_all=True)), [*photos.glob(".*")]) == (29, [])


SPLITS = "Train TRAINING train2017 my-train val VAL valid Validation dev test Test_set tests.zip images trn_1"
SPLITS += " Entraînement entrenamiento Prueba Prüfung Validierung treino обучение Проверка 训练集 テスト 검증"


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("name", SPLITS.split())
def test_a_folder_of_a_splits_name_is_no_class(photos, name, form):
    (photos / unicodedata.normalize(form, name)).mkdir()
    with pytest.raises(UserError, match="has no train/"):
        forms.check_source(photos / "train", is_all=True)


def test_names_that_only_look_like_a_splits_are_classes(photos):
    for name in "constraint mask no_mask valley device contest restaurant 10 folding_chair".split():
        shutil.copytree(photos / "class0", photos / name)
    (photos / "notes.txt").touch()
    found = forms.open_source(photos / "train", is_all=True)
    theirs = datasets.ImageFolder(photos)
    assert found.classes == theirs.classes
    numbers = range(len(found))
    assert [(found.path(number), found.label(number)) for number in numbers] == theirs.samples
    with pytest.raises(UserError, match=r"10, class0 ... are the classes, move all .* or give --minival 0.1"):
        forms.check_source(photos / "train")


@pytest.mark.parametrize(("paths", "words"), [
    (["odczyt/a/1.jpg", "ocena/a/1.jpg"], "odczyt holds folders, as a split does|ocena holds folders"),
    (["a/1.jpg", "b/1.jpg", "c.tar"], "c.tar may be a split, or a list"),
    (["a/1.jpg"], "it must hold train/ and val/"),
    (["../val/a/1.jpg", "../val/b/2.jpg"], "is one split"),
    (["Test/1.jpg", "a/1.jpg"], "not taken as the classes: Test may be a split"),
    (["validation/a/1.jpg", "Train/a/1.jpg"], "mv Train train && mv validation val"),
])  # fmt: skip
def test_what_is_no_folder_of_class_folders_is_told_why(tmp_path, paths, words):
    for path in paths:
        (tmp_path / "d" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / path).touch()
    folder = "val" if (tmp_path / "val").exists() else "d"
    with pytest.raises(UserError, match=words):
        forms.check_source(tmp_path / folder / "train", is_all=True)
