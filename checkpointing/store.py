"""The checkpoints of a run on any number of processes: found, restored, adopted and saved by all ranks together."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from checkpointing.archive import Found, load_checkpoint
from checkpointing.checkpoint import HostCopy, RunState
from checkpointing.copies import NodeCopies
from checkpointing.folder import CheckpointFolder
from distributed import collectives
from distributed.launch import read_launch
from errors import StorageError
from files import read_json


class CheckpointManager:
    """The checkpoints of a run. Methods are collective and fail on every rank alike, unless they say otherwise.

    A start calls `lock`, `read` and `check` before it builds anything, and `adopt` once the state is restored. A save
    is written beside the training. It counts as made when `settle` says so, on all ranks after the same step.

    Args:
        folder: the output folder, shared by all nodes or one on each.
        keep_last: as of `CheckpointFolder`.
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
        self.copies, self._memory = NodeCopies(self.files), HostCopy()
        self._thread = ThreadPoolExecutor(1, "checkpoint writer")
        self._period_s, self._last_s = 60 * minutes, time.monotonic()
        self._found = self._saving = None
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

    # A start: find the checkpoint, and adopt it once the run has restored it

    def lock(self) -> None:
        """Keep other runs out of the folder until this process ends, as `CheckpointFolder.acquire`."""
        if self.save_per_node:
            self.copies.find_writers()
        collectives.call_on(self.copies.ranks, self.files.acquire)

    def is_restarted(self) -> bool:
        """Tell whether torchrun has restarted this run, by the torchrun that run.json names, and it has saved."""

        def has_saved() -> bytes | None:
            launched = read_json(self.folder / "run.json").get("launch")
            is_ours = launched not in (None, "") and launched == read_launch().agent
            return b"yes" if is_ours and self.files.numbered() else None

        return collectives.call_on_master(has_saved) is not None

    def read(self, resume: str) -> dict | None:
        """Return the checkpoint that `--resume` names, or None, as `CheckpointFinder.read`; print damaged ones."""
        if resume == "auto":
            self.copies.level()
        found = collectives.call_on(self.copies.ranks if resume == "auto" else [0], self.files.read, resume)
        if collectives.gather_plain(found is None)[0]:
            if resume == "auto":
                print(f"--resume auto: no checkpoint in {self.folder} yet, starting a new run")
            return None
        payload = collectives.broadcast_bytes(found and found.payload)
        if found is None:
            found = Found(Path(resume), payload, load_checkpoint(payload, resume))
        if collectives.get_rank() in self.copies.ranks:
            self._found = found
            self.files.report_damaged(found)
        return found.state

    def check(self, resume: str, *, overwrite: bool) -> None:
        """Check that the folder may be written to, as `CheckpointFinder.check`."""
        collectives.call_on(self.copies.ranks, partial(self.files.check, resume, overwrite=overwrite))

    def adopt(self, resume: str, run: RunState) -> None:
        """Make the folder that of the restored run, as `CheckpointFolder.adopt`."""
        collectives.call_on(self.copies.ranks, self.files.adopt, resume, self._found, run)
        run.bests = collectives.gather_plain(run.bests)[0]
        self._found = None
        self._last_s = time.monotonic()

    # Saves

    def is_due(self) -> bool:
        """Tell on rank 0 whether the clock asks for a checkpoint; False on other ranks. Not collective."""
        return collectives.is_main_process() and 0 < self._period_s <= time.monotonic() - self._last_s

    @property
    def is_written(self) -> bool:
        """Whether rank 0 has written a save that `settle` has yet to report; False on others. Not collective."""
        return self._saving is not None and collectives.is_main_process() and self._saving.done()

    def save(self, run: RunState, *, records: int | None = None, is_last: bool = False) -> bool:
        """Begin to save the run after a step that is the same on every rank, once the save before is settled.

        Args:
            run: the state to save.
            records: descriptor of a file to make durable first.
            is_last: whether this is the run's last save, which is settled at once.

        Returns:
            Whether the last save is made; False for other saves, whose outcome is not known yet.

        Raises:
            StorageError: as `settle`.
        """
        self.settle()
        self._step, self._best_now, self._saving = run.step, run.best_now, Future()
        if collectives.is_main_process():
            state = run.state_dict() if is_last else self._memory.take(run.state_dict())
            self._saving = self._thread.submit(self._write, state, self._best_now, records)
        else:
            self._saving.set_result(None)
        self._last_s = time.monotonic()
        return is_last and self.settle(is_last=True)

    def _write(self, state: dict, best_now: list[str], records: int | None) -> str | None:
        self._memory.wait()
        return self.files.save(state, best_now, records)

    def settle(self, *, is_last: bool = False) -> bool:
        """Wait for the save in progress, if there is one; return whether it is made.

        A failure is printed with its cause, and training continues with the earlier checkpoints in place. Other nodes
        get their copies here.

        Raises:
            StorageError: the save failed, and it was the last, or the one before failed too.
        """
        if self._saving is None:
            return False
        saving, self._saving = self._saving, None
        failure = collectives.gather_plain(saving.result())[0]
        if failure is None:
            self._num_failures = 0
            self.copies.send(self._step, self._best_now)
            if is_last:
                self.copies.finish()
            return True
        self._num_failures += 1
        if is_last or self._num_failures > 1:
            which = "the last checkpoint of the run" if is_last else "two checkpoints in a row"
            raise StorageError(f"{which} could not be saved: {failure}; free some space and --resume auto")
        print(f"warning: {failure}; training continues")
        return False

    def close(self) -> None:
        """Wait for the writer when a run ends. Not collective, since an error may have ended this rank alone."""
        saving, self._saving = self._saving, None
        failure = None if saving is None else saving.result()
        if failure is not None:
            print(f"warning: {failure}")
        self.copies.finish()
