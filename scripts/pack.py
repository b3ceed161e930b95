"""Write a smaller copy of a data set as tars that load faster: `python -m scripts.pack --data-path DIR OUT`."""

import argparse
import errno
import hashlib
import io
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple

from PIL import Image, ImageFile, features
from PIL import __version__ as pillow_version

from distributed import collectives
from errors import BadImageError, ImageError, UserError, counted, in_one_line, one_line
from files import locked, open_to_read, write_atomically
from loading.decode import load_image, to_rgb
from loading.forms import check_source, open_source
from loading.index import with_retries
from loading.loader import check_workers
from loading.progress import Progress, size_text
from loading.source import Source, digest, line_of
from loading.tars import PACK_FORMAT, PACK_KIND, PACK_MANIFEST, read_manifest
from scripts.tool import as_json, build_parser, check_outside, check_own, given_path, in_order, make_out, positive, run

PROG = "python -m scripts.pack"

# The files that this tool writes to OUT, and those that a reader may leave there.
OWN_FILES = r"(manifest\.json|[^/]+-\d{6}\.tar)(\.tmp\.\d+)?"
PASSING_FILES = r"pack\.lock|\.touchstone-index-.*"

IMAGES_PER_TASK = 8

# The fields of a manifest, and of each shard in it, with their types.
_MANIFEST = {"state": str, "splits": dict}
_RECORD = {"file": str, "images": int, "source_bytes": int, "bytes": int, "sha256": str, "skipped": list}

EPILOG = """\
examples:
  python -m scripts.pack --data-path /data/imagenet /data/imagenet-256 --short-side 256
  python -m scripts.pack --verify /data/imagenet-256

OUT gets train-000000.tar, ..., val-000000.tar, ... and manifest.json (counts, sizes, checksums, settings, images left
out). `tar xf` of every shard into one folder gives back an image folder with the same names, classes and order. Every
image is written as an RGB JPEG (4:2:0, no metadata, pixels as stored: an EXIF rotation is dropped and not applied). A
name keeps its ending, even if x.png then holds a JPEG: loaders go by content.

After an interruption of any kind run the same command again: it continues after the last whole shard. The files are the
same, byte for byte, however often it was interrupted and whatever the number of workers.
"""


class Split:
    """The images of one split, `train` or `val`, in ImageFolder's order."""

    def __init__(self, data_path: Path, name: str) -> None:
        self.name = name
        self.root = data_path / name
        self.source = open_source(self.root)
        self.names = [self.source.name(number) for number in range(len(self.source))]
        self.sizes = [self.source.size(number) for number in range(len(self.source))]

    def describe(self) -> dict[str, Any]:
        """Return facts that another run must find unchanged to continue with this one's shards."""
        lines = "".join(f"{name} {size}\n" for name, size in zip(self.names, self.sizes, strict=True))
        facts = {"images": len(self.names), "classes": len(self.source.classes), "bytes": sum(self.sizes)}
        facts["SHA-256 of names and sizes"] = hashlib.sha256(os.fsencode(lines)).hexdigest()
        return {f"{self.name} {key}": value for key, value in facts.items()}


class Shard(NamedTuple):
    """The images, from `start` to `stop` of a split, that go into a file."""

    file: str
    split: Split
    start: int
    stop: int


def plan_shards(splits: list[Split], shard_bytes: int) -> list[Shard]:
    """Cut each split where its source files add up to `shard_bytes`."""
    shards = []
    for split in splits:
        start, filled, cuts = 0, 0, []
        for index, size in enumerate(split.sizes):
            if index > start and filled + size > shard_bytes:
                cuts.append((start, index))
                start, filled = index, 0
            filled += size
        cuts.append((start, len(split.sizes)))
        shards += [Shard(f"{split.name}-{cut:06d}.tar", split, *bounds) for cut, bounds in enumerate(cuts)]
    return shards


class Packed(NamedTuple):
    """The new bytes of an image, or None and the reason if it cannot be decoded."""

    payload: bytes | None
    reason: str = ""


def shrink(image: Image.Image, *, px: int, quality: int) -> bytes:
    """Return an image as a JPEG whose shorter side is at most `px`; the other is rounded down, as by torchvision."""
    shorter = min(image.size)
    size = tuple(int(px * length / shorter) for length in image.size)
    image = to_rgb(image)
    if shorter > px:
        image = image.resize(size, Image.Resampling.BICUBIC)
    image.info = {}
    # Pillow's own buffer is too small for some images when it optimizes: it fails with "broken data stream".
    ImageFile.MAXBLOCK = max(1 << 16, 4 * image.width * image.height)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, optimize=True, subsampling="4:2:0")
    return file.getvalue()


def pack_images(convert: Callable[[Image.Image], bytes], task: tuple[Source, range]) -> list[Packed]:
    """Pack some images of a source, in a worker.

    Raises:
        ImageError: the disk or memory failed, which may pass, or an image cannot be encoded.
    """
    (source, numbers), packed = task, []
    for index in numbers:
        path = source.path(index)
        try:
            image = load_image(with_retries(partial(source.read, index)))
        except (MemoryError, OSError) as error:
            reason = "out of memory" if isinstance(error, MemoryError) else error.strerror or error
            raise ImageError(f"cannot read {path}: {reason}") from error
        except BadImageError as error:
            packed.append(Packed(None, str(error)))
            continue
        try:
            packed.append(Packed(convert(image)))
        except Exception as error:
            raise ImageError(f"cannot pack image {path}: {one_line(str(error) or type(error).__name__)}") from error
    return packed


class ShardWriter:
    """Writes the next results of the workers as one shard, and reads it back.

    Attributes:
        record: the shard's part of the manifest.
    """

    def __init__(self, shard: Shard, results: Iterator[Packed], progress: Progress, *, skip_bad: bool) -> None:
        self.split, self.progress, self.skip_bad = shard.split, progress, skip_bad
        self.names = shard.split.names[shard.start : shard.stop]
        self.results = islice(results, len(self.names))
        source_bytes = sum(shard.split.sizes[shard.start : shard.stop])
        self.record = {"file": shard.file, "images": 0, "source_bytes": source_bytes, "skipped": []}

    def write(self, file: BinaryIO) -> None:
        """Write every image as a member of a tar, with headers that depend on names and sizes alone."""
        sha256 = hashlib.sha256()
        hashing = SimpleNamespace(tell=file.tell, write=lambda content: sha256.update(content) or file.write(content))
        with tarfile.open(fileobj=hashing, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for name, packed in zip(self.names, self.results, strict=True):
                self.progress.update()
                if packed.payload is None:
                    self._leave_out(name, packed.reason)
                    continue
                member = tarfile.TarInfo(f"{self.split.name}/{name}")
                member.size = len(packed.payload)
                tar.addfile(member, io.BytesIO(packed.payload))
                self.record["images"] += 1
        self.record |= {"bytes": file.tell(), "sha256": sha256.hexdigest()}

    def _leave_out(self, name: str, reason: str) -> None:
        if not self.skip_bad:
            where = self.split.root / name
            raise ImageError(f"cannot read image {where}: {reason}; replace it, or give --skip-bad")
        self.record["skipped"].append({"name": name, "reason": reason})

    def verify(self, path: Path) -> None:
        """Read the file back; raise OSError if its content differs from the content written."""
        with open(path, "rb") as file:
            if hasattr(os, "posix_fadvise"):  # read the disk, and not the copy in memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        if checksum != self.record["sha256"]:
            raise OSError(errno.EIO, "the content read back is not the content written")


class Pack:
    """The pack in OUT: the planned shards, and the records of those that are whole.

    The facts (settings, versions and source) determine every byte of the shards.
    """

    def __init__(self, out: Path, facts: dict[str, Any], splits: list[Split], shard_bytes: int) -> None:
        self.out, self.facts, self.splits, self.shards = out, facts, splits, plan_shards(splits, shard_bytes)
        self.records: dict[str, dict] = {}  # by file name

    def resume(self, manifest: dict, *, skip_bad: bool) -> None:
        """Take over the shards of an earlier run; UserError if it had other settings, versions or images."""
        old = manifest.get("facts", {})
        changes = [
            f"{key} is {str(new)[:12]} and was {str(old.get(key))[:12]}"
            for key, new in self.facts.items()
            if old.get(key) != new
        ]
        if changes:
            raise UserError(
                f"{self.out} holds a pack begun differently: {'; '.join(changes[:2])}; restore these values, "
                "choose another folder, or start over with --overwrite"
            )
        records = records_of(manifest)
        skipped = [image["name"] for record in records.values() for image in record["skipped"]]
        if skipped and not skip_bad:
            raise UserError(
                f"{self.out} was begun with --skip-bad and lacks {skipped[0]}; give --skip-bad again, or --overwrite"
            )
        sizes = {path.name: path.stat().st_size for path in self.out.iterdir() if path.is_file()}
        self.records = {file: record for file, record in records.items() if sizes.get(file) == record["bytes"]}
        if self.records:
            print(one_line(f"{self.out} has {len(self.records)} of {counted(len(self.shards), 'shard')} already"))

    def save(self, fingerprints: dict[str, str] | None = None) -> None:
        """Write the manifest; it calls the pack complete if the fingerprints of its splits are given."""
        parts = {}
        for split in self.splits:
            planned = [shard.file for shard in self.shards if shard.split is split]
            records = [self.records[file] for file in planned if file in self.records]
            fingerprint = fingerprints[split.name] if fingerprints else None
            parts[split.name] = {"classes": len(split.source.classes), "fingerprint": fingerprint, "shards": records}
        state = "complete" if fingerprints else "writing"
        content = {"kind": PACK_KIND, "format": PACK_FORMAT, "state": state, "facts": self.facts, "splits": parts}
        self._write(PACK_MANIFEST, as_json(content))

    def _write(self, file: str, *how: Any) -> None:
        """Write a file of the pack; arguments as of `write_atomically`."""
        try:
            write_atomically(self.out / file, *how)
        except OSError as error:
            raise UserError(
                f"cannot write {self.out / file}: {error.strerror or error}; the same command continues after the "
                "whole shards",
                exit_code=1,
            ) from error

    def write(self, convert: Callable[[Image.Image], bytes], *, num_workers: int, skip_bad: bool) -> None:
        """Write the missing shards, one after the other, from images that workers pack."""
        missing = [shard for shard in self.shards if shard.file not in self.records]
        tasks = [
            (shard.split.source, range(start, min(start + IMAGES_PER_TASK, shard.stop)))
            for shard in missing
            for start in range(shard.start, shard.stop, IMAGES_PER_TASK)
        ]
        num_images = sum(len(split.names) for split in self.splits)
        num_done = num_images - sum(shard.stop - shard.start for shard in missing)
        progress = Progress(f"packing into {self.out}", num_images, "images", first=num_done)
        results = chain.from_iterable(in_order(partial(pack_images, convert), tasks, num_workers))
        for shard in missing:
            self.save()
            writer = ShardWriter(shard, results, progress, skip_bad=skip_bad)
            self._write(shard.file, writer.write, writer.verify)
            self.records[shard.file] = writer.record
        self.save({split.name: self.fingerprint(split) for split in self.splits})

    def fingerprint(self, split: Split) -> str:
        """Return the fingerprint of the packed images of a split.

        Raises:
            UserError: a class has no images left, which would change every later label.
        """
        records = [self.records[shard.file] for shard in self.shards if shard.split is split]
        skipped = {image["name"] for record in records for image in record["skipped"]}
        labels = {name: split.source.label(n) for n, name in enumerate(split.names) if name not in skipped}
        lost = set(range(len(split.source.classes))) - {*labels.values()}
        if lost:
            where = split.root / split.source.classes[min(lost)]
            raise UserError(f"no image of {where} can be read; replace one, or remove the class folder", exit_code=1)
        return digest(line_of(*image) for image in labels.items())


def own_manifest(out: Path) -> dict | None:
    """Return the manifest of a folder, or None where there is none; UserError if this version did not write it."""
    path = out / PACK_MANIFEST
    manifest = read_manifest(path)
    if manifest is None and path.exists():
        raise UserError(f"{path} is not of this tool; choose another folder")
    if manifest is None:
        return None
    if (found := manifest.get("format")) != PACK_FORMAT:
        raise UserError(f"{path} is of format {found}, and this version writes {PACK_FORMAT}; choose another OUT")
    with in_one_line(f"{path} is damaged; choose another OUT"):
        for part, types in [(manifest, _MANIFEST), *((record, _RECORD) for record in records_of(manifest).values())]:
            if wrong := [name for name, kind in types.items() if not isinstance(part[name], kind)]:
                raise ValueError(f"another type of {wrong[0]}")
    return manifest


def records_of(manifest: dict) -> dict[str, dict]:
    """Return the records of all shards by file name."""
    return {record["file"]: record for part in manifest["splits"].values() for record in part["shards"]}


def pack(options: argparse.Namespace) -> None:
    """Write the missing part of the pack, and summarise the whole."""
    out, shape = options.out, {"px": options.short_side, "quality": options.quality}
    facts = {
        "side": "short-side",
        **shape,
        "splits": options.splits,
        "shard_mib": options.shard_mib,
        "pillow": pillow_version,
    }
    facts["libjpeg of pillow"] = features.version("libjpeg_turbo") or features.version("jpg")
    make_out(out)
    with locked(out / "pack.lock", f"waiting for another process that packs into {out}"):
        earlier = own_manifest(out)
        check_own(out, f"{OWN_FILES}|{PASSING_FILES}" if earlier else PASSING_FILES, "a pack")
        splits = [Split(options.data_path, name) for name in options.splits]
        for split in splits:
            facts |= split.describe()
        packed = Pack(out, facts, splits, options.shard_mib * 2**20)
        if earlier and not options.overwrite:
            packed.resume(earlier, skip_bad=options.skip_bad)
        # The manifest goes last: in a folder without one this tool would refuse its own tars.
        for path in sorted(out.glob("*.tar*")) + sorted(out.glob(f"{PACK_MANIFEST}*")):
            if ".tmp." in path.name or options.overwrite:
                path.unlink()
        packed.write(partial(shrink, **shape), num_workers=options.workers, skip_bad=options.skip_bad)
        summarize(own_manifest(out))


def summarize(manifest: dict) -> None:
    """Print a line for each split of a complete pack."""
    for name, part in manifest["splits"].items():
        shards = part["shards"]
        num_images, num_bytes, before = (
            sum(each[key] for each in shards) for key in ("images", "bytes", "source_bytes")
        )
        num_skipped = sum(len(shard["skipped"]) for shard in shards)
        print(
            f"{one_line(name)}: {counted(num_images, 'image', ',')} of {counted(part['classes'], 'class', ',')} in "
            f"{counted(len(shards), 'shard')}, {size_text(num_bytes)}, {num_bytes / max(before, 1):.0%} of "
            f"{size_text(before)}" + (f"; {num_skipped:,} left out, listed in {PACK_MANIFEST}" if num_skipped else "")
        )


def verify(out: Path) -> None:
    """Compare every shard of a pack with its checksum, and print each fault; raise UserError if there are any."""
    manifest = own_manifest(out)
    if manifest is None:
        raise UserError(f"--verify {out}: there is no {PACK_MANIFEST} in it")
    records = records_of(manifest)
    problems = [] if manifest["state"] == "complete" else [f"{out}: not finished; run the command that began it again"]
    problems += [f"{path}: not in the manifest" for path in sorted(out.glob("*.tar")) if path.name not in records]
    for file, record in records.items():
        try:
            with open_to_read(out / file) as shard:
                is_whole = hashlib.file_digest(shard, "sha256").hexdigest() == record["sha256"]
            problems += [] if is_whole else [f"{out / file}: its content has changed since it was written"]
        except OSError as error:
            problems.append(f"{out / file}: {error.strerror}")
    for problem in problems:
        print(one_line(problem), file=sys.stderr)
    if problems:
        raise UserError(f"--verify {out}: {counted(len(problems), 'problem')}", exit_code=1)
    summarize(manifest)


def get_args_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool's options."""
    usage = "--data-path DIR OUT --short-side PX [options]"
    parser = build_parser(PROG, usage, "Write a smaller copy of a data set as tars that load faster.", EPILOG)
    parser.add_argument(
        "out", metavar="OUT", type=given_path, help="folder for the pack: new, empty, or holding one already"
    )
    parser.add_argument("--data-path", metavar="DIR", type=given_path, help="as train.py's --data-path")
    words = "parts of --data-path to pack (default: train val)"
    parser.add_argument("--splits", metavar="NAME", nargs="+", default=["train", "val"], help=words)
    modes = parser.add_mutually_exclusive_group(required=True)
    modes.add_argument(
        "--short-side", metavar="PX", type=positive, help="shrink so that the shorter side is at most PX"
    )
    modes.add_argument("--verify", action="store_true", help="check that every tar in OUT is as it was written")
    parser.add_argument("--quality", metavar="Q", type=positive, default=90, help="quality of the JPEGs (default: 90)")
    words = "MiB of source files per tar (default: 512); shrunk images make the tar smaller"
    parser.add_argument("--shard-mib", metavar="MIB", type=positive, default=512, help=words)
    words = "processes that pack images (default: 1 per core)"
    parser.add_argument("--workers", metavar="N", type=positive, default=collectives.count_cores(), help=words)
    words = "leave out and list images that cannot be decoded; without it they stop the tool"
    parser.add_argument("--skip-bad", action="store_true", help=words)
    parser.add_argument("--overwrite", action="store_true", help="remove the pack in OUT first")
    return parser


def validate(options: argparse.Namespace) -> None:
    """Raise UserError if two options contradict each other, or a value is out of range."""
    check_workers(options.workers)
    if options.quality > 100:
        raise UserError(f"--quality {options.quality}: expected a number from 1 to 100")
    if options.verify:
        if options.data_path or options.overwrite or options.skip_bad:
            raise UserError("--verify takes the folder of a pack, and no other option")
        return
    if options.data_path is None:
        raise UserError("--data-path is needed: the folder that holds train/ and val/ (--help lists the options)")
    for name in options.splits:
        if name in ("", ".", "..") or "/" in name or options.splits.count(name) > 1:
            words = " ".join(options.splits)
            raise UserError(f"--splits {words}: give names of folders in {options.data_path}, each once")
        check_source(options.data_path / name)
        check_outside(options.out, options.data_path / name)


def pack_or_verify() -> None:
    """Pack or verify as the command line says."""
    options = get_args_parser().parse_args()
    validate(options)
    verify(options.out) if options.verify else pack(options)


def main() -> None:
    """Run the command line."""
    again = "the same command continues after the last whole shard"
    run(PROG, pack_or_verify, f"interrupted; {again}", when_killed=f"; {again}")


if __name__ == "__main__":
    main()
