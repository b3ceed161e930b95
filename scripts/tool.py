"""What tools share: numbers on the command line, and errors of one line."""

import signal
import sys
import warnings
from collections.abc import Callable

from errors import ImageError, UserError


def positive(text: str) -> int:
    """Return a number of at least one; an argparse type."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def run(prog: str, work: Callable[[], int | None], when_interrupted: str) -> None:
    """Run a tool and leave with its exit code; an error that a user can act on is one line.

    Args:
        prog: the tool's command.
        work: returns an exit code, or None for zero.
        when_interrupted: what is said after Ctrl-C or SIGTERM.
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
    except KeyboardInterrupt:
        exit_code, message = 130, when_interrupted
    sys.stdout.flush()
    if message:
        sys.stderr.write(f"{prog}: error: {message}\n")
    sys.exit(exit_code)
