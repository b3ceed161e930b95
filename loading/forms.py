"""The forms of data that can be read, and the choice of the one in which a split is present."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from errors import as_user_error, one_line
from loading.heic import require_heic
from loading.index import CLASSES, FolderIndex, Hidden, ImageIndex
from loading.source import HEIC_EXTENSIONS, Source, check_label_sets, is_remote, list_folder
from settings import choices
from settings.custom_code import load_function
from settings.options import DataOptions
from settings.rules import split_custom


def find_sources(root: Path) -> list[Source]:
    """Return the sources of a split, the preferred first; none is opened yet. UserError if one is not complete."""
    names = [*list_folder(root), *list_folder(root.parent)]
    found: list[Source] = []
    for form in choices.FORMS.values():
        # By the names alone, so that a run on class folders imports none of the other forms.
        if form.may_be_among(names):
            found += form.load().find(root)
    has_files = any(Path(source.where).parent == root for source in found)
    if has_files and not any(os.path.isdir(root / name) for name in list_folder(root)):
        # The folder holds the files of another format, and no class folders.
        found = [source for source in found if source.where != str(root)]
    return found


def check_source(root: Path, *, is_all: bool = False) -> list[Source]:
    """Return the sources that are present for a split, as `find_sources`; UserError if there are none.

    If the split `is_all` that is read of its data path, as train/ with `--minival`, that may hold the class folders.
    """
    found = find_sources(root)
    if found:
        return found
    from loading.missing import explain_missing, why_not_classes

    if is_all and not why_not_classes(root.parent):
        # Not `find_sources`, which would prefer a photos.tar beside photos/.
        return [FolderIndex(named(root.parent))]
    raise explain_missing(root, lambda: bool(find_sources(root.parent / "train")), is_all=is_all)


def named(folder: Path) -> Path:
    """Return a folder by a path that ends with its name."""
    return Path(os.path.abspath(folder)) if folder.name in ("", "..") else folder


def open_source(
    root: Path,
    separator: str | None = None,
    extensions: Sequence[str] | None = None,
    hidden: Hidden = None,
    *,
    is_all: bool = False,
) -> Source:
    """Return the preferred source of a split, opened; its root is the data path and the split's name.

    With a `separator` it is a list whose images have several labels, or a pack of it. `extensions` are further ones of
    images. `hidden` is as of `check_hidden`. With `is_all` the data path itself may be the split: see `check_source`.

    Raises:
        UserError: the split is not there, cannot be an image folder, or its images have one label and need several.
    """
    root = named(root)
    source, *others = check_source(root, is_all=is_all)
    if others:
        print(one_line(f"{source.where} is used, not {' or '.join(other.where for other in others)}"))
    if source.form == "folder" and os.path.lexists(root.parent / CLASSES):
        print(one_line(f"{root.parent / CLASSES} is not read: class folders are in the order of their names"))
    if isinstance(source, ImageIndex):
        source.separator, source.hidden = separator, hidden
        source.extensions += tuple(extensions or ())
        if {*HEIC_EXTENSIONS} & {*(extensions or ())}:
            require_heic(f"--extensions {' '.join(extensions)} includes HEIC")
    check_label_sets(source.open(), separator)
    if source.root != root:
        names = ", ".join([*source.classes[:10], "..."] if len(source.classes) > 10 else source.classes)
        print(one_line(f"{source.root} has no {root.name}/ and is taken as it: the classes are its folders, {names}"))
    return source


def open_split(folder: str, data_options: DataOptions) -> Source:
    """Return a split's opened source, in a folder, behind an address or by FILE.py:FUNCTION; UserError for none."""
    name = os.path.basename(folder)
    if is_remote(data_options.data_path):
        from loading.remote import RemotePack

        pack = RemotePack(data_options.data_path, name, **remote_options(data_options))
        return check_label_sets(pack, data_options.multi_label)
    if split_custom(data_options.data_path or ""):
        from loading.own_data import open_own

        with as_user_error(f"--data-path {data_options.data_path}"):
            return open_own(load_function("data_path", data_options.data_path), name, data_options.multi_label)
    is_all = data_options.minival is not None
    return open_source(Path(folder), data_options.multi_label, data_options.extensions, is_all=is_all)


def remote_options(data_options: DataOptions) -> dict[str, Any]:
    """Return the options about addresses as arguments of `RemotePack`."""
    return {"cache": data_options.cache, "cache_gib": data_options.cache_gib, "timeout_s": 60 * data_options.io_timeout}
