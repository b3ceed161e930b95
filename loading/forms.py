"""The forms of data that can be read, and the choice of the one in which a split is present."""

import numbers
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from errors import UserError, in_one_line, one_line
from files import retry
from loading.decode import HEIC_REMEDY, can_read_heic
from loading.index import CLASSES, ImageIndex
from loading.source import HEIC_EXTENSIONS, Source, check_label_sets, is_remote, list_folder
from settings import choices
from settings.custom_code import load_function
from settings.options import split_custom


def find_sources(root: Path) -> list[Source]:
    """Return the sources of a split, the preferred first; none is opened yet. UserError if one is not complete."""
    names = [*list_folder(root), *list_folder(root.parent)]
    forms = [form for form in choices.FORMS.values() if form.may_be_among(names)]
    found = [source for form in forms for source in form.load().find(root)]
    has_files = any(Path(source.where).parent == root for source in found)
    if has_files and not any(os.path.isdir(root / name) for name in list_folder(root)):
        # The folder holds the files of another format, and no class folders.
        found = [source for source in found if source.where != str(root)]
    return found


def check_source(root: Path) -> list[Source]:
    """Return the sources that are present for a split, as `find_sources`; UserError if there are none."""
    found = find_sources(root)
    if found:
        return found
    from loading.missing import explain_missing

    raise explain_missing(root, lambda: bool(find_sources(root.parent / "train")))


def open_named(
    option: str, text: str, separator: str | None = None, extensions: Sequence[str] | None = None, **remote: Any
) -> tuple[str, Source]:
    """Return the name of NAME=DIR, which `option` gave, and its images, opened; UserError if there are none.

    `separator` and `extensions` are those of `open_source`; `remote` are arguments of `RemotePack`, for an address of a
    pack and the split's name.
    """
    name, _, place = text.partition("=")
    if not name or not place:
        raise UserError(f"{option} {text}: expected NAME=DIR, such as val=/data/imagenet/val")
    if is_remote(place):
        url, _, split = place.rstrip("/").rpartition("/")
        return name, check_label_sets(_open_pack(url, split, **remote), separator)
    if {"train", "val"} <= {*list_folder(Path(place))}:
        raise UserError(f"{option} {text}: it holds train/ and val/; give one of them, such as {name}={place}/val")
    root = Path(place) if Path(place).name not in ("", "..") else Path(os.path.abspath(place))
    root = root.with_suffix("") if root.suffix in choices.FORMS["list"].endings else root
    if not find_sources(root):
        raise UserError(
            f"{option} {text}: {place} holds no images; give a folder with one folder for each class, a list, or the "
            "path of tars or of a pack, without the ending"
        )
    return name, open_source(root, separator, extensions)


def open_source(root: Path, separator: str | None = None, extensions: Sequence[str] | None = None) -> Source:
    """Return the preferred source of a split, opened; its root is the data path and the split's name.

    With a `separator` it is a list whose images have several labels, or a pack of it. `extensions` are further ones of
    images.

    Raises:
        UserError: the split is not there, cannot be an image folder, or its images have one label and need several.
    """
    if root.name in ("", ".."):
        root = Path(os.path.abspath(root))
    source, *others = check_source(root)
    if others:
        print(one_line(f"{source.where} is used, not {' or '.join(other.where for other in others)}"))
    if source.form == "folder" and os.path.lexists(root.parent / CLASSES):
        print(one_line(f"{root.parent / CLASSES} is not read: class folders are in the order of their names"))
    if source.form == "list":
        source.separator = separator
    if extensions and isinstance(source, ImageIndex):
        if {*HEIC_EXTENSIONS} & {*extensions} and not can_read_heic():
            raise UserError(f"--extensions {' '.join(extensions)} includes HEIC, {HEIC_REMEDY}")
        source.extensions = (*source.extensions, *extensions)
    return check_label_sets(source.open(), separator)


def open_split(folder: str, args: Any) -> Source:
    """Return a split's opened source, in a folder, behind an address or by FILE.py:FUNCTION; UserError for none."""
    name = os.path.basename(folder)
    if is_remote(args.data_path):
        return check_label_sets(_open_pack(args.data_path, name, **remote_options(args)), args.multi_label)
    if not split_custom(args.data_path or ""):
        return open_source(Path(folder), args.multi_label, args.extensions)
    with in_one_line(f"--data-path {args.data_path}"):
        source = load_function("data_path", args)(name)
        if not isinstance(source, Source) or not 0 < len(source) < 1 << 31:
            raise UserError(f"it returned {source!r:.80} for {name}; expected a Source of fewer than 2**31 images")
        _check_labels(check_label_sets(source, args.multi_label))
        source.fingerprint()  # whose names may be no text
    return source


def _open_pack(url: str, split: str, **remote: Any) -> Source:
    """Return a split of the pack behind an address."""
    from loading.remote import RemotePack

    return RemotePack(url, split, **remote)


def _check_labels(source: Source) -> None:
    """Refuse a source of the user's own whose classes, labels or first image cannot be."""
    names, sets = source.classes, source.label_sets
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise UserError("classes: expected a list of unique names")
    if sets is not None and (sets.dtype != bool or sets.shape[1:] != (len(names),)):
        raise UserError(f"label_sets are {sets.dtype} of shape {sets.shape}; expected bool of (sets, {len(names)})")
    labels, most = [source.label(number) for number in range(len(source))], len(names if sets is None else sets)
    if bad := [x for x in labels if type(x) is bool or not isinstance(x, numbers.Integral) or not 0 <= x < most]:
        raise UserError(f"a label is {bad[0]!r}; expected a whole number from 0 to {most - 1}")
    if not isinstance(getattr(source, "form", None), str):
        raise UserError("form: expected a name for this kind of data, for checkpoints and messages")
    content, *_ = retry(lambda: source.read(0)), {**source.identity()}, source.path(0)
    if not isinstance(content, bytes | bytearray):
        raise UserError(f"read returned {content!r:.80}; expected the bytes of an image's file")


def remote_options(args: Any) -> dict[str, Any]:
    """Return the options about addresses as arguments of `RemotePack`."""
    return {"cache": args.cache, "cache_gib": args.cache_gib, "timeout_s": 60 * args.io_timeout}
