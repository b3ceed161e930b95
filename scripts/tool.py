"""Share a parser, option types, tables, output files and one-line errors among the tools.

Any function of a tool may raise `UserError` for a given value that cannot be used: `run` prints its line.
"""

import argparse
import builtins
import errno
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, TextIO

from distributed.ending import error_line, explain_limit, loader_killed
from distributed.signals import open_closed_files
from errors import ImageError, StorageError, UserError, escaped
from files import explain_failure, make_folder, write_atomically
from settings.options import BY_NAME, NO_ADDRESS
from settings.parser import OneLineParser

ROOT = Path(__file__).parent.parent
# Errors of the system by which a path that was given cannot be used.
_WRONG_PATH = {
    errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EEXIST,
}  # fmt: skip


def build_parser(prog: str, usage: str, about: str | None, more: str = "") -> argparse.ArgumentParser:
    """Return a parser without options; `usage` follows the command.

    `about` is the docstring of the tool: its first paragraph comes before the options, the others and `more` after
    them. It is None under `python -OO`.
    """
    description, _, rest = (about or "").partition("\n\n")
    return OneLineParser(
        prog=prog,
        usage=f"{prog} {usage}",
        description=description,
        epilog=f"{rest}\n{more}".strip(),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_train_option(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    """Add an option of train.py with a help of its own; None if it is not given, and refused outside its bounds."""
    option = BY_NAME[name]

    @wraps(option.type)
    def parse(word: str) -> Any:
        value = option.type(word)
        option.check(value)
        return value

    replace(option, help=text, default=None, type=bool if option.type is bool else parse).add_to(parser)
    parser.set_defaults(**{option.dest: None})


def positive(text: str) -> int:
    """Return a number of at least one; an argparse type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return int(text)


def as_path(text: str) -> Path:
    """Return a path; refuse an empty one, which would mean the current folder, and an address; an argparse type."""
    if not text or text.partition("/")[0].endswith(":"):  # whose password is not repeated
        raise argparse.ArgumentTypeError(NO_ADDRESS if text else "expected a path, and it is empty; . is this folder")
    return Path(text)


def as_place(text: str) -> str | Path:
    """Return the address of a pack, or else a path; an argparse type."""
    return text if "://" in text else as_path(text)


def output_file(*endings: str) -> Callable[[str], Path]:
    """Return an argparse type: the path of a file that can be written; others are refused before hours of work.

    A file that is there is replaced if its name has one of these endings, as that of an earlier output has: any other
    may be what the tool reads, such as a checkpoint or an image. Without endings the file holds weights, which may have
    any name but those of a run's own checkpoints; the tool refuses its own inputs.
    """

    def check(text: str) -> Path:
        path = as_path(text)
        is_there = path.exists()
        if (is_there and not path.is_file()) or not os.access(path.parent, os.W_OK | os.X_OK):
            raise argparse.ArgumentTypeError(f"{text}: expected a file in a folder that is there and can be written to")
        if not endings:
            from checkpointing.folder import STATE_FILES  # not above: it imports torch, which some tools do without

            if STATE_FILES.fullmatch(path.name):
                raise argparse.ArgumentTypeError(f"{text}: a run's own checkpoints have such names; give another one")
            if path.suffix == ".safetensors":
                raise argparse.ArgumentTypeError(f"{text}: it is written as torch.save does; give a name such as a.pth")
        if is_there and endings and path.suffix.lower() not in endings:
            raise argparse.ArgumentTypeError(
                f"{text} is there already, and only files named *{' or *'.join(endings)} are replaced; give another"
            )
        return path

    return check


def write_output(path: Path, content: bytes, option: str = "", verify: Callable[[Path], object] | None = None) -> None:
    """Write a file whole or not at all; `option` names it in a message, and `verify` is as in `write_atomically`."""
    try:
        write_atomically(path, content, verify)
    except OSError as error:
        reason = explain_failure(error, path.parent, len(content))
        raise UserError(f"{option} {path} cannot be written: {reason}; name another place".lstrip()) from error


def replace_between(path: Path, begin: str, end: str, text: str) -> None:
    """Replace what a page has between two lines; UserError if it lacks one."""
    before, _, rest = path.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise UserError(f"{path} lacks the line {begin.strip()} or {end.strip()}")
    write_atomically(path, f"{before}{begin}{text}{end}{after}".encode())


def moved(name: str) -> None:
    """End the command of a tool that is in another place now, with one line and exit code 2."""
    print(f"python -m scripts.{name}: error: it is python -m bench.{name} now, with the same options", file=sys.stderr)
    sys.exit(2)


def as_json(content: Any) -> bytes:
    """Return plain values as the bytes of a JSON file, which has no word for NaN and infinity: ValueError for them."""
    return json.dumps(content, indent=1, allow_nan=False).encode() + b"\n"


def write_report(path: Path, content: Any) -> None:
    """Write plain values to the JSON file that `--json` names."""
    write_output(path, as_json(content), "--json")


def explain(error: BaseException) -> BaseException:
    """Return a one-line error for one of torch's or the system's that a user can act on, and any other unchanged."""
    if isinstance(error, RecursionError):
        return UserError("a file is nested too deeply to be read; it is damaged, or no file of a run")
    if isinstance(error, RuntimeError | MemoryError):
        is_killed = "DataLoader worker (pid" in str(error)
        return loader_killed(str(error)) if is_killed else explain_limit(error) or error
    if isinstance(error, OSError) and error.filename is not None and error.errno in _WRONG_PATH:
        return UserError(f"{error.filename}: {error.strerror}; give another path")
    if isinstance(error, OSError) and error.filename is None and error.errno in (errno.EPIPE, errno.ENOSPC):
        return StorageError(f"standard output cannot be written: {error.strerror}")
    return explain_limit(error) or error


def make_out(out: Path, name: str = "OUT") -> None:
    """Make the folder that a tool writes to, the argument `name`; UserError if it cannot be written to."""
    make_folder(out)
    if not os.access(out, os.W_OK | os.X_OK):
        raise UserError(f"{out} cannot be written to; choose another {name}")


def check_outside(out: Path, folder: Path) -> None:
    """Refuse an OUT among the images of a source: it would be read as a class of them."""
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(folder)):
        raise UserError(f"{out} is inside {folder}; choose a folder outside the images")


@contextmanager
def clean_stdout() -> Iterator[TextIO]:
    """Yield a stream to standard output, and send all other output, C++'s too, to standard error meanwhile."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(kept, "w", encoding="utf-8", errors="backslashreplace", closefd=False) as stream:
            yield stream
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def in_order(function: Callable[[Any], Any], tasks: list, num_workers: int) -> Iterable[Any]:
    """Return an iterable of the function's results in the order of the tasks, computed by worker processes."""
    from torch.utils.data import DataLoader  # not above: some tools do without torch

    from distributed.signals import start_worker

    start: dict[str, Any] = {"multiprocessing_context": "fork", "worker_init_fn": start_worker}
    # torch's annotations know no list as a data set.
    return DataLoader(tasks, batch_size=None, collate_fn=function, num_workers=num_workers, **start)  # type: ignore[arg-type]


def run(prog: str, work: Callable[[], int | None], when_interrupted: str) -> None:
    """Run a tool and exit with its code, 0 for None; print an error that a user can act on as one line.

    `when_interrupted` is the line after Ctrl-C or SIGTERM.
    """
    # As Ctrl-C: a batch system ends a job with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    warnings.simplefilter("ignore")  # Pillow's, on large images and odd palettes; torch's, on more workers than cores
    open_closed_files()
    original = builtins.print  # a terminal obeys control characters, and names may hold them
    builtins.print = lambda *texts, **how: original(*map(escaped, texts), **how)
    try:
        exit_code, message = work() or 0, ""
        sys.stdout.flush()
    except KeyboardInterrupt:
        exit_code, message = 130, when_interrupted
    except (UserError, ImageError, OSError, RuntimeError, MemoryError) as error:
        known = explain(error)
        if isinstance(known, RuntimeError):
            raise
        exit_code, message = getattr(known, "exit_code", 1), str(known)
    try:
        sys.stdout.flush()
    except OSError:  # Python would try to write the rest again, and say so in a traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if message:
        sys.stderr.write(error_line(f"{prog}: error", message) + "\n")
    sys.exit(exit_code)
