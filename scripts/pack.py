"""Write a smaller copy of a data set as tars that load faster: `python -m scripts.pack --data-path DIR OUT`."""

import argparse
import errno
import hashlib
import io
import json
import os
import re
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple

from PIL import Image, ImageFile, features
from PIL import __version__ as pillow_version
from torch.utils.data import DataLoader

from distributed import collectives
from distributed.signals import start_worker
from errors import BadImageError, ImageError, UserError, counted, in_one_line, one_line
from files import locked, open_to_read, write_atomically
from loading.decode import load_image, to_rgb
from loading.forms import check_source, open_source
from loading.index import with_retries
from loading.progress import Progress, size_text
from loading.source import Source, digest, line_of
from loading.tars import PACK_FORMAT, PACK_KIND, PACK_MANIFEST, read_manifest, tar_members
from scripts import tool

PROG = "python -m scripts.pack"

LOCK = "pack.lock"

# The files that this tool writes to OUT; `--overwrite` removes these and no others.
OWN_FILES = re.compile(r"(manifest\.json|[^/]+-\d{6}\.tar)(\.tmp\.\d+)?")

# Files that others may have left there: a lock, and the index of a reader.
PASSING_FILES = re.compile(r"pack\.lock|\.touchstone-index-.*")

IMAGES_PER_TASK = 8

# The fields that a manifest, each split in it and each shard must have, with their types.
_MANIFEST = {"state": str, "settings": dict, "tools": dict, "source": dict, "splits": dict}
_SPLIT = {"shards": list, **dict.fromkeys(("images", "classes", "num_shards", "bytes", "source_bytes", "skipped"), int)}
_SHARD = {"file": str, "images": int, "bytes": int, "sha256": str, "skipped": list}

EPILOG = """\
examples:
  python -m scripts.pack --data-path /data/imagenet /data/imagenet-256 --short-side 256
  python -m scripts.pack --verify /data/imagenet-256

OUT gets train-000000.tar, ..., val-000000.tar, ... and manifest.json (counts, sizes, checksums, settings, images left
out). `tar xf` of every shard into one folder gives back an image folder with the same names, classes and
order. Every image is written as an RGB JPEG (4:2:0, no metadata, pixels as stored: an EXIF rotation is dropped and not
applied). A name keeps its ending, even if x.png then holds a JPEG: loaders go by content.

After an interruption of any kind run the same command again: it goes on after the last whole shard. The files are the
same, byte for byte, however often it was interrupted and whatever the number of workers.
"""


class UnfinishedError(UserError):
    """The pack cannot be finished, or is damaged; whole shards stay."""

    exit_code = 1


class Split:
    """The images of one split, `train` or `val`, in ImageFolder's order."""

    def __init__(self, data_path: Path, name: str) -> None:
        self.name = name
        self.root = data_path / name
        self.source = open_source(self.root)
        self.names = [self.source.name(number) for number in range(len(self.source))]
        self.sizes = [self.source.size(number) for number in range(len(self.source))]

    def describe(self) -> dict:
        """Return facts that another run must find unchanged to go on with this one's shards."""
        lines = "".join(f"{name} {size}\n" for name, size in zip(self.names, self.sizes, strict=True))
        checksum = hashlib.sha256(os.fsencode(lines)).hexdigest()
        facts = {"images": len(self.names), "classes": len(self.source.classes), "bytes": sum(self.sizes)}
        return {**facts, "names_sha256": checksum}


class Shard(NamedTuple):
    """The images, from `start` to `stop` of a split, that go into a file."""

    file: str
    split: Split
    start: int
    stop: int

    @property
    def source_bytes(self) -> int:
        """The size of the images' files."""
        return sum(self.split.sizes[self.start : self.stop])


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
    """The new bytes of an image, or None if it cannot be decoded; the note says why."""

    payload: bytes | None
    note: str = ""


def shrink(image: Image.Image, *, side: str, px: int, quality: int) -> Packed:
    """Encode an image again as JPEG, so that its `short-side` or `max-side` is at most `px`.

    The other side is rounded down, as torchvision's Resize does.
    """
    longest = (min if side == "short-side" else max)(image.size)
    size = tuple(max(int(px * length / longest), 1) for length in image.size)
    image = to_rgb(image)
    if longest > px:
        image = image.resize(size, Image.Resampling.BICUBIC)
    image.info = {}
    # Pillow's own buffer is too small for some images when it optimizes: it fails with "broken data stream".
    ImageFile.MAXBLOCK = max(1 << 16, 4 * image.width * image.height)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, optimize=True, subsampling="4:2:0")
    encoded = load_image(file.getvalue())
    if (encoded.size, encoded.mode) != (image.size, "RGB"):
        raise ValueError(f"encoded as {encoded.mode} of {encoded.size}, not RGB of {image.size}")
    return Packed(file.getvalue())


Convert = Callable[[Image.Image], Packed]


def pack_images(convert: Convert, task: tuple[Source, range]) -> list[Packed]:
    """Pack some images of a source, in a worker.

    Raises:
        ImageError: the disk or memory failed, which may pass, or an image cannot be encoded.
    """
    (source, numbers), packed = task, []
    for index in numbers:
        path = source.path(index)
        try:
            payload = with_retries(partial(source.read, index))
            image = load_image(payload)
        except (MemoryError, OSError) as error:
            reason = "out of memory" if isinstance(error, MemoryError) else error.strerror or error
            raise ImageError(f"cannot read {path}: {reason}") from error
        except BadImageError as error:
            packed.append(Packed(None, str(error)))
            continue
        try:
            packed.append(convert(image))
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
        self.record = {
            "file": shard.file, "images": 0, "source_bytes": shard.source_bytes, "bytes": 0, "sha256": "",
            "skipped": [],
        }  # fmt: skip

    def write(self, file: BinaryIO) -> None:
        """Write every image as a member of a tar, with headers that depend on names and sizes alone."""
        sha256 = hashlib.sha256()
        hashing = SimpleNamespace(tell=file.tell, write=lambda content: sha256.update(content) or file.write(content))
        with tarfile.open(fileobj=hashing, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for name, packed in zip(self.names, self.results, strict=True):
                self.progress.update()
                self._note(name, packed)
                if packed.payload is not None:
                    member = tarfile.TarInfo(f"{self.split.name}/{name}")
                    member.size = len(packed.payload)
                    tar.addfile(member, io.BytesIO(packed.payload))
        self.record |= {"bytes": file.tell(), "sha256": sha256.hexdigest()}

    def _note(self, name: str, packed: Packed) -> None:
        """Count an image, or note why it is left out; ImageError if it may not be left out."""
        if packed.payload is None:
            if not self.skip_bad:
                raise ImageError(
                    f"cannot read image {self.split.root / name}: {packed.note}; replace it, or leave such images out "
                    "with --skip-bad (the same command goes on after the last whole shard)"
                )
            self.record["skipped"].append({"name": name, "reason": packed.note})
            return
        self.record["images"] += 1

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

    The facts (settings, tools and source) determine every byte of the shards.
    """

    def __init__(self, out: Path, facts: dict, splits: list[Split], shard_bytes: int) -> None:
        self.out, self.facts, self.splits, self.shards = out, facts, splits, plan_shards(splits, shard_bytes)
        self.records = {}  # by file name

    @property
    def missing(self) -> list[Shard]:
        """The shards that are not whole yet."""
        return [shard for shard in self.shards if shard.file not in self.records]

    def go_on(self, manifest: dict, *, skip_bad: bool) -> None:
        """Take over the shards of an earlier run; UserError if it had other settings, tools or images."""
        changes = [
            f"{key} is {new} and was {old}"
            for topic, facts in self.facts.items()
            for key, old, new in differences(manifest[topic], facts)
        ]
        if changes:
            raise UserError(
                f"{self.out} holds a pack that was begun otherwise: {'; '.join(changes[:2])}. To go on restore the "
                "old values; else choose another folder, or start over with --overwrite"
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
            parts[split.name] = {
                **{key: sum(record[key] for record in records) for key in ("images", "source_bytes", "bytes")},
                "classes": len(split.source.classes),
                "skipped": sum(len(record["skipped"]) for record in records),
                "fingerprint": fingerprints[split.name] if fingerprints else None,
                "num_shards": len(planned),
                "shards": records,
            }
        state = "complete" if fingerprints else "writing"
        content = {"kind": PACK_KIND, "format": PACK_FORMAT, "state": state, **self.facts, "splits": parts}
        self._write(PACK_MANIFEST, lambda file: file.write((json.dumps(content, indent=1) + "\n").encode()))

    def _write(self, file: str, *how: Callable) -> None:
        """Write a file of the pack; arguments as of `write_atomically`."""
        try:
            write_atomically(self.out / file, *how)
        except OSError as error:
            raise UnfinishedError(
                f"cannot write {self.out / file}: {error.strerror or error}; whole shards stay, and the same command "
                "goes on after them"
            ) from error

    def write(self, convert: Convert, *, num_workers: int, skip_bad: bool) -> None:
        """Write the missing shards, one after the other, from images that workers pack."""
        missing = self.missing
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
            writer = ShardWriter(shard, results, progress, skip_bad=skip_bad)
            self._write(shard.file, writer.write, writer.verify)
            self.records[shard.file] = writer.record
            self.save()
        progress.close()


def in_order(function: Callable[[Any], Any], tasks: list, num_workers: int) -> DataLoader:
    """Return an iterable of the function's results in the order of the tasks, computed by worker processes."""
    processes = {"num_workers": num_workers, "multiprocessing_context": "fork", "worker_init_fn": start_worker}
    return DataLoader(tasks, batch_size=None, collate_fn=function, **processes)


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
    parts = [(manifest, _MANIFEST)]
    with in_one_line(f"{path} is damaged; choose another OUT"):
        parts += [(part, _SPLIT) for part in manifest["splits"].values()]
        parts += [(record, _SHARD) for record in records_of(manifest).values()]
        for part, types in parts:
            if wrong := [name for name, kind in types.items() if not isinstance(part[name], kind)]:
                raise ValueError(f"another type of {wrong[0]}")
    return manifest


def records_of(manifest: dict) -> dict[str, dict]:
    """Return the records of all shards by file name."""
    return {record["file"]: record for part in manifest["splits"].values() for record in part["shards"]}


def prepare_folder(out: Path, *, overwrite: bool) -> dict | None:
    """Tidy OUT up and return the manifest of the pack to go on with, if any; UserError if it holds something else."""
    manifest = own_manifest(out)
    paths = [path for path in sorted(out.iterdir()) if not PASSING_FILES.fullmatch(path.name)]
    foreign = [path for path in paths if manifest is None or not OWN_FILES.fullmatch(path.name)]
    if foreign:
        raise UserError(f"{out} holds {foreign[0].name}, which is no part of a pack; choose an empty or new folder")
    # The manifest goes last: in a folder without one this tool would refuse its own tars.
    for path in sorted(paths, key=lambda path: path.name == PACK_MANIFEST):
        if ".tmp." in path.name or overwrite:
            path.unlink()
    return None if overwrite else manifest


def differences(old: dict, new: dict, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the key, the old and the new value wherever two nested dicts differ."""
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from differences(before, after, f"{prefix}{key} ")
        elif before != after:
            yield f"{prefix}{key}", *("none" if value is None else value for value in (before, after))


def choose_conversion(options: argparse.Namespace) -> tuple[Convert, dict, dict]:
    """Return the conversion of an image, and the settings and tool versions that decide its bytes."""
    libjpeg = features.version("libjpeg_turbo") or features.version("jpg")
    tools = {"pillow": pillow_version, "libjpeg of pillow": libjpeg}
    side = "short-side" if options.short_side else "max-side"
    shape = {"px": options.short_side or options.max_side, "quality": options.quality}
    settings = {"side": side, **shape, "splits": options.splits, "shard_mib": options.shard_mib}
    return partial(shrink, side=side, **shape), settings, tools


def pack(options: argparse.Namespace) -> None:
    """Write the missing part of the pack, and summarise the whole."""
    convert, settings, tools = choose_conversion(options)
    out = options.out
    tool.make_out(out)
    with alone_in(out):
        earlier = prepare_folder(out, overwrite=options.overwrite)
        splits = [Split(options.data_path, name) for name in options.splits]
        facts = {"settings": settings, "tools": tools, "source": {split.name: split.describe() for split in splits}}
        packed = Pack(out, facts, splits, options.shard_mib * 2**20)
        if earlier is not None:
            packed.go_on(earlier, skip_bad=options.skip_bad)
        if packed.missing:
            packed.save()
            packed.write(convert, num_workers=options.workers, skip_bad=options.skip_bad)
        packed.save({split.name: packed_fingerprint(split, packed.records) for split in splits})
    summarize(own_manifest(out))


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Hold the lock of a folder; UserError if another process does."""
    try:
        with locked(out / LOCK, "", wait_s=0):
            yield
    except BlockingIOError as error:
        raise UserError(f"another process is packing into {out}; wait for it, or choose another folder") from error


def packed_fingerprint(split: Split, records: dict[str, dict]) -> str:
    """Return the fingerprint of the packed images of a split.

    Raises:
        UnfinishedError: a class has no images left, which would change every later label.
    """
    of_split = [record for file, record in records.items() if file.rpartition("-")[0] == split.name]
    skipped = {image["name"] for record in of_split for image in record["skipped"]}
    labels = {name: split.source.label(n) for n, name in enumerate(split.names) if name not in skipped}
    lost = set(range(len(split.source.classes))) - {*labels.values()}
    if lost:
        where = split.root / split.source.classes[min(lost)]
        raise UnfinishedError(f"no image of {where} can be read; replace one, or remove the class folder")
    return digest(line_of(*image) for image in labels.items())


def summarize(manifest: dict) -> None:
    """Print a line for each split of a complete pack."""
    for name, part in manifest["splits"].items():
        share = f"{part['bytes'] / max(part['source_bytes'], 1):.0%}"
        line = (
            f"{name}: {counted(part['images'], 'image', ',')} of {counted(part['classes'], 'class', ',')} in "
            f"{counted(part['num_shards'], 'shard')}, "
            f"{size_text(part['bytes'])}, {share} of {size_text(part['source_bytes'])}"
        )
        if part["skipped"]:
            line += f"; {part['skipped']:,} left out, listed in {PACK_MANIFEST}"
        print(one_line(line))


def check_shard(out: Path, record: dict) -> list[str]:
    """Compare a shard with its record, decode its images, and return its faults, one line each."""
    path, problems, damaged, num_images = out / record["file"], [], [], 0
    try:
        with open_to_read(path) as file:
            checksum, size = hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
            if size != record["bytes"]:
                problems.append(f"{path}: {size:,} bytes, and the manifest says {record['bytes']:,}")
            elif checksum != record["sha256"]:
                problems.append(f"{path}: its content has changed since it was written (SHA-256 differs)")
            for member in tar_members(path, file, 0, size):
                num_images += 1
                file.seek(member.offset_data)
                try:
                    load_image(file.read(member.size))
                except BadImageError as error:
                    damaged.append(f"{member.name}: {error}")
    except (MemoryError, OSError, UserError) as error:
        problems.append(f"{path}: {one_line(str(error).removeprefix(f'{path} ') or type(error).__name__)}")
    if damaged:
        problems.append(f"{path}: {len(damaged)} images cannot be read, the first {damaged[0]}")
    if num_images != record["images"]:
        problems.append(f"{path}: {num_images:,} images, and the manifest says {record['images']:,}")
    return problems


def verify(options: argparse.Namespace) -> None:
    """Check every shard of a pack and print its faults; raise UnfinishedError if there are any."""
    out = options.out
    manifest = own_manifest(out)
    if manifest is None:
        raise UserError(f"--verify {out}: there is no {PACK_MANIFEST} in it")
    records = records_of(manifest)
    problems = [] if manifest["state"] == "complete" else [f"{out}: not finished; the command that began it goes on"]
    others = {path.name for path in out.iterdir() if not PASSING_FILES.fullmatch(path.name)}
    problems += [f"{out / name}: not in the manifest" for name in sorted(others - {*records, PACK_MANIFEST})]
    results = in_order(partial(check_shard, out), list(records.values()), options.workers)
    for record, found in zip(records.values(), results, strict=True):
        state = "wrong" if found else "ok"
        print(one_line(f"{record['file']}: {state}, {counted(record['images'], 'image', ',')}"), flush=True)
        problems += found
    for split, part in manifest["splits"].items():
        if not problems and open_source(out / split).fingerprint() != part["fingerprint"]:
            problems.append(f"{out}: the names of {split} are not those that were packed")
    for problem in problems:
        print(one_line(problem), file=sys.stderr)
    if problems:
        raise UnfinishedError(f"--verify {out}: {len(problems)} things are wrong")
    summarize(manifest)


def get_args_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool's options."""
    usage = "--data-path DIR OUT (--short-side PX | --max-side PX) [options]"
    parser = tool.build_parser(PROG, usage, "Write a smaller copy of a data set as tars that load faster.", EPILOG)
    parser.add_argument(
        "out", metavar="OUT", type=tool.given_path, help="folder for the pack: new, empty, or holding one already"
    )
    parser.add_argument(
        "--data-path", metavar="DIR", type=tool.given_path, help="folder with class folders in train/ and val/"
    )
    words = "folders of --data-path to pack (default: train val)"
    parser.add_argument("--splits", metavar="NAME", nargs="+", default=["train", "val"], help=words)
    modes = parser.add_mutually_exclusive_group(required=True)
    modes.add_argument("--short-side", metavar="PX", type=int, help="shrink so that the shorter side is at most PX")
    modes.add_argument("--max-side", metavar="PX", type=int, help="shrink so that the longer side is at most PX")
    modes.add_argument("--verify", action="store_true", help="check that every image in OUT is whole, and decodes")
    parser.add_argument("--quality", metavar="Q", type=int, default=90, help="quality of the JPEGs (default: 90)")
    words = "MiB of source files per tar (default: 512); shrunk images make the tar smaller"
    parser.add_argument("--shard-mib", metavar="MIB", type=int, default=512, help=words)
    words = "processes that pack images (default: 1 per core)"
    parser.add_argument("--workers", metavar="N", type=int, default=collectives.count_cores(), help=words)
    words = "leave out and list images that cannot be decoded; without it they stop the tool"
    parser.add_argument("--skip-bad", action="store_true", help=words)
    parser.add_argument("--overwrite", action="store_true", help="remove the pack in OUT first")
    return parser


def validate(options: argparse.Namespace) -> None:
    """Raise UserError if two options contradict each other, or a value is out of range."""
    limits = {"--short-side": 65500, "--max-side": 65500, "--quality": 100, "--shard-mib": 2**20, "--workers": 1024}
    for option, largest in limits.items():
        value = getattr(options, option[2:].replace("-", "_"))
        if value is not None and not 1 <= value <= largest:
            raise UserError(f"{option} {value}: give a number from 1 to {largest}")
    if options.verify:
        if options.data_path or options.quality != 90 or options.overwrite or options.skip_bad:
            raise UserError("--verify takes the folder of a pack and --workers, and no other option")
        return
    if options.data_path is None:
        raise UserError("--data-path is needed: the folder that holds train/ and val/ (--help lists the options)")
    for name in options.splits:
        if name in ("", ".", "..") or "/" in name or options.splits.count(name) > 1:
            words = " ".join(options.splits)
            raise UserError(f"--splits {words}: give names of folders in {options.data_path}, each once")
        check_source(options.data_path / name)
        if Path(os.path.realpath(options.out)).is_relative_to(os.path.realpath(options.data_path / name)):
            raise UserError(f"{options.out} is inside {options.data_path / name}; choose a folder outside the images")


def pack_or_verify() -> None:
    """Pack or verify as the command line says."""
    options = get_args_parser().parse_args()
    validate(options)
    (verify if options.verify else pack)(options)


def main() -> None:
    """Run the command line."""
    tool.run(
        PROG, pack_or_verify, "interrupted; the same command goes on after the last whole shard",
        when_killed=". The same command goes on after the last whole shard",
    )  # fmt: skip


if __name__ == "__main__":
    main()
