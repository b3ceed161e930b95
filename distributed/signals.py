"""Signal handling, and the start of the script before torch is imported."""

import builtins
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from os.path import dirname
from types import FrameType
from typing import Any

from distributed.launch import read_launch
from errors import WARNED, UserError, say

# SIGHUP and SIGQUIT come from a terminal that is closed or from its quit key; torchrun passes them on.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_PR_SET_PDEATHSIG = 1

began_s = None  # when the script began, by `time.monotonic`; None in a process that imports this project


class Signals:
    """The signals that ask this process to stop: none yet, one (stop after the step), or Ctrl-C twice (stop now).

    A handler may interrupt any line of the program, so it uses neither files nor collectives: it sets `number`, which
    the ranks compare after each step (`distributed.decision`). A second Ctrl-C ends it at once, but under torchrun.

    Attributes:
        number: the first signal that came; 0 for none.
        parent: the process that had started this one.
    """

    def __init__(self) -> None:
        self.number, self.parent = 0, os.getppid()
        self.is_asked = mmap.mmap(-1, 1)  # whether one has come: a byte that forked processes share
        self._handlers = {}  # the handlers before `install`, by signal

    def install(self) -> None:
        """Handle the signals from now on; outside the main thread, as of Ray's workers, they stay their owner's."""
        for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                self._handlers.setdefault(number, signal.signal(number, self._handle))

    def release(self) -> None:
        """Restore the handlers before `install`, and raise again a signal that has come."""
        self.restore()
        if self.number:
            signal.raise_signal(self.number)

    def restore(self) -> None:
        """Restore the handlers before `install`."""
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._handlers = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A terminal's Ctrl-C comes twice under torchrun: from the terminal and from the agent.
        if number == self.number == signal.SIGINT and not read_launch().is_torchrun:
            if began_s is None:  # a notebook's process goes on
                raise KeyboardInterrupt
            say("train.py: error: interrupted; --resume auto resumes from the last checkpoint")
            os._exit(1)
        is_first, self.number = not self.number, self.number or number  # before `say`, which a signal may interrupt
        self.is_asked[0] = 1
        if is_first and read_launch().local_rank == 0:
            more = "" if number != signal.SIGINT or read_launch().is_torchrun else "; once more to stop at once"
            say(f"{signal.Signals(number).name}: stopping after this step{more}")


_signals: Signals | None = None  # of this process, or of the one that forked it


def is_stop_asked() -> bool:
    """Tell whether a signal has asked this process, or the one that forked it, to stop."""
    return _signals is not None and _signals.is_asked[0] == 1


_end: ExitStack | None = None  # of the run that `main` is in, in a process that goes on after it


def at_end(work: Callable[..., Any], *args: Any) -> None:
    """Have work done at the end of `main`, the last first: never in the script, and without a `main` around."""
    if _end is not None:
        _end.callback(work, *args)


@contextmanager
def lent_process() -> Iterator[None]:
    """Begin a run as in a fresh process, and leave this one as it was, such as a notebook's; the script's own ends.

    Settings that the run or code of the user's own may change come back, and results that functions keep are forgotten.
    By `at_end` so do the loader processes, modules of the user's own, log.txt and the lock of the folder.
    """
    global _end  # noqa: PLW0603
    with ExitStack() as stack:
        if began_s is None:
            _end = stack
            stack.callback(_return_signals)
            _keep_settings(stack)
            stack.callback(_clear_caches)
            _clear_caches()
        yield


def _return_signals() -> None:
    global _signals, _end  # noqa: PLW0603
    if _signals is not None:
        _signals.restore()
    _signals = _end = None


def _clear_caches() -> None:
    """Forget the warnings that were printed, and the results of every cached function of this project."""
    WARNED.clear()
    files = [(module, getattr(module, "__file__", None) or "") for module in sys.modules.values()]
    for module in [module for module, file in files if dirname(dirname(file)) == dirname(dirname(__file__))]:
        for function in [each for each in vars(module).values() if hasattr(each, "cache_clear")]:
            function.cache_clear()


def _keep_settings(stack: ExitStack) -> None:
    """Let the stack restore the settings of Python and torch that a run, or code of the user's own, may change."""
    import random  # not above: the script handles signals before it imports more than it must

    import numpy
    import torch

    cudnn, fill = torch.backends.cudnn, torch.utils.deterministic
    flags = [(builtins, "print"), (cudnn, "benchmark"), (cudnn, "deterministic"), (fill, "fill_uninitialized_memory")]
    for owner, name in flags:
        stack.callback(setattr, owner, name, getattr(owner, name))
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    mode = torch.are_deterministic_algorithms_enabled()
    stack.callback(torch.use_deterministic_algorithms, mode, warn_only=warn_only)
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    stack.callback(gc.enable if gc.isenabled() else gc.disable)
    stack.callback(random.setstate, random.getstate())
    stack.callback(numpy.random.set_state, numpy.random.get_state())
    stack.callback(torch.set_rng_state, torch.get_rng_state())
    tf32 = partial(getattr, cudnn, "allow_tf32"), partial(setattr, cudnn, "allow_tf32")
    for read, write in (tf32, (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)):
        with suppress(RuntimeError):  # torch does not read one that was set by its newer names
            stack.callback(_restore, read, write, read())


def _restore(read: Callable[[], Any], write: Callable[[Any], None], value: Any) -> None:
    """Set a value only if it has changed: torch would take the older of its names from then on."""
    if read() != value:
        write(value)


def begin_script() -> None:
    """Handle signals, and reopen closed standard files."""
    global _signals, began_s  # noqa: PLW0603
    began_s = time.monotonic()
    # When rank 0 ends first, torch would add the frames of its C++ code to the line that says so.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _signals = Signals()
    _signals.install()
    open_closed_files()
    _unbuffer_output()
    gc.disable()  # collecting garbage among objects that stay would cost a quarter of the imports' time


def end_imports() -> None:
    """Collect garbage again, but not among the objects that the imports made."""
    gc.freeze()
    gc.enable()


def start_signal_handling(*, is_training: bool) -> Signals:
    """Return the signals since the script began; a process that does not train leaves them to their default handlers.

    Raises:
        UserError: the torchrun that started this process is gone.
    """
    global _signals  # noqa: PLW0603
    _signals = _signals or Signals()
    _signals.install() if is_training else _signals.release()
    if read_launch().is_torchrun:
        # Until all ranks have joined: a process that waits for them inside torch handles no signal.
        end_with_parent(signal.SIGKILL)
        if os.getppid() != _signals.parent:
            raise UserError("the torchrun that started this process is gone; start again")
        import fcntl  # not above: Windows, which lacks it, is told so later

        # In a terminal nohup opens /dev/null as standard input, to write to.
        is_nohup = began_s is not None and fcntl.fcntl(0, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
        if is_nohup and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN and read_launch().local_rank == 0:
            remedy = "setsid torchrun ..., or nohup torchrun --signals-to-handle SIGTERM,SIGINT,SIGQUIT ..."
            say(f"torchrun overrides nohup: a closed terminal will stop this run; instead start {remedy}, or use tmux")
    return _signals


def follow_agent() -> None:
    """Have the death of torchrun stop this process like SIGTERM, once all processes have joined.

    Otherwise the ranks of a killed torchrun would train on, and write, at the same time as those of its successor. A
    run that was started by a shell may outlive the shell.
    """
    if read_launch().is_torchrun:
        end_with_parent(signal.SIGTERM)


def end_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends in any way; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def silence_libraries() -> None:
    """Let only Python reach standard error: decoders in C write about images without naming them."""
    sys.stderr = open(os.dup(2), "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def start_worker(worker: int) -> None:
    """Prepare a loader process: it ends with its parent or at its parent's request, and at no other signal.

    torchrun and terminals signal the whole process group, and the loss of a loader process would end the run before it
    could save. On SIGUSR2, from the stall watchdog, it prints its Python stacks. Off Linux it ends at any SIGTERM.
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
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free: this one
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _unbuffer_output() -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        # Otherwise a path that the stream cannot encode would end the run.
        errors = "backslashreplace" if stream.errors == "strict" else stream.errors
        # Line by line, into a pipe too, and without a buffer below: a forked process would inherit a line that could
        # not be written, try to write it again, and end the run.
        unbuffered = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115
        setattr(sys, name, io.TextIOWrapper(unbuffered, stream.encoding, errors, line_buffering=True))
