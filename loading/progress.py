"""Show the progress of long work: a line that is rewritten in place on a terminal, else a line every few seconds."""

import math
import os
import re
import sys
import time
import unicodedata
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TextIO

from errors import one_line

# Seconds between two lines where there is no terminal, and between two updates of a live line.
_PROGRESS_S, _LIVE_S = 5.0, 0.2


_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[^\[])")


def without_escapes(text: str) -> str:
    """Return a text without the escapes that move a terminal's cursor or colour it."""
    return _ESCAPES.sub("", text)


class _Tapped:
    """A stream that calls functions before and after it writes each text; its other attributes are the stream's."""

    def __init__(self, stream: TextIO, before: Callable[[str], None], after: Callable[[str], None]) -> None:
        self._stream, self._before, self._after = stream, before, after

    def write(self, text: str) -> int:
        self._before(text)
        num_written = self._stream.write(text)
        self._after(text)
        return num_written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Tap:
    """Calls functions with each text that Python writes to its standard streams from now on.

    Args:
        after: called after each write with the stream's name and the text.
        before: called likewise before each write.
    """

    def __init__(self, after: Callable[[str, str], None], before: Callable[[str, str], None] = lambda *_: None) -> None:
        self._streams = {}
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            self._streams[name] = stream, _Tapped(stream, partial(before, name), partial(after, name))
            setattr(sys, name, self._streams[name][1])

    def remove(self) -> None:
        """Put the streams back, except those that have been replaced since."""
        for name, (stream, tapped) in self._streams.items():
            if getattr(sys, name) is tapped:
                setattr(sys, name, stream)


def is_terminal(stream: Any) -> bool:
    """Tell whether a stream is a terminal on which a line can be rewritten."""
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


class LiveLine:
    """The last line of a terminal, rewritten in place; other text that Python writes meanwhile appears above it.

    Using a library, with our substitute where it is not installed, would take more code. The cursor waits at the line's
    beginning: a terminal that is made narrower may wrap or cut the line, and all of it is behind the cursor either way.

    Args:
        stream: where the line is shown, if that is a terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.is_live = stream, is_terminal(stream)
        self._is_shown, self._is_at_start, self._due_s = False, True, -math.inf
        self._tap = None

    @property
    def is_due(self) -> bool:
        """Whether it is time to update the line."""
        return self.is_live and time.monotonic() >= self._due_s

    def show(self, *fields: str) -> None:
        """Rewrite the line with as many fields as the terminal has room for now."""
        self._tap = self._tap or Tap(self._note_end, self._clear_way)
        self._due_s = time.monotonic() + _LIVE_S
        if not self._is_at_start:  # other output has not ended its line
            return
        encoding = self.stream.encoding
        fields = [one_line(field).encode(encoding, "backslashreplace").decode(encoding) for field in fields]
        # Leave the last column free: some terminals begin a new line behind it.
        self._write(fit(fields, columns(self.stream) - 1) + "\r")
        self._is_shown = True

    def _write(self, text: str) -> None:
        # By print, which is silent on all processes but the first; the escape clears the screen from the cursor on.
        print(f"\x1b[J{text}", end="", file=self.stream, flush=True)

    def _clear_way(self, *_: str) -> None:
        if self._is_shown:
            self._write("")
            self._is_shown = False

    def _note_end(self, name: str, text: str) -> None:
        if text and is_terminal(getattr(sys, name)):
            self._is_at_start = text.endswith("\n")

    def close(self) -> None:
        """Remove the line from the screen."""
        self._clear_way()
        if self._tap is not None:
            self._tap.remove()
            self._tap = None


def columns(stream: TextIO) -> int:
    """Return the present width of a terminal; 80 if it is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def fit(fields: list[str], width: int) -> str:
    """Return as many of the first fields as fit into a width, joined; cut the first one if it alone is too long."""
    for num_fields in range(len(fields), 0, -1):
        for gap in ("  ", " "):
            text = gap.join(fields[:num_fields])
            if _num_columns(text) <= width:
                return text
    while _num_columns(text) > width:
        text = text[:-1]
    return text


def _num_columns(text: str) -> int:
    return sum(1 + (unicodedata.east_asian_width(character) in "WF") for character in text)


def size_text(num_bytes: int) -> str:
    """Return a size in a unit that suits it."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def aligned(rows: list[list[str]], to_left: tuple[int, ...] = (0,)) -> list[str]:
    """Return the lines of a table; columns are aligned to the right, or to the left if `to_left` has their number."""
    rows = [[one_line(word) for word in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            word.ljust(width) if place in to_left else word.rjust(width)
            for place, (word, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


class Progress:
    """The progress of long work on standard error: a live line on a terminal, else a line every few seconds.

    Args:
        work: the first words of the line.
        total: number of things, or zero where only their bytes are known.
        unit: noun for the counted things.
        total_bytes: number of bytes, or zero where only the number of things is known.
        first: number of things that an earlier run has done; they do not count for the speed of this one.
    """

    def __init__(self, work: str, total: int = 0, unit: str = "", *, total_bytes: int = 0, first: int = 0) -> None:
        self.work, self.total, self.unit, self.total_bytes = work, total, unit, total_bytes
        self.done, self.bytes = first, 0
        self._skipped = self.share
        self._begin_s = time.monotonic()
        self._due_s = self._begin_s + _PROGRESS_S
        self._line = LiveLine(sys.stderr)

    @property
    def share(self) -> float:
        """The share of the work that is done, from 0 to 1."""
        done, total = (self.done, self.total) if self.total else (self.bytes, self.total_bytes)
        return min(done / max(total, 1), 1.0)

    def update(self, things: int = 1, num_bytes: int = 0, *, is_skipped: bool = False) -> None:
        """Count things and bytes, and show the line when it is due."""
        before = self.share if is_skipped else 0.0
        self.done += things
        self.bytes += num_bytes
        self._skipped += self.share - before if is_skipped else 0.0
        if self._line.is_due:
            self._line.show(str(self))
        elif not self._line.is_live and time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + _PROGRESS_S
            print(self, file=sys.stderr, flush=True)

    def __str__(self) -> str:
        elapsed_s = time.monotonic() - self._begin_s
        left = timedelta(seconds=int((1 - self.share) * elapsed_s / max(self.share - self._skipped, 1e-9)))
        amounts = [f"{self.done:,}{f' of {self.total:,}' if self.total else ''} {self.unit}"] if self.unit else []
        total = f" of {size_text(self.total_bytes)}" if self.total_bytes else ""
        amounts += [f"{size_text(self.bytes)}{total}"] if self.bytes or self.total_bytes else []
        return one_line(f"{self.work}: {', '.join(amounts)} ({self.share:.1%}), {left} left")

    def finish(self) -> None:
        """Leave the last line standing, with the number of bytes that were counted: the total may have been a guess."""
        self.total_bytes = self.total_bytes and self.bytes
        self.close()
        print(self, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the line."""
        self._line.close()
