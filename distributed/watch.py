"""A watchdog that ends a hung run."""

import faulthandler
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from distributed import collectives
from errors import say


class StallWatchdog:
    """End a run that hangs, after every rank has printed the Python stacks of all threads and its current work.

    Args:
        timeout_s: most seconds between two beats; 0 for no limit.
        describe: names the current work.
        on_stall: called last, with the reason.
    """

    LINGER_S = 5.0  # a launcher ends all ranks when one has left; all should print their stacks first

    def __init__(self, timeout_s: float, describe: Callable[[], str], on_stall: Callable[[str], None]) -> None:
        self.timeout_s, self.describe, self.on_stall = timeout_s, describe, on_stall
        self._is_over = threading.Event()
        self.beat()

    def beat(self) -> None:
        """Record progress."""
        self.last_s = time.monotonic()

    def start(self) -> None:
        """Watch from now on."""
        if self.timeout_s:
            self.beat()
            threading.Thread(target=self._watch, daemon=True, name="stall watchdog").start()

    def end(self) -> None:
        """Stop watching."""
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(min(self.timeout_s / 4, 5.0)):
            if time.monotonic() - self.last_s > self.timeout_s:
                self._end_run()

    def _end_run(self) -> None:
        reason = f"stalled for {self.timeout_s:g} s (--stall-timeout)"
        where = f"rank {collectives.get_rank()} on {socket.gethostname()}"
        say(f"{where}: {reason}; {self.describe()}; Python stacks of this rank:")
        with suppress(OSError):  # the terminal may be gone
            faulthandler.dump_traceback(all_threads=True)
        for process in multiprocessing.active_children():
            say(f"{where}: Python stacks of its loader process {process.pid}:")
            with suppress(OSError):  # it has ended meanwhile
                os.kill(process.pid, signal.SIGUSR2)
            time.sleep(0.1)
        # In a thread: the cause of the hang may be a disk that does not answer.
        report_thread = threading.Thread(target=self.on_stall, args=(reason,), daemon=True)
        report_thread.start()
        time.sleep(self.LINGER_S)
        report_thread.join(self.LINGER_S)
        os._exit(1)
