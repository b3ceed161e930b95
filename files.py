"""Atomic writes, file locks, retries, and explanations of I/O errors."""

import errno
import fcntl
import json
import math
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from errors import StorageError

T = TypeVar("T")

# Seconds before the last of four tries; before the others a quarter and a sixteenth.
RETRY_S = 1.6

# Seconds between two tries of a lock.
LOCK_POLL_S = 0.2

# Errors that another try would not change.
_NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)

# Errors of a file system that cannot sync a folder.
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}

# Most bytes of a JSON file to read; the status or description of a run has far fewer.
_LARGEST_JSON = 1 << 24


def open_regular(path: str | Path, flags: int, *, follows_links: bool = True, dir_fd: int | None = None) -> int:
    """Return a descriptor of a regular file; a pipe or a device is refused, and never waited for.

    No link is followed to write: it may lead to a file outside the folder, which somebody else chose.

    Raises:
        IsADirectoryError: it exists and is no regular file, or is a link that is not followed.
        OSError: it cannot be opened.
    """
    # O_NONBLOCK: an open of a pipe would wait until somebody writes into it.
    flags |= os.O_NONBLOCK | os.O_CLOEXEC
    if flags & os.O_ACCMODE != os.O_RDONLY or not follows_links:
        flags |= os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, 0o666, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ELOOP):  # a pipe without a reader, a link
            raise IsADirectoryError(errno.EISDIR, f"{Path(path).name} is a link or not a file", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, "is not a file", str(path))
    return descriptor


def open_to_read(path: str | Path, *, buffering: int = -1, follows_links: bool = True) -> BinaryIO:
    """Open a file to read; arguments and errors as of `open` and `open_regular`."""
    return open(open_regular(path, os.O_RDONLY, follows_links=follows_links), "rb", buffering=buffering)


def write_atomically(
    path: Path, content: bytes | Callable[[BinaryIO], Any], verify: Callable[[Path], object] | None = None, *,
    is_durable: bool = True,
) -> None:  # fmt: skip
    """Write a file so that a kill at any moment leaves the old content or the new one, whole.

    The order makes it so. A temporary file in the same folder, since a rename is atomic within a file system only.
    fsync, or a power failure after the rename could leave an empty file of the final name. The check, so that this name
    is given only to bytes that were read back. The rename, and fsync of the folder, which holds the names.

    Args:
        path: the file to replace.
        content: its new content, or a function that writes it into an open file.
        verify: called with the path of the temporary file before the rename; raises if the content is wrong.
        is_durable: whether to wait until the content would survive a power failure, too.
    """
    # The process in the name: two writers of one file must not write into the same temporary one.
    temporary = path.with_name(f"{path.name}.tmp.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        # A link that stood there is removed, and one that appears meanwhile is an error: none is written through.
        with open(temporary, "xb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        if verify is not None:
            verify(temporary)
        os.replace(temporary, path)
    except BaseException:
        # Half a file would keep a full disk full; and an error of this would hide the first one.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if is_durable:
        sync_folder(path.parent)


def write_json(path: Path, value: Any, *, is_durable: bool = True) -> None:
    """Write a value as JSON, as `write_atomically`."""
    write_atomically(path, (json.dumps(value) + "\n").encode(), is_durable=is_durable)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def lock_file(path: Path, notice: Callable[[], str], wait_s: float = math.inf) -> int:
    """Lock a file against processes on all machines that see it; return the descriptor that holds the lock.

    The system frees the lock when the process ends, however it ends. It is a POSIX record lock: unlike flock's, loader
    processes do not inherit it, which may outlive a killed trainer. Closing any descriptor of the file frees it too.
    Without it the ranks of a killed torchrun could still write where its successor's do.

    Args:
        path: the file; created if it is missing.
        notice: returns the line to print before waiting.
        wait_s: longest time to wait.

    Raises:
        BlockingIOError: another process holds the lock for longer than `wait_s`.
        OSError: the file cannot be opened, or its file system has no locks.
    """
    deadline = time.monotonic() + wait_s
    is_said = False
    while True:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have removed the file since it was opened here: then this lock protects nothing.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:  # removed meanwhile: the next try makes it anew
            pass
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                os.close(descriptor)
                raise
        os.close(descriptor)
        if time.monotonic() >= deadline:
            raise BlockingIOError(errno.EAGAIN, "is locked by another process", str(path))
        if not is_said:
            print(notice(), flush=True)
            is_said = True
        time.sleep(min(LOCK_POLL_S, wait_s))


@contextmanager
def locked(path: Path, notice: str) -> Iterator[None]:
    """Hold the lock of a file, as `lock_file`, and remove the file afterwards."""
    descriptor = lock_file(path, lambda: notice)
    try:
        yield
    finally:
        # Removed while it is held: whoever opened it before sees, once it has the lock, that the file is another.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def retry(work: Callable[[], T], final: tuple[type[OSError], ...] = ()) -> T:
    """Return the result of `work`; after an OSError or MemoryError try up to three times more, with growing waits.

    A network disk may fail for a moment only, and even report "No such file" then. An error of `final`, or of the last
    try, is raised. Images, checkpoints and records all use this policy: about two seconds in all, after which a
    disk that is gone is named.
    """
    for share in (16, 4, 1):
        try:
            return work()
        except final:
            raise
        except (MemoryError, OSError):
            time.sleep(RETRY_S / share)
    return work()


def retry_read(read: Callable[[], T], path: Path) -> T:
    """Return the result of `read`, as `retry`; StorageError if every try failed.

    Do not read an older file instead: that would lose work.
    """
    try:
        return retry(read, final=_NO_FILE)
    except _NO_FILE:
        raise
    except OSError as error:
        found = f"{path} cannot be read: {error.strerror or error} (4 tries); nothing was changed"
        remedy = "no older checkpoint was used instead; start again when the disk responds"
        raise StorageError(f"{found}, and {remedy}") from error


def make_folder(folder: Path) -> None:
    """Make a folder and its parents if they are missing, and make that durable."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    # From the top: a folder's name is in its parent, which must be durable first.
    for each in reversed(missing):
        sync_folder(each.parent)


def read_bytes(path: Path) -> bytes:
    """Return a file's content; raises as `retry_read` and `open_regular`."""

    def read() -> bytes:
        with open_to_read(path) as file:
            return file.read()

    return retry_read(read, path)


def read_at(file: BinaryIO, offset: int, num_bytes: int) -> bytes:
    """Return bytes of an open file from an offset on; fewer only where the file ends."""
    content = b""
    # A call may return less than it was asked for, on Linux at most 2 GiB; and nothing where all is read.
    while more := os.pread(file.fileno(), num_bytes - len(content), offset + len(content)):
        content += more
    return content


def read_json(path: Path) -> dict:
    """Return the JSON object in a small file, or an empty one if none can be read."""
    try:
        if os.path.getsize(path) > _LARGEST_JSON:
            return {}
        content = json.loads(read_bytes(path))
    # RecursionError: a damaged or hostile file may nest brackets deeper than Python's parser goes.
    except (OSError, ValueError, RecursionError, StorageError):
        return {}
    return content if isinstance(content, dict) else {}


_TROUBLES = {
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "ulimit -f or the file system does not allow a file this large",
}


def explain_failure(error: BaseException, folder: Path, num_bytes: int) -> str | None:
    """Say briefly why that many bytes, 0 if unknown, could not be written to a folder; None for other errors."""
    # `torch.save` hides it behind a RuntimeError: "unexpected pos 60001152 vs 60001104".
    while not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
        if error is None:
            return None
    if error.errno not in _TROUBLES:
        return f"{error.strerror or error} in {folder}"
    space = f"{free_bytes(folder) / 1e6:.1f} MB free"
    if num_bytes:
        space = f"needs {num_bytes / 1e6:.1f} MB, {space}"
    return f"{_TROUBLES[error.errno]} ({space})"


def is_running(pid: int) -> bool:
    """Tell whether this machine has a process of that number."""
    try:
        # Signal 0 is sent to nobody. Not by a look at /proc, which macOS does not have.
        os.kill(pid, 0)
    except (OSError, OverflowError) as error:
        return isinstance(error, PermissionError)  # another user's
    return True


def own_temporary_folder(name: str) -> str:
    """Return a new temporary folder of this process; remove those of processes that are gone."""
    # A killed process removes nothing; its number in the name tells that it is gone.
    for old in Path(tempfile.gettempdir()).glob(f"{name}-*-*"):
        pid = old.name.split("-")[-2]
        with suppress(FileNotFoundError):  # another rank that starts removes it, too
            if pid.isdecimal() and old.lstat().st_uid == os.getuid() and not is_running(int(pid)):
                shutil.rmtree(old, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{name}-{os.getpid()}-")


def free_bytes(folder: Path) -> float:
    """Return the space left for this user; NaN if unknown."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return math.nan


def memory_bytes() -> int:
    """Return how much memory this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
