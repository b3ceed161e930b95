"""decode.py and the fast way of the presets: Pillow's pixels of a box, whatever the file."""

import io

import numpy
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode

import data
from decode import ImageFile, PillowDecoder, cut_rows, read_frame, shorten
from presets import ClassificationPresetEval, ClassificationPresetTrain


def picture(width=150, height=110, mode="RGB"):
    """Smooth colours with some noise: a photograph, as far as a JPEG decoder is concerned."""
    generator = numpy.random.default_rng(width)
    small = generator.integers(0, 256, (7, 9, 3), dtype=numpy.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    noisy = numpy.asarray(image).astype(int) + generator.integers(-8, 9, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(numpy.uint8)).convert(mode)


def encoded(image, kind, **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def rotated_by_exif():
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture(), "JPEG", exif=exif)


FILES = {
    "4:2:0": encoded(picture(), "JPEG", quality=85),
    "4:4:4": encoded(picture(), "JPEG", quality=95, subsampling=0),
    "4:2:2": encoded(picture(), "JPEG", subsampling=1),
    "odd size": encoded(picture(333, 257), "JPEG"),
    "grey": encoded(picture(mode="L"), "JPEG"),
    "CMYK": encoded(picture(mode="CMYK"), "JPEG"),
    "progressive": encoded(picture(), "JPEG", progressive=True),
    "restart markers": encoded(picture(), "JPEG", restart_marker_rows=1),
    "restart blocks": encoded(picture(), "JPEG", restart_marker_blocks=3),
    "EXIF": rotated_by_exif(),
    "comment": encoded(picture(), "JPEG", comment=b"x" * 5000),
    "PNG": encoded(picture(), "PNG"),
    "palette": encoded(picture().quantize(16), "PNG"),
    "transparent": encoded(picture(mode="RGBA"), "PNG"),
    "one bit": encoded(picture(mode="1"), "PNG"),
    "WebP": encoded(picture(), "WEBP"),
    "16 bit": encoded(Image.fromarray(numpy.arange(110 * 150, dtype=numpy.uint16).reshape(110, 150)), "PNG"),
    "one row": encoded(picture(40, 1), "JPEG"),
}


def plain(payload):
    """What torchvision's loader makes of a file."""
    return torch.from_numpy(numpy.array(Image.open(io.BytesIO(payload)).convert("RGB"))).permute(2, 0, 1)


@pytest.mark.parametrize("kind", FILES)
def test_a_box_has_exactly_pillows_pixels(kind):
    payload = FILES[kind]
    whole = plain(payload)
    _, rows, columns = whole.shape
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        height, width = (int(torch.randint(1, size + 1, (), generator=generator)) for size in (rows, columns))
        top = int(torch.randint(rows - height + 1, (), generator=generator))
        left = int(torch.randint(columns - width + 1, (), generator=generator))
        found = ImageFile(payload, PillowDecoder()).decode(top, left, height, width)
        assert torch.equal(found, whole[:, top : top + height, left : left + width])


def test_a_jpeg_is_decoded_no_further_than_the_box():
    payload = FILES["4:2:0"]
    frame = read_frame(payload)
    assert (frame.height, frame.width, frame.block_rows) == (110, 150, 16)
    shorter = shorten(payload, frame, 20)
    # Blocks of 16 rows: two for the box and one below it, which smooth chroma looks at.
    assert shorter.height == 48
    assert Image.open(io.BytesIO(shorter.payload)).size == (150, 48)
    assert shorten(payload, frame, 100).payload is payload
    full = FILES["4:4:4"]
    assert shorten(full, read_frame(full), 20).height == 24
    # Damage below what is needed is not even seen.
    torn = payload[: len(payload) * 2 // 3]
    assert torch.equal(ImageFile(torn, PillowDecoder()).decode(0, 0, 10, 150), plain(payload)[:, :10])


@pytest.mark.parametrize(
    "payload", [b"", b"\xff\xd8", b"\xff\xd8\xff\xe0", b"GIF89a", FILES["PNG"], b"\xff\xd8" + b"\xff" * 50]
)
def test_what_is_no_whole_jpeg_has_no_frame(payload):
    assert read_frame(payload) is None


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("mode", [InterpolationMode.BILINEAR, InterpolationMode.BICUBIC])
def test_pixels_are_within_one_grey_level_of_pillows(kind, mode):
    for build in (ClassificationPresetTrain, ClassificationPresetEval):
        size = {"crop_size": 24} | ({"resize_size": 32} if build is ClassificationPresetEval else {})
        fast, exact = (build(interpolation=mode, backend=backend, **size) for backend in (None, "pil"))
        for seed in range(3):
            torch.manual_seed(seed)
            found = fast.load(FILES[kind])
            after = torch.rand(1)
            torch.manual_seed(seed)
            expected = exact.load(FILES[kind])
            assert torch.equal(after, torch.rand(1))  # as many draws, so the same box and flip
            difference = (found.int() - expected.int()).abs().float()
            assert found.shape == expected.shape
            # One level of rounding; bicubic rounds after each of its two passes, and clips.
            assert difference.max() <= (1 if mode is InterpolationMode.BILINEAR else 2)
            assert difference.mean() < 0.05


def test_other_interpolations_take_the_plain_path():
    for mode in (InterpolationMode.NEAREST, InterpolationMode.LANCZOS):
        fast, exact = (ClassificationPresetEval(crop_size=24, interpolation=mode, backend=b) for b in (None, "pil"))
        assert torch.equal(fast.load(FILES["4:2:0"]), exact.load(FILES["4:2:0"]))


def test_policies_see_the_crop_and_the_flip():
    preset = ClassificationPresetTrain(crop_size=24, auto_augment_policy="ta_wide")
    plain_preset = ClassificationPresetTrain(crop_size=24)
    torch.manual_seed(0)
    crop = plain_preset.load(FILES["4:2:0"])
    expected = preset.policy(Image.fromarray(crop.permute(1, 2, 0).numpy()))
    torch.manual_seed(0)
    assert torch.equal(preset.load(FILES["4:2:0"]), torch.from_numpy(numpy.array(expected)).permute(2, 0, 1))


def test_a_batch_is_the_images_in_their_order():
    images = [torch.randint(0, 256, (3, 5, 4), dtype=torch.uint8) for _ in range(3)]
    batch, labels = data.collate([(image, label) for label, image in enumerate(images)])
    assert torch.equal(batch, torch.stack(images))
    assert labels.tolist() == [0, 1, 2]
    assert batch.is_contiguous(memory_format=torch.channels_last)
