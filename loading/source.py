"""The interface of a source of images, through which the datasets read every form of data."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path

from errors import UserError


class Source(ABC):
    """The images of one split in one form. A new form is a subclass, and an entry in `forms.FORMS`.

    It defines `find`, `classes`, `__len__`, `label`, `name` and `read`; everything else has a default. Loader processes
    are forked from the process that opened a source, and share its arrays.

    Args:
        root: the data path and the split's name; there need not be such a folder.

    Attributes:
        form: the form's name in checkpoints and messages.
        layout: the files that the form needs in the data path, for a message to a user who has none.
        classes: names of the classes, in the order of the labels.
    """

    form: str
    layout = ""
    classes: list[str]

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def find(cls, root: Path) -> list["Source"]:
        """Return the sources of this form at a root, in order of preference; none of them is opened yet."""
        return []

    @property
    def whole(self) -> "Source":
        """The source that this one is a part of and that reads its files; or this one itself."""
        return self

    @property
    def where(self) -> str:
        """The path, or pattern of paths, of its files, for messages."""
        return str(self.root)

    def open(self) -> "Source":
        """Find the images, and return the source itself."""
        return self

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of images."""

    @abstractmethod
    def label(self, number: int) -> int:
        """Return the class of an image."""

    @abstractmethod
    def name(self, number: int) -> str:
        """Return an image's name, class/file: the same in every form, and unique in the split."""

    def names_in_bytes(self) -> Iterator[bytes]:
        """Yield the names of all images, in order."""
        for number in range(len(self)):
            yield self.name(number).encode("utf-8", "surrogateescape")

    @abstractmethod
    def read(self, number: int) -> bytes:
        """Return the bytes of an image's file. The caller tries again after a failure of the system (`with_retries`).

        Raises:
            BadImageError: the bytes can be no image.
            MemoryError: memory is short.
            OSError: the file cannot be read.
            ImageError: the files are damaged, or have changed since the source was opened.
        """

    def size(self, number: int) -> int:
        """Return the bytes of an image's file."""
        return len(self.read(number))

    def path(self, number: int) -> str:
        """Return the words for an image in messages."""
        return f"{self.name(number)} in {self.where}"

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of the fingerprint, of one image or of several at a time."""
        for number in range(len(self)):
            yield line_of(self.name(number), self.label(number))

    def fingerprint(self) -> str:
        """Return a hash of the names and labels of all images, the same in every form."""
        return digest(self.lines())

    def identity(self) -> dict[str, str | None]:
        """Return facts that tell a split from another with the same names, without a look at each file.

        They are its form and path, and hashes of the images' sizes, its files' times and their checksums, or None.
        """
        path = os.path.abspath(self.root)
        return {"form": self.form, "path": path, "sizes": None, "times": None, "checksums": None}


def line_of(name: str, label: int) -> bytes:
    """Return an image's line of the fingerprint, which checkpoints hold."""
    return f"{name} {label}\n".encode("utf-8", "surrogateescape")


def digest(pieces: Iterable[bytes]) -> str:
    """Return a hash of bytes that come in pieces."""
    whole = hashlib.sha256()
    for piece in pieces:
        whole.update(piece)
    return whole.hexdigest()[:16]


def list_folder(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; none if there is no such folder.

    Raises:
        UserError: the folder cannot be listed.
    """
    if not folder.is_dir():
        return []
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from error
