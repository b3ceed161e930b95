"""Signal handling, and the start of the script before torch is imported."""

import ctypes
import faulthandler
import gc
import io
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
from types import FrameType

from distributed.launch import find_readers, read_launch
from errors import UserError, write_stderr

# SIGHUP and SIGQUIT come from a terminal that is closed or from its quit key; torchrun passes them on.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h

began_s = None  # when the script began, by `time.monotonic`; None in a process that imports this project


class Signals:
    """The signals that ask this process to stop: none yet, one (stop after the step), or Ctrl-C twice (stop now).

    A handler may interrupt any line of the program, half a save or half a collective. So it uses neither files nor
    collectives, and raises nothing: it sets `number`, which the ranks compare after each step (`distributed.decision`).
    A second Ctrl-C ends it at once, except under torchrun.

    Attributes:
        number: the first signal that came; 0 for none.
        parent: the process that had started this one.
    """

    def __init__(self) -> None:
        self.number = 0
        self.parent = os.getppid()
        self.is_asked = mmap.mmap(-1, 1)  # whether one has come: a byte that forked processes share
        self._handlers = {}  # the handlers before `install`, by signal

    def install(self) -> None:
        """Handle the signals from now on; outside the main thread, as of Ray's workers, they stay their owner's."""
        if threading.current_thread() is not threading.main_thread():  # Python lets no other set a handler
            return
        for number in SIGNALS:
            is_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if not is_nohup:
                self._handlers.setdefault(number, signal.signal(number, self._handle))

    def release(self) -> None:
        """Restore the handlers before `install`, and raise again a signal that has come."""
        self.restore()
        if self.number:
            signal.raise_signal(self.number)

    def restore(self) -> None:
        """Restore the handlers before `install`."""
        for number, handler in self._handlers.items():
            # None: of a handler that was not set from Python, which cannot set it again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._handlers = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A terminal's Ctrl-C comes twice under torchrun: from the terminal and from the agent.
        if number == self.number == signal.SIGINT and not read_launch().is_torchrun:
            if began_s is None:  # a notebook's process goes on
                raise KeyboardInterrupt
            write_stderr("train.py: error: interrupted; --resume auto resumes from the last checkpoint")
            os._exit(1)
        # Set before a line is written: another signal may interrupt that, and must not take itself for the first.
        is_first = self.number == 0
        if is_first:
            self.number = number
        self.is_asked[0] = 1
        if is_first and read_launch().local_rank == 0:
            line = f"{signal.Signals(number).name}: stopping after this step"
            if number == signal.SIGINT and not read_launch().is_torchrun:
                line += "; once more to stop at once"
            write_stderr(line)


_signals: Signals | None = None  # of this process, or of the one that forked it


def is_stop_asked() -> bool:
    """Tell whether a signal has asked this process, or the one that forked it, to stop."""
    return _signals is not None and _signals.is_asked[0] == 1


def begin_script() -> None:
    """Handle signals, and reopen closed standard files."""
    global _signals, began_s  # noqa: PLW0603
    began_s = time.monotonic()
    # Before the handlers, which ask for the rank: one that interrupts an import would find half a module.
    find_readers(os.environ)
    # When rank 0 ends first, torch would add the frames of its C++ code to the line that says so.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _signals = Signals()
    _signals.install()
    open_closed_files()
    _unbuffer_output()
    gc.disable()  # collecting garbage among objects that stay would cost a quarter of the imports' time


def end_imports() -> None:
    """Collect garbage again, but not among the objects that the imports made."""
    # Python's documentation advises it for processes that fork: a collection writes to the header of each object,
    # and a loader process would get a copy of each page that holds one.
    gc.freeze()
    gc.enable()


def start_signal_handling(*, is_training: bool) -> Signals:
    """Return the signals since the script began; a process that does not train leaves them to their default handlers.

    Raises:
        UserError: the torchrun that started this process is gone.
    """
    global _signals  # noqa: PLW0603
    if _signals is None:
        _signals = Signals()
    if is_training:
        _signals.install()
    else:
        _signals.release()
    if read_launch().is_torchrun:
        # Until all ranks have joined: a process that waits for them inside torch handles no signal.
        end_with_parent(signal.SIGKILL)
        if os.getppid() != _signals.parent:
            raise UserError("the torchrun that started this process is gone; start again")
        if began_s is not None and read_launch().local_rank == 0:
            _warn_of_nohup()
    return _signals


def stop_signal_handling() -> None:
    """Restore the handlers, and forget a signal that has come."""
    global _signals  # noqa: PLW0603
    if _signals is not None:
        _signals.restore()
    _signals = None


def _warn_of_nohup() -> None:
    """Say that torchrun, which handles SIGHUP whatever it was before, has undone nohup."""
    import fcntl  # not above: Windows, which lacks it, is told so later

    # In a terminal nohup opens /dev/null as standard input, to write to.
    is_nohup = fcntl.fcntl(0, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
    if is_nohup and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        remedy = "setsid torchrun ..., or nohup torchrun --signals-to-handle SIGTERM,SIGINT,SIGQUIT ..."
        line = "torchrun overrides nohup: a closed terminal will stop this run"
        write_stderr(f"{line}; instead start {remedy}, or use tmux")


def follow_agent() -> None:
    """Have the death of torchrun stop this process like SIGTERM, once all processes have joined.

    Otherwise the ranks of a killed torchrun would train on to the end, and write, at the same time as those of its
    successor. A run that was started by a shell may outlive the shell.
    """
    if read_launch().is_torchrun:
        end_with_parent(signal.SIGTERM)


def end_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends in any way; Linux only."""
    if sys.platform == "linux":
        # prctl(2): sent at the end of the thread that forked this process, so the main thread forks loader processes.
        # Not sent for a parent that had ended before, so callers look at its number afterwards; cleared by a fork.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def silence_libraries() -> None:
    """Let only Python reach standard error: decoders in C write about images without naming them."""
    sys.stderr = open(os.dup(2), "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def start_worker(worker: int) -> None:
    """Prepare a loader process: it ends with its parent or at its parent's request, and at no other signal.

    torchrun and terminals signal the whole process group, and the loss of a loader process would end the run before it
    could save: torch then raises "DataLoader worker is killed by signal: Terminated". On SIGUSR2, from the stall
    watchdog, it prints its Python stacks. Off Linux it ends at any SIGTERM.
    """
    silence_libraries()
    faulthandler.register(signal.SIGUSR2, file=sys.stderr)
    for number in SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    if sys.platform != "linux":
        return
    parent = multiprocessing.parent_process().pid
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before `end_with_parent`
        os._exit(0)
    # A handler cannot tell who sent a signal; a thread that waits for it can, if no thread takes it otherwise.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_asked, args=(parent,), daemon=True, name="end when asked").start()


def _end_when_asked(parent: int) -> None:
    """End this process on a SIGTERM from its parent: torch and Python send one to workers that are left at the end."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def open_closed_files() -> None:
    """Open closed standard files: another file could get such a descriptor, and messages would be written into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The system gives the lowest number that is free: this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _unbuffer_output() -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        errors = stream.errors
        if errors == "strict":
            errors = "backslashreplace"  # or a path that the stream cannot encode would end the run
        # Line by line, into a pipe too, and without a buffer below: a forked process would inherit a line that could
        # not be written, try to write it again, and end the run.
        unbuffered = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115
        setattr(sys, name, io.TextIOWrapper(unbuffered, stream.encoding, errors, line_buffering=True))
