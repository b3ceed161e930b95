"""Indexes of images that a scan finds, in a cache that is never stale; and the index of class folders."""

import itertools
import os
import re
import shlex
import stat
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy

from errors import UserError, counted, one_line
from files import open_to_read, write_atomically
from loading.progress import Progress
from loading.source import IMG_EXTENSIONS, PHONE_EXTENSIONS, Source, count_classes, digest, encoded

# A file that changed less than this before it was read may have changed again within the same tick of its clock.
RACY_NS = 2_000_000_000

# The file next to lists and tars with the names of numbered classes, in their order, one a line.
CLASSES = "classes.txt"

# A list that takes hidden files, each with how it is removed; None refuses them.
Hidden = list[tuple[str, str]] | None

# Where an image lies in a file of several: the file's number, and two numbers that the format defines.
Location = tuple[int, int, int]

_FORMAT = "touchstone image index 6"

# Hidden files and folders, and folders that macOS, Synology and Windows leave behind; and what removes such.
_HIDDEN = re.compile(rb"[/\0]((?:\.(?=[^/\0])|(?:__MACOSX|@eaDir|#recycle|\$RECYCLE\.BIN)(?=[/\0]|\.tar\0))[^/\0]*)")
_FIND = "find %s -mindepth 1 -name %s -prune -exec rm -r {} +"
REMOVE_FROM_TAR = "tar --delete --wildcards --no-wildcards-match-slash --no-anchored -f %s %s"


def encode(names: Iterable[str]) -> numpy.ndarray:
    """Return names as bytes in one array: forked workers would copy the pages of a million Python strings."""
    # Counting references writes to a page, so workers would copy 12.4 MiB for 200,000 names in place of 0.5.
    return numpy.array(list(map(encoded, names)), dtype=numpy.bytes_)


def decode(name: bytes) -> str:
    """Return a name of `encode`."""
    return name.decode("utf-8", "surrogateescape")


def check_hidden(where: str, names: list[bytes], command: str = _FIND, hidden: Hidden = None) -> bool:
    """Tell whether a file or folder in the names is hidden; `command` takes `where` and a pattern of names.

    `hidden` takes the first name and how it is removed; without such a list this is a UserError.
    """
    # Refused and not left out: ImageFolder takes .ipynb_checkpoints for a class and macOS's ._x.jpg for an image, so
    # without a word the classes would have other numbers here than in a checkpoint of torchvision's script.
    found = _HIDDEN.search(b"\0".join([b"", *names, b""]))
    if not found:
        return False
    name = decode(found[1])
    pattern = "'.?*'" if name.startswith(".") else f"'{name}'"
    remedy = "rename it, or remove all such: " + command % (shlex.quote(where), pattern)
    if hidden is None:
        raise UserError(f"{name!r} is hidden or a program's own; {remedy}")
    hidden.append((f"{where}/{decode(names[0])}", remedy))
    return True


class ArraySource(Source):
    """A source that holds all names and labels: `names`, (images,) bytes as `encode`, and `labels`, (images,) int32."""

    names: numpy.ndarray
    labels: numpy.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def label(self, number: int) -> int:
        """Return the class of an image."""
        return int(self.labels[number])

    def name(self, number: int) -> str:
        """Return an image's name, relative to the split: class/file."""
        return decode(self.names[number])

    def identity(self) -> dict[str, str | None]:
        """Add the sizes of some images, with their numbers; without those that cannot be read now."""
        sizes = []
        for number in range(0, len(self), -(-len(self) // 64)):
            with suppress(OSError):
                sizes.append(f"{number}:{self.size(number)}")
        return {**super().identity(), "sample": " ".join(sizes)}

    def fingerprint(self) -> str:
        """Return the hash of `Source.fingerprint`, in a quarter of its time."""
        return digest(b"%b %d\n" % each for each in zip(self.names, self.labels.tolist(), strict=True))


class ImageIndex(ArraySource):
    """A source whose images are found by a scan of folders or files, in the order of torchvision's `ImageFolder`.

    A format defines `scan`.

    Args:
        root: the data path and the split's name.
        where: as of `Source`.
        files: the files that hold the images or list them, in order; none where each image is a file.
        class_list: classes.txt, if the format reads it; it need not be there.

    Attributes:
        arrays: the content of the cache, and all that is known of the images. names: (images,) bytes, as `encode`.
            labels: (images,) int32. classes: (classes,) bytes. watched: (watched,) bytes, the folders or files that
            were scanned, relative to the data path. states: (watched, 3) int64, as `_state`. locations, of images in
            files: (images, 3) int64, the number of its file and two numbers that the format defines. label_sets: as of
            `Source`, if there are any. header: identifies the split.
    """

    may_lack_classes = False  # whether a class may have no images
    extensions: tuple[str, ...] = IMG_EXTENSIONS  # of the files that count as images
    separator: str | None = None  # between the labels of an image in a list, with `--multi-label`
    hidden: Hidden = None

    def __init__(
        self, root: Path, where: Path | None = None, files: Sequence[Path] = (), class_list: Path | None = None
    ) -> None:
        super().__init__(root, where)
        self.files = tuple(files)
        self.class_list = class_list if class_list and os.path.lexists(class_list) else None
        self.arrays = {}

    @abstractmethod
    def scan(self, scan: "Scan") -> list[str]:
        """Add all images to a scan, and return the classes.

        Raises:
            UserError: the split holds no valid classes and images.
            OSError: the split cannot be read.
        """

    def open(self) -> "ImageIndex":
        """Use the index in the cache if that is fresh; else scan, and write a cache for the next start.

        Several processes that start together may all scan, and the last one's cache stays.

        Raises:
            UserError: the split cannot be read, or cannot be an image folder.
        """
        cache = cache_path(self.root)
        if self._load(cache):
            return self
        doubt = self._scan()
        if not doubt:
            try:
                write_atomically(cache, lambda file: numpy.savez(file, **self.arrays))
            except OSError as error:
                doubt = f"{cache.parent}: {error.strerror or error}"
        if doubt:
            print(one_line(f"the index of {self.where} is not cached, so the next start scans again: {doubt}"))
        return self

    def _header(self) -> numpy.ndarray:
        """Return the header of this split's index; it differs for other versions, splits and lists of files."""
        files = [os.path.relpath(file, self.root.parent) for file in (*self.files, self.class_list) if file]
        return encode([_FORMAT, self.root.name, self.form, *self.extensions, *files])

    def _load(self, cache: Path) -> bool:
        """Use the index in a cache file if that is undamaged, of this split, and up to date; tell whether it was."""
        try:
            # A link is not followed: writing would replace it, too. Nothing is unpickled: anybody who may write to the
            # data could have put the cache there.
            with open_to_read(cache, follows_links=False) as stream, numpy.load(stream, allow_pickle=False) as file:
                # Uncompressed, so that no array is larger than the file; then the CRC-32 of every array, which reading
                # alone checks for whole ones only.
                num_bytes = sum(each.file_size for each in file.zip.infolist())
                if num_bytes > os.fstat(stream.fileno()).st_size or file.zip.testzip():
                    return False
                arrays = {name: file[name] for name in file.files}
            if not numpy.array_equal(arrays["header"], self._header()):
                return False
            # Every start compares the folders' times, so the cache is never stale: 32 times as fast as a scan by
            # `ImageFolder`, where a scan of ours is 2.3 times.
            paths = [os.path.join(self.root.parent, decode(path)) for path in arrays["watched"]]
            if arrays["states"].tolist() != [_state(os.stat(path)) for path in paths]:
                return False
            self._use(arrays)
        except Exception:  # zip, numpy and the disk raise a dozen kinds for damaged, foreign or lost files
            return False
        return True

    def _scan(self) -> str:
        """Find the images; return why the index may not be cached, or an empty text. UserError for no valid split."""
        scan = Scan(self.root.parent, self.extensions)
        try:
            classes = self.scan(scan)
        except OSError as error:
            raise UserError(f"{error.filename or self.where} cannot be read: {error.strerror or error}") from error
        if self.hidden:
            scan.doubt = f"{self.hidden[0][0]} is hidden"
        self._use({"header": self._header(), "classes": encode(classes), **scan.arrays()})
        empty = [self.classes[label] for label in numpy.flatnonzero(count_classes(self) == 0)]
        if empty:
            words = f"{counted(len(empty), 'class')} of {self.where}, such as {empty[0]}, without images"
            if not self.may_lack_classes:
                raise UserError(f"{words} ({' '.join(self.extensions)}); add some, or remove the folder, tar or name")
            print(one_line(words))
        return scan.doubt

    def check_classes(self, classes: list[str], num_stray: int) -> None:
        """Raise UserError if there are no classes; `num_stray` is the number of images outside class folders."""
        if not classes and not num_stray:
            raise UserError(f"{self.where} holds neither images nor class folders; it needs one folder for each class")
        if not classes:
            prepare = f"python -m scripts.prepare {self.root.parent} ILSVRC2012_devkit_t12.tar.gz NEW_FOLDER"
            remedy = f"list them in {self.root.name}.csv (docs/own-photographs.md), or, for ImageNet's: {prepare}"
            raise UserError(f"{self.where} holds {counted(num_stray, 'image')} and no class folders; {remedy}")

    def _use(self, arrays: dict[str, numpy.ndarray]) -> None:
        self.classes = list(map(decode, arrays["classes"]))
        self.names, self.labels = arrays["names"], arrays["labels"]
        self.label_sets = arrays.get("label_sets")
        self.arrays = arrays

    def size(self, number: int) -> int:
        """Return the bytes of an image's file."""
        return os.stat(self.path(number)).st_size

    def identity(self) -> dict[str, str | None]:
        """Return the format, the path, and a hash of the times at which the folders or files were changed."""
        return {**super().identity(), "times": digest([self.arrays["states"][:, 0].tobytes()])}


def cache_path(root: Path) -> Path:
    """Return the file in which the index of a split is cached, next to its folder."""
    return root.parent / f".touchstone-index-{root.name}.npz"


def _state(status: os.stat_result) -> list[int]:
    """Return mtime, ctime (both ns) and size, which change with a file; the size of a folder says nothing and is 0."""
    # ctime too: tar, rsync -t and cp -p give a file the mtime of its original, and no system call sets ctime.
    return [status.st_mtime_ns, status.st_ctime_ns, 0 if stat.S_ISDIR(status.st_mode) else status.st_size]


class Scan:
    """The images that a scan of a data path finds, folder by folder, and the states of all folders or files it read."""

    def __init__(self, base: Path, extensions: tuple[str, ...] = IMG_EXTENSIONS) -> None:
        self.base = base
        self.extensions = extensions
        self.watched = []
        self.states = []
        self.doubt = ""  # why the scan may not be cached
        self.unread = []  # files in class folders that are no images by their names
        self.names, self.labels, self.locations = [], [], []
        self.label_sets: numpy.ndarray | None = None

    def watch(self, path: str, status: os.stat_result) -> None:
        """Record the state of a folder or file just before it is read."""
        # The state before it is read: a change during the scan gives it another one, and the next start scans again.
        # The path is relative, so that the cache holds wherever a container mounts the data.
        self.watched.append(os.path.relpath(path, self.base))
        self.states.append(_state(status))
        # A time far in the future was set on purpose, or the clock set back: it is no sign of a recent change, and a
        # change from now on gives the folder or file another time, which a later start notices.
        now_ns = time.time_ns()
        is_recent = any(abs(now_ns - time_ns) < RACY_NS for time_ns in (status.st_mtime_ns, status.st_ctime_ns))
        if is_recent and not self.doubt:
            self.doubt = f"{path} was modified less than two seconds ago"

    def add(self, folder: str, label: int, names: Iterable[str], locations: Sequence[Location] = ()) -> None:
        """Add the images of a folder; with their locations, as in `ImageIndex`, where files hold several images."""
        paths = [f"{folder}/{name}" for name in names]
        if not paths:
            return
        self.names.append(encode(paths))
        self.labels += [label] * len(paths)
        if locations:
            self.locations.append(numpy.array(locations, dtype=numpy.int64))

    def add_sorted(self, rows: Iterable[tuple[int, str, str, Location]]) -> None:
        """Add images by label, folder, name and location, in the order of `FolderIndex`."""
        for (label, folder), group in itertools.groupby(sorted(rows), lambda row: row[:2]):
            _, _, names, locations = zip(*group, strict=True)
            self.add(folder, label, names, locations)

    def arrays(self) -> dict[str, numpy.ndarray]:
        """Return the scan as arrays of an `ImageIndex`, without its classes and header."""
        arrays = {
            "watched": encode(self.watched),
            "states": numpy.array(self.states, dtype=numpy.int64),
            "names": numpy.concatenate([encode([]), *self.names]),  # there may be none
            "labels": numpy.array(self.labels, dtype=numpy.int32),
        }
        if self.label_sets is not None:
            arrays["label_sets"] = self.label_sets
        if self.locations:
            arrays["locations"] = numpy.concatenate(self.locations)
        return arrays


class FolderIndex(ImageIndex):
    """The images of a folder with one folder for each class; links are followed.

    The classes, the images and their order are those of torchvision's `ImageFolder`; hidden ones are refused.
    """

    form = "folder"
    layout = "train/ and val/, with one folder for each class"

    @classmethod
    def find(cls, root: Path) -> list[Source]:
        """Return the folder, if there is one."""
        return [cls(root)] if root.is_dir() else []

    def scan(self, scan: Scan) -> list[str]:
        """Add the images that `ImageFolder` finds, in its order, and return the classes."""
        root = str(self.root)
        scan.watch(root, os.stat(root))
        stray, classes = _list_folder(root, scan)
        classes = self._visible("", classes)
        self.check_classes(classes, len(stray))
        progress = Progress(f"scanning {root}", len(classes), "class folders")
        for label, name in enumerate(classes):
            # Sorted by whole paths as strings, like ImageFolder: "a b" comes before "a/b".
            for folder, names in sorted(_walk(root, name, scan)):
                scan.add(folder, label, self._visible(folder, names))
            progress.update()
        check_hidden(root, [*map(encoded, classes), *(name for each in scan.names for name in each.tolist())])
        if scan.unread:
            words = f"such as {scan.unread[0]}, whose extensions are not {' '.join(self.extensions)}"
            more = sorted({*PHONE_EXTENSIONS} & {os.path.splitext(name)[1].lower() for name in scan.unread})
            if more:
                words += f"; --extensions {' '.join(more)} reads more of them"
            print(one_line(f"{self.where}: {counted(len(scan.unread), 'file')} not read, {words}"))
        return classes

    def _visible(self, folder: str, names: list[str]) -> list[str]:
        """Return the names in a folder that are not hidden, and note the others; all names where these are refused."""
        if self.hidden is None:
            return names
        paths = {name: encoded(os.path.join(folder, name)) for name in names}
        return [name for name, path in paths.items() if not check_hidden(str(self.root), [path], hidden=self.hidden)]


def _walk(root: str, folder: str, scan: Scan, parents: tuple = ()) -> Iterator[tuple[str, list[str]]]:
    """Yield a folder and those below it, following links, with the images in each."""
    path = os.path.join(root, folder)
    status = os.stat(path)
    # In such a circle torchvision's ImageFolder finds each image 41 times, until the kernel follows no more links.
    identity = (status.st_dev, status.st_ino)
    if identity in parents:
        raise UserError(f"{path} is a link to one of its own parent folders; remove it")
    scan.watch(path, status)
    images, folders = _list_folder(path, scan)
    yield folder, images
    for name in folders:
        yield from _walk(root, f"{folder}/{name}", scan, (*parents, identity))


def _list_folder(path: str, scan: Scan) -> tuple[list[str], list[str]]:
    """Return the images and the folders in a folder, both in order."""
    with os.scandir(path) as iterator:
        entries = list(iterator)
    # Comprehensions: this runs for every image, and a loop with branches takes twice as long.
    try:
        folders = {entry.name for entry in entries if entry.is_dir()}
    except OSError:  # a link leads in a circle
        folders = {entry.name for entry in entries if os.path.isdir(entry.path)}
    files = [entry.name for entry in entries if entry.name not in folders]
    images = [name for name in files if name.lower().endswith(scan.extensions)]
    if len(images) < len(files):
        others = [os.path.join(path, name) for name in sorted({*files} - {*images})]
        scan.unread += [other for other in others if os.path.basename(other)[0] != "."]
        # The link may lead to a disk that is not mounted: its folder could appear later without a change here.
        dangling = [other for other in others if os.path.islink(other) and not os.path.exists(other)]
        if dangling and not scan.doubt:
            scan.doubt = f"the link {dangling[0]} has no target"
    return sorted(images), sorted(folders)
