"""Ahead of imports that take seconds: watch the signals, open standard files that are closed."""

import gc
import io
import os
import signal
import sys
from types import FrameType, TracebackType

from errors import say
from launch import read_launch

# The last two come from a terminal that is closed, or from its quit key; torchrun passes them on.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Signals:
    """Take the signals that announce an end.

    A handler only sets a flag: it may interrupt any line of the program, and so may use neither files nor collectives.

    Attributes:
        number: the first signal that came; 0 for none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._when = "before the first step"
        self._handlers = {}  # the handlers before `install`, by signal

    def install(self) -> None:
        """Handle the signals from now on."""
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                self._handlers.setdefault(number, signal.signal(number, self._note))

    def begin_steps(self) -> None:
        """Announce from now on a stop after the step, and let a second Ctrl-C raise KeyboardInterrupt."""
        self._when = "after this step"

    def release(self) -> None:
        """Handle the signals no longer, and raise again one that has come."""
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._handlers = {}
        if self.number:
            signal.raise_signal(self.number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A terminal's Ctrl-C comes twice under torchrun: from the terminal and from the agent.
        if number == self.number == signal.SIGINT and not read_launch().is_torchrun:
            if self._when == "after this step":
                raise KeyboardInterrupt
            say("train.py: error: interrupted")
            os._exit(1)
        is_first, self.number = not self.number, self.number or number  # before `say`, which a signal may interrupt
        if is_first and read_launch().local_rank == 0:
            more = "; once more to stop at once" if number == signal.SIGINT else ""
            say(f"{signal.Signals(number).name}: stopping {self._when}{more}")


_early: Signals | None = None


def begin_script() -> None:
    """Watch the signals, give closed standard files a place, and have a failing import say so in one line."""
    global _early  # noqa: PLW0603
    _early = Signals()
    _early.install()
    open_closed_files()
    _unbuffer_output()
    sys.excepthook = _say_failed_import
    gc.disable()  # a quarter of the imports' time would go into collecting garbage among objects that stay


def end_imports() -> None:
    """Collect garbage again, but not among the objects that the imports made."""
    gc.freeze()
    gc.enable()


def take_signals() -> Signals:
    """Return the `Signals` that have been watching since the script began, once; else new ones."""
    global _early
    signals, _early = _early or Signals(), None
    return signals


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


def _say_failed_import(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report a failed import in one line, once per machine, and any other error with a traceback."""
    if not issubclass(kind, ImportError | OSError | MemoryError):
        sys.__excepthook__(kind, error, trace)
        return
    if read_launch().local_rank == 0:
        reason = " ".join(str(error).split()) or "out of memory"
        say(
            f"train.py: error: an import failed ({reason}); install the packages of requirements.txt, and see that "
            "`ulimit -n` and `ulimit -v` leave enough files and memory"
        )
    os._exit(2)
