"""The files that describe a pack: its manifest, and the index of each split for readers behind an address."""

import gzip
import json
import re
import zlib
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy

from errors import UserError
from files import open_to_read

# The manifest that scripts/pack.py writes next to its shards, and the values by which it is recognised.
PACK_MANIFEST, PACK_KIND, PACK_FORMAT = "manifest.json", "touchstone pack", 1

# More than the manifest of any pack has: some hundred bytes for each shard, and for each image that was left out.
_MANIFEST_BYTES = 1 << 26

# The first line of an index is JSON with this format; the arrays of `COLUMNS` follow, in their order.
FORMAT = "touchstone pack index 1"
COLUMNS = {"labels": "<i4", "shards": "<i4", "offsets": "<i8", "sizes": "<i4", "crcs": "<u4"}

# Bytes of an image in the columns.
_ROW_BYTES = sum(numpy.dtype(kind).itemsize for kind in COLUMNS.values())

# Most bytes of an index, of its first line, and unpacked (ImageNet-21k's would have 170, 0.5 and 770 MB).
MAX_INDEX_BYTES, MAX_HEAD_BYTES, MAX_UNPACKED_BYTES = 1 << 28, 1 << 24, 1 << 30


def read_manifest(path: Path) -> dict | None:
    """Return the manifest of a pack; None if there is none, or it is another tool's. UserError if it cannot be read."""
    try:
        with open_to_read(path) as file:
            return parse_manifest(file.read(_MANIFEST_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def parse_manifest(content: bytes) -> dict | None:
    """Return the manifest of a pack from the bytes of its file; None if they are another tool's."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):  # no JSON, or other JSON
        manifest = json.loads(content)
        if manifest["kind"] == PACK_KIND:
            return manifest
    return None


def shard_checksums(name: str, folder: Path) -> dict[str, str]:
    """Return the checksum of each shard of a split, by its name; nothing where the folder is no pack of it.

    UserError if the pack is not finished, or its manifest cannot be read.
    """
    manifest = read_manifest(folder / PACK_MANIFEST) or {}
    try:
        if manifest["format"] != PACK_FORMAT:
            return {}
        state = manifest["state"]
        checksums = {str(record["file"]): str(record["sha256"]) for record in manifest["splits"][name]["shards"]}
    except (KeyError, TypeError):
        return {}
    if state != "complete":
        remedy = "run its scripts.pack command again to resume it"
        raise UserError(f"{folder} is a pack that is still being written, or was interrupted; {remedy}")
    return checksums


def index_name(split: str) -> str:
    """Return the name of a split's index in a pack."""
    return f"{split}.index.gz"


def encode_index(metadata: dict[str, Any], names: numpy.ndarray, columns: dict[str, numpy.ndarray]) -> bytes:
    """Return an index: metadata of the split, (images,) names as bytes, and the (images,) columns of `COLUMNS`."""
    head = {"format": FORMAT, "images": len(names), "width": names.dtype.itemsize, **metadata}
    parts = [columns[name].astype(kind).tobytes() for name, kind in COLUMNS.items()]
    content = b"".join([json.dumps(head).encode(), b"\n", names.tobytes(), *parts])
    # Without a time in its header: the same pack has the same index, whose hash names the cache.
    return gzip.compress(content, compresslevel=6, mtime=0)


def decode_index(content: bytes, where: str) -> tuple[dict[str, Any], numpy.ndarray, dict[str, numpy.ndarray]]:
    """Return the arguments of `encode_index`; UserError if the content is no such index. `where` names it."""
    try:
        # Its output has a limit, and that of `gzip.decompress` none: a file of 1 MB can unpack to 1 GB.
        unpacker = zlib.decompressobj(31)
        head, _, body = unpacker.decompress(content, MAX_HEAD_BYTES).partition(b"\n")
        metadata = json.loads(head)
        if metadata["format"] != FORMAT:
            raise ValueError(f"format {metadata['format']!r:.40}, expected {FORMAT!r}")
        number, width = metadata["images"], metadata["width"]
        if not (type(number) is type(width) is int and min(number, width) > 0):
            raise ValueError("it has no valid number of images")
        length = number * (width + _ROW_BYTES)
        num_left = max(min(length, MAX_UNPACKED_BYTES) - len(body), 0)
        # One byte more than there may be, so that a longer one is noticed.
        body += unpacker.decompress(unpacker.unconsumed_tail, num_left + 1)
        if len(body) != length or not unpacker.eof or unpacker.unused_data:
            raise ValueError("its length is wrong")
        names = numpy.frombuffer(body, f"S{width}", number)
        columns = {}
        start = number * width
        for name, kind in COLUMNS.items():
            columns[name] = numpy.frombuffer(body, kind, number, start)
            start += columns[name].nbytes
        if not metadata.get("labels") and metadata["classes"] != sorted(metadata["classes"]):
            raise ValueError("its classes are not in order")
        _check_columns(metadata["classes"], metadata["shards"], columns)
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, zlib.error) as error:
        raise UserError(f"{where} is no index of this version ({error}); pack again: python -m scripts.pack") from error
    return metadata, names, columns


def _check_columns(classes: list[str], files: list[dict], columns: dict[str, numpy.ndarray]) -> None:
    """Raise an error, such as ValueError, unless an index's classes and shards are some, and every image is of one."""
    texts = [*classes, *(each["sha256"] for each in files)]
    lengths = [each["bytes"] for each in files]
    is_typed = {*map(type, texts)} == {str} and {*map(type, lengths)} == {int}
    if not is_typed or len(classes) != len({*classes}):
        raise ValueError("it has no valid classes or shards")
    # Names become parts of addresses, and 2**60 bytes leave room in the sums of 64 bits.
    has_names = all(re.fullmatch(r"[\w.-]+", each["file"]) for each in files)
    if not has_names or not 0 < min(lengths) <= sum(lengths) < 1 << 60:
        raise ValueError("its shards have no valid names or sizes")
    labels, shards, offsets, sizes, _ = columns.values()
    is_known = min(map(numpy.min, columns.values())) >= 0 and labels.max() < len(classes) and shards.max() < len(files)
    if not is_known or (offsets > numpy.array(lengths)[shards] - sizes).any():
        raise ValueError("an image has no valid class or shard")


def decode_label_sets(folders: dict[str, list[str]], classes: list[str]) -> numpy.ndarray:
    """Return the `Source.label_sets` of a pack, a row for each folder; ValueError or TypeError if they are none."""
    is_known = {*chain(*folders.values())} <= {*classes}
    are_names = len({*classes}) == len(classes) and {*map(type, classes)} == {str}
    if not is_known or not are_names:
        raise ValueError("it has no valid classes and labels")
    return numpy.array([[name in labels for name in classes] for labels in folders.values()], dtype=bool)
