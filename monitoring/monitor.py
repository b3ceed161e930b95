"""Numbers leaving the process: TensorBoard and metrics.jsonl."""

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

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from checkpointing.checkpoint import RunState
from errors import StorageError
from files import explain_failure, open_regular, read_bytes, sync_folder, write_atomically

# Fields of metrics.jsonl that depend on the machine, the moment and the number of processes; all others are functions
# of the run and the same after any restart.
MACHINE_FIELDS = {"time", "images_per_s", "data_wait", "memory_gib", "world_size"}

# Fields that say where, when and of how much the others were measured; each of those that is a number has a curve.
NOT_DRAWN = {"kind", "step", "epoch", "time", "n", "world_size"}


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
        if name not in NOT_DRAWN and isinstance(value, float | int)
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
        try:
            return read_records(self.folder)
        except FileNotFoundError:
            return []

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
        """Write one record: `kind` is train or an evaluation's name; `step` the steps done when it was measured.

        Each value is a number, None, or a list of such, which has no curve.
        """
        if self.folder is None:
            return
        values = {name: _without_infinity(value) for name, value in values.items()}
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


def read_records(folder: Path) -> list[dict]:
    """Return the records in a run's metrics.jsonl, but for lines that are torn by a kill or are no records.

    Raises:
        FileNotFoundError: no run has written there.
    """
    lines = read_bytes(folder / "metrics.jsonl").splitlines()
    return [record for record in map(_parse_record, lines) if record is not None]


def _parse_record(line: bytes) -> dict | None:
    """Return one line of metrics.jsonl, or None for what is none."""
    try:
        record = json.loads(line)
        is_record = isinstance(record["kind"], str) and type(record["step"]) is type(record["epoch"]) is int
        values = [value for name, value in record.items() if name != "kind"]
        is_record = is_record and all(map(_is_value, values)) and record["time"] is not None
        is_record = is_record and record["step"] >= 0
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return record if is_record else None


def _is_value(value: Any) -> bool:
    """Tell whether a value is one that a record can have: a number that a curve can hold, None, or a list of such."""
    if isinstance(value, list):
        return all(map(_is_value, value))
    return value is None or type(value) is float or (type(value) is int and abs(value) < 1 << 62)


def _without_infinity(value: Any) -> Any:
    """Return a value with None for infinity, as of a gradient norm where the loss scale is too large: JSON has none."""
    if isinstance(value, list):
        return [_without_infinity(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
