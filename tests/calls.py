"""The file-system calls of a process below a folder, seen from inside: recorded, met by a kill, or made to fail.

Python announces most calls by audit events; writes, which count when they leave Python's buffer, and fsync are wrapped.
"""

import builtins
import errno
import fcntl
import io
import os
import pickle
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

# Which calls change something on the disk, or make a change durable; a kill between two of them is a kill at the first.
CHANGING = {"open", "write", "truncate", "fsync", "sync", "rename", "link", "unlink", "mkdir"}
NEEDS_SPACE = {"open", "write", "link", "mkdir", "rename"}
EVENTS = {
    "os.rename": "rename", "os.link": "link", "os.remove": "unlink", "os.mkdir": "mkdir", "os.truncate": "truncate",
    "os.listdir": "list", "os.scandir": "list", "fcntl.lockf": "lock",
}  # fmt: skip


class Call(NamedTuple):
    number: int  # from 1, among the calls that are counted
    name: str  # `read` is the opening of a file to read, `list` of a folder, `lock` is a record lock
    paths: tuple[str, ...]  # below the watched folder, one or two
    offset: int = 0  # where a write begins, or the length that a file is cut to
    content: bytes = b""
    is_truncating: bool = False  # whether an `open` empties what is there


class Trouble(NamedTuple):
    number: int = 0  # of the call; 0 for no trouble
    code: int = 0  # the error that the call fails with; 0 for SIGKILL before it
    is_half: bool = False  # a write first writes half of its content, and the trouble meets the write of the rest
    name: str = ""  # of the call, for trouble that lasts
    lasts: bool = False  # each call from then on fails that would fail for the same reason

    def meet(self, call: Call) -> bool:
        """Kill the process, raise the error, or return whether the call writes only half."""
        if call.number == self.number and self.is_half:
            return True
        is_struck = call.number == self.number + self.is_half
        if is_struck and not self.code:
            os.kill(os.getpid(), signal.SIGKILL)
        if is_struck or (self.lasts and call.number > self.number and self._concerns(call)):
            raise OSError(self.code, os.strerror(self.code), call.paths[0])
        return False

    def _concerns(self, call: Call) -> bool:
        if self.code == errno.ENOSPC:
            return call.name in NEEDS_SPACE
        return self.code in (errno.EIO, errno.ESTALE) or call.name == self.name


class Watch:
    """Watches a folder in this process from now on, for a child that ends soon; the log lies outside of it."""

    def __init__(self, folder: Path, log: Path, trouble: Trouble, counted: set[str]) -> None:
        self.folder, self.trouble, self.counted = os.path.realpath(folder), trouble, counted
        self.number, self.lock = 0, threading.RLock()  # TensorBoard's writer is a thread
        self.log = open(log, "ab", buffering=0)  # noqa: SIM115
        shutil._USE_CP_SENDFILE = False  # a copy is made of reads and writes
        self._wrap_descriptor_calls()
        self._wrap_open()
        sys.addaudithook(self._hear)

    def note(self, *words: Any) -> None:
        self.log.write(pickle.dumps(words))

    def below(self, path: Any) -> str | None:
        """Return a path or the path of a descriptor relative to the watched folder; None for one elsewhere."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}").removesuffix(" (deleted)")
            if not path.startswith(os.sep):  # a pipe or a socket
                return None
        path = os.path.abspath(os.fsdecode(path or "."))
        is_log = os.path.basename(path).startswith("log.txt")  # of which nothing is promised
        is_inside = path == self.folder or path.startswith(self.folder + os.sep)
        return os.path.relpath(path, self.folder) if is_inside and not is_log else None

    def meet(self, name: str, *paths: str | None, **details: Any) -> bool:
        """Count a call, let the trouble act and record the call; return whether it writes only half."""
        if name not in self.counted or None in paths:
            return False
        with self.lock:
            self.number += 1
            call = Call(self.number, name, paths, **details)
            is_half = self.trouble.meet(call)
            content = call.content[: len(call.content) // 2] if is_half else call.content
            self.note(*call._replace(content=content))
        return is_half

    def _hear(self, event: str, arguments: tuple) -> None:
        if event == "open" and not isinstance(arguments[0], int):
            self._hear_open(arguments[0], arguments[2])
        elif event in EVENTS:
            name, paths = EVENTS[event], [self.below(arguments[0])]
            if name in ("rename", "link"):
                paths.append(self.below(arguments[1]))
            elif name == "list" and isinstance(arguments[0], int):
                return  # of a folder that was found
            elif name in ("unlink", "mkdir", "list") and os.path.lexists(arguments[0]) == (name == "mkdir"):
                return  # it fails anyway
            self.meet(name, *paths, **({"offset": arguments[1]} if name == "truncate" else {}))

    def _hear_open(self, path: Any, flags: int) -> None:
        below = self.below(path)
        if below is not None:
            is_new, is_truncating = bool(flags & os.O_CREAT and not os.path.lexists(path)), bool(flags & os.O_TRUNC)
            self.meet("open" if is_new or is_truncating else "read", below, is_truncating=is_truncating)

    def _wrap_descriptor_calls(self) -> None:
        fsync, pwrite, sync = os.fsync, os.pwrite, os.sync

        def heard_fsync(descriptor: int) -> None:
            self.meet("fsync", self.below(descriptor))
            fsync(descriptor)

        def heard_pwrite(descriptor: int, content: bytes, offset: int) -> int:
            is_half = self.meet("write", self.below(descriptor), offset=offset, content=bytes(content))
            return pwrite(descriptor, content[: len(content) // 2] if is_half else content, offset)

        def heard_sync() -> None:
            self.meet("sync", "")
            sync()

        os.fsync, os.pwrite, os.sync = heard_fsync, heard_pwrite, heard_sync

    def _wrap_open(self) -> None:
        real, watch = builtins.open, self

        class Raw(io.FileIO):
            def write(self, content):
                content = bytes(content)
                is_appending = fcntl.fcntl(self.fileno(), fcntl.F_GETFL) & os.O_APPEND
                offset = os.fstat(self.fileno()).st_size if is_appending else self.tell()
                is_half = watch.meet("write", watch.below(self.fileno()), offset=offset, content=content)
                return super().write(content[: len(content) // 2] if is_half else content)

            def truncate(self, size=None):
                size = self.tell() if size is None else size
                os.ftruncate(self.fileno(), size)
                return size

        def opened(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
            if not set(mode) & set("wax+") or watch.below(file) is None:
                return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
            raw = Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
            if buffering == 0:
                return raw
            buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

        builtins.open = io.open = opened


def read_log(path: Path) -> list[tuple]:
    """Return what a `Watch` recorded: calls, and notes as tuples whose first item is a word."""
    found = []
    with open(path, "rb") as file:
        while file.peek(1):
            words = pickle.load(file)
            found.append(Call(*words) if isinstance(words[0], int) else words)
    return found
