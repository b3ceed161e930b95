"""Crops that grow during a run: small images in the first epochs make these faster."""

from collections.abc import Callable
from functools import cache
from typing import Any


class ProgressivePreset:
    """A training preset whose crops grow during the run (Tan and Le, arXiv 2104.00298; Leclerc et al., FFCV).

    Args:
        build: makes the preset for a `crop_size`.
        smallest: crop size until epoch `first`, px.
        largest: crop size from epoch `last` on, px.
        first: epoch from which crops grow, linearly, rounded to multiples of 32 px.
        last: epoch from which crops no longer grow.
    """

    def __init__(self, build: Callable[..., Any], *, smallest: int, largest: int, first: int, last: int) -> None:
        self.build = cache(build)  # each image asks for its preset, and there are a few sizes
        self.smallest = smallest
        self.largest = largest
        self.first = first
        self.last = last

    def size_at(self, epoch: int) -> int:
        """Return the crop size of an epoch, px."""
        progress = min(max((epoch - self.first) / (self.last - self.first), 0.0), 1.0)
        # The two ends are as given, and no multiples of 32.
        if progress == 0.0:
            return self.smallest
        if progress == 1.0:
            return self.largest
        size = round((self.smallest + (self.largest - self.smallest) * progress) / 32) * 32
        return min(max(size, self.smallest), self.largest)

    def at(self, epoch: int) -> Any:
        """Return the preset of an epoch."""
        return self.build(crop_size=self.size_at(epoch))
