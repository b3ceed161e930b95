"""status.json: how a run ended."""

import time
from pathlib import Path

from checkpointing.checkpoint import RunState
from errors import StorageError
from files import explain_failure, retry, write_json


class StatusFile:
    """Write status.json, which says whether a run is running or how it ended: torchrun turns any exit code into 1.

    Without a folder nothing is written.
    """

    def __init__(self, folder: Path | None, state: RunState) -> None:
        self.folder, self.state = folder, state

    def replace(self, state: str, reason: str = "") -> None:
        """Replace the file. `requeue` asks a job script to start the run again: after a preemption.

        Args:
            state: running, preempted, stopped (by `--stop-epoch`), finished or failed.
            reason: why it stopped.

        Raises:
            OSError: the file cannot be written.
        """
        requeue, now_s = state == "preempted", round(time.time(), 3)
        status = {"state": state, "reason": reason, "step": self.state.step, "requeue": requeue, "time": now_s}
        write_json(self.folder / "status.json", status)

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
