"""Errors that a user can act on, and the words of messages."""

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

if not hasattr(os, "fork"):  # before anything that needs it is imported
    print("error: Touchstone needs Linux or macOS; on Windows, use it in WSL2", file=sys.stderr)
    sys.exit(2)


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return `; did you mean X?`, a prefix before X: the known words that begin so, else the closest; or nothing."""
    import difflib  # not above: the script watches signals before it imports more than it must

    known = list(known)
    close = [each for each in known if len(word) > 2 and each.startswith(word)]
    if not close:
        close = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    if not close:
        return ""
    *others, last = [f"{prefix}{each}" for each in close]
    if not others:
        return f"; did you mean {last}?"
    return f"; did you mean {', '.join(others)} or {last}?"


def counted(number: int, noun: str, form: str = "") -> str:
    """Return a number and its noun in the right form, such as `1 class` and `2 classes`."""
    if number != 1:
        noun += "es" if noun.endswith(("s", "batch")) else "s"
    return f"{number:{form}} {noun}"


def duration(seconds: float) -> str:
    """Return a time in its two largest units, such as 12m34s; -- for an unknown one."""
    if not math.isfinite(seconds):
        return "--"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    if minutes:
        return f"{minutes}m{seconds:02d}s"
    return f"{seconds}s"


def is_printable(text: str) -> bool:
    """Tell whether text fits on one line of a file in UTF-8."""
    has_surrogates = any("\ud800" <= character <= "\udfff" for character in text)
    return not has_surrogates and "\0" not in text and len(text.splitlines()) < 2


def one_line(text: str) -> str:
    """Return text on one line, with control characters and those outside UTF-8 written as escapes.

    Whatever prints a name of a file, a class or a tensor passes it through here: a terminal obeys escape sequences.
    """
    shown = []
    for character in " ".join(text.splitlines()):
        # Python calls the spaces of other scripts unprintable; names of classes hold them.
        is_space = character == "\t" or (character >= "\xa0" and character.isspace())
        if not character.isprintable() and not is_space:
            character = ascii(character)[1:-1]
        shown.append(character)
    return "".join(shown)


def escaped(text: Any) -> str:
    """Return text each of whose lines is as of `one_line`; all that is printed passes through here."""
    return "\n".join(map(one_line, str(text).split("\n")))


def write_stderr(line: str) -> None:
    """Write a line to standard error; safe even in a signal handler.

    Not by `print`, which is silent on other ranks than 0, and whose buffer a handler may interrupt in a write.
    """
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))


WARNED = set()


def warn_on_failure(trouble: str, work: Callable[..., Any], *args: Any) -> bool:
    """Do work whose failure must not end a run, such as a record or a picture; return whether it succeeds.

    The first failure of a process prints the trouble that follows from it, and the reason.
    """
    try:
        work(*args)
    # Of any library, or of code of the user's own: that may call sys.exit.
    except (Exception, SystemExit) as error:
        # Once: a full disk fails at each of a million records.
        if trouble not in WARNED:
            WARNED.add(trouble)
            print(f"warning: {trouble}: {_first_line(error)}; training continues")
        return False
    return True


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text, with its type unless the system has given the reason."""
    lines = str(getattr(error, "strerror", None) or error).splitlines()
    if lines and lines[0] and isinstance(error, OSError):
        return lines[0]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


class UserError(Exception):
    """An input cannot be used; the message names it, the expected input and a remedy.

    The script prints the message once, without a traceback, and leaves with `exit_code`.

    Args:
        message: one line, unless it `has_lines`.
        exit_code: of the process; by default the class's.
        has_lines: whether the message has several lines, which are printed uncut.
        is_of_one_rank: whether the other ranks do not meet the error, so that this one prints it at once.
    """

    # argparse's own, for all that is refused because of what was given.
    exit_code = 2

    def __init__(
        self, message: str, *, exit_code: int | None = None, has_lines: bool = False, is_of_one_rank: bool = False
    ) -> None:
        super().__init__(message)
        self.has_lines = has_lines
        self.is_of_one_rank = is_of_one_rank
        if exit_code is not None:
            self.exit_code = exit_code

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows, by IPython's name for it: the one line, and no traceback."""
        return [escaped(f"error: {self}")]


@contextmanager
def as_user_error(begin: str) -> Iterator[None]:
    """Turn any error into a `UserError` of one line: `begin` and the last line of the error's text."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{begin}: {error}", exit_code=error.exit_code) from error
    except Exception as error:
        # Before the last line may come the traceback of a loader process, or a headline as of load_state_dict.
        lines = str(error).strip().splitlines()
        reason = lines[-1].strip()[:200] if lines else ""
        raise UserError(f"{begin}: {reason or type(error).__name__}") from error


class PreemptedError(Exception):
    """All ranks stop because a signal or `--stop-epoch` asked for it: no failure, and the run can be resumed."""

    # With another one torchrun's --max-restarts would start the run again.
    exit_code = 0


class StorageError(UserError):
    """This machine fails or lacks something, for no fault of the input: a disk, memory, files, processes, a version."""

    # Not 2: another start, or another machine, may do better.
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
    _render_traceback_ = UserError._render_traceback_

    def __str__(self) -> str:
        # A loader process sends its traceback along, whose last line is the message.
        return super().__str__().strip().splitlines()[-1].removeprefix("errors.ImageError: ")
