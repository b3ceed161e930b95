"""The output folder that a run writes to: made ready at its start, and checkpoints written so that none is lost."""

import errno
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.utils._pytree import tree_iter

from checkpointing.archive import Found, find_bad_record
from checkpointing.checkpoint import RunState
from checkpointing.finder import BEST_FILES, EVENT_FILES, CheckpointFinder, step_in, step_of
from checkpointing.lock import lock_folder
from errors import StorageError, UserError
from files import (
    explain_failure,
    find_os_error,
    free_bytes,
    make_folder,
    mount_point,
    read_bytes,
    sync_folder,
    write_atomically,
)

# Files that a killed process left half done.
LEFTOVERS = re.compile(r".*\.tmp\.\d+|\.node-\d+-[0-9a-f]+")

# The files whose names do not depend on the run.
SINGLE_FILES = {
    "checkpoint.pth", *BEST_FILES, "log.txt", "metrics.jsonl", "mirrors.json", "recipe.toml", "run.json",
    "status.json", ".lock",
}  # fmt: skip

# Errors of a file system without hard links.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EINVAL}


class CheckpointFolder(CheckpointFinder):
    """The checkpoints in one folder, as one process writes them.

    Args:
        keep_last: how many numbered files to keep, at least 2, so that the one that a run was resumed from stays until
            two newer ones are there.
        keep_every: also keep the numbered file at the end of every that many epochs.
    """

    def __init__(
        self, folder: Path, *, keep_last: int = 3, keep_every: int | None = None, say: Callable[[str], None] = print
    ) -> None:
        super().__init__(folder, say=say)
        self.keep_last, self.keep_every, self.steps_per_epoch = keep_last, keep_every, None
        self._is_locked, self._is_warned = False, set()
        self._owed = {}  # {second name that is still to be given: its file}

    def acquire(self) -> None:
        """Lock the folder against other runs, if it is there; if not, `open` does.

        Raises:
            LockedError: another run holds it.
            UserError: the folder cannot be written.
        """
        if self.folder.is_dir() and not self._is_locked:
            with explained(self.folder):
                lock_folder(self.folder)
            self._is_locked = True

    def open(
        self,
        resume: str,
        found: Found | None,
        run: RunState,
        best_payloads: Mapping[str, bytes] | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        """Make the folder ready for a run to write to, when nothing else can go wrong; `check` comes first.

        The checkpoint to go on from may be another node's, and `best_payloads` holds the best checkpoints so far that
        only another node has.

        Raises:
            UserError: the folder cannot be written, or has a run in it by now.
        """
        self.steps_per_epoch = run.steps_per_epoch
        with explained(self.folder):
            make_folder(self.folder)
            self.acquire()  # if it was not there before; another run may be in it now
            self._check_names()
            for path in self.own_files(LEFTOVERS):
                with suppress(IsADirectoryError):
                    path.unlink(missing_ok=True)
            if found is None or self.is_elsewhere(resume):
                if not overwrite and self.holds_other_run(resume):
                    raise UserError(f"--output-dir {self.folder}: another run has begun there in the meantime")
                self._erase()
            self._erase_old_curves()
            if found is not None:
                self._adopt(found, run, resume, best_payloads or {})
                self._delete_old()  # a kill may have kept the last save from it

    def _check_names(self) -> None:
        """Raise UserError if a link or the like has the name of a file of ours, so that no write leaves the folder."""
        for name in sorted({"tb", *SINGLE_FILES}):
            try:
                mode = os.lstat(self.folder / name).st_mode
            except FileNotFoundError:
                continue
            # A checkpoint may be a link: the next one replaces the link itself.
            is_replaced = stat.S_ISLNK(mode) and name.endswith(".pth")
            if not is_replaced and not (stat.S_ISDIR if name == "tb" else stat.S_ISREG)(mode):
                kinds = {stat.S_IFLNK: "link", stat.S_IFDIR: "folder", stat.S_IFREG: "file"}
                kind = kinds.get(stat.S_IFMT(mode), "pipe or device")
                raise UserError(f"--output-dir {self.folder}: {name} is a {kind}; move it away")

    def _adopt(self, found: Found, run: RunState, resume: str, best_payloads: Mapping[str, bytes]) -> None:
        """Make the resumed checkpoint the newest of this folder, under all its names."""
        kept = {path: _move_aside(path, suffix=".corrupt") for path, _ in self.damaged if os.path.lexists(path)}
        self.say_damaged(found, kept)
        for path in self.numbered():
            if step_in(path) > run.step:
                self._supersede(path)
        path = self.path_of(run.step)
        if not path.exists():
            _write(path, found.payload)
        self.link(path, "checkpoint.pth")
        for name in run.bests:
            self._adopt_best(name, run, resume, best_payloads.get(name))

    def _supersede(self, path: Path) -> None:
        """Keep a checkpoint that is newer than the resumed one under another name, so that `auto` passes it over."""
        self.say(f"{path.name} is newer than the resumed checkpoint; kept as {_move_aside(path, prefix='superseded-')}")

    def _adopt_best(self, name: str, run: RunState, resume: str, payload: bytes | None) -> None:
        """Make a best checkpoint the one that the resumed state names, or have the state name none.

        It is in this folder, in that of the resumed checkpoint, or came from another node (`payload`).
        """
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
        numbered = self.path_of(record["step"])
        found = numbered if step_of(numbered) == record["step"] else self.find_best(name, record["step"], resume)
        if found == numbered:
            self.link(numbered, path.name)
        elif found is not None or payload is not None:
            _write(path, payload or read_bytes(found))
        else:
            self.say(f"the best so far, of step {record['step']}, is not there any more: {path.name} starts anew")
            run.bests[name] = None

    def _erase(self) -> None:
        """Remove a run's files, and no others.

        Checkpoints go first, newest first: the files that are left after a kill must not look like a run to go on with.
        """
        linked = [self.folder / name for name in ("checkpoint.pth", *BEST_FILES)]
        for path in [*self.numbered(), *linked, *self.own_files()]:
            if not path.is_dir() and path.name != ".lock":
                path.unlink(missing_ok=True)

    def _erase_old_curves(self) -> None:
        """Remove the curves that earlier versions wrote to tb/; the event file of this start holds the same points."""
        curves = self.folder / "tb"
        if not curves.is_dir():
            return
        for path in CheckpointFinder(curves).own_files(EVENT_FILES):
            if not path.is_dir():
                path.unlink(missing_ok=True)
        with suppress(OSError):
            curves.rmdir()

    def save(self, state: dict, best_now: Iterable[str] = (), records: int | None = None) -> str | None:
        """Write a state, read it back, and only then give it its names and delete checkpoints that are too old.

        First sync the file of the descriptor `records`. Return None, or one line that says why the save failed; the
        earlier checkpoints are then untouched.
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
        return self._commit(step, lambda file: file.write(payload), len(payload), best_now)

    def _commit(self, step: int, write: Callable, num_bytes: int, best_now: Iterable[str]) -> str | None:
        path, free, is_written = self.path_of(step), free_bytes(self.folder), False
        if free < 1.2 * num_bytes:
            needs = f"a checkpoint needs {num_bytes / 1e6:.1f} MB"
            self._warn_once("space", f"{free / 1e6:.1f} MB free on {mount_point(self.folder)}, and {needs}")
        try:
            write_atomically(path, write, _verify_archive)
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
        """Delete the numbered checkpoints beyond `keep_last`; a failure is no reason to stop."""
        milestone = self.keep_every and self.keep_every * self.steps_per_epoch
        try:
            for path in self.numbered()[self.keep_last :]:
                if not milestone or step_in(path) % milestone:
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
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(f"--output-dir: {explain_failure(error, folder, 0)}") from error
        reason = error.strerror or error
        if isinstance(error, FileExistsError | NotADirectoryError):
            reason = "a file stands in its place or above it; choose another folder"
        raise UserError(f"--output-dir {folder} cannot be written: {reason}") from error


def _write(path: Path, payload: bytes) -> None:
    write_atomically(path, lambda file: file.write(payload), _verify_archive)


def _verify_archive(path: Path) -> None:
    try:
        bad = find_bad_record(path)
    except zipfile.BadZipFile as error:
        bad = str(error)
    if bad is not None:
        raise OSError(f"{path.name} reads back otherwise than it was written ({bad})")


def _move_aside(path: Path, prefix: str = "", suffix: str = "") -> str:
    """Rename a file, without replacing one that was moved aside before; return its new name."""
    name, number = f"{prefix}{path.name}{suffix}", 1
    while os.path.lexists(path.with_name(name)):
        number += 1
        name = f"{prefix}{number}-{path.name}" if prefix else f"{path.name}{suffix}-{number}"
    os.replace(path, path.with_name(name))
    return name
