"""JPEG bytes to the pixels of one box, decoding no further down than the box reaches."""

import io

import numpy
import torch
from PIL import Image
from torch import Tensor

# Start-of-frame markers of the kinds of JPEG that libjpeg decodes row by row: baseline, extended and progressive.
_FRAME_MARKERS = {0xC0, 0xC1, 0xC2}


def open_image(payload: bytes) -> Image.Image:
    """Open an image and read its header only: format, size and mode."""
    return Image.open(io.BytesIO(payload))


def shorten(payload: bytes, num_rows: int) -> bytes:
    """Return a JPEG that ends, by its header, after the first `num_rows` rows, so that a decoder stops there.

    The header's height is set to the end of the row of blocks below the one that is needed, since smooth chroma
    upsampling looks one row ahead; no pixel of the rows asked for changes (docs/research/LOADING.md, 8).

    Returns:
        `payload` itself, where nothing can be saved or the file is unusual.
    """
    place = 2
    while place + 9 < len(payload) and payload[place] == 0xFF:
        marker, length = payload[place + 1], int.from_bytes(payload[place + 2 : place + 4], "big")
        if marker in _FRAME_MARKERS:
            height, num_components = int.from_bytes(payload[place + 5 : place + 7], "big"), payload[place + 9]
            samplings = payload[place + 11 : place + 11 + 3 * num_components : 3]
            block_rows = 8 * max((sampling & 15 for sampling in samplings), default=1)
            rows = (-(-num_rows // block_rows) + 1) * block_rows
            if rows >= height:
                return payload
            return payload[: place + 5] + rows.to_bytes(2, "big") + payload[place + 7 :]
        place += 2 + length
    return payload


def decode_box(payload: bytes, image: Image.Image, box: tuple[int, int, int, int]) -> Tensor:
    """Decode a box of an image.

    Args:
        payload: the file's bytes.
        image: what `open_image` returned for them.
        box: top, left, height and width, px.

    Returns:
        (3, height, width) uint8, a channels-last view, with exactly Pillow's pixels.
    """
    top, left, height, width = box
    if image.format == "JPEG" and image.mode in ("RGB", "L"):
        shorter = shorten(payload, top + height)
        image = image if shorter is payload else open_image(shorter)
    box_image = image.crop((left, top, left + width, top + height)).convert("RGB")
    return torch.from_numpy(numpy.array(box_image)).permute(2, 0, 1)
