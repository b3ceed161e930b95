"""Turn ImageNet as it is downloaded into class folders: `python -m scripts.prepare SOURCE... OUT`."""

import argparse
import csv
import errno
import functools
import hashlib
import os
import shlex
import shutil
import stat
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy
from torchvision.datasets.folder import is_image_file

from errors import StorageError, UserError, counted, in_one_line, one_line
from files import explain_failure, locked, open_to_read, read_bytes, read_json, sync_folder, write_json
from loading.progress import Progress
from loading.tars import tar_members
from scripts.parquet import check_names, find_synset, open_parquet
from scripts.tool import build_parser, check_room, given_path, make_out, run

PROG = "python -m scripts.prepare"

TRAIN_TAR, VAL_TAR, DEVKIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"
TRUTH_CSV, SYNSETS_TXT = "LOC_val_solution.csv", "LOC_synset_mapping.txt"

MD5 = {
    TRAIN_TAR: "1d675b47d978889d74fa0da5fadfb00e",
    VAL_TAR: "29b22e2961454d5413ddabcf34fc5622",
    DEVKIT: "fa75699e90414af021442c21a62c3abf",
}

KNOWN = (*MD5, TRUTH_CSV, SYNSETS_TXT)

EPILOG = f"""\
sources, as files or as folders that hold them:
  official   {TRAIN_TAR}, {VAL_TAR} and
             {DEVKIT} (or that archive extracted), which lists the classes of val
  Kaggle     the unzipped folder: ILSVRC/Data/CLS-LOC/train and val, {TRUTH_CSV}
  parquet    Hugging Face's train-*.parquet and validation-*.parquet (needs pyarrow: pip install pyarrow)
  a folder   with train/ and val/: class folders, or a flat val/ that the devkit or {TRUTH_CSV} sorts

examples:
  python -m scripts.prepare ~/Downloads /data/imagenet
  python -m scripts.prepare ~/kaggle/imagenet /data/imagenet
  python -m scripts.prepare ~/huggingface/imagenet-1k/data /data/imagenet
  python -m scripts.prepare /data/flat {DEVKIT} /data/imagenet   # sort a flat /data/flat/val
  python -m scripts.prepare /data/tars /data/tars --splits val   # --data-path reads the training tar as it is

OUT gets train/<synset>/*.JPEG and val/<synset>/*.JPEG, with the same names from every source. The classes are the
synsets in alphabetical order, as torchvision's weights expect them (not the order of the devkit's numbers).

The source is never changed. Images that are files already are linked (hard links take no space) if OUT is on the same
disk, and copied otherwise. A split is built in OUT/train.partial and gets its name when all of it is on the disk.
After an interruption of any kind the same command goes on where it stopped.
"""

# A limit for the small files of the devkit and of Kaggle, the largest of which has 10 MB.
_SMALL_BYTES = 1 << 26

# Folders to search below each given one: itself, Hugging Face's, Kaggle's and the devkit's.
_PLACES = ("", "data", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "ILSVRC2012_devkit_t12")

_PNG = b"\x89PNG"

# A file stands where a folder is needed, or the other way round.
_IN_THE_WAY = (FileExistsError, IsADirectoryError, NotADirectoryError)


class Image(NamedTuple):
    """An image of a source: its class, its file's name and size, and a function that reads it or the file's path."""

    synset: str
    file: str
    num_bytes: int
    content: Callable[[], bytes] | Path


class Source(NamedTuple):
    """The images of one split."""

    files: list[Path]  # archives, or the folder
    num_bytes: int  # size of the images; of archives and parquet files, theirs
    images: Callable[[], Iterator[Image]]  # in the same order each time

    def describe(self) -> list:
        """Return facts that another run must find unchanged to go on with this one's images."""
        return [[path.name, path.stat().st_size] if path.is_file() else [str(path.resolve())] for path in self.files]


def in_words(described: Any) -> str:
    """Return the words of a message for the result of `Source.describe`, as read from a file."""
    try:
        first = " of ".join([described[0][0], *(f"{size:,} bytes" for size in described[0][1:])])
        return first + (f" and {counted(len(described) - 1, 'other file')}" if described[1:] else "")
    except (TypeError, ValueError, LookupError):
        return "another source, which its source.json does not name"


def num_bytes_of(path: Path) -> int:
    """Return the size of an image's file; UserError if it is a folder, a pipe, a link to nothing or the like."""
    try:
        about = path.stat()
    except FileNotFoundError:
        about = None
    if about is None or not stat.S_ISREG(about.st_mode):
        raise UserError(f"{path} stands where an image is expected, and is no file; move it away")
    return about.st_size


def checked_class(name: str, where: Any) -> str:
    """Return the name of a class; UserError if no folder can have it."""
    if not name or "/" in name or "\0" in name or name.startswith("."):
        raise UserError(f"{where} names a class {name!r}, which can be no folder; get it anew")
    return name


# The devkit's meta.mat is a level 5 MAT-file. We read its numbers, text and arrays of structs, as these numpy types.
_MAT_TYPES = {
    1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8", 16: "u1",
    17: "<u2",
}  # fmt: skip
_MAT_MATRIX, _MAT_COMPRESSED = 14, 15
_MAT_STRUCT, _MAT_CHAR = 2, 4


def mat_elements(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the type and the bytes of each data element in a MAT-file, or in one of its elements."""
    place = 0
    while place < len(content):
        kind, size = struct.unpack_from("<II", content, place)
        begin = place + 8
        if kind >> 16:  # a small data element: both numbers in four bytes, and four of content
            kind, size, begin = kind & 0xFFFF, kind >> 16, place + 4
        if begin + size > len(content):
            raise ValueError("it is torn")
        element = content[begin : begin + size]
        place = begin + size + (0 if kind == _MAT_COMPRESSED else -(begin + size) % 8)
        if kind == _MAT_COMPRESSED:
            yield from mat_elements(zlib.decompressobj().decompress(element, _SMALL_BYTES))
        else:
            yield kind, element


def mat_array(content: bytes) -> tuple[str, Any]:
    """Return the name and the value of an array: text, a list of numbers, a list of dicts, or None for other types."""
    parts = mat_elements(content)
    flags, _, name = (part for _, part in islice(parts, 3))
    if flags[0] == _MAT_STRUCT:
        length, joined = (part for _, part in islice(parts, 2))
        length = int.from_bytes(length, "little")
        fields = [joined[begin : begin + length].rstrip(b"\0").decode() for begin in range(0, len(joined), length)]
        values = [mat_array(part)[1] if part else None for _, part in parts]
        rows = [values[begin : begin + len(fields)] for begin in range(0, len(values), len(fields))]
        return name.decode(), [dict(zip(fields, row, strict=True)) for row in rows]
    kind, value = next(parts, (1, b""))
    if kind not in _MAT_TYPES:
        return name.decode(), None
    value = numpy.frombuffer(value, _MAT_TYPES[kind]).tolist()
    return name.decode(), "".join(map(chr, value)) if flags[0] == _MAT_CHAR else value


def read_synsets(content: bytes) -> dict[int, str]:
    """Return the synset of each ILSVRC2012_ID that is a class, from the bytes of meta.mat."""
    arrays = dict(mat_array(part) for kind, part in mat_elements(content[128:]) if kind == _MAT_MATRIX)
    # Those with children are WordNet's nodes above the classes.
    leaves = [synset for synset in arrays["synsets"] if not synset["num_children"][0]]
    return {int(synset["ILSVRC2012_ID"][0]): synset["WNID"] for synset in leaves}


class Truth(NamedTuple):
    """The synset of each image of val, and all synsets, as a file of the devkit or of Kaggle lists them."""

    where: Path
    synset_of: dict[str, str]
    synsets: list[str]

    def class_of(self, file: str) -> str:
        """Return the class of an image of a flat val; UserError if it is not listed."""
        synset = self.synset_of.get(file.rpartition(".")[0])
        if synset is None:
            raise UserError(f"{self.where} says no class of {file}; give the one that belongs to these images")
        return synset


def read_devkit(path: Path) -> Truth:
    """Return the classes in the devkit, an archive or a folder; UserError if it is damaged or something else."""
    needed = {"meta.mat": b"", "ILSVRC2012_validation_ground_truth.txt": b""}
    with in_one_line(f"{path} is no readable {DEVKIT}; get it anew"):
        if path.is_dir():
            needed = {name: read_bytes(path / "data" / name, _SMALL_BYTES) for name in needed}
        else:
            with tarfile.open(path) as tar:
                for member in tar:
                    *_, folder, name = ["", *member.name.split("/")]
                    if folder == "data" and name in needed and member.isreg():
                        needed[name] = tar.extractfile(member).read(_SMALL_BYTES)
        meta, truth = needed.values()
        synsets = read_synsets(meta)
        classes = [checked_class(synsets[int(line)], path) for line in truth.split()]
        if not classes:
            raise ValueError("its ground truth is empty")
    truths = {f"ILSVRC2012_val_{number:08d}": synset for number, synset in enumerate(classes, 1)}
    return Truth(path, truths, sorted(synsets.values()))


def read_kaggle(path: Path) -> Truth:
    """Return the classes that Kaggle's table lists; UserError if it is another table."""
    with in_one_line(f"{path} is no {TRUTH_CSV} of the columns ImageId and PredictionString; get it anew"):
        rows = csv.DictReader(read_bytes(path, _SMALL_BYTES).decode().splitlines())
        truths = {row["ImageId"]: checked_class(row["PredictionString"].split()[0], path) for row in rows}
    return Truth(path, truths, sorted({*truths.values()}))


def tar_files(path: Path, file: BinaryIO, start: int, end: int) -> Iterator[tuple[str, int, int]]:
    """Yield the name, offset and size of each file in the tar from `start` to `end`; UserError as `tar_members`."""
    for member in tar_members(path, file, start, end, kind="tar"):
        if member.isreg() and not member.issparse():
            yield member.name.rpartition("/")[2], member.offset_data, member.size
        elif not member.isdir():
            raise UserError(
                f"{path} holds {member.name!r} as a link, a device or a sparse file; such a tar is not read"
            )


def tar_images(path: Path, truth: Truth | None) -> Iterator[Image]:
    """Yield the images of an official tar: of the class tars in it or, with the truth, of a flat one."""
    with open_to_read(path) as file:

        def read(offset: int, num_bytes: int) -> bytes:
            file.seek(offset)
            content = file.read(num_bytes)
            if len(content) < num_bytes:
                raise StorageError(f"{path} has changed while it was read; start again when it is whole")
            return content

        classes = [("", 0, os.fstat(file.fileno()).st_size)]
        if truth is None:
            members = tar_files(path, file, *classes[0][1:])
            classes = ((name, start, start + size) for name, start, size in members if name.endswith(".tar"))
        for class_tar, start, end in classes:
            for name, offset, size in tar_files(path, file, start, end):
                if is_image_file(name):
                    synset = checked_class(class_tar[: -len(".tar")], path) if truth is None else truth.class_of(name)
                    yield Image(synset, name, size, functools.partial(read, offset, size))


def folder_images(root: Path, truth: Truth | None) -> Iterator[Image]:
    """Yield the images of class folders or, with the truth, of a flat folder."""
    folders = [root] if truth else sorted(path for path in root.iterdir() if path.is_dir())
    for folder in folders:
        for name in sorted(filter(is_image_file, os.listdir(folder))):
            synset = truth.class_of(name) if truth else folder.name
            yield Image(synset, name, num_bytes_of(folder / name), folder / name)


def parquet_images(files: list[Path], synsets: list[str]) -> Iterator[Image]:
    """Yield the images of Hugging Face's files of a split, under the names that they have in the official archives.

    An image whose name does not contain its synset gets the one at its label's place in `synsets`.
    """
    class_of: dict[int, str] = {}
    number = 0
    for path in files:
        with in_one_line(f"{path} cannot be used"):
            for batch in open_parquet(path).iter_batches(64, columns=["image", "label"]):
                for row in batch.to_pylist():
                    image, label = row["image"] or {}, row["label"]
                    if not image.get("bytes") or label is None:
                        raise UserError(f"row {number:,} has no image or no label")
                    synset, file = parquet_name(image, label, number, synsets)
                    if class_of.setdefault(label, synset) != synset:
                        raise UserError(f"label {label} is {class_of[label]} and, of {image['path']}, {synset}")
                    yield Image(synset, file, len(image["bytes"]), functools.partial(bytes, image["bytes"]))
                    number += 1
    classes = [synset for _, synset in sorted(class_of.items())]
    if classes != sorted({*classes}):
        raise UserError(f"{files[0].parent}: the labels do not number the synsets in alphabetical order")


def parquet_name(image: dict, label: int, number: int, synsets: list[str]) -> tuple[str, str]:
    """Return the synset and the file name of an image; Hugging Face puts the synset behind the official name."""
    found = find_synset(image.get("path"))
    if found:
        return found
    if not 0 <= label < len(synsets):
        raise UserError(
            f"row {number:,} does not name its synset, nor does any file given name that of label {label}; give also "
            f"{DEVKIT} or Kaggle's {SYNSETS_TXT}"
        )
    return synsets[label], f"{number:08d}.{'png' if image['bytes'].startswith(_PNG) else 'JPEG'}"


def has_class_folders(root: Path) -> bool:
    """Tell whether a split's folder holds class folders, and not images; UserError if it holds both."""
    entries = list(os.scandir(root))
    is_flat = any(is_image_file(entry.name) for entry in entries)
    has_folders = any(entry.is_dir() for entry in entries)
    if is_flat and has_folders:
        raise UserError(f"{root} holds both images and folders; give one that holds all images, or class folders alone")
    return has_folders


class Given:
    """The files and folders of the command line; finds the source of each split among them."""

    def __init__(self, paths: list[Path]) -> None:
        self.files: dict[str, Path] = {}
        self.folders: list[Path] = []
        for path in paths:
            if not path.exists():
                raise UserError(f"{path} is not there; give archives, or folders that hold them (--help lists them)")
            if path.is_file() and not is_known(path):
                raise UserError(f"{path} is none of {', '.join(KNOWN)} or a parquet file")
            folders = [path / name for name in _PLACES if (path / name).is_dir()]
            self.folders += folders
            for file in [path] if path.is_file() else [file for folder in folders for file in sorted(folder.iterdir())]:
                if is_known(file):
                    self.files.setdefault(file.name, file)

    @functools.cached_property
    def truth(self) -> Truth | None:
        """The classes of a flat val, if a file lists them."""
        devkits = [path for path in self.folders if (path / "data" / "meta.mat").is_file()]
        if DEVKIT in self.files or devkits:
            return read_devkit(self.files.get(DEVKIT) or devkits[0])
        return read_kaggle(self.files[TRUTH_CSV]) if TRUTH_CSV in self.files else None

    def find(self, split: str) -> Source | None:
        """Return the source of a split, if there is one: an archive, parquet files, or a folder."""
        tar = self.files.get(TRAIN_TAR if split == "train" else VAL_TAR)
        if tar is not None:
            images = functools.partial(tar_images, tar, self._truth_for(tar) if split == "val" else None)
            return Source([tar], tar.stat().st_size, images)
        prefixes = ("train-",) if split == "train" else ("validation-", "val-")
        files = [path for name, path in sorted(self.files.items()) if name.startswith(prefixes)]
        if files:
            check_names(files)
            for path in files:  # before hours are spent on those ahead of a damaged one
                open_parquet(path)
            num_bytes = sum(path.stat().st_size for path in files)
            return Source(files, num_bytes, functools.partial(parquet_images, files, self._synsets()))
        folders = [folder / split for folder in self.folders if (folder / split).is_dir()]
        folders += [folder for folder in self.folders if folder.name == split]
        if not folders:
            return None
        images = functools.partial(
            folder_images, folders[0], None if has_class_folders(folders[0]) else self._truth_for(folders[0])
        )
        return Source(folders[:1], sum(image.num_bytes for image in images()), images)

    def _truth_for(self, flat: Path) -> Truth:
        if self.truth is None:
            raise UserError(
                f"{flat} does not tell the classes of its images; give also {DEVKIT} or Kaggle's {TRUTH_CSV}"
            )
        return self.truth

    def _synsets(self) -> list[str]:
        if SYNSETS_TXT in self.files:
            path = self.files[SYNSETS_TXT]
            lines = read_bytes(path, _SMALL_BYTES).decode(errors="replace").splitlines()
            return sorted(checked_class(line.split()[0], path) for line in lines if line.strip())
        return self.truth.synsets if self.truth else []


def is_known(path: Path) -> bool:
    """Tell whether a file is one that this tool reads."""
    return path.is_file() and (path.name in KNOWN or path.suffix == ".parquet")


def check_md5(path: Path) -> None:
    """Compare an official archive with its published MD5; UserError if it is another file."""
    digest = hashlib.md5(usedforsecurity=False)
    progress = Progress(f"MD5 of {path.name}", total_bytes=path.stat().st_size)
    with open_to_read(path) as file:
        while block := file.read(1 << 22):
            digest.update(block)
            progress.update(num_bytes=len(block))
    progress.finish()
    if digest.hexdigest() != MD5[path.name]:
        raise UserError(
            f"{path} has the MD5 {digest.hexdigest()}, and the official archive {MD5[path.name]}; get it anew, or give "
            "--skip-md5 if it is meant to be another"
        )


class Target:
    """A split that is being built: in `SPLIT.partial` until all of it is there.

    Files are linked where they can be, unless `is_copying`.
    """

    def __init__(self, out: Path, split: str, source: Source, *, is_copying: bool) -> None:
        self.out, self.final, self.source = out, out / split, source
        self.partial = out / f"{split}.partial"
        self.images = self.partial / split
        first = source.files[0]
        self.is_linking = not is_copying and first.is_dir() and first.stat().st_dev == out.stat().st_dev
        self.names: dict[str, set[str]] = {}
        self.progress = Progress(split, unit="images", total_bytes=source.num_bytes)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a failure to write into one line: UserError if there is no room, else StorageError."""
        try:
            yield
        except _IN_THE_WAY:
            raise
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                source = self.source.files[0]
                raise UserError(f"{source} holds a name too long for this disk: {error.filename}") from error
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            left = max(self.source.num_bytes - self.progress.bytes, 0)
            raise (UserError if is_full else StorageError)(
                f"{self.final} cannot be written: {explain_failure(error, self.out, left)}; whole files stay, and "
                "the same command goes on after them"
            ) from error

    def build(self) -> None:
        """Write the images that are missing, and give the split its name."""
        print(one_line(f"{self.final}: from {self.source.files[0]}"), flush=True)
        with self.writing():
            self._begin()
        for image in self.source.images():
            self._put(image)
        if not self.names:
            raise UserError(f"{self.source.files[0]} holds no images where they are expected; give another source")
        with self.writing():
            self._finish()
        self.progress.finish()
        amounts = counted(sum(map(len, self.names.values())), "image", ","), counted(len(self.names), "class", ",")
        print(one_line(f"{self.final}: {' of '.join(amounts)}"), flush=True)

    def _begin(self) -> None:
        self.images.mkdir(parents=True, exist_ok=True)
        record, description = self.partial / "source.json", {"source": self.source.describe()}
        begun = read_json(record) if record.is_file() else description
        there = {path: num_bytes_of(path) for folder in self.images.iterdir() for path in folder.iterdir()}
        if begun != description:
            if any(is_image_file(path.name) for path in there):
                raise UserError(
                    f"{self.partial} was begun from {in_words(begun.get('source'))}; give that source again, or remove "
                    "the folder"
                )
            shutil.rmtree(self.images)  # it holds nothing, and another source has other classes
            self.images.mkdir()
        write_json(record, description)
        if not self.is_linking:
            check_room(self.out, self.final.name, self.source.num_bytes - sum(there.values()))

    def _put(self, image: Image) -> None:
        target = self.images / image.synset / image.file
        if image.synset not in self.names:
            self.names[image.synset] = set()
            with self.writing():
                target.parent.mkdir(exist_ok=True)
        if image.file in self.names[image.synset]:
            raise UserError(f"{self.source.files[0]} holds {image.synset}/{image.file} twice; get it anew")
        if not image.num_bytes:
            raise UserError(f"{image.synset}/{image.file} of {self.source.files[0]} is empty; get the source anew")
        self.names[image.synset].add(image.file)
        is_there = target.is_file() and target.stat().st_size == image.num_bytes
        if not is_there:
            content = image.content if isinstance(image.content, Path) else image.content()
            with self.writing():
                self._write(content, target)
        self.progress.update(num_bytes=image.num_bytes, is_skipped=is_there)

    def _write(self, content: bytes | Path, target: Path) -> None:
        temporary = target.with_name(f"{target.name}.tmp")
        temporary.unlink(missing_ok=True)
        try:
            if isinstance(content, bytes):
                temporary.write_bytes(content)
            elif self.is_linking:
                os.link(os.path.realpath(content), temporary)
            else:
                shutil.copyfile(content, temporary)
            os.replace(temporary, target)
        except BaseException:
            with suppress(OSError):  # half a file keeps a full disk full
                temporary.unlink(missing_ok=True)
            raise

    def _finish(self) -> None:
        for folder in self.images.iterdir():
            for name in {*os.listdir(folder)} - self.names.get(folder.name, set()):
                (folder / name).unlink()  # of a run that ended in the middle of a file
        os.sync()  # once: a call for each of a million files would take an hour
        os.rename(self.images, self.final)
        sync_folder(self.out)
        shutil.rmtree(self.partial)


def find_sources(given: Given, splits: list[str] | None) -> dict[str, Source]:
    """Return the sources of these splits, each of which must have one; by default of all splits that have one."""
    found = {split: given.find(split) for split in splits or ("train", "val")}
    sources = {split: source for split, source in found.items() if source is not None}
    missing = [split for split in found if split not in sources]
    if missing and (splits or not sources):
        raise UserError(f"there is no {' and no '.join(missing)} in the given sources (--help lists the known ones)")
    for split in missing:
        print(f"{split}: left out, for the given sources have none")
    return sources


def is_finished(out: Path, split: str) -> bool:
    """Tell whether a split is there, and remove the rest of a run that ended just after it; UserError if it is flat."""
    if not os.path.lexists(out / split):
        return False
    if not has_class_folders(out / split):
        raise UserError(f"{out / split} has no class folders and would have to be changed; choose another OUT")
    partial = out / f"{split}.partial"
    if not (partial / split).exists():
        shutil.rmtree(partial, ignore_errors=True)
    print(one_line(f"{out / split} is there already, and is left as it is"))
    return True


def check_outside(out: Path, sources: dict[str, Source]) -> None:
    """Refuse an OUT among the images of a source: it would be taken for a class of them."""
    for folder in [path for source in sources.values() for path in source.files if path.is_dir()]:
        if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(folder)):
            raise UserError(f"{out} is inside {folder}; choose a folder outside the images")


@contextmanager
def nothing_in_the_way() -> Iterator[None]:
    """Turn a file that stands in OUT in place of a folder, or a folder in place of a file, into one line."""
    try:
        yield
    except _IN_THE_WAY as error:
        path = Path(error.filename2 or error.filename)
        wrong = next((each for each in reversed(path.parents) if each.is_file()), path)
        raise UserError(f"{wrong} is in the way ({error.strerror}); move it away") from error


def prepare(options: argparse.Namespace) -> None:
    """Write the splits; each gets its name when it is complete."""
    given, out = Given(options.sources), options.out
    sources = find_sources(given, options.splits)
    check_outside(out, sources)
    make_out(out)
    waiting = f"waiting for another process that prepares {out}"
    with nothing_in_the_way(), locked(out / ".prepare.lock", waiting):
        sources = {split: source for split, source in sources.items() if not is_finished(out, split)}
        archives = [path for source in sources.values() for path in source.files]
        archives += [given.files[DEVKIT]] if "val" in sources and DEVKIT in given.files else []
        for path in archives:
            if path.name in MD5 and not options.skip_md5:
                check_md5(path)
        for split, source in sources.items():
            Target(out, split, source, is_copying=options.copy).build()
    folder, packed = shlex.quote(str(out)), shlex.quote(f"{out}-256")
    line = (
        f"next: python -m scripts.check {folder}, then python train.py --data-path {folder}; or, as tars that load "
        f"faster, python -m scripts.pack --data-path {folder} {packed} --short-side 256"
    )
    print(one_line(line))


def get_args_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool's options."""
    description = "Turn ImageNet as it is downloaded into class folders."
    parser = build_parser(PROG, "SOURCE [SOURCE ...] OUT [options]", description, EPILOG)
    parser.add_argument(
        "sources", metavar="SOURCE", nargs="+", type=given_path, help="archive, or folder that holds some"
    )
    parser.add_argument("out", metavar="OUT", type=given_path, help="folder that gets train/ and val/; made if need be")
    parser.add_argument(
        "--splits", nargs="+", choices=["train", "val"], help="splits to write (default: those in the sources)"
    )
    parser.add_argument("--skip-md5", action="store_true", help="do not compare the official archives with their MD5")
    parser.add_argument("--copy", action="store_true", help="copy image files even where they could be linked")
    return parser


def main() -> None:
    """Prepare the splits that the command line names."""
    run(PROG, lambda: prepare(get_args_parser().parse_args()), "interrupted; the same command goes on where it stopped")


if __name__ == "__main__":
    main()
