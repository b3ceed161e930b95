"""What the ranks tell each other of their progress, and which of them a rank waits for."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Report(NamedTuple):
    """What a rank tells of itself; it travels as JSON."""

    number: int  # of the report, from 1
    stage: str  # what the rank is at
    is_waiting: bool  # whether it waits for other ranks
    is_working: bool  # whether it does not wait, and has made progress


class Peers:
    """The other ranks, as they tell of themselves through rank 0's store.

    A rank whose number grows is alive; so their clocks need not agree.

    Args:
        store: rank 0's, by a connection of its own.
        rank: this process's number.
        world_size: the number of processes.
        period_s: seconds between two reports of a rank.
        now_s: returns the time, by a clock that stands still while this process is stopped.
    """

    def __init__(self, store: Any, rank: int, world_size: int, period_s: float, now_s: Callable[[], float]) -> None:
        self._store = store
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        # Three reports that did not come, and a second.
        self._silence_s = 3 * period_s + 1.0
        self._now_s = now_s
        self._number = 0
        self._reports = {}  # {rank: its newest report}
        self._grown_s = {}  # {rank: when its number was last seen to grow}
        self._failed = set()  # ranks that have ended by an error
        self._answered_s = now_s()  # when the store last answered

    def exchange(self, stage: str, *, is_waiting: bool, is_working: bool, is_listening: bool) -> None:
        """Tell the others of this rank, and hear of them if it listens.

        Raises:
            RuntimeError: the store's host is gone.
        """
        self._number += 1
        # JSON, as all that ranks send: nothing that comes over the network is unpickled.
        self._store.set(f"beat/{self._rank}", json.dumps(Report(self._number, stage, is_waiting, is_working)))
        if is_listening:
            for other in self._others:
                self._hear(other)
        self._answered_s = self._now_s()

    def _hear(self, other: int) -> None:
        if self._store.check([f"end/{other}"]):  # as `ending.announce_failure` writes it
            self._failed.add(other)
        if self._store.check([f"beat/{other}"]):
            report = Report(*json.loads(self._store.get(f"beat/{other}")))
            if report.number != self._reports.get(other, report).number:
                self._grown_s[other] = self._now_s()
            self._reports[other] = report

    def _is_silent(self, other: int) -> bool:
        return self._grown_s.get(other, 0.0) < self._now_s() - self._silence_s

    def is_any_working(self) -> bool:
        """Tell whether another rank is alive and makes progress."""
        # A copy: another thread adds reports.
        reports = list(self._reports.items())
        return any(report.is_working and not self._is_silent(other) for other, report in reports)

    def blame(self) -> str:
        """Name the ranks that are waited for: those that failed, those that are silent, or those that hang."""
        if self._failed:
            return f"rank {', '.join(map(str, sorted(self._failed)))} failed; see the error in its own output"
        if self._answered_s < self._now_s() - self._silence_s:
            return "no answer from rank 0 or its launcher, at whose store the processes meet"
        verdict = "no sign of life from"
        blamed = [other for other in self._others if self._is_silent(other)]
        if not blamed:
            # All are alive: those hang that do not themselves wait for others.
            verdict = "no progress on"
            blamed = [other for other in self._others if not self._reports[other].is_waiting]
        if not blamed:
            return ""
        return f"{verdict} {', '.join(map(self._describe, blamed[:8]))}"

    def _describe(self, other: int) -> str:
        if other not in self._reports:
            return f"rank {other}"
        return f"rank {other} ({self._reports[other].stage})"
