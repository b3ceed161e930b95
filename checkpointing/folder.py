"""The output folder of a run: its files, its lock, the search for a checkpoint, its take-over, and atomic saves."""

import errno
import filecmp
import os
import re
import socket
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import torch
from torch.utils._pytree import tree_iter

from checkpointing.archive import Found, find_bad_record, read_checkpoint
from checkpointing.checkpoint import BEST_NAMES, RunState
from distributed.launch import read_launch
from distributed.lending import at_end
from distributed.watch import watchdog
from errors import StorageError, UserError, counted
from files import explain_failure, lock_file, make_folder, read_bytes, retry_read, sync_folder, write_atomically

NUMBERED = re.compile(r"checkpoint-(\d{8,})\.pth")

# Files with a run's state, whole or damaged; only `--overwrite` removes them.
STATE_FILES = re.compile(r"(superseded-(\d+-)?)?(checkpoint(-\d{8,})?|best|best_ema)\.pth(\.corrupt(-\d+)?)?")

EVENT_FILES = re.compile(r"events\.out\.tfevents\..*")

# Pictures of a run, and the numbers for more: their kind, and the step after which they were drawn.
PICTURES = re.compile(r"picture-(?P<tag>[a-z-]+)-(?P<step>\d{8,18})\.(png|json)")

# Every file that a run writes into its output folder; `--overwrite` removes these, except its lock, and no others.
OWN_FILES = re.compile(
    rf"({STATE_FILES.pattern}|{PICTURES.pattern}|status\.json|run\.json|metrics\.jsonl|loggers\.jsonl|mirrors\.json"
    r"|log\.txt|recipe\.toml|curves\.png|report\.html|images\.npz|trace\.json\.gz)(\.tmp\.\d+)?"
    rf"|\.node-\d+-[0-9a-f]+|\.lock|{EVENT_FILES.pattern}"
)

# Files that a killed process left half done.
LEFTOVERS = re.compile(r".*\.tmp\.\d+|\.node-\d+-[0-9a-f]+")

BEST_FILES = [f"{name}.pth" for name in dict.fromkeys(BEST_NAMES.values())]

# Second names of numbered files.
LINKED_FILES = ["checkpoint.pth", *BEST_FILES]

# Seconds to wait for the run that holds a folder: it may have lost its launcher, or be saving before it ends.
LOCK_WAIT_S = 60.0

# Errors of a file system without locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}

# Errors of a file system without hard links.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EINVAL}


class CheckpointFolder:
    """The checkpoints in one folder, as one process reads and writes them.

    `checkpoint-00012510.pth` is the state after that many steps; `checkpoint.pth` is the newest, `best.pth` the one
    with the best weights and `best_ema.pth` the one with the best average, all hard links. The folder's own listing is
    the only record of them.

    Args:
        folder: the folder.
        keep_last: how many numbered files to keep, at least 2, so that the one that a run was resumed from stays until
            two newer ones are there.
        print_line: prints a line.
    """

    def __init__(self, folder: Path, *, keep_last: int = 3, print_line: Callable[[str], None] = print) -> None:
        self.folder, self.keep_last, self.print_line = folder, keep_last, print_line
        self._damaged = []  # (path, reason) of each file that `read` passed over
        self._links_due = {}  # {second name that is still to be given: its file}

    def path_of(self, step: int) -> Path:
        """Return the numbered file of a step."""
        return self.folder / f"checkpoint-{step:08d}.pth"

    # A start

    def acquire(self) -> None:
        """Create the folder and lock it against other runs until the run ends; print a line if it has no locks.

        Two writers in one folder are the way to lose a checkpoint: a run whose torchrun was killed may train on, and a
        scheduler has started the same command elsewhere. One lock of the folder, held from before the search for a
        checkpoint to the end, is all that need be right; no file in it has a lock of its own.

        Nothing else may open `.lock`, and nothing deletes it: one process could lock a deleted file while another
        creates a new one.

        Raises:
            UserError: another run, which the message names, holds the lock after `LOCK_WAIT_S`.
            UserError: the folder cannot be written.
        """
        path = self.folder / ".lock"

        def notice() -> str:
            holder = path.read_text(errors="replace")[:1000].strip() or "unknown"
            return f"--output-dir {self.folder} is in use by another run ({holder})"

        with explained(self.folder):
            make_folder(self.folder)
            try:
                wait = f"; waiting up to {LOCK_WAIT_S:.0f} s for it to end"
                descriptor = lock_file(path, lambda: notice() + wait, LOCK_WAIT_S)
            except BlockingIOError as error:
                raise UserError(f"{notice()}; stop it, or choose another folder", exit_code=6) from error
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                print(f"{self.folder}: this file system has no locks; make sure that no other run writes to it")
                return
        at_end(os.close, descriptor)
        holder = f"host {socket.gethostname()}, pid {os.getpid()}, "
        job = read_launch().job
        if job:
            holder += f"Slurm job {job}, "
        with suppress(OSError):  # on a full disk the lock holds without a name
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{holder}started {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode(), 0)

    def read(self, resume: str) -> Found | None:
        """Return the checkpoint that `--resume` means, verified, or None for a fresh start.

        Raises:
            UserError: the named file is missing or is no good checkpoint.
            UserError: `auto` found damaged ones only.
            StorageError: the disk does not answer.
        """
        if resume == "":
            return None
        if resume == "auto":
            return self._read_newest()
        try:
            return read_checkpoint(Path(resume), resume)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise UserError(
                f"--resume {resume} is not a file; give a checkpoint, or auto for the newest in --output-dir"
            ) from error

    def _read_newest(self) -> Found | None:
        """Return the newest checkpoint that verifies.

        Not the newest by name: a disk may lose or flip bytes of a file long after it was read back.
        """
        self._damaged = []
        # The linked names last, in case the numbered files are gone.
        for path in [*numbered(self.folder), *map(self.folder.joinpath, LINKED_FILES)]:
            try:
                return read_checkpoint(path, str(path))
            except StorageError:
                # A disk that does not answer now says nothing about the file: an older one would cost good steps.
                raise
            except UserError as error:
                self._damaged.append((path, str(error)))
            except IsADirectoryError:
                self._damaged.append((path, f"{path} is not a file"))
            except FileNotFoundError:  # or a link to nothing
                continue
        unusable = own_files(self.folder, STATE_FILES)
        if unusable:
            from checkpointing.damaged import none_usable

            raise none_usable(self.folder, len(unusable), [reason for _, reason in self._damaged])
        return None

    def report_damaged(self, found: Found) -> None:
        """Name each damaged file and the checkpoint that is used in its place."""
        for path, reason in self._damaged:
            line = f"checkpoint {reason}; resuming from {found.path.name}"
            if NUMBERED.fullmatch(path.name):
                lost = step_in_name(path) - found.state["step"]
                if lost > 0:
                    line += f", {counted(lost, 'step')} earlier"
            self.print_line(line)

    def check(self, resume: str, *, overwrite: bool) -> None:
        """Raise UserError unless the options say whether to resume or to remove a run in the folder."""
        is_here = bool(resume) and not self._is_elsewhere(resume)
        if overwrite and is_here:
            raise UserError(f"--overwrite would remove {resume}, which --resume needs; give only one of them")
        if not overwrite and not is_here and self._holds_other_run(resume):
            advice = "give --resume auto to resume it, --overwrite to remove it, or another folder"
            raise UserError(f"--output-dir {self.folder} already holds a run; {advice}")

    def _is_elsewhere(self, resume: str) -> bool:
        """Tell whether `--resume` names a file outside this folder."""
        if resume in ("", "auto"):
            return False
        # Not Path.resolve, which a circle of links disturbs.
        return os.path.dirname(os.path.realpath(resume)) != os.path.realpath(self.folder)

    def _holds_other_run(self, resume: str) -> bool:
        """Tell whether the folder holds checkpoints other than copies of those that `--resume` names elsewhere.

        Such copies are what a start from elsewhere leaves if it is killed before its first save: the command may be
        given again.
        """
        origins = []
        if resume:
            origins = [path for path in (Path(resume), *map(Path(resume).with_name, BEST_FILES)) if path.is_file()]
        for path in own_files(self.folder, STATE_FILES):
            # Not shallow, by which equal sizes and times suffice: all checkpoints of a model are of one size.
            if not (path.is_file() and any(filecmp.cmp(path, origin, shallow=False) for origin in origins)):
                return True
        return False

    def take_over(self, resume: str, found: Found | None, run: RunState) -> None:
        """Make the folder that of a run, new or restored from `found`; `check` comes first, and nothing can fail after.

        A kill between any two of these changes leaves a folder from which the same command goes on.

        Raises:
            UserError: the folder cannot be written.
        """
        with explained(self.folder):
            for path in own_files(self.folder, LEFTOVERS):
                with suppress(IsADirectoryError):  # a user's own
                    path.unlink(missing_ok=True)
            if found is None or self._is_elsewhere(resume):
                self._erase()
            if found is None:
                return
            # Renamed and not deleted: what a disk has done to them may tell what is wrong with it.
            for path, _ in self._damaged:
                self._set_aside(path, suffix=".corrupt")
            # After a resume from an older file these would be the newest, and the next `auto` would take one of them.
            for path in numbered(self.folder):
                if step_in_name(path) > run.step:
                    self._set_aside(path, prefix="superseded-")
            path = self.path_of(run.step)
            # A run that is resumed from best.pth and killed at once would leave no numbered file to go on from.
            if not path.exists():
                _write(path, found.payload)
            self._link(path, "checkpoint.pth")
            for name in run.bests:
                self._restore_best(name, run, resume)
            self._delete_old()  # a kill may have kept the last save from it

    def _erase(self) -> None:
        """Remove a run's files, and no others; checkpoints first, newest first: a kill leaves none to resume."""
        for path in [*numbered(self.folder), *map(self.folder.joinpath, LINKED_FILES), *own_files(self.folder)]:
            if not path.is_dir() and path.name != ".lock":
                path.unlink(missing_ok=True)

    def _restore_best(self, name: str, run: RunState, resume: str) -> None:
        """Make a best checkpoint the one that the resumed state names, or have the state name none.

        A kill between a save and its links leaves `best.pth` one evaluation behind; a resume from an older checkpoint
        finds it one or more ahead.
        """
        path, record = self.folder / f"{name}.pth", run.bests[name]
        step = verified_step(path)
        if record is not None and step == record["step"]:
            return
        if step is None:
            self._set_aside(path, suffix=".corrupt")
        elif step > run.step:
            self._set_aside(path, prefix="superseded-")
        if record is None:
            return
        # The files of this folder may be another run's.
        source = Path(resume).with_name(path.name) if self._is_elsewhere(resume) else path
        found = self.find_step(source, record["step"])
        if found == self.path_of(record["step"]):
            self._link(found, path.name)
        elif found is not None:
            _write(path, read_bytes(found))
        else:
            missing = f"the best checkpoint, of step {record['step']}, is missing"
            self.print_line(f"{missing}; the next best becomes {path.name}")
            run.bests[name] = None

    def find_step(self, path: Path, step: int) -> Path | None:
        """Return a file that holds a step: the given one, or the numbered one; None if neither is good."""
        return next((each for each in (path, self.path_of(step)) if verified_step(each) == step), None)

    def add_copy(self, path: Path, payload: bytes) -> None:
        """Write the copy of another node's checkpoint, and keep a damaged file of that name under another one."""
        with explained(self.folder):
            self._set_aside(path, suffix=".corrupt")
            _write(path, payload)

    def _set_aside(self, path: Path, prefix: str = "", suffix: str = "") -> None:
        """Rename a file, if it is there, so that `auto` passes it over; replace none that was renamed before."""
        if os.path.lexists(path):
            from checkpointing.damaged import rename_aside

            self.print_line(rename_aside(path, prefix, suffix))

    # Saves

    def save(self, state: dict, best_now: Iterable[str] = (), records: int | None = None) -> str | None:
        """Write a state, read it back, and only then give it its names and delete checkpoints that are too old.

        A kill or a power failure may come between any two of these steps, in `write_atomically` and here:

            a temporary file beside the target, since a rename is atomic within one file system only
            fsync of the file, or after a power failure the name could stand for an empty file
            read back, against the archive's CRCs, which `torch.load` does not check
            the rename to checkpoint-N.pth: before it the save has not happened, after it `auto` finds the save
            fsync of the folder, which makes the name durable
            the links checkpoint.pth, best.pth, best_ema.pth: what a kill leaves out the next start gives
            deleting old files, last: no older checkpoint goes before a newer one is durable

        Args:
            state: plain data, as `RunState.state_dict`.
            best_now: the names under which it is best.
            records: descriptor of a file to make durable first.

        Returns:
            None, or one line that says why the save failed; the earlier checkpoints are then untouched.
        """
        # Before the state: a resumed run does not write again the records that precede its checkpoint.
        if records is not None:
            try:
                os.fsync(records)
            except OSError as error:
                self.print_line(f"warning: metrics.jsonl in {self.folder} is not durable: {error.strerror or error}")
        # Nearly the size of the file, for the line about a full disk.
        num_bytes = sum(tensor.nbytes for tensor in filter(torch.is_tensor, tree_iter(state)))

        def write(file: BinaryIO) -> None:
            # Through a file object, so that a full disk is an OSError with its cause and not a bare RuntimeError.
            torch.save(state, _ProgressFile(file))  # type: ignore[arg-type]  # torch's asks for more than it uses

        return self.commit(state["step"], write, num_bytes, best_now)

    def commit(self, step: int, content: bytes | Callable, num_bytes: int, best_now: Iterable[str]) -> str | None:
        """Write a checkpoint's content, as of `write_atomically`; returns as `save`."""
        path, is_written = self.path_of(step), False
        try:
            write_atomically(path, content, _verify_archive)
            is_written = True
            # Also the names that an earlier save could not give: the next best may be far away.
            self._links_due |= {f"{name}.pth": path for name in ("checkpoint", *best_now)}
            for name in list(self._links_due):
                self._link(self._links_due[name], name)
                del self._links_due[name]
        except Exception as error:
            reason = explain_failure(error, self.folder, num_bytes)
            if reason is None:  # no fault of the disk, but of the program
                raise
            if is_written:
                return f"{path.name} was saved, but could not be linked under its other names: {reason}"
            return f"{path.name} was not saved: {reason}; still available: {self._name_newest()}"
        self._delete_old()
        return None

    def _name_newest(self) -> str:
        try:
            return numbered(self.folder)[0].name
        except (IndexError, StorageError):
            return "nothing in this folder"

    def _delete_old(self) -> None:
        """Delete the numbered checkpoints beyond `keep_last`; a failure is a warning."""
        try:
            for path in numbered(self.folder)[self.keep_last :]:
                path.unlink(missing_ok=True)
        except (OSError, StorageError) as error:
            self.print_line(f"warning: old checkpoints cannot be deleted and will fill the disk: {error}")

    def _link(self, path: Path, name: str) -> None:
        """Give a checkpoint a second name, in place of the file that bears it now."""
        target, temporary = self.folder / name, self.folder / f"{name}.tmp.{os.getpid()}"
        # POSIX: a rename of one link onto another of the same file does nothing, and would leave both.
        if target.exists() and os.path.samefile(path, target):
            return
        temporary.unlink(missing_ok=True)
        try:
            # No second write of what for a ResNet-50 with momentum is 205 MB, and no name ever stands for half a file.
            os.link(path, temporary)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _write(target, read_bytes(path))
            return
        try:
            os.replace(temporary, target)
        except OSError:
            with suppress(OSError):  # which would hide the first error
                temporary.unlink()
            raise
        sync_folder(self.folder)


class _ProgressFile:
    """A file to write, in which each write is progress of this process: a disk may be slow."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def write(self, content: bytes) -> int:
        """Write some bytes; return how many."""
        num_bytes = self.file.write(content)
        watchdog.note_progress()
        return num_bytes

    def flush(self) -> None:
        """Hand all bytes to the system."""
        self.file.flush()


def own_files(folder: Path, pattern: re.Pattern = OWN_FILES) -> list[Path]:
    """Return the files of a run whose names match; StorageError if the disk does not answer."""
    try:
        names = retry_read(lambda: os.listdir(folder), folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in names if pattern.fullmatch(name)]


def numbered(folder: Path) -> list[Path]:
    """Return the numbered checkpoints, newest first."""
    # By their numbers, not their times: a copied folder has new ones, and clocks of nodes differ.
    return sorted(own_files(folder, NUMBERED), key=step_in_name, reverse=True)


def step_in_name(path: Path) -> int:
    """Return the step in the name of a numbered checkpoint."""
    return int(NUMBERED.fullmatch(path.name)[1])


def verified_step(path: Path) -> int | None:
    """Return the step of a checkpoint, None if it is damaged or missing; StorageError if the disk does not answer."""
    try:
        return read_checkpoint(path, path.name).state["step"]
    except StorageError:
        raise
    except (UserError, OSError):
        return None


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
        raise OSError(f"{path.name} differs from what was written when read back ({bad})")
