"""Images in tars each with a label, KEY.jpg with KEY.cls or KEY.json: the form of WebDataset."""

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from errors import UserError, one_line
from loading.index import ImageIndex, Location, Scan
from loading.lists import as_label, check_class, number_labels
from loading.source import IMG_EXTENSIONS

# Endings of labels; of two for one image the first counts.
LABELS = (".cls", ".json")

_MAX_LABEL_BYTES = 1 << 20

_Member = tuple[str, Location]  # its name and location


class Samples:
    """Images of tars with their labels. A key is a path up to its last dot, or else to the first in its file's name.

    Attributes:
        images: the label and the image of each key.
        unlabelled: names the first image without a label: none has one in a tar of class folders.
        unread: names the first .json in a folder that holds no label.
    """

    def __init__(self, extensions: tuple[str, ...] = IMG_EXTENSIONS) -> None:
        self.extensions = extensions
        self.images: dict[str, tuple[str, _Member]] = {}
        self.unlabelled = self.unread = ""
        self._images: list[_Member] = []
        self._labels: dict[str, dict[str, list[_Member]]] = defaultdict(lambda: defaultdict(list))

    def add(self, path: str, location: Location) -> None:
        """Add a member of the tar that is read, if it is an image or a label, by its path below the split's folder."""
        stem, ending = os.path.splitext(path)
        if ending.lower() in LABELS:
            self._labels[stem][ending.lower()].append((path, location))
        elif path.lower().endswith(self.extensions):
            self._images.append((path, location))

    def read_labels(self, path: Path, file: BinaryIO) -> None:
        """Read the labels of a tar whose members were added; UserError for one that does not belong to one image."""
        by_key = self._by_key()
        for key, members in self._labels.items():
            images = by_key[key]
            kind = next(kind for kind in LABELS if kind in members)
            if not images and (kind == ".json" or "." in os.path.basename(key)):
                continue  # of the whole set, or no label but another fact of an image
            (name, (_, offset, size)), *others = members[kind]
            where = f"{path}, {name!r}"
            file.seek(offset)
            label = _label(where, kind, file.read(min(size, _MAX_LABEL_BYTES)), is_needed="/" not in key)
            if label is None:
                self.unread = self.unread or where
                continue
            if others or len(images) != 1:
                counts = f"there are {len(others) + 1} such labels and {len(images)} images with this key"
                raise UserError(f"{where}: {counts}, the name up to its first dot; expected one of each")
            if key in self.images:
                raise UserError(f"{where}: an earlier tar has this key too; each image needs a unique key")
            self.images[key] = (label, by_key.pop(key)[0])
        left = [image for images in by_key.values() for image in images]
        if left and not self.unlabelled:
            self.unlabelled = f"{path} holds {left[0][0]!r}"
        self._images.clear()
        self._labels.clear()

    def _by_key(self) -> dict[str, list[_Member]]:
        """Return the images of the tar that is read by their keys."""
        by_key = defaultdict(list)
        # Without labels the first image is enough to say that it has none: a tar of class folders has a million.
        for image in self._images if self._labels else self._images[:1]:
            stem, _ = os.path.splitext(image[0])
            folder, name = os.path.split(stem)
            # WebDataset's rule: a key ends at the first dot of the file's name.
            by_key[stem if stem in self._labels else os.path.join(folder, name.partition(".")[0])].append(image)
        return by_key

    def add_to(self, scan: Scan, source: ImageIndex, paths: Sequence[Path]) -> list[str]:
        """Add the images to a scan, and return the classes."""
        if self.unlabelled:
            raise UserError(f"{self.unlabelled} without a label; every image needs a .cls or .json with its key")
        labels, images = zip(*self.images.values(), strict=True)
        origins = [f"{paths[location[0]]}, {name!r}" for name, location in images]
        in_folders = [key for key in self.images if "/" in key]
        if in_folders:
            found = f"the classes are the labels, such as that of {in_folders[0]}, not the folders"
            print(one_line(f"{source.where}: {found}"))
        classes, numbers = number_labels(source, scan, labels, origins)
        members = zip(numbers, images, strict=True)
        scan.add_sorted((label, *os.path.split(f"{classes[label]}/{name}"), at) for label, (name, at) in members)
        return classes


def _label(where: str, kind: str, content: bytes, is_needed: bool) -> str | None:
    """Return the label in a file's content; None for JSON without one, unless it is needed."""
    is_json = kind == ".json"
    try:
        value = content.decode() if not is_json else json.loads(content)["label"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if is_json and not is_needed:
            return None
        expected = "a JSON object with label" if is_json else "UTF-8"
        raise UserError(f"{where}: expected {expected}, the number or name of the image's class") from error
    label = as_label(value)
    if not label or len(label) > 255:
        raise UserError(f"{where}: label is {value!r:.80}; expected one name or number")
    check_class(where, label)
    return label
