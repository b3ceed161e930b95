"""Numbers leaving the process: means over a log window, TensorBoard, metrics.jsonl and status.json."""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from checkpoint import RunState
from errors import NonFiniteError, PreemptedError
from files import write_atomically
from utils import all_gather, is_main_process

# Fields of metrics.jsonl that depend on the machine, the moment and the number of processes; all others are functions
# of the run and the same after any restart.
MACHINE_FIELDS = {"time", "images_per_s", "data_wait", "memory_gib", "world_size"}

# Starts in a row from one and the same step after which nothing starts a run again by itself.
MOST_STARTS = 3

# What a curve is drawn of.
SCALARS = {"loss", "lr", "acc1", "acc5", "grad_norm", "images_per_s", "data_wait", "memory_gib"}


def non_finite_loss(step: int) -> str:
    """Return what is said of a step whose loss is not finite."""
    return (
        f"the loss of step {step} is not finite; stopped, and the last checkpoint is kept; "
        "try a lower --lr, a longer warm-up or --clip-grad-norm"
    )


def note_start(folder: Path, run: RunState) -> dict:
    """Return from where a run starts, and the how many-th start in a row from there this is."""
    position = [run.step, run.is_evaluated]
    before = read_status(folder).get("start")
    before = before if isinstance(before, dict) else {}
    return {"position": position, "count": before.get("count", 0) + 1 if before.get("position") == position else 1}


def read_status(folder: Path) -> dict:
    """Return what status.json holds; nothing where it is not there or not readable."""
    try:
        status = json.loads((folder / "status.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


class LogWindow:
    """Sums over all images and processes since the last log line; part of the checkpoint.

    Each shard's numbers stay on the device until somebody asks. They are then gathered and added in float64 in the
    order of (step, shard), so that a line is the same in every bit at any world size and after any restart.

    Args:
        num_local_shards: shards that this process adds a step.
    """

    def __init__(self, num_local_shards: int = 1) -> None:
        self.num_local_shards = num_local_shards
        self._rows = []  # (loss, top-1 hits, top-5 hits, images) of each local shard since the last gather
        self._first_step = None
        self._sums = [0.0, 0.0, 0.0, 0.0]

    def update(self, step: int, loss: torch.Tensor, correct1: torch.Tensor, correct5: torch.Tensor, n: int) -> None:
        """Take one shard's mean loss and hits, on the device and unread."""
        if self._first_step is None:
            self._first_step = step
        self._rows.append((loss.detach(), correct1, correct5, n))

    def gather(self) -> None:
        """Add what has come since the last call. Collective: every rank must call it, after the same step.

        Raises:
            NonFiniteError: a loss is not finite; names the first step, the same one on every rank.
        """
        if not self._rows:
            return
        losses, correct1, correct5, counts = zip(*self._rows, strict=True)
        columns = [torch.stack(column).cpu().double() for column in (losses, correct1, correct5)]
        counts = torch.tensor(counts, dtype=torch.float64)
        mine = torch.stack([columns[0] * counts, columns[1], columns[2], counts], dim=1)
        by_rank = [rows.view(-1, self.num_local_shards, 4) for rows in all_gather(mine)]
        for offset, shards in enumerate(torch.cat(by_rank, dim=1).tolist()):
            for row in shards:
                if not math.isfinite(row[0]):
                    raise NonFiniteError(non_finite_loss(self._first_step + offset))
                self._sums = [total + value for total, value in zip(self._sums, row, strict=True)]
        self._rows, self._first_step = [], None

    def read(self) -> tuple[dict[str, float], int]:
        """Return the means since the last call and the number of images behind them, and begin a new window."""
        loss, correct1, correct5, images = self._sums
        self._sums = [0.0, 0.0, 0.0, 0.0]
        return {"loss": loss / images, "acc1": 100 * correct1 / images, "acc5": 100 * correct5 / images}, int(images)

    def state_dict(self) -> dict:
        """Return the sums; `gather` must have been called."""
        return {"sums": list(self._sums)}

    def load_state_dict(self, state: dict) -> None:
        """Restore the sums."""
        self._sums = list(state["sums"])


class Monitor:
    """Writes metrics.jsonl, TensorBoard's events and status.json for one run.

    Args:
        folder: the output folder; None for a monitor that writes nothing.
        run: the state of the run; where it is resumed, what an earlier process wrote beyond it is dropped.
    """

    def __init__(self, folder: Path | None, run: RunState) -> None:
        self.folder = folder
        self.run = run
        if folder is None:
            return
        kept = self._truncate(run.step, run.is_evaluated) if run.is_resumed else []
        self._file = open(folder / "metrics.jsonl", "ab", buffering=0)  # noqa: SIM115
        self._pending = b""  # what a full disk did not take; written with the next record
        self._failed = set()
        # TensorBoard forgets what the earlier process wrote from this step on. If the resumed step is to be evaluated
        # again, all points of that step go, and the training one is written once more.
        purge_step = run.step + run.is_evaluated if run.is_resumed else None
        self._writer = SummaryWriter(folder / "tb", purge_step=purge_step)
        for record in kept[-1:]:
            if record["step"] == purge_step:
                self._add_scalars(record)
        self.status("running")

    @classmethod
    def of_run(cls, folder: str, run: RunState) -> "Monitor":
        """Return the one that writes on rank 0, and silent ones elsewhere."""
        return cls(Path(folder) if is_main_process() else None, run)

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, PreemptedError):
            self.status("preempted", str(error))
        elif error is not None:
            self.status("failed", f"{kind.__name__}: {error}".rstrip(": "))
        if self.folder is not None:
            self._attempt("metrics.jsonl", self._write_pending)
            self._file.close()
            self._attempt("tb/", self._writer.close)

    def _truncate(self, step: int, is_evaluated: bool) -> list[dict]:
        """Drop the records that a resumed run will write again, and a last line torn by a kill."""
        path = self.folder / "metrics.jsonl"
        kept = []
        for line in path.read_bytes().splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
                is_kept = record["step"] < step + (record["kind"] == "train" or is_evaluated)
            except (ValueError, TypeError, KeyError):  # torn
                continue
            if is_kept:
                kept.append(record)
        text = "".join(json.dumps(record) + "\n" for record in kept)
        write_atomically(path, lambda file: file.write(text.encode()))
        return kept

    def write(self, kind: str, step: int, epoch: int, **values: Any) -> None:
        """Write one record: `kind` is train, val or val_ema; `step` the steps done when it was measured."""
        if self.folder is None:
            return
        # Neither JSON nor a curve has a place for infinity, which a gradient norm is where the loss scale is too large.
        values = {name: None if _is_infinite(value) else value for name, value in values.items()}
        record = {"kind": kind, "step": step, "epoch": epoch, **values, "time": round(time.time(), 3)}
        self._pending += json.dumps(record, allow_nan=False).encode() + b"\n"
        self._attempt("metrics.jsonl", self._write_pending)
        self._attempt("tb/", self._add_scalars, record)

    def _attempt(self, name: str, write: Callable[..., None], *args: Any) -> None:
        """Write what no run may end for; a failure is said once for each name."""
        try:
            write(*args)
        except OSError as error:
            if name not in self._failed:
                self._failed.add(name)
                print(f"warning: {name} in {self.folder} is not written: {error.strerror or error}; training goes on")

    def _write_pending(self) -> None:
        while self._pending:
            self._pending = self._pending[self._file.write(self._pending) :]

    def _add_scalars(self, record: dict) -> None:
        for name, value in record.items():
            if name in SCALARS and value is not None:
                self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"], walltime=record["time"])
        self._writer.flush()

    def sync(self) -> None:
        """Make all records durable; called before a checkpoint that is later than they are."""
        if self.folder is not None:
            self._attempt("metrics.jsonl", self._write_pending)
            self._attempt("metrics.jsonl", os.fsync, self._file.fileno())

    def status(self, state: str, reason: str = "") -> None:
        """Replace status.json, which tells what became of the run: running, preempted, finished or failed.

        torchrun turns every exit code into 1, so this file is the truth.
        """
        if self.folder is not None:
            self._attempt("status.json", write_status, self.folder, state, self.run.step, reason)


def write_status(folder: Path, state: str, step: int, reason: str = "", start: dict | None = None) -> None:
    """Replace a run's status.json; as `Monitor.status`.

    `requeue` tells a job script whether to start the run again: where it was preempted, unless it has been, time and
    again, without getting anywhere.

    Args:
        folder: the output folder.
        state: running, preempted, finished or failed.
        step: steps done.
        reason: why it stopped.
        start: what `note_start` returned; by default, what the file says already.
    """
    start = start or read_status(folder).get("start")
    if not isinstance(start, dict) or {"position", "count"} - start.keys():
        start = {"position": [step, False], "count": 1}
    is_stuck = start["position"][0] == step and start["count"] >= MOST_STARTS
    status = {
        "state": state,
        "reason": reason,
        "step": step,
        "requeue": state == "preempted" and not is_stuck,
        "start": start,
        "time": round(time.time(), 3),
    }
    write_atomically(folder / "status.json", lambda file: file.write(json.dumps(status).encode() + b"\n"))


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
