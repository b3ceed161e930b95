"""The checkpoints of a run on any number of processes: found, restored and saved by all ranks together."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from checkpointing.archive import Found, load_checkpoint
from checkpointing.checkpoint import RunState, copy_to_host
from checkpointing.folder import LOCK_WAIT_S, CheckpointFolder, numbered
from distributed import collectives
from distributed.launch import read_launch
from distributed.watch import watchdog
from errors import StorageError
from files import read_json
from settings.options import CheckpointOptions


class CheckpointManager:
    """The checkpoints of a run. Methods are collective and fail on every rank alike, unless they say otherwise.

    A start calls `lock`, `read` and `check` before it builds anything, and `take_over` once the state is restored:
    until then whatever is refused leaves the folder as it was. A save is written beside the training. It counts as made
    when `wait_for_save` says so, on all ranks after the same step.

    Args:
        folder: the output folder, shared by all nodes or one on each.
        keep_last: as of `CheckpointFolder`.
        minutes: minutes between two checkpoints by the clock; 0 for none.
        save_per_node: let the first rank of each node keep a copy in its own `folder`.
    """

    def __init__(self, folder: Path, *, keep_last: int = 3, minutes: float = 0.0, save_per_node: bool = False) -> None:
        rank = collectives.get_rank()
        # `print` is silent on the other ranks: see `collectives.setup_for_distributed`.
        loud: Any = print
        print_line = print if rank == 0 else lambda text: loud(f"rank {rank}: {text}", force=True)
        self.folder = folder
        self.save_per_node = save_per_node
        self._files = CheckpointFolder(folder, keep_last=keep_last, print_line=print_line)
        self._writers = [0]  # ranks that write checkpoints
        self._copies: Any = None  # `per_node.NodeCopies` on other nodes
        # One thread: two saves at a time would hold two copies of the state in memory, and could end out of order.
        self._thread = ThreadPoolExecutor(1, "checkpoint writer")
        self._saving: Future | None = None
        # Not the time of day, which an administrator or NTP may set back.
        self._period_s, self._last_s = 60 * minutes, time.monotonic()
        self._found = None
        self._num_failures = 0  # in a row

    @classmethod
    def of_options(cls, checkpoint: CheckpointOptions) -> "CheckpointManager":
        """Return the manager that the options describe. Not collective."""
        return cls(
            Path(checkpoint.output_dir), keep_last=checkpoint.keep_last, minutes=checkpoint.checkpoint_minutes,
            save_per_node=checkpoint.save_per_node,
        )  # fmt: skip

    # A start: find the checkpoint, and take over its folder once the run has restored it

    def lock(self) -> None:
        """Keep other runs out of the folder until this process ends, as `CheckpointFolder.acquire`."""
        watchdog.note_progress("locking the output folder", LOCK_WAIT_S)
        if self.save_per_node:
            from checkpointing.per_node import NodeCopies

            self._copies = NodeCopies(self._files, self._thread)
            self._writers = self._copies.find_writers()
        collectives.call_on(self._writers, self._files.acquire)

    def is_restarted(self) -> bool:
        """Tell whether torchrun has restarted this run, by the torchrun that run.json names, and it has saved."""

        # torchrun repeats the first command, whose --overwrite would now remove what the run itself has saved.
        def has_saved() -> bool:
            launched = read_json(self.folder / "run.json").get("launch")
            return launched not in (None, "") and launched == read_launch().agent and bool(numbered(self.folder))

        return collectives.call_on_master(has_saved)

    def read(self, resume: str) -> dict | None:
        """Return the checkpoint that `--resume` names, or None, as `CheckpointFolder.read`; print damaged ones."""
        watchdog.note_progress("reading the checkpoint")
        if resume == "auto" and self._copies is not None:
            self._copies.share_newest()
        found = collectives.call_on(self._writers if resume == "auto" else [0], self._files.read, resume)
        # What rank 0 has found counts: ranks that each chose their own newest file might train from different steps.
        if collectives.gather_plain(found is None)[0]:
            if resume == "auto":
                print(f"--resume auto: no checkpoint in {self.folder} yet, starting a new run")
            return None
        # Other ranks read no file: their nodes may not see the folder, or see an earlier state of it in a cache.
        payload = collectives.broadcast_bytes(None if found is None else found.payload)
        if found is None:
            found = Found(Path(resume), payload, load_checkpoint(payload, resume))
        if collectives.get_rank() in self._writers:
            self._found = found
            # Before options are compared: their refusal would hide that the newest checkpoint is damaged.
            self._files.report_damaged(found)
        return found.state

    def check(self, resume: str, *, overwrite: bool) -> None:
        """Check that the folder may be written to, as `CheckpointFolder.check`."""
        collectives.call_on(self._writers, partial(self._files.check, resume, overwrite=overwrite))

    def take_over(self, resume: str, run: RunState) -> None:
        """Make the folder that of the restored run, as `CheckpointFolder.take_over`."""
        watchdog.note_progress("claiming the output folder")
        collectives.call_on(self._writers, self._files.take_over, resume, self._found, run)
        # A best file that is lost is forgotten, by all ranks.
        run.bests = collectives.gather_plain(run.bests)[0]
        self._found = None
        self._last_s = time.monotonic()

    # Saves

    def is_due(self) -> bool:
        """Tell on rank 0 whether the clock asks for a checkpoint; False on other ranks. Not collective."""
        # Ranks' clocks differ and all must save after one step: rank 0's answer travels with the step's decision.
        return collectives.is_main_process() and 0 < self._period_s <= time.monotonic() - self._last_s

    @property
    def is_written(self) -> bool:
        """Whether rank 0 has written a save that `wait_for_save` has yet to report; False on others. Not collective."""
        return self._saving is not None and collectives.is_main_process() and self._saving.done()

    def save(self, run: RunState, *, records: int | None = None, is_last: bool = False) -> bool:
        """Begin to save the run after a step that is the same on every rank, once the save before is waited for.

        Args:
            run: the state to save.
            records: descriptor of a file to make durable first.
            is_last: whether this is the run's last save, which is waited for at once.

        Returns:
            Whether the last save is made; False for other saves, whose outcome is not known yet.

        Raises:
            StorageError: as `wait_for_save`.
        """
        self.wait_for_save()
        self._step, self._best_now = run.step, run.best_now
        if collectives.is_main_process():
            # For 205 MB the thread takes 0.15 to 0.2 s of a core. A step beside it takes 1.05 times a usual one if a
            # core is free, and up to 1.95 times if training uses all of them (docs/performance.md, Saving).
            # A copy, since the next step changes the tensors while the thread still writes them.
            state = run.state_dict() if is_last else copy_to_host(run.state_dict())
            # Only now is a save in progress: what raises above leaves nothing that the end of the run would wait for.
            self._saving = self._thread.submit(self._files.save, state, self._best_now, records)
        else:
            self._saving = Future()
            self._saving.set_result(None)
        self._last_s = time.monotonic()
        return is_last and self.wait_for_save(is_last=True)

    def wait_for_save(self, *, is_last: bool = False) -> bool:
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
            if self._copies is not None:
                self._copies.send(self._step, self._best_now)
                if is_last:
                    self._copies.finish()
            return True
        self._num_failures += 1
        if is_last or self._num_failures > 1:
            # One failure may pass, as when another job has filled the disk; a run that never saves is lost in the end.
            which = "the last checkpoint of the run" if is_last else "two checkpoints in a row"
            raise StorageError(f"{which} could not be saved: {failure}; make room for it and give --resume auto")
        print(f"warning: {failure}; training continues")
        return False

    def close(self) -> None:
        """Wait for the writer when a run ends. Not collective, since an error may have ended this rank alone."""
        saving, self._saving = self._saving, None
        if saving is not None:
            # An exception is not raised: it would hide the error that ends the run.
            failure = saving.exception() or saving.result()
            if failure is not None:
                print(f"warning: {failure}")
        if self._copies is not None:
            self._copies.finish()
