"""What tools share: errors of one line, and one line of progress."""

import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

from errors import ImageError, UserError
from scripts.pack import size_text

_PROGRESS_S = 5.0


class Progress:
    """A line that says how far a tool is: rewritten on a terminal, else a new one every few seconds.

    Args:
        work: the first words of the line.
        num_images: how many there are, or zero where only `num_bytes` is known.
        num_bytes: how much there is to read, or zero where only `num_images` is known.
    """

    def __init__(self, work: str, *, num_images: int = 0, num_bytes: int = 0) -> None:
        self.work, self.num_images, self.num_bytes = work, num_images, num_bytes
        self.images = self.bytes = 0
        self.skipped = 0.0  # share that an earlier run has done, which says nothing of how fast this one is
        self.is_terminal = sys.stderr.isatty()
        self.start_s = self.shown_s = time.monotonic()

    def share(self) -> float:
        """Return how much of the work is done."""
        done, total = (self.images, self.num_images) if self.num_images else (self.bytes, self.num_bytes)
        return min(done / max(total, 1), 1.0)

    def update(self, num_bytes: int, *, images: int = 1, is_skipped: bool = False) -> None:
        """Count images, or bytes alone, and show the line when it is due."""
        before = self.share()
        self.images += images
        self.bytes += num_bytes
        self.skipped += (self.share() - before) * is_skipped
        now_s = time.monotonic()
        if now_s - self.shown_s >= (0.2 if self.is_terminal else _PROGRESS_S):
            self.shown_s = now_s
            self.show()

    def show(self) -> None:
        """Write the line."""
        share, elapsed_s = self.share(), time.monotonic() - self.start_s
        left = timedelta(seconds=int((1 - share) * elapsed_s / max(share - self.skipped, 1e-9)))
        images = f"{self.images:,} of {self.num_images:,}" if self.num_images else f"{self.images:,}"
        num_bytes = (
            f"{size_text(self.bytes)} of {size_text(self.num_bytes)}" if self.num_bytes else size_text(self.bytes)
        )
        line = f"{self.work}: {images} images, {num_bytes} ({share:.1%}), {left} left"
        if self.is_terminal:
            sys.stderr.write(f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K")
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def finish(self) -> None:
        """Leave the last line standing; how many bytes there are is known now, and was a guess."""
        self.num_bytes = self.num_bytes and self.bytes
        self.show()
        sys.stderr.write("\n" if self.is_terminal else "")


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
