"""Made-up images, for runs without data."""

from pathlib import Path

import torch
from torch import Tensor

from loading.source import Source


class SyntheticSource(Source):
    """Images from a fixed pool of noise, so that loading costs next to nothing; labels cycle through the classes."""

    POOL = 64
    form = "synthetic"

    def __init__(self, num_images: int, size_px: int, num_classes: int, in_chans: int = 3) -> None:
        super().__init__(Path())
        self.num_images = num_images
        self.classes = [f"class{label:04d}" for label in range(num_classes)]
        generator = torch.Generator().manual_seed(0)
        pool = torch.randint(0, 256, (self.POOL, in_chans, size_px, size_px), dtype=torch.uint8, generator=generator)
        self.pool = pool.contiguous(memory_format=torch.channels_last)  # the order of a batch, into which it is copied

    def __len__(self) -> int:
        return self.num_images

    def pixels(self, number: int) -> Tensor:
        """Return an image as (in_chans, size_px, size_px) uint8; there is no file to be read and decoded."""
        return self.pool[number % self.POOL]

    def label(self, number: int) -> int:
        """Return the class of an image: always the same for the same pixels."""
        return number % self.POOL % len(self.classes)

    def name(self, number: int) -> str:
        """Return a name such as a file of the image could have."""
        return f"{self.classes[self.label(number)]}/{number:09d}.png"

    def fingerprint(self) -> str:
        """Return the fingerprint of these images for checkpoints."""
        return f"synthetic-{self.num_images}-{len(self.classes)}"

    def identity(self) -> dict[str, str | None]:
        """Return the format; there are no files."""
        return {**super().identity(), "path": ""}
