"""Remarks on the files of a set, of which some are looked at: stored turned, or of few grey levels."""

import contextlib
from typing import Any

import numpy

from errors import counted
from loading.decode import Decoding, load_image, read_orientation, to_mode


def _sample(source: Any, number: int) -> list[int]:
    """Return the numbers of some images, evenly spaced; of none in a pack behind an address."""
    # A start does not wait for a network's answers.
    if "://" in source.where:
        return []
    return sorted({*numpy.linspace(0, len(source) - 1, number, dtype=int).tolist()})


def unused_range(source: Any, how: Decoding) -> str:
    """Return a warning if the images of more than 8 bits, of 16 looked at, use at most a quarter of their range."""
    ends = []
    for number in _sample(source, 16):
        with contextlib.suppress(Exception):  # whoever needs the image names it
            if source.name(number).lower().endswith((".jpg", ".jpeg")):
                continue
            image = load_image(source.read(number), how.grey_range)
            if image.info["bits"]:
                ends += numpy.ravel(to_mode(image).getextrema()).tolist()
    low, high = min(ends, default=0), max(ends, default=255)
    # Cameras of 12 bits often fill files of 16, which load nearly black: their highest pixel is 15 of 255.
    if high - low > 64:
        return ""
    share = f"{(high - low + 1) / 256:.0%} of their range: loaded, their pixels are {low} to {high} of 255"
    return f"samples with more than 8 bits use {share}; --grey-range 0 4095 is for grey images of 12 bits"


def turned_share(source: Any, how: Decoding) -> str:
    """Return a remark if some images, of 64 looked at, are stored turned, or an empty text."""
    orientations = []
    for number in _sample(source, 64):
        with contextlib.suppress(Exception):  # as above
            orientations.append(read_orientation(source.read(number)))
    num_turned = sum(each != 1 for each in orientations)
    if not num_turned:
        return ""
    found = f"EXIF says to turn {num_turned} of {counted(len(orientations), 'image')} looked at"
    if how.exif:
        return f"{found}; they are turned"
    return f"{found}; without --exif they are read as stored, as torchvision does"


def remarks(source: Any, how: Decoding) -> str:
    """Return the remarks on a set, one a line."""
    return "\n".join([unused_range(source, how), turned_share(source, how)])
