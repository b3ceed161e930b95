"""Read images in uncompressed tars: shards, packs, a tar of class folders or of class tars, or a tar for each class."""

import functools
import os
import re
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from errors import ImageError, UserError, as_user_error, one_line
from files import open_to_read, read_at
from loading.index import CLASSES, REMOVE_FROM_TAR, Hidden, ImageIndex, Location, Scan, check_hidden
from loading.pack_format import PACK_MANIFEST, decode_label_sets, read_manifest, shard_checksums
from loading.progress import Progress
from loading.samples import LABELS, Samples
from loading.source import PHONE_EXTENSIONS, Source, check_num_bytes, digest, encoded, list_folder


class TarIndex(ImageIndex):
    """The images of tars: those of the folder that the tars would be extracted to.

    Its form is "tars" if the names of members hold the class, "class tars" if the names of the tars do.
    """

    layout = "{split}.tar, or shards from {split}-000000.tar on"

    def __init__(self, root: Path, files: list[Path], form: str = "tars") -> None:
        where = files[0] if len(files) == 1 else files[0].with_name(re.sub(r"\d+\.tar$", "*.tar", files[0].name))
        super().__init__(root, root / "*.tar" if form == "class tars" else where, files, root.parent / CLASSES)
        self.form = form
        if shard_checksums(root.name, files[0].parent):
            self.pack = read_manifest(files[0].parent / PACK_MANIFEST).get("facts")
            more = (isinstance(self.pack, dict) and self.pack.get("extensions")) or ()
            # Names in a pack keep the extensions that they had before it was packed, whatever its files are now.
            self.extensions += (*PHONE_EXTENSIONS, *(each for each in more if isinstance(each, str)))

    @classmethod
    def find(cls, root: Path) -> list[Source]:
        """Return the tars in the split's folder, then shards next to it, then one tar next to it."""
        within, around = _tars_in(root), _tars_in(root.parent)
        official = f"ILSVRC2012_img_{root.name}.tar"
        found: list[Source] = []
        if within:
            is_whole = len(within) in map(len, _shards(root.name, within)) or [tar.name for tar in within] == [official]
            found.append(cls(root, within, "tars" if is_whole else "class tars"))
        sets = _shards(root.name, around)
        sets += [[tar] for name in (f"{root.name}.tar", official) for tar in around if tar.name == name]
        return found + [cls(root, tars) for tars in sets]

    def path(self, number: int) -> str:
        """Return the name of an image in messages."""
        return f"{self.name(number)} in {self.files[self.arrays['locations'][number, 0]]}"

    def size(self, number: int) -> int:
        """Return the bytes of an image's file."""
        return int(self.arrays["locations"][number, 2])

    def identity(self) -> dict[str, str | None]:
        """Add hashes of the images' sizes and, for a pack, of the shards' checksums."""
        listed = "".join(shard_checksums(self.root.name, self.files[0].parent).values())
        checksums = digest([listed.encode()]) if listed else None
        sizes = digest([self.arrays["locations"][:, 2].tobytes()])
        return {**super().identity(), "sizes": sizes, "checksums": checksums}

    def read(self, number: int) -> bytes:
        """Return the bytes of an image's file; raises as `Source.read`."""
        tar_number, offset, size = self.arrays["locations"][number].tolist()
        mtime_ns, _, tar_size = self.arrays["states"][tar_number].tolist()
        check_num_bytes(size)
        tar = _open_tar(str(self.files[tar_number]), mtime_ns, tar_size)
        content = read_at(tar, offset, size)
        # Compared after the read, so that the bytes are known to be of the tar that was scanned.
        status = os.fstat(tar.fileno())
        if len(content) < size or (status.st_mtime_ns, status.st_size) != (mtime_ns, tar_size):
            line = f"cannot read image {self.path(number)}: the tar has changed since it was scanned; start again"
            raise ImageError(one_line(line))
        return content

    def scan(self, scan: Scan) -> list[str]:
        """Add the images of the folder that the tars would be extracted to, and return the classes."""
        progress = Progress(f"scanning {self.where}", total_bytes=sum(tar.stat().st_size for tar in self.files))
        reader = _TarReader(self.root.name, progress, self.extensions, self.hidden)
        for number, path in enumerate(self.files):
            with open_to_read(path) as file:
                status = os.fstat(file.fileno())
                scan.watch(str(path), status)
                reader.begin(path, file, number)
                if self.form == "class tars":
                    reader.scan_class(path.stem, 0, status.st_size)
                else:
                    reader.scan(status.st_size)
                reader.samples.read_labels(path, file)
            progress.update(num_bytes=status.st_size - reader.num_read)
            if reader.ignored:
                ignored = f"{len(reader.ignored)} links and devices, such as {reader.ignored[0]!r}, are ignored"
                print(one_line(f"{path}: {ignored}"))
            if self.form == "class tars" and reader.samples.images:
                remedy = f"rename such tars to {self.root.name}-000000.tar etc."
                raise UserError(f"{path} holds images with labels; {remedy}")
        if reader.samples.images:
            return reader.samples.add_to(scan, self, self.files)
        unread = reader.samples.unread
        if unread:
            print(one_line(f"{unread} and files like it hold no label: the folder, or the tar's name, is the class"))
        return self._add_folders(scan, reader.folders())

    def _add_folders(self, scan: Scan, found: "_Found") -> list[str]:
        """Add the images of class folders to a scan, and return the classes."""
        tops = {folder: folder.split("/")[0] for folder in found if folder}
        folders = classes = sorted({*tops.values()})
        self.check_classes(classes, len(found.get("", ())))
        if isinstance(self.pack, dict) and self.pack.get(f"{self.root.name} labels"):
            folders, classes = self._read_label_sets(self.pack[f"{self.root.name} labels"], scan)
        labels = {name: label for label, name in enumerate(folders)}
        trouble = f"{self.where} is not as its {PACK_MANIFEST} says; pack again, for it has no labels for a folder"
        with as_user_error(trouble):
            ordered = sorted((labels[top], folder) for folder, top in tops.items())
        for label, folder in ordered:
            names = sorted(found[folder])
            scan.add(folder, label, names, [found[folder][name] for name in names])
        return classes

    def _read_label_sets(self, several: dict, scan: Scan) -> tuple[list[str], list[str]]:
        """Return the folders of a pack of several labels, in the order of their labels, and its classes."""
        manifest = self.files[0].parent / PACK_MANIFEST
        scan.watch(str(manifest), os.stat(manifest))
        self.may_lack_classes = True  # as its list did
        with as_user_error(f"{manifest} is damaged; pack again"):
            scan.label_sets = decode_label_sets(several["folders"], several["classes"])
            return list(several["folders"]), several["classes"]


def _tars_in(folder: Path) -> list[Path]:
    tars = [folder / name for name in list_folder(folder) if name.endswith(".tar")]
    return [tar for tar in tars if not tar.is_dir()]  # a link that leads nowhere is no shard less, and fails to open


def _shards(name: str, tars: list[Path]) -> list[list[Path]]:
    """Return the sets of numbered tars of a split, that of name-000000.tar first; UserError if one is not complete."""
    # Other tools' names too, such as imagenet1k-validation-00.tar; those of another split are only our own.
    words = {"train": r"(?:.*[-_.])?train", "val": r"(?:.*[-_.])?val(?:idation)?"}.get(name)
    pattern = rf"({words})-(\d+)\.tar" if words else rf"({re.escape(name)})-(\d{{6,}})\.tar"
    found = defaultdict(list)
    for tar in tars:
        match = re.fullmatch(pattern, tar.name)
        if match:
            found[match[1]].append((int(match[2]), match[2], tar))
    sets = {}
    for prefix, shards in sorted(found.items(), key=lambda each: each[0] != name):
        first, digits, _ = min(shards)
        if first and (prefix != name or len(digits) < 6):
            continue  # no shard, such as train-2024.tar
        for expected, (number, _, tar) in enumerate(sorted(shards)):
            if number != expected:
                lacking = tar.with_name(f"{prefix}-{expected:0{len(digits)}d}.tar")
                raise UserError(f"{lacking} is missing, but {tar.name} exists; a set needs every shard")
        sets[prefix] = [tar for *_, tar in sorted(shards)]
    checksums = shard_checksums(name, tars[0].parent) if name in sets else {}
    missing = [file for file in checksums if file not in {shard.name for shard in sets[name]}]
    if missing:
        words = f"{len(missing)} of the {len(checksums)} shards in {PACK_MANIFEST} are missing"
        raise UserError(f"{tars[0].with_name(missing[0])} is missing: {words}; --data-path needs every shard")
    return list(sets.values())


@functools.lru_cache(maxsize=128)
def _open_tar(path: str, mtime_ns: int, size: int) -> BinaryIO:
    """Return an open tar, reopened if its state changes. A thousand class tars would be too many to keep open.

    It closes itself after its last use: another thread may still read it when the cache drops it.
    """
    return open_to_read(path, buffering=0)


# The images that a scan finds in each folder: the tar, offset and size of each by its name. Of images with one name the
# last counts, as when a tar is extracted.
_Found = dict[str, dict[str, Location]]


def tar_members(
    path: Path, file: BinaryIO, start: int, end: int, kind: str = "uncompressed tar"
) -> Iterator[tarfile.TarInfo]:
    """Yield the members of the tar that begins at `start` of a file and ends at or before `end`.

    UserError if it is truncated, damaged or no tar, or a name in it points outside its folder.
    """
    position = following = start
    file.seek(start)
    try:
        # Not `tarfile.open`, which unpacks compressed tars: there an image has no offset at which it could be read.
        archive = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape")
        while (member := archive.next()) is not None:
            following = archive.offset
            # A negative size would lead back to an earlier member, in an endless loop.
            if member.size < 0 or member.offset < position or member.offset_data + member.size > end:
                raise tarfile.ReadError(f"member {member.name!r} is incomplete")
            position = member.offset_data
            archive.members.clear()  # type: ignore[attr-defined]  # typeshed has no `members`; the archive would keep a million of them
            if member.name.startswith("/") or "\0" in member.name or ".." in member.name.split("/"):
                raise UserError(f"{path} holds {member.name!r}, which points outside the folder; such a tar is refused")
            yield member
        # tarfile takes an unreadable header, unless it is the first, for the end; Python 3.14 skips what follows it.
        file.seek(following)
        if following + tarfile.BLOCKSIZE > end or any(file.read(tarfile.BLOCKSIZE)):
            raise tarfile.ReadError("its end is missing")
    except UserError:
        raise
    except Exception as error:  # tarfile raises a dozen kinds for a damaged header
        reason = str(error) or type(error).__name__
        remedy = "unpack it if it is compressed (gzip -dc FILE > TAR), else download it again"
        found = f"is truncated, damaged, or no {kind} ({reason}, near byte {position})"
        raise UserError(f"{path} {found}; {remedy}") from error


class _TarReader:
    """Finds the images of tars, one tar after the other, by their headers alone.

    Names of members may begin with the folder `split_name`, those of class tars also with the class's name.
    """

    def __init__(self, split_name: str, progress: Progress, extensions: tuple[str, ...], hidden: Hidden) -> None:
        self.split_name, self.hidden = split_name, hidden
        self.extensions = extensions
        self.progress = progress
        self.plain: _Found = {}  # by the names of members
        self.by_class: _Found = {}  # by the names of class tars
        self.samples = Samples(extensions)

    def begin(self, path: Path, file: BinaryIO, number: int) -> None:
        """Read this tar from now on, which has this number among the tars."""
        check_hidden(str(path.parent), [encoded(path.name)])
        self.path, self.file, self.number = path, file, number
        self.num_read = 0
        self.ignored = []

    def _entries(self, start: int, end: int) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
        """Yield the folder, the name and the member of each image, label and class tar; for a folder, no name.

        UserError as `tar_members`, and if an image is a link or in pieces.
        """
        for member in tar_members(self.path, self.file, start, end):
            self.progress.update(num_bytes=member.offset - self.num_read)
            self.num_read = member.offset
            *folders, name = [part for part in member.name.split("/") if part not in ("", ".")] or [""]
            if member.isdir():
                yield "/".join([*folders, name]), "", member
            elif not name.lower().endswith((*self.extensions, ".tar", *LABELS)):
                if not member.isreg():
                    self.ignored.append(member.name)
            elif member.isreg() and not member.issparse():
                if not check_hidden(str(self.path), [encoded(member.name)], REMOVE_FROM_TAR, self.hidden):
                    yield "/".join(folders), name, member
            else:
                found = f"holds {member.name!r} as a link, a device or a sparse file"
                raise UserError(f"{self.path} {found}; recreate the tar with --dereference --hard-dereference")

    def scan(self, end: int) -> None:
        """Find a tar's images, their labels, and the images of the class tars in it."""
        for folder, name, member in self._entries(0, end):
            if name.lower().endswith(".tar"):
                if folder in ("", self.split_name):
                    self.scan_class(name[: -len(".tar")], member.offset_data, member.offset_data + member.size)
                continue
            location = (self.number, member.offset_data, member.size)
            self.samples.add(f"{folder}/{name}".lstrip("/").removeprefix(f"{self.split_name}/"), location)
            images = self.plain.setdefault(folder, {})
            if name.lower().endswith(self.extensions):
                images[name] = location

    def scan_class(self, class_name: str, start: int, end: int) -> None:
        """Find the images of a tar of one class, which begins at `start` of the file."""
        self.by_class.setdefault(class_name, {})
        for folder, name, member in self._entries(start, end):
            location = (self.number, member.offset_data, member.size)
            inner = f"{folder}/".removeprefix(f"{self.split_name}/{class_name}/").removeprefix(f"{class_name}/")
            within = f"{class_name}/{inner}".rstrip("/")
            self.samples.add(f"{within}/{name}", location)
            if name.lower().endswith(self.extensions):
                self.by_class.setdefault(within, {})[name] = location

    def folders(self) -> _Found:
        """Return the images of all folders, which begin with the class; those of none have the folder ""."""
        names = [folder for folder in self.plain if folder]
        prefix = f"{self.split_name}/"
        # Members may carry the split's name; a class of that name would not be the only one, or hold no folders.
        has_prefix = all(f"{name}/".startswith(prefix) for name in names) and any("/" in name for name in names)
        for folder, images in self.plain.items():
            within = f"{folder}/".removeprefix(prefix if has_prefix else "")
            self.by_class.setdefault(within.rstrip("/"), {}).update(images)
        return self.by_class
