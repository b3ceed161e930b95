"""Read images in parquet files, as Hugging Face publishes them, without extracting them."""

import functools
import importlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy

from errors import BadImageError, ImageError, UserError, in_one_line
from files import open_to_read
from loading.index import ImageIndex, Scan, check_num_bytes
from loading.progress import Progress
from loading.source import Source, list_folder

_SHARD = re.compile(r"(?P<split>[\w-]+?)-(?P<number>\d{5})-of-(?P<count>\d{5})(-[0-9a-f]+)?\.parquet")

# Hugging Face's name of an image of ImageNet: the official name, followed by the synset.
_SYNSET_NAME = re.compile(r"(?P<stem>[\w-]+)_(?P<synset>n\d{8})\.(?P<ending>JPEG|jpe?g|png)")


class ParquetIndex(ImageIndex):
    """The images of parquet files with the columns `image` (bytes and path) and `label`.

    Classes, names and order are those of the folder that `scripts.prepare` would make. Where a path lacks the synset,
    the name of the class is its label, and that of the image its row's number. To read an image, its whole row group
    must be read: files with row groups of some hundred images, as Hugging Face writes them, take several times as long
    as folders.
    """

    form = "parquet"
    layout = "{split}-00000-of-00002.parquet and so on"

    @classmethod
    def find(cls, root: Path) -> list[Source]:
        """Return the files of the split beside its folder, if there are any."""
        names = [(name, _SHARD.fullmatch(name)) for name in list_folder(root.parent)]
        splits = ("val", "validation") if root.name == "val" else (root.name,)  # Hugging Face has other words
        files = [root.parent / name for name, found in names if found and found["split"] in splits]
        return [cls(root, files)] if files else []

    @property
    def where(self) -> str:
        """A pattern that matches all files."""
        return str(self.files[0].with_name(f"{_SHARD.fullmatch(self.files[0].name)['split']}-*.parquet"))

    def open(self) -> "ParquetIndex":
        """Find the images, as `ImageIndex.open`.

        Raises:
            UserError: pyarrow is not installed, or a file is missing, damaged or has other columns.
        """
        _import_parquet(self.where)
        check_names(self.files)
        return super().open()

    def scan(self, scan: Scan) -> list[str]:
        """Add the images of all files, and return the classes."""
        progress = Progress(f"scanning {self.where}", len(self.files), "files")
        images, number = {}, 0  # (class, name, place) of each image, by label
        for file, path in enumerate(self.files):
            with open_to_read(path) as stream:
                scan.watch(str(path), os.fstat(stream.fileno()))
            table = open_parquet(path)
            for group in range(table.num_row_groups):
                with in_one_line(f"{path} is torn; get it anew"):
                    rows = table.read_row_group(group, columns=["image.path", "label"]).to_pylist()
                for row, values in enumerate(rows):
                    label = values["label"]
                    if label is None or label < 0:
                        raise UserError(f"{path}: row {row} of row group {group} has no label; use a labelled split")
                    official = find_synset((values["image"] or {}).get("path"))
                    name = official or (f"{label:06d}", f"{number:08d}.JPEG")
                    images.setdefault(label, []).append((*name, (file, group, row)))
                    number += 1
            progress.update()
        progress.close()
        by_label = sorted(images.items())
        classes = [self._class_of(label, own) for label, own in by_label]
        self.check_classes(classes, 0)
        if sorted(set(classes)) != classes:
            raise UserError(f"{self.where}: the labels do not number the classes in alphabetical order")
        for label, (name, (_, own)) in enumerate(zip(classes, by_label, strict=True)):
            own.sort(key=lambda image: image[1])
            names, places = [image[1] for image in own], [image[2] for image in own]
            if len(set(names)) < len(names):
                raise UserError(f"{self.where}: class {name} has two images of one name")
            scan.add(name, label, names, numpy.array(places, dtype=numpy.int64))
        return classes

    def _class_of(self, label: int, images: list[tuple]) -> str:
        names = {name for name, *_ in images}
        if len(names) > 1:
            raise UserError(f"{self.where}: label {label} is both {' and '.join(sorted(names)[:2])}")
        return names.pop()

    def path(self, number: int) -> str:
        """Return the words for an image in messages."""
        file, group, row = self.arrays["places"][number].tolist()
        return f"{self.name(number)} in {self.files[file]} (row {row} of row group {group})"

    def read(self, number: int) -> bytes:
        """Return the bytes of an image's file; raises as `Source.read`."""
        file, group, row = self.arrays["places"][number].tolist()
        mtime_ns, _, size = self.arrays["states"][file].tolist()
        path = self.files[file]
        status = os.stat(path)
        if (status.st_mtime_ns, status.st_size) != (mtime_ns, size):
            raise ImageError(
                f"cannot read image {self.path(number)}: the file has changed since it was scanned; start again"
            )
        content = _read_group(os.getpid(), str(path), mtime_ns, group)[row].as_py()
        if not content:
            raise BadImageError("the row holds no bytes")
        check_num_bytes(len(content))
        return content


def find_synset(path: str | None) -> tuple[str, str] | None:
    """Return the synset and the official file name in Hugging Face's path of an image, or None if it has none."""
    found = _SYNSET_NAME.fullmatch(os.path.basename(path or ""))
    return (found["synset"], f"{found['stem']}.{found['ending']}") if found else None


def check_names(files: Sequence[Path]) -> None:
    """Check that a set of files is complete.

    Raises:
        UserError: a file is missing.
    """
    found = [(path, _SHARD.fullmatch(path.name)) for path in files]
    there = {(match["split"], int(match["number"])) for _, match in found if match}
    for path, match in found:
        count = int(match["count"]) if match else 0
        for number in range(count):
            if (match["split"], number) not in there:
                name = f"{match['split']}-{number:05d}-of-{match['count']}.parquet"
                raise UserError(f"{path.with_name(name)} is missing; all {count} files of the set are needed")


def _import_parquet(files: str) -> ModuleType:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UserError(f"{files} needs pyarrow, which is not installed: pip install pyarrow") from error


def open_parquet(path: Path) -> Any:
    """Open a parquet file of Hugging Face's form.

    Raises:
        UserError: pyarrow is not installed; the file is damaged, or has other columns.
    """
    parquet = _import_parquet(str(path))
    with in_one_line(f"{path} is torn, or no parquet file; get it anew"):
        table = parquet.ParquetFile(path)
        columns = {field.name: str(field.type) for field in table.schema_arrow}
    image, label = columns.get("image", ""), columns.get("label", "")
    if not image.startswith("struct<") or "bytes: " not in image or not label.startswith(("int", "uint")):
        found = ", ".join(f"{name} ({kind[:60]})" for name, kind in columns.items())
        raise UserError(f"{path} has {found}; it needs image (struct of bytes and path) and label (int)")
    return table


@functools.lru_cache(maxsize=64)
def _open_once(process: int, path: str, mtime_ns: int) -> Any:
    """Return a file that this process opened; forked processes would share the position of one descriptor."""
    return open_parquet(Path(path))


@functools.lru_cache(maxsize=2)
def _read_group(process: int, path: str, mtime_ns: int, group: int) -> Any:
    """Return the bytes of each image of a row group, as an arrow array.

    Raises:
        ImageError: the file is damaged.
        OSError: the file cannot be read.
    """
    try:
        table = _open_once(process, path, mtime_ns).read_row_group(group, columns=["image.bytes"], use_threads=False)
        return table["image"].combine_chunks().field("bytes")
    except MemoryError:
        raise
    except Exception as error:  # arrow has several kinds for damaged bytes, and an OSError without a number
        if getattr(error, "errno", None) is not None:
            raise
        raise ImageError(f"row group {group} of {path} is damaged: {str(error).splitlines()[0][:160]}") from error
