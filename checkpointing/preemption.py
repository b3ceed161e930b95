"""Ending well: all ranks agree on signals, losses are watched without waiting, and a hung run says where it hangs."""

import ctypes
import faulthandler
import itertools
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

import collectives
from checkpointing.startup import SIGNALS, take_signals
from errors import UserError, say
from launch import read_launch

NEVER = -(1 << 62)
PR_SET_PDEATHSIG = 1


class Verdict(NamedTuple):
    """The agreement of all ranks: each knows it after the same step."""

    stop: str  # such as "SIGTERM on rank 5"; empty to go on
    is_save_due: bool
    is_written: bool  # whether the save that was under way has been written, or has failed
    bad_step: int | None  # first step known to have a loss that is not finite


NOTHING = Verdict("", False, False, None)


class PreemptionGuard:
    """Take the signals that announce an end, and let all ranks stop after the same step.

    Args:
        is_installed: whether to handle the signals from now on.
    """

    def __init__(self, *, is_installed: bool) -> None:
        self.signals, self._begun, self.is_installed = take_signals(), None, is_installed
        if is_installed:
            self.signals.install()
            self.signals.begin_steps()
        else:
            self.signals.release()
        # A process that waits in torch for the others of a dead torchrun would hear no signal, and has nothing to save.
        if read_launch().is_torchrun:
            end_with_parent(signal.SIGKILL)
            if is_orphan():
                raise UserError("the torchrun that started this process is gone; start again")

    def joined(self) -> None:
        """Take torchrun's death as SIGTERM from now on, that is, after all processes have joined.

        Otherwise the ranks of a killed torchrun would train on, and write, beside those of its successor. A run that a
        shell started may go on after the shell.
        """
        if self.is_installed and read_launch().is_torchrun:
            end_with_parent(signal.SIGTERM)

    def begin(self, votes: Callable[[], dict[str, Any]]) -> None:
        """Begin to combine the votes of all ranks while they compute their next step.

        `votes` returns arguments of `_as_integers`. Collective: every rank must call it.
        """
        if self._begun is not None:
            self._begun()  # end the exchange of the step before, whose result nobody has read
        if collectives.get_world_size() > 1:
            self._begun = collectives.begin_largest(self._as_integers(**votes()))

    def agreed(self, votes: Callable[[], dict[str, Any]]) -> Verdict:
        """Return the agreement begun last, or `NOTHING`; a single process takes its votes of now. Collective."""
        if collectives.get_world_size() == 1:
            return _read_verdict(self._as_integers(**votes()))
        begun, self._begun = self._begun, None
        return _read_verdict(begun()) if begun else NOTHING

    def agree(self, votes: Callable[[], dict[str, Any]] = dict) -> Verdict:
        """Combine the votes of all ranks, and wait for the result. Collective: every rank must call it."""
        self.begin(votes)
        return self.agreed(votes)

    def _as_integers(
        self, *, is_save_due: bool = False, is_written: bool = False, bad_step: int | None = None
    ) -> list[int]:
        """Return this process's votes as integers, whose maxima over all ranks are the agreement; see `Verdict`."""
        bad = NEVER if bad_step is None else -bad_step
        number = self.signals.number
        return [number << 32 | collectives.get_rank() if number else 0, int(is_save_due), int(is_written), bad]


def _read_verdict(largest: list[int]) -> Verdict:
    stop, save, written, bad = largest
    name = signal.Signals(stop >> 32).name if stop else ""
    if stop and collectives.get_world_size() > 1:
        name += f" on rank {stop & 0xFFFFFFFF}"
    return Verdict(name, bool(save), bool(written), None if bad == NEVER else -bad)


def end_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends in any way; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)


def is_orphan() -> bool:
    """Tell whether the torchrun that started this process died before `end_with_parent` was called.

    The parent is process 1 then. In a container that may be torchrun itself, which runs the same Python as this one.
    """
    try:
        return os.getppid() == 1 and os.readlink("/proc/1/exe") != os.readlink("/proc/self/exe")
    except PermissionError:  # process 1 is another user's
        return True
    except OSError:  # there is no /proc
        return False


def start_worker(worker: int) -> None:
    """Prepare a loader process: it ends with its parent, or when its parent says so, and by no signal from elsewhere.

    torchrun and terminals signal the whole process group; a loader that died of the signal would end the run before
    it could save. Off Linux a loader dies of anybody's SIGTERM. On SIGUSR2,
    from the stall watchdog, it prints its Python stacks.
    """
    faulthandler.register(signal.SIGUSR2, file=2)
    for number in SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    if sys.platform != "linux":
        return
    parent = multiprocessing.parent_process().pid
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before `end_with_parent`
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_told, args=(parent,), daemon=True, name="end when told").start()


def _end_when_told(parent: int) -> None:
    """End this process on a SIGTERM of its parent, as soon as this thread gets the interpreter.

    Torch sends one to a loader process that does not end by itself, as when its loader is collected in a cycle, and
    Python to those that are left at exit: both wait for it to end.
    """
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


class LoaderAround:
    """A loader that wraps another one, with the same length and data set.

    Args:
        loader: yields batches; has a length and a `dataset`.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    @property
    def dataset(self) -> Any:
        """The loader's data set."""
        return self.loader.dataset

    @property
    def numbers(self) -> Callable[[], Iterator]:
        """The loader's own function, if it has one, that yields the image numbers of each batch."""
        return self.loader.numbers

    def __len__(self) -> int:
        return len(self.loader)


class WatchedLoader(LoaderAround):
    """A loader that every rank leaves after the same round when a stop is asked for.

    Ranks may have different numbers of batches; a rank that has no more goes on agreeing until all have finished.

    Args:
        loader: as `LoaderAround`.
        guard: asked before each batch.
        stop: called with the cause, on all ranks; raises.
        beat: called before each batch.
    """

    def __init__(
        self, loader: Any, guard: PreemptionGuard, stop: Callable[[str], None], beat: Callable[[], None]
    ) -> None:
        super().__init__(loader)
        self.guard, self.stop, self.beat = guard, stop, beat

    def __iter__(self) -> Iterator:
        """Yield the batches. Collective: every rank must iterate to the end."""
        rounds = max(collectives.gather_plain(len(self.loader)))
        batches = iter(self.loader)
        for number in range(rounds):
            self.beat()
            verdict = self.guard.agree()
            if verdict.stop:
                self.stop(verdict.stop)
            if number < len(self.loader):
                yield next(batches)


class FiniteWatch:
    """Learn which losses were not finite, without waiting for the device.

    Each step's flag is copied to the host beside the computation, and read once it has arrived: a step later or more.
    """

    NUM_FLAGS = 64  # on the way at once

    def __init__(self, device: torch.device) -> None:
        self.device_type = device.type
        self._flags = torch.ones(self.NUM_FLAGS, dtype=torch.bool, pin_memory=device.type == "cuda")
        self._on_host = self._flags.numpy()  # the same memory
        self._pending = deque()  # (step, place of its flag, event or None)
        self._places = itertools.cycle(range(self.NUM_FLAGS))

    def note(self, step: int, values: Sequence[torch.Tensor]) -> None:
        """Take the losses of a step, or other scalar tensors on the device that must be finite."""
        if self.device_type not in ("cpu", "cuda"):
            return  # reading would wait; log lines and saves check the losses too
        if len(self._pending) == self.NUM_FLAGS:
            return  # nobody calls `first_bad`; the next log line checks the losses
        place = next(self._places)
        is_finite = torch.stack([value.detach() for value in values]).isfinite().all()
        self._flags[place].copy_(is_finite, non_blocking=True)
        event = torch.cuda.current_stream().record_event() if self.device_type == "cuda" else None
        self._pending.append((step, place, event))

    def first_bad(self) -> int | None:
        """Return the first step that was not finite, among those whose flag has arrived."""
        while self._pending and (self._pending[0][2] is None or self._pending[0][2].query()):
            step, place, _ = self._pending.popleft()
            if not self._on_host[place]:
                return step
        return None


class StallWatchdog:
    """End a run that hangs, after every rank has printed the Python stacks of all threads, and its present work.

    Args:
        timeout_s: most seconds between two beats; 0 for no limit.
        describe: names the present work.
        on_stall: called last, with the reason.
    """

    LINGER_S = 5.0  # a launcher ends all ranks when one has left; all should print their stacks first

    def __init__(self, timeout_s: float, describe: Callable[[], str], on_stall: Callable[[str], None]) -> None:
        self.timeout_s, self.describe, self.on_stall = timeout_s, describe, on_stall
        self._is_over = threading.Event()

    def beat(self) -> None:
        """Note that something has been done."""
        self.last_s = time.monotonic()

    def start(self) -> None:
        """Watch from now on."""
        if self.timeout_s:
            self.beat()
            threading.Thread(target=self._watch, daemon=True, name="stall watchdog").start()

    def end(self) -> None:
        """Watch no longer."""
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(min(self.timeout_s / 4, 5.0)):
            if time.monotonic() - self.last_s > self.timeout_s:
                self._give_up()

    def _give_up(self) -> None:
        reason = f"nothing happened for {self.timeout_s:g} s (--stall-timeout)"
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
