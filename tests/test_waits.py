"""No wait is without an end: a rank is stopped, killed or raises at any collective, and rank 0 says which and where.

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
from tests.endings import differing_results
from tests.ranks import _context, _enter, free_port, torchrun_environment, train_rank, wait_for
from tests.runs import Runs
from tests.started import SMALL

pytestmark = pytest.mark.dist

# A save each step, an evaluation each epoch. The limits are seconds, and far above what a step takes here.
LIMIT_S = 9
OPTIONS = [
    *SMALL, *"--epochs 2 --print-freq 2 --lr 0.05 --checkpoint-steps 2 --use-deterministic-algorithms".split(),
    "--resume", "auto", "--dist-timeout", 2 * LIMIT_S / 60, "--stall-timeout", LIMIT_S / 60,
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
    """Have rank 1 meet a fault at a collective; check how rank 0 ends, and that the run resumes to the same bits."""
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
    failures = []
    for number in sorted({found[index] for found in places.values() for index in (0, len(found) // 2, -1)}):
        try:
            check_end(runs, numbered, run, number, fault)
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, "\n\n".join(failures)


# Joining


def start_rank(folder, environment, *more, prepare=()):
    """Start one process with a launcher's variables, on images that need no folder."""
    argv = [*OPTIONS[:-4], "--synthetic", 16, "--batch-size", 2, "--output-dir", folder / "out", "--dist-timeout", 0.05]
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return start_apart(folder, [*argv, *more], prepare, [{**place, **environment}])


def end_of(processes, logs):
    """Return the exit codes and the lines with an error of processes that end by themselves."""
    for process in processes:
        process.join(90)
        code, process = process.exitcode, process.kill()
        assert code is not None
    return [process.exitcode for process in processes], [
        line for log in logs for line in log.read_text().splitlines() if line.startswith("train.py: error")
    ]


@pytest.mark.parametrize(
    ("environment", "code", "words"),
    [
        ({"RANK": "1", "MASTER_ADDR": "nosuchhost.invalid"}, 1, "the name nosuchhost.invalid cannot be resolved"),
        ({"RANK": "1"}, 1, "Connection refused"),
        ({}, 1, "1 of 2 processes have joined, no word from rank 1, after 0.05 min (--dist-timeout)"),
        ({"RANK": "2"}, 2, "RANK is 2"),
        ({"RANK": "2", "WORLD_SIZE": None}, 2, "rank 2 of 1 process"),
        (
            {"RANK": None, "WORLD_SIZE": None, "PMI_RANK": "5", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0",
             "MPI_LOCALNRANKS": "2"}, 2, "rank 5 of 2 processes",
        ),
    ],
)  # fmt: skip
def test_a_process_that_cannot_join_says_why_within_one_time_limit(tmp_path, environment, code, words):
    given = {name: value for name, value in environment.items() if value is not None}
    lacking = tuple(name for name, value in environment.items() if value is None)
    codes, errors = end_of(*start_rank(tmp_path, given, prepare=(drop_variables, lacking)))
    assert codes == [code]
    assert len(errors) == 1
    assert words in errors[0]


def drop_variables(names):
    for name in names:
        os.environ.pop(name)


def test_a_store_that_does_not_answer_is_waited_for_no_longer(tmp_path):
    """As that of a rank 0 which is stopped: the system accepts its connections, and nobody reads them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        codes, errors = end_of(*start_rank(tmp_path, {"RANK": "1", "MASTER_PORT": port}))
    assert codes == [1]
    assert "what listens there does not answer; it is stopped, or another program, after 0.05 min" in errors[0]


def test_a_port_in_use_is_said(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        codes, errors = end_of(*start_rank(tmp_path, {"MASTER_PORT": port}))
    assert codes == [2]
    assert f"rank 0 cannot listen on port {port}: it is in use" in errors[0]


def test_launchers_that_count_different_numbers_of_processes_are_refused(tmp_path):
    port = str(free_port())
    second, log = start_rank(tmp_path / "second", {"RANK": "1", "MASTER_PORT": port})
    first, more = start_rank(tmp_path / "first", {"WORLD_SIZE": "3", "MASTER_PORT": port})
    codes, errors = end_of(first + second, more + log)
    assert codes == [2, 2]
    assert "rank 0 is one of 3 processes, but rank 1 one of 2 (WORLD_SIZE)" in errors[0]


def be_impatient():
    joining._LINE_S = 0.5


def test_who_waits_for_others_says_how_many_have_joined_and_goes_on_when_they_come(tmp_path):
    port = str(free_port())
    more = ["--dist-timeout", 1]
    first, logs = start_rank(tmp_path / "first", {"MASTER_PORT": port}, *more, prepare=(be_impatient,))
    wait_for(lambda: "1 of 2 processes have joined" in logs[0].read_text())
    second, log = start_rank(tmp_path / "second", {"RANK": "1", "MASTER_PORT": port}, *more)
    assert end_of(first + second, logs + log) == ([0, 0], [])


# Pauses, and ranks that are slow


def pause(rank):
    from tests.ranks import strike_at

    if os.environ.get("RANK", "0") == str(rank):
        strike_at("torch.optim.SGD.step", 2, "before", signal.SIGSTOP)


def test_a_process_that_was_stopped_for_longer_than_the_limit_has_not_stalled(runs, tmp_path):
    """Ctrl-Z and fg, a suspended job, a paused container."""
    argv = [*runs.argv("paused", shards=1), "--stall-timeout", "0.05"]
    (process,), (log,) = start_apart(tmp_path, argv, (pause, 0), [{}])
    wait_for(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    time.sleep(5)
    os.kill(process.pid, signal.SIGCONT)
    assert end_of([process], [log]) == ([0], []), log.read_text()
    assert re.search(r"this process was stopped for [45] s", log.read_text())


def dawdle():
    """Be slow on rank 1 between two collectives of the start, first by scanning a folder, then by a download."""
    import train
    from loading.progress import Progress

    build = train.build_metrics

    def build_slowly(*args):
        if os.environ["RANK"] == "1":
            progress = Progress("scanning", 8)
            for _ in range(8):
                time.sleep(0.5)
                progress.update()
            with open(os.devnull, "wb", buffering=0) as file:
                for _ in range(8):
                    time.sleep(0.5)
                    file.write(bytes(1 << 17))
        return build(*args)

    train.build_metrics = build_slowly


def test_a_rank_that_waits_for_a_slow_one_is_not_ended(runs, tmp_path):
    """The slow one takes three times the limit."""
    argv = runs.argv("slow", "--stall-timeout", 2.5 / 60, shards=2)
    code, output, other = end_of_rank_0(tmp_path, argv, (dawdle,))
    assert code == 0, output + other


# A save that fails while it begins

OWN_OPTIMIZER = """
import torch


class Forgetful(torch.optim.SGD):
    def state_dict(self):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 2:
            raise ValueError("no state to be had")
        return super().state_dict()


def build(parameters, lr, **options):
    return Forgetful(parameters, lr=lr)
"""


def lack_threads():
    """Have the system refuse the thread that writes checkpoints, as `ulimit -u` does."""
    start = threading.Thread.start

    def refused(thread):
        if thread.name.startswith("checkpoint writer"):
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refused


@pytest.mark.parametrize(
    ("prepare", "words", "cause"),
    [
        ((), "no state to be had", "ValueError: no state to be had"),
        ((lack_threads,), "no more processes or threads", "can't start new thread"),
    ],
)
def test_a_rank_that_fails_while_a_save_begins_ends_the_run_with_its_cause(runs, tmp_path, prepare, words, cause):
    own = tmp_path / "own.py"
    own.write_text(OWN_OPTIMIZER)
    more = [] if prepare else ["--opt", f"{own}:build"]
    argv = runs.argv(tmp_path / "out", *more, shards=2)
    code, output, other = end_of_rank_0(tmp_path / "logs", argv, prepare)
    assert code in (1, 2)
    assert words in output
    assert cause in json.loads((tmp_path / "out" / "status.json").read_text())["reason"]
    assert re.search("train.py: error.*rank 0", other)  # whose store ended with it
