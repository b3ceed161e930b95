"""Decode JPEGs on the device: loaders pass on JPEGs in place of pixels."""

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

import collectives
from errors import BadImageError, UserError, require_torchcodec
from loading.decode import decode_plainly
from options import parse_allowed

# Device failures, not bad images: never fall back to another decoder.
_NOT_THE_IMAGE = (torch.OutOfMemoryError, torch.AcceleratorError)


class EncodedCrop(NamedTuple):
    """An image to decode, resize and cut on the device."""

    payload: bytes | bytearray  # a JPEG, whole or some of its rows
    box: tuple[int, int, int, int]  # top, left, height and width of the part to resize, px
    scale: tuple[float, float]  # factors by which the resize scales the box's height and width
    cut: tuple[int, int]  # top and left of the crop in the resized part, px
    size: int  # side of the crop, px
    mode: str  # of the resize, bilinear or bicubic
    is_mirrored: bool = False  # left to right
    number: int = -1  # of the image in its data set


class UndecodableError(Exception):
    """Neither the device nor Pillow can decode an image; the text is Pillow's reason."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


class EncodedBatch:
    """The images of a batch as a loader hands them over: JPEGs, or pixels where only the CPU can decode.

    Args:
        images: crops of one size, encoded or as (3, size, size) uint8 pixels.

    Attributes:
        refused: numbers of the images that the device failed to decode and Pillow decoded instead.
    """

    def __init__(self, images: list[EncodedCrop | Tensor]) -> None:
        self.size = images[0].shape[-1] if isinstance(images[0], Tensor) else images[0].size
        self.crops = [None if isinstance(image, Tensor) else image._replace(payload=b"") for image in images]
        pieces = [_bytes_of(image) for image in images]
        self.lengths = [len(piece) for piece in pieces]
        # No tensor: processes exchange tensors through /dev/shm, which containers keep small.
        self.payload = numpy.concatenate(pieces)
        self.refused = []

    def __len__(self) -> int:
        return len(self.crops)

    def decode(self, device: torch.device) -> Tensor:
        """Decode, resize and cut the images on a device.

        Returns:
            (B, 3, size, size) uint8, in channels-last order, on the device.

        Raises:
            UndecodableError: an image is damaged.
        """
        pieces = torch.from_numpy(self.payload).split(self.lengths)
        encoded = [(piece, crop) for piece, crop in zip(pieces, self.crops, strict=True) if crop is not None]
        self.refused = []
        decoded = iter(_decode_all(encoded, device, self.refused))
        batch = torch.empty((len(self), self.size, self.size, 3), dtype=torch.uint8, device=device)
        for place, piece, crop in zip(batch, pieces, self.crops, strict=True):
            if crop is None:
                place.copy_(piece.view(place.shape), non_blocking=True)
            else:
                place.copy_(_crop(next(decoded), crop).permute(1, 2, 0))
        return batch.permute(0, 3, 1, 2)


def _bytes_of(image: EncodedCrop | Tensor) -> numpy.ndarray:
    if isinstance(image, Tensor):
        return numpy.ascontiguousarray(image.permute(1, 2, 0).numpy()).ravel()
    return numpy.frombuffer(image.payload, numpy.uint8)


def _crop(pixels: Tensor, crop: EncodedCrop) -> Tensor:
    """Resize a box of (3, H, W) uint8 with antialiasing, and return the crop in it, (3, size, size) float32."""
    top, left, height, width = crop.box
    part = pixels[None, :, top : top + height, left : left + width].float()
    # torch resizes uint8 on the CPU only. Like Pillow, resize the width first, and round and clamp after each of the
    # two passes.
    for scale in ((1.0, crop.scale[1]), (crop.scale[0], 1.0)):
        part = F.interpolate(part, scale_factor=scale, mode=crop.mode, antialias=True, align_corners=False)
        part = part.add_(0.5).floor_().clamp_(0, 255)  # a half goes up
    top, left = crop.cut
    part = part[0, :, top : top + crop.size, left : left + crop.size]
    return part.flip(-1) if crop.is_mirrored else part


def _decode_all(encoded: list[tuple[Tensor, EncodedCrop]], device: torch.device, refused: list[int]) -> list[Tensor]:
    """Return the (3, H, W) uint8 pixels of JPEGs on a device, decoded in one call.

    Pillow decodes those that fail there, and their numbers are added to `refused`.
    """
    if not encoded:
        return []
    decode_jpeg = require_torchcodec("--decode-device").decoders.decode_jpeg
    try:
        return decode_jpeg([jpeg for jpeg, _ in encoded], mode="RGB", device=device)
    except _NOT_THE_IMAGE:
        raise
    except RuntimeError:  # an image failed, and the error does not say which
        return [_decode_one(decode_jpeg, jpeg, crop, device, refused) for jpeg, crop in encoded]


def _decode_one(
    decode_jpeg: Callable, jpeg: Tensor, crop: EncodedCrop, device: torch.device, refused: list[int]
) -> Tensor:
    try:
        return decode_jpeg([jpeg], mode="RGB", device=device)[0]
    except _NOT_THE_IMAGE:
        raise
    except RuntimeError:
        refused.append(crop.number)
        try:
            image = decode_plainly(jpeg.numpy().tobytes())
        except BadImageError as error:
            raise UndecodableError(crop.number, str(error)) from error
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).to(device)


def describe(decode_device: str) -> str:
    """Return words for the device's decoder, on which pixels depend; none for the CPU."""
    if decode_device == "cpu":
        return ""
    return f", nvJPEG by torchcodec {require_torchcodec('--decode-device').__version__}"


def find_obstacle(device: torch.device) -> str | None:
    """Try to decode a JPEG on a device; return why it cannot, or None."""
    if device.type != "cuda":
        return f"--device {device.type} decodes none"
    try:
        torchcodec = require_torchcodec("--decode-device cuda")
    except UserError as error:
        return str(error).removeprefix("--decode-device cuda").lstrip(": ")
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (200, 100, 50)).save(file, "JPEG", quality=95)
    try:
        jpeg = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        found = torchcodec.decoders.decode_jpeg([jpeg], mode="RGB", device=device)[0].float().mean((1, 2)).tolist()
    except _NOT_THE_IMAGE:
        raise
    except Exception as error:  # TorchCodec built without CUDA, a driver too old, no nvJPEG ...
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return f"TorchCodec {torchcodec.__version__} cannot use it ({reason[0]})"
    is_right = all(abs(value - expected) < 5 for value, expected in zip(found, (200, 100, 50), strict=True))
    return None if is_right else f"TorchCodec {torchcodec.__version__} decodes a plain image to {found}"


def settle_decode_device(args: Any, device: torch.device, resumed: dict | None = None) -> str:
    """Return where to decode images: on the CPU if the device of any process cannot.

    A run that began to decode on the CPU goes on there, unless `--allow-change decode-device` is given;
    `guard.check_options` refuses to move one that began on the device. Collective: every rank must call it.
    """
    if args.decode_device == "cpu":
        return "cpu"
    there = args.decode_device if resumed is None else resumed["args"].get("decode_device", "cpu")
    if there == "cpu" and "decode_device" not in parse_allowed(args.allow_change):
        print("--decode-device cpu: as in the checkpoint")
        return "cpu"
    obstacles = [obstacle for obstacle in collectives.gather_plain(find_obstacle(device)) if obstacle is not None]
    if not obstacles:
        return args.decode_device
    print(f"--decode-device {args.decode_device}: {obstacles[0]}; images are decoded on the CPU, by {args.decoder}")
    return "cpu"
