"""No wait is without an end: a rank that is stopped, killed or raises at any collective, and rank 0 says which and where.

Rank 1 alone meets the fault, at a collective numbered by counting calls. Nobody but rank 0's own limits end it, as when
each process was started by hand on a machine of its own.
"""

import collections
import json
import os
import random
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed import joining, watch
from distributed.watch import Watchdog
from tests.endings import differing_results
from tests.ranks import _context, _enter, free_port, torchrun_environment, train_rank, wait_for
from tests.runs import Runs
from tests.started import SMALL

pytestmark = pytest.mark.dist

# A save each step, an evaluation each epoch. The limits are seconds, and far above what a step takes here.
LIMIT_S = 9
OPTIONS = [
    *SMALL, *"--epochs 2 --print-freq 2 --lr 0.05 --checkpoint-steps 2 --use-deterministic-algorithms".split(),
    "--resume", "auto", "--dist-timeout", LIMIT_S / 60, "--stall-timeout", LIMIT_S / 60,
]  # fmt: skip
COLLECTIVES = ("all_gather", "broadcast", "all_reduce", "barrier", "new_group", "init_process_group")
FAULTS = ("stopped", "killed", "raises")


def fail(fault):
    if fault == "raises":
        raise ValueError("a fault of rank 1")
    os.kill(os.getpid(), signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)


def number_collectives(folder, number=None, fault=None):
    """Write the name of each collective of rank 1 into a file; at one number it meets the fault."""
    if os.environ["RANK"] != "1":
        return
    calls = 0

    def count(owner, name):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            nonlocal calls
            if threading.current_thread() is threading.main_thread():
                with open(Path(folder, "calls"), "a") as file:
                    file.write(f"{name} {watch.watchdog.stage}\n")
                calls += 1
                if calls == number:
                    fail(fault)
            return original(*args, **kwargs)

        setattr(owner, name, counted)

    for name in COLLECTIVES:
        count(dist, name)
    count(torch.Tensor, "backward")  # in which DDP's are


def start_apart(folder, argv, prepare=(), environments=(), target=train_rank):
    """Start the ranks of a run, which nobody watches; return them and their logs."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    environments = environments or [torchrun_environment(rank, 2, port) for rank in range(2)]
    logs = [folder / f"rank{rank}.log" for rank in range(len(environments))]
    processes = []
    for environment, log in zip(environments, logs, strict=True):
        log.touch()
        arguments = ([str(word) for word in argv], (), prepare)
        processes.append(_context.Process(target=_enter, args=(target, environment, str(log), arguments)))
        processes[-1].start()
    return processes, logs


def end_of_rank_0(folder, argv, prepare=(), timeout_s=90, **how):
    """Run two processes until rank 0 ends by itself; return its exit code, what it said, and what rank 1 did."""
    processes, logs = start_apart(folder, argv, prepare, **how)
    processes[0].join(timeout_s)
    code = processes[0].exitcode
    for process in processes:
        process.join(0.0 if "stopped" in prepare else 20)
        process.kill()
        process.join()
    assert code is not None, f"rank 0 still waits after {timeout_s} s: {logs[0].read_text()[-2000:]}"
    return code, logs[0].read_text(), logs[1].read_text()


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    return Runs(image_folder, tmp_path_factory.mktemp("waits"), OPTIONS)


@pytest.fixture(scope="module")
def numbered(runs):
    """The collectives of a training and of an evaluation by their numbers, as `name stage`."""
    found = {}
    for name, more in [("undisturbed", []), ("test-only", ["--test-only"])]:
        folder = runs.folder / f"{name}-calls"
        argv = runs.argv("undisturbed", *more, shards=2)
        code, output, _ = end_of_rank_0(folder, argv, (number_collectives, str(folder)))
        assert code == 0, output
        found[name] = (folder / "calls").read_text().splitlines()
    return found


def drawn_cases():
    """Some for each run: the same ones each time, and more of them than there are faults."""
    rng = random.Random(56)
    return [(run, rng.random(), fault) for run in ("undisturbed", "test-only") for fault in FAULTS]


def check_end(runs, numbered, run, number, fault):
    """Have rank 1 meet a fault at a collective; check how rank 0 ends, and that the training resumes to the same bits."""
    name = f"{run}-{number}-{fault}"
    folder = runs.folder / f"{name}-faulty"
    more = ["--test-only", "--resume", runs.folder / "undisturbed" / "checkpoint.pth"] if run == "test-only" else []
    argv = runs.argv(name, *more, shards=2)
    code, output, other = end_of_rank_0(folder, argv, (number_collectives, str(folder), number, fault))
    place = f"collective {number} ({numbered[run][number - 1]}), rank 1 {fault}"
    assert code == 1, f"{place}: {output}"
    lines = [line for line in output.splitlines() if re.search(r"stalled for|train\.py: error", line)]
    assert len(lines) == 1, f"{place}: {output}"
    assert re.search(r"\brank 1\b", lines[0]), f"{place}: {output}"
    assert re.search(r" while [a-z]|have joined", lines[0]), f"{place}: {output}"
    assert "Traceback (most recent call last)" not in output, f"{place}: {output}"
    if fault == "raises":
        assert "a fault of rank 1" in other
        assert "rank 1 failed" in lines[0], f"{place}: {output}"
    if run == "undisturbed":
        again, output, _ = end_of_rank_0(folder, argv)
        assert again == 0, output
        assert differing_results(runs.folder / name, runs.folder / "undisturbed") == []


@pytest.mark.parametrize(("run", "share", "fault"), drawn_cases())
def test_rank_0_says_which_rank_it_has_lost_and_at_what(runs, numbered, run, share, fault):
    check_end(runs, numbered, run, 1 + int(share * len(numbered[run])), fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("run", ["undisturbed", "test-only"])
def test_every_collective_of_a_run_has_an_end(runs, numbered, run, fault):
    """Of those that stand behind each other at one stage, the first, the last, and one of the others."""
    places = collections.defaultdict(list)
    for number, place in enumerate(numbered[run], 1):
        places[place].append(number)
    for found in places.values():
        for number in sorted({found[0], found[len(found) // 2], found[-1]}):
            check_end(runs, numbered, run, number, fault)
