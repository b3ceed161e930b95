"""The ends of a process, and the lines that explain its failures.

Which is used when:

- A run whose steps begin: `forget_refusals`; until then another start would end by the same refusal.
- A run that has ended as it should: `leave_group` after its last collective, then `end_process`.
- A run that fails: `announce_failure` tells the other ranks, and finds out which of them is silent; then
  `end_with_error` prints one line, or a traceback, and ends the process. `checkpointing.status.note_refusal` notes in
  status.json what was refused before the folder had a run.
- At once, without any of these: a second Ctrl-C (`distributed.signals`), and a process that hangs
  (`distributed.watch`).
"""

import errno
import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from errors import PreemptedError, StorageError, UserError, escaped, one_line, write_stderr

# The variable that names a file for refusals, set by a launcher that torchrun tells no exit code: scripts/container.sh.
_REFUSALS = "TOUCHSTONE_REFUSAL_FILE"

# Most characters of an error's line.
_MOST_LINE = 298

# Seconds in which the ranks that meet an error tell the others of it.
_REPORT_S = 3.0

# Seconds for rank 0 to print an error that all have met, and for the launcher to end them.
_FIRST_RANK_S = 10

# EAGAIN also comes where there is no memory for the stack of a thread, hence both remedies.
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
    text = ""
    if isinstance(error, OSError | RuntimeError):
        text = str(getattr(error, "strerror", error))
    elif isinstance(error, MemoryError):
        text = os.strerror(errno.ENOMEM)
    if isinstance(error, FileNotFoundError) and (error.errno, error.filename) == (errno.ENOENT, None):  # os.getcwd
        return StorageError("the current folder was removed; change to another one", exit_code=2)
    for words, line in _LIMITS.items():
        if words in text:
            return StorageError(line, exit_code=2)
    return None


def loader_killed(cause: str) -> UserError:
    """Return the error of a loader process that was killed, with the likely cause."""
    advice = "most likely it ran out of memory: use fewer --workers, or check the system's log"
    if "was loading" in cause:
        advice += "; if it happens again with this image, remove it"
    if "Bus error" in cause:
        # A page of shared memory for which /dev/shm has no room: in a container it has 64 MB by default.
        advice = "most likely shared memory is full: enlarge it, or use fewer --workers"
    return UserError(f"a loader process was killed ({cause.strip()}); {advice}", exit_code=1, is_of_one_rank=True)


def error_line(begin: str, reason: str, *, has_lines: bool = False) -> str:
    """Return `begin: reason` on one line of at most `_MOST_LINE` characters; with `has_lines` all of it, as it is.

    Of a longer line the middle of long words is left out, which leaves a path its file name; then the middle of the
    line, which leaves the value and the remedy.
    """
    if has_lines:
        return escaped(f"{begin}: {reason}")
    line = f"{begin}: {one_line(reason)}"
    if len(line) > _MOST_LINE:
        line = " ".join(word if len(word) <= 80 else f"{word[:20]}...{word[-57:]}" for word in line.split(" "))
    if len(line) > _MOST_LINE:
        half = _MOST_LINE // 2
        line = f"{line[:half]} ... {line[5 - half :]}"
    return line


def end_process(exit_code: int) -> None:
    """End this process at once, and its loader processes with it.

    Not by sys.exit: tearing down a process group whose other members are gone can abort and hide the exit code, and
    Python would wait for loader processes that are in the middle of something.
    """
    for stream in (sys.stdout, sys.stderr):
        # os._exit leaves this out. The stream may be gone, closed or never have been there.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(exit_code)


def end_with_error(error: BaseException, launch: Any, prog: str = "train.py") -> None:
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
        _record_refusal(error.code, error)
        end_process(int(error.code or 0))
    if isinstance(error, KeyboardInterrupt):
        error = UserError("interrupted; --resume auto continues from the last checkpoint", exit_code=1)
    error = explain_limit(error) or error
    exit_code = getattr(error, "exit_code", None)
    if exit_code is None:
        import traceback  # not above: it takes time, and most processes need none

        # Not by traceback's own functions: they use `print`, which is silent on other ranks than 0.
        write_stderr("".join(traceback.format_exception(error)).rstrip())
        end_process(1)
    _record_refusal(exit_code, error)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # so that a launcher can end this process now
    where = f" on rank {launch.rank}" if launch.rank else ""
    if launch.rank and not getattr(error, "is_of_one_rank", False):
        time.sleep(_FIRST_RANK_S)
        # The machine's other ranks stay silent: MPICH's mpirun ends nobody within these seconds, and a wrong option
        # was a line of each. But what this machine lacks, one process may have met alone, and so may one that was
        # started by hand: its output was empty, and rank 0 said only that there was no word from it.
        if launch.local_rank and not launch.is_by_hand and not isinstance(error, StorageError):
            end_process(exit_code)
    write_stderr(error_line(f"{prog}: error{where}", str(error), has_lines=getattr(error, "has_lines", False)))
    end_process(exit_code)


def _record_refusal(exit_code: Any, error: BaseException) -> None:
    """Write a refusal to the file that the environment may name: another start would end so too.

    Not what this machine lacks, which the next one may have.
    """
    path = os.environ.get(_REFUSALS)
    is_refusal = exit_code == UserError.exit_code and not isinstance(error, StorageError)
    if path and is_refusal:
        # One write at the file's end: other ranks may write too. Where that fails, the error itself is what counts.
        with suppress(OSError), open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{error}\n")


def forget_refusals() -> None:
    """Remove the refusals of torchrun's earlier attempts, now that the run starts, and let this process write none."""
    with suppress(OSError):  # there are none, or another rank was first
        os.unlink(os.environ.pop(_REFUSALS, ""))


def announce_failure(error: BaseException) -> BaseException:
    """Return a one-line error instead of one by which gloo or NCCL lost another rank, and any other unchanged.

    Call it for the error that ends a process: it tells the other ranks of it, and so which rank is silent.
    """
    # Not above: the script answers a mistake before it imports torch.
    from torch.distributed import DistError

    from distributed.collectives import joined
    from distributed.watch import watchdog

    watchdog.await_end()
    if joined.store is None or isinstance(error, PreemptedError | SystemExit):
        return error
    store, joined.store = joined.store, None
    # The second kind is the transport's, which does not always name itself.
    names_transport = re.search("gloo|pair closure|[Cc]onnection", str(error)) is not None
    is_lost = isinstance(error, DistError) or (isinstance(error, RuntimeError) and names_transport)
    ends = {joined.rank: b"lost" if is_lost else b"error"}
    # In a thread, since a store whose network is gone does not answer.
    exchange = threading.Thread(target=_exchange_ends, args=(store, joined.rank, joined.world_size, ends), daemon=True)
    exchange.start()
    exchange.join(2 * _REPORT_S)
    if not is_lost:
        return error
    failed = sorted(other for other, end in ends.items() if end == b"error")
    cause = "connection lost"
    if re.search("[Tt]imed? ?out", str(error)):
        cause = "timed out (--dist-timeout)"
    # One rank of those that have only lost others prints it.
    is_first = joined.rank == min(ends.keys() - {*failed})
    message = f"{cause} while {watchdog.stage}: {_why_lost(failed, {*range(joined.world_size)} - ends.keys())}"
    return UserError(message, exit_code=1, is_of_one_rank=is_first)


def _why_lost(failed: list[int], silent: set[int]) -> str:
    """Say why a connection was lost: ranks have ended by an error, or do not answer, or neither."""
    if failed:
        return f"rank {', '.join(map(str, failed))} failed; see the error in its own output"
    if silent:
        found = f"rank {', '.join(map(str, sorted(silent)))}: stopped, killed, hanging, or its network is gone"
        remedy = "look at its output, `py-spy dump` and the system's log (out of memory?); --resume auto continues"
        return f"no answer from {found}; {remedy}"
    return "all ranks are there, but one was stopped (a suspended job), or the network between them fails"


def _exchange_ends(store: Any, rank: int, world_size: int, ends: dict[int, bytes]) -> None:
    """Tell the other ranks how this one ends; if it has lost one, note how they end."""
    end_s = time.monotonic() + _REPORT_S
    with suppress(RuntimeError):  # the store's host is gone
        store.set(f"end/{rank}", ends[rank])
        while ends[rank] == b"lost" and time.monotonic() < end_s and len(ends) < world_size:
            for other in range(world_size):
                if other not in ends and store.check([f"end/{other}"]):
                    ends[other] = store.get(f"end/{other}")
            time.sleep(0.05)


def leave_group() -> None:
    """Leave the process group, if it is our own, after the last collective. Collective: every rank must call it.

    Without the barrier 4 of 26 runs aborted while they ended, all of their work done: a rank tears down connections
    that another still uses.
    """
    import torch
    import torch.distributed as dist

    from distributed import collectives
    from distributed.watch import watchdog

    if not collectives.is_dist_avail_and_initialized():
        return
    watchdog.note_progress("leaving the other processes")
    with watchdog.waiting():
        # The barrier, in a group that does not wait for a day.
        dist.all_reduce(torch.zeros(1), group=collectives.joined.world)
    if collectives.joined.own is dist.group.WORLD:
        dist.destroy_process_group()
