"""The output folder of a run: its lock, the adoption of a resumed checkpoint, and atomic saves."""

import errno
import os
import re
import socket
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.utils._pytree import tree_iter

from checkpointing.archive import Found, find_bad_record
from checkpointing.checkpoint import RunState
from checkpointing.finder import BEST_FILES, CheckpointFinder, step_in, step_of
from distributed.launch import read_launch
from errors import StorageError, UserError
from files import (
    explain_failure,
    find_os_error,
    lock_file,
    make_folder,
    read_bytes,
    sync_folder,
    write_atomically,
)

# Files that a killed process left half done.
LEFTOVERS = re.compile(r".*\.tmp\.\d+|\.node-\d+-[0-9a-f]+")

# Seconds to wait for the run that holds a folder: it may have lost its launcher, or be saving before it ends.
LOCK_WAIT_S = 60.0

# Errors of a file system without locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}

# Errors of a file system without hard links.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EINVAL}


class CheckpointFolder(CheckpointFinder):
    """The checkpoints in one folder, as one process writes them.

    Args:
        keep_last: how many numbered files to keep, at least 2, so that the one that a run was resumed from stays until
            two newer ones are there.
    """

    def __init__(self, folder: Path, *, keep_last: int = 3, say: Callable[[str], None] = print) -> None:
        super().__init__(folder, say=say)
        self.keep_last = keep_last
        self._is_warned = set()
        self._owed = {}  # {second name that is still to be given: its file}

    def acquire(self) -> None:
        """Create the folder and lock it against other runs until this process ends; print a line if it has no locks.

        Nothing else may open `.lock`, and nothing deletes it: one process could lock a deleted file while another
        creates a new one.

        Raises:
            UserError: another run, which the message names, holds the lock after `LOCK_WAIT_S`.
            UserError: the folder cannot be written.
        """
        path = self.folder / ".lock"

        def holder() -> str:
            return path.read_text(errors="replace")[:1000].strip() or "unknown"

        def notice() -> str:
            return f"{self.folder} is in use ({holder()}); waiting up to {LOCK_WAIT_S:.0f} s for it to end"

        with explained(self.folder):
            make_folder(self.folder)
            try:
                descriptor = lock_file(path, notice, LOCK_WAIT_S)
            except BlockingIOError as error:
                raise UserError(
                    f"--output-dir {self.folder} is in use by another run ({holder()}); stop it, "
                    "or choose another folder",
                    exit_code=6,
                ) from error
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                print(f"{self.folder}: this file system has no locks; make sure that no other run writes there")
                return
        job = read_launch().job
        me = f"host {socket.gethostname()}, pid {os.getpid()}, {f'Slurm job {job}, ' if job else ''}"
        with suppress(OSError):  # on a full disk the lock holds without a name
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{me}started {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode(), 0)

    def adopt(self, resume: str, found: Found | None, run: RunState) -> None:
        """Make the folder that of a run, new or restored from `found`; `check` comes first, and nothing can fail after.

        Raises:
            UserError: the folder cannot be written.
        """
        with explained(self.folder):
            for path in self.own_files(LEFTOVERS):
                with suppress(IsADirectoryError):
                    path.unlink(missing_ok=True)
            if found is None or self.is_elsewhere(resume):
                self._erase()
            if found is not None:
                self._adopt(found, run, resume)
                self._delete_old()  # a kill may have kept the last save from it

    def _adopt(self, found: Found, run: RunState, resume: str) -> None:
        """Make the resumed checkpoint the newest of this folder, under all its names."""
        for path, _ in self.damaged:
            if os.path.lexists(path):
                self.say(f"damaged {path.name} is kept as {_move_aside(path, suffix='.corrupt')}")
        for path in self.numbered():
            if step_in(path) > run.step:
                self._supersede(path)
        path = self.path_of(run.step)
        if not path.exists():
            _write(path, found.payload)
        self.link(path, "checkpoint.pth")
        for name in run.bests:
            self._adopt_best(name, run, resume)

    def _supersede(self, path: Path) -> None:
        """Keep a checkpoint that is newer than the resumed one under another name, so that `auto` passes it over."""
        self.say(f"{path.name} is newer than the resumed checkpoint; kept as {_move_aside(path, prefix='superseded-')}")

    def _adopt_best(self, name: str, run: RunState, resume: str) -> None:
        """Make a best checkpoint the one that the resumed state names, or have the state name none."""
        path, record = self.folder / f"{name}.pth", run.bests[name]
        if os.path.lexists(path):
            # A hard link to the checkpoint that this start has verified need not be read again.
            is_verified = self.verified is not None and path.exists() and path.samefile(self.verified)
            step = run.step if is_verified else step_of(path)
            if record is not None and step == record["step"]:
                return
            if step is None:
                _move_aside(path, suffix=".corrupt")
            elif step > run.step:
                self._supersede(path)
        if record is None:
            return
        # The files of this folder may be another run's.
        source = Path(resume).with_name(path.name) if self.is_elsewhere(resume) else path
        found = self.find_step(source, record["step"])
        if found == self.path_of(record["step"]):
            self.link(found, path.name)
        elif found is not None:
            _write(path, read_bytes(found))
        else:
            self.say(f"the best checkpoint, of step {record['step']}, is missing; the next best becomes {path.name}")
            run.bests[name] = None

    def put(self, path: Path, payload: bytes) -> None:
        """Write the copy of another node's checkpoint, and keep a damaged file of that name under another one."""
        with explained(self.folder):
            if os.path.lexists(path):
                _move_aside(path, suffix=".corrupt")
            _write(path, payload)

    def _erase(self) -> None:
        """Remove a run's files, and no others; checkpoints first, newest first: a kill leaves none to resume."""
        linked = [self.folder / name for name in ("checkpoint.pth", *BEST_FILES)]
        for path in [*self.numbered(), *linked, *self.own_files()]:
            if not path.is_dir() and path.name != ".lock":
                path.unlink(missing_ok=True)

    def save(self, state: dict, best_now: Iterable[str] = (), records: int | None = None) -> str | None:
        """Write a state, read it back, and only then give it its names and delete checkpoints that are too old.

        Args:
            state: plain data, as `RunState.state_dict`.
            best_now: the names under which it is best.
            records: descriptor of a file to make durable first.

        Returns:
            None, or one line that says why the save failed; the earlier checkpoints are then untouched.
        """
        if records is not None:
            try:
                os.fsync(records)
            except OSError as error:
                self._warn_once("records", f"metrics.jsonl in {self.folder} is not durable: {error.strerror or error}")
        num_bytes = sum(tensor.nbytes for tensor in filter(torch.is_tensor, tree_iter(state)))  # nearly the file's size
        # Through a file object, so that a full disk is an OSError with its cause and not a bare RuntimeError.
        return self._commit(state["step"], lambda file: torch.save(state, file), num_bytes, best_now)

    def save_copy(self, payload: bytes, step: int, best_now: Iterable[str]) -> str | None:
        """Write the bytes of another node's checkpoint; returns as `save`."""
        return self._commit(step, payload, len(payload), best_now)

    def _commit(self, step: int, content: bytes | Callable, num_bytes: int, best_now: Iterable[str]) -> str | None:
        path, is_written = self.path_of(step), False
        try:
            write_atomically(path, content, _verify_archive)
            is_written = True
            # Also the names that an earlier save could not give: the next best may be far away.
            self._owed |= {f"{name}.pth": path for name in ("checkpoint", *best_now)}
            for name in list(self._owed):
                self.link(self._owed[name], name)
                del self._owed[name]
        except Exception as error:
            cause = find_os_error(error)
            if cause is None:
                raise
            why = explain_failure(cause, self.folder, num_bytes)
            if is_written:
                return f"{path.name} was saved, but not given its other names: {why}"
            return f"{path.name} was not saved: {why}; still safe: {self._name_newest()}"
        self._delete_old()
        return None

    def _name_newest(self) -> str:
        try:
            return self.numbered()[0].name
        except (IndexError, StorageError):
            return "nothing in this folder"

    def _delete_old(self) -> None:
        """Delete the numbered checkpoints beyond `keep_last`; a failure is a warning."""
        try:
            for path in self.numbered()[self.keep_last :]:
                path.unlink(missing_ok=True)
        except (OSError, StorageError) as error:
            self._warn_once("delete", f"old checkpoints cannot be deleted and will fill the disk: {error}")

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._is_warned:
            self._is_warned.add(kind)
            self.say(f"warning: {text}")

    def link(self, path: Path, name: str) -> None:
        """Give a checkpoint a second name, in place of the file that bears it now."""
        target, temporary = self.folder / name, self.folder / f"{name}.tmp.{os.getpid()}"
        if target.exists() and os.path.samefile(path, target):
            return  # and a rename of one link onto another of the same file would leave both
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _write(target, read_bytes(path))
            return
        try:
            os.replace(temporary, target)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(self.folder)


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn an OSError into one line that says why the output folder cannot be written.

    Raises:
        StorageError: the disk is full.
        UserError: anything else is wrong.
    """
    try:
        yield
    except OSError as error:
        kind = StorageError if error.errno in (errno.ENOSPC, errno.EDQUOT) else UserError
        raise kind(f"--output-dir {folder} cannot be written: {explain_failure(error, folder, 0)}") from error


def _write(path: Path, payload: bytes) -> None:
    write_atomically(path, payload, _verify_archive)


def _verify_archive(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            bad = find_bad_record(archive)
    except zipfile.BadZipFile as error:
        bad = str(error)
    if bad is not None:
        raise OSError(f"{path.name} does not read back as it was written ({bad})")


def _move_aside(path: Path, prefix: str = "", suffix: str = "") -> str:
    """Rename a file, without replacing one that was moved aside before; return its new name."""
    name, number = f"{prefix}{path.name}{suffix}", 1
    while os.path.lexists(path.with_name(name)):
        number += 1
        name = f"{prefix}{number}-{path.name}" if prefix else f"{path.name}{suffix}-{number}"
    os.replace(path, path.with_name(name))
    return name
