"""A hang watchdog: it ends a process that makes no progress, and names the rank that the others wait for."""

import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from errors import say

# Bytes read or written that count as progress of a start: of a download, of a slow disk. Reading the number takes some.
_PROGRESS_BYTES = 1 << 16


class Watchdog:
    """End this process when it hangs, after it has printed its current work and the Python stacks of all threads.

    A process that waits for other ranks is not ended while one of them works: the ranks tell each other through the
    store, with a number that grows, what they are at. Their clocks need not agree. A process that was stopped
    meanwhile, as by SIGSTOP, has not hung.

    Attributes:
        stage: what the process is at, in words such as "saving".
        describe: returns more about the work of a run.
        on_stall: called last, with the reason.
    """

    LINGER_S = 5.0  # a launcher ends all ranks when one has left; all should print their stacks first

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self.start(0.0)

    def start(self, timeout_s: float, rank: int = 0) -> None:
        """Watch this process from now on.

        Args:
            timeout_s: most seconds without progress; 0 for no limit.
            rank: this process's number.
        """
        self.stop()
        self._is_over = threading.Event()
        self.timeout_s, self.period_s = timeout_s, min(timeout_s / 8, 5.0)
        self.stage, self.is_waiting, self._counts_bytes, self._is_ending = "starting", False, True, False
        self.rank, self.world_size, self.store = rank, 1, None
        self._others = {}  # {rank: its number, stage, whether it waits, whether it works}
        self._grown_s = {}  # {rank: when its number was last seen to grow}
        self._failed = set()  # ranks that have ended by an error
        self._paused_s, self._num_bytes = 0.0, 0
        self.leave_run()
        self.beat()
        self._answered_s = self.now_s()
        if timeout_s:
            threading.Thread(target=self._watch, args=(self._is_over,), daemon=True, name="stall watchdog").start()

    def stop(self) -> None:
        """Stop watching; the stage stays, for an error that is reported after this."""
        self._is_over.set()

    def connect(self, store: Any, world_size: int) -> None:
        """Tell the other ranks of this one's progress, through a store of its own connection."""
        self.store, self.world_size = store, world_size
        if world_size > 1 and self.timeout_s:
            threading.Thread(target=self._exchange, args=(self._is_over,), daemon=True, name="beats").start()

    def enter_run(self, describe: Callable[[], str], on_stall: Callable[[str], None]) -> None:
        """Watch a run's steps from now on: bytes that its other threads write are no progress of them."""
        self.describe, self.on_stall, self._counts_bytes = describe, on_stall, False

    def leave_run(self) -> None:
        """Forget the run, whose end is recorded."""
        self.describe, self.on_stall = str, str

    def now_s(self) -> float:
        """Return the time by a clock that stands still while the process is stopped."""
        return time.monotonic() - self._paused_s

    def beat(self, stage: str = "", extra_s: float = 0.0) -> None:
        """Record progress.

        Args:
            stage: what begins now; by default the work goes on.
            extra_s: seconds for which it may wait in any case, as for a lock.
        """
        self.await_end()  # also of one that went on after all: it has been said, and recorded, that it ends
        self.stage = stage or self.stage
        self._until_s = self.now_s() + self.timeout_s + extra_s

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark that this process waits for other ranks."""
        self.is_waiting = True
        try:
            yield
        finally:
            self.is_waiting = False
            self.beat()

    @property
    def idle_s(self) -> float:
        """Seconds without progress."""
        return self.now_s() - self._until_s + self.timeout_s

    def _watch(self, is_over: threading.Event) -> None:
        before_s = time.monotonic()
        while not is_over.wait(self.period_s):
            self._allow_pause(time.monotonic() - before_s - self.period_s)
            before_s = time.monotonic()
            num_bytes = count_bytes() if self._counts_bytes else 0
            if num_bytes > self._num_bytes + _PROGRESS_BYTES:
                self._num_bytes = num_bytes
                self.beat()
            if self.idle_s > self.timeout_s and not (self.is_waiting and self._is_other_working()):
                self._end_process()

    def _allow_pause(self, pause_s: float) -> None:
        """Leave a time in which this thread slept on out of all counts: the whole process was stopped."""
        if pause_s > self.period_s:
            self._paused_s += pause_s
        if pause_s > self.timeout_s / 4:
            say(f"rank {self.rank}: this process was stopped for {pause_s:.0f} s (SIGSTOP, a suspended job): no stall")

    # What the ranks tell each other

    def _exchange(self, is_over: threading.Event) -> None:
        number = 0
        with suppress(RuntimeError):  # the store's host is gone, and with it whatever could be heard
            while not is_over.wait(self.period_s):
                number += 1
                is_working = not self.is_waiting and self.idle_s < self.timeout_s
                mine = [number, self.stage, self.is_waiting, is_working]
                self.store.set(f"beat/{self.rank}", json.dumps(mine))
                # Early enough to see each number grow, and seldom: a thousand ranks ask for a million keys.
                if self.idle_s > self.timeout_s / 4:
                    for other in {*range(self.world_size)} - {self.rank}:
                        self._hear(other)
                self._answered_s = self.now_s()

    def _hear(self, other: int) -> None:
        if self.store.check([f"end/{other}"]):  # as `collectives.report_end` writes it
            self._failed.add(other)
        if self.store.check([f"beat/{other}"]):
            theirs = json.loads(self.store.get(f"beat/{other}"))
            if theirs[0] != self._others.get(other, theirs)[0]:
                self._grown_s[other] = self.now_s()
            self._others[other] = theirs

    def _is_silent(self, other: int) -> bool:
        return self._grown_s.get(other, 0.0) < self.now_s() - 3 * self.period_s - 1.0

    def _is_other_working(self) -> bool:
        return any(theirs[3] and not self._is_silent(other) for other, theirs in list(self._others.items()))

    def _blame(self) -> str:
        """Name the ranks that are waited for: those that failed, those that are silent, or those that hang."""
        if self.world_size == 1:
            return ""
        if self._failed:
            return f"rank {', '.join(map(str, sorted(self._failed)))} failed; see the error in its own output"
        if self._answered_s < self.now_s() - 3 * self.period_s - 1.0:
            return "no answer from rank 0 or its launcher, at whose store the processes meet"
        others = [other for other in range(self.world_size) if other != self.rank]
        silent = [other for other in others if self._is_silent(other)]
        hung = [other for other in others if not silent and not self._others[other][2]]
        stages = {other: f" ({theirs[1]})" for other, theirs in self._others.items()}
        names = ", ".join(f"rank {other}{stages.get(other, '')}" for other in (silent + hung)[:8])
        verdict = "no sign of life from" if silent else "no progress on"
        return f"{verdict} {names}" if names else ""

    # The end

    def await_end(self) -> None:
        """Wait for the end of a process that this is ending: an error that comes now is a consequence."""
        if self._is_ending:
            time.sleep(4 * self.LINGER_S)

    def _end_process(self) -> None:
        self._is_ending = True
        reason, blamed = f"stalled for {self.timeout_s:g} s (--stall-timeout) while {self.stage}", self._blame()
        if blamed:
            reason += f": {blamed}"
        where = f"rank {self.rank} on {socket.gethostname()}"
        line = "; ".join(filter(None, [f"{where}: {reason}", self.describe()]))
        if self.is_waiting and blamed:
            say(line)
        else:
            self._print_stacks(line, where)
        # In a thread: the cause of the hang may be a disk that does not answer.
        report_thread = threading.Thread(target=self.on_stall, args=(reason,), daemon=True)
        report_thread.start()
        time.sleep(self.LINGER_S)
        report_thread.join(self.LINGER_S)
        os._exit(1)

    def _print_stacks(self, line: str, where: str) -> None:
        say(f"{line}; Python stacks of this rank:")
        with suppress(OSError):  # the terminal may be gone
            faulthandler.dump_traceback(all_threads=True)
        for process in multiprocessing.active_children():
            say(f"{where}: Python stacks of its loader process {process.pid}:")
            with suppress(OSError):  # it has ended meanwhile
                os.kill(process.pid, signal.SIGUSR2)
            time.sleep(0.1)


def count_bytes() -> int:
    """Return how many bytes this process has read and written; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/io").read_text().split()  # rchar: N wchar: N ...
    except OSError:
        return 0
    return int(fields[1]) + int(fields[3])


watchdog = Watchdog()  # of this process
