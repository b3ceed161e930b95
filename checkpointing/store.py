"""The checkpoints in an output folder: written so that none is lost, found so that none is silently passed over."""

import errno
import filecmp
import os
import re
import secrets
import stat
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

import collectives
from checkpointing import lock
from checkpointing.archive import find_bad_record, load_checkpoint, read_checkpoint
from checkpointing.checkpoint import BEST_NAMES, RunState
from checkpointing.schema import OtherFormatError
from errors import NoUsableCheckpointError, StorageError, UserError
from files import (
    explain_failure,
    find_os_error,
    free_bytes,
    make_folder,
    mount_point,
    read_bytes,
    retry,
    sync_folder,
    write_atomically,
)
from launch import read_launch

NUMBERED = re.compile(r"checkpoint-(\d{8,})\.pth")

# What a run's state may be in, or in the ruins of; never removed but by `--overwrite`.
STATE_FILES = re.compile(r"(superseded-(\d+-)?)?(checkpoint(-\d{8,})?|best|best_ema)\.pth(\.corrupt(-\d+)?)?")

# What a killed process left half done.
LEFTOVERS = re.compile(r".*\.tmp\.\d+|\.node-\d+-[0-9a-f]+")

# Every name that a run gives to a file in its output folder; `--overwrite` removes these, but for the lock that it
# holds, and nothing else.
OWN_FILES = re.compile(
    rf"({STATE_FILES.pattern}|status\.json|run\.json|metrics\.jsonl|recipe\.toml|curves\.png|images\.npz)(\.tmp\.\d+)?"
    r"|\.node-\d+-[0-9a-f]+|\.lock|events\.out\.tfevents\..*"
)

BEST_FILES = [f"{name}.pth" for name in BEST_NAMES.values()]

# Those of them that a run writes under these names for certain.
SINGLE_FILES = {
    "checkpoint.pth", *BEST_FILES, "metrics.jsonl", "recipe.toml", "run.json", "status.json", ".lock",
}  # fmt: skip

# What a file system without hard links says to one.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EINVAL}


class Found(NamedTuple):
    """A checkpoint that was found good."""

    path: Path
    payload: bytes
    state: dict


class CheckpointClock:
    """Tells when a checkpoint is due by the time since the last one.

    Args:
        minutes: from one to the next; 0 for never.
        now_s: a reading of a clock that is never set back.
    """

    def __init__(self, minutes: float, now_s: float) -> None:
        self.period_s = 60 * minutes
        self.last_s = now_s

    def is_due(self, now_s: float) -> bool:
        """Tell whether the time is up."""
        return self.period_s > 0 and now_s - self.last_s >= self.period_s

    def restart(self, now_s: float) -> None:
        """Count from now on."""
        self.last_s = now_s


class CheckpointFolder:
    """The checkpoints in one folder, as one process sees them.

    `checkpoint-00012510.pth` is the state after that many steps; `checkpoint.pth` is always the newest, `best.pth` the
    one whose weights and `best_ema.pth` the one whose average were evaluated best, all hard links. What is to be known
    about the folder is read from the folder.

    Args:
        folder: the output folder.
        keep_last: how many numbered files to keep, at least 2, so that what a run was resumed from stays until two
            newer ones are there.
        keep_every: the numbered files at the ends of every that many epochs stay as well.
        say: prints a line.
    """

    def __init__(
        self, folder: Path, *, keep_last: int = 3, keep_every: int | None = None, say: Callable[[str], None] = print
    ) -> None:
        self.folder, self.say = folder, say
        self.keep_last, self.keep_every = keep_last, keep_every
        self.steps_per_epoch = None
        self.lock = lock.FolderLock(folder)
        self.damaged = []  # (path, why) of what `read` found so, renamed by `open`
        self._is_warned = set()
        self._owed = {}  # second names that are still to be given, and to which file

    def numbered(self) -> list[Path]:
        """Return the numbered checkpoints, newest first."""
        return sorted((path for path in self._own_files() if NUMBERED.fullmatch(path.name)), key=_step_in, reverse=True)

    def _own_files(self, pattern: re.Pattern = OWN_FILES) -> list[Path]:
        try:
            names = retry(lambda: os.listdir(self.folder), self.folder)
        except (FileNotFoundError, NotADirectoryError):  # `open` makes it, or says why it cannot
            return []
        return [self.folder / name for name in names if pattern.fullmatch(name)]

    def _path_of(self, step: int) -> Path:
        return self.folder / f"checkpoint-{step:08d}.pth"

    def acquire(self) -> None:
        """Lock the folder against other runs, if it is there; if not, `open` does.

        Raises:
            LockedError: another run holds it.
            UserError: the folder cannot be written.
        """
        if not self.folder.is_dir() or self.lock.is_held:
            return
        try:
            self.lock.acquire(lock.WAIT_S)
        except OSError as error:
            raise UserError(f"--output-dir {self.folder} cannot be written: {error.strerror or error}") from error

    def is_elsewhere(self, resume: str) -> bool:
        """Tell whether `--resume` names a file outside this folder."""
        return resume not in ("", "auto") and Path(resume).resolve().parent != self.folder.resolve()

    def read(self, resume: str) -> Found | None:
        """Return the checkpoint that `--resume` means, verified, or None for a fresh start. Changes nothing.

        Raises:
            UserError: PATH is missing or no good checkpoint.
            NoUsableCheckpointError: `auto` found damaged ones only.
            StorageError: the disk does not answer.
        """
        if not resume:
            return None
        if resume == "auto":
            return self._read_newest()
        try:
            return _load(Path(resume), resume)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise UserError(
                f"--resume {resume} is not a file; give a checkpoint, or auto for the newest in --output-dir"
            ) from error

    def _read_newest(self) -> Found | None:
        """Return the newest checkpoint that verifies; those that do not are remembered."""
        self.damaged = []
        for path in self._candidates():
            try:
                return _load(path, str(path))
            except FileNotFoundError:
                if path.is_symlink():
                    self.damaged.append((path, f"{path} is a link to nothing"))
            except IsADirectoryError:
                self.damaged.append((path, f"{path} is not a file"))
            except (OtherFormatError, StorageError):
                raise
            except UserError as error:
                self.damaged.append((path, str(error)))
        ruins = self._own_files(STATE_FILES)
        if ruins:
            reasons = [why for _, why in self.damaged[:3]] + ["..."] * (len(self.damaged) > 3)
            raise NoUsableCheckpointError(
                f"{len(ruins)} checkpoints in {self.folder}, none usable: {'; '.join(reasons) or 'all set aside'}. "
                "Not starting over: use --overwrite to begin again"
            )
        return None

    def _candidates(self) -> list[Path]:
        """Return what may be gone on from, the newest first.

        The two linked names hold what is left where somebody removed the numbered ones.
        """
        numbered, newest = self.numbered(), self.folder / "checkpoint.pth"
        files = [path for path in numbered if path.is_file()]
        if newest.is_file() and not any(os.path.samefile(newest, path) for path in files):
            step = _step_of(newest)
            if step is not None and all(step > _step_in(path) for path in numbered):
                return [newest, *numbered]
        return [*numbered, newest, *(self.folder / name for name in BEST_FILES)]

    def say_damaged(self, found: Found, kept: dict[Path, str]) -> None:
        """Name each file that was found damaged, what it is called now, and what is used in its place."""
        for path, why in self.damaged:
            step, match = found.state["step"], NUMBERED.fullmatch(path.name)
            earlier = f", {int(match[1]) - step} steps earlier" if match and int(match[1]) > step else ""
            as_kept = f"; kept as {kept[path]}" if path in kept else ""
            self.say(f"checkpoint {why}{as_kept}; resuming from {found.path.name}{earlier}")

    def check(self, resume: str, *, overwrite: bool) -> None:
        """Check that the options say what is to become of a run that is in the folder. Changes nothing.

        Raises:
            UserError: they do not.
        """
        if overwrite and resume and not self.is_elsewhere(resume):
            raise UserError(
                f"--overwrite would remove {resume} itself, which --resume is to go on from; give one of them"
            )
        if overwrite or not self._own_files(STATE_FILES) or (resume and not self.is_elsewhere(resume)):
            return
        if not resume or not self._holds_only_copies(resume):
            raise UserError(
                f"--output-dir {self.folder} holds a run already; --resume auto goes on with it, --overwrite removes "
                "it, or choose another folder"
            )

    def _holds_only_copies(self, resume: str) -> bool:
        """Tell whether nothing is in the folder but what an earlier start took over from elsewhere, and no more."""
        origins = [Path(resume), *(Path(resume).with_name(name) for name in BEST_FILES)]
        origins = [path for path in origins if path.is_file()]
        copies = self._own_files(STATE_FILES)
        return all(
            path.is_file() and any(filecmp.cmp(path, origin, shallow=False) for origin in origins) for path in copies
        )

    def open(
        self,
        resume: str,
        found: Found | None,
        run: RunState,
        best_payloads: Mapping[str, bytes] = MappingProxyType({}),
        *,
        overwrite: bool = False,
    ) -> None:
        """Make the folder ready for a run to write to, when nothing else can go wrong.

        Args:
            resume: `--resume`, as `check` accepted it.
            found: what is gone on from, maybe found by another node; None for a fresh start.
            run: the state of the run.
            best_payloads: the best checkpoints so far by name, where another node has them and this one does not.
            overwrite: whether a run that is there is to be removed, as `check` accepted it.

        Raises:
            UserError: the folder cannot be written, or has a run in it by now.
        """
        self.steps_per_epoch = run.steps_per_epoch
        is_elsewhere = self.is_elsewhere(resume)
        try:
            make_folder(self.folder)
            if not self.lock.is_held:  # since the folder was not there; is it another's now?
                self.acquire()
            self._check_names()
            self.tidy()
            if found is None or is_elsewhere:
                has_run = bool(self._own_files(STATE_FILES))
                if has_run and not overwrite and not (is_elsewhere and self._holds_only_copies(resume)):
                    raise UserError(f"--output-dir {self.folder}: another run has begun there in the meantime")
                self._erase()
            if found is not None:
                source = Path(resume).parent if is_elsewhere else self.folder
                self._adopt(found, run, source, best_payloads)
                self._delete_old()  # which the last save may not have come to
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageError(f"--output-dir: {explain_failure(error, self.folder, 0)}") from error
            raise UserError(f"--output-dir {self.folder} cannot be written: {error.strerror or error}") from error

    def _check_names(self) -> None:
        """Check that nothing else has the name of one of our files: what is written leads nowhere else.

        Raises:
            UserError: a folder, a pipe or the like has, or a link or a file the name of our folder.
        """
        names = [path.name for path in self._own_files() if path.name in SINGLE_FILES]
        for name in sorted(names):
            mode = os.lstat(self.folder / name).st_mode
            is_link = stat.S_ISLNK(mode)  # a checkpoint may be a link: another one is put in its place
            if not stat.S_ISREG(mode) and not (is_link and name.endswith(".pth")):
                kind = "link" if is_link else "folder" if stat.S_ISDIR(mode) else "pipe or device"
                raise UserError(f"--output-dir {self.folder}: {name} is a {kind}; move it away")
        tensorboard = self.folder / "tb"
        if os.path.lexists(tensorboard) and (tensorboard.is_symlink() or not tensorboard.is_dir()):
            kind = "link" if tensorboard.is_symlink() else "file"
            raise UserError(f"--output-dir {self.folder}: tb is a {kind}; move it away")

    def tidy(self) -> None:
        """Remove what a killed process left half done."""
        for path in self._own_files(LEFTOVERS):
            with suppress(IsADirectoryError):
                path.unlink(missing_ok=True)

    def _adopt(self, found: Found, run: RunState, source: Path, best_payloads: Mapping[str, bytes]) -> None:
        """Make the checkpoint that is gone on from the newest of this folder, under all its names."""
        kept = {path: _move_aside(path, suffix=".corrupt") for path, _ in self.damaged if os.path.lexists(path)}
        self.say_damaged(found, kept)
        for path in self.numbered():
            if _step_in(path) > run.step:
                self._supersede(path)
        path = self._path_of(run.step)
        if not path.exists():
            write_atomically(path, lambda file: file.write(found.payload), _verify_archive)
        self.link(path, "checkpoint.pth")
        for name in run.bests:
            self._adopt_best(name, run, source / f"{name}.pth", best_payloads.get(name))

    def _supersede(self, path: Path) -> None:
        """Keep what is newer than what is resumed under another name, so that going on is not undone."""
        self.say(f"{path.name} is newer than what is resumed; kept as {_move_aside(path, prefix='superseded-')}")

    def find_best(self, name: str, step: int, resume: str) -> Path | None:
        """Return the file that holds the best evaluation so far, which was that of a step, if this node has it."""
        source = Path(resume).parent if self.is_elsewhere(resume) else self.folder
        for path in (source / f"{name}.pth", self._path_of(step)):
            if path.exists() and _step_of(path) == step:
                return path
        return None

    def _adopt_best(self, name: str, run: RunState, candidate: Path, payload: bytes | None) -> None:
        """See to it that a best checkpoint is the one that the resumed state says, or else that it says there is none.

        Args:
            name: best or best_ema.
            run: the resumed state.
            candidate: the file of that name in the folder that is resumed from.
            payload: its content, where another node has it and this one does not.
        """
        path, record = self.folder / f"{name}.pth", run.bests[name]
        step = _step_of(path) if os.path.lexists(path) else None
        if record is not None and step == record["step"]:
            return
        if step is not None and step > run.step:
            self._supersede(path)
        elif step is None and os.path.lexists(path):
            _move_aside(path, suffix=".corrupt")
        if record is None:
            return
        numbered = self._path_of(record["step"])
        if numbered.exists() and _step_of(numbered) == record["step"]:
            self.link(numbered, path.name)
            return
        if payload is None and candidate != path and candidate.exists() and _step_of(candidate) == record["step"]:
            payload = read_bytes(candidate)
        if payload is not None:
            write_atomically(path, lambda file: file.write(payload), _verify_archive)
            return
        self.say(f"the best so far, of step {record['step']}, is not there any more: {path.name} starts anew")
        run.bests[name] = None

    def _erase(self) -> None:
        """Remove a run's files, and nothing else that may be in the folder.

        Checkpoints go first, newest first: whatever is left after a kill must not look like a run to go on with.
        """
        linked = [self.folder / name for name in ("checkpoint.pth", *BEST_FILES)]
        paths = [*self.numbered(), *linked, *self._own_files()]
        tensorboard = self.folder / "tb"
        if tensorboard.is_dir():
            paths += [path for path in tensorboard.iterdir() if OWN_FILES.fullmatch(path.name)]
        for path in paths:
            if not path.is_dir() and path != self.lock.path:
                path.unlink(missing_ok=True)
        with suppress(OSError):
            tensorboard.rmdir()

    def save(self, state: dict, best_now: Iterable[str] = ()) -> str | None:
        """Write the state of a step, read it back, and only then give it its names and delete what is too old.

        Args:
            state: with its step.
            best_now: names of the best checkpoints that this one is.

        Returns:
            None, or why it failed, in one line; then what was there before is untouched.
        """
        # Through a file object, so that a full disk is an OSError with its cause and not a bare RuntimeError.
        return self._commit(state["step"], lambda file: torch.save(state, file), _num_bytes(state), best_now)

    def save_copy(self, payload: bytes, step: int, best_now: Iterable[str]) -> str | None:
        """Write what another node has written; as `save`."""
        return self._commit(step, lambda file: file.write(payload), len(payload), best_now)

    def _commit(self, step: int, write: Callable, num_bytes: int, best_now: Iterable[str]) -> str | None:
        path = self._path_of(step)
        free = free_bytes(self.folder)
        if free < 1.2 * num_bytes:
            needs = f"a checkpoint needs {num_bytes / 1e6:.1f} MB"
            self._warn_once("space", f"{free / 1e6:.1f} MB free on {mount_point(self.folder)}, and {needs}")
        is_written = False
        try:
            write_atomically(path, write, _verify_archive)
            is_written = True
            # Also those that failed at an earlier save: the next best may be far away.
            self._owed |= {f"{name}.pth": path for name in ("checkpoint", *best_now)}
            while self._owed:
                name = next(iter(self._owed))
                self.link(self._owed[name], name)
                del self._owed[name]
        except Exception as error:
            cause = find_os_error(error)
            if cause is None:
                raise
            return self._explain_failed_save(path, cause, num_bytes, is_written=is_written)
        self._delete_old()
        return None

    def _explain_failed_save(self, path: Path, error: OSError, num_bytes: int, *, is_written: bool) -> str:
        why = explain_failure(error, self.folder, num_bytes)
        if is_written:
            return f"{path.name} was saved, but not given its other names: {why}"
        try:
            safe = [path.name for path in self.numbered()[:1]]
        except StorageError:
            safe = []
        return f"{path.name} was not saved: {why}; still safe: {safe[0] if safe else 'nothing in this folder'}"

    def _delete_old(self) -> None:
        """Delete the numbered checkpoints that are too many; one that does not go is no reason to stop."""
        try:
            for path in self.numbered()[self.keep_last :]:
                if not self._is_milestone(_step_in(path)):
                    path.unlink(missing_ok=True)
        except (OSError, StorageError) as error:
            self._warn_once("delete", f"old checkpoints cannot be deleted and will fill the disk: {error}")

    def _is_milestone(self, step: int) -> bool:
        return self.keep_every is not None and step % (self.keep_every * self.steps_per_epoch) == 0

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._is_warned:
            self._is_warned.add(kind)
            self.say(f"warning: {text}")

    def link(self, path: Path, name: str) -> None:
        """Give a checkpoint a second name, in place of what bears it now."""
        target, temporary = self.folder / name, self.folder / f"{name}.tmp.{os.getpid()}"
        if target.exists() and os.path.samefile(path, target):
            return  # and a rename of one link onto another of the same file would leave both
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            payload = read_bytes(path)
            write_atomically(target, lambda file: file.write(payload), _verify_archive)
            return
        try:
            os.replace(temporary, target)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(self.folder)


class CheckpointManager:
    """The checkpoints of a run on any number of processes; rank 0 writes them, and with a copy each node's first rank.

    What fails, fails on every rank alike.

    Args:
        folder: the output folder, on each node its own one or all the same.
        keep_last: as of `CheckpointFolder`.
        keep_every: as of `CheckpointFolder`.
        minutes: from one checkpoint by the clock to the next; 0 for none.
        save_per_node: let the first rank of each node keep a copy in its own `folder`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 3,
        keep_every: int | None = None,
        minutes: float = 0.0,
        save_per_node: bool = False,
    ) -> None:
        self.folder = folder
        say = print if collectives.is_main_process() else _say_elsewhere
        self.files = CheckpointFolder(folder, keep_last=keep_last, keep_every=keep_every, say=say)
        self.save_per_node = save_per_node
        self._clock = CheckpointClock(minutes, time.monotonic())
        self._found = None
        self._num_failures = 0  # in a row
        self._writers, self._group = [0], None

    @classmethod
    def of_options(cls, args: Any) -> "CheckpointManager":
        """Return the one that the options ask for."""
        return cls(
            Path(args.output_dir),
            keep_last=args.keep_last,
            keep_every=args.keep_every,
            minutes=args.checkpoint_minutes,
            save_per_node=args.save_per_node,
        )

    @property
    def _is_writer(self) -> bool:
        return collectives.get_rank() in self._writers

    def is_due(self) -> bool:
        """Tell on rank 0 whether the clock asks for a checkpoint; False on others, so that one answer decides."""
        return collectives.is_main_process() and self._clock.is_due(time.monotonic())

    def lock(self) -> None:
        """Keep other runs out of the folder until this process ends. Collective: every rank must call it.

        Raises:
            LockedError: another run is in there, and does not end soon.
            UserError: the folder cannot be written.
        """
        if self.save_per_node:
            self._find_writers()
        self._on_writers(self.files.acquire)

    def _find_writers(self) -> None:
        """Find the ranks that write: the first of each node, or one of those that see the same folder."""
        is_first = read_launch().local_rank == 0
        firsts = [rank for rank, is_one in enumerate(collectives.gather_plain(is_first)) if is_one]
        token = collectives.gather_plain(secrets.token_hex(8))[0]
        marks = {rank: self.folder / f".node-{rank}-{token}" for rank in firsts}
        self._writers = firsts
        self._on_writers(_touch, marks.get(collectives.get_rank()))
        # Asked for by name: a listing may come from a network file system's cache.
        lowest = min([rank for rank, mark in marks.items() if mark.exists()] + [collectives.get_rank()])
        seen = collectives.gather_plain(lowest)
        if is_first:
            marks[collectives.get_rank()].unlink(missing_ok=True)
        self._writers = [rank for rank in firsts if seen[rank] == rank]
        if len(self._writers) < len(firsts):
            print(f"--save-per-node: {len(firsts)} nodes see {len(self._writers)} folders; one writer in each")
        if len(self._writers) > 1:
            self._group = dist.new_group(self._writers, backend="gloo")

    def _on_writers(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function on the ranks that write; what one of them raises, all raise."""
        verdict = None
        if self._is_writer:
            try:
                function(*args)
            except (UserError, OSError) as error:
                verdict = _describe(error)
        _raise_first(collectives.gather_plain(verdict))

    def read(self, resume: str) -> dict | None:
        """Return the checkpoint that `--resume` means, or None for a fresh start. Collective: every rank must call it.

        Changes nothing on the disk. Where nodes keep copies, `auto` takes the newest of all nodes.

        Raises:
            UserError: as `CheckpointFolder.read`, on every rank.
        """
        is_reader = self._is_writer if resume == "auto" else collectives.is_main_process()
        found, step, refusal = None, None, None
        if is_reader:
            try:
                found = self.files.read(resume)
                step = found and found.state["step"]
            except (UserError, OSError) as error:
                refusal = _describe(error)
        steps, refusals = zip(*collectives.gather_plain([step, refusal]), strict=True)
        newest = max((step for step in steps if step is not None), default=None)
        if newest is not None:  # then it is no matter that another node has damaged files only
            refusals = [each for each in refusals if each and each[1] != NoUsableCheckpointError.exit_code]
        _raise_first(refusals)
        if newest is not None:
            return self._receive(found, steps.index(newest), resume)
        if resume == "auto":
            print(f"--resume auto: no checkpoint in {self.folder} yet, starting afresh")
        return None

    def _receive(self, found: Found | None, source: int, resume: str) -> dict:
        """Hand the checkpoint that one rank found to all; collective."""
        if source != 0:
            print(f"the newest checkpoint is the copy that rank {source} keeps")
        payload = collectives.broadcast_bytes(found and found.payload, source)
        if collectives.get_rank() != source:  # which has loaded it already
            path = Path("checkpoint.pth") if resume == "auto" else Path(resume)
            found = Found(path, payload, load_checkpoint(payload, resume))
        self._found = found if self._is_writer else None
        return found.state

    def say_damaged(self) -> None:
        """Say what was passed over, where nothing is written and so nothing renamed."""
        if self._found is not None:
            self.files.say_damaged(self._found, {})

    def check(self, resume: str, *, overwrite: bool) -> None:
        """Check what is in the folder, as `CheckpointFolder.check`. Collective: every rank must call it."""
        self._on_writers(lambda: self.files.check(resume, overwrite=overwrite))

    def open(self, resume: str, run: RunState, *, overwrite: bool = False) -> None:
        """Make the folder ready, as `CheckpointFolder.open`. Collective: every rank must call it."""
        payloads = {name: self._receive_best(name, resume, run) for name in run.bests if self._group is not None}
        self._on_writers(partial(self.files.open, resume, self._found, run, payloads, overwrite=overwrite))
        run.bests = collectives.gather_plain(run.bests)[0]
        self._found = None
        self._clock.restart(time.monotonic())

    def _receive_best(self, name: str, resume: str, run: RunState) -> bytes | None:
        """Return a best checkpoint so far where another node has it and this one does not; collective."""
        if run.bests[name] is None or name in run.best_now:
            return None
        path = self.files.find_best(name, run.bests[name]["step"], resume) if self._is_writer else None
        has_it = collectives.gather_plain(path is not None)
        if not any(has_it) or all(has_it[rank] for rank in self._writers) or not self._is_writer:
            return None
        source = has_it.index(True)
        payload = read_bytes(path) if collectives.get_rank() == source else None
        payload = collectives.broadcast_bytes(payload, source, self._group)
        return None if path is not None else payload

    def save(self, run: RunState, *, is_last: bool = False) -> bool:
        """Save the run; return whether it is saved. Collective: every rank must call it, after the same step.

        A failure is said with its cause, and training goes on with the earlier checkpoints in place.

        Args:
            run: the state.
            is_last: whether nothing comes after this, so that a failure would lose work.

        Raises:
            StorageError: this one failed, and it was the last, or the one before failed too.
        """
        failure = self.files.save(run.state_dict(), run.best_now) if collectives.is_main_process() else None
        if self._group is not None and self._is_writer:
            failure = self._save_copy(run, failure)
        failures = collectives.gather_plain(failure)
        self._clock.restart(time.monotonic())
        for rank, text in enumerate(failures[1:], 1):
            if text is not None:
                print(f"warning: the copy that rank {rank} keeps: {text}")
        if failures[0] is None:
            self._num_failures = 0
            return True
        self._num_failures += 1
        if is_last or self._num_failures > 1:
            which = "the last checkpoint of the run" if is_last else "two checkpoints in a row"
            raise StorageError(f"{which} could not be saved: {failures[0]}; free some space and --resume auto")
        print(f"warning: {failures[0]}; training goes on")
        return False

    def _save_copy(self, run: RunState, failure: str | None) -> str | None:
        """Hand rank 0's file to the other writers; called by writers only."""
        payload = b""
        if collectives.is_main_process() and failure is None:
            with suppress(StorageError):  # then there is no copy of this one
                payload = read_bytes(self.folder / "checkpoint.pth")
        payload = collectives.broadcast_bytes(payload, 0, self._group)
        if collectives.is_main_process() or not payload:
            return failure
        return self.files.save_copy(payload, run.step, run.best_now)


def _touch(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise UserError(f"--output-dir {path.parent} cannot be written: {error.strerror or error}") from error


def _say_elsewhere(text: str) -> None:
    """Print on a rank on which `print` is silent."""
    print(f"rank {collectives.get_rank()}: {text}", force=True)


def _describe(error: UserError | OSError) -> list:
    """Return an error as plain values that can be sent."""
    return [str(error), error.exit_code if isinstance(error, UserError) else UserError.exit_code]


def _raise_first(verdicts: Iterable[list | None]) -> None:
    """Raise the first [text, exit code] that is one, if any."""
    for verdict in verdicts:
        if verdict:
            error = UserError(verdict[0])
            error.exit_code = verdict[1]
            raise error


def _load(path: Path, name: str) -> Found:
    """Return a file's content, verified; raises what its reading and checking raise."""
    return Found(path, *read_checkpoint(path, name))


def _verify_archive(path: Path) -> None:
    try:
        bad = find_bad_record(path)
    except zipfile.BadZipFile as error:
        bad = str(error)
    if bad is not None:
        raise OSError(f"{path.name} reads back otherwise than it was written ({bad})")


def _move_aside(path: Path, prefix: str = "", suffix: str = "") -> str:
    """Rename a file so that neither it nor one that was moved before is lost; return its new name."""
    name, number = f"{prefix}{path.name}{suffix}", 1
    while os.path.lexists(path.with_name(name)):
        number += 1
        name = f"{prefix}{number}-{path.name}" if prefix else f"{path.name}{suffix}-{number}"
    os.replace(path, path.with_name(name))
    return name


def _step_in(path: Path) -> int:
    return int(NUMBERED.fullmatch(path.name)[1])


def _step_of(path: Path) -> int | None:
    """Return the step of a good checkpoint, or None; an unreadable disk is an error, and not a bad checkpoint."""
    try:
        return _load(path, path.name).state["step"]
    except StorageError:
        raise
    except (UserError, OSError):
        return None


def _num_bytes(value: Any) -> int:
    """Return the bytes of all tensors in nested dicts and lists: what a checkpoint needs, but for little."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(_num_bytes, value)) if isinstance(value, (list, tuple)) else 0
