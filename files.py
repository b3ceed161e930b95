"""Files that cannot be torn, and a lock."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO


def write_atomically(
    path: Path, write: Callable[[BinaryIO], None], verify: Callable[[Path], None] | None = None
) -> None:
    """Write a file so that after a kill at any moment the old content or the new one is there, whole.

    Args:
        path: where; a temporary file beside it is written first.
        write: gets the open file.
        verify: gets the path of the complete temporary file, and raises if it is not good.
    """
    temporary = path.with_name(f"{path.name}.tmp.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if verify is not None:
            verify(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # half a file keeps a full disk full
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, notice: str) -> Iterator[None]:
    """Hold a lock that one process at a time can hold, on all machines that see the file; wait for it.

    The system frees it when the process ends, however it ends. The file is removed with it.

    Args:
        path: of the lock's file.
        notice: is printed where it has to be waited for.

    Raises:
        OSError: the file cannot be written, or its disk knows no locks.
    """
    descriptor = _open_locked(path, notice)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _open_locked(path: Path, notice: str) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(notice, flush=True)
                fcntl.lockf(descriptor, fcntl.LOCK_EX)
            # While we waited, the one before us has removed it, and another may hold a new one.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
