"""Turn ImageNet as it is downloaded into class folders.

sources, as files or as folders that hold them:
  official   ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and
             ILSVRC2012_devkit_t12.tar.gz, which lists the classes of val (needs scipy: pip install scipy)
  Kaggle     the unzipped folder: ILSVRC/Data/CLS-LOC/train and val, LOC_val_solution.csv
  parquet    Hugging Face's train-*.parquet and validation-*.parquet (needs pyarrow: pip install pyarrow)
  a folder   with train/ and val/: class folders, or a flat val/ that the devkit or LOC_val_solution.csv sorts

Examples:
  python -m scripts.prepare ~/Downloads /data/imagenet
  python -m scripts.prepare ~/kaggle/imagenet /data/imagenet
  python -m scripts.prepare /data/flat ILSVRC2012_devkit_t12.tar.gz /data/imagenet   # sort a flat /data/flat/val
  python -m scripts.prepare /data/tars /data/tars --splits val   # --data-path reads the training tar as it is

OUT gets train/<synset>/*.JPEG and val/<synset>/*.JPEG, with the same names from every source. The classes are the
synsets in alphabetical order, as torchvision's weights expect them (not the order of the devkit's numbers).

The source is never changed. Images that are files already are linked (hard links take no space) if OUT is on the same
disk, and copied otherwise. A split is built in OUT/train.partial and gets its name when all of it is on the disk.
After an interruption of any kind the same command continues where it stopped.
"""

import argparse
import csv
import filecmp
import functools
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy
from torchvision.datasets.folder import is_image_file

from errors import StorageError, UserError, as_user_error, counted, one_line
from files import explain_failure, free_bytes, locked, open_to_read, read_at, read_bytes, sync_folder, write_atomically
from loading.progress import Progress, size_text
from loading.tars import tar_members
from scripts.tool import as_path, build_parser, check_outside, make_out, run
from settings.packages import require_package

PROG = "python -m scripts.prepare"

TRAIN_TAR, VAL_TAR, DEVKIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"
TRUTH_CSV = "LOC_val_solution.csv"

MD5 = {
    TRAIN_TAR: "1d675b47d978889d74fa0da5fadfb00e",
    VAL_TAR: "29b22e2961454d5413ddabcf34fc5622",
    DEVKIT: "fa75699e90414af021442c21a62c3abf",
}

KNOWN = (*MD5, TRUTH_CSV)

# Folders to search below each given one: itself, Hugging Face's and Kaggle's.
_PLACES = ("", "data", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC")

# Hugging Face's name of an image of ImageNet: the official name, followed by the synset.
_SYNSET_NAME = re.compile(r"(?P<stem>[\w-]+)_(?P<synset>n\d{8})\.(?P<ending>JPEG|jpe?g|png)")


class Image(NamedTuple):
    """An image of a source: its class, its file's name and size, and a function that reads it or the file's path."""

    synset: str
    file: str
    num_bytes: int
    content: Callable[[], bytes] | Path


class Truth(dict[str, str]):
    """The synset of each image of val by its name without the ending, as a file of the devkit or of Kaggle lists it."""

    def __missing__(self, stem: str) -> str:
        raise UserError(f"the given {DEVKIT} or {TRUTH_CSV} has no class of {stem}; give the one of these images")


def read_devkit(path: Path) -> Truth:
    """Return the classes of the devkit's archive; UserError if it is another file, or scipy is not installed."""
    loadmat = require_package("scipy.io", str(path)).loadmat
    with as_user_error(f"{path} is not a readable {DEVKIT}; download it again"), tarfile.open(path) as tar:
        folder = "ILSVRC2012_devkit_t12/data"
        meta = tar.extractfile(f"{folder}/meta.mat").read()
        truth = tar.extractfile(f"{folder}/ILSVRC2012_validation_ground_truth.txt").read()
        rows = numpy.atleast_1d(loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"])
        # Those with children are WordNet's nodes above the classes.
        synsets = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in rows if not row["num_children"]}
        lines = enumerate(truth.split(), 1)
        return Truth({f"ILSVRC2012_val_{number:08d}": synsets[int(line)] for number, line in lines})


def tar_files(path: Path, file: BinaryIO, start: int, end: int) -> Iterator[tuple[str, int, int]]:
    """Yield the name, begin and end of each file in the tar from `start` to `end`; UserError as `tar_members`."""
    for member in tar_members(path, file, start, end, kind="tar"):
        if member.isreg() and not member.issparse():
            yield member.name.rpartition("/")[2], member.offset_data, member.offset_data + member.size
        elif not member.isdir():
            raise UserError(f"{path} holds {member.name!r} as a link, a device or a sparse file, which is not read")


def tar_images(path: Path, truth: Truth | None) -> Iterator[Image]:
    """Yield the images of an official tar: of the class tars in it or, with the truth, of a flat one."""
    with open_to_read(path) as file:
        tars = [("", 0, os.fstat(file.fileno()).st_size)]
        if truth is None:
            tars = [tar for tar in tar_files(path, file, *tars[0][1:]) if tar[0].endswith(".tar")]
        for tar, *bounds in tars:
            for name, start, end in tar_files(path, file, *bounds):
                if is_image_file(name):
                    synset = tar.removesuffix(".tar") if truth is None else truth[Path(name).stem]
                    content = functools.partial(read_at, file, start, end - start)
                    yield Image(synset, name, end - start, content)


def folder_images(root: Path, truth: Truth | None) -> Iterator[Image]:
    """Yield the images of class folders or, with the truth, of a flat folder."""
    for folder in [root] if truth is not None else sorted(path for path in root.iterdir() if path.is_dir()):
        for path in sorted(folder / name for name in os.listdir(folder) if is_image_file(name)):
            if not path.is_file():
                raise UserError(f"{path} is not a file, and an image is expected there; move it away")
            synset = folder.name if truth is None else truth[path.stem]
            yield Image(synset, path.name, path.stat().st_size, path)


def open_parquet(path: Path) -> Any:
    """Open a parquet file of Hugging Face's form; UserError if it is damaged or another, or pyarrow is missing."""
    parquet = require_package("pyarrow.parquet", str(path))
    with as_user_error(f"{path} is truncated, or not a parquet file with a column `image` of bytes and path"):
        table = parquet.ParquetFile(path)
        table.schema_arrow.field("image").type.field("bytes")  # KeyError if there is none
    return table


def check_parquet(files: list[Path]) -> None:
    """Open each file of a set, before hours are spent on those before a damaged one; UserError if one is missing."""
    count = re.search(r"-of-(\d{5})", files[0].name)
    for number in range(int(count[1]) if count else 0):
        if not any(f"-{number:05d}-of-" in path.name for path in files):
            missing = re.sub(r"-\d{5}-of", f"-{number:05d}-of", str(files[0]))
            raise UserError(f"{missing} is missing; all {int(count[1])} files of the set are needed")
    for path in files:
        open_parquet(path)


def parquet_images(files: list[Path]) -> Iterator[Image]:
    """Yield the images of Hugging Face's files of a split, under the names that they have in the official archives."""
    for path in files:
        with as_user_error(f"{path} cannot be used"):
            for batch in open_parquet(path).iter_batches(64, columns=["image"]):
                for image in batch.column(0).to_pylist():
                    name = _SYNSET_NAME.fullmatch(os.path.basename(image["path"] or ""))
                    if not image["bytes"] or not name:
                        raise UserError("a row has no image, or no path that names its synset")
                    file = f"{name['stem']}.{name['ending']}"
                    yield Image(name["synset"], file, len(image["bytes"]), functools.partial(bytes, image["bytes"]))


def has_class_folders(root: Path) -> bool:
    """Tell whether a split's folder holds class folders, and not images; UserError if it holds both."""
    entries = list(os.scandir(root))
    has_folders = any(entry.is_dir() for entry in entries)
    if has_folders and any(is_image_file(entry.name) for entry in entries):
        raise UserError(f"{root} holds both images and folders; give one that holds all images, or class folders alone")
    return has_folders


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
            f"{path} has the MD5 {digest.hexdigest()}, and the official archive {MD5[path.name]}; download it again, "
            "or give --skip-md5 if it is meant to be another"
        )


def find_files(given: list[Path]) -> tuple[dict[str, Path], list[Path]]:
    """Return the known files by their names, and the folders, among the given paths and the places below them."""
    files, folders = {}, []
    for path in given:
        places = [path / name for name in _PLACES if (path / name).is_dir()]
        folders += places
        below = [file for place in places for file in sorted(place.iterdir())]
        known = [file for file in (path, *below) if file.name in KNOWN or file.suffix == ".parquet"]
        known = [file for file in known if file.is_file()]
        for file in known:
            files.setdefault(file.name, file)
        if not places and not known:
            raise UserError(f"{path} is no folder, none of {', '.join(KNOWN)} and no parquet file")
    return files, folders


def read_truth(files: dict[str, Path], *, has_md5: bool) -> Truth:
    """Return the classes of a flat val; UserError if no file lists them."""
    if DEVKIT in files:
        if has_md5:
            check_md5(files[DEVKIT])  # before its content is parsed
        return read_devkit(files[DEVKIT])
    path = files.get(TRUTH_CSV)
    if path is None:
        raise UserError(f"val does not name the classes of its images; give also {DEVKIT} or {TRUTH_CSV}")
    with as_user_error(f"{path} is not a {TRUTH_CSV} of the columns ImageId and PredictionString; download it again"):
        rows = csv.DictReader(read_bytes(path).decode().splitlines())
        return Truth({row["ImageId"]: row["PredictionString"].split()[0] for row in rows})


def is_same(path: Path, content: Callable[[], bytes] | Path) -> bool:
    """Tell whether a file that an interrupted run left holds its image: after a power cut it may hold zeros."""
    if not isinstance(content, Path):
        return path.read_bytes() == content()
    return path.samefile(content) or filecmp.cmp(path, content, shallow=False)


class Split:
    """A split that is being built: in `SPLIT.partial` until all of it is there.

    Args:
        out: the folder that gets the split.
        name: train or val.
        files: the archives or parquet files of its images, or their folder.
        images: returns the images, in the same order each time.
    """

    def __init__(self, out: Path, name: str, files: list[Path], images: Callable[[], Iterator[Image]]) -> None:
        self.out, self.final, self.files, self.images = out, out / name, files, images
        self.partial = out / f"{name}.partial"
        self.folder = self.partial / name
        self.names: dict[str, set[str]] = {}
        sizes = [path.stat().st_size for path in files if path.is_file()] or [image.num_bytes for image in images()]
        self.num_bytes = sum(sizes)

    @classmethod
    def find(cls, out: Path, name: str, given: list[Path], *, has_md5: bool) -> "Split | None":
        """Return a split with its source, if there is one: an archive, parquet files, or a folder."""
        files, folders = find_files(given)
        tar = files.get(TRAIN_TAR if name == "train" else VAL_TAR)
        prefixes = ("train-",) if name == "train" else ("validation-", "val-")
        tables = [path for file, path in sorted(files.items()) if file.startswith(prefixes)]
        roots = [folder / name for folder in folders if (folder / name).is_dir()]
        roots += [folder for folder in folders if folder.name == name]
        if tar is not None:
            truth = None if name == "train" else read_truth(files, has_md5=has_md5)
            return cls(out, name, [tar], functools.partial(tar_images, tar, truth))
        if tables:
            check_parquet(tables)
            return cls(out, name, tables, functools.partial(parquet_images, tables))
        if roots:
            truth = None if has_class_folders(roots[0]) else read_truth(files, has_md5=has_md5)
            return cls(out, name, roots[:1], functools.partial(folder_images, roots[0], truth))
        return None

    def is_finished(self) -> bool:
        """Tell whether it is there, and remove the rest of a run that ended just after it; UserError if it is flat."""
        if not os.path.lexists(self.final):
            return False
        if not has_class_folders(self.final):
            raise UserError(f"{self.final} has no class folders and would have to be changed; choose another OUT")
        if not self.folder.exists():
            shutil.rmtree(self.partial, ignore_errors=True)
        print(one_line(f"{self.final} is there already, and is left as it is"))
        return True

    def build(self) -> None:
        """Write the images that are missing, and give the split its name.

        Raises:
            UserError: the source is damaged, or another one than before.
            StorageError: a disk failed or is full.
            OSError: a file or folder is in the way.
        """
        print(one_line(f"{self.final}: from {self.files[0]}"), flush=True)
        progress = Progress(self.final.name, unit="images", total_bytes=self.num_bytes)
        try:
            self._begin()
            for image in self.images():
                self._put(image)
                progress.update(num_bytes=image.num_bytes)
            if not self.names:
                raise UserError(f"{self.files[0]} holds no images where they are expected; give another source")
            self._finish()
        except (FileExistsError, IsADirectoryError, NotADirectoryError):
            raise
        except OSError as error:
            reason = explain_failure(error, self.out, max(self.num_bytes - progress.bytes, 0))
            begin = f"cannot write {self.final.name} from {self.files[0]}"
            raise StorageError(f"{begin}: {reason}; the same command continues") from error
        progress.finish()
        amounts = counted(sum(map(len, self.names.values())), "image", ","), counted(len(self.names), "class", ",")
        print(one_line(f"{self.final}: {' of '.join(amounts)}"), flush=True)

    def _begin(self) -> None:
        """Make the folder, or find that an interrupted run has begun it from the same source."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if links := [path for path in (self.partial, self.folder, *self.folder.iterdir()) if path.is_symlink()]:
            raise UserError(f"{links[0]} is a link, through which files elsewhere would be written; remove it")
        record = self.partial / "source.json"
        facts = json.dumps([*(str(path.resolve()) for path in self.files), self.num_bytes])
        begun = read_bytes(record).decode(errors="replace") if record.exists() else facts
        if begun != facts:
            raise UserError(
                f"{self.partial} was begun from another source, {begun[:120]}; give that one, or remove the folder"
            )
        write_atomically(record, facts.encode())
        # Image files are linked, where they can be.
        self.is_linking = self.files[0].is_dir() and self.files[0].stat().st_dev == self.out.stat().st_dev
        needed = self.num_bytes - sum(path.stat().st_size for path in self.folder.glob("*/*"))
        if not self.is_linking and needed > (free := free_bytes(self.out)):
            raise UserError(f"{self.out} has {size_text(free)} free, and {self.final.name} needs {size_text(needed)}")

    def _put(self, image: Image) -> None:
        """Write an image that is not there yet, under its name when it is whole."""
        source, folder = self.files[0], self.folder / image.synset
        names = self.names.setdefault(image.synset, set())
        if not names:
            if not re.fullmatch(r"[^./\0][^/\0]*", image.synset):
                raise UserError(f"{source} has a class {image.synset!r}, which cannot be a folder; download it again")
            folder.mkdir(exist_ok=True)
        if image.file in names:
            raise UserError(f"{source} holds {image.synset}/{image.file} twice; download it again")
        names.add(image.file)
        target, temporary = folder / image.file, folder / f"{image.file}.tmp"
        if target.is_file() and target.stat().st_size == image.num_bytes and is_same(target, image.content):
            return
        temporary.unlink(missing_ok=True)
        if not isinstance(image.content, Path):
            temporary.write_bytes(image.content())
        elif self.is_linking:
            os.link(os.path.realpath(image.content), temporary)
        else:
            shutil.copyfile(image.content, temporary)
        if temporary.stat().st_size != image.num_bytes:
            raise StorageError(f"{source} has changed while it was read; start again when it is whole")
        os.replace(temporary, target)

    def _finish(self) -> None:
        """Remove what an interrupted run left, make all durable, and give the split its name."""
        for folder in self.folder.iterdir():
            for name in {*os.listdir(folder)} - self.names.get(folder.name, set()):
                (folder / name).unlink()
        os.sync()  # once: a call for each of a million files would take an hour
        os.rename(self.folder, self.final)
        sync_folder(self.out)
        shutil.rmtree(self.partial)


def prepare(options: argparse.Namespace) -> None:
    """Write the splits, by default all that have a source; each gets its name when it is complete."""
    out, has_md5 = options.out, not options.skip_md5
    names = options.splits or ("train", "val")
    found = {name: Split.find(out, name, options.sources, has_md5=has_md5) for name in names}
    splits = [split for split in found.values() if split is not None]
    missing = [name for name, split in found.items() if split is None]
    if missing and (options.splits or not splits):
        raise UserError(f"there is no {' and no '.join(missing)} in the given sources (--help lists the known ones)")
    for name in missing:
        print(f"{name}: left out, for the given sources have none")
    for folder in [path for split in splits for path in split.files if path.is_dir()]:
        check_outside(out, folder)
    make_out(out)
    with locked(out / ".prepare.lock", f"waiting for another process that prepares {out}"):
        splits = [split for split in splits if not split.is_finished()]
        for path in [path for split in splits for path in split.files]:
            if path.name in MD5 and has_md5:
                check_md5(path)
        for split in splits:
            split.build()
    made, packed = shlex.quote(str(out)), shlex.quote(f"{out}-256")
    print(one_line(f"next: python -m scripts.check {made}, then python train.py --data-path {made}"))
    print(one_line(f"or, to load faster, python -m scripts.pack --data-path {made} {packed} --short-side 256"))


def get_args_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool's options."""
    parser = build_parser(PROG, "SOURCE [SOURCE ...] OUT [options]", __doc__)
    parser.add_argument("sources", metavar="SOURCE", nargs="+", type=as_path, help="archive, or folder that holds some")
    parser.add_argument("out", metavar="OUT", type=as_path, help="folder that gets train/ and val/; made if need be")
    text = "splits to write (default: those in the sources)"
    parser.add_argument("--splits", nargs="+", choices=["train", "val"], help=text)
    parser.add_argument("--skip-md5", action="store_true", help="do not compare the official archives with their MD5")
    return parser


def main() -> None:
    """Run the command line."""
    run(PROG, lambda: prepare(get_args_parser().parse_args()), "interrupted; the same command continues it")


if __name__ == "__main__":
    main()
