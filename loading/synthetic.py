"""Synthetic images, for runs without data."""

import io
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from loading.source import Source


class SyntheticSource(Source):
    """Images from a fixed pool of noise, so that loading costs next to nothing; labels cycle through the classes."""

    POOL = 64
    form = "synthetic"

    def __init__(self, num_images: int, size_px: int, num_classes: int) -> None:
        super().__init__(Path())
        self.num_images, self.num_classes = num_images, num_classes
        self.classes = [f"class{label:04d}" for label in range(num_classes)]
        generator = torch.Generator().manual_seed(0)
        pool = torch.randint(0, 256, (self.POOL, 3, size_px, size_px), dtype=torch.uint8, generator=generator)
        self.pool = pool.contiguous(memory_format=torch.channels_last)  # the order of a batch, into which it is copied

    def __len__(self) -> int:
        return self.num_images

    def label(self, number: int) -> int:
        """Return the class of an image: always the same for the same pixels."""
        return number % self.POOL % self.num_classes

    def name(self, number: int) -> str:
        """Return a name such as a file of the image could have."""
        return f"{self.classes[self.label(number)]}/{number:09d}.png"

    def pixels(self, number: int) -> Tensor:
        """Return the (3, size_px, size_px) uint8 pixels of an image."""
        return self.pool[number % self.POOL]

    def read(self, number: int) -> bytes:
        """Return an image as a PNG."""
        file = io.BytesIO()
        Image.fromarray(self.pixels(number).permute(1, 2, 0).numpy()).save(file, "PNG")
        return file.getvalue()

    def fingerprint(self) -> str:
        """Return the words that stand for these images in a checkpoint."""
        return f"synthetic-{self.num_images}-{self.num_classes}"

    def identity(self) -> dict[str, str | None]:
        """Return the form; there are no files."""
        return {**super().identity(), "path": ""}
