"""status.json: how a run ended, and how often it has started at the same step."""

import time
from pathlib import Path
from typing import Any

from checkpointing.checkpoint import RunState
from errors import StorageError
from files import explain_failure, read_json, retry, write_json

# After this many starts in a row at the same step, status.json no longer asks for another one.
MOST_STARTS = 3


class StatusFile:
    """Write status.json, which says whether a run is running or how it ended: torchrun turns any exit code into 1.

    Args:
        folder: the output folder; None to write nothing.
        state: the position of the run.
    """

    def __init__(self, folder: Path | None, state: RunState) -> None:
        self.folder, self.state = folder, state

    def _read_start(self) -> dict:
        """Return the record of the last start; an empty one if there is none with the right types and range."""
        start = read_json(self.folder / "status.json").get("start") if self.folder else None
        is_right = (
            isinstance(start, dict)
            and type(start.get("count")) is int
            and 0 < start["count"] < 1 << 53
            and isinstance(start.get("position"), list)
            and [type(item) for item in start["position"]] == [int, bool]
        )
        return start if is_right else {}

    def count_start(self) -> dict:
        """Return a record of this start: its position, and the number of consecutive starts there."""
        position, before = [self.state.step, self.state.is_evaluated], self._read_start()
        return {"position": position, "count": before["count"] + 1 if before.get("position") == position else 1}

    def replace(self, state: str, reason: str = "", start: dict | None = None) -> None:
        """Replace the file.

        `requeue` asks a job script to start the run again: after a preemption, but not for ever at the same step.

        Args:
            state: running, preempted, finished or failed.
            reason: why it stopped.
            start: the record that `count_start` returns; by default, the one in the file.

        Raises:
            OSError: the file cannot be written.
        """
        step = self.state.step
        start = start or self._read_start() or {"position": [step, False], "count": 1}
        is_stuck = start["position"][0] == step and start["count"] >= MOST_STARTS
        status: dict[str, Any] = {"state": state, "reason": reason, "step": step}
        status |= {"requeue": state == "preempted" and not is_stuck, "start": start, "time": round(time.time(), 3)}
        write_json(self.folder / "status.json", status)

    def write(self, state: str, reason: str = "") -> None:
        """Replace the file, if there is a folder; a failure is a warning."""
        try:
            if self.folder:
                retry(lambda: self.replace(state, reason))
        except OSError as error:
            print(f"warning: status.json in {self.folder} is not written: {error.strerror or error}")

    def finish(self) -> None:
        """Record that the run has finished.

        Raises:
            StorageError: the file cannot be written; a warning alone would leave the end unrecorded.
        """
        try:
            retry(lambda: self.replace("finished"))
        except OSError as error:
            why = explain_failure(error, self.folder, 0)
            raise StorageError(
                f"all is saved, but status.json was not written: {why}; give the same command again to finish"
            ) from error
