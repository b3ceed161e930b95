"""Decode every image of a data set, and compare its counts and classes.

Examples:
  python -m scripts.check /data/imagenet
  python -m scripts.check /data/imagenet --sample 2000              # a quick look
  python -m scripts.check /data/imagenet --json report.json
  python -m scripts.check /data/imagenet --expect-val 0             # train/ alone, for train.py --minival
  python -m scripts.check /data/pets --expect-classes 37
  python -m scripts.check /data/xrays --statistics 1                # --mean and --std of grey images

DATA_PATH is as train.py's --data-path: class folders, tars or packs. The tool changes nothing in it, but leaves an
index of the images there, as a run does.
The exit code is 0 if the data set is healthy, 1 if it is not and 2 if the command cannot be carried out.
"""

import argparse
import hashlib
import io
import re
import struct
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from PIL import Image, ImageCms

from distributed import collectives
from errors import BadImageError, ImageError, UserError, counted, one_line
from files import retry
from loading.decode import MODES, Decoding, decode_plainly, load_image, orientation_of, resized_size
from loading.forms import open_source
from loading.loader import check_workers
from loading.progress import Progress, size_text
from loading.remarks import unused_range
from loading.remote import RemotePack
from loading.source import Source, alike_classes, count_classes
from scripts import tool
from settings.options import BY_NAME

PROG = "python -m scripts.check"

# The numbers of ILSVRC2012, which are expected of a set with at least so many classes that are all called as synsets.
IMAGENET = {"train": 1_281_167, "val": 50_000, "classes": 1_000}
_SYNSETS, _SYNSET = 500, re.compile(r"n\d{8}")

# Each kind of finding, the worst first: whether it makes a data set unhealthy, and its meaning.
KINDS = {
    "set": (True, "a split or some of its classes or images are missing, or there are too many"),
    "hidden": (True, "hidden, or a program's own as macOS's ._x.jpg: train.py refuses them"),
    "unreadable": (True, "the disk does not give the file"),
    "damaged": (True, "no image that is read here: empty, truncated, too large, or of another format"),
    "leak": (True, "the same bytes in train and in val"),
    "duplicate": (False, "the same bytes twice in a split: leave one out, for --minival may hold out the other"),
    "alpha": (False, "transparency, which train.py drops unless --in-chans is 4: hidden colours show"),
    "dark": (True, "samples of more than 8 bits use little of their range, so that images are of nearly one tone"),
    "deep": (False, "samples of more than 8 bits, of which the highest 8 are loaded"),
    "profile": (False, "a colour profile other than sRGB, as Display P3 of iPhones: train.py does not apply it"),
    "alike": (False, "classes whose names look alike: perhaps one class, written in two ways"),
    "scaled": (False, "an AVIF whose header claims another size than that of its picture, which is scaled to it"),
    "turned": (False, "EXIF says to turn it, as train.py does with --exif, and ImageFolder does not"),
}

_IMAGES_PER_TASK = 16

_AV1_HEADER = re.compile(rb"\x0a([\x06-\x20])")  # the beginning of a sequence header, and its number of bytes

# The primaries of sRGB as profiles hold them: XYZ, adapted to the white D50 (IEC 61966-2-1, ICC.1:2022).
_SRGB = (0.4360, 0.2225, 0.0139), (0.3851, 0.7169, 0.0971), (0.1430, 0.0606, 0.7139)

# The printed report shows this many findings of each kind.
_SHOWN = 5


class Inspection(NamedTuple):
    """A hash of an image's bytes, their number (0 if unknown), findings: kinds and reasons; and `moments`, or None."""

    digest: int
    num_bytes: int
    findings: list[tuple[str, str]]
    moments: numpy.ndarray | None


def scaled_from(payload: bytes) -> str:
    """Return the size of an AVIF's picture by its AV1 header, if that is of the usual form and no `ispe` agrees."""
    configuration = payload[payload.find(b"av1C") + 5]
    begin = f"{configuration >> 5:03b}11{configuration & 31:05b}"  # the profile and level of a still picture
    for match in _AV1_HEADER.finditer(payload, payload.find(b"mdat")):
        bits = "".join(f"{byte:08b}" for byte in payload[match.end() : match.end() + match[1][0]]).ljust(50, "0")
        if bits.startswith(begin):
            middle = 19 + int(bits[10:14], 2)  # the numbers of bits less one, then the sides less one
            sides = int(bits[18:middle], 2) + 1, int(bits[middle : middle + int(bits[14:18], 2) + 1], 2) + 1
            is_claimed = b"ispe" + struct.pack(">III", 0, *sides) in payload
            return "" if is_claimed else f"from {sides[0]} x {sides[1]}"
    return ""


def other_profile(content: bytes) -> str:
    """Return the name of a colour profile whose primaries are not those of sRGB; empty if they are."""
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(content)).profile
    except (OSError, TypeError):  # a TIFF's may be any number
        return "cannot be read"
    primaries = [each and each[0] for each in (profile.red_colorant, profile.green_colorant, profile.blue_colorant)]
    if None not in primaries and numpy.allclose(primaries, _SRGB, atol=0.005):
        return ""
    return profile.profile_description or profile.xcolor_space


def oddities(image: Image.Image, payload: bytes) -> list[tuple[str, str]]:
    """Return the harmless oddities of an image and its file's bytes."""
    found = []
    if image.format == "AVIF" and (words := scaled_from(payload)):
        found.append(("scaled", words))
    if image.has_transparency_data:
        found.append(("alpha", f"mode {image.mode}"))
    if image.info["bits"]:
        found.append(("deep", f"{image.info['bits']} bits"))
    if (profile := image.info.get("icc_profile")) and (name := other_profile(profile)):
        found.append(("profile", name))
    if (orientation := orientation_of(image)) != 1:
        found.append(("turned", f"EXIF orientation {orientation}"))
    return found


def moments(image: Image.Image) -> numpy.ndarray:
    """Return (2, C) float64: the means of an image's values from 0 to 1 in each channel, and of their squares."""
    counts = numpy.reshape(image.histogram(), (-1, 256))
    return numpy.stack([counts @ numpy.linspace(0, 1, 256) ** power for power in (1, 2)]) / (image.width * image.height)


def inspect_images(splits: dict[str, Source], options: Any, images: list[tuple[str, int]]) -> list[Inspection]:
    """Inspect images, by their splits and numbers, in a worker process; measure those of train, if asked."""
    inspections, resize_size = [], options.val_resize_size or BY_NAME["val_resize_size"].default
    for split, number in images:
        payload, measured = b"", None
        try:
            payload = retry(partial(splits[split].read, number))
            found = oddities(image := load_image(payload, options.grey_range), payload)
            if split == "val" or len(splits) == 1:  # evaluated, as are those of --minival
                resized_size(image.height, image.width, resize_size)
            image = decode_plainly(payload, None, Decoding(MODES[options.statistics or 3]), image)
            if options.statistics is not None and split == "train":
                measured = moments(image)
        except BadImageError as error:
            found = [("damaged", str(error))]
        except (ImageError, MemoryError, OSError) as error:
            found = [("unreadable", getattr(error, "strerror", None) or str(error) or "no memory")]
        digest = int.from_bytes(hashlib.blake2b(payload, digest_size=8).digest(), "big")
        inspections.append(Inspection(digest, len(payload), found, measured))
    return inspections


class Report:
    """The findings, for people and for programs."""

    def __init__(self) -> None:
        self.splits: dict[str, dict] = {}
        self.findings: dict[str, list[dict]] = {kind: [] for kind in KINDS}

    def add(self, kind: str, split: str, image: str | None, reason: str) -> None:
        """Note a finding."""
        self.findings[kind].append({"split": split, "image": image, "reason": reason})

    @property
    def is_healthy(self) -> bool:
        """Whether nothing was found that does harm."""
        return not any(found and KINDS[kind][0] for kind, found in self.findings.items())

    def show(self) -> None:
        """Print the report."""
        for name, facts in self.splits.items():
            amounts = counted(facts["images"], "image", ","), counted(facts["classes"], "class", ",")
            fewest = f", the fewest in {one_line(facts['fewest'])}" if " to " in facts["per_class"] else ""
            print(f"{name}: {' of '.join(amounts)} ({facts['per_class']} each{fewest})")
            print(f"  decoded {facts['looked_at']:,}, {size_text(facts['bytes'])}")
            if "mean" in facts:
                flags = (f"--{name} {' '.join(f'{value:.4f}' for value in facts[name])}" for name in ("mean", "std"))
                print(f"  {' '.join(flags)} (each image weighs the same)")
        for kind, found in self.findings.items():
            if found:
                print(f"{'PROBLEM' if KINDS[kind][0] else 'note'} {kind}: {len(found):,} ({KINDS[kind][1]})")
                for each in found[:_SHOWN]:
                    print("  " + one_line(": ".join(filter(None, (each["image"], each["reason"])))))
                if len(found) > _SHOWN:
                    print(f"  and {len(found) - _SHOWN:,} more, which --json FILE lists")
        print("healthy" if self.is_healthy else "NOT healthy")

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        findings = [
            {"kind": kind, "is_problem": KINDS[kind][0], "count": len(found), "images": found}
            for kind, found in self.findings.items()
            if found
        ]
        return {"healthy": self.is_healthy, "splits": self.splits, "findings": findings}


def open_splits(options: argparse.Namespace, names: tuple[str, ...], report: Report) -> dict[str, Source]:
    """Return the images of each split that can be opened, and report why the other splits cannot."""
    data_path = options.data_path
    if isinstance(data_path, Path) and not data_path.is_dir():
        raise UserError(f"{data_path} is not a folder; give the one that holds train/ and val/")
    splits = {}
    for name in names:
        hidden: list[tuple[str, str]] = []
        try:
            if isinstance(data_path, Path):
                reading = options.multi_label, options.extensions, hidden
                splits[name] = open_source(data_path / name, *reading, is_all=name == "train")
            else:
                splits[name] = RemotePack(data_path, name)
        except UserError as error:
            hint = "; --expect-val 0 checks train alone, for train.py --minival" if name == "val" and splits else ""
            report.add("set", name, None, f"{error}{hint}")
        for path, remedy in hidden:
            report.add("hidden", name, path, remedy)
    if not splits:
        raise UserError(report.findings["set"][0]["reason"])
    return splits


def check_set(splits: dict[str, Source], options: argparse.Namespace, report: Report) -> None:
    """Report counts that are not as expected, and classes that are not in both splits."""
    for name, index in splits.items():
        is_imagenet = len(index.classes) >= _SYNSETS and all(map(_SYNSET.fullmatch, index.classes))
        counts = count_classes(index)
        per_class = f"{counts.min():,}" if counts.min() == counts.max() else f"{counts.min():,} to {counts.max():,}"
        report.splits[name] = {"images": len(index), "classes": len(index.classes), "per_class": per_class}
        report.splits[name]["fewest"] = index.classes[counts.argmin()]
        for option, number, noun in ((name, len(index), "images"), ("classes", len(index.classes), "classes")):
            given = getattr(options, f"expect_{option}")
            expected = (IMAGENET[option] if is_imagenet else "any") if given is None else given
            if expected not in ("any", number):
                reason = f"{name} has {number:,} {noun}, and {expected:,} are expected (--expect-{option})"
                report.add("set", name, None, reason)
        if words := alike_classes(index.classes):
            report.add("alike", name, None, words)
    if len(splits) == 2 and splits["train"].classes != splits["val"].classes:
        train, val = set(splits["train"].classes), set(splits["val"].classes)
        for name, alone in (("train", train - val), ("val", val - train)):
            if alone:
                first = ", ".join(sorted(alone)[:3])
                report.add("set", name, None, f"{counted(len(alone), 'class', ',')} in {name} alone, such as {first}")


def look_at_all(splits: dict[str, Source], options: argparse.Namespace, report: Report) -> None:
    """Decode images, all or some of each split, and report their defects and the statistics of train."""
    sample, sums, num_measured = options.sample, numpy.zeros((2, 1)), 0
    images = [
        (name, number)
        for name, source in splits.items()
        for number in numpy.linspace(0, len(source) - 1, min(sample or len(source), len(source)), dtype=int).tolist()
    ]
    tasks = [images[begin : begin + _IMAGES_PER_TASK] for begin in range(0, len(images), _IMAGES_PER_TASK)]
    inspections = chain.from_iterable(tool.in_order(partial(inspect_images, splits, options), tasks, options.workers))
    seen = numpy.zeros((len(images), 2), dtype=numpy.uint64)
    progress = Progress("checking", len(images), "images")
    for place, ((name, number), inspection) in enumerate(zip(images, inspections, strict=True)):
        seen[place] = inspection[:2]
        if inspection.moments is not None:
            sums, num_measured = sums + inspection.moments, num_measured + 1
        for kind, reason in inspection.findings:
            report.add(kind, name, splits[name].path(number), reason)
        progress.update(num_bytes=inspection.num_bytes)
    progress.finish()
    for name in splits:
        own = seen[[split == name for split, _ in images]]
        report.splits[name].update(looked_at=len(own), bytes=int(own[:, 1].sum()))
        if words := unused_range(splits[name], Decoding(grey_range=options.grey_range)):
            report.add("dark", name, None, f"{name}: {words}")
    if num_measured:
        mean, squares = sums / num_measured
        # A channel of one value, such as alpha without transparency, has the least deviation that --std takes.
        std = numpy.sqrt(numpy.maximum(squares - mean**2, BY_NAME["std"].at_least ** 2))
        report.splits["train"].update(mean=mean.tolist(), std=std.tolist())
    find_equal(splits, images, seen, report)


def find_equal(splits: dict[str, Source], images: list[tuple[str, int]], seen: numpy.ndarray, report: Report) -> None:
    """Report images of equal bytes, within a split and between the two."""
    order = numpy.argsort(seen[:, 0], kind="stable")  # of equal ones the first in train stays first
    digests = seen[order, 0]
    first = 0
    for place in numpy.flatnonzero((digests[1:] == digests[:-1]) & (seen[order[1:], 1] > 0)).tolist():
        if digests[first] != digests[place]:
            first = place
        (name, number), (other_name, other) = images[order[place + 1]], images[order[first]]
        ours, theirs = splits[name], splits[other_name]
        more = "" if ours.class_name(number) == theirs.class_name(other) else ", which is of another class"
        kind = "duplicate" if name == other_name else "leak"
        report.add(kind, name, ours.path(number), f"has the bytes of {theirs.path(other)}{more}")


def expectation(text: str) -> int | str:
    """Return a number, or `any`; an argparse type."""
    return text if text == "any" else 0 if text == "0" else tool.positive(text)


def get_args_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool's options."""
    kinds = [f"  {kind:<13} {meaning}{'' if bad else ' (no problem)'}" for kind, (bad, meaning) in KINDS.items()]
    parser = tool.build_parser(PROG, "DATA_PATH [options]", __doc__, "\n".join(["findings:", *kinds]))
    add, cores = parser.add_argument, collectives.count_cores()
    add("data_path", metavar="DATA_PATH", type=tool.as_place, help="as train.py's --data-path")
    nouns = "images of train", "images of val; 0 checks train alone", "classes of each split"
    for (name, number), noun in zip(IMAGENET.items(), nouns, strict=True):
        default = f"{number:,} where the classes are ImageNet's synsets, else any"
        words = f"how many {noun}, or any (default: {default})"
        add(f"--expect-{name}", metavar="N", type=expectation, help=words)
    add("--multi-label", metavar="SEPARATOR", nargs="?", const=",", help="as train.py's: several labels an image")
    add("--sample", metavar="N", type=tool.positive, help="decode only N images of each split, evenly spaced")
    words = (
        "print mean and standard deviation of the images of train, for train.py's --mean and --std, in 1, 3 or 4 "
        "channels as --in-chans has them (3 if no number is given)"
    )
    choices = BY_NAME["in_chans"].choices
    add("--statistics", metavar="CHANNELS", type=int, nargs="?", const=3, choices=choices, help=words)
    tool.add_train_option(parser, "val_resize_size", "as train.py's: images too long to be resized so are damaged")
    tool.add_train_option(parser, "grey_range", "as train.py's: grey samples that become black and white")
    tool.add_train_option(parser, "extensions", "further extensions of images in folders and tars, as train.py's")
    words = "write the report to FILE, with every finding"
    add("--json", metavar="FILE", type=tool.output_file(".json"), help=words)
    add("--workers", metavar="N", type=tool.positive, default=cores, help="processes (default: 1 per core)")
    return parser


def check(options: argparse.Namespace) -> int:
    """Print the report, and return the exit code."""
    check_workers(options.workers)
    BY_NAME["grey_range"].check(options.grey_range)
    report = Report()
    names = ("train",) if options.expect_val == 0 else ("train", "val")
    splits = open_splits(options, names, report)
    check_set(splits, options, report)
    look_at_all(splits, options, report)
    report.show()
    if options.json:
        facts = {"data_path": str(options.data_path), "sample": options.sample}
        tool.write_report(options.json, {**facts, **report.as_dict()})
    return 0 if report.is_healthy else 1


def main() -> None:
    """Check the data set of the command line."""
    tool.run(PROG, lambda: check(get_args_parser().parse_args()), "interrupted; nothing was changed")


if __name__ == "__main__":
    main()
