"""What each logger of a run has got, for loggers that go on with one output over all starts."""

import json
import os
import secrets
from pathlib import Path
from threading import Lock
from typing import Any

from files import open_regular, read_bytes


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
        self._pending = b""  # lines that could not be written
        self._lock = Lock()  # each logger has a thread
        for line in read_bytes(path).splitlines():
            try:
                name, kind, step = json.loads(line)
                self.steps.setdefault(name, {})[kind] = step
            except (ValueError, TypeError):
                continue  # a power failure may damage a line
        # Drawn at random, since a run that `--overwrite` begins in the same folder is another one to W&B and MLflow.
        if "id" not in self.steps.get("run", ()):
            self.note("run", "id", secrets.token_hex(4))
        self.id = self.steps["run"]["id"]

    def note(self, name: str, kind: str, step: Any) -> None:
        """Keep that a logger has got a record; what cannot be written now, as on a full disk, is with the next note."""
        self.steps.setdefault(name, {})[kind] = step
        with self._lock:
            self._pending += f"{json.dumps([name, kind, step])}\n".encode()
            self._pending = self._pending[os.write(self._file, self._pending) :]
