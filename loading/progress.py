"""Progress of long work, as a line on standard error every few seconds."""

import math
import sys
import time

from distributed.watch import watchdog
from errors import duration, one_line

# Seconds between two lines.
PROGRESS_S = 5.0


def size_text(num_bytes: float) -> str:
    """Return a size in a unit that suits it."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


class Progress:
    """The progress of long work; the time left is by the pace since the last line.

    Args:
        work: the first words of the line.
        total: number of things, or zero where only their bytes are known.
        unit: noun for the counted things.
        total_bytes: number of bytes, or zero where only the number of things is known.
        first: number of things that an earlier run has done.
    """

    def __init__(self, work: str, total: int = 0, unit: str = "", *, total_bytes: int = 0, first: int = 0) -> None:
        self.work = work
        self.unit = unit
        self.total = total
        self.total_bytes = total_bytes
        self.done = first
        self.bytes = 0
        self._begin_interval()

    def _begin_interval(self) -> None:
        self._last_s, self._last_share = time.monotonic(), self.share

    @property
    def share(self) -> float:
        """The share of the work that is done, from 0 to 1."""
        share = self.done / self.total if self.total else self.bytes / max(self.total_bytes, 1)
        return min(share, 1.0)

    def update(self, things: int = 1, num_bytes: int = 0) -> None:
        """Count things and bytes, and print the line when it is due."""
        # A scan of a slow disk may take longer than --stall-timeout, and is no hang while it gets on.
        watchdog.note_progress()
        self.done += things
        self.bytes += num_bytes
        if time.monotonic() >= self._last_s + PROGRESS_S:
            print(self, file=sys.stderr, flush=True)
            self._begin_interval()

    def __str__(self) -> str:
        elapsed_s = time.monotonic() - self._last_s
        gained = self.share - self._last_share
        left_s = (1 - self.share) * elapsed_s / gained if gained > 0 else math.nan
        amounts = []
        if self.unit:
            total = f" of {self.total:,}" if self.total else ""
            amounts.append(f"{self.done:,}{total} {self.unit}")
        if self.bytes or self.total_bytes:
            total = f" of {size_text(self.total_bytes)}" if self.total_bytes else ""
            amounts.append(f"{size_text(self.bytes)}{total}")
        return one_line(f"{self.work}: {', '.join(amounts)} ({self.share:.1%}), {duration(left_s)} left")

    def finish(self) -> None:
        """Print the last line, with the number of bytes that were counted: the total may have been a guess."""
        if self.total_bytes:
            self.total_bytes = self.bytes
        self._last_share = 0.0
        print(self, file=sys.stderr, flush=True)
