"""The cache of a remote pack's images on this machine's disk, from which nothing is evicted."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy

from errors import UserError
from files import open_regular

# The default cache leaves this share of the disk free.
_FREE_SHARE = 0.1


class Cache:
    """Images of a split on this machine's disk: one sparse file of all shards, and a byte for each image that is there.

    Data are written before the image's byte, and every read is checked by the CRC-32 of the index: so a kill, a full
    disk or another process can leave nothing that is believed wrongly. Nothing is evicted: images are kept in the order
    of the shards as far as the limit goes. Any number of processes of one user share it without locks; others could put
    links and images there, and a CRC-32 is no proof against people.

    Args:
        folder: the folder of this split.
        offsets: (images,) where each image lies in the file.
        sizes: (images,) bytes of each image.
        gib: the most that is kept; None for what the disk has, less a tenth.

    Raises:
        UserError: the folder cannot be made, is another user's, or others may write to it.
    """

    def __init__(self, folder: Path, offsets: numpy.ndarray, sizes: numpy.ndarray, gib: float | None) -> None:
        self.folder, self.offsets, self.sizes = folder, offsets, sizes
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
            # By its descriptor, so that nobody can put a link in place of the folder between the check and the files.
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            status = os.fstat(opened)
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise UserError(f"--cache {folder}: another user owns it or may write to it; give a folder of your own")
            self._data = open_regular("data", os.O_RDWR | os.O_CREAT, dir_fd=opened)
            self._there = open_regular("there", os.O_RDWR | os.O_CREAT, dir_fd=opened)
            os.close(opened)
        except OSError as error:
            raise UserError(f"--cache {folder} cannot be used: {error.strerror}; give another folder") from error
        limit = float("inf") if gib is None else gib * 2**30
        self.num_kept = int(numpy.searchsorted(offsets + sizes, limit, side="right"))
        self.is_full, self.leaves_free = False, _FREE_SHARE if gib is None else 0.0

    def has(self, number: int) -> bool:
        """Tell whether an image is there."""
        if number >= self.num_kept:
            return False
        try:
            return os.pread(self._there, 1, number) == b"\1"
        except OSError:  # the address has it too
            return False

    def read(self, number: int) -> bytes | None:
        """Return an image's bytes, not checked yet, or None if they are not there."""
        if not self.has(number):
            return None
        try:
            return os.pread(self._data, int(self.sizes[number]), int(self.offsets[number]))
        except OSError:  # as in `has`
            return None

    def write(self, number: int, content: bytes) -> None:
        """Keep an image's bytes, which must be checked; a disk that fails keeps no more, and says so once."""
        if number >= self.num_kept or self.is_full:
            return
        try:
            disk = os.fstatvfs(self._data)
            self.is_full = disk.f_bavail < self.leaves_free * disk.f_blocks
            if self.is_full:
                return
            left = memoryview(content)
            offset = int(self.offsets[number])
            while left:
                num_written = os.pwrite(self._data, left, offset)
                left = left[num_written:]
                offset += num_written
            # Last: after a kill before this the image counts as missing, and is fetched again.
            os.pwrite(self._there, b"\1", number)
        except OSError as error:
            self.is_full = True
            print(f"--cache {self.folder}: {error.strerror}; no more images are cached", file=sys.stderr, flush=True)

    def forget(self, number: int) -> None:
        """Forget an image whose bytes are wrong."""
        with suppress(OSError):  # its CRC-32 is compared at the next read too
            os.pwrite(self._there, b"\0", number)

    def missing(self) -> Iterator[int]:
        """Yield the images that are to be kept and are not there."""
        for begin in range(0, self.num_kept, 1 << 16):
            num_flags = min(self.num_kept - begin, 1 << 16)
            # The file ends after the last image that was kept.
            flags = os.pread(self._there, num_flags, begin).ljust(num_flags, b"\0")
            yield from (number for number, flag in enumerate(flags, begin) if flag != 1)
