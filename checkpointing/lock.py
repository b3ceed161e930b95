"""One writer a folder, on one machine and over a network file system that has locks."""

import errno
import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from errors import LockedError
from files import open_regular
from launch import read_launch

# How long a run may take to stop: one that lost its launcher, or is saving because it was told to end.
WAIT_S = 60.0

# What a file system without locks says.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class FolderLock:
    """A lock on `.lock` in a folder, held until the process ends, however it ends.

    A POSIX record lock: unlike flock's, it is not inherited by loader processes, which may outlive a killed trainer. In
    return the process must never close a second descriptor of the file: that would release it. So nothing else may
    open it, and nobody ever deletes it: a deleted file can be locked by one and made anew by another.

    Args:
        folder: an existing folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".lock"
        self._descriptor = None

    @property
    def is_held(self) -> bool:
        """Whether `acquire` has returned."""
        return self._descriptor is not None

    def acquire(self, wait_s: float) -> None:
        """Take the lock, and write into the file who holds it.

        Args:
            wait_s: how long to wait for whoever holds it; this is said once.

        Raises:
            LockedError: it is still held then; names the holder.
            OSError: the file cannot be opened, or is a link.
        """
        descriptor = open_regular(self.path, os.O_RDWR | os.O_CREAT)
        deadline = time.monotonic() + wait_s
        is_said = False
        while not self._try(descriptor):
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "not known yet"
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise LockedError(
                    f"--output-dir {self.path.parent} is in use by another run ({holder}); end that one, or choose "
                    "another folder"
                )
            if not is_said:
                print(
                    f"{self.path.parent} is in use ({holder}); waiting up to {wait_s:.0f} s for it to end", flush=True
                )
                is_said = True
            time.sleep(min(0.2, wait_s))
        self._descriptor = descriptor
        with suppress(OSError):  # on a full disk the lock holds without a name
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _describe_holder().encode(), 0)

    def _try(self, descriptor: int) -> bool:
        """Take the lock if it is free; where the file system has none, say so and go on."""
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                print(f"{self.path.parent}: this file system has no locks; see to it that no other run writes there")
                return True
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            return False
        return True


def _describe_holder() -> str:
    job = read_launch().job
    return (
        f"host {socket.gethostname()}, pid {os.getpid()}, {f'Slurm job {job}, ' if job else ''}"
        f"started {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
    )
