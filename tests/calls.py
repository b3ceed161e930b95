"""The file-system calls of a process, seen from inside it: written down, interrupted by a kill, or made to fail.

Python's own functions are wrapped, in a child that runs the real command line: nothing in the code under test knows of
it. A call is one that reaches the kernel: a write is what leaves Python's buffer, not what is put into it.
"""

import builtins
import errno
import fcntl
import io
import os
import pickle
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# Which calls change something on the disk, or make a change durable; a kill between two of them is a kill at the first.
CHANGING = {"open", "write", "truncate", "fsync", "rename", "link", "unlink", "mkdir"}

# Which of them need room on the disk.
NEEDS_SPACE = {"open", "write", "link", "mkdir", "rename"}


class Call(NamedTuple):
    """One call on something below the watched folder.

    Args:
        number: from 1, among the calls that are counted.
        name: what it does; `read` stands for opening a file to read, `list` for a folder, `lock` for a record lock.
        paths: below the watched folder, one or two.
        offset: where a write begins, or the length that a file is cut to.
        content: what a write writes.
        is_truncating: whether an `open` empties what is there.
    """

    number: int
    name: str
    paths: tuple[str, ...]
    offset: int = 0
    content: bytes = b""
    is_truncating: bool = False

    def __str__(self) -> str:
        paths = " -> ".join(re.sub(r"\.tmp\.\d+", ".tmp.PID", _without_host(path)) for path in self.paths)
        return f"call {self.number} ({self.name} {paths})"


def _without_host(path: str) -> str:
    return re.sub(r"(events\.out\.tfevents)\.\S+", r"\1", path)


class Killed(NamedTuple):
    """SIGKILL before a call, or in the middle of a write."""

    number: int
    is_half: bool = False

    def __call__(self, call: Call, perform: Callable, write_half: Callable | None) -> Any:
        if call.number == self.number:
            if self.is_half and write_half is not None:
                write_half()
            os.kill(os.getpid(), signal.SIGKILL)
        return perform()


class Failing(NamedTuple):
    """A call that fails, once or from then on; then with all that fail for the same reason.

    On a full disk a write first writes less than it should, and fails when it is tried again with the rest.
    """

    number: int
    code: int
    name: str
    is_for_good: bool = False

    def __call__(self, call: Call, perform: Callable, write_half: Callable | None) -> Any:
        is_short = self.code == errno.ENOSPC and self.name == "write"
        if call.number == self.number and is_short and write_half is not None:
            return write_half()
        is_struck = call.number == self.number + is_short
        if is_struck or (self.is_for_good and call.number > self.number and self._is_alike(call)):
            raise OSError(self.code, os.strerror(self.code), call.paths[0])
        return perform()

    def _is_alike(self, call: Call) -> bool:
        if self.code == errno.ENOSPC:
            return call.name in NEEDS_SPACE
        if self.code in (errno.EIO, errno.ESTALE):  # the disk is gone
            return True
        return call.name == self.name


def undisturbed(call: Call, perform: Callable, write_half: Callable | None) -> Any:
    """Let every call through."""
    return perform()


class Watch:
    """Wraps the calls of this process on what is below a folder, for good; meant for a child that ends soon.

    Args:
        folder: the watched one.
        log: where calls and notes are appended, outside of it.
        trouble: gets each call, a function that performs it and, for a write, one that writes half.
        counted: the names of the calls that are counted and troubled.
        has_content: whether to log what is written.
    """

    def __init__(self, folder: Path, log: Path, trouble: Callable, counted: set[str], *, has_content: bool) -> None:
        self.folder = os.path.realpath(folder)
        self.trouble, self.counted, self.has_content = trouble, counted, has_content
        self.number = 0
        self.lock = threading.RLock()  # TensorBoard's writer is a thread
        self.real = {name: getattr(os, name) for name in dir(os) if callable(getattr(os, name))}
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._wrap()

    def note(self, *words: Any) -> None:
        """Append something that happened between two calls."""
        self.real["write"](self.log, pickle.dumps(("note", *words)))

    def below(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return a path relative to the watched folder, or None for one elsewhere."""
        if isinstance(path, int):
            try:
                path = self.real["readlink"](f"/proc/self/fd/{path}").removesuffix(" (deleted)")
            except OSError:
                return None
        path = os.fspath(path)
        path = os.fsdecode(path)
        if dir_fd is not None and not os.path.isabs(path):
            path = os.path.join(self.real["readlink"](f"/proc/self/fd/{dir_fd}"), path)
        path = os.path.abspath(path)
        if path != self.folder and not path.startswith(self.folder + os.sep):
            return None
        if os.path.basename(path).startswith("log.txt"):  # of which nothing is promised, a line at a time
            return None
        return os.path.relpath(path, self.folder)

    def run(self, name: str, paths: tuple, perform: Callable, *, write_half: Callable | None = None, **details) -> Any:
        """Count a call, trouble it, perform it and write it down.

        Args:
            name: as of `Call`.
            paths: below the watched folder.
            perform: the call.
            write_half: writes the first half of what a write writes.
            details: as of `Call`.
        """
        if name not in self.counted:
            return perform()
        with self.lock:
            self.number += 1
            call = Call(self.number, name, paths, **details)
            result = self.trouble(call, perform, write_half)
            content = call.content if self.has_content else b""
            self.real["write"](self.log, pickle.dumps(call._replace(content=content)))
        return result

    def _wrap(self) -> None:
        for name in ("replace", "rename"):
            self._wrap_pair(name, "rename", ("src_dir_fd", "dst_dir_fd"))
        self._wrap_pair("link", "link", ("src_dir_fd", "dst_dir_fd"))
        pairs = {"unlink": "unlink", "remove": "unlink", "mkdir": "mkdir", "listdir": "list", "scandir": "list"}
        for name, kind in pairs.items():
            self._wrap_one(name, kind)
        for name in ("fsync", "fdatasync"):
            self._wrap_descriptor(name, "fsync")
        self._wrap_descriptor("ftruncate", "truncate")
        for name in ("write", "pwrite"):
            self._wrap_write(name)
        self._wrap_copies()
        self._wrap_os_open()
        self._wrap_lock()
        self._wrap_open()

    def _wrap_pair(self, name: str, kind: str, keys: tuple[str, str]) -> None:
        real = self.real[name]

        def wrapped(source, target, **options):
            paths = self.below(source, options.get(keys[0])), self.below(target, options.get(keys[1]))
            if None in paths:
                return real(source, target, **options)
            return self.run(kind, paths, lambda: real(source, target, **options))

        setattr(os, name, wrapped)

    def _wrap_one(self, name: str, kind: str) -> None:
        real = self.real[name]

        def wrapped(path=".", *args, **options):
            below = self.below(path, options.get("dir_fd"))
            is_there = below is not None and os.path.lexists(os.path.join(self.folder, below))
            if below is None or is_there == (kind == "mkdir"):
                return real(path, *args, **options)  # elsewhere, or it fails anyway
            return self.run(kind, (below,), lambda: real(path, *args, **options))

        setattr(os, name, wrapped)

    def _wrap_descriptor(self, name: str, kind: str) -> None:
        real = self.real[name]

        def wrapped(descriptor, *args):
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            below = self.below(number)
            if below is None:
                return real(descriptor, *args)
            details = {"offset": args[0]} if args else {}
            return self.run(kind, (below,), lambda: real(descriptor, *args), **details)

        setattr(os, name, wrapped)

    def _wrap_write(self, name: str) -> None:
        real = self.real[name]

        def wrapped(descriptor, content, *offset):
            below = self.below(descriptor)
            if below is None:
                return real(descriptor, content, *offset)
            content = bytes(content)
            return self.run(
                "write", (below,), lambda: real(descriptor, content, *offset),
                write_half=lambda: real(descriptor, content[: len(content) // 2], *offset),
                offset=offset[0] if offset else self._position(descriptor, content), content=content,
            )  # fmt: skip

        setattr(os, name, wrapped)

    def _position(self, descriptor: int, content: bytes) -> int:
        """Return where the next write of a descriptor goes."""
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND:
            return self.real["fstat"](descriptor).st_size
        return self.real["lseek"](descriptor, 0, os.SEEK_CUR)

    def _wrap_copies(self) -> None:
        """Have whatever copies within the kernel say that it cannot, so that the copy is made of reads and writes."""

        def refused(target, *args, **options):
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))

        os.sendfile = refused
        if hasattr(os, "copy_file_range"):
            os.copy_file_range = refused

    def _wrap_os_open(self) -> None:
        real = self.real["open"]

        def wrapped(path, flags, mode=0o777, *, dir_fd=None):
            below = self.below(path, dir_fd)
            if below is None:
                return real(path, flags, mode, dir_fd=dir_fd)
            return self._open(below, flags, lambda: real(path, flags, mode, dir_fd=dir_fd))

        os.open = wrapped

    def _open(self, below: str, flags: int, perform: Callable) -> Any:
        """Count an open; one that neither makes nor cuts a file only reads."""
        where = os.path.join(self.folder, below)
        is_new = not os.path.lexists(where)
        is_changing = (is_new and flags & os.O_CREAT) or flags & os.O_TRUNC
        return self.run("open" if is_changing else "read", (below,), perform, is_truncating=bool(flags & os.O_TRUNC))

    def _wrap_lock(self) -> None:
        real = fcntl.lockf

        def wrapped(descriptor, *args):
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            below = self.below(number)
            return real(descriptor, *args) if below is None else self.run("lock", (below,), lambda: real(number, *args))

        fcntl.lockf = wrapped

    def _wrap_open(self) -> None:
        real, watch = builtins.open, self

        class Raw(io.FileIO):
            """A file whose writes are counted."""

            def write(self, content):
                number = self.fileno()
                below = watch.below(number)
                if below is None:
                    return super().write(content)
                content, write = bytes(content), super().write
                return watch.run(
                    "write", (below,), lambda: write(content),
                    write_half=lambda: write(content[: len(content) // 2]),
                    offset=watch._position(number, content), content=content,
                )  # fmt: skip

            def truncate(self, size=None):
                size = self.tell() if size is None else size
                os.ftruncate(self.fileno(), size)
                return size

        def opened(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
            below = watch.below(file) if isinstance(file, (int, str, bytes, os.PathLike)) else None
            plain = (file, mode, buffering, encoding, errors, newline, closefd, opener)
            if below is None:
                return real(*plain)
            if not set(mode) & set("wax+"):
                return real(*plain) if isinstance(file, int) or opener else watch._open(
                    below, os.O_RDONLY, lambda: real(*plain)
                )  # fmt: skip
            raw_mode = mode.replace("b", "").replace("t", "")
            flags = {"w": os.O_CREAT | os.O_TRUNC, "x": os.O_CREAT, "a": os.O_CREAT}.get(raw_mode[0], 0)
            if isinstance(file, int) or opener:
                raw = Raw(file, raw_mode, closefd, opener)
            else:
                raw = watch._open(below, flags, lambda: Raw(file, raw_mode, closefd))
            if buffering == 0:
                return raw
            buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

        builtins.open = io.open = opened


def read_log(path: Path) -> list:
    """Return what a `Watch` wrote down: calls, and notes as tuples that begin with "note"."""
    found = []
    if not path.exists():
        return found
    with open(path, "rb") as file:
        while True:
            try:
                found.append(pickle.load(file))
            except EOFError:
                return found
