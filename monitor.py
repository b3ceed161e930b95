"""Numbers leaving the process: means over a log window, TensorBoard and metrics.jsonl."""

import io
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from checkpointing.checkpoint import RunState
from collectives import all_gather
from errors import NonFiniteError, StorageError
from files import explain_failure, open_regular, read_bytes, sync_folder, write_atomically

# Fields of metrics.jsonl that depend on the machine, the moment and the number of processes; all others are functions
# of the run and the same after any restart.
MACHINE_FIELDS = {"time", "images_per_s", "data_wait", "memory_gib", "world_size"}

# What a curve is drawn of.
SCALARS = {"loss", "lr", "acc1", "acc5", "grad_norm", "images_per_s", "data_wait", "memory_gib"}


def non_finite_loss(step: int) -> str:
    """Return what is said of a step whose loss is not finite."""
    return (
        f"the loss of step {step} is not finite; stopped, and the last checkpoint is kept; "
        "try a lower --lr, a longer warm-up or --clip-grad-norm"
    )


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


class EventFile:
    """TensorBoard's points of a run, in one file that is made of the records of metrics.jsonl whenever it is opened.

    So a failed write, a power loss, or a clock that was set back cost no point and double none: TensorBoard reads the
    files of a folder in the order of their names, which hold the time.

    Args:
        folder: is made if it is not there; the run's earlier files in it are removed once this one is whole.
        records: those of metrics.jsonl.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, records: Iterable[dict]) -> None:
        folder.mkdir(exist_ok=True)
        earlier = [path for path in folder.iterdir() if _EVENTS.match(path.name)]
        latest = max((int(_EVENTS.match(path.name)[1]) for path in earlier), default=0)
        name = f"events.out.tfevents.{max(int(time.time()), latest + 1)}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(folder / name, "xb", buffering=0)  # noqa: SIM115
        try:
            # The second one tells a TensorBoard that is running to forget what it has read of the earlier files.
            start = SessionLog(status=SessionLog.START)
            self._write([Event(file_version="brain.Event:2"), Event(step=0, session_log=start), *map(_event, records)])
            for path in earlier:
                path.unlink()
        except BaseException:
            self.close()
            raise

    def _write(self, events: Iterable[Event]) -> None:
        payload = io.BytesIO()
        writer = RecordWriter(payload)
        for event in events:
            writer.write(event.SerializeToString())
        write_all(self._file, payload.getvalue())

    def add(self, record: dict) -> None:
        """Add the points of one more record; after an OSError the file is of no use."""
        self._write([_event(record)])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


_EVENTS = re.compile(r"events\.out\.tfevents\.(\d{1,18})\.")


def _event(record: dict) -> Event:
    """Return one record as TensorBoard reads it: a point of each curve."""
    values = [
        Summary.Value(tag=f"{record['kind']}/{name}", simple_value=value)
        for name, value in record.items()
        if name in SCALARS and value is not None
    ]
    return Event(step=record["step"], wall_time=record["time"], summary=Summary(value=values))


def write_all(file: io.FileIO, content: bytes) -> None:
    """Write bytes to an unbuffered file, which may take them in parts."""
    while content:
        content = content[file.write(content) :]


class Monitor:
    """Writes metrics.jsonl and TensorBoard's events of one run.

    Args:
        folder: the output folder; None for a monitor that writes nothing.
        run: the state of the run.
    """

    def __init__(self, folder: Path | None, run: RunState) -> None:
        self.folder = folder
        self.run = run
        self._pending = b""  # what a full disk did not take; written with the next record
        self._failed = set()
        self._events = None

    def open(self) -> None:
        """Begin to write; of a resumed run, drop what an earlier process wrote beyond its state.

        Raises:
            StorageError: the records of a resumed run cannot be read or written.
        """
        try:
            records = self._truncate(self.run.step, self.run.is_evaluated) if self.run.is_resumed else self._records()
            path = self.folder / "metrics.jsonl"
            descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            sync_folder(self.folder)  # or a power failure could leave a checkpoint, and no file of its records
        except OSError as error:
            raise StorageError(f"metrics.jsonl: {explain_failure(error, self.folder, 0)}") from error
        self._file = open(descriptor, "ab", buffering=0)  # noqa: SIM115
        self._attempt("tb/", self._open_events, records)

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        if self.folder is not None:
            self._attempt("metrics.jsonl", self._write_pending)
            if self._events is None:
                self._attempt("tb/", self._open_events)
            self._file.close()

    def _records(self) -> list[dict]:
        """Return the records in metrics.jsonl, but for lines that are torn by a kill or are no records."""
        try:
            lines = read_bytes(self.folder / "metrics.jsonl").splitlines()
        except FileNotFoundError:
            return []
        return [record for record in map(_parse_record, lines) if record is not None]

    def _truncate(self, step: int, is_evaluated: bool) -> list[dict]:
        """Drop the records that a resumed run will write again, and a last line torn by a kill; return the others."""
        kept = [r for r in self._records() if r["step"] < step + (r["kind"] == "train" or is_evaluated)]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        write_atomically(self.folder / "metrics.jsonl", lambda file: file.write(text.encode()))
        return kept

    def _open_events(self, records: list[dict] | None = None) -> None:
        """Make TensorBoard's file anew, where metrics.jsonl has all its records; take them as given, if they are."""
        if not self._pending:
            self._events = EventFile(self.folder / "tb", self._records() if records is None else records)

    def write(self, kind: str, step: int, epoch: int, **values: Any) -> None:
        """Write one record: `kind` is train, val or val_ema; `step` the steps done when it was measured."""
        if self.folder is None:
            return
        # Neither JSON nor a curve has a place for infinity, which a gradient norm is where the loss scale is too large.
        values = {name: None if _is_infinite(value) else value for name, value in values.items()}
        record = {"kind": kind, "step": step, "epoch": epoch, **values, "time": round(time.time(), 3)}
        self._pending += json.dumps(record, allow_nan=False).encode() + b"\n"
        self._attempt("metrics.jsonl", self._write_pending)
        self._attempt("tb/", self._add_points, record)

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

    def _add_points(self, record: dict) -> None:
        if self._events is None:
            self._open_events()
            return
        try:
            self._events.add(record)
        except OSError:
            self._events.close()
            self._events = None  # the next record makes it anew, with this one
            raise

    def sync(self) -> None:
        """Make all records durable; called before a checkpoint that is later than they are."""
        if self.folder is not None:
            self._attempt("metrics.jsonl", self._write_pending)
            self._attempt("metrics.jsonl", os.fsync, self._file.fileno())


def _parse_record(line: bytes) -> dict | None:
    """Return one line of metrics.jsonl, or None for what is none."""
    try:
        record = json.loads(line)
        is_record = isinstance(record["kind"], str) and type(record["step"]) is type(record["epoch"]) is int
        numbers = [value for name, value in record.items() if name in SCALARS and value is not None] + [record["time"]]
        are_numbers = all(type(number) is float or abs(number) < 1 << 62 for number in numbers)
        is_record = is_record and are_numbers and 0 <= record["step"] < 1 << 62
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return record if is_record else None


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
