"""Write the records of a run: to metrics.jsonl, and from there to its loggers."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from checkpointing.checkpoint import RunState
from errors import StorageError, counted, warn_on_failure
from files import explain_failure, open_regular, read_bytes, sync_folder, write_atomically
from monitoring.loggers import start_loggers

# Kinds of records that are written before an epoch is saved; the others, of evaluations, come after that.
OF_TRAINING = {"train", "epoch"}


class Monitor:
    """Writes metrics.jsonl of one run, and hands its records to loggers by name; nothing if the folder is None."""

    def __init__(self, folder: Path | None, run: RunState, loggers: Mapping[str, Callable]) -> None:
        self.folder, self.run, self._loggers = folder, run, loggers
        self.images_per_s = None  # of the newest record that tells it
        self._pending = b""  # records that could not be written, as on a full disk; written with the next one

    def open(self) -> None:
        """Begin to write; in a resumed run, drop records that an earlier process wrote beyond the resumed state.

        Raises:
            StorageError: the records of a resumed run cannot be read or written.
        """
        try:
            records = self._truncate() if self.run.is_resumed else self.records()
            self._open_file()
            # After the records are cut: a logger first reads those that it lacks.
            self._feeds = start_loggers(self._loggers, self.folder, self.run.facts, self.records)
            # Otherwise a power failure could leave a checkpoint without its records.
            sync_folder(self.folder)
        except OSError as error:
            raise StorageError(f"metrics.jsonl: {explain_failure(error, self.folder, 0)}") from error
        # Hours of training in all earlier starts of the run.
        self._hours = max((r["hours"] for r in records if isinstance(r.get("hours"), float)), default=0.0)
        self._opened_s = time.monotonic()

    def _open_file(self) -> None:
        # Unbuffered and appending: each line is one write of the system, which a kill cannot tear.
        descriptor = open_regular(self.folder / "metrics.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._file = open(descriptor, "ab", buffering=0)  # noqa: SIM115

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        if self.folder is not None:
            if lacking := self.lacking():
                print(f"warning: {lacking}")
            for feed in self._feeds:
                feed.close()
            self._file.close()

    def records(self, note: Callable[[str], None] | None = None) -> list[dict]:
        """Return the records in metrics.jsonl, as `read_records`; none if there is no file."""
        if self.folder is None:
            return []
        try:
            return read_records(self.folder, note)
        except FileNotFoundError:
            return []

    def _truncate(self) -> list[dict]:
        """Drop the records that a resumed run will write again, and a truncated last line; return the others."""
        kept = []
        for record in self.records(print):
            # Those of the resumed step itself stay if they came before its checkpoint: a save before the evaluation,
            # and one after it, are of the same step.
            is_of_checkpoint = record["kind"] in OF_TRAINING or self.run.is_evaluated
            if record["step"] < self.run.step or (is_of_checkpoint and record["step"] == self.run.step):
                kept.append(record)
        text = "".join(json.dumps(record) + "\n" for record in kept)
        # Not written in place, where a kill in the middle would cost the records of all earlier starts.
        write_atomically(self.folder / "metrics.jsonl", text.encode())
        return kept

    def write(self, kind: str, step: int, epoch: int, **values: Any) -> None:
        """Write one record: `kind` is in `OF_TRAINING` or an evaluation's name; `step` the steps done at that time.

        Each value is a number, a tensor of one number, None, or a list of these, which has no curve.
        """
        if self.folder is None:
            return
        # Only rank 0, and only here, turns tensors into numbers: a read waits for the device.
        values = {name: _as_json(value) for name, value in values.items()}
        self.images_per_s = values.get("images_per_s", self.images_per_s)
        hours = self._hours + (time.monotonic() - self._opened_s) / 3600
        record = {"kind": kind, "step": step, "epoch": epoch, **values, "hours": hours, "time": round(time.time(), 3)}
        self._pending += json.dumps(record, allow_nan=False).encode() + b"\n"
        self._write_pending()
        for feed in self._feeds:
            feed.put(record)

    def _write_pending(self) -> None:
        def write() -> None:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]

        if not warn_on_failure(f"metrics.jsonl in {self.folder} is not written", write):
            # For the next try: a network disk may have lost the open file (ESTALE), and would refuse it for ever.
            try:
                self._open_file()
            except OSError:
                return

    def lacking(self) -> str:
        """Write what could not be written before; return which records are missing then, in words, or nothing."""
        self._write_pending()
        number = len(self._pending.splitlines())
        return f"metrics.jsonl in {self.folder} lacks its last {counted(number, 'record')}" if number else ""

    def sync(self) -> int | None:
        """Hand all records to the system; called before a checkpoint is begun.

        Return the descriptor of metrics.jsonl, to be made durable before the checkpoint; None without a folder.
        """
        if self.folder is None:
            return None
        self._write_pending()
        return self._file.fileno()


def _as_json(value: Any) -> Any:
    """Return a value as JSON can hold it: None for infinity, such as a gradient norm under too large a loss scale."""
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    value = value.item() if isinstance(value, Tensor) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_records(folder: Path, note: Callable[[str], None] | None = None) -> list[dict]:
    """Return the records in a run's metrics.jsonl, without damaged lines; FileNotFoundError if it has none.

    `note` is called with a line about damaged lines, except a last one, which a kill truncates.
    """
    records = [_parse_record(line) for line in read_bytes(folder / "metrics.jsonl").splitlines()]
    num_damaged = records[:-1].count(None)
    if note is not None and num_damaged > 0:
        note(f"metrics.jsonl in {folder}: {counted(num_damaged, 'line')} cannot be read and are skipped")
    return [record for record in records if record is not None]


def _parse_record(line: bytes) -> dict | None:
    """Return the record in one line of metrics.jsonl, or None if there is none."""
    try:
        record = json.loads(line)
        is_record = isinstance(record["kind"], str) and type(record["step"]) is type(record["epoch"]) is int
        is_record = is_record and all(_is_value(value) for name, value in record.items() if name != "kind")
        is_record = is_record and record["step"] >= 0 and math.isfinite(record["time"] + (record.get("hours") or 0.0))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return record if is_record else None


def _is_value(value: Any) -> bool:
    """Tell whether a value may be in a record: a number that a curve can hold, None, or a list of these."""
    if isinstance(value, list):
        return all(map(_is_value, value))
    if type(value) is float:
        # Python reads NaN and Infinity, which are no JSON: other readers would stop at them.
        return math.isfinite(value)
    return value is None or (type(value) is int and abs(value) < 1 << 62)
