"""Real processes, real gloo, without paying for the imports each time: ranks forked from one warm server.

A rank that ends badly ends the others, as torchrun does. Faults are put into the child: nothing in the code under test
knows of them.
"""

import importlib
import itertools
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pkgutil
import resource
import runpy
import signal
import socket
import sys
import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

REPOSITORY = Path(__file__).parent.parent

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.warm"])
if "TOUCHSTONE_WARM_SERVER" in os.environ:  # of conftest.py
    _server = multiprocessing.forkserver._forkserver
    _server._forkserver_address = os.environ["TOUCHSTONE_WARM_SERVER"]
    _server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    _server.ensure_running = lambda: None


def some_slow(names, slow) -> list:
    """Return the parameters of a test, of which the default suite leaves some to `make test-slow`."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names]


def wait_for(condition, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Outcome(NamedTuple):
    """What became of the ranks."""

    codes: list[int]  # exit codes; negative: the signal that ended it
    outputs: list[str]

    @property
    def output(self) -> str:
        return "\n".join(self.outputs)

    def check(self) -> "Outcome":
        assert self.codes == [0] * len(self.codes), self.output
        return self


_offsets = itertools.cycle(range(100))


def free_port() -> int:
    """Return a port of this machine that nobody listens on and that no other test is given."""
    # Below those that the kernel gives to whoever asks for any port, so that nothing else takes one between here and
    # its use; each process that runs tests has some of its own.
    first = 12000 + os.getpid() % 200 * 100
    for port in (first + offset for offset in itertools.islice(_offsets, 100)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("a hundred ports are taken")


def torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def _enter(target, environment: dict[str, str], log: str, arguments: tuple) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    # Which nohup, and a shell that starts something in the background, have everything below them ignore.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    # A rank's own children are started as everybody's are, and not by a second warm server.
    multiprocessing.set_start_method(None, force=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.update(environment)
    target(*arguments)


def start_ranks(target, environments: list[dict], arguments: tuple, log_folder: Path) -> tuple[list, list[Path]]:
    """Start a process for each environment, which calls `target(*arguments)`; return them and their logs."""
    logs = [log_folder / f"rank{rank}.log" for rank in range(len(environments))]
    processes = []
    for environment, log in zip(environments, logs, strict=True):
        log.touch()
        processes.append(_context.Process(target=_enter, args=(target, environment, str(log), arguments)))
        processes[-1].start()
    return processes, logs


def run_ranks(
    target, world_size: int, *arguments, timeout_s=120.0, log_folder: Path, launcher=torchrun_environment, strikes=()
) -> Outcome:
    """Run `target(*arguments)`, a function of an importable module, on `world_size` processes joined by environment.

    Each strike, (seconds from the start, rank, signal), is sent if that rank is still there.
    """
    port = free_port()
    environments = [launcher(rank, world_size, port) if world_size > 1 else {} for rank in range(world_size)]
    processes, logs = start_ranks(target, environments, arguments, log_folder)
    start = time.monotonic()
    deadline = start + timeout_s
    strikes = sorted(strikes)
    while running := [process for process in processes if process.is_alive()]:
        wake_s = min([deadline, *(start + after_s for after_s, _, _ in strikes[:1])])
        multiprocessing.connection.wait([process.sentinel for process in running], max(wake_s - time.monotonic(), 0))
        while strikes and time.monotonic() - start > strikes[0][0]:
            _, rank, number = strikes.pop(0)
            if processes[rank].is_alive():
                with suppress(ProcessLookupError):  # ended between the two lines
                    os.kill(processes[rank].pid, number)
        is_late = time.monotonic() > deadline
        if is_late or any(process.exitcode not in (None, 0) for process in processes):
            for process in [process for process in processes if process.is_alive()]:
                is_deaf = is_late or is_stopped(process.pid)
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL if is_deaf else signal.SIGTERM)
                process.join(5)
                process.kill()
            break
    for process in processes:
        process.join()
    outcome = Outcome([process.exitcode for process in processes], [log.read_text() for log in logs])
    assert time.monotonic() <= deadline, f"not done after {timeout_s} s:\n{outcome.output}"
    return outcome


def is_stopped(pid: int) -> bool:
    """Tell whether a process was sent SIGSTOP, and so will not hear SIGTERM."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def in_group(check, *arguments) -> None:
    """Join the processes, call `check(rank, world_size, *arguments)`, and part."""
    import utils
    from distributed import collectives
    from distributed.ending import leave_group

    utils.init_distributed_mode(Namespace(device="cpu", world_size=1, dist_url="env://", dist_timeout=1))
    check(collectives.get_rank(), collectives.get_world_size(), *arguments)
    leave_group()


def run_check(world_size: int, check, log_folder: Path, *arguments) -> Outcome:
    """Call `check` on several processes that have joined."""
    return run_ranks(in_group, world_size, check, *arguments, timeout_s=60, log_folder=log_folder).check()


def module_rank(name: str | Path, argv: list, prepare: tuple = (), stdin=None, stdout=None) -> None:
    """Run a module as `python -m` does, or a script by its path, after a call in its process: (function, arguments...).

    What a Python does while it starts and imports is not seen: all is imported. Without a file, the output is the log.
    """
    for number, path, flags in [(0, stdin, os.O_RDONLY), (1, stdout, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)]:
        if path is not None:
            os.dup2(os.open(path, flags), number)
    if prepare:
        prepare[0](*prepare[1:])
    # As a Python opens them when it starts.
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
    sys.argv = [str(name), *map(str, argv)]
    if isinstance(name, Path):
        runpy.run_path(str(name), run_name="__main__")
    else:
        sys.modules.pop(name, None)  # as it is not there yet where `python -m` runs it
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def start_torchrun(nproc: int, *argv, log: Path, stdout: Path | None = None) -> multiprocessing.Process:
    """Start torchrun, all of whose imports are there; the processes that it starts are Pythons of their own."""
    words = ["--standalone", f"--nproc_per_node={nproc}", *argv]
    arguments = ("torch.distributed.run", words, (), None, stdout)
    agent = _context.Process(target=_enter, args=(module_rank, dict(os.environ), str(log), arguments))
    agent.start()
    return agent


def tool_rank(name: str, argv: list, stdout=None, fault: tuple | None = None, largest_file: int | None = None) -> None:
    """Run a tool's command line, perhaps with its standard output in a file, a fault, or a bound on files' sizes."""
    tool = importlib.import_module(name if "." in name else f"scripts.{name}")
    if stdout is not None:
        sys.stdout.flush()
        os.dup2(os.open(stdout, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    if fault:
        strike_at(*fault)
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.argv = [name, *map(str, argv)]
    tool.main()


def train_rank(argv: list[str], faults: list[tuple] = (), prepare: tuple = ()) -> None:
    """Run train.py's command line with faults: (rank, dotted name of a function, its n-th call, when[, signal]).

    A fault sends this rank the signal, by default SIGKILL, before or after that call. `prepare`, (function,
    arguments...), is called first in each rank.
    """
    import train
    from distributed import signals

    if prepare:
        prepare[0](*prepare[1:])
    rank = int(os.environ.get("RANK", "0"))
    for fault_rank, *fault in faults:
        if fault_rank == rank:
            strike_at(*fault)
    sys.argv = ["train.py", *argv]
    signals.began_s = time.monotonic()  # as the script, whose process ends with it
    train.cli()


def strike_at(name: str, call: int, when: str, number: int = signal.SIGKILL) -> None:
    """Send this process a signal before or after the n-th call of a function."""
    owner_name, _, attribute = name.rpartition(".")
    owner, calls = pkgutil.resolve_name(owner_name), 0
    original = getattr(owner, attribute)

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call and when == "before":
            os.kill(os.getpid(), number)
        try:
            return original(*args, **kwargs)
        finally:
            if calls == call and when == "after":
                os.kill(os.getpid(), number)

    setattr(owner, attribute, counted)
