"""What shows the records of a run beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow, or code of one's own.

A logger is a function of the run's folder and its metadata, those of run.json and a lasting `id` of the run, that
returns an object with two methods: `write(record)` takes a record as it stands in metrics.jsonl, and `close()` comes
at the end of every start. A logger gets the records of its run in the order of their steps, none of them twice, and
those too that were written while it was off.

One that has `starts_over` set makes its output anew whenever it is called, and gets all records each time.
"""

import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from errors import attempt
from files import open_regular, read_bytes
from settings.custom_code import load_function

# Seconds for which the end of a run waits for a logger that is still sending.
CLOSE_S = 30.0


class Progress:
    """loggers.jsonl: the run's id, and the last step of each kind of records that each logger has got.

    A line is one write of the system, so that a kill can neither tear it nor come long after the logger's own write.

    Raises:
        OSError: the file cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "loggers.jsonl"
        self._file = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.steps = {}  # {logger: {kind: step}}
        self._pending, self._lock = b"", Lock()  # lines that could not be written; each logger has a thread
        for line in read_bytes(path).splitlines():
            with suppress(ValueError, TypeError):  # a power failure may damage it
                name, kind, step = json.loads(line)
                self.steps.setdefault(name, {})[kind] = step
        if "id" not in self.steps.get("run", ()):
            self.note("run", "id", secrets.token_hex(4))
        self.id = self.steps["run"]["id"]

    def note(self, name: str, kind: str, step: Any) -> None:
        """Keep that a logger has got a record; what cannot be written now, as on a full disk, is with the next note."""
        self.steps.setdefault(name, {})[kind] = step
        with self._lock:
            self._pending += f"{json.dumps([name, kind, step])}\n".encode()
            self._pending = self._pending[os.write(self._file, self._pending) :]


class Feed:
    """Hands the records of a run to one logger, in a thread of its own, so that no network makes the training wait.

    A failure prints a line. A logger that starts over is called again for the next record; another one is off until the
    run's next start, which hands over what it missed.

    Args:
        name: the logger's name in messages and in loggers.jsonl.
        call: returns the logger's object.
        records: returns the records in metrics.jsonl.
        progress: what loggers have got so far; None if this one starts over.
    """

    def __init__(self, name: str, call: Callable, records: Callable[[], list], progress: Progress | None) -> None:
        self._name, self._call, self._records, self._progress = name, call, records, progress
        self._logger, self._steps = None, {}
        self._queue, self._thread = SimpleQueue(), Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._thread.start()
        self.put()  # what it lacks: before the first record may lie an hour

    def put(self, *records: dict) -> None:
        """Hand over records, and those that could not be written before; returns at once."""
        if self._thread.is_alive():
            self._queue.put(records)

    def close(self) -> None:
        """Wait for what was handed over; leave a logger that does not answer for `CLOSE_S`."""
        self.put()
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            print(f"warning: logger {self._name} has not ended after {CLOSE_S:.0f} s, and may lack the last records")

    def _work(self) -> None:
        outcome = "failed and will be retried with the next record"
        if self._progress is not None:
            outcome = "is off until the next start"
        waiting = []
        for records in iter(self._queue.get, None):
            waiting += records
            if attempt(f"logger {self._name} {outcome}", self._hand_over, waiting):
                waiting = []
            elif self._progress is None:
                self._logger = None
            else:
                return
        if self._logger is not None:
            attempt(f"logger {self._name} was not closed", self._logger.close)

    def _hand_over(self, records: list[dict]) -> None:
        """Hand over records, after all earlier ones if the logger is new; none that it has already."""
        if getattr(self._logger, "is_outgrown", False):
            self._logger = self._logger.close()
        if self._logger is None:
            self._logger, records = self._call(), [*self._records(), *records]
            self._steps = {} if self._progress is None else self._progress.steps.get(self._name, {})
        for record in records:
            kind, step = record["kind"], record["step"]
            if step > self._steps.get(kind, -1) and step >= max(self._steps.values(), default=0):
                self._logger.write(dict(record))
                self._steps[kind] = step
                if self._progress is not None:
                    attempt("loggers.jsonl is not written", self._progress.note, self._name, kind, step)


def start_loggers(loggers: Mapping[str, Callable], folder: Path, facts: dict, records: Callable) -> list[Feed]:
    """Start the named loggers of a run with this folder and metadata, whose records the last function returns.

    Raises:
        OSError: the folder cannot be written.
    """
    lasting = {name for name, logger in loggers.items() if not getattr(logger, "starts_over", False)}
    progress = Progress(folder) if lasting else None  # no file where only TensorBoard is on
    facts, feeds = facts if progress is None else {**facts, "id": progress.id}, []
    for name, logger in loggers.items():
        call = partial(logger, folder, deepcopy(facts))  # a copy, of what checkpoints will hold
        # A file of one's own may move.
        feeds.append(Feed(os.path.basename(name), call, records, progress if name in lasting else None))
    return feeds


def build_loggers(args: Any) -> dict[str, Callable]:
    """Return the functions of `--logger` by their names; raises as `load_function`."""
    return {name: load_function("logger", args, name) for name in args.logger if name != "none"}


def no_logger(folder: Path, facts: dict) -> None:
    """Stand for `--logger none` in the table; nothing calls it."""
