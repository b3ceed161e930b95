"""What shows the records of a run beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow, or code of one's own.

A logger is a function of the run's folder and its metadata, those of run.json and a lasting `id` of the run, that
returns an object with two methods: `write(record)` takes a record as it stands in metrics.jsonl, and `close()` comes
at the end of every start. A logger gets the records of its run in the order of their steps, none of them twice, and
those too that were written while it was off.

One that has `starts_over` set makes its output anew whenever it is called, and gets all records each time.
"""

import copy
import json
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from errors import attempt
from files import open_regular, read_bytes
from monitoring.events import EventFile, curves
from settings.custom_code import load_function

# Seconds for which the end of a run waits for a logger that is still sending.
CLOSE_S = 60.0


class Progress:
    """loggers.jsonl: the run's id, and the last step of each kind of records that each logger has got.

    A line is one write of the system, so that a kill can neither tear it nor come long after the logger's own write.

    Raises:
        OSError: the file cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "loggers.jsonl"
        self._file = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.steps, self.id = {}, ""
        for line in read_bytes(path).splitlines():
            with suppress(ValueError, TypeError):  # a power failure may damage it
                name, kind, value = json.loads(line)
                if name == "run":
                    self.id = value
                else:
                    self.steps.setdefault(name, {})[kind] = value
        if not self.id:
            self.id = secrets.token_hex(4)
            self.note("run", "id", self.id)

    def note(self, *row: Any) -> None:
        """Add a line: a logger, a kind of records and a step."""
        os.write(self._file, f"{json.dumps(row)}\n".encode())


class Feed:
    """Hands the records of a run to one logger, in a thread of its own, so that no network makes the training wait.

    A failure prints a line. A logger that starts over is called again for the next record; another one is off until the
    run's next start, which hands over what it missed.

    Args:
        name: the logger's name among the options.
        logger: the function.
        folder: the run's folder.
        facts: the run's metadata.
        records: returns those in metrics.jsonl.
        progress: what loggers of earlier starts have got; None if this one starts over.
    """

    def __init__(
        self, name: str, logger: Callable, folder: Path, facts: dict, records: Callable, progress: Progress | None
    ) -> None:
        # A file of one's own may move.
        self.name, self._call = os.path.basename(name), lambda: logger(folder, copy.deepcopy(facts))
        self._records, self._progress = records, progress
        self._steps = progress.steps.get(self.name, {}) if progress else {}
        self._logger, self._is_off = None, False
        self._queue = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"logger {self.name}", daemon=True)
        self._thread.start()

    def put(self, record: dict) -> None:
        """Hand over a record; returns at once."""
        self._queue.put(record)

    def close(self) -> None:
        """Wait for what was handed over; leave a logger that does not answer for `CLOSE_S`."""
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            print(f"warning: logger {self.name} has not ended after {CLOSE_S:.0f} s, and may lack the last records")

    def _work(self) -> None:
        self._update(None)  # before the first step may lie an hour of compiling
        while (record := self._queue.get()) is not None:
            self._update(record)
        if self._logger is not None:
            attempt(f"logger {self.name} is not closed", self._logger.close)

    def _update(self, record: dict | None) -> None:
        result = "is written again with the next record" if self._progress is None else "is off until the next start"
        if self._is_off or attempt(f"logger {self.name} {result}", self._hand_over, record):
            return
        self._is_off = self._progress is not None
        if self._logger is not None:
            with suppress(Exception):  # the first failure is the one to report
                self._logger.close()
        self._logger = None

    def _hand_over(self, record: dict | None) -> None:
        """Hand over a record, and all earlier ones if the logger is new; not those that it has already."""
        records = [] if record is None else [record]
        if self._logger is None:
            self._logger = self._call()
            self._steps = self._steps if self._progress else {}
            records = [*self._records(), *records]
        for each in records:
            kind, step = each["kind"], each["step"]
            if step > self._steps.get(kind, -1) and step >= max(self._steps.values(), default=0):
                self._logger.write(dict(each))
                self._steps[kind] = step
                if self._progress is not None:
                    self._progress.note(self.name, kind, step)


def start_loggers(loggers: Mapping[str, Callable], folder: Path, facts: dict, records: Callable) -> list[Feed]:
    """Start the named loggers; arguments as of `Feed`. Raises OSError if the run's folder cannot be written."""
    lasting = [name for name, logger in loggers.items() if not getattr(logger, "starts_over", False)]
    progress = Progress(folder) if lasting else None  # no file where only TensorBoard is on
    facts = facts if progress is None else {**facts, "id": progress.id}
    return [
        Feed(name, logger, folder, facts, records, progress if name in lasting else None)
        for name, logger in loggers.items()
    ]


def build_loggers(args: Any) -> dict[str, Callable]:
    """Return the functions of `--logger` by their names; raises as `load_function`."""
    known = {"tensorboard": EventFile, "wandb": Wandb, "mlflow": MLflow}
    names = [name for name in args.logger if name != "none"]
    return {name: known.get(name) or load_function("logger", args, name) for name in names}


class Wandb:
    """Weights & Biases: the same run at each start, in the project of WANDB_PROJECT, by default touchstone."""

    def __init__(self, folder: Path, facts: dict) -> None:
        import wandb

        name, project = os.environ.get("WANDB_NAME", folder.name), os.environ.get("WANDB_PROJECT", "touchstone")
        self._run = wandb.init(
            id=facts["id"], resume="allow", dir=folder, name=name, project=project, config=facts["args"],
            allow_val_change=True, settings=wandb.Settings(console="off"),  # log.txt has the console
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")

    def write(self, record: dict) -> None:
        """Add the points of a record."""
        if points := curves(record):
            # W&B takes rows of rising numbers only, and an evaluation may be of the start after its training's.
            row = 2 * record["step"] + (record["kind"] != "train")
            self._run.log({"step": record["step"], **points}, step=row)

    def close(self) -> None:
        """Send the rest."""
        self._run.finish()


class MLflow:
    """MLflow: the same run at each start, in the experiment of MLFLOW_EXPERIMENT_NAME, by default touchstone."""

    def __init__(self, folder: Path, facts: dict) -> None:
        import mlflow

        experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "touchstone")).experiment_id
        self._client, self._new_point = mlflow.MlflowClient(), mlflow.entities.Metric
        runs = self._client.search_runs([experiment], f"tags.touchstone = '{facts['id']}'")
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, "RUNNING")
        else:
            run = self._client.create_run(experiment, run_name=folder.name, tags={"touchstone": facts["id"]})
            self._id = run.info.run_id
            for name, value in facts["args"].items():
                self._client.log_param(self._id, name, str(value)[:500])

    def write(self, record: dict) -> None:
        """Add the points of a record."""
        time_ms, step = round(1000 * record["time"]), record["step"]
        points = [self._new_point(name, value, time_ms, step) for name, value in curves(record).items()]
        self._client.log_batch(self._id, points)

    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._id)
