"""The interface through which the datasets read every format of images."""

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

    def __init__(self, root: Path, where: Path | str | None = None) -> None:
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
        labels = [self.label(number)]
        if self.label_sets is not None:
            labels = numpy.flatnonzero(self.label_sets[labels[0]]).tolist()
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
        # Unbuffered: one read of the whole file, by its size. Opening, fstat and reading take 9 us of about 820.
        with open_to_read(self.path(number), buffering=0) as file:
            check_num_bytes(os.fstat(file.fileno()).st_size)
            return file.read()

    def expect(self, numbers: Iterable[int]) -> None:
        """Prefetch hint: the numbers of the images that will be read next."""
        return

    def fingerprint(self) -> str:
        """Return a hash of the names and labels of all images, the same in every format."""
        pieces = (encoded(f"{self.name(number)} {self.label(number)}\n") for number in range(len(self)))
        return digest(pieces if self.label_sets is None else chain(pieces, [self.label_sets.tobytes()]))

    def identity(self) -> dict[str, str | None]:
        """Return what tells a split from another with the same names, without a look at each file.

        It is its format and path, hashes of the images' sizes, its files' times and their checksums, and the sizes
        of at most 64 images, which can be compared across formats; or None.
        """
        path = os.path.abspath(self.root)
        return {"form": self.form, "path": path, "sizes": None, "times": None, "checksums": None, "sample": None}


def labels_of(source: Source) -> numpy.ndarray:
    """Return (images,) int64: the class of each image."""
    known = getattr(source, "labels", None)
    if isinstance(known, numpy.ndarray):
        return known.astype(numpy.int64)
    # A source of the user's own need not have an array.
    return numpy.fromiter(map(source.label, range(len(source))), dtype=numpy.int64, count=len(source))


def count_classes(source: Source) -> numpy.ndarray:
    """Return (classes,) int64: the number of images of each class."""
    if source.label_sets is None:
        return numpy.bincount(labels_of(source), minlength=len(source.classes))
    # The images of each set of labels, times the classes of each set.
    return numpy.bincount(labels_of(source), minlength=len(source.label_sets)) @ source.label_sets.astype(numpy.int64)


def alike_classes(classes: Iterable[str]) -> str:
    """Return a remark on names of classes that look alike, or an empty text."""
    forms = defaultdict(list)
    for name in classes:
        # Typed labels differ so by mistake, and nothing else would tell: one class would train as two.
        forms["".join(unicodedata.normalize("NFKC", name).casefold().split())].append(ascii(name))
    alike = [" and ".join(names) for names in forms.values() if len(names) > 1]
    if not alike:
        return ""
    words = "differ in case, spaces or Unicode form alone; write them alike if they are one class"
    return f"classes {', '.join(alike[:3])} {words}"


def check_label_sets(source: Source, separator: str | None) -> Source:
    """Return an opened source; UserError unless its images have several labels just where --multi-label says so."""
    if source.label_sets is not None and separator is None:
        raise UserError(f"{source.where} holds images with several labels (label_sets); give --multi-label")
    if source.label_sets is None and separator is not None:
        needed = f"a list of labels, such as {source.root}.csv, a pack of it, or label_sets"
        raise UserError(f"--multi-label needs {needed}; {source.where} has one label per image")
    return source


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
