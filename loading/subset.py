"""Some images of a source: those of `--minival` and of `--limit-train-images`, and the others."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable

import numpy

from loading.source import Source, digest, encoded, labels_of


class Subset(Source):
    """Some images of another, opened source, renumbered in the same order; it keeps all classes of that source."""

    def __init__(self, whole: Source, numbers: Iterable[int]) -> None:
        super().__init__(whole.root, whole.where)
        self.form, self.pack = whole.form, whole.pack
        self.classes, self.label_sets = whole.classes, whole.label_sets
        self.whole = whole
        self.numbers = numpy.unique(numpy.fromiter(numbers, dtype=numpy.int64))
        # The images of a subset of a subset are numbered in the whole source, so that its fingerprint is the same
        # whichever way it was chosen.
        if isinstance(whole, Subset):
            self.whole = whole.whole
            self.numbers = whole.numbers[self.numbers]

    @property
    def labels(self) -> numpy.ndarray:
        """The class of each image, (images,) int64."""
        return labels_of(self.whole)[self.numbers]

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


def minival_numbers(source: Source, fraction: float, fold: int = 0) -> list[int]:
    """Return the images of a training set that `--minival` holds out, in order.

    Of each class they are the images whose names, class/file, have the smallest SHA-256 hashes: that fraction of
    the class, rounded (halves up), but at least one, and none of a class of one image. So they depend on names and
    fraction alone, and a smaller fraction, above 0, holds out some of the same images. Each further `fold` holds out
    the images that follow in this order. Images of several labels count as one class.
    """
    by_class = defaultdict(list)
    for number in range(len(source)):
        label = source.label(number) if source.label_sets is None else 0
        by_class[label].append((hashlib.sha256(encoded(source.name(number))).digest(), number))
    held = []
    for images in by_class.values():
        begin, end = (min(int(len(images) * fraction * number + 0.5), len(images)) for number in (fold, fold + 1))
        # Fold 0 has an image, unless that would be the class's only one, and the others do not repeat it.
        begin = max(begin, min(fold, 1))
        end = min(max(end, 1), len(images) - (fold == 0))
        held += [number for _, number in sorted(images)[begin:end]]
    return sorted(held)


def first_of_each_class(source: Source, num_images: int) -> numpy.ndarray:
    """Return the numbers of the first images of each class in turn, `num_images` in all, in order."""
    labels = labels_of(source)
    order = numpy.argsort(labels, kind="stable")
    begins = numpy.searchsorted(labels[order], labels[order])
    turns = numpy.empty_like(order)
    turns[order] = numpy.arange(len(order)) - begins
    return numpy.sort(numpy.lexsort((labels, turns))[:num_images])


def without(source: Source, numbers: Iterable[int]) -> Subset:
    """Return all images of a source but some."""
    return Subset(source, numpy.setdiff1d(numpy.arange(len(source)), numpy.fromiter(numbers, dtype=numpy.int64)))
