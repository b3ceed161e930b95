"""Let one run at a time write to a folder, on one machine or over a network file system that has locks."""

import errno
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from errors import LockedError
from files import lock_file
from launch import read_launch

# Time that a run may take to stop after it lost its launcher, or was told to end and saves.
WAIT_S = 60.0

# Answers of a file system without locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


def lock_folder(folder: Path) -> None:
    """Lock `.lock` in a folder until the process ends, and write this holder into it; say so if there are no locks.

    Nothing else may open the file, and nobody deletes it: one process could lock a deleted file while another makes
    a new one.

    Raises:
        LockedError: another process, which the message names, still holds the lock after `WAIT_S`.
        OSError: the file cannot be opened, or is a link.
    """
    path = folder / ".lock"

    def holder() -> str:
        return path.read_text(errors="replace")[:1000].strip() or "not known yet"

    def say_waiting() -> None:
        print(f"{folder} is in use ({holder()}); waiting up to {WAIT_S:.0f} s for it to end", flush=True)

    try:
        descriptor = lock_file(path, WAIT_S, say_waiting)
    except BlockingIOError as error:
        raise LockedError(
            f"--output-dir {folder} is in use by another run ({holder()}); end that one, or choose another folder"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        print(f"{folder}: this file system has no locks; see to it that no other run writes there")
        return
    job = read_launch().job
    me = f"host {socket.gethostname()}, pid {os.getpid()}, {f'Slurm job {job}, ' if job else ''}"
    with suppress(OSError):  # on a full disk the lock holds without a name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{me}started {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode(), 0)
