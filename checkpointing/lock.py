"""One writer a folder, on one machine and over a network file system that has locks."""

import errno
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from errors import LockedError
from files import lock_file
from launch import read_launch

# How long a run may take to stop: one that lost its launcher, or is saving because it was told to end.
WAIT_S = 60.0

# Answers of a file system without locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class FolderLock:
    """A lock on `.lock` in an existing folder, held until the process ends, however it ends.

    Nothing else may open the file, and nobody ever deletes it: a deleted file can be locked by one process and made
    anew by another.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / ".lock"
        self.is_held = False

    def acquire(self, wait_s: float) -> None:
        """Take the lock, and write into the file who holds it. Where the file system has none, say so and go on.

        Args:
            wait_s: how long to wait for whoever holds it; this is said once.

        Raises:
            LockedError: it is still held then; names the holder.
            OSError: the file cannot be opened, or is a link.
        """
        try:
            descriptor = lock_file(self.path, wait_s, lambda: self._say_waiting(wait_s))
        except BlockingIOError as error:
            raise LockedError(
                f"--output-dir {self.folder} is in use by another run ({self._holder()}); end that one, or choose "
                "another folder"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(f"{self.folder}: this file system has no locks; see to it that no other run writes there")
        else:
            with suppress(OSError):  # on a full disk the lock holds without a name
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, _describe_holder().encode(), 0)
        self.is_held = True

    def _say_waiting(self, wait_s: float) -> None:
        print(f"{self.folder} is in use ({self._holder()}); waiting up to {wait_s:.0f} s for it to end", flush=True)

    def _holder(self) -> str:
        return self.path.read_text(errors="replace")[:1000].strip() or "not known yet"


def _describe_holder() -> str:
    job = read_launch().job
    return (
        f"host {socket.gethostname()}, pid {os.getpid()}, {f'Slurm job {job}, ' if job else ''}"
        f"started {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
    )
