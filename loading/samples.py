"""Images in tars with a label beside each, KEY.jpg with KEY.cls or KEY.json: the form of WebDataset."""

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import BinaryIO

from errors import UserError
from loading.index import ImageIndex, Scan
from loading.lists import as_label, check_class, number_labels
from loading.source import IMG_EXTENSIONS

# Endings of labels; of two beside an image the first counts.
LABELS = (".cls", ".json")

_MAX_LABEL_BYTES = 1 << 20

_Member = tuple[str, tuple[int, int, int]]  # its name, and its place as of `ImageIndex`


class Samples:
    """Images of tars that lie in no folder, with their labels. A key is a name up to its first dot.

    Attributes:
        images: the label and the image of each key.
        unlabelled: words for the first image without a label; stray images have none in class folders' tars.
    """

    def __init__(self) -> None:
        self.images: dict[str, tuple[str, _Member]] = {}
        self.unlabelled = ""
        self._members: dict[str, dict[str, list[_Member]]] = defaultdict(lambda: defaultdict(list))

    def add(self, name: str, place: tuple[int, int, int]) -> None:
        """Add a member of the tar that is read, if it is an image or a label."""
        key, _, ending = name.partition(".")
        kind = "image" if name.lower().endswith(IMG_EXTENSIONS) else f".{ending.lower()}"
        if kind in ("image", *LABELS):
            self._members[key][kind].append((name, place))

    def read_labels(self, path: Path, file: BinaryIO) -> None:
        """Read the labels of a tar whose members were added; UserError for one that does not belong to one image."""
        for key, members in self._members.items():
            images = members.pop("image", [])
            kind = next((kind for kind in LABELS if kind in members), None)
            if kind is None:
                self.unlabelled = self.unlabelled or f"{path} holds {images[0][0]!r}"
            elif images or kind == ".cls":  # a .json alone is of the whole set
                (name, (_, offset, size)), *others = members[kind]
                where = f"{path}, {name!r}"
                if others or len(images) != 1:
                    counts = f"there are {len(others) + 1} such labels and {len(images)} images of this key"
                    raise UserError(f"{where}: {counts}, the name up to its first dot; expected one of each")
                if key in self.images:
                    raise UserError(f"{where}: an earlier tar has this key, too; each image needs a key of its own")
                file.seek(offset)
                content = file.read(min(size, _MAX_LABEL_BYTES))
                self.images[key] = (_label(where, kind, content), images[0])
        self._members.clear()

    def add_to(self, scan: Scan, source: ImageIndex, paths: list[Path]) -> list[str]:
        """Add the images to a scan, by classes and by names in each, and return the classes."""
        if self.unlabelled:
            raise UserError(f"{self.unlabelled} without a label; every image needs a .cls or .json with its key")
        labels, images = zip(*self.images.values(), strict=True)
        words = [f"{paths[place[0]]}, {name!r}" for name, place in images]
        classes, numbers = number_labels(source, scan, labels, words)
        ordered = sorted(zip(numbers, images, strict=True))
        for number, group in itertools.groupby(ordered, lambda each: each[0]):
            names, places = zip(*(image for _, image in group), strict=True)
            scan.add(classes[number], number, names, places)
        return classes


def _label(where: str, kind: str, content: bytes) -> str:
    """Return the label in a file's content."""
    try:
        value = json.loads(content)["label"] if kind == ".json" else content.decode()
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        expected = "a JSON object with label" if kind == ".json" else "UTF-8"
        raise UserError(f"{where}: expected {expected}, the number or name of the image's class") from error
    label = as_label(value)
    if not label or len(label) > 255:
        raise UserError(f"{where}: label is {value!r:.80}; expected one name or number")
    check_class(where, label)
    return label
