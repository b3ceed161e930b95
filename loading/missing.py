"""Why a split's images are not there, with what is to be done about it."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from errors import UserError
from loading.source import list_folder
from settings import choices
from settings.config import ARCHIVES

# Other names of splits, in lower case: Roboflow's valid, Keras's training and validation ...
_OTHER_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation")}


def explain_missing(root: Path, has_train: Callable[[], bool]) -> UserError:
    """Return the error of a split that is not there; `has_train` tells whether its data path has a train split."""
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
        remedy = f"if {folders[0]}, {folders[1]} ... are the classes, move all of them into a folder train/ there, and"
        return UserError(f"{data_path} has no {root.name}/; {remedy} give --minival 0.1 unless there is a val/ too")
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
