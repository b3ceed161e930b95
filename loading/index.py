"""Images that a scan finds: their names, labels and places in arrays, in a cache that is never stale."""

import hashlib
import os
import stat
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy
from torchvision.datasets.folder import IMG_EXTENSIONS

from errors import BadImageError, UserError, counted, one_line
from files import locked, open_to_read, retry, write_atomically
from loading.source import Source, digest, line_of

# A file that changed less than this before it was read may have changed again within the same tick of its clock.
RACY_NS = 2_000_000_000

# Waits before a failed read is tried again: a network disk may fail for a moment only, and even report "No such file"
# then.
RETRY_WAITS_S = (0.05, 0.2, 0.8)

# 12 bytes for each of `decode.MAX_PIXELS`: a larger file can be no image, and would fill memory.
_MAX_BYTES = 1 << 30

T = TypeVar("T")

_FORMAT = "touchstone image index 2"


class Names(Sequence):
    """A sequence of names in one array: forked workers would copy the pages of a million Python strings.

    Args:
        blob: (bytes,) uint8, the names in UTF-8, each followed by a zero.
    """

    def __init__(self, blob: numpy.ndarray) -> None:
        self.blob = blob
        self.ends = numpy.flatnonzero(blob == 0)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> str:
        number = range(len(self))[number]
        return self.slice(number, number + 1)[:-1].decode("utf-8", "surrogateescape")

    def slice(self, first: int, last: int) -> bytes:
        """Return the bytes of the names from `first` to before `last`, each with its zero."""
        begin = self.ends[first - 1] + 1 if first else 0
        return self.blob[begin : self.ends[last - 1] + 1].tobytes()


def encode(names: Iterable[str]) -> numpy.ndarray:
    """Return the names as `Names` holds them; names that are not UTF-8 keep their bytes."""
    return numpy.frombuffer("\0".join([*names, ""]).encode("utf-8", "surrogateescape"), dtype=numpy.uint8)


def with_retries(work: Callable[[], T]) -> T:
    """Return the result of `work`; after an OSError or MemoryError, try again up to three times."""
    return retry(work, RETRY_WAITS_S)


class ImageIndex(Source):
    """A source whose images are found by a scan of folders or files, in the order of torchvision's `ImageFolder`.

    Everything is in a few arrays, which forked workers share and a cache file holds. A form defines `scan` and `read`.

    Args:
        root: the data path and the split's name.
        files: the files that hold the images, in order; none where each image is a file.

    Attributes:
        arrays: the content of the cache. classes, folders, names: bytes of `Names`; the images of a folder lie
            together, and names are relative to it. folder_labels: (folders,) int32. starts: (folders + 1,) int64, the
            number of each folder's first image. watched: bytes of `Names`, the folders or files that were scanned,
            relative to the data path. states: (watched, 3) int64, as `_state`. places, of images in files: (images, 3)
            int64, the number of its file and two numbers that the form defines. header: identifies the split.
    """

    def __init__(self, root: Path, files: Sequence[Path] = ()) -> None:
        super().__init__(root)
        self.files = tuple(files)
        self.arrays = {}

    @abstractmethod
    def scan(self, scan: "Scan") -> list[str]:
        """Add all images to a scan, and return the classes.

        Raises:
            UserError: the split holds no valid classes and images.
            OSError: the split cannot be read.
        """

    def open(self) -> "ImageIndex":
        """Take the index from its cache if that is fresh; else scan, and write a cache for the next start.

        If several processes start together, one scans, and the others wait for its cache.

        Raises:
            UserError: the split cannot be read, or cannot be an image folder.
        """
        caches, reasons = cache_paths(self.root), []
        if any(self._load(cache) for cache in caches):
            return self
        for cache in caches:
            try:
                cache.parent.mkdir(parents=True, exist_ok=True)
                with locked(cache.with_suffix(".lock"), f"waiting for another process, which scans {self.where}"):
                    # The process that held the lock before may have written the cache.
                    if not self.arrays and self._load(cache):
                        return self
                    doubt = "" if self.arrays else self._scan()
                    if doubt:
                        print(one_line(f"the index of {self.where} is not cached this time: {doubt}"))
                        return self
                    # The format has a CRC-32 for each array.
                    write_atomically(cache, lambda file: numpy.savez(file, **self.arrays))
                    return self
            except OSError as error:
                reasons.append(f"{cache.parent}: {error.strerror or error}")
        print(one_line(f"the index of {self.where} is not cached, so every start scans: {'; '.join(reasons)}"))
        if not self.arrays:
            self._scan()
        return self

    def _header(self) -> numpy.ndarray:
        """Return the header of this split's index; it differs for other versions, splits and lists of files."""
        files = [os.path.relpath(file, self.root.parent) for file in self.files]
        return encode([_FORMAT, self.root.name, self.form, *IMG_EXTENSIONS, *files])

    def _load(self, cache: Path) -> bool:
        """Take the index from a cache file if that is undamaged, of this split, and up to date; tell whether it was."""
        try:
            # Reading checks the CRC-32 of every array. A link is not followed: writing would replace it, too.
            with open_to_read(cache, follows_links=False) as stream, numpy.load(stream, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            if not numpy.array_equal(arrays["header"], self._header()):
                return False
            _check_arrays(arrays, len(self.files))
            states = [_state(os.stat(os.path.join(self.root.parent, path))) for path in Names(arrays["watched"])]
            if not numpy.array_equal(arrays["states"], numpy.array(states, dtype=numpy.int64).reshape(-1, 3)):
                return False
            self._take(arrays)
        except Exception:  # zip, numpy and the disk raise a dozen kinds for damaged, foreign or lost files
            return False
        return True

    def _scan(self) -> str:
        """Find the images; return why the index may not be cached, or an empty text.

        Raises:
            UserError: the split cannot be read, or cannot be an image folder.
        """
        scan = Scan(self.root.parent)
        try:
            classes = self.scan(scan)
        except OSError as error:
            raise UserError(f"{error.filename or self.where} cannot be read: {error.strerror or error}") from error
        filled = set(scan.labels)
        empty = [name for label, name in enumerate(classes) if label not in filled]
        if empty:
            more = f" and {counted(len(empty) - 1, 'other class')}" if len(empty) > 1 else ""
            raise UserError(
                f"no images ({' '.join(IMG_EXTENSIONS)}) in class {empty[0]}{more} of {self.where}; "
                "add some, or remove its folder or tar"
            )
        self._take({"header": self._header(), "classes": encode(classes), **scan.arrays()})
        return scan.doubt

    def check_classes(self, classes: list[str], num_stray: int) -> None:
        """Raise UserError if there are no classes; `num_stray` is the number of images outside class folders."""
        if not classes and not num_stray:
            raise UserError(f"{self.where} holds neither images nor class folders; it needs one folder for each class")
        if not classes:
            raise UserError(
                f"{self.where} holds {counted(num_stray, 'image')} and no class folders; this sorts them: python -m "
                f"scripts.prepare {self.root.parent} ILSVRC2012_devkit_t12.tar.gz NEW_FOLDER "
                "(Kaggle: LOC_val_solution.csv in place of the devkit)"
            )

    def _take(self, arrays: dict[str, numpy.ndarray]) -> None:
        self.classes = list(Names(arrays["classes"]))
        self.folders, self.names = Names(arrays["folders"]), Names(arrays["names"])
        self.starts = arrays["starts"]
        self.labels = numpy.repeat(arrays["folder_labels"], numpy.diff(self.starts))
        self.arrays = arrays

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

    def names_in_bytes(self) -> Iterator[bytes]:
        """Yield the names of all images, made folder by folder: image by image would take seconds."""
        for number, folder in enumerate(self.folders):
            head = f"{folder}/".encode("utf-8", "surrogateescape")
            names = self.names.slice(self.starts[number], self.starts[number + 1])
            yield from (head + name for name in names.split(b"\0")[:-1])

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of the fingerprint folder by folder: image by image would take a second."""
        for number, label in enumerate(self.arrays["folder_labels"].tolist()):
            names = self.names.slice(self.starts[number], self.starts[number + 1])
            begin, end = line_of(f"{self.folders[number]}/\0", label).split(b"\0")
            yield begin + names[:-1].replace(b"\0", end + begin) + end

    def identity(self) -> dict[str, str | None]:
        """Return the form, the path, and a hash of the times at which the folders or files were changed."""
        return {**super().identity(), "times": digest([self.arrays["states"][:, 0].tobytes()])}


def check_num_bytes(num_bytes: int) -> None:
    """Raise BadImageError if a file is too large for an image."""
    if num_bytes > _MAX_BYTES:
        raise BadImageError(f"it has {num_bytes:,} bytes; an image has at most {_MAX_BYTES:,}")


def cache_paths(root: Path) -> list[Path]:
    """Return where the index of a split may be cached: beside it, then in the user's cache folder."""
    place = hashlib.sha256(os.fsencode(os.path.abspath(root))).hexdigest()[:16]
    # By the XDG base directory specification an empty XDG_CACHE_HOME means the default too.
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    name = f"touchstone-index-{root.name}"
    return [root.parent / f".{name}.npz", home / "touchstone" / f"{name}-{place}.npz"]


def _check_arrays(arrays: dict[str, numpy.ndarray], num_files: int) -> None:
    """Check that the arrays of an index, each undamaged, fit each other.

    Raises:
        KeyError: an array is missing.
        ValueError: shapes, types or values contradict each other.
    """
    blobs = ("classes", "folders", "names", "watched")
    num_classes, num_folders, num_images, num_watched = (len(Names(arrays[name])) for name in blobs)
    shapes = {name: ("uint8", arrays[name].shape[:1]) for name in blobs}
    shapes |= {"folder_labels": ("int32", (num_folders,)), "starts": ("int64", (num_folders + 1,))}
    shapes |= {"states": ("int64", (num_watched, 3))} | ({"places": ("int64", (num_images, 3))} if num_files else {})
    is_right = all((str(arrays[name].dtype), arrays[name].shape) == shape for name, shape in shapes.items())
    starts, labels = arrays["starts"], arrays["folder_labels"]
    if not is_right or starts[0] != 0 or starts[-1] != num_images or (numpy.diff(starts) <= 0).any():
        raise ValueError("arrays of other shapes")
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError("labels of no class")
    places = arrays["places"] if num_files else numpy.zeros((1, 3))
    if places.min() < 0 or places[:, 0].max() >= max(num_files, 1) or places[:, 2].max() > 1 << 40:
        raise ValueError("places in no file")


def _state(status: os.stat_result) -> tuple[int, int, int]:
    """Return mtime, ctime (both ns) and size, which change with a file; the size of a folder says nothing and is 0."""
    return status.st_mtime_ns, status.st_ctime_ns, 0 if stat.S_ISDIR(status.st_mode) else status.st_size


class Scan:
    """The images that a scan of a data path finds, folder by folder, and the states of all folders or files it read."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.watched, self.states = [], []
        self.doubt = ""  # why the scan may not be cached
        self.folders, self.labels, self.counts, self.names, self.places = [], [], [], [], []

    def watch(self, path: str, status: os.stat_result) -> None:
        """Record the state of a folder or file just before it is read."""
        self.watched.append(os.path.relpath(path, self.base))
        self.states.append(_state(status))
        # A time far in the future was set on purpose, or the clock set back: it is no sign of a recent change, and a
        # change from now on gives the folder or file another time, which a later start notices.
        now_ns = time.time_ns()
        if any(abs(now_ns - time_ns) < RACY_NS for time_ns in (status.st_mtime_ns, status.st_ctime_ns)):
            self.doubt = self.doubt or f"{path} was modified less than two seconds ago"

    def add(self, folder: str, label: int, names: Sequence[str], places: numpy.ndarray | None = None) -> None:
        """Add the images of a folder, with (images, 3) int64 places as in `ImageIndex` if files hold several images."""
        if names:
            self.folders.append(folder)
            self.labels.append(label)
            self.counts.append(len(names))
            self.names.append(encode(names))
            self.places += [] if places is None else [places]

    def arrays(self) -> dict[str, numpy.ndarray]:
        """Return the scan as arrays of an `ImageIndex`, without its classes and header."""
        arrays = {
            "watched": encode(self.watched),
            "states": numpy.array(self.states, dtype=numpy.int64).reshape(-1, 3),
            "folders": encode(self.folders),
            "folder_labels": numpy.array(self.labels, dtype=numpy.int32),
            "starts": numpy.cumsum([0, *self.counts], dtype=numpy.int64),
            "names": numpy.concatenate(self.names),
        }
        return {**arrays, "places": numpy.concatenate(self.places)} if self.places else arrays
