"""Parts of a source: images chosen by formulas of names and labels, so that every process has the same."""

import hashlib
from collections.abc import Iterable

import numpy

from loading.source import Source, digest


class Subset(Source):
    """Some images of another, opened source, renumbered in the same order; it keeps all classes of that source."""

    def __init__(self, whole: Source, numbers: Iterable[int]) -> None:
        super().__init__(whole.root)
        self.form, self.classes = whole.form, whole.classes
        self.numbers = numpy.unique(numpy.fromiter(numbers, dtype=numpy.int64))
        if isinstance(whole, Subset):
            self.numbers = whole.numbers[self.numbers]
        self._whole = whole.whole

    @property
    def whole(self) -> Source:
        """The source that holds the files, itself no part of another."""
        return self._whole

    @property
    def where(self) -> str:
        """The path, or pattern of paths, of its files, for messages."""
        return self._whole.where

    def __len__(self) -> int:
        return len(self.numbers)

    def label(self, number: int) -> int:
        """Return the class of an image."""
        return self._whole.label(int(self.numbers[number]))

    def name(self, number: int) -> str:
        """Return an image's name."""
        return self._whole.name(int(self.numbers[number]))

    def read(self, number: int) -> bytes:
        """Return the bytes of an image's file; raises as `Source.read`."""
        return self._whole.read(int(self.numbers[number]))

    def size(self, number: int) -> int:
        """Return the bytes of an image's file."""
        return self._whole.size(int(self.numbers[number]))

    def path(self, number: int) -> str:
        """Return the words for an image in messages."""
        return self._whole.path(int(self.numbers[number]))

    def fingerprint(self) -> str:
        """Return a hash of the whole source's fingerprint and the numbers: faster than one of a million names."""
        return digest([self._whole.fingerprint().encode(), self.numbers.astype("<i8").tobytes()])

    def identity(self) -> dict[str, str | None]:
        """Return the identity of the whole source."""
        return self._whole.identity()


def labels_of(source: Source) -> numpy.ndarray:
    """Return (images,) int64: the class of each image."""
    return numpy.fromiter(map(source.label, range(len(source))), dtype=numpy.int64, count=len(source))


def minival_numbers(source: Source, fraction: float) -> list[int]:
    """Return the images of a training set that `--minival` holds out, in order.

    Of each class they are the images whose names, class/file, have the smallest SHA-256 hashes: the given fraction of
    the class, rounded (halves up), but at least one, and none of a class of one image. So they depend on names and
    fraction alone, and a smaller fraction, above 0, holds out some of the same images.
    """
    labels = labels_of(source)
    hashes = [hashlib.sha256(name).digest() for name in source.names_in_bytes()]
    by_hash = numpy.array(sorted(range(len(hashes)), key=hashes.__getitem__), dtype=numpy.int64)
    counts = numpy.bincount(labels, minlength=len(source.classes))
    held = numpy.minimum(numpy.maximum((counts * fraction + 0.5).astype(int), 1), counts - 1)
    return numpy.flatnonzero(_ranks(labels, by_hash) < held[labels]).tolist()


def without(source: Source, numbers: Iterable[int]) -> Subset:
    """Return all images of a source but some."""
    return Subset(source, numpy.setdiff1d(numpy.arange(len(source)), numpy.fromiter(numbers, dtype=numpy.int64)))


def first_of_each_class(source: Source, num_images: int) -> list[int]:
    """Return `num_images` images, evenly over the classes: the first of each, then the second of each, and so on."""
    labels = labels_of(source)
    ranks = _ranks(labels, numpy.arange(len(labels)))
    return numpy.sort(numpy.lexsort((labels, ranks))[:num_images]).tolist()


def _ranks(labels: numpy.ndarray, order: numpy.ndarray) -> numpy.ndarray:
    """Return, for each image, the number of images of its class before it in `order`, an order of all images."""
    counts = numpy.bincount(labels)
    ranks = numpy.empty_like(labels)
    by_class = order[numpy.argsort(labels[order], kind="stable")]
    ranks[by_class] = numpy.arange(len(labels)) - numpy.repeat(counts.cumsum() - counts, counts)
    return ranks
