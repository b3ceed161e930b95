"""A hang watchdog: it ends a process that makes no progress, and names the rank that the others wait for."""

import faulthandler
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

from distributed.peers import Peers
from errors import write_stderr

# Bytes read or written that count as progress of a start: of a download, of a slow disk. Not any byte, since reading
# /proc/self/io adds to its own count, and a hang would look like progress for ever.
_PROGRESS_BYTES = 1 << 16


class Watchdog:
    """End this process when it hangs, after it has printed its current work and the Python stacks of all threads.

    Collectives of bookkeeping wait for a day, since rank 0 may save to a slow disk; so a rank that is gone or hangs
    must be found otherwise. A process that waits for other ranks is not ended while one of them works: the ranks tell
    each other what they are at (`distributed.peers`). A process that was stopped meanwhile, as by SIGSTOP, has not
    hung.

    Attributes:
        stage: what the process is at, in words such as "saving".
        is_waiting: whether it waits for other ranks.
        describe: returns more about the work of a run.
        on_stall: called last, with the reason.
    """

    # A launcher ends all ranks when one has left; all should print their stacks first.
    LINGER_S = 5.0

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
        self.timeout_s = timeout_s
        self.rank = rank
        self.period_s = min(timeout_s / 8, 5.0)
        self.stage = "starting"
        self.is_waiting = False
        self._peers: Peers | None = None
        self._counts_bytes = True
        self._num_bytes = 0
        self._paused_s = 0.0
        self._is_ending = False
        self.leave_run()
        self.note_progress()
        # Daemons, here and below: a thread must not keep a process that wants to end.
        if timeout_s:
            threading.Thread(target=self._watch, args=(self._is_over,), daemon=True, name="stall watchdog").start()

    def stop(self) -> None:
        """Stop watching; the stage stays, for an error that is reported after this."""
        self._is_over.set()

    def connect(self, store: Any, world_size: int) -> None:
        """Tell the other ranks of this one's progress, through a store of its own connection."""
        if world_size > 1 and self.timeout_s:
            self._peers = Peers(store, self.rank, world_size, self.period_s, self.now_s)
            arguments = (self._peers, self._is_over)
            threading.Thread(target=self._exchange, args=arguments, daemon=True, name="beats").start()

    def enter_run(self, describe: Callable[[], str], on_stall: Callable[[str], object]) -> None:
        """Watch a run's steps from now on: bytes that its other threads write are no progress of them."""
        self.describe = describe
        self.on_stall = on_stall
        self._counts_bytes = False

    def leave_run(self) -> None:
        """Forget the run, whose end is recorded."""
        self.describe = self.on_stall = str

    def now_s(self) -> float:
        """Return the time by a clock that stands still while the process is stopped."""
        return time.monotonic() - self._paused_s

    def note_progress(self, stage: str = "", extra_s: float = 0.0) -> None:
        """Record progress.

        Args:
            stage: what begins now; by default the work goes on.
            extra_s: seconds for which it may wait in any case, as for a lock.
        """
        # A process that goes on after all must end too: it could finish with exit code 0 though its output says that
        # it has stalled, and status.json that it has failed.
        self.await_end()
        if stage:
            self.stage = stage
        self._until_s = self.now_s() + self.timeout_s + extra_s

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark that this process waits for other ranks."""
        self.is_waiting = True
        try:
            yield
        finally:
            self.is_waiting = False
            # That the others have come is progress, too.
            self.note_progress()

    @property
    def idle_s(self) -> float:
        """Seconds without progress."""
        return self.now_s() - self._until_s + self.timeout_s

    def _watch(self, is_over: threading.Event) -> None:
        before_s = time.monotonic()
        while not is_over.wait(self.period_s):
            self._allow_pause(time.monotonic() - before_s - self.period_s)
            before_s = time.monotonic()
            if self._counts_bytes:
                self._see_bytes()
            # Another rank may work that this one waits for: one that saves to a slow disk.
            if self.idle_s > self.timeout_s and not (self.is_waiting and self._peers and self._peers.is_any_working()):
                self._end_process()

    def _see_bytes(self) -> None:
        """Take bytes that were read or written for progress: a start calls libraries that tell of none."""
        try:
            fields = Path("/proc/self/io").read_text().split()  # rchar: N wchar: N ...
        except OSError:  # the system does not tell
            return
        num_bytes = int(fields[1]) + int(fields[3])
        if num_bytes > self._num_bytes + _PROGRESS_BYTES:
            self._num_bytes = num_bytes
            self.note_progress()

    def _allow_pause(self, pause_s: float) -> None:
        """Leave a time in which this thread slept on out of all counts: the whole process was stopped."""
        if pause_s > self.period_s:
            self._paused_s += pause_s
        if pause_s > self.timeout_s / 4:
            line = f"rank {self.rank}: this process was stopped for {pause_s:.0f} s"
            write_stderr(f"{line} (SIGSTOP, a suspended job): no stall")

    def _exchange(self, peers: Peers, is_over: threading.Event) -> None:
        with suppress(RuntimeError):  # the store's host is gone, and with it whatever could be heard
            while not is_over.wait(self.period_s):
                is_working = not self.is_waiting and self.idle_s < self.timeout_s
                # Early enough to see each number grow, and seldom: a thousand ranks ask for a million keys.
                is_listening = self.idle_s > self.timeout_s / 4
                peers.exchange(self.stage, is_waiting=self.is_waiting, is_working=is_working, is_listening=is_listening)

    def await_end(self) -> None:
        """Wait for the end of a process that this is ending: an error that comes now is a consequence."""
        if self._is_ending:
            time.sleep(4 * self.LINGER_S)

    def _end_process(self) -> None:
        self._is_ending = True
        reason = f"stalled for {self.timeout_s:g} s (--stall-timeout) while {self.stage}"
        blamed = "" if self._peers is None else self._peers.blame()
        if blamed:
            reason += f": {blamed}"
        where = f"rank {self.rank} on {socket.gethostname()}"
        line = "; ".join(filter(None, (f"{where}: {reason}", self.describe())))
        if self.is_waiting and blamed:
            # The stacks of a process that waits for another say nothing of the cause.
            write_stderr(line)
        else:
            self._print_stacks(line, where)
        # In a thread: the cause of the hang may be a disk that does not answer.
        report_thread = threading.Thread(target=self.on_stall, args=(reason,), daemon=True)
        report_thread.start()
        time.sleep(self.LINGER_S)
        report_thread.join(self.LINGER_S)
        # Not sys.exit, which would end this thread alone; the one that hangs never looks.
        os._exit(1)

    def _print_stacks(self, line: str, where: str) -> None:
        write_stderr(f"{line}; Python stacks of this rank:")
        with suppress(OSError):  # the terminal may be gone
            faulthandler.dump_traceback(all_threads=True)
        for process in multiprocessing.active_children():
            write_stderr(f"{where}: Python stacks of its loader process {process.pid}:")
            with suppress(OSError):  # it has ended meanwhile
                os.kill(process.pid, signal.SIGUSR2)
            time.sleep(0.1)  # so that the stacks of two do not mix


watchdog = Watchdog()  # of this process
