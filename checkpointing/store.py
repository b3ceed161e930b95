"""The checkpoints of a run on any number of processes: found, adopted and saved by all of them together."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import collectives
from checkpointing.archive import Found, load_checkpoint
from checkpointing.checkpoint import HostCopy, RunState
from checkpointing.copies import Writers
from checkpointing.folder import CheckpointFolder
from errors import NoUsableCheckpointError, StorageError
from files import read_bytes


class Saving:
    """A write of a checkpoint that is under way, perhaps in a thread.

    Args:
        files: the folder; None where nothing is written.
        write: writes there, calls no collective and prints by `files.say` alone; returns why it failed, or None.
    """

    def __init__(self, files: CheckpointFolder | None = None, write: Callable[[], str | None] | None = None) -> None:
        self.is_written = False
        self._files, self._write = files, write
        self._thread, self._lines, self._failure, self._error = None, [], None, None

    def start(self, thread: ThreadPoolExecutor) -> None:
        """Write in a thread: training may go on."""
        self._thread = thread.submit(self.write)

    def write(self) -> None:
        """Write, and note the outcome."""
        say, self._files.say = self._files.say, self._lines.append
        try:
            self._failure = self._write()
        except BaseException as error:
            self._error = error
        self._files.say, self._write, self.is_written = say, None, True

    def wait(self) -> str | None:
        """Wait for the thread; print its lines, and return why the write failed, or None."""
        if self._thread is not None:
            self._thread.result()
        for line in self._lines:
            self._files.say(line)
        if self._error is not None:
            raise self._error
        return self._failure


class CheckpointManager:
    """The checkpoints of a run. Methods are collective and fail on every rank alike, unless they say otherwise.

    A save is written beside the training. It counts as made when `settle` says so, on all ranks after the same step.

    Args:
        folder: the output folder, shared by all nodes or one on each.
        minutes: minutes between two checkpoints by the clock; 0 for none.
        save_per_node: let the first rank of each node keep a copy in its own `folder`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 3,
        minutes: float = 0.0,
        save_per_node: bool = False,
    ) -> None:
        rank = collectives.get_rank()
        # `print` is silent on the other ranks.
        say = print if rank == 0 else lambda text: print(f"rank {rank}: {text}", force=True)
        self.folder, self.save_per_node = folder, save_per_node
        self.files = CheckpointFolder(folder, keep_last=keep_last, say=say)
        self._writers, self._thread, self._memory = Writers(), ThreadPoolExecutor(1, "checkpoint writer"), HostCopy()
        self._period_s, self._last_s = 60 * minutes, time.monotonic()
        self._found = self._saving = None
        self._copying, self._payload = Saving(), b""  # of rank 0's checkpoint, for the other writers
        self._num_failures = 0  # in a row

    @classmethod
    def of_options(cls, args: Any) -> "CheckpointManager":
        """Return the manager that the options describe. Not collective."""
        return cls(
            Path(args.output_dir),
            keep_last=args.keep_last,
            minutes=args.checkpoint_minutes,
            save_per_node=args.save_per_node,
        )

    def is_due(self) -> bool:
        """Tell on rank 0 whether the clock asks for a checkpoint; False on other ranks. Not collective."""
        return collectives.is_main_process() and 0 < self._period_s <= time.monotonic() - self._last_s

    @property
    def is_written(self) -> bool:
        """Whether rank 0 has written a save that `settle` has yet to report; False on others. Not collective."""
        return self._saving is not None and self._saving.is_written

    def lock(self) -> None:
        """Keep other runs out of the folder until this process ends, as `CheckpointFolder.acquire`."""
        if self.save_per_node:
            self._writers.find(self.folder)
        self._writers.call(self.files.acquire)

    def read(self, resume: str) -> dict | None:
        """Return the checkpoint that `--resume` means, or None for a fresh start, as `CheckpointFinder.read`.

        Where nodes keep copies, `auto` takes the newest copy of any node.
        """
        is_reader = self._writers.have_me if resume == "auto" else collectives.is_main_process()
        found, refusal = collectives.attempt(self.files.read, resume) if is_reader else (None, None)
        steps, refusals = zip(*collectives.gather_plain([found and found.state["step"], refusal]), strict=True)
        newest = max((step for step in steps if step is not None), default=None)
        if newest is not None:  # then a node that has only damaged files is no obstacle
            refusals = [each for each in refusals if each and each[1] != NoUsableCheckpointError.exit_code]
        collectives.raise_first(refusals)
        if newest is not None:
            return self._receive(found, steps.index(newest), resume)
        if resume == "auto":
            print(f"--resume auto: no checkpoint in {self.folder} yet, starting afresh")
        return None

    def _receive(self, found: Found | None, source: int, resume: str) -> dict:
        """Return on every rank the checkpoint that rank `source` found."""
        if source != 0:
            print(f"the newest checkpoint is the copy that rank {source} keeps")
        payload = collectives.broadcast_bytes(found and found.payload, source)
        if collectives.get_rank() != source:  # the source has loaded it already
            path = Path("checkpoint.pth") if resume == "auto" else Path(resume)
            found = Found(path, payload, load_checkpoint(payload, resume))
        self._found = found if self._writers.have_me else None
        return found.state

    def say_damaged(self) -> None:
        """Name the damaged files that were passed over. Not collective."""
        if self._found is not None:
            self.files.say_damaged(self._found)

    def check(self, resume: str, *, overwrite: bool) -> None:
        """Check the folder, as `CheckpointFolder.check`."""
        self._writers.call(partial(self.files.check, resume, overwrite=overwrite))

    def open(self, resume: str, run: RunState) -> None:
        """Make the folder ready, as `CheckpointFolder.open`."""
        payloads = {name: self._receive_best(name, resume, run) for name in run.bests if len(self._writers.ranks) > 1}
        self._writers.call(partial(self.files.open, resume, self._found, run, payloads))
        run.bests = collectives.gather_plain(run.bests)[0]
        self._found = None
        self._last_s = time.monotonic()

    def _receive_best(self, name: str, resume: str, run: RunState) -> bytes | None:
        """Return the bytes of a best checkpoint that other nodes have and this writer lacks, else None."""
        if run.bests[name] is None or name in run.best_now:
            return None
        path = self.files.find_best(name, run.bests[name]["step"], resume) if self._writers.have_me else None
        has_it = collectives.gather_plain(path is not None)
        if not any(has_it) or all(has_it[rank] for rank in self._writers.ranks) or not self._writers.have_me:
            return None
        source = has_it.index(True)
        payload = self._writers.share(read_bytes(path) if collectives.get_rank() == source else None, source)
        return None if path is not None else payload

    def save(self, run: RunState, *, records: int | None = None, is_last: bool = False) -> bool:
        """Begin to save the run after a step that is the same on every rank, once the save before is settled.

        The last save is settled at once. Return whether it is made; False for other saves, whose outcome is not known.

        Args:
            run: the state to save.
            records: descriptor of a file to make durable first.
            is_last: whether this is the run's last save.

        Raises:
            StorageError: as `settle`.
        """
        self.settle()
        self._saving, self._step, self._best_now = Saving(), run.step, run.best_now
        if collectives.is_main_process():
            state = run.state_dict() if is_last else self._memory.take(run.state_dict())
            self._saving = Saving(self.files, partial(self._write, state, self._best_now, records))
            self._saving.write() if is_last else self._start(self._saving)
        self._last_s = time.monotonic()
        return is_last and self.settle(is_last=True)

    def _write(self, state: dict, best_now: list[str], records: int | None) -> str | None:
        self._memory.wait()
        failure, self._payload = self.files.save(state, best_now, records), b""
        if failure is None and len(self._writers.ranks) > 1:
            with suppress(StorageError):  # then the other writers get no copy of this save
                self._payload = read_bytes(self.folder / "checkpoint.pth")
        return failure

    def _start(self, saving: Saving) -> None:
        try:
            saving.start(self._thread)
        except RuntimeError as error:
            if "start new thread" not in str(error):
                raise
            self._thread = ThreadPoolExecutor(1, "checkpoint writer")  # the old one has this save in its queue
            saving.write()

    def settle(self, *, is_last: bool = False) -> bool:
        """Wait for the save that is under way, if there is one; return whether it is made.

        A failure is printed with its cause, and training goes on with the earlier checkpoints in place. Other nodes
        get their copies here, where all writers meet; each writes its own beside the training.

        Raises:
            StorageError: the save failed, and it was the last, or the one before failed too.
        """
        if self._saving is None:
            return False
        saving, self._saving = self._saving, None
        failure = collectives.gather_plain(saving.wait())[0]
        if failure is None:
            self._num_failures = 0
            self._copy(is_last=is_last)
            return True
        self._num_failures += 1
        if is_last or self._num_failures > 1:
            which = "the last checkpoint of the run" if is_last else "two checkpoints in a row"
            raise StorageError(f"{which} could not be saved: {failure}; free some space and --resume auto")
        print(f"warning: {failure}; training goes on")
        return False

    def _copy(self, *, is_last: bool) -> None:
        """Send rank 0's file to the other writers; each begins to write it when its copy before is made."""
        if not self._writers.have_me:
            return
        payload, self._payload = self._writers.share(self._payload), b""
        if payload and not collectives.is_main_process():
            self._end_copy()
            self._copying = Saving(self.files, partial(self.files.save_copy, payload, self._step, self._best_now))
            self._start(self._copying)
        if is_last:
            self._end_copy()

    def _end_copy(self) -> None:
        copying, self._copying = self._copying, Saving()
        failure = copying.wait()
        if failure is not None:
            self.files.say(f"warning: the copy on this node: {failure}")

    def close(self) -> None:
        """Wait for the writer when a run ends; not collective, since an error may have ended this rank alone."""
        saving, self._saving = self._saving or Saving(), None
        failure = saving.wait()
        if failure is not None:
            print(f"warning: {failure}")
        self._end_copy()
