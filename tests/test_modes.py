"""Every mode that Pillow opens, photographs of phones and scanners, grey or with alpha: by Pillow, timm and numpy."""

import io
import json
import re
import struct
import sys
import zlib
from functools import partial

import numpy
import pytest
import timm
import torch
import torchvision
from PIL import Image, ImageOps
from torchvision import transforms

from errors import BadImageError, UserError
from loading.decode import AS_STORED, Decoding, ImageFile, decode_plainly, load_image
from loading.forms import open_source
from loading.heic import can_read_heic
from loading.remarks import unused_range
from models.build import build_model
from presets import ClassificationPresetEval, ClassificationPresetTrain
from randomness import Draws
from scripts import pack, predict
from settings import config
from tests.exports import run_tool
from tests.images import FILES, encoded, picture, turn, write_images
from tests.ranks import REPOSITORY
from tests.started import SMALL, refused, run_train

SIDE = 32
GREY16 = (numpy.arange(SIDE * SIDE).reshape(SIDE, SIDE) * 64).astype(numpy.uint16)
GREY = (GREY16 // 256).astype(numpy.uint8)
# Three channels that differ, and a fourth of which no pixel is opaque.
FOUR = numpy.stack([GREY, GREY.T, 255 - GREY, GREY[::-1] // 2 + 64], axis=2)
FOUR16 = FOUR.astype(numpy.uint16) * 256 + 77


def stored(pixels, kind, mode=None, **options):
    image = Image.fromarray(pixels)
    image = image.convert("P" if mode == "PA" else mode).convert(mode) if mode else image
    return encoded(image, kind, **options)


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
    "`1`": [(stored(BLACK_OR_WHITE, kind, "1"), grey(BLACK_OR_WHITE)) for kind in ("PNG", "PPM", "TIFF", "BMP")],
    "`L`": [
        *[(stored(GREY, kind), grey(GREY)) for kind in ("PNG", "PPM", "TIFF", "BMP")],
        (pnm(b"P5", 100, GREY16 // 656), grey(numpy.round(GREY16 // 656 / 100 * 255))),
        (tiff(255 - GREY, 8, tag_262=0), grey(GREY)),
    ],
    "`P`": [(stored(PALETTE, kind, "P"), grey(PALETTE)) for kind in ("PNG", "TIFF", "BMP")],
    "`RGB`, 8 bits": [
        *[(stored(FOUR[..., :3].copy(), kind), FOUR[..., :3]) for kind in ("PNG", "PPM", "TIFF", "BMP")],
        (stored(FOUR[..., :3].copy(), "WEBP", lossless=True), FOUR[..., :3]),
    ],
    "`RGB`, 16 bits": [
        (png(FOUR16[..., :3], 2), FOUR[..., :3]),
        *[(tiff(FOUR16[..., :3], 16, order), FOUR[..., :3]) for order in "<>"],
        (pnm(b"P6", 65535, FOUR16[..., :3]), numpy.round(FOUR16[..., :3] / 257)),
        (pnm(b"P6", 1023, FOUR16[..., :3] // 64), numpy.round(FOUR16[..., :3] // 64 / 1023 * 255)),
    ],
    "`RGBA`, `LA`, `PA`, and `P`, `L`, `RGB` with a transparent colour": [
        (stored(FOUR, "PNG"), FOUR[..., :3]),
        (png(FOUR16, 6), FOUR[..., :3]),
        (stored(FOUR, "WEBP", lossless=True, exact=True), FOUR[..., :3]),
        (tiff(FOUR, 8, tag_338=2), FOUR[..., :3]),
        (tiff(FOUR16, 16, tag_338=2), FOUR[..., :3]),
        (stored(FOUR[..., :2].copy(), "PNG"), grey(GREY)),
        (png(FOUR16[..., :2], 4), grey(GREY)),
        (tiff(FOUR[..., :2], 8, tag_262=1, tag_338=2), grey(GREY)),
        *[(stored(PALETTE, "PNG", "P", transparency=each), grey(PALETTE)) for each in (bytes(range(0, 256, 2)), 3)],
        (stored(PALETTE, "TIFF", "PA"), grey(PALETTE)),
        (png(GREY, 0, b"\0\x10", bits=8), grey(GREY)),
        (png(FOUR[..., :3], 2, b"\0\x10" * 3, bits=8), FOUR[..., :3]),
    ],
    "`RGBa`": [(tiff(FOUR, 8, tag_338=1), numpy.clip(FOUR[..., :3] * 255.0 // FOUR[..., 3:], 0, 255))],
    "`CMYK`": [(tiff(pixels, bits, tag_262=5), from_cmyk(FOUR)) for pixels, bits in ((FOUR, 8), (FOUR16, 16))],
    "`YCbCr`": [(tiff(NEAR_GREY, 8, tag_262=6, tag_530=1 << 16 | 1), from_ycbcr(NEAR_GREY))],
    "`LAB`": [(tiff(NEAR_GREY, 8, tag_262=8), from_lab(NEAR_GREY))],
    "`I;16`, `I;16B`, and `I` of PNG and PPM": [
        *[(stored(GREY16, kind), grey(GREY16 >> 8)) for kind in ("PNG", "TIFF")],
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
    path.write_bytes(stored(numpy.full((40, 40), 10537, numpy.uint16), "PNG"))
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


TURNED = Decoding(exif=True)


def as_stored(form, orientation):
    exif = Image.Exif()
    exif[274] = orientation
    image, more = picture(150, 110), {"exif": exif.tobytes()}
    if form == "progressive":
        form, more["progressive"] = "JPEG", True
    elif form == "grey":
        form, image = "JPEG", image.convert("L")
    elif form == "XMP":
        xmp = f'<x xmlns:tiff="http://ns.adobe.com/" tiff:Orientation="{orientation}"/>'
        form, more = "JPEG", {"xmp": xmp.encode()}
    return encoded(image, form, **more)


def upright(payload):
    with Image.open(io.BytesIO(payload)) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "progressive", "grey", "XMP"])
@pytest.mark.parametrize("orientation", range(10))
def test_boxes_of_turned_images_are_those_of_pillow(form, orientation):
    payload = as_stored(form, orientation)
    expected = upright(payload)
    file = ImageFile(payload, TURNED)
    assert file.size == expected.size
    pixels = transforms.functional.pil_to_tensor(expected)
    for top, left, height, width in ((0, 0, *pixels.shape[1:]), (3, 5, 20, 31), (90, 60, 17, 9), (0, 0, 9, 40)):
        found = file.decode(top, left, height, width)
        assert torch.equal(found, pixels[:, top : top + height, left : left + width]), (top, left)
    assert decode_plainly(payload, how=TURNED).tobytes() == expected.tobytes()
    assert decode_plainly(payload, (3, 5, 40, 50), TURNED).tobytes() == expected.crop((3, 5, 40, 50)).tobytes()
    with Image.open(io.BytesIO(payload)) as stored:
        assert decode_plainly(payload).tobytes() == stored.convert("RGB").tobytes()  # without --exif, as torchvision


@pytest.mark.parametrize("backend", [None, "pil", "tensor"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_presets_prepare_a_turned_file_as_the_upright_one(backend, orientation):
    payload = as_stored("PNG", orientation)
    plain = encoded(upright(payload), "PNG")
    for preset in (ClassificationPresetEval, ClassificationPresetTrain):
        ours, theirs = (preset(crop_size=48, backend=backend, exif=exif) for exif in (True, False))
        for seed in range(4):
            torch.manual_seed(seed)
            found = ours.load(payload, Draws(1, seed))
            torch.manual_seed(seed)
            assert torch.equal(found, theirs.load(plain, Draws(1, seed)))


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize("size", [(150, 110), (40, 300), (301, 37), (20, 16), (64, 64)])
def test_crop_modes_have_timms_pixels(mode, size):
    payload = encoded(picture(*size), "PNG")
    for resize, crop in ((64, 56), (56, 56), (60, 23)):
        theirs = timm.data.create_transform(
            (3, crop, crop), interpolation="bilinear", crop_pct=crop / (resize + 0.5), crop_mode=mode, normalize=False,
            mean=(0.485, 0.456, 0.406),
        )  # fmt: skip
        expected = theirs(Image.open(io.BytesIO(payload)))
        for backend, allowed in (("pil", 0), (None, 2)):
            preset = ClassificationPresetEval(crop_size=crop, resize_size=resize, crop_mode=mode, backend=backend)
            difference = (preset.load(payload).int() - expected.int()).abs()
            assert difference.max() <= allowed, (backend, resize, crop)


@pytest.mark.parametrize("backend", [None, "pil"])
def test_training_on_the_whole_image_crops_nothing(backend):
    payload = encoded(picture(150, 100), "PNG")
    for mode in ("squash", "border"):
        options = {"crop_size": 48, "crop_mode": mode, "backend": backend}
        preset = ClassificationPresetTrain(**options)
        seen = {preset.load(payload, Draws(0, seed)).numpy().tobytes() for seed in range(20)}
        whole = ClassificationPresetEval(resize_size=48, **options).load(payload)  # which has timm's pixels
        assert len(seen) == 2  # itself and its mirror image
        found = torch.frombuffer(bytearray(max(seen)), dtype=torch.uint8).view(whole.shape)
        assert min((found.int() - each.int()).abs().max() for each in (whole, whole.flip(-1))) <= 1


def test_a_range_of_grey_becomes_black_to_white():
    samples = numpy.arange(0, 4800, 2, dtype=numpy.uint16).reshape(40, 60)
    payload = encoded(Image.fromarray(samples), "PNG")
    expected = numpy.rint(numpy.clip((samples.astype(float) - 500) / 3500, 0, 1) * 255)
    found = numpy.asarray(load_image(payload, (500, 4000)))
    assert numpy.array_equal(found, expected)
    assert numpy.array_equal(numpy.asarray(load_image(payload)), samples >> 8)  # without a range, the highest 8 bits
    preset = ClassificationPresetEval(crop_size=40, resize_size=40, in_chans=1, grey_range=(500, 4000))
    assert numpy.array_equal(preset.load(payload)[0], expected[:, 10:50])
    plain = encoded(picture(mode="L"), "PNG")
    assert load_image(plain, (500, 4000)).tobytes() == load_image(plain).tobytes()  # of 8 bits


def write_phone_folder(folder):
    pytest.importorskip("pillow_heif").register_heif_opener()
    write_images(folder, {"train": [6, 6], "val": [4, 4]})
    for form in ("avif", "heic"):
        picture().save(folder / "train" / "class0" / f"z.{form}")
    return folder


def test_avif_and_heic_are_read_where_they_are_asked_for(tmp_path, capsys):
    folder = write_phone_folder(tmp_path / "images")
    assert len(open_source(folder / "train")) == 12
    assert "2 files not read" in (said := capsys.readouterr().out)
    assert "--extensions .avif .heic reads more of them" in said
    source = open_source(folder / "train", extensions=[".avif", ".heic"])
    files = {source.name(number): source.read(number) for number in range(len(source))}
    assert len(files) == 14
    for form in ("avif", "heic"):
        path = folder / "train" / "class0" / f"z.{form}"
        assert decode_plainly(files[f"class0/z.{form}"]).tobytes() == Image.open(path).convert("RGB").tobytes()
    assert len(open_source(folder / "train")) == 12  # the index of the other extensions is not used
    (folder / "train").rename(tmp_path / "moved")
    (folder / "train.csv").write_text("path,label\n" + "".join(f"{tmp_path}/moved/{name},a\n" for name in files))
    assert len(open_source(folder / "train")) == 14  # a list names its files


def test_heic_without_its_package_is_refused_in_one_line(tmp_path, monkeypatch):
    folder = write_phone_folder(tmp_path / "images")
    payload = (folder / "train" / "class0" / "z.heic").read_bytes()
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    monkeypatch.delitem(Image.OPEN, "HEIF")
    can_read_heic.cache_clear()
    (folder / "val.csv").write_text("path,label\ntrain/class0/z.heic,a\ntrain/class0/image000.jpg,b\n")
    (folder / "val").rename(tmp_path / "moved")
    try:
        with pytest.raises(BadImageError, match="it is a HEIC, which needs the package pillow-heif; run pip install"):
            decode_plainly(payload)
        with pytest.raises(UserError, match=r"--extensions \.heic includes HEIC, which needs the package"):
            open_source(folder / "train", extensions=[".heic"])
        with pytest.raises(UserError, match=r"lists 1 HEIC file, such as 'train/class0/z.heic', which needs"):
            open_source(folder / "val")
    finally:
        can_read_heic.cache_clear()


def test_a_pack_keeps_the_tag_and_its_range_and_an_older_one_is_refused(tmp_path):
    images = write_images(tmp_path / "images", {"train": [5, 4], "val": [3, 3]})
    turn(images / "train" / "class0" / "image000.jpg", 6)
    run_tool(tmp_path, "pack", "--data-path", images, tmp_path / "pack", "--short-side", 24, "--workers", 1)
    argv = [*SMALL, "--data-path", tmp_path / "pack", "--batch-size", 4, "--epochs", 1, "--exif"]
    told = run_train(tmp_path, *argv, "--output-dir", tmp_path / "a").check().output
    assert "EXIF says to turn 1 of 9 images looked at; they are turned" in told
    given = run_train(tmp_path, *argv, "--output-dir", tmp_path / "b", "--grey-range", 0, 4095)
    refused(given, "--grey-range [0, 4095]", "is a pack written with none; give that, or pack again")
    manifest = tmp_path / "pack" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"exif": "kept",', ""))
    older = run_train(tmp_path, *argv, "--output-dir", tmp_path / "c")
    refused(older, "--exif", "is a pack without the orientations of its images; pack again")


@pytest.mark.parametrize("preset", [ClassificationPresetTrain, ClassificationPresetEval])
def test_a_crop_mode_that_is_none_is_refused(preset):
    with pytest.raises(ValueError, match="crop_mode 'corner': expected"):
        preset(crop_size=32, crop_mode="corner")


def test_the_extensions_of_the_training_are_those_of_every_evaluation(tmp_path):
    folder = write_phone_folder(tmp_path / "images")
    for path in folder.glob("*/class1/image003.jpg"):
        path.rename(path.with_suffix(".jfif"))
    picture().save(folder / "val" / "class0" / "z.heic")
    num_images = len(list((folder / "val").rglob("*.*")))
    argv = ["--data-path", folder, "--device", "cpu", "--workers", 0]
    trained = [*SMALL, "--batch-size", 4, "--epochs", 1, "--extensions", ".heic", ".jfif"]
    run_train(tmp_path, *argv, *trained, "--output-dir", tmp_path / "out").check()
    checkpoint = tmp_path / "out" / "checkpoint.pth"
    tested = run_train(tmp_path, *argv, "--test-only", "--resume", checkpoint).check().output
    assert f"n={num_images}" in tested
    evaluated = ["--set", f"val={folder / 'val'}", "--json", tmp_path / "results.json"]
    averaged = ["--output", tmp_path / "mean.pth", "--reestimate-bn", folder, "--images", 8]
    for tool, *more in ["evaluate", *evaluated], ["average", *averaged]:
        _, said = run_tool(tmp_path, tool, checkpoint, *more, "--device", "cpu")
        assert "--extensions .heic .jfif: as in the checkpoint" in said
    assert json.loads((tmp_path / "results.json").read_text())["sets"]["val"]["images"] == num_images
    _, said = run_tool(tmp_path, "predict", checkpoint, folder / "val", "--json", "--device", "cpu")
    assert len(json.loads(said)["images"]) == num_images


MODES = {1: "L", 4: "RGBA"}
ALPHA = {
    "faint": encoded(Image.fromarray(numpy.dstack([picture(), picture(mode="L").rotate(180)])), "PNG"),
    "palette with alpha": encoded(Image.fromarray(PALETTE).convert("P"), "PNG", transparency=bytes(range(0, 256, 2))),
    "transparent colour": png(FOUR[..., :3], 2, b"\0\x10" * 3, bits=8),
}
PHOTOGRAPHS = {name: payload for name, payload in {**FILES, **ALPHA}.items() if name != "one row"}  # too small to crop


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")  # Pillow's, about its own conversion here
@pytest.mark.parametrize("name", PHOTOGRAPHS)
@pytest.mark.parametrize("in_chans", MODES)
def test_pixels_are_torchvisions_of_pillows_conversion(name, in_chans):
    payload = PHOTOGRAPHS[name]
    image = Image.open(io.BytesIO(payload)).convert(MODES[in_chans])
    resized, drawn = partial(ClassificationPresetEval, resize_size=31), ClassificationPresetTrain
    steps = {resized: [transforms.Resize(31), transforms.CenterCrop(24)]}
    steps |= {drawn: [transforms.RandomResizedCrop(24), transforms.RandomHorizontalFlip()]}
    for build, plain in steps.items():
        for backend, most in (("pil", 0), (None, 2)):  # grey levels
            torch.manual_seed(3)
            found = build(crop_size=24, backend=backend, in_chans=in_chans).load(payload)
            torch.manual_seed(3)
            expected = transforms.Compose([*plain, transforms.PILToTensor()])(image)
            assert found.shape == expected.shape == (in_chans, 24, 24)
            assert (found.int() - expected.int()).abs().max() <= most
    box = ImageFile(payload, Decoding(MODES[in_chans])).decode(3, 5, 20, 20)
    assert torch.equal(box, transforms.functional.pil_to_tensor(image)[:, 3:23, 5:25])


def test_files_of_every_mode_become_grey_and_rgba():
    for name, row in ROWS.items():
        for payload, expected in row:
            if isinstance(expected, str) or "I;16" in name:
                continue  # refused, and not as Pillow converts it
            images = (decode_plainly(payload, how=Decoding(mode)) for mode in ("RGB", "L", "RGBA"))
            rgb, grey, rgba = map(numpy.asarray, images)
            assert numpy.array_equal(rgb, rgba[..., :3]), name
            assert "alpha" in name or "transparent" in name or "RGBa" in name or rgba[..., 3].min() == 255, name
            # That of ITU-R 601-2, as Pillow's page has it; Y itself may be of a colour outside of RGB.
            wanted = GREY if name == "`YCbCr`" else rgb @ numpy.array([0.299, 0.587, 0.114])
            assert numpy.abs(grey - wanted).max() <= 1, name
    assert numpy.array_equal(decode_plainly(encoded(Image.fromarray(GREY16), "PNG"), how=Decoding("L")), GREY16 >> 8)
    # Pillow would compare such a colour with pixels of 8 bits.
    for keyed in (png(GREY16, 0, b"\x10\0"), png(FOUR.astype(numpy.uint16)[..., :3] * 257, 2, b"\0\x10" * 3)):
        decode_plainly(keyed, how=Decoding("L"))
        with pytest.raises(BadImageError, match="transparent colour has 16 bits"):
            decode_plainly(keyed, how=Decoding("RGBA"))


def resolved(*words):
    return config.parse_args([*"--synthetic 8 --device cpu --train-crop-size 32 --val-crop-size 32".split(), *words])


def test_mean_and_deviation_are_by_default_those_of_timm():
    for in_chans in MODES:
        args = resolved("--in-chans", str(in_chans))
        for ours, imagenets in (
            (args.augmentation.mean, config.IMAGENET_MEAN),
            (args.augmentation.std, config.IMAGENET_STD),
        ):
            assert tuple(ours) == timm.data.loader.adapt_to_chs(imagenets, in_chans)


@pytest.mark.parametrize(("words", "message"), [
    ("--in-chans 1 --mean 0.4 0.5 0.6", "--mean has 3 values, but --in-chans is 1"),
    ("--std 0.5", "--std has 1 value, but --in-chans is 3"),
    ("--in-chans 1 --auto-augment ra", "remove --auto-augment"),
    ("--in-chans 4 --auto-augment timm/rand-m7", "remove --auto-augment"),
    ("--in-chans 1 --color-jitter 0.4", "remove --color-jitter"),
    ("--in-chans 1 --model googlenet --weights IMAGENET1K_V1", "rescales the three channels"),
    ("--in-chans 1 --model timm/tiny_test --model-kwargs in_chans=3", "set by another option"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(words, message):
    with pytest.raises(UserError, match=re.escape(message)):
        build_model(resolved(*words.split()), 5)


def test_first_layers_are_adapted_as_in_timm(tmp_path, capsys):
    for name in ("timm/tiny_test", "squeezenet1_1"):
        make = timm.create_model if "/" in name else torchvision.models.get_model
        weights = make(name.rpartition("/")[2]).state_dict()
        first = next(iter(weights))
        for in_chans in MODES:
            args = resolved("--model", name, "--in-chans", str(in_chans))
            found = build_model(args, 1000, weights, "x").state_dict()
            assert f"x: {first} of 3 channels is" in capsys.readouterr().out
            assert torch.equal(found[first], timm.models.adapt_input_conv(in_chans, weights[first].clone()))
            assert all(torch.equal(each, found[key]) for key, each in weights.items() if key != first)
            with pytest.raises(UserError, match="x is for 3 channels, but --in-chans is"):
                build_model(args.replaced(test_only=True), 1000, weights, "x")
        back = build_model(resolved("--model", name), 1000, found, "x").state_dict()
        assert torch.equal(back[first], timm.models.adapt_input_conv(3, found[first].clone(), base_chans=4))
    (tmp_path / "net.py").write_text("def a(num_classes):\n    pass\n")
    with pytest.raises(UserError, match="unexpected keyword argument 'in_chans'"):
        build_model(resolved("--model", f"{tmp_path / 'net.py'}:a", "--in-chans", "1"), 5)


def test_evaluation_and_tools_take_the_channels_from_the_checkpoint(image_folder, tmp_path):
    out, images = tmp_path / "run", image_folder
    options = "--batch-size 8 --in-chans 1 --epochs 2 --random-erase 0.3 --mixup-alpha 1 --output-dir".split()
    run_train(tmp_path, *SMALL, "--data-path", images, *options, out).check()
    pixels = numpy.asarray(Image.open(out / "picture-first-batch-00000000.png"))[30:60, 10:80].astype(int)
    assert numpy.ptp(pixels, axis=2).max() == 0 < numpy.ptp(pixels)  # the first image, grey and not empty
    line = [each for each in (out / "log.txt").read_text().splitlines() if each.startswith("Test: Acc@1")][-1]
    argv = ["--data-path", images, "--device", "cpu", "--workers", 0, "--test-only"]
    for words in (["--resume", out / "checkpoint.pth"], ["--weights", out / "checkpoint.pth", *SMALL]):
        assert line in run_train(tmp_path, *argv, *words).check().output
    refused(run_train(tmp_path, *argv, *SMALL, "--weights", out / "best.pth", "--in-chans", 3), "give --in-chans 1")
    run_tool(tmp_path, "export", out / "best.pth", "--format", "weights", "torch-export", "--output", tmp_path / "out")
    shares = []
    for file in [out / "best.pth", *(file for file in (tmp_path / "out").iterdir() if file.suffix != ".json")]:
        _, text = run_tool(tmp_path, "predict", file, images / "val", "--json")
        shares += [[each["probability"] for each in json.loads(text)["images"]]]
    assert shares == [pytest.approx(shares[0], abs=1e-4)] * 3  # the tolerance of an export


def test_the_statistics_of_the_training_images(tmp_path):
    train = write_images(tmp_path / "images", {"train": [3, 2], "val": [1, 1]}) / "train"
    (train / "class0" / "faint.png").write_bytes(ALPHA["faint"])
    for in_chans, mode in {**MODES, 3: "RGB"}.items():
        images = [Image.open(path).convert(mode) for path in train.rglob("*.*")]
        values = [numpy.asarray(image, float).reshape(-1, in_chans) / 255 for image in images]
        mean = numpy.mean([each.mean(axis=0) for each in values], axis=0)
        std = numpy.sqrt(numpy.mean([((each - mean) ** 2).mean(axis=0) for each in values], axis=0))
        _, text = run_tool(tmp_path, "check", train.parent, "--json", tmp_path / "r.json", "--statistics", in_chans)
        found = json.loads((tmp_path / "r.json").read_text())["splits"]["train"]
        assert (found["mean"], found["std"]) == (pytest.approx(mean.tolist()), pytest.approx(std.tolist()))
        words = (" ".join(f"{value:.4f}" for value in each) for each in (mean, std))
        assert "--mean {} --std {} (".format(*words) in text
