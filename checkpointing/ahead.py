"""Read checkpoints in a thread while Python imports, so that a resumed run need not wait for the disk afterwards."""

import os
import threading
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

from files import open_to_read
from launch import read_launch


def read_ahead(args: Namespace, folder: str) -> None:
    """Begin to read the files that a resumed run verifies first, into the system's cache alone.

    A copy in this process would live on in every loader process that is forked. `CheckpointFinder` later chooses among
    the files and reports damage.

    Args:
        args: the options of the command line.
        folder: the run's folder, which holds the checkpoints of `--resume auto`.
    """
    if not args.resume or args.dry_run or read_launch().rank:
        return
    threading.Thread(target=_read, args=(Path(folder), args.resume), daemon=True).start()


def _read(folder: Path, resume: str) -> None:
    with suppress(OSError):
        newest = Path(resume)
        if resume == "auto":
            newest = max(folder.glob("checkpoint-*.pth"), default=folder / "checkpoint.pth")
        part, numbers = bytearray(1 << 22), set()
        for path in filter(Path.exists, (newest, folder / "best.pth", folder / "best_ema.pth")):
            with open_to_read(path, buffering=0) as file:
                number = os.fstat(file.fileno()).st_ino  # several names may be one file
                while number not in numbers and file.readinto(part):
                    pass
                numbers.add(number)
