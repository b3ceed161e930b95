"""Shared by the tools: their parser, numbers on the command line, and errors of one line."""

import argparse
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from errors import ImageError, UserError
from files import write_atomically
from options import OneLineParser


def build_parser(prog: str, usage: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Return a parser without options yet: `usage` comes behind the command, and the epilog keeps its lines."""
    return OneLineParser(
        prog=prog,
        usage=f"{prog} {usage}",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def positive(text: str) -> int:
    """Return a number of at least one; an argparse type."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def write_output(option: str, path: Path, save: Callable[[BinaryIO], Any]) -> None:
    """Write a file that an option names, whole or not at all.

    Args:
        option: as --json.
        path: of the file.
        save: writes it.

    Raises:
        UserError: it cannot be written.
    """
    try:
        write_atomically(path, save)
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written: {error.strerror or error}; name another file") from error


def run(prog: str, work: Callable[[], int | None], when_interrupted: str, when_killed: str = "") -> None:
    """Run a tool and leave with its exit code; an error that a user can act on is one line.

    Args:
        prog: the tool's command.
        work: returns an exit code, or None for zero.
        when_interrupted: the message after Ctrl-C or SIGTERM.
        when_killed: is put behind the message about a worker process that was killed.
    """
    # As Ctrl-C: a batch system ends a job with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    warnings.simplefilter("ignore")  # Pillow's, on large images and odd palettes; torch's, on more workers than cores
    try:
        exit_code, message = work() or 0, ""
    except (UserError, ImageError) as error:
        exit_code, message = error.exit_code, str(error)
    except OSError as error:
        exit_code, message = 1, str(error)
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):
            raise
        exit_code = 1
        message = "a worker process ended unexpectedly; if the machine is short of memory, give fewer --workers"
        message += when_killed
    except KeyboardInterrupt:
        exit_code, message = 130, when_interrupted
    sys.stdout.flush()
    if message:
        sys.stderr.write(f"{prog}: error: {message}\n")
    sys.exit(exit_code)
