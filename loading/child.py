"""Do something in a forked process: a disk that hangs or a client with threads then harms this one in nothing."""

import os
import select
import signal
from collections.abc import Callable

from distributed import signals
from errors import UserError


class PassingError(Exception):
    """A request failed in a way that may pass; `wait_s` is what the server asks to wait."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class Client:
    """The newest client that has threads of its own, which no fork survives."""

    pid: int | None = None  # the process that made it


def in_child(work: Callable[[], bytes], timeout_s: float | None = None) -> bytes:
    """Return the result of `work`, by a forked process unless a client's threads forbid one; errors as of `work`.

    TimeoutError after `timeout_s` seconds; the process is then killed, and not waited for.
    """
    if Client.pid == os.getpid():
        return work()
    reader, writer = os.pipe()
    # Not multiprocessing's, which would close standard input, and wait for a thread that reads it.
    child = os.fork()
    if not child:
        try:
            # Or one that hangs on a disk would outlive a run that somebody kills, and keep its files and pipes open.
            signals.end_with_parent(signal.SIGKILL)
            with open(writer, "wb") as file:
                try:
                    file.write(b"+" + work())
                except BaseException as error:
                    # A byte of its kind, and its text. Unpickling what a child sends could run code of a bad file.
                    kind = "~" if isinstance(error, PassingError) else "-"
                    file.write(f"{kind}{error}".encode())
        finally:
            # Not sys.exit, which runs multiprocessing's exit handler: it would end the parent's loader processes.
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        if not select.select([file], [], [], timeout_s)[0]:
            # A process that waits for a hung disk does not even die: waiting for it would hang this one too.
            os.kill(child, signal.SIGKILL)
            raise TimeoutError
        content = file.read()
    # Only after the pipe was read: a child whose result is larger than a pipe (64 KiB) cannot end before.
    os.waitpid(child, 0)
    if content[:1] == b"+":
        return content[1:]
    text = content[1:].decode(errors="replace") or "the process that was reading it ended"
    if content[:1] == b"-":
        raise UserError(text)
    # One that ended without a word, perhaps for lack of memory, may succeed at another try.
    raise PassingError(text)
