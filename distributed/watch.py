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

    A process that waits in a collective of bookkeeping is not ended while another rank makes progress: the ranks tell
    each other of theirs through the store. A process that was stopped meanwhile, as by SIGSTOP, has not hung.

    Attributes:
        stage: what the process is at, in words such as "saving".
        last_s: when it last made progress, by `time.monotonic`.
        is_waiting: whether it waits for other ranks.
        describe: returns more about the work of a run.
        on_stall: called last, with the reason.
    """

    LINGER_S = 5.0  # a launcher ends all ranks when one has left; all should print their stacks first

    def __init__(self) -> None:
        self._is_over, self._is_ending = threading.Event(), False
        self._reset(0.0)

    def _reset(self, timeout_s: float) -> None:
        self._is_over.set()
        self._is_over = threading.Event()
        self.timeout_s, self.period_s = timeout_s, min(timeout_s / 8 or 5.0, 5.0)
        self.stage, self.is_waiting, self._counts_bytes = "starting", False, True
        self.rank, self.peers = 0, None
        self._num_bytes, self._extra_s = 0, 0.0
        self.leave_run()
        self.beat()

    def start(self, timeout_s: float) -> None:
        """Watch this process from now on.

        Args:
            timeout_s: most seconds without progress; 0 for no limit.
        """
        self._reset(timeout_s)
        if timeout_s:
            threading.Thread(target=self._watch, args=(self._is_over,), daemon=True, name="stall watchdog").start()

    def stop(self) -> None:
        """Stop watching, and forget the other ranks; the stage stays, for the error that may be reported after this."""
        self._is_over.set()
        self.timeout_s, self.peers = 0.0, None

    def connect(self, store: Any, rank: int, world_size: int) -> None:
        """Tell the other ranks of this one's progress, through a store of its own connection."""
        self.rank = rank
        if world_size > 1:
            self.peers = _Peers(self, store, rank, world_size)
            threading.Thread(target=self.peers.exchange, args=(self._is_over,), daemon=True, name="beats").start()

    def enter_run(self, describe: Callable[[], str], on_stall: Callable[[str], None]) -> None:
        """Watch a run's steps from now on: bytes that its other threads write are no progress of them."""
        self.describe, self.on_stall, self._counts_bytes = describe, on_stall, False

    def leave_run(self) -> None:
        """Forget the run, whose end is recorded."""
        self.describe, self.on_stall = str, str

    def beat(self, stage: str = "", extra_s: float = 0.0) -> None:
        """Record progress.

        Args:
            stage: what begins now; by default the work goes on.
            extra_s: seconds for which it may wait in any case, as for a lock.
        """
        self.last_s, self._extra_s = time.monotonic(), extra_s
        if stage:
            self.stage = stage

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
    def left_s(self) -> float:
        """Seconds until this process counts as hung; without a limit it never does."""
        if not self.timeout_s:
            return float("inf")
        return self.timeout_s + self._extra_s - (time.monotonic() - self.last_s)

    def _watch(self, is_over: threading.Event) -> None:
        before_s = time.monotonic()
        while not is_over.wait(self.period_s):
            now_s = time.monotonic()
            self._allow_pause(now_s - before_s - self.period_s)
            before_s = now_s
            num_bytes = count_bytes() if self._counts_bytes else 0
            if num_bytes > self._num_bytes + _PROGRESS_BYTES:
                self._num_bytes = num_bytes
                self.beat()
            is_kept = self.is_waiting and self.peers is not None and self.peers.has_progress()
            if self.left_s < 0 and not is_kept:
                self._end_process()

    def _allow_pause(self, pause_s: float) -> None:
        """Leave a time in which this thread slept on out of all counts: the whole process was stopped."""
        if pause_s < self.period_s:
            return
        self.last_s += pause_s
        if self.peers is not None:
            self.peers.allow_pause(pause_s)
        if pause_s > self.timeout_s / 4:
            say(f"rank {self.rank}: this process was stopped for {pause_s:.0f} s (SIGSTOP, a suspended job): no stall")

    def await_end(self) -> None:
        """Wait for the end of a process that this is ending: an error that comes now is a consequence."""
        if self._is_ending:
            time.sleep(4 * self.LINGER_S)

    def _end_process(self) -> None:
        self._is_ending = True
        reason = f"stalled for {self.timeout_s:g} s (--stall-timeout) while {self.stage}"
        blamed = "" if self.peers is None else self.peers.blame()
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


class _Peers:
    """The other ranks' progress, as they tell it through the store.

    A rank writes a growing number, the seconds until it counts as hung, its stage, and whether it waits for others. Its
    clock need not agree with ours: what counts is when we see the number grow.
    """

    def __init__(self, watchdog: Watchdog, store: Any, rank: int, world_size: int) -> None:
        self.watchdog, self.store, self.rank, self.world_size = watchdog, store, rank, world_size
        self.last = {}  # {rank: what it wrote last}
        self.grown_s = {}  # {rank: when its number was last seen to grow}
        self.until_s = {}  # {rank: until when it counts as making progress}
        self.ended = set()  # ranks that have ended by an error
        self.answered_s = time.monotonic()  # when the store last answered

    def exchange(self, is_over: threading.Event) -> None:
        """Write this rank's progress and, once it lacks some, read the others'."""
        mine, number = self.watchdog, 0
        with suppress(RuntimeError):  # the store's host is gone, and so is what we could hear
            while not is_over.wait(mine.period_s):
                number += 1
                self.store.set(f"beat/{self.rank}", json.dumps([number, mine.left_s, mine.stage, mine.is_waiting]))
                # Early enough to see each number grow, and seldom: at 1,000 ranks it is a million keys.
                if mine.left_s < 0.75 * mine.timeout_s:
                    self._read()
                self.answered_s = time.monotonic()

    def _read(self) -> None:
        for other in range(self.world_size):
            key = f"beat/{other}"
            if self.store.check([f"end/{other}"]):  # as `collectives.report_end` writes it
                self.ended.add(other)
            if other == self.rank or not self.store.check([key]):
                continue
            theirs, now_s = json.loads(self.store.get(key)), time.monotonic()
            before = self.last.get(other)
            if before is not None and theirs[0] != before[0]:
                self.grown_s[other] = now_s
                self.until_s[other] = now_s + theirs[1]
            self.last[other] = theirs

    def has_progress(self) -> bool:
        """Tell whether any other rank is making progress."""
        return any(until_s > time.monotonic() for until_s in list(self.until_s.values()))

    def allow_pause(self, pause_s: float) -> None:
        """Move what was seen by the time in which this process could see nothing."""
        self.answered_s += pause_s
        self.grown_s = {other: seen_s + pause_s for other, seen_s in self.grown_s.items()}
        self.until_s = {other: until_s + pause_s for other, until_s in self.until_s.items()}

    def blame(self) -> str:
        """Name the ranks that are waited for: those that are silent, else those that work without progress."""
        now_s, patience_s = time.monotonic(), 3 * self.watchdog.period_s + 1.0
        if now_s - self.answered_s > patience_s:
            return "no answer from rank 0 or its launcher, at whose store the processes meet"
        if self.ended:
            return f"rank {', '.join(map(str, sorted(self.ended)))} failed; see the error in its own output"
        others = [other for other in range(self.world_size) if other != self.rank]
        silent = [other for other in others if now_s - self.grown_s.get(other, 0.0) > patience_s]
        if silent:
            return f"no sign of life from {self._name(silent)}"
        hung = [other for other in others if not self.last[other][3]]
        return f"no progress on {self._name(hung)}" if hung else ""

    def _name(self, ranks: list[int]) -> str:
        """Return some of the ranks in words, each with its stage."""
        stages = {rank: f" ({self.last[rank][2]})" for rank in ranks[:8] if rank in self.last}
        names = ", ".join(f"rank {rank}{stages.get(rank, '')}" for rank in ranks[:8])
        return f"{names} and {len(ranks) - 8} more" if len(ranks) > 8 else names


def count_bytes() -> int:
    """Return how many bytes this process has read and written; 0 where the system does not tell."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return 0
    fields = dict(line.split(": ") for line in text.splitlines())
    return int(fields["rchar"]) + int(fields["wchar"])


watchdog = Watchdog()  # of this process
