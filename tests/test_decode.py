"""Reading images: Pillow's pixels of a box, whatever the file, and its errors, whatever a header says."""

import io
import os
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import traceback
import warnings
import zlib
from argparse import Namespace
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode

from errors import BadImageError, ImageError, is_printable
from loading import decode
from loading.decode import Decoding, ImageFile, read_frame, shorten
from loading.heic import can_read_heic
from presets import ClassificationPresetEval, ClassificationPresetTrain
from scripts import check, pack, predict
from tests.fuzz import scramble
from tests.images import FILES, ROTATED, encoded, picture
from tests.ranks import REPOSITORY, run_ranks


@pytest.fixture(params=["pillow", "torchcodec"])
def decoder(request, monkeypatch):
    if request.param == "torchcodec":
        monkeypatch.setattr(decode, "_jpeg_decoder", pytest.importorskip("torchcodec.decoders").decode_jpeg)


by_both = pytest.mark.usefixtures("decoder")


def plain(payload):
    return torch.from_numpy(numpy.array(Image.open(io.BytesIO(payload)).convert("RGB"))).permute(2, 0, 1)


@by_both
@pytest.mark.parametrize("kind", FILES)
def test_a_box_has_exactly_pillows_pixels(kind):
    payload = FILES[kind]
    whole = plain(payload)
    rng = random.Random(0)
    for _ in range(20):
        height, width = (rng.randint(1, size) for size in whole.shape[1:])
        top, left = (rng.randint(0, size - side) for size, side in zip(whole.shape[1:], (height, width), strict=True))
        found = ImageFile(payload).decode(top, left, height, width)
        assert torch.equal(found, whole[:, top : top + height, left : left + width])


def test_torchcodec_decodes_what_is_a_usual_jpeg(monkeypatch):
    modes = []
    codec = pytest.importorskip("torchcodec.decoders")
    monkeypatch.setattr(
        decode, "_jpeg_decoder", lambda data, mode: modes.append(mode) or codec.decode_jpeg(data, mode=mode)
    )
    for payload in FILES.values():
        ImageFile(payload).decode(0, 0, 1, 1)
    ImageFile(FILES["grey"], Decoding("L")).decode(0, 0, 1, 1)
    usual = "4:2:0", "4:4:4", "4:2:2", "odd size", "progressive", "restart markers", "restart blocks", "EXIF"
    assert modes == ["RGB"] * len([*usual, "comment", "one row", "MPO"]) + ["GRAY"]


def test_a_jpeg_is_decoded_no_further_than_the_box():
    payload = FILES["4:2:0"]
    frame = read_frame(payload)
    assert (frame.height, frame.width, frame.block_rows) == (110, 150, 16)
    for bottom, height in [(20, 32), (31, 32), (32, 48), (33, 48)]:  # of 32, smooth chroma looks at the row below
        shorter, its_frame = shorten(payload, frame, bottom)
        assert its_frame.height == height
        assert Image.open(io.BytesIO(shorter)).size == (150, height)
    assert shorten(payload, frame, 100) == (payload, frame)
    full = FILES["4:4:4"]
    assert [shorten(full, read_frame(full), bottom)[1].height for bottom in (20, 24, 25)] == [24, 24, 32]


@by_both
@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("mode", [InterpolationMode.BILINEAR, InterpolationMode.BICUBIC])
def test_pixels_are_within_one_grey_level_of_pillows(kind, mode):
    # One level of rounding by the resize; bicubic rounds after each of its two passes, and clips.
    largest = 1 + (mode is InterpolationMode.BICUBIC)
    sizes = [(24, 32), (32, 32), (20, 64), (41, 40), (96, 109)]
    sizes = [{"crop_size": crop, "resize_size": size} for crop, size in sizes]
    for seed, size in enumerate([*[{"crop_size": 24, "crop_scale": 0.3, "hflip_prob": 0.7}] * 3, *sizes]):
        build = ClassificationPresetEval if "resize_size" in size else ClassificationPresetTrain
        pixels, draws = [], []
        for backend in (None, "pil"):
            torch.manual_seed(seed)
            pixels.append(build(interpolation=mode, backend=backend, **size).load(FILES[kind]).int())
            draws.append(torch.rand(1))
        assert draws[0] == draws[1]  # as many, so the same box and flip
        assert pixels[0].shape == pixels[1].shape
        difference = (pixels[0] - pixels[1]).abs().float()
        assert difference.max() <= largest
        assert difference.mean() < 0.05


def scans(payload):
    return [place for place in range(len(payload)) if payload[place : place + 2] == b"\xff\xda"]


WITH_THUMBNAIL = Image.Exif()
WITH_THUMBNAIL[0x010E] = encoded(picture(16, 16), "JPEG").decode("latin-1")  # an end of image in the header
ENDING = {kind: FILES[kind] for kind in ("4:2:0", "grey", "progressive", "restart markers", "restart blocks")}
ENDING["thumbnail"] = encoded(picture(), "JPEG", exif=WITH_THUMBNAIL)


@by_both
@pytest.mark.parametrize("kind", ENDING)
def test_a_file_that_is_cut_off_is_pillows_error_whatever_the_box_and_bytes_after_its_end_change_nothing(kind):
    payload = ENDING[kind]
    first = scans(payload)[0]
    # In the middle, in the last rows, within the end, and where all but the end is there.
    for end in [first + 40, (first + len(payload)) // 2, *range(len(payload) - 60, len(payload), 7), -2, -1]:
        with pytest.raises(OSError, match="truncated") as expected:
            plain(payload[:end])
        file = ImageFile(payload[:end])
        width, height = file.size
        for box in [(0, 0, height, width), (0, 0, 1, 1), (0, 3, 20, 20), (40, 0, 30, 30), (height - 5, 0, 5, 5)]:
            with pytest.raises(BadImageError, match="truncated") as found:
                file.decode(*box)
            assert str(found.value) == str(expected.value)
    for trailing in (b"\0" * 500, b"\n", b"more\xff\xd3\xff\xd9 and more"):
        assert read_frame(payload + trailing)
        assert torch.equal(ImageFile(payload + trailing).decode(5, 5, 20, 20), plain(payload)[:, 5:25, 5:25])


@by_both
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_progressive_files_that_lack_scans_are_smoothed_as_in_the_whole(subsampling):
    payload = encoded(picture(64, 160), "JPEG", progressive=True, quality=30, subsampling=subsampling)
    num_different = 0
    for end in scans(payload)[1:]:
        partial = payload[:end] + b"\xff\xd9"
        whole = plain(partial)
        num_different += not torch.equal(whole, plain(payload))
        for bottom in range(1, 160, 3):
            assert torch.equal(ImageFile(partial).decode(0, 0, bottom, 64), whole[:, :bottom])
    assert num_different > 3


def tiled(width, height):
    """Return a TIFF of 146 bytes for whose tiles Pillow would take up to 859 MiB."""
    end, body = 8 + 2 + 12 * 10 + 4, zlib.compress(bytes(100))
    tags = [(256, 10), (257, 10), (258, 8), (259, 8), (262, 1), (277, 1)]
    tags += [(322, width), (323, height), (324, end), (325, len(body))]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + bytes(4) + body


def claiming(width, height):
    jpeg = encoded(picture(16, 16), "JPEG")
    place = jpeg.index(b"\xff\xc0") + 5
    jpeg = jpeg[:place] + struct.pack(">HH", height, width) + jpeg[place + 4 :]
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    bmp, tiff = encoded(picture(16, 16), "BMP"), encoded(picture(16, 16), "TIFF")
    for tag, side in ((256, width), (257, height)):
        place = tiff.index(struct.pack("<HHI", tag, 4, 1))
        tiff = tiff[: place + 8] + struct.pack("<I", side) + tiff[place + 12 :]
    canvas = b"".join((side - 1).to_bytes(3, "little") for side in (width, height))
    return {
        "JPEG": jpeg,
        "PNG": b"\x89PNG\r\n\x1a\n\0\0\0\x0d" + header + struct.pack(">I", zlib.crc32(header)) + b"\0\0\0\x10IDAT",
        "BMP": bmp[:18] + struct.pack("<ii", width, height) + bmp[26:],
        "PPM": b"P6 %d %d 255\n" % (width, height) + bytes(99),
        "TIFF": tiff,
        "tiled TIFF": tiled(width, height),
        "WEBP": b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0" + bytes(4) + canvas,
    }


WAYS, PRESETS = [None, "pil", "tensor"], [ClassificationPresetTrain, ClassificationPresetEval]


@by_both
@pytest.mark.parametrize("kind", claiming(16, 16))
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # by Pillow, which is right
@pytest.mark.parametrize("sides", [(9460, 9460), (16000, 16000)])
def test_an_image_that_claims_too_much_is_refused_before_memory_is_spent(kind, sides):
    payload = claiming(*sides)[kind]
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    presets = [kind(crop_size=24, backend=backend) for kind in PRESETS for backend in WAYS]
    for load in (decode.load_image, *(preset.load for preset in presets)):
        with pytest.raises(BadImageError, match=r"89,478,485|could not create decoder object"):
            pytest.fail(f"{load}: {load(payload)}")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin < 50 << 10  # KiB; it would be 256 MiB and more


@pytest.mark.parametrize("backend", WAYS)
def test_an_evaluation_makes_no_image_too_large_by_its_resize(backend):
    payload = encoded(Image.new("RGB", (1, 60000)), "JPEG")
    with pytest.raises(BadImageError, match="resized, 1 x 60000 pixels are 256 x 15360000 pixels; at most 89,478,485"):
        ClassificationPresetEval(crop_size=224, backend=backend).load(payload)
    assert ClassificationPresetTrain(crop_size=224, backend=backend).load(payload).shape == (3, 224, 224)


LITTLE_MEMORY = """
import os, pathlib, resource, sys, zlib
from loading import decode
for path in sys.argv[1:]:
    payload = pathlib.Path(path).read_bytes()
    for limit in [4 << 30, *range(0, 96 << 20, 16 << 20)]:
        pid = os.fork()
        if not pid:
            pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + limit,) * 2)
            try:
                image = decode.ImageFile(payload).decode(0, 0, 1400, 1400)
                outcome = f"right {zlib.crc32(image.numpy().tobytes())}"
            except BaseException as error:
                outcome = type(error).__name__
            os.write(1, f"{path} {outcome}\\n".encode())
            os._exit(0)
        os.waitpid(pid, 0)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads its size from /proc")
def test_short_memory_is_never_taken_for_damage(tmp_path):
    """Libjpeg and libwebp speak of broken data where they get none."""
    image = picture(128, 128).resize((1500, 1500))
    image.save(tmp_path / "progressive.jpg", progressive=True)
    image.save(tmp_path / "lossy.webp", method=0)
    image.save(tmp_path / "lossless.webp", method=0, lossless=True)
    # In a Python of its own, of one arena: what is free in a fork's memory, the limit would not see.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", LITTLE_MEMORY, *map(str, tmp_path.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    for path in tmp_path.iterdir():
        enough, *lines = [line.removeprefix(f"{path} ") for line in done.stdout.splitlines() if str(path) in line]
        assert enough.startswith("right")
        assert set(lines) == {"MemoryError", enough}, path


def test_no_warning_of_an_image_that_is_read_well():
    transparent = encoded(picture().quantize(16), "PNG", transparency=bytes(range(16)))
    large = encoded(Image.new("L", (9450, 9450)), "JPEG")  # just below the limit
    kinds = b"Exif\0\0MM\0*\0\0\0\x08\0\5\x01\x1a", b"Exif\0\0", b"Exif\0\0II*\0" + b"\xff" * 40
    broken_exif = [encoded(picture(), "JPEG", exif=exif) for exif in kinds]
    large_profile = encoded(picture(), "PNG", icc_profile=bytes(3 << 20))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for payload in (transparent, large, *broken_exif):
            turned = decode.decode_plainly(payload, how=Decoding(exif=True))
            assert turned.tobytes() == decode.decode_plainly(payload).tobytes()
        assert decode.decode_plainly(large_profile).tobytes() == picture().tobytes()


@pytest.mark.parametrize("backend", [None, "pil"])
@pytest.mark.parametrize("kind", ["GIF", "EPS", "JPEG2000"])
def test_other_kinds_of_files_are_refused_with_the_kinds_that_are_read(kind, backend):
    words = "^it is not a valid AVIF, BMP, HEIC, JPEG, PNG, PPM, TIFF or WebP; it begins with b'"
    with pytest.raises(BadImageError, match=words):
        ClassificationPresetEval(crop_size=24, backend=backend).load(encoded(picture(), kind))


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
