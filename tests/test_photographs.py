"""Photographs as phones and scanners make them: Pillow's `exif_transpose`, timm's transforms and NumPy are oracles."""

import io
import json
import sys

import numpy
import pytest
import timm
import torch
from PIL import Image, ImageOps
from torchvision.transforms import functional

from errors import BadImageError, UserError
from loading import decode
from loading.decode import Decoding, ImageFile, decode_plainly, load_image, read_orientation
from loading.forms import open_source
from presets import ClassificationPresetEval, ClassificationPresetTrain
from randomness import Draws
from tests.exports import run_tool
from tests.images import encoded, picture, turn, write_images
from tests.started import SMALL, refused, run_train

TURNED = Decoding(exif=True)
FORMS = ("JPEG", "PNG", "WEBP", "TIFF", "AVIF", "progressive", "grey", "XMP")


def as_stored(form, orientation):
    """Return the bytes of a file whose metadata say to turn it."""
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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("orientation", range(10))
def test_boxes_of_turned_images_are_those_of_pillow(form, orientation):
    payload = as_stored(form, orientation)
    expected = upright(payload)
    file = ImageFile(payload, TURNED)
    assert file.size == expected.size
    pixels = functional.pil_to_tensor(expected)
    for top, left, height, width in ((0, 0, *pixels.shape[1:]), (3, 5, 20, 31), (90, 60, 17, 9), (0, 0, 9, 40)):
        found = file.decode(top, left, height, width)
        assert torch.equal(found, pixels[:, top : top + height, left : left + width]), (top, left)
    assert decode_plainly(payload, how=TURNED).tobytes() == expected.tobytes()
    assert decode_plainly(payload, (3, 5, 40, 50), TURNED).tobytes() == expected.crop((3, 5, 40, 50)).tobytes()
    with Image.open(io.BytesIO(payload)) as stored:
        assert decode_plainly(payload).tobytes() == stored.convert("RGB").tobytes()  # without --exif, as torchvision


def test_damaged_metadata_say_nothing():
    for exif in (b"Exif\0\0MM\0*\0\0\0\x08\0\5\x01\x1a", b"Exif\0\0", b"Exif\0\0II*\0" + b"\xff" * 40):
        payload = encoded(picture(), "JPEG", exif=exif)
        assert read_orientation(payload) == 1
        assert decode_plainly(payload, how=TURNED).tobytes() == decode_plainly(payload).tobytes()


@pytest.mark.parametrize("backend", [None, "pil", "tensor"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_presets_prepare_a_turned_file_as_the_upright_one(backend, orientation):
    """Crops are drawn on the turned image: the same boxes, and so the same pixels, as of the upright file."""
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
    preset = ClassificationPresetEval(
        crop_size=40, resize_size=40, in_chans=1, mean=[0.5], std=[0.5], grey_range=(500, 4000)
    )
    assert numpy.array_equal(preset.load(payload)[0], expected[:, 10:50])
    plain = encoded(picture(mode="L"), "PNG")
    assert load_image(plain, (500, 4000)).tobytes() == load_image(plain).tobytes()  # of 8 bits


def test_a_large_colour_profile_does_not_hide_the_pixels():
    payload = encoded(picture(), "PNG", icc_profile=bytes(3 << 20))
    assert decode_plainly(payload).tobytes() == picture().tobytes()


def write_phone_folder(folder):
    """Write a folder of class folders in which one image each is an AVIF and a HEIC, and return it."""
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
    decode.can_read_heic.cache_clear()
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
        decode.can_read_heic.cache_clear()


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


def test_a_range_the_wrong_way_round_is_refused(tmp_path):
    """Every image would be white, or none could be read."""
    for tool, *argv in (["check", tmp_path], ["pack", "--data-path", tmp_path, tmp_path / "pack", "--short-side", 8]):
        outcome, _ = run_tool(tmp_path, tool, *argv, "--grey-range", 4095, 0, code=2)
        assert "--grey-range 4095 0: expected two numbers, the lower first" in outcome.output


@pytest.mark.parametrize("preset", [ClassificationPresetTrain, ClassificationPresetEval])
def test_a_crop_mode_that_is_none_is_refused(preset):
    with pytest.raises(ValueError, match="crop_mode 'corner': expected"):
        preset(crop_size=32, crop_mode="corner")


def test_the_extensions_of_the_training_are_those_of_every_evaluation(tmp_path):
    """`--extensions` of a checkpoint decides which images there are, as its preprocessing decides their pixels."""
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
