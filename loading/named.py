"""Sets of images beside the two splits, which options give as NAME=DIR: `--eval-data`, and `--set` of evaluations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from errors import UserError
from loading.forms import find_sources, named, open_source
from loading.source import Source, check_label_sets, is_remote, list_folder
from settings import choices


def open_named(
    option: str, text: str, separator: str | None = None, extensions: Sequence[str] | None = None, **remote: Any
) -> tuple[str, Source]:
    """Return the name of NAME=DIR, which `option` gave, and its images, opened; UserError if there are none.

    `separator` and `extensions` are those of `open_source`; `remote` are arguments of `RemotePack`, for an address of a
    pack and the split's name.
    """
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise UserError(f"{option} {text}: expected NAME=DIR, such as val=/data/imagenet/val")
    if is_remote(folder):
        from loading.remote import RemotePack

        url, _, split = folder.rstrip("/").rpartition("/")
        return name, check_label_sets(RemotePack(url, split, **remote), separator)
    if {"train", "val"} <= {*list_folder(Path(folder))}:
        raise UserError(f"{option} {text}: it holds train/ and val/; give one of them, such as {name}={folder}/val")
    # A source needs the name of its folder, beside which its tars or lists lie.
    root = named(Path(folder))
    if root.suffix in choices.FORMS["list"].endings:
        root = root.with_suffix("")
    if not find_sources(root):
        wanted = "a folder with one folder for each class, a list, or the path of tars or of a pack, without the ending"
        raise UserError(f"{option} {text}: {folder} holds no images; give {wanted}")
    return name, open_source(root, separator, extensions)
