"""Write a smaller copy of a data set as tars that load faster.

Examples:
  python -m scripts.pack --data-path /data/imagenet /data/imagenet-256 --short-side 256
  python -m scripts.pack --data-path /data/imagenet s3://bucket/imagenet-256 --short-side 256
  cd /data/imagenet-256 && sha256sum --check --quiet SHA256SUMS      # is every tar as it was written?
  ln -s /data/imagenet/val /data/imagenet-256/val                    # evaluate on the originals

OUT gets train-000000.tar, ..., val-000000.tar, ... manifest.json (counts, sizes, settings) and SHA256SUMS. `tar xf` of
every shard into one folder gives back an image folder with the same names, classes and order. OUT may be the address of
a bucket, s3://, gs:// or az://, to which every shard goes from memory; and a folder may be copied to a web server or a
bucket as it is. train.py --data-path reads it there, by train.index.gz and val.index.gz (name, class, place and CRC-32
of every image), which are written last. Every image is written as an RGB JPEG (quality 95, 4:4:4, pixels as stored, no
metadata but EXIF's orientation, by which train.py --exif turns images): half of the bytes, and scores within noise
where PX is the size to which evaluation resizes, 256 by default. For the exact score put the original val beside the
tars, which it replaces (docs/data.md). A name keeps its ending, even if x.png then holds a JPEG: loaders go by content.
An image that cannot be decoded stops the tool; `python -m scripts.check` names all of them beforehand.

After an interruption of any kind run the same command again: it continues after the last whole shard. The files are the
same, byte for byte, however often it was interrupted and whatever the number of workers.
"""

import argparse
import errno
import hashlib
import io
import json
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from PIL import ExifTags, Image, ImageFile, features
from PIL import __version__ as pillow_version

from distributed import collectives
from errors import ImageError, StorageError, UserError, as_user_error, counted, one_line
from files import locked, open_to_read, retry, write_atomically
from loading.child import in_child
from loading.decode import load_image, orientation_of, to_mode
from loading.forms import check_source, find_sources, open_source
from loading.index import encode
from loading.loader import check_workers
from loading.pack_format import PACK_FORMAT, PACK_KIND, PACK_MANIFEST, encode_index, index_name, parse_manifest
from loading.progress import Progress, size_text
from loading.source import Source, labels_of
from loading.stores import ObjectStore, open_store, read_whole, retry_requests
from scripts import tool
from settings.options import BY_NAME

PROG = "python -m scripts.pack"

# What a killed run may leave in OUT, and a reader.
TEMPORARY_FILES = r"(manifest\.json|SHA256SUMS|[^/]+\.index\.gz|[^/]+-\d{6}\.tar)\.tmp\.\d+"
PASSING_FILES = rf"pack\.lock|\.touchstone-index-.*|{TEMPORARY_FILES}"

IMAGES_PER_TASK = 8

# Of the JPEGs. At 4:2:0 or at quality 90 published weights lose log-probability, by measurement (docs/LOG.md).
QUALITY, SUBSAMPLING = 95, "4:4:4"

UPLOAD_S = 600.0  # for which a failing upload is tried again

_RECORD = {"file": str, "images": int, "source_bytes": int, "bytes": int, "sha256": str}  # of a shard, in the manifest


class Split:
    """The images of one split, `train` or `val`, in ImageFolder's order."""

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        self.name = name
        self.root = options.data_path / name
        self.source = open_source(self.root, options.multi_label, options.extensions)
        self.names = [self.source.name(number) for number in range(len(self.source))]
        self.sizes = [self.source.size(number) for number in range(len(self.source))]
        self.folders = sorted({name.split("/")[0] for name in self.names})  # in the order of their labels
        if self.source.label_sets is not None:
            _, first = numpy.unique(labels_of(self.source), return_index=True)
            self.folders = [self.names[number].split("/")[0] for number in first]
            if len({*self.folders}) < len(self.folders):
                raise UserError(f"{self.source.where}: rename the class 'no label', which images without one have here")
        elif self.source.classes != sorted(self.source.classes):
            raise UserError(
                f"{self.source.where}: a pack numbers classes in alphabetical order, which would be another one here; "
                "call them so that they sort, such as 01 and 10"
            )

    def describe(self) -> dict[str, Any]:
        """Return facts that another run must find unchanged to continue with this one's shards."""
        lines = "".join(f"{name} {size}\n" for name, size in zip(self.names, self.sizes, strict=True))
        classes = self.source.classes
        facts: dict[str, Any] = {"images": len(self.names), "classes": len(classes), "bytes": sum(self.sizes)}
        facts["SHA-256 of names and sizes"] = hashlib.sha256(os.fsencode(lines)).hexdigest()
        if (sets := self.source.label_sets) is not None:
            labels = [[classes[each] for each in numpy.flatnonzero(row)] for row in sets]
            facts["labels"] = {"folders": dict(zip(self.folders, labels, strict=True)), "classes": classes}
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


def shrink(image: Image.Image, px: int) -> bytes:
    """Return an image as a JPEG whose shorter side is at most `px`; the other is rounded down, as by torchvision.

    An EXIF orientation but 1 is written beside the pixels, which stay as they were stored.
    """
    shorter, orientation = min(image.size), orientation_of(image)
    width, height = (int(px * length / shorter) for length in image.size)
    image = to_mode(image)
    if shorter > px:
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    image.info = {}
    # Pillow's own buffer is too small for some images when it optimizes: it fails with "broken data stream".
    ImageFile.MAXBLOCK = max(1 << 16, 4 * image.width * image.height)
    file = io.BytesIO()
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    kept = {} if orientation == 1 else {"exif": exif}
    image.save(file, "JPEG", quality=QUALITY, optimize=True, subsampling=SUBSAMPLING, **kept)
    return file.getvalue()


def pack_images(options: argparse.Namespace, task: tuple[Source, range]) -> list[bytes]:
    """Return the new bytes of some images, in a worker.

    Raises:
        ImageError: the disk or memory failed, which may pass, or an image cannot be decoded or encoded.
    """
    (source, numbers), packed = task, []
    for number in numbers:
        try:
            image = load_image(retry(partial(source.read, number)), options.grey_range)
            packed.append(shrink(image, options.short_side))
        except ImageError:
            raise
        except Exception as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ImageError(
                one_line(f"cannot pack image {source.path(number)}: {reason}; replace it, or leave it out")
            ) from error
    return packed


def build_shard(shard: Shard, packed: Iterator[bytes], progress: Progress) -> tuple[bytes, dict]:
    """Return the bytes of a shard and its record in the manifest; headers depend on names and sizes alone."""
    content = io.BytesIO()
    names, sizes = shard.split.names[shard.start : shard.stop], shard.split.sizes[shard.start : shard.stop]
    with tarfile.open(fileobj=content, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, image in zip(names, islice(packed, len(names)), strict=True):
            member = tarfile.TarInfo(f"{shard.split.name}/{name}")
            member.size = len(image)
            tar.addfile(member, io.BytesIO(image))
            progress.update()
    checksum = hashlib.sha256(content.getbuffer()).hexdigest()
    counts = {"images": len(names), "source_bytes": sum(sizes), "bytes": content.tell()}
    return content.getvalue(), {"file": shard.file, **counts, "sha256": checksum}


def image_spans(content: bytes) -> numpy.ndarray:
    """Return (images, 3) int64: the offset, the size and the CRC-32 of each image in the bytes of a shard."""
    with tarfile.open(fileobj=io.BytesIO(content), encoding="utf-8", errors="surrogateescape") as tar:
        spans = [(member.offset_data, member.offset_data + member.size) for member in tar]
    view = memoryview(content)
    return numpy.array([(begin, end - begin, zlib.crc32(view[begin:end])) for begin, end in spans], dtype=numpy.int64)


def checksum_of(path: Path) -> str:
    """Return the SHA-256 of a file as the disk has it, and not its copy in memory."""
    with open_to_read(path) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # its stub refuses BinaryIO


def verify_written(checksum: str, path: Path) -> None:
    """Read a file back; raise OSError if it has another checksum."""
    if checksum_of(path) != checksum:
        raise OSError(errno.EIO, "the content read back is not the content written")


class Folder:
    """The folder OUT."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file, by its name."""
        return {path.name: path.stat().st_size if path.exists() else 0 for path in self.path.iterdir()}

    def read(self, file: str) -> bytes:
        """Return the content of a file."""
        with open_to_read(self.path / file) as opened:
            return opened.read()

    def write(self, file: str, content: bytes, checksum: str | None = None) -> None:
        """Write a file, whole or not at all, and with a checksum read it back."""
        try:
            write_atomically(self.path / file, content, partial(verify_written, checksum) if checksum else None)
        except OSError as error:
            reason = f"cannot write {self.path / file}: {error.strerror or error}"
            raise StorageError(f"{reason}; the same command continues after the whole shards") from error


class Bucket:
    """OUT behind an address of object storage; requests that fail are tried again."""

    def __init__(self, url: str) -> None:
        store = None if url.startswith("http") else open_store(url)
        if not isinstance(store, ObjectStore):
            raise UserError("OUT: a pack is written to a folder, s3://, gs:// or az://; a web server takes a copy")
        self.store, self.url = store, url.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def _patiently(self, work: Callable[[], Any], file: str = "") -> Any:
        return retry_requests(work, f"{self.url}/{file}", UPLOAD_S, "the same command continues after the whole shards")

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each object, by its name."""
        # In a child until this process writes: a client's threads would harm the processes that pack.
        return json.loads(self._patiently(lambda: in_child(lambda: json.dumps(self.store.sizes()).encode())))

    def read(self, file: str) -> bytes:
        """Return the content of an object."""
        return self._patiently(partial(read_whole, self.store, file), file)

    def write(self, file: str, content: bytes, _: str | None = None) -> None:
        """Write an object, whole or not at all; whoever reads it compares CRC-32."""
        self._patiently(lambda: self.store.write(file, content), file)


class Pack:
    """The pack in OUT: the planned shards, and the records of those that are whole.

    The facts (settings, versions and source) determine every byte of the shards.
    """

    def __init__(self, options: argparse.Namespace, out: Folder | Bucket) -> None:
        self.options, self.out = options, out
        self.splits = [Split(options, name) for name in options.splits]
        self.shards = plan_shards(self.splits, options.shard_mib * 2**20)
        self.records: dict[str, dict] = {}  # by file name
        self.places: dict[str, numpy.ndarray] = {}  # as `image_spans`, of the shards that this process wrote
        self.facts = {"side": "short-side", "px": options.short_side, "quality": QUALITY, "exif": "kept"}
        self.facts |= {"subsampling": SUBSAMPLING, "grey_range": options.grey_range, "extensions": options.extensions}
        self.facts |= {"splits": options.splits, "shard_mib": options.shard_mib, "pillow": pillow_version}
        self.facts["libjpeg of pillow"] = features.version("libjpeg_turbo") or features.version("jpg")
        for split in self.splits:
            self.facts |= split.describe()

    def resume(self, manifest: dict) -> None:
        """Take over the shards of an earlier run; UserError if it had other settings, versions or images."""
        old = manifest.get("facts", {})
        for key, new in self.facts.items():
            if old.get(key) != new:
                change = f"{key} is {str(new)[:12]} and was {str(old.get(key))[:12]}"
                raise UserError(f"{self.out} holds a pack begun differently: {change}; restore it, or give another OUT")
        records = records_of(manifest)
        sizes = self.out.sizes()
        for shard in self.shards:
            record = records.get(shard.file)
            if record and (record["images"], record["bytes"]) == (shard.stop - shard.start, sizes.get(shard.file)):
                self.records[shard.file] = record
        if self.records:
            print(one_line(f"{self.out} has {len(self.records)} of {counted(len(self.shards), 'shard')} already"))

    def save(self, *, is_complete: bool = False) -> None:
        """Write the manifest."""
        parts = {}
        for split in self.splits:
            planned = [shard.file for shard in self.shards if shard.split is split]
            records = [self.records[file] for file in planned if file in self.records]
            parts[split.name] = {"classes": len(split.source.classes), "shards": records}
        state = "complete" if is_complete else "writing"
        content = {"kind": PACK_KIND, "format": PACK_FORMAT, "state": state, "facts": self.facts, "splits": parts}
        self.out.write(PACK_MANIFEST, tool.as_json(content))

    def write(self) -> None:
        """Write the missing shards, one after the other, from images that workers pack."""
        options = self.options
        missing = [shard for shard in self.shards if shard.file not in self.records]
        tasks = [
            (shard.split.source, range(start, min(start + IMAGES_PER_TASK, shard.stop)))
            for shard in missing
            for start in range(shard.start, shard.stop, IMAGES_PER_TASK)
        ]
        num_images = sum(len(split.names) for split in self.splits)
        num_done = num_images - sum(shard.stop - shard.start for shard in missing)
        progress = Progress(f"packing into {self.out}", num_images, "images", first=num_done)
        results = chain.from_iterable(tool.in_order(partial(pack_images, options), tasks, options.workers))
        for shard in missing:
            self.save()
            content, record = build_shard(shard, results, progress)
            self.out.write(shard.file, content, record["sha256"])
            self.records[shard.file], self.places[shard.file] = record, image_spans(content)
        sums = "".join(f"{self.records[shard.file]['sha256']}  {shard.file}\n" for shard in self.shards)
        self.out.write("SHA256SUMS", sums.encode())
        self.save(is_complete=True)
        for split in self.splits:
            self.out.write(index_name(split.name), self.index(split))

    def index(self, split: Split) -> bytes:
        """Return the index by which `loading.remote` reads a split of the complete pack."""
        shards = [shard for shard in self.shards if shard.split is split]
        places = numpy.concatenate([self._places(shard.file) for shard in shards])
        numbers = numpy.repeat(numpy.arange(len(shards)), [shard.stop - shard.start for shard in shards])
        # As `TarIndex` numbers them: by classes, folders and names.
        labels = {name: label for label, name in enumerate(split.folders)}
        keys = [(labels[name.split("/")[0]], *os.path.split(name)) for name in split.names]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        facts = [{key: self.records[shard.file][key] for key in ("file", "bytes", "sha256")} for shard in shards]
        columns = dict(zip(("offsets", "sizes", "crcs"), places[order].T, strict=True))
        columns |= {"shards": numbers[order], "labels": numpy.array([keys[number][0] for number in order])}
        names = encode(split.names[number] for number in order)
        metadata = {"classes": split.folders, "shards": facts}
        metadata |= {key: self.facts[key] for key in ("px", "exif", "grey_range")}
        if several := self.facts.get(f"{split.name} labels"):
            metadata["labels"] = several
        return encode_index(metadata, names, columns)

    def _places(self, file: str) -> numpy.ndarray:
        """Return `image_spans` a shard; UserError if an earlier run's is not as it was written."""
        if file not in self.places:
            content = self.out.read(file)
            if hashlib.sha256(content).hexdigest() != self.records[file]["sha256"]:
                raise UserError(f"{self.out}/{file} is not as it was written; remove it, and run this again")
            self.places[file] = image_spans(content)
        return self.places[file]


def own_manifest(out: Folder | Bucket) -> dict | None:
    """Return the manifest in OUT, or None where there is none; UserError if this version did not write it."""
    if PACK_MANIFEST not in out.sizes():
        return None
    path, manifest = f"{out}/{PACK_MANIFEST}", parse_manifest(out.read(PACK_MANIFEST))
    if manifest is None:
        raise UserError(f"{path} is not of this tool; choose another OUT")
    if (found := manifest.get("format")) != PACK_FORMAT:
        raise UserError(f"{path} is of format {found}, and this version writes {PACK_FORMAT}; choose another OUT")
    with as_user_error(f"{path} is damaged; choose another OUT"):
        fields = [(record[name], kind) for record in records_of(manifest).values() for name, kind in _RECORD.items()]
        if not all(isinstance(value, kind) for value, kind in [*fields, (manifest["state"], str)]):
            raise ValueError("a field has another type")
    return manifest


def records_of(manifest: dict) -> dict[str, dict]:
    """Return the records of all shards by file name."""
    return {record["file"]: record for part in manifest["splits"].values() for record in part["shards"]}


def pack(options: argparse.Namespace) -> None:
    """Write the missing part of the pack, and summarise the whole."""
    out = Bucket(options.out) if isinstance(options.out, str) else Folder(options.out)
    turn: AbstractContextManager[None] = nullcontext()
    if isinstance(out, Folder):
        tool.make_out(out.path)
        turn = locked(out.path / "pack.lock", f"waiting for another process that packs into {out}")
    with turn:
        earlier = own_manifest(out)
        for name in sorted(out.sizes()):
            if earlier is None and not re.fullmatch(PASSING_FILES, name):
                raise UserError(f"{out}/{name} is not part of a pack, and stays; choose a new or empty OUT")
            if isinstance(out, Folder) and re.fullmatch(TEMPORARY_FILES, name):
                (out.path / name).unlink()
        packed = Pack(options, out)
        if earlier:
            packed.resume(earlier)
        packed.write()
        summarize(own_manifest(out))


def summarize(manifest: dict) -> None:
    """Print a line for each split of a complete pack."""
    for name, part in manifest["splits"].items():
        shards = part["shards"]
        images, size, before = (sum(each[key] for each in shards) for key in ("images", "bytes", "source_bytes"))
        amounts = f"{counted(images, 'image', ',')} in {counted(len(shards), 'shard')}"
        print(f"{one_line(name)}: {amounts}, {size_text(size)}, {size / max(before, 1):.0%} of {size_text(before)}")


def get_args_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool's options."""
    parser = tool.build_parser(PROG, "--data-path DIR OUT --short-side PX [options]", __doc__)
    add, cores = parser.add_argument, collectives.count_cores()
    add("out", metavar="OUT", type=tool.as_place, help="folder or s3://... for the pack: new, empty, or holding one")
    add("--data-path", metavar="DIR", type=tool.as_path, required=True, help="as train.py's --data-path")
    words = "shrink so that the shorter side is at most PX"
    add("--short-side", metavar="PX", type=tool.positive, required=True, help=words)
    words = "MiB of source files per tar (default: 512); shrunk images make the tar smaller"
    add("--shard-mib", metavar="MIB", type=tool.positive, default=512, help=words)
    words = "as train.py's, which then reads the pack only with the same --grey-range"
    tool.add_train_option(parser, "grey_range", words)
    tool.add_train_option(parser, "multi_label", "as train.py's: the data are lists whose images have several labels")
    tool.add_train_option(parser, "extensions", "further extensions of images in folders and tars, as train.py's")
    words = "processes that pack images (default: 1 per core)"
    add("--workers", metavar="N", type=tool.positive, default=cores, help=words)
    return parser


def work() -> None:
    """Pack as the command line says."""
    options = get_args_parser().parse_args()
    check_workers(options.workers)
    BY_NAME["grey_range"].check(options.grey_range)
    options.splits = ["train", *(["val"] if find_sources(options.data_path / "val") else [])]
    for name in options.splits:
        check_source(options.data_path / name)
        if isinstance(options.out, Path):
            tool.check_outside(options.out, options.data_path / name)
    if len(options.splits) == 1:
        print(one_line(f"val: left out, for {options.data_path} has none"))
    pack(options)


def main() -> None:
    """Run the command line."""
    tool.run(PROG, work, "interrupted; the same command continues after the last whole shard")


if __name__ == "__main__":
    main()
