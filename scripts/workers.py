"""Processes that work through a list in order and never outlive their parent, and a line that says how far they are."""

import multiprocessing
import multiprocessing.connection
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

from errors import ImageError, UserError


class UnfinishedError(UserError):
    """The work cannot be finished, or is not what it should be; what is whole stays."""

    exit_code = 1


class Workers:
    """Processes that apply a function to tasks and give the results in the order of the tasks.

    Each reads its tasks from a pipe of which the parent alone holds the other end, so that none outlives the parent,
    however that ends. At most a few results a worker are held at a time.

    Args:
        num_workers: how many.
        function: what they do; an ImageError that it raises is raised again in the parent, in the task's turn.
    """

    def __init__(self, num_workers: int, function: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self.connections, self.processes = [], []
        for _ in range(num_workers):
            ours, theirs = context.Pipe()
            self.connections.append(ours)
            process = context.Process(target=work, args=(theirs, function, self.connections), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()

    def in_order(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """Yield the result of each task.

        Raises:
            UnfinishedError: a worker was ended from outside.
        """
        try:
            for result in self.exchange(enumerate(tasks)):
                if isinstance(result, ImageError):
                    raise result
                yield result
        except (EOFError, ConnectionError) as error:
            raise UnfinishedError(
                "a worker process ended unexpectedly; if the machine is short of memory, give fewer --workers. "
                "The same command goes on after the last whole shard"
            ) from error

    def exchange(self, numbered: Iterator[tuple[int, Any]]) -> Iterator[Any]:
        """Hand out numbered tasks and yield what comes back, by number."""
        results, num_given, num_yielded = {}, 0, 0
        # Two at a time, so that a worker has the next task already when it is done with one.
        idle = 2 * self.connections
        while True:
            while idle and num_given < num_yielded + 4 * len(self.connections):
                task = next(numbered, None)
                if task is None:
                    break
                idle.pop(0).send(task)
                num_given += 1
            if num_given == num_yielded:
                return
            for connection in multiprocessing.connection.wait(self.connections):
                number, result = connection.recv()
                results[number] = result
                idle.append(connection)
            while num_yielded in results:
                yield results.pop(num_yielded)
                num_yielded += 1


def work(tasks: Any, function: Callable[[Any], Any], ends_of_parent: list) -> None:
    """Answer each (number, task) with (number, result), until the parent is gone: the life of a worker."""
    for connection in ends_of_parent:
        connection.close()
    # Ctrl-C reaches every process of a terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    warnings.simplefilter("ignore")  # Pillow's, on large images and odd palettes
    with suppress(EOFError, ConnectionError):
        while True:
            number, task = tasks.recv()
            try:
                result = function(task)
            except ImageError as error:
                result = error
            tasks.send((number, result))


class Progress:
    """A line that says how far it is: rewritten on a terminal, else a new one every ten seconds.

    Args:
        num_images: all there are.
        num_done: of these, already there.
    """

    def __init__(self, num_images: int, num_done: int) -> None:
        self.num_images, self.num_done, self.num_before = num_images, num_done, num_done
        self.source_bytes = self.packed_bytes = 0
        self.is_terminal = sys.stderr.isatty()
        self.begin = self.shown = time.monotonic()

    def update(self, source_bytes: int, packed_bytes: int) -> None:
        """Count one more image."""
        self.num_done += 1
        self.source_bytes += source_bytes
        self.packed_bytes += packed_bytes
        now = time.monotonic()
        if now - self.shown >= (0.2 if self.is_terminal else 10):
            self.shown = now
            self.show()

    def show(self) -> None:
        """Write the line."""
        images_per_s = (self.num_done - self.num_before) / max(time.monotonic() - self.begin, 1e-9)
        eta_s = int((self.num_images - self.num_done) / max(images_per_s, 1e-9))
        line = (
            f"{self.num_done:,}/{self.num_images:,} images ({self.num_done / self.num_images:.1%}), "
            f"{images_per_s:.0f}/s, eta {timedelta(seconds=eta_s)}, "
            f"{size_text(self.source_bytes)} -> {size_text(self.packed_bytes)}"
        )
        if self.is_terminal:
            sys.stderr.write(f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K")
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def finish(self) -> None:
        """Leave the last line standing."""
        if self.num_done > self.num_before:
            self.show()
            sys.stderr.write("\n" if self.is_terminal else "")


def size_text(num_bytes: int) -> str:
    """Return a size in a unit that suits it."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
