"""Read the records of a run, metrics.jsonl, and summarize them by epochs."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from errors import counted
from files import read_bytes


def read_records(folder: Path, note: Callable[[str], None] | None = None) -> list[dict]:
    """Return the records in a run's metrics.jsonl, without damaged lines; FileNotFoundError if it has none.

    `note` is called with a line about damaged lines, except a last one, which a kill truncates.
    """
    records = [_parse_record(line) for line in read_bytes(folder / "metrics.jsonl").splitlines()]
    if note is not None and (num_damaged := records[:-1].count(None)):
        note(f"metrics.jsonl in {folder}: {counted(num_damaged, 'line')} cannot be read, and will be left out")
    return [record for record in records if record is not None]


def _parse_record(line: bytes) -> dict | None:
    """Return the record in one line of metrics.jsonl, or None if there is none."""
    try:
        record = json.loads(line)
        is_record = isinstance(record["kind"], str) and type(record["step"]) is type(record["epoch"]) is int
        is_record = is_record and record["step"] >= 0 and record["time"] is not None
        is_record = is_record and all(_is_value(value) for name, value in record.items() if name != "kind")
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return record if is_record else None


def _is_value(value: Any) -> bool:
    """Tell whether a value may be in a record: a number that a curve can hold, None, or a list of these."""
    if isinstance(value, list):
        return all(map(_is_value, value))
    if type(value) is float:
        return math.isfinite(value)
    return value is None or (type(value) is int and abs(value) < 1 << 62)
