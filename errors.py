"""Errors that a user can act on, how they end a process, and optional packages."""

import errno
import importlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

if not hasattr(os, "fork"):  # before anything that needs it is imported
    print("error: Touchstone needs Linux or macOS; on Windows, use it in WSL2", file=sys.stderr)
    sys.exit(2)

# The variable that names a file for refusals, set by a launcher that torchrun tells no exit code: scripts/container.sh.
_REFUSALS = "TOUCHSTONE_REFUSAL_FILE"

# Most characters of an error's line.
MOST_LINE = 298


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return `; did you mean X?`, a prefix before X: the known words that begin so, else the closest; or nothing."""
    import difflib  # not above: the script watches signals before it imports more than it must

    known = list(known)
    longer = [each for each in known if len(word) > 2 and each.startswith(word)]
    close = [f"{prefix}{each}" for each in longer or difflib.get_close_matches(word, known, n=1, cutoff=0.75)]
    return f"; did you mean {', '.join(close[:-1])}{' or ' if close[1:] else ''}{close[-1]}?" if close else ""


def counted(number: int, noun: str, form: str = "") -> str:
    """Return a number and its noun in the right form, such as `1 class` and `2 classes`."""
    plural = f"{noun}es" if noun.endswith(("s", "batch")) else f"{noun}s"
    return f"{number:{form}} {noun if number == 1 else plural}"


def duration(seconds: float) -> str:
    """Return a time in its two largest units, such as 12m34s; -- for an unknown one."""
    if not math.isfinite(seconds):
        return "--"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02d}h"
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def is_printable(text: str) -> bool:
    """Tell whether text fits on one line of a file in UTF-8."""
    has_surrogates = any("\ud800" <= character <= "\udfff" for character in text)
    return not has_surrogates and "\0" not in text and len(text.splitlines()) < 2


def one_line(text: str) -> str:
    """Return text on one line, with control characters and those outside UTF-8 written as escapes.

    Whatever prints a name of a file, a class or a tensor passes it through here: a terminal obeys escape sequences.
    """
    text = " ".join(text.splitlines())
    shown = []
    for each in text:
        is_space = each == "\t" or (each >= "\xa0" and each.isspace())
        shown.append(each if each.isprintable() or is_space else ascii(each)[1:-1])
    return "".join(shown)


def escaped(text: Any) -> str:
    """Return text each of whose lines is as of `one_line`; all that is printed passes through here."""
    return "\n".join(map(one_line, str(text).split("\n")))


def aligned(rows: list[list[str]], to_left: Container[int] = (0,)) -> list[str]:
    """Return the lines of a table; columns whose numbers are in `to_left` are aligned to the left, others to the right.

    Trailing spaces are left out.
    """
    rows = [[one_line(word) for word in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        words = [word.ljust(width) if number in to_left else word.rjust(width) for number, (word, width) in cells]
        lines.append("  ".join(words).rstrip())
    return lines


def error_line(begin: str, reason: str, *, has_lines: bool = False) -> str:
    """Return `begin: reason` on one line of at most `MOST_LINE` characters; with `has_lines` all of it, as it is.

    Of a longer line the middle of long words is left out, which leaves a path its file name; then the middle of the
    line, which leaves the value and the remedy.
    """
    if has_lines:
        return escaped(f"{begin}: {reason}")
    line = f"{begin}: {one_line(reason)}"
    if len(line) > MOST_LINE:
        line = " ".join(each if len(each) <= 80 else f"{each[:20]}...{each[-57:]}" for each in line.split(" "))
    return line if len(line) <= MOST_LINE else f"{line[: MOST_LINE // 2]} ... {line[5 - MOST_LINE // 2 :]}"


def say(line: str) -> None:
    """Write a line to standard error; safe even in a signal handler."""
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))


WARNED = set()


def attempt(trouble: str, work: Callable[..., Any], *args: Any) -> bool:
    """Do work whose failure must not end a run, such as a record or a picture; return whether it succeeds.

    The first failure of a process prints the trouble that follows from it, and the reason.
    """
    try:
        work(*args)
    except (Exception, SystemExit) as error:  # of any library, or of code of the user's own
        if trouble not in WARNED:
            WARNED.add(trouble)
            reason = (str(getattr(error, "strerror", None) or error).splitlines() or [""])[0]
            kind = "" if reason and isinstance(error, OSError) else f"{type(error).__name__}: "
            print(f"warning: {trouble}: {kind}{reason}; training continues")
        return False
    return True


class UserError(Exception):
    """An input cannot be used; the message names it, the expected input and a remedy.

    The script prints the message once, without a traceback, and leaves with `exit_code`.

    Args:
        message: one line, unless it `has_lines`.
        exit_code: of the process; by default the class's.
        has_lines: whether the message has several lines, which are printed uncut.
        is_of_one_rank: whether the other ranks do not meet the error, so that this one prints it at once.
    """

    exit_code = 2

    def __init__(
        self, message: str, *, exit_code: int | None = None, has_lines: bool = False, is_of_one_rank: bool = False
    ) -> None:
        super().__init__(message)
        self.has_lines, self.is_of_one_rank = has_lines, is_of_one_rank
        if exit_code is not None:
            self.exit_code = exit_code


@contextmanager
def in_one_line(begin: str) -> Iterator[None]:
    """Turn any error into a `UserError` of one line: `begin` and the last line of the error's text."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{begin}: {error}", exit_code=error.exit_code) from error
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise UserError(f"{begin}: {lines[-1].strip()[:200] or type(error).__name__}") from error


def loader_killed(cause: str) -> UserError:
    """Return the error of a loader process that was killed, with the likely cause."""
    advice = "most likely it ran out of memory: use fewer --workers, or check the system's log"
    if "was loading" in cause:
        advice += "; if it happens again with this image, remove it"
    if "Bus error" in cause:
        advice = "most likely shared memory is full: enlarge it, or use fewer --workers"
    message = f"a loader process was killed ({cause.strip()}); {advice}"
    return UserError(message, exit_code=1, is_of_one_rank=True)


class PreemptedError(Exception):
    """All ranks stop because a signal or `--stop-epoch` asked for it: no failure, and the run can be resumed."""

    exit_code = 0


class StorageError(UserError):
    """This machine fails or lacks something, for no fault of the input: a disk, memory, files, processes, a version."""

    exit_code = 1


class BadImageError(Exception):
    """An image's bytes are no image, or a damaged one, or claim too much; the message says which.

    Failures of the disk or memory are other errors.
    """


class ImageError(Exception):
    """An image of the data set cannot be used; the message names its path.

    Its one string argument lets it come back from a loader process with its own type.
    """

    exit_code = 1
    is_of_one_rank = True

    def __str__(self) -> str:
        # A loader process sends its traceback along, whose last line is the message.
        return super().__str__().strip().splitlines()[-1].removeprefix("errors.ImageError: ")


def require_timm(option: str, value: str) -> ModuleType:
    """Return timm for an option that needs it; UserError if it cannot be used."""
    return require_package("timm", f"{option} {value}")


def find_timm_config(model: str) -> Any:
    """Return timm's config of a model's pretrained weights, or None if timm has none; `model` is timm/NAME."""
    with suppress(RuntimeError):  # timm knows no such tag
        return require_timm("--model", model).get_pretrained_cfg(model.removeprefix("timm/"))
    return None


def require_package(package: str, needed_by: str) -> ModuleType:
    """Return the package that `needed_by`, such as an option, needs; UserError if it cannot be used."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise UserError(f"{needed_by} needs {name}, which is not installed: pip install {name} ({error})") from error


# The system answers alike where memory is short: for the stack of a thread.
_FULL = "no more processes or threads, or no memory for one; raise `ulimit -u` or `ulimit -v`, or use fewer --workers"

# By words of an error's reason, which torch may have turned into text (a path is none): the reason and the remedy.
_LIMITS = {
    "out of memory. Tried to allocate": "out of memory; use a smaller --batch-size, or --grad-checkpointing",
    "DefaultCPUAllocator: can't allocate": "out of memory; use a smaller --batch-size, or --grad-checkpointing",
    "could not create a primitive": "out of memory; raise `ulimit -v`, or use a smaller --batch-size",  # oneDNN's words
    "can't start new thread": _FULL,
    os.strerror(errno.EMFILE): "Too many open files; raise `ulimit -n`",
    os.strerror(errno.ENFILE): "the machine has reached its limit of open files",
    os.strerror(errno.EAGAIN): _FULL,
    os.strerror(errno.ENOMEM): "out of memory; use fewer --workers, or raise `ulimit -v`",
}


def explain_limit(error: BaseException) -> StorageError | None:
    """Return one line in place of an error by which the machine refuses memory, files or processes; None for others."""
    text = str(getattr(error, "strerror", error)) if isinstance(error, OSError | RuntimeError) else ""
    if isinstance(error, MemoryError):
        text = os.strerror(errno.ENOMEM)
    if isinstance(error, FileNotFoundError) and (error.errno, error.filename) == (errno.ENOENT, None):  # os.getcwd
        return StorageError("the current folder was removed; change to another one", exit_code=2)
    line = next((line for words, line in _LIMITS.items() if words in text), None)
    return None if line is None else StorageError(line, exit_code=2)


def note_refusal(exit_code: Any, error: BaseException) -> None:
    """Write a refusal to the file that the environment may name: another start would end so too.

    Not what this machine lacks, which the next one may have. One write at the file's end: other ranks may write too.
    """
    path = os.environ.get(_REFUSALS)
    if path and exit_code == UserError.exit_code and not isinstance(error, StorageError):
        with suppress(OSError), open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{error}\n")


def end_refusals() -> None:
    """Remove the refusals of torchrun's earlier attempts, now that the run starts, and let this process write none."""
    with suppress(OSError):
        os.unlink(os.environ.pop(_REFUSALS, ""))


def end_process(exit_code: int) -> None:
    """End this process at once, and its loader processes with it.

    Not by sys.exit: tearing down a process group whose other members are gone can abort and hide the exit code, and
    Python would wait for loader processes that are in the middle of something.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # gone, closed or never there
            stream.flush()
    os._exit(exit_code)


def end_by(error: BaseException, launch: Any, prog: str = "train.py") -> None:
    """End this process for an error: one line and an exit code if it has one, else a traceback and 1.

    Most errors are met by all ranks, so the others wait ten seconds for rank 0 to print it and the launcher to end
    them; then the first rank of each node prints it too, and all where no launcher has started them: one may have met
    it alone. torchrun turns any exit code into 1.

    Args:
        error: the error to report.
        launch: the `Launch` of this process.
        prog: the command, with which the line begins.
    """
    if isinstance(error, SystemExit):  # of the parser
        note_refusal(error.code, error)
        end_process(error.code or 0)
    if isinstance(error, KeyboardInterrupt):
        error = UserError("interrupted; --resume auto continues from the last checkpoint", exit_code=1)
    error = explain_limit(error) or error
    exit_code = getattr(error, "exit_code", None)
    if exit_code is None:
        import traceback  # not above: it takes time, and most processes need none

        # By `say`: traceback prints by `print`, which is silent on other ranks than 0.
        say("".join(traceback.format_exception(error)).rstrip())
        end_process(1)
    note_refusal(exit_code, error)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # so that a launcher can end this process now
    where = f" on rank {launch.rank}" if launch.rank else ""
    if launch.rank and not getattr(error, "is_of_one_rank", False):
        time.sleep(10)
        if launch.local_rank and not launch.is_by_hand and not isinstance(error, StorageError):  # met by all of a node
            end_process(exit_code)
    # By `say`, since print is silent on other ranks than 0.
    say(error_line(f"{prog}: error{where}", str(error), has_lines=getattr(error, "has_lines", False)))
    end_process(exit_code)
