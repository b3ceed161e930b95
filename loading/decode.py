"""Decode a box of a JPEG, and no more rows than the box needs."""

import contextlib
import io
import mmap
import re
import struct
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy
import torch
from PIL import Image, TiffImagePlugin, UnidentifiedImageError, WebPImagePlugin
from torch import Tensor

from errors import BadImageError

# The formats that ImageFolder's extensions stand for. Pillow reads others too, and starts Ghostscript for one of them.
FORMATS = ("JPEG", "PNG", "BMP", "PPM", "TIFF", "WEBP")
_PLUGINS = (TiffImagePlugin, WebPImagePlugin)  # imported here, or Pillow would import all its plugins for these two

# Pillow's modes of images by their numbers of channels: grey, colour, colour with alpha.
MODES = {1: "L", 3: "RGB", 4: "RGBA"}

# Pillow warns of larger images; as RGB they take a quarter of a GiB. Photographs have a tenth of these pixels.
MAX_PIXELS = (1 << 28) // 3

# Memory of a decoder for each pixel, besides the image: coefficients of a progressive JPEG, two canvases of a WebP ...
_BYTES_PER_PIXEL, _BYTES_OF_DECODER = 16, 1 << 24

# SampleFormat of TIFF, but for unsigned numbers and undefined ones.
_SAMPLE_KINDS = {2: "signed", 3: "floating-point", 5: "complex", 6: "complex"}

# Markers of a JPEG. Those of a frame say how it is coded: baseline to progressive are decoded here, other kinds by
# `decode_plainly`, as are files with segments other than the skipped ones.
_BASELINE, _PROGRESSIVE, _START_OF_SCAN = 0xC0, 0xC2, 0xDA
_SKIPPED = {0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)}  # tables, restart interval, comment, applications' segments
_END_OF_IMAGE = b"\xff\xd9"


class Frame(NamedTuple):
    """The header of a JPEG: its fields and their positions in the file; lengths are in pixels."""

    position: int  # of the start-of-frame segment in the file
    height: int
    width: int
    block_rows: int  # rows of pixels in a row of blocks, which is decoded as a whole
    # Rows of pixels below a pixel that it may depend on: one where chroma is smoothed vertically, and two rows of
    # blocks in a progressive file, since libjpeg smooths blocks whose coefficients are not complete.
    margin: int
    num_components: int  # 1 grey, 3 colour; Pillow converts the 4 of CMYK as a whole


def read_frame(payload: bytes) -> Frame | None:
    """Return the frame of a JPEG; None if the file is no JPEG, an unusual one, or truncated."""
    if payload[:2] != b"\xff\xd8":
        return None
    position, start_of_frame = 2, 0
    while position + 4 <= len(payload) and payload[position] == 0xFF:
        marker = payload[position + 1]
        if marker == _START_OF_SCAN:
            return _frame(payload, start_of_frame, position) if start_of_frame else None
        if _BASELINE <= marker <= _PROGRESSIVE and not start_of_frame:
            start_of_frame = position
        elif marker not in _SKIPPED:
            return None
        position += 2 + (payload[position + 2] << 8 | payload[position + 3])
    return None


def _frame(payload: bytes, position: int, scan: int) -> Frame | None:
    # Whether a truncated file can be read must not depend on the rows that are wanted, so Pillow decodes it. Coded rows
    # never hold the end marker, though a thumbnail in a header does, and other bytes may follow it. A scan's header has
    # ten bytes at least, so a marker behind them means that the file holds both headers whole.
    if payload.rfind(_END_OF_IMAGE, scan + 10) < 0:
        return None
    precision, height, width, num_components = struct.unpack_from(">BHHB", payload, position + 4)
    samplings = payload[position + 11 : position + 11 + 3 * num_components : 3]
    down = max((value & 15 for value in samplings), default=0)
    is_usual = precision == 8 and num_components in (1, 3)
    if not is_usual or not (height and width and down and all(value >> 4 for value in samplings)):
        return None
    is_progressive = payload[position + 1] == _PROGRESSIVE
    margin = int(down > 1) + 16 * down * int(is_progressive)
    return Frame(position, height, width, 8 * down, margin, num_components)


def shorten(payload: bytes, frame: Frame, bottom: int) -> tuple[bytes | bytearray, Frame]:
    """Return a JPEG that ends, by its header, soon after row `bottom`, so that a decoder stops there; and its frame.

    No pixel above `bottom` changes: compared on 300 photographs.
    """
    rows = -(-(bottom + frame.margin) // frame.block_rows) * frame.block_rows
    if rows >= frame.height:
        return payload, frame
    shorter = bytearray(payload)
    shorter[frame.position + 5 : frame.position + 7] = rows.to_bytes(2, "big")
    return shorter, frame._replace(height=rows)


def check_num_pixels(height: int, width: int, claim: str = "it claims") -> None:
    """Raise BadImageError if an image, or a resized one, has more than `MAX_PIXELS`."""
    if height * width > MAX_PIXELS:
        raise BadImageError(f"{claim} {width} x {height} pixels; at most {MAX_PIXELS:,} are decoded")


def resized_size(height: int, width: int, shorter: int) -> tuple[int, int]:
    """Return torchvision's size of a resized image, the longer side rounded down; BadImageError if too large."""
    longer = int(shorter * max(width, height) / min(width, height))
    resized = (longer, shorter) if height >= width else (shorter, longer)
    check_num_pixels(*resized, f"resized, {width} x {height} pixels are")
    return resized


@contextlib.contextmanager
def _blaming_bytes(num_pixels: int) -> Iterator[None]:
    """Turn any error of decoding into a BadImageError, unless the system may have failed; hide Pillow's warnings.

    Pillow reports damage by OSError, SyntaxError, ValueError, struct.error and others. It warns of metadata that is
    not read here: damaged EXIF data, transparency.

    Raises:
        BadImageError: the image is damaged.
        MemoryError: memory is short. Some decoders report a broken stream instead, so this tries to allocate it.
        OSError: the system failed: the error has a number, unlike those that report damage.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (BadImageError, MemoryError):
        raise
    except Exception as error:
        if getattr(error, "errno", None) is not None:
            raise
        _check_memory(num_pixels)
        raise BadImageError(" ".join(str(error).split()) or type(error).__name__) from error


def _check_memory(num_pixels: int) -> None:
    """Raise MemoryError where there is no room to decode an image."""
    try:
        mmap.mmap(-1, _BYTES_OF_DECODER + _BYTES_PER_PIXEL * num_pixels, mmap.MAP_PRIVATE).close()
    except OSError as error:
        raise MemoryError from error


def open_image(payload: bytes) -> Image.Image:
    """Return an image of which only the header has been read.

    Raises:
        BadImageError: the image is of none of `FORMATS`, claims too many pixels, or has a damaged header.
        MemoryError: memory is short.
    """
    with _blaming_bytes(MAX_PIXELS):
        try:
            image = Image.open(io.BytesIO(payload), formats=FORMATS)
        except UnidentifiedImageError as error:  # its text names only an object in memory
            known = "it is not a valid BMP, JPEG, PNG, PPM, TIFF or WebP"
            reason = f"{known}; it begins with {payload[:16]!r}" if payload else "the file is empty"
            raise BadImageError(reason) from error
        except Image.DecompressionBombError as error:  # its text names another limit
            raise BadImageError(f"it claims far more than {MAX_PIXELS:,} pixels, the most that are decoded") from error
    check_num_pixels(image.height, image.width)
    if image.format == "TIFF":
        sides = (image.tag_v2.get(tag, 0) for tag in (TiffImagePlugin.TILELENGTH, TiffImagePlugin.TILEWIDTH))
        check_num_pixels(*sides, "it claims tiles of")  # tiles are decoded whole, however small the image is
    with _blaming_bytes(0):
        grey_bits(image)
    return image


def grey_bits(image: Image.Image) -> int:
    """Return the bits of a grey image's samples if they are more than 8, else 0.

    Raises:
        BadImageError: no rule says which sample is white, or Pillow reads the file wrong.
    """
    bits, kinds, is_in_planes = 16, (1,), False
    if image.format == "TIFF":
        bits = max(numpy.atleast_1d(image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, 1)))
        kinds = numpy.atleast_1d(image.tag_v2.get(TiffImagePlugin.SAMPLEFORMAT, 1))
        is_in_planes = image.tag_v2.get(TiffImagePlugin.PLANAR_CONFIGURATION) == 2
    if any(kind in _SAMPLE_KINDS for kind in kinds):
        reason = f"{_SAMPLE_KINDS[max(kinds)]} samples"
    elif is_in_planes and bits > 8:
        reason = f"channels of {bits} bits in planes"
    elif image.mode == "F" or (image.mode == "I" and bits != 16):
        reason = "samples of 32 bits"
    else:
        return int(bits) if image.mode.startswith("I") else 0
    why = "which cannot be scaled to 8 bits without guessing its white level; save it as an 8- or 16-bit PNG"
    raise BadImageError(f"it has {reason} (Pillow's mode {image.mode}), {why}")


def load_image(payload: bytes) -> Image.Image:
    """Return an image, decoded whole, with 8 bits a channel; raises as `open_image`, or BadImageError on damage.

    Of grey samples with more bits it keeps the highest 8, as Pillow does with those of colours; `convert` would clip
    them at 255. `info["bits"]` tells their number, or is 0 where they are not more.
    """
    image = open_image(payload)
    bits = 16 if re.search(";16[BLN]|'RGB', 65535", str(image.tile)) else 0  # of colours, too
    with _blaming_bytes(image.width * image.height):
        image.load()
        image.info["bits"] = bits = grey_bits(image) or bits
        return _scale_grey(image, bits) if image.mode[0] == "I" else image


def unused_range(source: Any) -> str:
    """Return a warning if the images of more than 8 bits, of 16 looked at, use at most a quarter of their range."""
    numbers, ends = numpy.linspace(0, len(source) - 1, 16, dtype=int).tolist(), []
    for number in numbers if "://" not in source.where else ():  # a pack has 8 bits
        with contextlib.suppress(Exception):  # whoever needs the image names it
            if not source.name(number).lower().endswith((".jpg", ".jpeg")):
                image = load_image(source.read(number))
                ends += sum(to_mode(image).getextrema(), ()) if image.info["bits"] else ()
    low, high = min(ends, default=0), max(ends, default=255)
    share = f"{(high - low + 1) / 256:.0%} of their range: loaded, their pixels are {low} to {high} of 255"
    return f"samples with more than 8 bits use {share}; scale 12-bit samples to 16 bits" if high - low <= 64 else ""


def _scale_grey(image: Image.Image, bits: int) -> Image.Image:
    samples = numpy.asarray(image) >> (bits - 8)
    # Pillow inverts samples of 8 bits itself.
    is_white_zero = image.format == "TIFF" and image.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0
    scaled = Image.fromarray((255 - samples if is_white_zero else samples).astype(numpy.uint8))
    scaled.format, scaled.info = image.format, image.info
    return scaled


def to_mode(image: Image.Image, mode: str = "RGB") -> Image.Image:
    """Return an image of `load_image` in a mode of `MODES`: by default in RGB, as torchvision's loader does.

    Only RGBA keeps its transparency.
    """
    if mode != "RGBA":
        image.info.pop("transparency", None)  # it changes no colour, and `convert` would warn
    if image.mode == "LAB":  # Pillow has no other way to grey
        image = image.convert("RGB")
    return image.convert(mode)


def decode_plainly(
    payload: bytes, box: tuple[int, int, int, int] | None = None, mode: str = "RGB", image: Image.Image | None = None
) -> Image.Image:
    """Decode any image with Pillow and return it, or a box of it, in a mode of `MODES`, as `to_mode`.

    The box is left, top, right, bottom, px. `image` is the result of `load_image`, if it is there already. Raises as
    `load_image`.
    """
    image = image or load_image(payload)
    with _blaming_bytes(image.width * image.height):
        is_keyed = image.format == "PNG" and image.mode in ("L", "RGB") and "transparency" in image.info
        if mode == "RGBA" and is_keyed and payload[24] != 8:  # the bits of a sample
            remedy = "save it as an 8-bit PNG or with an alpha channel"
            raise BadImageError(
                f"its transparent colour has {payload[24]} bits per channel, but only 8 are supported; {remedy}"
            )
        if box is not None and box != (0, 0, *image.size):
            image = image.crop(box)
        return to_mode(image, mode)


def _as_tensor(image: Image.Image) -> Tensor:
    """Return an image as (channels, height, width) uint8, a view of channels-last pixels."""
    pixels = torch.from_numpy(numpy.array(image))
    return pixels.permute(2, 0, 1) if pixels.ndim == 3 else pixels[None]


class ImageFile:
    """An image in memory with a known size, not decoded yet; raises as `open_image`."""

    def __init__(self, payload: bytes) -> None:
        self.payload, self.frame = payload, read_frame(payload)
        if self.frame is None:
            self.size = open_image(payload).size
        else:
            check_num_pixels(self.frame.height, self.frame.width)
            self.size = (self.frame.width, self.frame.height)

    def decode(self, top: int, left: int, height: int, width: int, mode: str = "RGB") -> Tensor:
        """Decode a box, px, in a mode of `MODES`; raises as `load_image`.

        Returns:
            (channels, height, width) uint8, a view of channels-last pixels: the same as if the whole file were decoded.
        """
        box = (left, top, left + width, top + height)
        if self.frame is not None:
            payload, frame = shorten(self.payload, self.frame, top + height)
            own = "RGB" if frame.num_components == 3 else "L"
            try:
                # Call Pillow's decoder directly: `Image.open` would parse the header again.
                image = Image.frombytes(own, (frame.width, frame.height), payload, "jpeg", own, "")
                if box != (0, 0, *image.size):
                    image = image.crop(box)
                return _as_tensor(image if mode == own else image.convert(mode))
            except (OSError, ValueError):
                # The file is damaged: Pillow tells how, or decodes as much as it can.
                _check_memory(self.size[0] * self.size[1])
        return _as_tensor(decode_plainly(self.payload, box, mode))
