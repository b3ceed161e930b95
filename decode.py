"""JPEG bytes to the pixels of one box, decoding no further down than the box reaches."""

import io
from typing import NamedTuple

import numpy
import torch
from PIL import Image
from torch import Tensor

# Start-of-frame markers of the kinds of JPEG that libjpeg decodes row by row: baseline, extended and progressive.
_FRAME_MARKERS = {0xC0, 0xC1, 0xC2}


class Frame(NamedTuple):
    """What a JPEG's start-of-frame segment says, and where it stands in the file."""

    place: int
    height: int
    width: int
    block_rows: int
    num_components: int


def read_frame(payload: bytes) -> Frame | None:
    """Return the frame of a JPEG, or None where the file is another or an unusual one."""
    if payload[:2] != b"\xff\xd8":
        return None
    place = 2
    while place + 19 < len(payload) and payload[place] == 0xFF:
        marker = payload[place + 1]
        if marker in _FRAME_MARKERS:
            num_components = payload[place + 9]
            samplings = payload[place + 11 : place + 11 + 3 * num_components : 3]
            return Frame(
                place,
                int.from_bytes(payload[place + 5 : place + 7], "big"),
                int.from_bytes(payload[place + 7 : place + 9], "big"),
                8 * max((sampling & 15 for sampling in samplings), default=1),
                num_components,
            )
        place += 2 + int.from_bytes(payload[place + 2 : place + 4], "big")
    return None


def shorten(payload: bytes, frame: Frame, num_rows: int) -> bytes:
    """Return a JPEG that ends, by its header, after the first `num_rows` rows, so that a decoder stops there.

    The header's height is set to the end of the row of blocks below the one that is needed, since smooth chroma
    upsampling looks one row ahead; no pixel of the rows asked for changes (docs/research/LOADING.md, 8).
    """
    rows = (-(-num_rows // frame.block_rows) + 1) * frame.block_rows
    if rows >= frame.height:
        return payload
    return payload[: frame.place + 5] + rows.to_bytes(2, "big") + payload[frame.place + 7 :]


class ImageFile:
    """An image in memory of which the size is known and nothing is decoded yet.

    Args:
        payload: the file's bytes.
    """

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.frame = read_frame(payload)
        # Four components are CMYK, which Pillow converts as a whole.
        if self.frame is not None and self.frame.num_components in (1, 3) and self.frame.height:
            self.size = (self.frame.width, self.frame.height)
        else:
            self.frame = None
            self.size = Image.open(io.BytesIO(payload)).size

    def decode(self, top: int, left: int, height: int, width: int) -> Tensor:
        """Decode a box, px.

        Returns:
            (3, height, width) uint8, a channels-last view, with exactly Pillow's pixels.
        """
        payload = self.payload if self.frame is None else shorten(self.payload, self.frame, top + height)
        image = Image.open(io.BytesIO(payload))
        if (width, height) != image.size:
            image = image.crop((left, top, left + width, top + height))
        if image.mode != "RGB":
            image = image.convert("RGB")
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)
