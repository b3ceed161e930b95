"""The interface through which the datasets read every format of images, and subsets of such a source."""

import hashlib
import os
import unicodedata
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import numpy

from errors import BadImageError, UserError
from files import open_to_read

# torchvision's, whose import would take seconds and half a gigabyte in a process that needs nothing else of it.
IMG_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

# Those of phones, too, which ImageFolder does not read.
HEIC_EXTENSIONS = (".heic", ".heif")
PHONE_EXTENSIONS = (".avif", *HEIC_EXTENSIONS)

# 12 bytes for each of `decode.MAX_PIXELS`: a larger file can be no image, and would fill memory.
_MAX_BYTES = 1 << 30


class Source(ABC):
    """The images of one split in one format: a file for each image, `root`/`name`, unless a subclass says otherwise.

    A new format is a subclass, and a row of `settings.choices.FORMS`. Loader processes are forked from the process that
    opened a source, and share its arrays.

    Args:
        root: the data path and the split's name; there need not be such a folder.
        where: the path, or pattern of paths, of its files, for messages; by default the root.

    Attributes:
        form: the format's name in checkpoints and messages.
        layout: the files that the format needs in the data path, for a message to a user who has none.
        classes: names of the classes, in the order of the labels.
        pack: of a pack of `scripts.pack`, the metadata of its manifest or index, not checked: `px`, their short side.
        label_sets: (sets, classes) bool for images of several labels, whose `label` is then a row; else None.
    """

    form: str
    label_sets: numpy.ndarray | None = None
    pack: dict | None = None
    layout = ""
    classes: list[str]

    def __init__(self, root: Path, where: Path | None = None) -> None:
        self.root, self.where = root, str(where or root)

    @classmethod
    def find(cls, root: Path) -> list["Source"]:
        """Return the sources of this format at a root, in order of preference; none of them is opened yet."""
        return []

    def open(self) -> "Source":
        """Find the images, and return the source itself."""
        return self

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of images."""

    @abstractmethod
    def label(self, number: int) -> int:
        """Return the class of an image."""

    def class_name(self, number: int) -> str:
        """Return the name of an image's class, or those of its classes."""
        label = self.label(number)
        labels = [label] if self.label_sets is None else numpy.flatnonzero(self.label_sets[label])
        return ", ".join(self.classes[each] for each in labels)

    @abstractmethod
    def name(self, number: int) -> str:
        """Return an image's name, class/file: the same in every format, and unique in the split."""

    def path(self, number: int) -> str:
        """Return the path of an image, for messages."""
        return os.path.join(self.root, self.name(number))

    def size(self, number: int) -> int:
        """Return the bytes of an image's file."""
        return len(self.read(number))

    def read(self, number: int) -> bytes:
        """Return the bytes of an image's file. The caller tries again after a failure of the system (`files.retry`).

        Raises:
            BadImageError: the bytes can be no image.
            MemoryError: memory is short.
            OSError: the file cannot be read.
            ImageError: the files are damaged, or have changed since the source was opened.
        """
        with open_to_read(self.path(number), buffering=0) as file:
            check_num_bytes(os.fstat(file.fileno()).st_size)
            return file.read()

    def expect(self, numbers: Iterable[int]) -> None:
        """Prefetch hint: the numbers of the images that will be read next."""
        return

    def fingerprint(self) -> str:
        """Return a hash of the names and labels of all images, the same in every format."""
        lines = (encoded(f"{self.name(number)} {self.label(number)}\n") for number in range(len(self)))
        return digest(chain(lines, [] if self.label_sets is None else [self.label_sets.tobytes()]))

    def identity(self) -> dict[str, str | None]:
        """Return what tells a split from another with the same names, without a look at each file.

        It is its format and path, hashes of the images' sizes, its files' times and their checksums, and the sizes
        of at most 64 images, which can be compared across formats; or None.
        """
        path = os.path.abspath(self.root)
        return {"form": self.form, "path": path, "sizes": None, "times": None, "checksums": None, "sample": None}


class Subset(Source):
    """Some images of another, opened source, renumbered in the same order; it keeps all classes of that source."""

    def __init__(self, whole: Source, numbers: Iterable[int]) -> None:
        super().__init__(whole.root, whole.where)
        self.form, self.classes, self.whole, self.label_sets = whole.form, whole.classes, whole, whole.label_sets
        self.pack = whole.pack
        self.numbers = numpy.unique(numpy.fromiter(numbers, dtype=numpy.int64))
        if isinstance(whole, Subset):
            self.numbers, self.whole = whole.numbers[self.numbers], whole.whole

    def __len__(self) -> int:
        return len(self.numbers)

    def label(self, number: int) -> int:
        """Return the class of an image."""
        return self.whole.label(int(self.numbers[number]))

    def name(self, number: int) -> str:
        """Return an image's name."""
        return self.whole.name(int(self.numbers[number]))

    def path(self, number: int) -> str:
        """Return the path of an image, for messages."""
        return self.whole.path(int(self.numbers[number]))

    def read(self, number: int) -> bytes:
        """Return the bytes of an image's file; raises as `Source.read`."""
        return self.whole.read(int(self.numbers[number]))

    def expect(self, numbers: Iterable[int]) -> None:
        """Pass the hint on to the whole source."""
        self.whole.expect(self.numbers[list(numbers)].tolist())

    def fingerprint(self) -> str:
        """Return a hash of the whole source's fingerprint and the numbers: faster than one of a million names."""
        return digest([self.whole.fingerprint().encode(), self.numbers.astype("<i8").tobytes()])

    def identity(self) -> dict[str, str | None]:
        """Return the identity of the whole source."""
        return self.whole.identity()


def labels_of(source: Source) -> numpy.ndarray:
    """Return (images,) int64: the class of each image."""
    if isinstance(source, Subset):
        return labels_of(source.whole)[source.numbers]
    if isinstance(known := getattr(source, "labels", None), numpy.ndarray):
        return known.astype(numpy.int64)
    return numpy.fromiter(map(source.label, range(len(source))), dtype=numpy.int64, count=len(source))


def count_classes(source: Source) -> numpy.ndarray:
    """Return (classes,) int64: the number of images of each class."""
    if source.label_sets is None:
        return numpy.bincount(labels_of(source), minlength=len(source.classes))
    return numpy.bincount(labels_of(source), minlength=len(source.label_sets)) @ source.label_sets.astype(numpy.int64)


def minival_numbers(source: Source, fraction: float, fold: int = 0) -> list[int]:
    """Return the images of a training set that `--minival` holds out, in order.

    Of each class they are the images whose names, class/file, have the smallest SHA-256 hashes: that fraction of
    the class, rounded (halves up), but at least one, and none of a class of one image. So they depend on names and
    fraction alone, and a smaller fraction, above 0, holds out some of the same images. Each further `fold` holds out
    the images that follow in this order. Images of several labels count as one class.
    """
    by_class, held = defaultdict(list), []
    for number in range(len(source)):
        label = 0 if source.label_sets is not None else source.label(number)
        by_class[label].append((hashlib.sha256(encoded(source.name(number))).digest(), number))
    for images in by_class.values():
        ends = [min(int(len(images) * fraction * number + 0.5), len(images)) for number in (fold, fold + 1)]
        begin, end = max(ends[0], min(fold, 1)), max(ends[1], 1)  # fold 0 has an image
        held += [number for _, number in sorted(images)[begin : min(end, len(images) - (fold == 0))]]
    return sorted(held)


def first_of_each_class(source: Source, num_images: int) -> numpy.ndarray:
    """Return the numbers of the first images of each class in turn, `num_images` in all, in order."""
    labels = labels_of(source)
    order = numpy.argsort(labels, kind="stable")
    begins = numpy.searchsorted(labels[order], labels[order])
    turns = numpy.empty_like(order)
    turns[order] = numpy.arange(len(order)) - begins
    return numpy.sort(numpy.lexsort((labels, turns))[:num_images])


def alike_classes(classes: Iterable[str]) -> str:
    """Return a remark on names of classes that look alike, or an empty text."""
    forms = defaultdict(list)
    for name in classes:
        forms["".join(unicodedata.normalize("NFKC", name).casefold().split())].append(ascii(name))
    alike = [" and ".join(names) for names in forms.values() if len(names) > 1]
    words = "differ in case, spaces or Unicode form alone; write them alike if they are one class"
    return f"classes {', '.join(alike[:3])} {words}" if alike else ""


def without(source: Source, numbers: Iterable[int]) -> Subset:
    """Return all images of a source but some."""
    return Subset(source, numpy.setdiff1d(numpy.arange(len(source)), numpy.fromiter(numbers, dtype=numpy.int64)))


def check_label_sets(source: Source, separator: str | None) -> Source:
    """Return an opened source; UserError unless its images have several labels just where --multi-label says so."""
    if source.label_sets is not None and separator is None:
        raise UserError(f"{source.where} holds images with several labels (label_sets); give --multi-label")
    if source.label_sets is None and separator is not None:
        needed = f"a list of labels, such as {source.root}.csv, a pack of it, or label_sets"
        raise UserError(f"--multi-label needs {needed}; {source.where} has one label per image")
    return source


def decode_label_sets(folders: dict[str, list[str]], classes: list[str]) -> numpy.ndarray:
    """Return the `Source.label_sets` of a pack, a row for each folder; ValueError or TypeError if they are none."""
    is_known = {*chain(*folders.values())} <= {*classes}
    if not is_known or len({*classes}) < len(classes) or {*map(type, classes)} != {str}:
        raise ValueError("it has no valid classes and labels")
    return numpy.array([[name in labels for name in classes] for labels in folders.values()], dtype=bool)


def is_remote(path: str | None) -> bool:
    """Tell whether a data path is an address and not a folder."""
    return "://" in (path or "")


def check_num_bytes(num_bytes: int) -> None:
    """Raise BadImageError if a file is too large for an image."""
    if num_bytes > _MAX_BYTES:
        raise BadImageError(f"it has {num_bytes:,} bytes; an image may have at most {_MAX_BYTES:,}")


def encoded(text: str) -> bytes:
    """Return text in UTF-8; names that are not UTF-8 keep their bytes."""
    return text.encode("utf-8", "surrogateescape")


def digest(pieces: Iterable[bytes]) -> str:
    """Return a hash of bytes that come in pieces."""
    whole = hashlib.sha256()
    for piece in pieces:
        whole.update(piece)
    return whole.hexdigest()[:16]


def list_folder(folder: Path) -> list[str]:
    """Return the names in a folder, sorted, or none if there is no such folder; UserError if it cannot be listed."""
    if not folder.is_dir():
        return []
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from error
