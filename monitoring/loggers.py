"""What shows the records of a run beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow, or code of one's own.

A logger is a function of the run's folder and its metadata, those of run.json and a lasting `id` of the run, that
returns an object with two methods: `write(record)` takes a record as it stands in metrics.jsonl, and `close()` comes
at the end of every start. A logger gets the records of its run in the order of their steps, none of them twice, and
those too that were written while it was off.

One that has `starts_over` set makes its output anew whenever it is called, and gets all records each time.
"""

import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from errors import warn_on_failure
from settings.custom_code import load_function

# Seconds for which the end of a run waits for a logger that is still sending.
CLOSE_S = 30.0


class Feed:
    """Hands the records of a run to one logger, in a thread of its own, so that no network makes the training wait.

    A failure prints a line. A logger that starts over is called again for the next record; another one is off until the
    run's next start, which hands over what it missed.

    Args:
        name: the logger's name in messages and in loggers.jsonl.
        call: returns the logger's object.
        records: returns the records in metrics.jsonl.
        progress: a `logger_progress.Progress`, what loggers have got so far; None if this one starts over.
    """

    def __init__(self, name: str, call: Callable, records: Callable[[], list], progress: Any | None) -> None:
        self._name, self._call, self._records, self._progress = name, call, records, progress
        self._logger: Any = None  # what `call` has returned
        self._steps = {}
        self._queue = SimpleQueue()
        # A daemon, or a logger whose network hangs would keep the process from ending.
        self._thread = Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._thread.start()
        # An empty hand-over makes it read what it lacks: before the first record may lie an hour.
        self.put()

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
        starts_over = self._progress is None
        outcome = "failed and will be retried with the next record" if starts_over else "is off until the next start"
        waiting = []
        for records in iter(self._queue.get, None):
            waiting += records
            if warn_on_failure(f"logger {self._name} {outcome}", self._hand_over, waiting):
                waiting = []
            elif starts_over:
                self._logger = None
            else:
                return
        if self._logger is not None:
            warn_on_failure(f"logger {self._name} was not closed", self._logger.close)

    def _hand_over(self, records: list[dict]) -> None:
        """Hand over records, after all earlier ones if the logger is new; none that it has already."""
        if getattr(self._logger, "is_outgrown", False):
            self._logger.close()
            self._logger = None
        if self._logger is None:
            logger = self._call()
            records = [*self._records(), *records]
            self._logger = logger
            self._steps = {} if self._progress is None else self._progress.steps.get(self._name, {})
        for record in records:
            kind, step = record["kind"], record["step"]
            # By kind, since a step may have a record of each; and never backwards, since W&B drops a smaller step.
            if step > self._steps.get(kind, -1) and step >= max(self._steps.values(), default=0):
                self._logger.write(dict(record))
                self._steps[kind] = step
                if self._progress is not None:
                    warn_on_failure("loggers.jsonl is not written", self._progress.note, self._name, kind, step)


def start_loggers(loggers: Mapping[str, Callable], folder: Path, facts: dict, records: Callable) -> list[Feed]:
    """Start the named loggers of a run with this folder and metadata, whose records the last function returns.

    Raises:
        OSError: the folder cannot be written.
    """
    # TensorBoard's file is made anew at each start, so that nothing need be kept of what it has got.
    lasting = {name for name, logger in loggers.items() if not getattr(logger, "starts_over", False)}
    progress = None
    if lasting:
        from monitoring.logger_progress import Progress

        progress = Progress(folder)
        facts = {**facts, "id": progress.id}
    feeds = []
    for name, logger in loggers.items():
        # A copy, because a logger may change it and checkpoints will hold the facts.
        call = partial(logger, folder, deepcopy(facts))
        # loggers.jsonl has the name without its folder: a file of one's own may move between two starts.
        feeds.append(Feed(os.path.basename(name), call, records, progress if name in lasting else None))
    return feeds


def build_loggers(names: list[str]) -> dict[str, Callable]:
    """Return the functions of `--logger` by their names; raises as `load_function`."""
    return {name: load_function("logger", name) for name in names if name != "none"}


def no_logger(folder: Path, facts: dict) -> None:
    """Stand for `--logger none` in the table; nothing calls it."""
