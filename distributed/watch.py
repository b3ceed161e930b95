"""NaN detection that does not wait for the device, and a watchdog that ends a hung run."""

import faulthandler
import itertools
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from distributed import collectives
from errors import say


class FiniteWatch:
    """Detect non-finite losses without waiting for the device.

    Each step's flag is copied to the host beside the computation, and read once it has arrived: a step later or more.
    """

    NUM_FLAGS = 64  # copies in flight at once

    def __init__(self, device: torch.device) -> None:
        self.device_type = device.type
        self._flags = torch.ones(self.NUM_FLAGS, dtype=torch.bool, pin_memory=device.type == "cuda")
        self._on_host = self._flags.numpy()  # the same memory
        self._pending = deque()  # (step, place of its flag, event or None)
        self._places = itertools.cycle(range(self.NUM_FLAGS))

    def note(self, step: int, values: Sequence[torch.Tensor]) -> None:
        """Take the losses of a step, or other scalar tensors on the device that must be finite."""
        if self.device_type not in ("cpu", "cuda") or len(self._pending) == self.NUM_FLAGS:
            return  # log lines and saves check the losses too
        place = next(self._places)
        is_finite = torch.stack([value.detach() for value in values]).isfinite().all()
        self._flags[place].copy_(is_finite, non_blocking=True)
        event = torch.cuda.current_stream().record_event() if self.device_type == "cuda" else None
        self._pending.append((step, place, event))

    def first_bad(self) -> int | None:
        """Return the first step with a non-finite loss, among those whose flag has arrived."""
        while self._pending and (self._pending[0][2] is None or self._pending[0][2].query()):
            step, place, _ = self._pending.popleft()
            if not self._on_host[place]:
                return step
        return None


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
        last_words = threading.Thread(target=self.on_stall, args=(reason,), daemon=True)
        last_words.start()
        time.sleep(self.LINGER_S)
        last_words.join(self.LINGER_S)
        os._exit(1)
