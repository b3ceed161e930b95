"""status.json: whether a run lives, how far it is, and how it ended."""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from checkpointing.checkpoint import RunState
from checkpointing.folder import own_files
from distributed.ending import explain_limit
from distributed.launch import read_launch
from errors import StorageError
from files import explain_failure, read_json, retry, write_json
from settings.machine import default_folder
from settings.options import CheckpointOptions

# Seconds after which the file of a running run is renewed.
RENEWAL_S = 20.0


class StatusFile:
    """Write status.json, which says whether a run is running or how it ended: torchrun turns any exit code into 1.

    While the run is running, a thread renews the file. Without a folder nothing is written.

    Args:
        folder: the run's folder, or None.
        state: the run's state.
        progress: returns the fields of the file that tell how far the run is; called in the thread.
    """

    def __init__(self, folder: Path | None, state: RunState, progress: Callable[[], dict[str, Any]] = dict) -> None:
        self.folder, self.state, self.progress = folder, state, progress
        self._status = {}
        # Between the thread that renews and the one that trains: a late renewal must not undo the end.
        self._lock, self._is_over = threading.Lock(), threading.Event()

    def replace(self, state: str, reason: str = "") -> None:
        """Replace the file. `requeue` asks a job script to start the run again: after a preemption.

        Args:
            state: running, preempted, stopped (by `--stop-epoch`), finished or failed.
            reason: why it stopped.

        Raises:
            OSError: the file cannot be written.
        """
        # Not after a failure: a resume takes the same steps from the same state, and would mostly fail again.
        requeue = state == "preempted"
        if state != "running":
            self._is_over.set()
        with self._lock:
            self._status = {"state": state, "reason": reason, "requeue": requeue, "time": _now(), **_process()}
            self._write(is_durable=True)

    def _write(self, *, is_durable: bool) -> None:
        status = {**self._status, "step": self.state.step, "heartbeat": _now(), **self.progress()}
        write_json(self.folder / "status.json", status, is_durable=is_durable)

    def start_renewal(self) -> None:
        """Renew the file from now on, in a thread, until the run's end is written."""
        # A process that is killed writes no end: readers know it by a heartbeat that is old.
        if self.folder:
            threading.Thread(target=self._renew, daemon=True, name="status").start()

    def _renew(self) -> None:
        while not self._is_over.wait(RENEWAL_S):
            with self._lock, suppress(OSError):  # of a full disk, which the next save reports
                if not self._is_over.is_set():
                    # Not durable: after a power failure an older heartbeat says the same.
                    self._write(is_durable=False)

    def write(self, state: str, reason: str = "") -> None:
        """Replace the file, if there is a folder; a failure is a warning."""
        try:
            if self.folder:
                retry(lambda: self.replace(state, reason))
        except OSError as error:
            print(f"warning: status.json in {self.folder} is not written: {error.strerror or error}")

    def finish(self, reason: str = "") -> None:
        """Record that the run has finished, and why if it stopped early.

        Raises:
            StorageError: the file cannot be written; a warning alone would leave the end unrecorded.
        """
        try:
            retry(lambda: self.replace("finished", reason))
        except OSError as error:
            why = explain_failure(error, self.folder, 0)
            raise StorageError(
                f"everything is saved, but status.json was not written: {why}; run the same command again to finish"
            ) from error


def note_refusal(checkpoint: CheckpointOptions, name: str, dry_run: bool, error: BaseException) -> None:
    """Write into status.json that a start of training was refused, and why, unless the folder holds a run."""
    folder = Path(checkpoint.output_dir or default_folder(name))
    error = explain_limit(error) or error
    is_refused = getattr(error, "exit_code", None) == 2 and not (checkpoint.test_only or dry_run)
    if is_refused and read_launch().rank == 0:
        with suppress(OSError, StorageError):  # which may be what the start was refused for
            # The status of a run must stay what it was: a mistyped start in its folder ends nothing.
            own = {path.name for path in own_files(folder)} - {".lock"}
            if not own or (own == {"status.json"} and read_json(folder / "status.json").get("state") == "refused"):
                folder.mkdir(parents=True, exist_ok=True)
                status = {"state": "refused", "reason": str(error), "requeue": False, "time": _now(), **_process()}
                write_json(folder / "status.json", status)


def _process() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname()}


def _now() -> float:
    return round(time.time(), 3)
