"""Files that cannot be torn."""

import os
from collections.abc import Callable
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
