"""What a header says is bounded and blamed on the file, by every reader of images; Pillow by itself is the oracle."""

import os
import random
import re
import resource
import signal
import struct
import traceback
import warnings
from argparse import Namespace
from pathlib import Path

import numpy
import pytest
from PIL import Image

from errors import BadImageError, ImageError, is_printable
from loading import decode
from loading.decode import Decoding, ImageFile, can_read_heic
from scripts import check, pack, predict
from tests.fuzz import scramble
from tests.images import FILES, ROTATED, encoded, picture
from tests.ranks import run_ranks

TIFFS = [encoded(picture(32, 32, mode), "TIFF", compression=kind) for mode, kind in [
    ("RGB", None), ("L", None), ("I;16", None), ("RGB", "tiff_adobe_deflate"), ("L", "tiff_lzw"), ("RGB", "jpeg"),
    ("1", "group4"), ("RGB", "packbits"),
]]  # fmt: skip
# Those that Pillow or libtiff compute with; TileWidth and TileLength, by which a picture is in tiles, most often.
TAGS = [256, 257, 258, 259, 262, 266, 273, 274, 277, 278, 279, 284, 317, 320, 330, 338, 339, 347, 530, 34665, 34675]
TAGS += [322, 323, 324, 325] * 3
WIDTHS = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 99: 4}  # of types
NUMBERS = [0, 1, 8, 32, 256, 9000, 50_000_000, (1 << 31) - 1, (1 << 32) - 1]
VALUES = [struct.pack("<d", float("nan")), *(struct.pack("<Q", number * ((1 << 32) + 1)) for number in NUMBERS)]


def odd_tiff(rng):
    """Return a TIFF with entries of any type, number and value, perhaps in tiles."""
    payload = rng.choice(TIFFS)
    place = struct.unpack_from("<I", payload, 4)[0]
    entries = [payload[at : at + 12] for at in range(place + 2, place + 2 + 12 * payload[place], 12)]
    found = {struct.unpack_from("<H", entry)[0]: entry[2:] for entry in entries}
    if rng.random() < 0.5:
        del found[278]
        found |= {324: found.pop(273), 325: found.pop(279), **dict.fromkeys((322, 323), struct.pack("<HII", 4, 1, 32))}
    for tag in rng.choices(TAGS, k=rng.choice([1, 1, 2])):
        kind, count = rng.choice(list(WIDTHS)), rng.choice([1, 1, 1, 2, 3, 100, 0])
        value = (rng.choice(VALUES) * 100)[: count * WIDTHS[kind]]
        payload += value if len(value) > 4 else b""
        value = value.ljust(4, b"\0") if len(value) < 5 else struct.pack("<I", len(payload) - len(value))
        found[tag] = struct.pack("<HI", kind, rng.choice([count] * 9 + [50_000_000])) + value
    entries = b"".join(struct.pack("<H", tag) + rest for tag, rest in sorted(found.items()))
    return payload[:4] + struct.pack("<I", len(payload)) + payload[8:] + bytes([len(found), 0]) + entries + bytes(4)


JPEGS = [FILES[kind] for kind in ("4:2:0", "progressive", "grey", "EXIF", "MPO")]
SEGMENTS = [  # those that Pillow reads, and some of libjpeg's
    (0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0"), (0xE0, b"JFXX\0\x10"), (0xE1, b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0"),
    (0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>"), (0xE2, b"FPXR\0\0"), (0xE2, b"ICC_PROFILE\0\1\1a profile"),
    (0xE2, b"MPF\0II*\0\x08\0\0\0\1\0\1\xb0\4\0\1\0\0\0\2"), (0xE2, b"MPF\0MM\0*\0\0\0\x08\0\2\xb0\1"),
    (0xED, b"Photoshop 3.0\x008BIM\x03\xed\0\0\0\0\0\x108BIM"), (0xEE, b"Adobe\0d\0\0\0\0\1"), (0xFE, b"x" * 99),
    *((marker, bytes(70)) for marker in (0xDB, 0xC4, 0xDD, 0xCC, 0xC0, 0xC2, 0xE7, 0x01)),
]  # fmt: skip


def odd_jpeg(rng):
    """Return a JPEG with segments cut, added, in place of others, or of another length than they say."""
    payload, parts, at = rng.choice(JPEGS), [], 2
    while payload[at + 1] != 0xDA:
        end = at + 2 + struct.unpack_from(">H", payload, at + 2)[0]
        parts.append((payload[at + 1], payload[at + 4 : end], end - at - 2))
        at = end
    for _ in range(rng.choice([1, 1, 2])):
        place = rng.randrange(len(parts))
        marker, content, *_ = rng.choice([*SEGMENTS, parts[place], parts[place]])
        content = content[: rng.randrange(len(content) + 1)]
        length = rng.choice([0, 1, 2, 3, 8, 65535]) if rng.random() < 0.1 else len(content) + 2
        parts[place : place + rng.choice([0, 1])] = [(marker, content, length)]
    head = b"".join(struct.pack(">BBH", 255, marker, length) + content for marker, content, length in parts)
    return payload[:2] + head + payload[at:]


# Formats that are read, three times as often as others that Pillow opens.
KINDS = ["PNG", "WEBP", "AVIF", "HEIF", "BMP", "PPM"] * 3
KINDS += ["GIF", "TGA", "ICO", "PCX", "DDS", "SGI", "JPEG2000", "EPS"]


def odd_other(rng):
    """Return a file of another format whose first bytes, or the boxes in which a HEIF has sizes, say something else."""
    kind = rng.choice([kind for kind in KINDS if kind != "HEIF" or can_read_heic()])
    image = picture(64, 48, rng.choice(["RGB", "RGBA", "L"]) if kind in ("PNG", "WEBP", "AVIF") else "RGB")
    image = image.quantize(16) if kind in ("PNG", "BMP") and rng.random() < 0.3 else image
    payload = encoded(image, kind, **({"exif": ROTATED.tobytes()} if kind in KINDS[:4] and rng.random() < 0.3 else {}))
    boxes = [box for box in (b"ispe", b"clap") if box in payload]
    if not boxes or rng.random() < 0.4:
        return scramble(payload, rng, head=rng.choice([30, 100, 300]))
    at = payload.index(rng.choice(boxes)) + rng.choice([4, 8, 12])
    return payload[:at] + struct.pack(">I", rng.choice([1, 32, 256, 1000])) + payload[at + 4 :]


def whole(payload, *how):
    file = ImageFile(payload, Decoding(*how))
    return file.decode(0, 0, *file.size[::-1])


OPTIONS = Namespace(val_resize_size=None, grey_range=None, statistics=None, short_side=16)


def checked(source):
    found = check.inspect_images({"train": source, "val": None}, OPTIONS, [("train", 0)])[0].findings
    assert "unreadable" not in dict(found), found
    if "damaged" in dict(found):
        raise BadImageError(found[0][1])


# Each reads a source of one image, which is also in a file.
READERS = {
    "train": lambda source: whole(source.payload), "predict": lambda _: predict.open_image(Path("image")),
    "--exif": lambda source: whole(source.payload, "RGB", True), "check": checked,
    "--in-chans 4": lambda source: whole(source.payload, "RGBA"),
    "pack": lambda source: pack.pack_images(OPTIONS, (source, [0])),
}  # fmt: skip


def judge(payload):
    """Return why the readers of an image are wrong, or an empty text."""
    results, reason = {}, ""
    Path("image").write_bytes(payload)
    for name, read in READERS.items():
        try:
            results[name] = read(Namespace(payload=payload, read=lambda _: payload, path=str))
        except (BadImageError, ImageError) as error:
            reason = str(error)
    if 0 < len(results) < len(READERS) or not is_printable(reason):
        return f"read by {list(results)} alone: {reason!r}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open("image", formats=[*decode.FORMATS, *["HEIF"] * can_read_heic()])
            expected = numpy.asarray(image.convert("RGB")).transpose(2, 0, 1)
    except Exception as error:
        return "" if not results else f"Pillow does not read it: {error!r}"
    if not results:  # what Pillow guesses or pads, or reads at any size
        return "" if re.search("sample|planes|its tiles|holds|89,478,485", reason) else f"Pillow reads it: {reason}"
    return "" if image.mode[0] in "IF" or numpy.array_equal(results["train"], expected) else f"other pixels: {image}"


def sweep(make, numbers, folder):
    """Judge generated files, within 3 GiB and a minute each, and print why any is wrong."""
    os.chdir(folder)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (3 << 30),) * 2)
    warnings.simplefilter("error")  # they reach the terminal of whoever reads the image
    for number in numbers:
        signal.alarm(60)
        try:
            if wrong := judge(make(random.Random(number))):
                print(f"wrong: {number}: {wrong}")
        except BaseException as error:
            print(f"wrong: {number}: {error!r:.200}, {traceback.extract_tb(error.__traceback__)[-1]}")
    print("done")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads its size from /proc")
@pytest.mark.parametrize("make", [odd_tiff, odd_jpeg, odd_other])
def test_a_header_is_read_by_all_as_pillow_reads_it_or_refused_by_all(make, tmp_path):
    output = run_ranks(sweep, 1, make, range(250), tmp_path, log_folder=tmp_path, timeout_s=600).check().output
    assert [line for line in output.splitlines() if line.startswith("wrong")] == []
    assert output.endswith("done\n")
