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

    def _read(self) -> dict:
        return read_json(self.folder / "status.json") if self.folder else {}

    def count_start(self, records: list[dict]) -> dict:
        """Return a record of this start: its position, the number of consecutive starts there, and its time.

        Its `ran_s` is how long earlier starts ran, by the last of their `records`; None if unknown.
        """
        position, status = [self.state.step, self.state.is_evaluated], self._read()
        before = status.get("start") if is_start(status.get("start")) else {}
        count = before["count"] + 1 if before.get("position") == position else 1
        last_s = [record["time"] for record in records[-1:]] + [status.get("time")]
        ran_s = time_run_s(before, last_s) if self.state.is_resumed else 0.0
        return {"position": position, "count": count, "began": time.time(), "ran_s": ran_s}

    def ran_s(self) -> float | None:
        """Return how long all starts of the run have run; None if unknown."""
        start = self._read().get("start")
        return time_run_s(start, [time.time()]) if is_start(start) else None

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
        step, before = self.state.step, self._read().get("start")
        start = start or (before if is_start(before) else {"position": [step, False], "count": 1})
        is_stuck = start["position"][0] == step and start["count"] >= MOST_STARTS
        status = {
            "state": state,
            "reason": reason,
            "step": step,
            "requeue": state == "preempted" and not is_stuck,
            "start": start,
            "time": round(time.time(), 3),
        }
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


def is_start(value: Any) -> bool:
    """Tell whether the start in a status.json has the right types and range."""
    return (
        isinstance(value, dict)
        and type(value.get("count")) is int
        and 0 < value["count"] < 1 << 53
        and isinstance(value.get("position"), list)
        and [type(item) for item in value["position"]] == [int, bool]
    )


def time_run_s(start: dict, seen_s: list) -> float | None:
    """Return the seconds that a run had run when its start was last seen running; None if the records do not tell.

    Args:
        start: the record in a status.json.
        seen_s: times at which the start was running; values of other types or ranges are ignored.
    """
    began_s, earlier_s = start.get("began"), start.get("ran_s")
    known_s = [time_s for time_s in [*seen_s, began_s, earlier_s] if type(time_s) is float and 0 <= time_s < 1e11]
    return None if began_s not in known_s or earlier_s not in known_s else earlier_s + max(known_s) - began_s
