"""Images made up: folders of them, files of every kind, and every form in which a split may be packed."""

import io
import shutil
import tarfile
from pathlib import Path

import numpy
import torch
from PIL import ExifTags, Image

from tests.ranks import Outcome, run_ranks, tool_rank


def write_images(folder: Path, counts: dict[str, list[int]], size: tuple[int, int] = (40, 32)) -> Path:
    """Write JPEGs of smooth noise, counts[split][class] of them, and return the folder."""
    generator = torch.Generator().manual_seed(1)
    for split, numbers in counts.items():
        for label, number in enumerate(numbers):
            directory = folder / split / f"class{label}"
            directory.mkdir(parents=True)
            for index in range(number):
                # A class has a mean colour, so that there is something to learn.
                pixels = torch.randint(0, 128, (4, 4, 3), generator=generator)
                pixels[..., label % 3] += 100
                image = Image.fromarray(pixels.to(torch.uint8).numpy()).resize(size, Image.Resampling.BICUBIC)
                image.save(directory / f"image{index:03d}.jpg", quality=90)
    return folder


def write_split(root):
    """Write files of two classes in nested folders, which are no images, and return the folder."""
    names = ["b/2.jpg", "b/10.JPEG", "b/1.png", "a/x.webp", "a/deep/er/y.jpg", "a/däep er/z.jpg", "a/notes.txt"]
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(f"{name} holds this".encode() * number)
    (root / "stray.jpg").touch()
    return root


def turn(path, orientation):
    with Image.open(path) as image:
        exif = image.getexif()
        exif[ExifTags.Base.Orientation] = orientation
        image.save(path, exif=exif, quality=95)


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


ROTATED = Image.Exif()
ROTATED[0x0112] = 6
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
    "EXIF": encoded(picture(), "JPEG", exif=ROTATED),
    "comment": encoded(picture(), "JPEG", comment=b"x" * 5000),
    "PNG": encoded(picture(), "PNG"),
    "palette": encoded(picture().quantize(16), "PNG"),
    "transparent": encoded(picture(mode="RGBA"), "PNG"),
    "one bit": encoded(picture(mode="1"), "PNG"),
    "WebP": encoded(picture(), "WEBP"),
    "one row": encoded(picture(40, 1), "JPEG"),
    "BMP": encoded(picture(), "BMP"),
    "PPM": encoded(picture(), "PPM"),
    "TIFF": encoded(picture(), "TIFF"),
    "MPO": encoded(picture(), "MPO", save_all=True, append_images=[picture()]),
}


def pack(path, names, prefix=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for member, file in names.items():
            archive.add(file, prefix + member, recursive=False)
    return path


def files_of(root, *, reverse=True):
    """Return {name: path} of a folder, not in the order that ImageFolder has."""
    paths = sorted((path for path in root.rglob("*") if path.is_file()), reverse=reverse)
    return {str(path.relative_to(root)): path for path in paths}


def class_tars(root, target, *, prefix=False):
    for folder in [path for path in root.iterdir() if path.is_dir()]:
        pack(target / f"{folder.name}.tar", files_of(folder), f"{folder.name}/" if prefix else "")
    return target


def pack_whole(root, target):
    pack(target / "train.tar", files_of(root))


def pack_as_tar_does(root, target):
    with tarfile.open(target / "train.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        archive.add(root, "./train")


def pack_shards(root, target):
    files = list(files_of(root).items())
    for number in range(3):
        pack(target / f"train-{number:06d}.tar", dict(files[number::3]), "train/")


def pack_shards_within(root, target):
    pack_shards(root, target / "train")


def pack_classes(root, target):
    class_tars(root, target / "train")


def pack_classes_with_their_names(root, target):
    class_tars(root, target / "train", prefix=True)


def pack_official(root, target):
    inner = class_tars(root, target / "inner")
    pack(target / "ILSVRC2012_img_train.tar", files_of(inner))
    shutil.rmtree(inner)


FORMS = [
    pack_whole, pack_as_tar_does, pack_shards, pack_shards_within, pack_classes, pack_classes_with_their_names,
    pack_official,
]  # fmt: skip


def pack_process(argv, fault=None, largest_file=None):
    from scripts import pack

    plan_shards = pack.plan_shards
    pack.plan_shards = lambda splits, _: plan_shards(splits, 12_000)  # --shard-mib knows whole MiB only
    tool_rank("pack", argv, None, fault, largest_file)


def run_pack(tmp_path: Path, *argv, fault=None, largest_file=None) -> Outcome:
    return run_ranks(pack_process, 1, argv, fault, largest_file, log_folder=tmp_path, timeout_s=60)
