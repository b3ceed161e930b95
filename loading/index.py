"""Which images a split holds and where their bytes lie: scanned once, then kept in a cache that is never stale."""

import functools
import hashlib
import json
import mmap
import os
import re
import stat
import tarfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import numpy
from torchvision.datasets.folder import IMG_EXTENSIONS

from errors import BadImageError, ImageError, UserError
from files import locked, open_regular, open_to_read, retry, write_atomically

# What scripts/pack.py writes beside its shards, and how that says whose it is.
PACK_MANIFEST, PACK_KIND, PACK_FORMAT = "manifest.json", "touchstone pack", 1

# More than the manifest of any pack: a record of some hundred bytes a shard, and one for each image left out.
_MANIFEST_BYTES = 1 << 26

# What was changed less than this before it was read may have been changed again within the same tick of its clock.
RACY_NS = 2_000_000_000

# How long a read that failed is waited for before it is tried again: a network disk may only have hiccuped, and says
# "No such file" then too.
RETRY_WAITS_S = (0.05, 0.2, 0.8)

# 12 bytes for each pixel that is decoded at most (`decode.MAX_PIXELS`); a larger file is no image, and fills memory.
_MAX_BYTES = 1 << 30

T = TypeVar("T")

# Which need not be put into lower case first.
_USUAL_EXTENSIONS = (".JPEG", *IMG_EXTENSIONS)

_PROGRESS_S = 5.0

_FORMAT = "touchstone image index 1"


class Names(Sequence):
    """A sequence of names in one array, so that a million of them are one object, which no forked worker copies.

    Args:
        blob: (bytes,) uint8: the names in UTF-8, each with a zero behind it.
    """

    def __init__(self, blob: numpy.ndarray) -> None:
        self.blob = blob
        self.ends = numpy.flatnonzero(blob == 0)

    @classmethod
    def of(cls, names: Iterable[str]) -> "Names":
        """Return these names, of which none holds a zero."""
        return cls(numpy.frombuffer(encode(names), dtype=numpy.uint8))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> str:
        number = range(len(self))[number]
        return self.slice(number, number + 1)[:-1].decode("utf-8", "surrogateescape")

    def slice(self, first: int, last: int) -> bytes:
        """Return the bytes of the names from `first` to below `last`, each with its zero."""
        begin = self.ends[first - 1] + 1 if first else 0
        return self.blob[begin : self.ends[last - 1] + 1].tobytes()


def encode(names: Iterable[str]) -> bytes:
    """Return the names as `Names` holds them; a name that is not UTF-8 on the disk stays what it is there."""
    return "\0".join([*names, ""]).encode("utf-8", "surrogateescape")


class Split(NamedTuple):
    """Where the images of a split are.

    Args:
        root: the data path and the split's name; there need not be such a folder.
        form: "folder", of class folders; "tars", whose members say the class; or "class tars", whose names do.
        tars: all of them, in order; none for a folder.
    """

    root: Path
    form: str
    tars: tuple[Path, ...]

    @property
    def where(self) -> str:
        """What messages call it."""
        if self.form == "folder":
            return str(self.root)
        if self.form == "class tars":
            return str(self.root / "*.tar")
        return str(self.tars[0]) if len(self.tars) == 1 else str(self.tars[0].with_name(f"{self.root.name}-*.tar"))


def find_splits(root: Path) -> list[Split]:
    """Return the forms in which a split is there, the one to use first: a folder, shards, one tar.

    Raises:
        UserError: a folder cannot be listed, a shard is missing between others, or a pack is not whole.
    """
    has_folders, within = _look_into(root)
    _, beside = _look_into(root.parent)
    found = [Split(root, "folder", ())] if root.is_dir() and (has_folders or not within) else []
    if within and (_shards(root.name, within) == within or [tar.name for tar in within] == [_official(root.name)]):
        found.append(Split(root, "tars", within))
    elif within:
        found.append(Split(root, "class tars", within))
    names = [f"{root.name}.tar", _official(root.name)]
    candidates = [_shards(root.name, beside), *([tar] for name in names for tar in beside if tar.name == name)]
    return found + [Split(root, "tars", tuple(tars)) for tars in candidates if tars]


def _look_into(folder: Path) -> tuple[bool, tuple[Path, ...]]:
    """Return whether a folder holds folders, and the tars in it."""
    if not folder.is_dir():
        return False, ()
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from error
    tars = tuple(folder / name for name in names if name.endswith(".tar") and os.path.isfile(folder / name))
    return any(os.path.isdir(os.path.join(folder, name)) for name in names), tars


def _official(name: str) -> str:
    return f"ILSVRC2012_img_{name}.tar"


def _shards(name: str, tars: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return those of the tars that are called name-000000.tar and so on."""
    numbered = re.compile(re.escape(name) + r"-(\d{6,})\.tar")
    shards = tuple(tar for tar in tars if numbered.fullmatch(tar.name))
    for expected, tar in enumerate(shards):
        if int(numbered.fullmatch(tar.name)[1]) != expected:
            missing = tar.with_name(f"{name}-{expected:06d}.tar")
            raise UserError(f"{missing} is missing, but {tar.name} is there; --data-path needs every shard of a set")
    if shards:
        _check_manifest(name, shards)
    return shards


def _check_manifest(name: str, shards: tuple[Path, ...]) -> None:
    """Compare the shards of a split with the manifest beside them; one of another tool says nothing about them.

    Raises:
        UserError: the pack is not finished, or lacks a shard; the manifest cannot be read.
    """
    path = shards[0].with_name(PACK_MANIFEST)
    state, checksums = _read_manifest(name, path)
    if state is None:
        return
    if state != "complete":
        raise UserError(
            f"{path.parent} is a pack that is still being written, or was interrupted; run the scripts.pack command "
            "that began it again, which goes on where it stopped"
        )
    there = {shard.name for shard in shards}
    missing = [file for file in checksums if file not in there]
    if missing:
        raise UserError(
            f"{path.with_name(missing[0])} is missing: {len(missing)} of the {len(checksums)} shards that {path.name} "
            "lists are not there; --data-path needs every shard of a set"
        )


def _read_manifest(name: str, path: Path) -> tuple[str | None, dict[str, str]]:
    """Return whether a pack is complete, and the checksum of each shard of a split; None where there is no pack of it.

    Raises:
        UserError: the manifest cannot be read.
    """
    try:
        with open_to_read(path) as file:
            manifest = json.loads(file.read(_MANIFEST_BYTES))
        if (manifest["kind"], manifest["format"]) != (PACK_KIND, PACK_FORMAT) or name not in manifest["splits"]:
            return None, {}
        shards = manifest["splits"][name]["shards"]
        return str(manifest["state"]), {str(record["file"]): str(record["sha256"]) for record in shards}
    except FileNotFoundError:
        return None, {}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError):  # no JSON, or other JSON
        return None, {}


def check_split(root: Path) -> list[Split]:
    """Return the forms in which a split is there.

    Raises:
        UserError: there are none.
    """
    found = find_splits(root)
    if not found:
        name = root.name
        raise UserError(
            f"--data-path {root.parent} has no {name}/; it must hold train/ and val/, with one folder for each class, "
            f"or {name}.tar, or shards from {name}-000000.tar on"
        )
    return found


def with_retries(work: Callable[[], T]) -> T:
    """Return the result of `work`; where the system fails it, it is tried again three times."""
    return retry(work, RETRY_WAITS_S)


class SeenFiles:
    """The size and time of each file of a split as a run read it first, in memory that forked loader processes share.

    It is 8 bytes an image: what all of them together say is more than a checkpoint should carry.

    Args:
        num_images: of the split.
        is_strict: whether a file that has another size now ends the run.
    """

    def __init__(self, num_images: int, *, is_strict: bool) -> None:
        self.is_strict = is_strict
        memory = mmap.mmap(-1, max(8 * num_images, 1))
        # (images, 2): its bytes and one, and the second that it was changed in; zeros before it is read.
        self.states = numpy.frombuffer(memory, dtype=numpy.uint32, count=2 * num_images).reshape(-1, 2)

    def note(self, number: int, path: str, status: os.stat_result) -> None:
        """Take down the state of a file that is read.

        Raises:
            ImageError: it is not the file that was read before.
        """
        state = [(status.st_size + 1) % (1 << 32), int(status.st_mtime) % (1 << 32)]
        known = self.states[number].tolist()
        if known == state:
            return
        if self.is_strict and known[0] not in (0, state[0]):
            raise ImageError(
                f"{path} has {status.st_size} bytes, and had {known[0] - 1} when this run read it before; put back the "
                "images that the run began with, or resume with --allow-change data to go on with these"
            )
        self.states[number] = state


class ImageIndex:
    """The images of a split: which there are, in the order of torchvision's `ImageFolder`, and where their bytes lie.

    Everything is in a few arrays, which forked workers share and a cache file holds. Made by `open_index`.

    Args:
        root: the data path and the split's name.
        arrays: what the cache holds. classes, folders, names: bytes of `Names`; the images of a folder lie together,
            and names are relative to it. folder_labels: (folders,) int32. starts: (folders + 1,) int64, the number of
            each folder's first image. watched: bytes of `Names`, the folders or tars that were scanned, relative to
            the data path. states: (watched, 3) int64. Of tars also places: (images, 3) int64, each image's tar by its
            number, offset and size.
    """

    def __init__(self, root: Path, arrays: dict[str, numpy.ndarray]) -> None:
        self.root = root
        self.arrays = arrays
        self.classes = list(Names(arrays["classes"]))
        self.folders = Names(arrays["folders"])
        self.names = Names(arrays["names"])
        self.watched = Names(arrays["watched"])
        self.starts = arrays["starts"]
        self.places = arrays.get("places")
        self.labels = numpy.repeat(arrays["folder_labels"], numpy.diff(self.starts))
        self.seen = None
        self.tars = []  # of each its path, and the mtime_ns and size that it was scanned with
        if self.places is not None:
            states = zip(self.watched, arrays["states"].tolist(), strict=True)
            self.tars = [(os.path.join(root.parent, tar), mtime_ns, size) for tar, (mtime_ns, _, size) in states]

    def __len__(self) -> int:
        return len(self.labels)

    def label(self, number: int) -> int:
        """Return the class of an image."""
        return int(self.labels[number])

    def name(self, number: int) -> str:
        """Return an image's name, relative to the split: class/file."""
        number = range(len(self))[number]
        folder = numpy.searchsorted(self.starts, number, side="right") - 1
        return f"{self.folders[folder]}/{self.names[number]}"

    def size(self, number: int) -> int:
        """Return the bytes of an image's file."""
        if self.places is None:
            return os.stat(os.path.join(self.root, self.name(number))).st_size
        return int(self.places[number, 2])

    def path(self, number: int) -> str:
        """Return what messages call an image."""
        if self.places is None:
            return os.path.join(self.root, self.name(number))
        return f"{self.name(number)} in {self.tars[self.places[number, 0]][0]}"

    def read(self, number: int) -> bytes:
        """Return the bytes of an image's file; a read that fails is tried again three times.

        Raises:
            BadImageError: there are too many.
            MemoryError: there is none.
            OSError: they cannot be read.
            ImageError: the tar that held them is another one now.
        """
        return with_retries(partial(self._read, number))

    def _read(self, number: int) -> bytes:
        if self.places is None:
            path = os.path.join(self.root, self.name(number))
            with open_to_read(path, buffering=0) as file:
                status = os.fstat(file.fileno())
                _check_num_bytes(status.st_size)
                if self.seen is not None:
                    self.seen.note(number, path, status)
                return file.read()
        tar_number, *place = self.places[number].tolist()
        tar_path, *state = self.tars[tar_number]
        _check_num_bytes(place[1])
        tar = _open_tar(tar_path, *state)
        content = tar.read(*place)
        # After the read, which is then known to be of the tar that was scanned.
        if content is None or tar.state() != state:
            raise ImageError(
                f"cannot read image {self.path(number)}: the tar has changed since it was scanned; start again"
            )
        return content

    def save(self, file: BinaryIO) -> None:
        """Write the index, with a CRC-32 for each array."""
        numpy.savez(file, **self.arrays)

    def fingerprint(self) -> str:
        """Return a hash of the names and labels of all images, the same for a folder and for its tars."""
        digest = hashlib.sha256()
        labels = self.arrays["folder_labels"].tolist()
        for number, (folder, label) in enumerate(zip(self.folders, labels, strict=True)):
            prefix = f"{folder}/".encode("utf-8", "surrogateescape")
            names = self.names.slice(self.starts[number], self.starts[number + 1])
            # A line `class/file label` an image, folder by folder: image by image it would take a second.
            lines = prefix + names.replace(b"\0", f" {label}\n".encode() + prefix)
            digest.update(memoryview(lines)[: -len(prefix)])
        return digest.hexdigest()[:16]

    def watch(self, *, is_strict: bool) -> None:
        """Notice files that change from now on, where a tar's state and places do not tell; see `SeenFiles`."""
        if self.places is None:
            self.seen = SeenFiles(len(self), is_strict=is_strict)

    def identity(self) -> dict[str, str | None]:
        """Return what else tells a split from another, as far as it is known without a look at each file of a folder.

        Its form and path; of tars a hash of the images' sizes and, of a pack, of the shards' checksums; a hash of the
        times at which the tars, or the folders, were changed.
        """
        form, sizes, checksums = Names(self.arrays["header"])[2], None, None
        if self.places is not None:
            sizes = _digest(self.places[:, 2])
        if form == "tars":
            _, listed = _read_manifest(self.root.name, Path(self.tars[0][0]).with_name(PACK_MANIFEST))
            checksums = hashlib.sha256("".join(listed.values()).encode()).hexdigest()[:16] if listed else None
        path, times = os.path.abspath(self.root), _digest(self.arrays["states"][:, 0])
        return {"form": form, "path": path, "sizes": sizes, "times": times, "checksums": checksums}


def _digest(numbers: numpy.ndarray) -> str:
    return hashlib.sha256(numbers.astype("<i8").tobytes()).hexdigest()[:16]


def _check_num_bytes(num_bytes: int) -> None:
    if num_bytes > _MAX_BYTES:
        raise BadImageError(f"it has {num_bytes:,} bytes; an image has at most {_MAX_BYTES:,}")


class _Tar:
    """An open tar, closed when nothing uses it any more: another thread may be reading when the cache drops it."""

    def __init__(self, path: str) -> None:
        self.descriptor = open_regular(path, os.O_RDONLY, follows_links=True)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def state(self) -> list[int]:
        status = os.fstat(self.descriptor)
        return [status.st_mtime_ns, status.st_size]

    def read(self, offset: int, size: int) -> bytes | None:
        """Return `size` bytes from `offset` on, or None where the tar ends before."""
        content = os.pread(self.descriptor, size, offset)
        while len(content) < size:
            more = os.pread(self.descriptor, size - len(content), offset + len(content))
            if not more:
                return None
            content += more
        return content


@functools.lru_cache(maxsize=128)
def _open_tar(path: str, mtime_ns: int, size: int) -> _Tar:
    """Return an open tar; another state is another tar. A thousand class tars would be too many to keep open."""
    return _Tar(path)


def open_index(root: Path) -> ImageIndex:
    """Return the index of a split, from its cache where that is fresh, else scanned; then written for the next start.

    The cache is beside the split, or in the user's cache folder where that cannot be written. Of several processes
    that start together one scans, and the others wait for its cache.

    Args:
        root: the data path and the split's name.

    Raises:
        UserError: the split is not there, or holds what no image folder may.
    """
    if root.name in ("", ".."):
        root = Path(os.path.abspath(root))
    split, *others = check_split(root)
    if others:
        print(f"{split.where} is used, and not {' or '.join(other.where for other in others)}")
    caches = cache_paths(root)
    for cache in caches:
        index = _load(cache, split)
        if index is not None:
            return index
    index, reasons = None, []
    for cache in caches:
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            with locked(cache.with_suffix(".lock"), f"waiting for another process, which scans {split.where}"):
                # The process that had the lock before may have written it.
                found = _load(cache, split) if index is None else None
                if found is not None:
                    return found
                if index is None:
                    index, doubt = _scan(split)
                    if doubt:
                        print(f"the index of {split.where} is not cached this time: {doubt}")
                        return index
                write_atomically(cache, index.save)
                return index
        except OSError as error:
            reasons.append(f"{cache.parent}: {error.strerror or error}")
    print(f"the index of {split.where} is not cached, so every start scans: {'; '.join(reasons)}")
    return index or _scan(split)[0]


def cache_paths(root: Path) -> list[Path]:
    """Return where the index of a split may be cached: beside it, then in the user's cache folder."""
    place = hashlib.sha256(os.fsencode(os.path.abspath(root))).hexdigest()[:16]
    # An empty XDG_CACHE_HOME means the default too, says the XDG base directory specification.
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    name = f"touchstone-index-{root.name}"
    return [root.parent / f".{name}.npz", home / "touchstone" / f"{name}-{place}.npz"]


def _header(split: Split) -> numpy.ndarray:
    """Return what an index must say of itself to be one of this split: another version or list of tars is another."""
    tars = [os.path.relpath(tar, split.root.parent) for tar in split.tars]
    return Names.of([_FORMAT, split.root.name, split.form, *IMG_EXTENSIONS, *tars]).blob


def _load(cache: Path, split: Split) -> ImageIndex | None:
    """Return the index that a cache file holds if it is whole, of this split, and as the split is now."""
    try:
        # Checks the CRC-32 of every array. A link is not followed: an index is written in its place, not through it.
        with open_to_read(cache, follows_links=False) as stream, numpy.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        if not numpy.array_equal(arrays.pop("header"), _header(split)):
            return None
        index = ImageIndex(split.root, {**arrays, "header": _header(split)})
        base = str(split.root.parent)
        _check_arrays(index)
        states = [_state(os.stat(os.path.join(base, path))) for path in index.watched]
        is_fresh = numpy.array_equal(arrays["states"], numpy.array(states, dtype=numpy.int64).reshape(-1, 3))
    except Exception:  # zip, numpy and the disk have a dozen kinds for what is damaged, foreign or gone
        return None
    return index if is_fresh else None


def _check_arrays(index: ImageIndex) -> None:
    """Check that the arrays of an index, each whole by itself, fit each other.

    Raises:
        ValueError: they do not.
    """
    num_folders, num_images = len(index.folders), len(index.names)
    labels, starts = index.arrays["folder_labels"], index.starts
    expected = {"folder_labels": ("int32", (num_folders,)), "starts": ("int64", (num_folders + 1,))}
    expected |= {"states": ("int64", (len(index.watched), 3)), "places": ("int64", (num_images, 3))}
    is_right = all(
        (index.arrays[name].dtype, index.arrays[name].shape) == (numpy.dtype(kind), shape)
        for name, (kind, shape) in expected.items()
        if name in index.arrays
    )
    blobs = ("classes", "folders", "names", "watched")
    is_right &= all(index.arrays[name].dtype == numpy.uint8 and index.arrays[name].ndim == 1 for name in blobs)
    if not is_right or starts[0] != 0 or starts[-1] != num_images or (numpy.diff(starts) <= 0).any():
        raise ValueError("arrays of other shapes")
    if labels.min() < 0 or labels.max() >= len(index.classes):
        raise ValueError("labels of no class")
    if index.places is not None and (
        index.places.min() < 0 or index.places[:, 0].max() >= len(index.tars) or index.places[:, 2].max() > 1 << 40
    ):
        raise ValueError("places in no tar")


def _state(status: os.stat_result) -> tuple[int, int, int]:
    """Return what changes whenever a folder or a file does; the size of a folder says nothing."""
    return status.st_mtime_ns, status.st_ctime_ns, 0 if stat.S_ISDIR(status.st_mode) else status.st_size


class _Evidence:
    """The states of the folders or tars that are scanned, each as it was just before."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths, self.states, self.doubt = [], [], ""

    def note(self, path: str, status: os.stat_result) -> None:
        """Take down a folder or tar, given relative to the data path."""
        self.paths.append(path)
        self.states.append(_state(status))
        # A time far in the future was set, or the clock has been set back since: it is no sign of a change a moment
        # ago, and a change from now on gives the folder or tar another one, which `_load` sees.
        now_ns = time.time_ns()
        if any(abs(now_ns - time_ns) < RACY_NS for time_ns in (status.st_mtime_ns, status.st_ctime_ns)):
            self.doubt = self.doubt or f"{self.root.parent / path} was changed a moment ago"


class _Images:
    """The images of a split, folder by folder and in order, as a scan finds them."""

    def __init__(self) -> None:
        self.folders, self.labels, self.counts, self.places = [], [], [], []
        self.names = bytearray()

    def add(self, folder: str, label: int, names: Sequence[str], places: numpy.ndarray | None = None) -> None:
        """Add the images of a folder, with the (tar, offset, size) of each if they are in tars."""
        if names:
            self.folders.append(folder)
            self.labels.append(label)
            self.counts.append(len(names))
            self.names += encode(names)
            self.places += [] if places is None else [places]

    def arrays(self) -> dict[str, numpy.ndarray]:
        """Return them as `ImageIndex` takes them."""
        arrays = {
            "folders": Names.of(self.folders).blob,
            "folder_labels": numpy.array(self.labels, dtype=numpy.int32),
            "starts": numpy.cumsum([0, *self.counts], dtype=numpy.int64),
            "names": numpy.frombuffer(self.names, dtype=numpy.uint8),
        }
        return {**arrays, "places": numpy.concatenate(self.places)} if self.places else arrays


class _Progress:
    """A line every few seconds: a scan of a network disk that is not in memory takes minutes.

    Args:
        what: is scanned.
        total: how much of it there is.
        unit: of what is shown.
        scale: how much a unit is.
    """

    def __init__(self, what: str, total: int, unit: str, scale: int = 1) -> None:
        self.what, self.total, self.unit, self.scale = what, total, unit, scale
        self.base = 0  # how much was done before what is being counted now
        self.due_s = time.monotonic() + _PROGRESS_S

    def show(self, done: int) -> None:
        now_s = time.monotonic()
        if now_s >= self.due_s:
            self.due_s = now_s + _PROGRESS_S
            share = f"{(self.base + done) / self.scale:,.4g} of {self.total / self.scale:,.4g} {self.unit}"
            print(f"scanning {self.what}: {share}", flush=True)


def _scan(split: Split) -> tuple[ImageIndex, str]:
    """Read which images a split holds; return also why that may not be cached, or nothing.

    Raises:
        UserError: it cannot be read, or holds what no image folder may.
    """
    evidence = _Evidence(split.root)
    try:
        classes, images = _scan_folder(split, evidence) if split.form == "folder" else _scan_tars(split, evidence)
    except OSError as error:
        raise UserError(f"{error.filename or split.where} cannot be read: {error.strerror or error}") from error
    filled = set(images.labels)
    empty = [name for label, name in enumerate(classes) if label not in filled]
    if empty:
        more = f" and {len(empty) - 1} more classes" if len(empty) > 1 else ""
        place = split.where if split.form == "tars" else split.root
        raise UserError(
            f"{os.path.join(place, empty[0])}{more} holds no images ({' '.join(IMG_EXTENSIONS)}); "
            "add some, or remove the folder"
        )
    arrays = {
        "header": _header(split),
        "classes": Names.of(classes).blob,
        "watched": Names.of(evidence.paths).blob,
        "states": numpy.array(evidence.states, dtype=numpy.int64).reshape(-1, 3),
        **images.arrays(),
    }
    return ImageIndex(split.root, arrays), evidence.doubt


def _check_classes(split: Split, classes: list[str], num_stray: int) -> None:
    if classes:
        return
    if not num_stray:
        raise UserError(f"{split.where} holds neither images nor class folders; it needs one folder for each class")
    first = "extract it and " if split.form == "tars" else ""
    raise UserError(
        f"{split.where} holds {num_stray} images and no class folders; {first}move every image into a folder of its "
        "class"
    )


def _scan_folder(split: Split, evidence: _Evidence) -> tuple[list[str], _Images]:
    """Return the classes and images of a folder of class folders: what `ImageFolder` finds, in its order."""
    root = str(split.root)
    evidence.note(split.root.name, os.stat(root))
    stray, classes = _list_folder(root, evidence)
    _check_classes(split, classes, len(stray))
    progress = _Progress(split.where, len(classes), "class folders")
    images = _Images()
    for label, name in enumerate(classes):
        # Sorted as the strings that paths are, like ImageFolder: "a b" comes before "a/b".
        for folder, names in sorted(_walk(root, name, evidence)):
            images.add(folder, label, names)
        progress.show(label + 1)
    return classes, images


def _walk(root: str, folder: str, evidence: _Evidence, parents: tuple = ()) -> Iterator[tuple[str, list[str]]]:
    """Yield a folder and those below it, following links, with the images in each."""
    path = os.path.join(root, folder)
    status = os.stat(path)
    identity = (status.st_dev, status.st_ino)
    if identity in parents:
        raise UserError(f"{path} is a link to a folder that holds it; remove it")
    evidence.note(os.path.join(os.path.basename(root), folder), status)
    images, folders = _list_folder(path, evidence)
    yield folder, images
    for name in folders:
        yield from _walk(root, f"{folder}/{name}", evidence, (*parents, identity))


def _list_folder(path: str, evidence: _Evidence) -> tuple[list[str], list[str]]:
    """Return the images and the folders in a folder, both in order."""
    with os.scandir(path) as iterator:
        entries = list(iterator)
    # Comprehensions: this is done for every image, and a loop with branches takes twice as long.
    try:
        folders = [entry.name for entry in entries if entry.is_dir()]
        files = (
            [entry.name for entry in entries if not entry.is_dir()] if folders else [entry.name for entry in entries]
        )
    except OSError:  # of a link that leads in a circle
        folders = [entry.name for entry in entries if os.path.isdir(entry.path)]
        files = [entry.name for entry in entries if not os.path.isdir(entry.path)]
    images = [name for name in files if name.endswith(_USUAL_EXTENSIONS) or name.lower().endswith(IMG_EXTENSIONS)]
    if len(images) < len(files):
        others = [os.path.join(path, name) for name in set(files) - set(images)]
        dangling = [other for other in others if os.path.islink(other) and not os.path.exists(other)]
        # A folder may appear there, on a disk that is not mounted now, and nothing here would tell.
        evidence.doubt = evidence.doubt or "".join(f"the link {link} leads nowhere" for link in dangling[:1])
    return sorted(images), sorted(folders)


class _Found:
    """The images that a scan of tars has found, by folder: their names, and the tar, offset and size of each."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}
        self.places: dict[str, array] = {}

    def add_folder(self, folder: str) -> None:
        self.names.setdefault(folder, [])
        self.places.setdefault(folder, array("q"))

    def add(self, folder: str, name: str, *place: int) -> None:
        self.add_folder(folder)
        self.names[folder].append(name)
        self.places[folder].extend(place)

    def take(self, other: "_Found", prefix: str = "") -> None:
        """Add what another has found, without a prefix of its folders."""
        for folder, names in other.names.items():
            target = f"{folder}/".removeprefix(prefix).rstrip("/")
            self.add_folder(target)
            self.names[target] += names
            self.places[target] += other.places[folder]

    def ordered(self, folder: str) -> tuple[list[str], numpy.ndarray]:
        """Return a folder's images in order, and their places; of one name the last counts, as in extracting a tar."""
        names = self.names[folder]
        order = sorted(range(len(names)), key=names.__getitem__)
        order = [
            this
            for this, after in zip(order, [*order[1:], None], strict=True)
            if after is None or names[this] != names[after]
        ]
        places = numpy.array(self.places[folder], dtype=numpy.int64).reshape(-1, 3)[order]
        return [names[this] for this in order], places


class _TarReader:
    """The headers of one tar, of which only those that are images, class tars or folders count.

    Args:
        path: the tar.
        file: it, open.
        split_name: what members' names may begin with.
        progress: is told how far the reader is.
    """

    def __init__(self, path: Path, file: BinaryIO, split_name: str, progress: _Progress) -> None:
        self.path, self.file, self.split_name, self.progress = path, file, split_name, progress
        self.ignored = []

    def _members(self, start: int, end: int) -> Iterator[tarfile.TarInfo]:
        """Yield the members of the tar that begins at `start` and ends at or before `end`.

        Raises:
            UserError: it is torn, damaged or no tar.
        """
        place = start
        self.file.seek(start)
        try:
            archive = tarfile.TarFile(fileobj=self.file, encoding="utf-8", errors="surrogateescape")
            while (member := archive.next()) is not None:
                # A negative size would lead back, and so on for ever.
                if member.size < 0 or member.offset < place or member.offset_data + member.size > end:
                    raise tarfile.ReadError(f"member {member.name!r} is not whole")
                place = member.offset_data
                archive.members.clear()  # which would keep a million of them
                self.progress.show(member.offset)
                yield member
            # tarfile takes a header that it cannot read for the end, unless it is the first.
            self.file.seek(archive.offset)
            if archive.offset + tarfile.BLOCKSIZE > end or any(self.file.read(tarfile.BLOCKSIZE)):
                raise tarfile.ReadError("its end is missing")
        except Exception as error:  # a damaged header is any of a dozen kinds to tarfile
            reason = str(error) or type(error).__name__
            raise UserError(
                f"{self.path} is torn, damaged, or no uncompressed tar ({reason}, about byte {place}); get it anew"
            ) from error

    def _entries(self, start: int, end: int) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
        """Yield the folder, the name and the member of each image and class tar; for a folder, no name.

        Raises:
            UserError: a name leads elsewhere, or an image is a link or in pieces.
        """
        for member in self._members(start, end):
            if member.name.startswith("/") or "\0" in member.name or ".." in member.name.split("/"):
                raise UserError(
                    f"{self.path} holds {member.name!r}, a name that leads out of a folder; such a tar is not read"
                )
            *folders, name = [part for part in member.name.split("/") if part not in ("", ".")] or [""]
            if member.isdir():
                yield "/".join([*folders, name]), "", member
            elif not name.lower().endswith((*IMG_EXTENSIONS, ".tar")):
                self.ignored += [] if member.isreg() else [member.name]
            elif member.isreg() and not member.issparse():
                yield "/".join(folders), name, member
            else:
                raise UserError(
                    f"{self.path} holds {member.name!r} as a link, a device or a sparse file, which is not followed; "
                    "write it anew with tar --dereference --hard-dereference"
                )

    def scan(self, found: _Found, by_class: _Found, number: int, end: int) -> None:
        """Add the images of a tar whose members say the class, and to `by_class` those of the class tars in it."""
        for folder, name, member in self._entries(0, end):
            if not name:
                found.add_folder(folder)
            elif not name.lower().endswith(".tar"):
                found.add(folder, name, number, member.offset_data, member.size)
            elif folder in ("", self.split_name):
                start = member.offset_data
                self.scan_class(by_class, name[: -len(".tar")], number, start, start + member.size)

    def scan_class(self, by_class: _Found, class_name: str, number: int, start: int, end: int) -> None:
        """Add the images of a tar of one class, whose members may carry the class's name too."""
        by_class.add_folder(class_name)
        for folder, name, member in self._entries(start, end):
            if name.lower().endswith(IMG_EXTENSIONS):
                inner = f"{folder}/".removeprefix(f"{self.split_name}/{class_name}/").removeprefix(f"{class_name}/")
                place = (number, member.offset_data, member.size)
                by_class.add(f"{class_name}/{inner}".rstrip("/"), name, *place)


def _scan_tars(split: Split, evidence: _Evidence) -> tuple[list[str], _Images]:
    """Return the classes and images of a split's tars: those of the folder that they would be extracted to."""
    progress = _Progress(split.where, sum(tar.stat().st_size for tar in split.tars), "GiB", 1 << 30)
    plain, by_class = _Found(), _Found()
    for number, path in enumerate(split.tars):
        with open_to_read(path) as file:
            status = os.fstat(file.fileno())
            evidence.note(os.path.relpath(path, split.root.parent), status)
            reader = _TarReader(path, file, split.root.name, progress)
            if split.form == "class tars":
                reader.scan_class(by_class, path.stem, number, 0, status.st_size)
            else:
                reader.scan(plain, by_class, number, status.st_size)
        progress.base += status.st_size
        if reader.ignored:
            print(f"{path}: {len(reader.ignored)} links and devices, such as {reader.ignored[0]!r}, are ignored")
    folders = [folder for folder in plain.names if folder]
    prefix = f"{split.root.name}/"
    # Members may carry the split's name; a class of that name would not be the only one, or hold no folders.
    has_prefix = all(f"{folder}/".startswith(prefix) for folder in folders) and any("/" in folder for folder in folders)
    by_class.take(plain, prefix if has_prefix else "")
    ordered = sorted((folder.split("/")[0], folder) for folder in by_class.names if folder)
    classes = sorted({name for name, _ in ordered})
    _check_classes(split, classes, len(by_class.names.get("", ())))
    labels = {name: label for label, name in enumerate(classes)}
    images = _Images()
    for name, folder in ordered:
        if by_class.names[folder]:
            images.add(folder, labels[name], *by_class.ordered(folder))
    return classes, images
