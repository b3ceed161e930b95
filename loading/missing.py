"""A split that is not there: why, what is to be done about it, and whether its data path holds the classes instead."""

import os
import re
import shlex
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

from errors import UserError, as_user_error
from loading.source import list_folder
from settings import choices
from settings.config import ARCHIVES

# Other names of splits, in lower case: Roboflow's valid, Keras's training and validation ...
_OTHER_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation")}


# Words, and beginnings of words, that name a split in some languages. A class of such a name, say trains, costs its
# owner a line and an `mkdir`; two splits that are taken as classes would cost a wrong number.
_SPLIT = re.compile(r"""(?:^|[\W\d_])(?:(?:val|dev|trn|tst|images?)(?![^\W\d_])|train|träning|valid|test|eval|holdout
    |entraî|entrai|apprentiss|entren|trein|addestr|allenam|convalid|verif|prueb|prova|prüf|walid|trening|uczen|eğitim|doğrul
    |teszt|обуч|трен|валид|провер|тест|εκπαίδ|επικύρ|训练|訓練|验证|驗證|测试|測試|学習|検証|テスト|훈련|학습|검증|테스트)
    """, re.VERBOSE)  # fmt: skip


def why_not_classes(data_path: Path) -> str:
    """Return why the folders in a data path are not taken as the classes of its train/, or nothing if they are."""
    names = [name for name in list_folder(data_path) if name[0] != "."]
    folders = [name for name in names if (data_path / name).is_dir()]
    lists = (*choices.FORMS["list"].endings, ".tar", ".parquet")
    plain = {name: unicodedata.normalize("NFC", name.casefold()) for name in names}
    parts = [name for name in names if _SPLIT.search(plain[name]) or (name not in folders and name.endswith(lists))]
    # The data path's own name may be such as images or my_test, but no split's.
    parts += {"train", "training", "val", "valid", "validation", "test"} & {data_path.absolute().name.casefold()}
    if parts:
        return f"{parts[0]} may be a split, or a list of images"
    # In whatever language its name is, a split to train on holds class folders.
    with as_user_error(f"--data-path {data_path}"):
        for name in folders:
            # But for a program's own, such as .thumbnails and @eaDir, which `check_hidden` refuses.
            if any(entry.is_dir() and entry.name[0] not in ".@" for entry in os.scandir(data_path / name)):
                return f"{name} holds folders, as a split does"
    return "" if len(folders) > 1 else "there are no two of them"


def explain_missing(root: Path, has_train: Callable[[], bool], *, is_all: bool = False) -> UserError:
    """Return the error of a split that is not there.

    Args:
        root: the data path and the split's name.
        has_train: tells whether the data path has a train split.
        is_all: whether `--minival` is given, so that the data path might hold the class folders.
    """
    data_path = f"--data-path {root.parent}"
    if any(root.parent.glob("*.parquet")):
        remedy = f"first write their images as class folders: python -m scripts.prepare {root.parent} NEW_FOLDER"
        return UserError(f"{data_path} holds parquet files, which train.py cannot read; {remedy}")
    if not root.parent.is_dir():
        remedy = "give the folder with train/ and val/, or with lists such as train.csv"
        return UserError(f"{data_path} is not a folder; {remedy}")
    endings = choices.FORMS["list"].endings
    tables = [name for name in list_folder(root.parent) if name.endswith(endings) and name[:4] != "LOC_"]
    if tables and not has_train():
        name = f"train{Path(tables[0]).suffix}, with the columns path and label"
        remedy = f"if {tables[0]} lists the images, rename it to {name}, and give --minival 0.1"
        return UserError(f"{data_path} has no {root.name}/; {remedy} unless there is a val list too")
    folders = [name for name in list_folder(root.parent) if (root.parent / name).is_dir() and name[0] != "."]
    if misnamed := _find_misnamed(root, folders):
        return misnamed
    if folders and root.parent.name in ("train", "val"):
        return UserError(f"{data_path} is one split; give the folder that holds it, {root.parent.parent}")
    if len(folders) > 1 and "val" not in folders and not has_train():
        why, move = why_not_classes(root.parent), "move all of them into a folder train/ there"
        more = " beside a val/, or give --minival 0.1 (to evaluate a run, its own)"
        if why:
            more = ", and give --minival 0.1 unless there is a val/ too"
        reason = f", and its folders are not taken as the classes: {why}" if is_all else ""
        words = f"if {folders[0]}, {folders[1]} ... are the classes, {move}{more}"
        return UserError(f"{data_path} has no {root.name}/{reason}; {words}")
    preferred, *forms = (form.load() for form in choices.FORMS.values())
    layouts = ", or ".join(form.layout.format(split=root.name) for form in (*forms, preferred))
    hint = "; or give --minival 0.1 to evaluate on held-out training images" if root.name == "val" else ""
    return UserError(f"{data_path} has no {root.name}/; it must hold {layouts}{hint}")


def _find_misnamed(root: Path, folders: Sequence[str]) -> UserError | None:
    """Return the error of a split that is a folder of another name, or an archive, with the command that helps."""
    moves = {}
    for split, known in _OTHER_NAMES.items():
        for name in folders:
            if name.lower() in known and split not in folders:
                moves[split] = f"mv {name} {split}"
    words = f"--data-path {root.parent} has no {root.name}/"
    if root.name in moves:
        command = f"cd {shlex.quote(str(root.parent))} && {' && '.join(moves.values())}"
        return UserError(f"{words}; rename what is there: {command}")
    for name in list_folder(root.parent):
        if name.lower().endswith(ARCHIVES) and (name.startswith(root.name) or not folders):
            return UserError(f"{words}, but {name}; unpack it, so that {root.name}/ holds a folder for each class")
    return None
