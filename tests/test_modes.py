"""Every mode that Pillow opens: the RGB pixels it becomes, against numpy, or the line that refuses it."""

import io
import re
import struct
import zlib
from functools import partial

import numpy
import pytest
from PIL import Image

from errors import BadImageError
from loading.decode import AS_STORED, ImageFile, load_image, unused_range
from loading.forms import open_source
from presets import ClassificationPresetEval, ClassificationPresetTrain
from scripts import pack, predict
from tests.ranks import REPOSITORY

SIDE = 32
GREY16 = (numpy.arange(SIDE * SIDE).reshape(SIDE, SIDE) * 64).astype(numpy.uint16)
GREY = (GREY16 // 256).astype(numpy.uint8)
# Three channels that differ, and a fourth of which no pixel is opaque.
FOUR = numpy.stack([GREY, GREY.T, 255 - GREY, GREY[::-1] // 2 + 64], axis=2)
FOUR16 = FOUR.astype(numpy.uint16) * 256 + 77


def encoded(pixels, kind, mode=None, **options):
    stream = io.BytesIO()
    image = Image.fromarray(pixels)
    image = image.convert("P" if mode == "PA" else mode).convert(mode) if mode else image
    image.save(stream, kind, **options)
    return stream.getvalue()


def tiff(pixels, bits, order="<", **fields):
    """Return a TIFF of one strip; the fields are tag numbers with values, as tag_262=0."""
    raw = pixels if isinstance(pixels, bytes) else pixels.astype(pixels.dtype.newbyteorder(order)).tobytes()
    samples = pixels.shape[2] if getattr(pixels, "ndim", 2) == 3 else 1
    tags = {256: SIDE, 257: SIDE, 259: 1, 262: 1 if samples == 1 else 2, 273: 8, 277: samples, 278: SIDE, 279: len(raw)}
    tags |= {int(name.removeprefix("tag_")): value for name, value in fields.items()}
    body, depths = raw, struct.pack(f"{order}{samples}H", *samples * [bits])
    if samples > 2:  # too long for an entry
        body, depths = raw + depths, struct.pack(f"{order}I", 8 + len(raw))
    entries = {tag: struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in tags.items()}
    entries[258] = struct.pack(f"{order}HHI", 258, 3, samples) + depths.ljust(4, b"\0")
    begin = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 8 + len(body))
    fields = b"".join(entry for _, entry in sorted(entries.items()))
    return begin + body + struct.pack(f"{order}H", len(entries)) + fields + bytes(4)


def png(pixels, colour_type, extra=b"", bits=16):
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = b"".join(b"\0" + row.astype(">u2" if bits == 16 else "u1").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", SIDE, SIDE, bits, colour_type, 0, 0, 0)
    chunks = [chunk(b"IHDR", header), extra and chunk(b"tRNS", extra), chunk(b"IDAT", zlib.compress(rows))]
    return b"\x89PNG\r\n\x1a\n" + b"".join([*chunks, chunk(b"IEND", b"")])


def pnm(magic, largest, pixels):
    return b"%s\n%d %d\n%d\n" % (magic, SIDE, SIDE, largest) + pixels.astype(">u2" if largest > 255 else "u1").tobytes()


def twelve_bits(values):
    """Pack (H, W) 12-bit values, two in three bytes."""
    first, second = values[:, ::2].astype(int), values[:, 1::2].astype(int)
    packed = numpy.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], axis=2)
    return packed.astype(numpy.uint8).tobytes()


def grey(values):
    return numpy.repeat(values.astype(numpy.uint8)[..., None], 3, axis=2)


def from_cmyk(pixels):
    """White, less the ink, less the black, as Pillow computes it without a profile."""
    ink, black = pixels[..., :3].astype(int), pixels[..., 3:].astype(int)
    return numpy.clip(255 - black - numpy.round(ink * (255 - black) / 255), 0, 255)


def from_ycbcr(pixels):
    """JFIF's equations (ITU-T T.871)."""
    y, cb, cr = (pixels[..., channel].astype(float) - (0, 128, 128)[channel] for channel in range(3))
    return numpy.clip(numpy.stack([y + 1.402 * cr, y - 0.344136 * cb - 0.714136 * cr, y + 1.772 * cb], axis=2), 0, 255)


def from_lab(pixels):
    """CIE L*a*b* under D50 to sRGB, by the formulas of the CIE and of IEC 61966-2-1, with Bradford's adaptation."""
    lightness = (pixels[..., 0] / 255 * 100 + 16) / 116
    a, b = (pixels[..., channel].astype(numpy.int8) for channel in (1, 2))
    f = numpy.stack([lightness + a / 500, lightness, lightness - b / 200], axis=2)
    xyz = numpy.where(f > 6 / 29, f**3, 3 * (6 / 29) ** 2 * (f - 4 / 29)) * [0.9642, 1.0, 0.8249]
    to_rgb = [[3.13386, -0.97877, 0.07195], [-1.61687, 1.91614, -0.22899], [-0.49061, 0.03345, 1.40524]]
    linear = numpy.clip(xyz @ to_rgb, 0, 1)
    return 255 * numpy.where(linear > 0.0031308, 1.055 * linear ** (1 / 2.4) - 0.055, 12.92 * linear)


BLACK_OR_WHITE = (GREY.T // 128) * 255
PALETTE = (GREY // 16) * 16  # few enough values for a palette
NEAR_GREY = numpy.stack([GREY, GREY[::-1] // 12, GREY.T // 12], axis=2)  # small a and b: inside sRGB

# By rows of the table in docs/data.md: files, and their pixels or the words of their refusal.
ROWS = {
    "`1`": [(encoded(BLACK_OR_WHITE, kind, "1"), grey(BLACK_OR_WHITE)) for kind in ("PNG", "PPM", "TIFF", "BMP")],
    "`L`": [
        *[(encoded(GREY, kind), grey(GREY)) for kind in ("PNG", "PPM", "TIFF", "BMP")],
        (pnm(b"P5", 100, GREY16 // 656), grey(numpy.round(GREY16 // 656 / 100 * 255))),
        (tiff(255 - GREY, 8, tag_262=0), grey(GREY)),
    ],
    "`P`": [(encoded(PALETTE, kind, "P"), grey(PALETTE)) for kind in ("PNG", "TIFF", "BMP")],
    "`RGB`, 8 bits": [
        *[(encoded(FOUR[..., :3].copy(), kind), FOUR[..., :3]) for kind in ("PNG", "PPM", "TIFF", "BMP")],
        (encoded(FOUR[..., :3].copy(), "WEBP", lossless=True), FOUR[..., :3]),
    ],
    "`RGB`, 16 bits": [
        (png(FOUR16[..., :3], 2), FOUR[..., :3]),
        *[(tiff(FOUR16[..., :3], 16, order), FOUR[..., :3]) for order in "<>"],
        (pnm(b"P6", 65535, FOUR16[..., :3]), numpy.round(FOUR16[..., :3] / 257)),
        (pnm(b"P6", 1023, FOUR16[..., :3] // 64), numpy.round(FOUR16[..., :3] // 64 / 1023 * 255)),
    ],
    "`RGBA`, `LA`, `PA`, and `P`, `L`, `RGB` with a transparent colour": [
        (encoded(FOUR, "PNG"), FOUR[..., :3]),
        (png(FOUR16, 6), FOUR[..., :3]),
        (encoded(FOUR, "WEBP", lossless=True, exact=True), FOUR[..., :3]),
        (tiff(FOUR, 8, tag_338=2), FOUR[..., :3]),
        (tiff(FOUR16, 16, tag_338=2), FOUR[..., :3]),
        (encoded(FOUR[..., :2].copy(), "PNG"), grey(GREY)),
        (png(FOUR16[..., :2], 4), grey(GREY)),
        (tiff(FOUR[..., :2], 8, tag_262=1, tag_338=2), grey(GREY)),
        *[(encoded(PALETTE, "PNG", "P", transparency=each), grey(PALETTE)) for each in (bytes(range(0, 256, 2)), 3)],
        (encoded(PALETTE, "TIFF", "PA"), grey(PALETTE)),
        (png(GREY, 0, b"\0\x10", bits=8), grey(GREY)),
        (png(FOUR[..., :3], 2, b"\0\x10" * 3, bits=8), FOUR[..., :3]),
    ],
    "`RGBa`": [(tiff(FOUR, 8, tag_338=1), numpy.clip(FOUR[..., :3] * 255.0 // FOUR[..., 3:], 0, 255))],
    "`CMYK`": [(tiff(pixels, bits, tag_262=5), from_cmyk(FOUR)) for pixels, bits in ((FOUR, 8), (FOUR16, 16))],
    "`YCbCr`": [(tiff(NEAR_GREY, 8, tag_262=6, tag_530=1 << 16 | 1), from_ycbcr(NEAR_GREY))],
    "`LAB`": [(tiff(NEAR_GREY, 8, tag_262=8), from_lab(NEAR_GREY))],
    "`I;16`, `I;16B`, and `I` of PNG and PPM": [
        *[(encoded(GREY16, kind), grey(GREY16 >> 8)) for kind in ("PNG", "TIFF")],
        (png(GREY16, 0, b"\x10\0"), grey(GREY16 >> 8)),
        (tiff(GREY16, 16, ">"), grey(GREY16 >> 8)),
        (tiff(65535 - GREY16, 16, tag_262=0), grey(GREY16 >> 8)),
        (tiff(zlib.compress(GREY16.astype(">u2").tobytes()), 16, ">", tag_259=8), grey(GREY16 >> 8)),
        (tiff(twelve_bits(GREY16 >> 4), 12), grey(GREY16 >> 8)),
        (pnm(b"P5", 65535, GREY16), grey(GREY16 >> 8)),
        (pnm(b"P5", 1023, GREY16 >> 6), grey((numpy.round((GREY16 >> 6) / 1023 * 65535)).astype(int) >> 8)),
    ],
    "`I` and `L` of TIFF, 32 bits or signed": [
        (tiff(GREY16.astype(numpy.uint32), 32), "mode I"),
        (tiff(GREY16.astype(numpy.int32), 32, tag_339=2), "signed"),
        (tiff(GREY16.astype(numpy.int16), 16, ">", tag_339=2), "signed"),
        (tiff(GREY, 8, tag_339=2), "signed"),
    ],
    "`F`": [
        (tiff(GREY16.astype(numpy.float32), 32, tag_339=3), "float"),
        (b"Pf\n%d %d\n-1.0\n" % (SIDE, SIDE) + GREY16.astype("<f4").tobytes(), "mode F"),
    ],
    "`La`": [(tiff(FOUR[..., :2], 8, tag_262=1, tag_338=1), "La")],
    "`RGB` of TIFF, 16 bits in planes": [(tiff(FOUR16[..., :3], 16, tag_284=2), "planes")],
}  # fmt: skip
CASES = [pytest.param(*case, id=f"{name} {number}") for name, row in ROWS.items() for number, case in enumerate(row)]

# littlecms computes with fewer digits; Pillow's YCbCr, its CMYK and its alpha with rounded integers.
TOLERANCES = {"`LAB`": 4, "`YCbCr`": 1, "`CMYK`": 1, "`RGBa`": 1}


def test_the_page_lists_the_modes_of_these_tests():
    page = (REPOSITORY / "docs" / "data.md").read_text()
    table = page.split("| Pillow's mode |")[1].split("\n\n")[0]
    assert re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) == list(ROWS)


@pytest.mark.parametrize(("payload", "expected"), CASES)
def test_a_mode_becomes_the_pixels_that_numpy_computes(request, payload, expected):
    name = request.node.callspec.id.rsplit(" ", 1)[0]
    box = {"crop_size": SIDE, "resize_size": SIDE}
    presets = [ClassificationPresetEval(backend=backend, **box) for backend in (None, "pil", "tensor")]
    ways = [lambda: ImageFile(payload).decode(3, 5, 20, 20), *(partial(preset.load, payload) for preset in presets)]
    if isinstance(expected, str):
        ways.append(partial(ClassificationPresetTrain(crop_size=SIDE, crop_scale=1.0).load, payload))
        for load in ways:
            with pytest.raises(BadImageError, match=expected):
                load()
        return
    for number, load in enumerate(ways):
        found, wanted = load().permute(1, 2, 0).numpy(), expected if number else expected[3:23, 5:25]
        assert numpy.abs(found - wanted.astype(float)).max() <= TOLERANCES.get(name, 0), number


def test_deep_grey_is_scaled_wherever_a_file_is_read(tmp_path):
    path = tmp_path / "grey.png"
    path.write_bytes(encoded(numpy.full((40, 40), 10537, numpy.uint16), "PNG"))
    assert predict.open_image(path).getpixel((7, 7)) == (41, 41, 41)  # 10537 / 257
    small = pack.shrink(load_image(path.read_bytes()), 16)
    assert Image.open(io.BytesIO(small)).getpixel((7, 7)) == (41, 41, 41)


DEEP = {
    "grey PNG": lambda x: png(x[..., 0], 0), "PNG": lambda x: png(x, 2), "PNM": lambda x: pnm(b"P6", 65535, x),
    "PNG with alpha": lambda x: png(numpy.dstack([x, x[..., 0] | 65535]), 6), "TIFF": lambda x: tiff(x, 16, ">"),
    "white is 0": lambda x: tiff(65535 - x[..., 0], 16, tag_262=0),
}  # fmt: skip


@pytest.mark.parametrize("kind", DEEP)
def test_a_range_that_is_not_used_is_said_with_its_share(tmp_path, kind):
    for bits, words in ((12, r"use [67]% of their range"), (14, "use 25% of their range"), (15, "^$"), (16, "^$")):
        (tmp_path / str(bits) / "train" / "a").mkdir(parents=True)
        (tmp_path / str(bits) / "train" / "a" / "x.png").write_bytes(DEEP[kind](FOUR16[..., :3] >> (16 - bits)))
        assert re.search(words, unused_range(open_source(tmp_path / str(bits) / "train"), AS_STORED))
