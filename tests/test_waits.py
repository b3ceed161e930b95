"""No wait is without an end: a rank is stopped, killed or raises at any collective, and rank 0 says which and where."""

import collections
import itertools
import json
import os
import random
import re
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import train
from distributed import joining, watch
from loading.progress import Progress
from tests import ranks
from tests.endings import differing_results
from tests.faults import at_step, fail
from tests.runs import Runs
from tests.started import SMALL, refused

pytestmark = pytest.mark.dist

# A save each step, an evaluation each epoch. The limits are seconds, and far above what a step takes here.
LIMIT_S = 6
OPTIONS = [
    *SMALL, *"--epochs 2 --print-freq 2 --lr 0.05 --checkpoint-steps 2 --use-deterministic-algorithms".split(),
    "--resume", "auto", "--dist-timeout", 2 * LIMIT_S / 60, "--stall-timeout", LIMIT_S / 60,
]  # fmt: skip
FAULTS = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL, "raises": None}


def number_collectives(file, number=None, fault=None):
    """Write the name of each collective of rank 1 and its stage into a file; at one number it meets the fault."""
    if os.environ["RANK"] != "1":
        return
    calls, backward = [], torch.Tensor.backward

    def counted(original, name, *args, **kwargs):
        if threading.current_thread() is threading.main_thread():
            calls.append(f"{name} {watch.watchdog.stage}")
            Path(file).write_text("\n".join(calls))
            if len(calls) == number and fault == "raises":
                raise ValueError("a fault of rank 1")
            if len(calls) == number:
                os.kill(os.getpid(), FAULTS[fault])
        return original(*args, **kwargs)

    for name in ("all_gather", "broadcast", "all_reduce", "barrier", "new_group", "init_process_group"):
        setattr(dist, name, partial(counted, getattr(dist, name), name))
    torch.Tensor.backward = lambda *args, **kwargs: counted(backward, "backward", *args, **kwargs)  # in which DDP's are


def start_apart(folder, argv, prepare=(), environments=None):
    folder.mkdir(parents=True, exist_ok=True)
    port = ranks.free_port()
    environments = environments or [ranks.torchrun_environment(rank, 2, port) for rank in range(2)]
    return ranks.start_ranks(ranks.train_rank, environments, ([str(word) for word in argv], (), prepare), folder)


def end_of(processes, logs):
    """Wait until rank 0, or whoever is alone, ends by itself; the others have some seconds more."""
    processes[0].join(90)
    code = processes[0].exitcode
    for process in processes:
        process.join(0.0 if ranks.is_stopped(process.pid) else 20)
        process.kill()
        process.join()
    assert code is not None, f"rank 0 still waits: {logs[0].read_text()[-2000:]}"
    return ranks.Outcome([process.exitcode for process in processes], [log.read_text() for log in logs])


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    return Runs(image_folder, tmp_path_factory.mktemp("waits"), OPTIONS)


@pytest.fixture(scope="module")
def numbered(runs):
    found = {}
    for name, more in [("undisturbed", []), ("test-only", ["--test-only"])]:
        file = runs.folder / f"{name}-calls"
        argv = runs.argv("undisturbed", *more, shards=2)
        end_of(*start_apart(runs.folder / name, argv, (number_collectives, str(file)))).check()
        found[name] = file.read_text().splitlines()
    return found


ONE = [("undisturbed", fault, "one") for fault in FAULTS] + [("test-only", "killed", "one")]
ALL = [*itertools.product(("undisturbed", "test-only"), FAULTS, ("one", "of each stage"))]


@pytest.mark.parametrize(("run", "fault", "numbers"), [
    pytest.param(*case, marks=[pytest.mark.slow] * (case not in ONE)) for case in ALL
])  # fmt: skip
def test_rank_0_says_which_rank_it_has_lost_and_at_what_and_the_run_resumes(runs, numbered, run, fault, numbers):
    """At one drawn collective, or of those that stand behind each other at one stage the first, last and middle one."""
    drawn = [1 + random.Random(f"{run} {fault}").randrange(len(numbered[run]))]
    if numbers != "one":
        places = collections.defaultdict(list)
        for number, place in enumerate(numbered[run], 1):
            places[place].append(number)
        drawn = sorted({found[index] for found in places.values() for index in (0, len(found) // 2, -1)})
    for number in drawn:
        name = f"{run}-{number}-{fault}"
        logs = runs.folder / f"{name}-faulty"
        more = ["--test-only", "--resume", runs.folder / "undisturbed" / "checkpoint.pth"] if run == "test-only" else []
        argv = runs.argv(name, *more, shards=2)
        outcome = end_of(*start_apart(logs, argv, (number_collectives, str(logs / "calls"), number, fault)))
        output, other = outcome.outputs
        place = f"collective {number} ({numbered[run][number - 1]}), rank 1 {fault}: {output}"
        lines = [line for line in output.splitlines() if re.search(r"stalled for|train\.py: error", line)]
        assert (outcome.codes[0], len(lines)) == (1, 1), place
        assert all(re.search(words, lines[0]) for words in (r"\brank 1\b", r" while [a-z]|have joined")), place
        assert "Traceback (most recent call last)" not in output, place
        if fault == "raises":
            assert ("a fault of rank 1" in other, "rank 1 failed" in lines[0]) == (True, True), place
        if run == "undisturbed":
            end_of(*start_apart(logs, argv)).check()
            assert differing_results(runs.folder / name, runs.folder / "undisturbed") == []


def start_rank(folder, environment, *more, prepare=()):
    argv = [*OPTIONS[:-4], "--synthetic", 16, "--batch-size", 2, "--output-dir", folder / "out", "--dist-timeout", 0.05]
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ranks.free_port())}
    given = {name: value for name, value in (place | environment).items() if value is not None}
    return start_apart(folder, [*argv, *more], prepare, [given])


# A process's own variables, whether somebody listens at rank 0's port, its exit code and its words.
@pytest.mark.parametrize(("environment", "is_taken", "code", "words"), [
    ({"RANK": "1", "MASTER_ADDR": "nosuchhost.invalid"}, False, 1, "the name nosuchhost.invalid cannot be resolved"),
    ({"RANK": "1"}, False, 1, "Connection refused"),
    ({}, False, 1, "1 of 2 processes have joined, no word from rank 1, after 0.05 min (--dist-timeout)"),
    ({"RANK": "2", "WORLD_SIZE": None}, False, 2, "rank 2 of 1 process"),
    ({"RANK": "1"}, True, 1, "does not answer; it is stopped, or another program, after 0.05 min"),
    ({}, True, 2, "rank 0 cannot listen on port {port}: it is in use"),
])  # fmt: skip
def test_a_process_that_cannot_join_says_why_within_one_time_limit(tmp_path, environment, is_taken, code, words):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        environment = {**environment, "MASTER_PORT": str(port)} if is_taken else environment
        outcome = end_of(*start_rank(tmp_path, environment))
    refused(outcome, words.format(port=port), code=code)


def be_impatient():
    joining._LINE_S = 0.5


@pytest.mark.parametrize("world_size", [3, 2])
def test_who_waits_for_others_says_so_and_goes_on_or_refuses_when_they_come(tmp_path, world_size):
    port, more = str(ranks.free_port()), ["--dist-timeout", 1]
    environment = {"WORLD_SIZE": str(world_size), "MASTER_PORT": port}
    first, logs = start_rank(tmp_path / "first", environment, *more, prepare=(be_impatient,))
    ranks.wait_for(lambda: f"1 of {world_size} processes have joined" in logs[0].read_text())
    second, log = start_rank(tmp_path / "second", {"RANK": "1", "MASTER_PORT": port}, *more)
    outcome = end_of(first + second, logs + log)
    if world_size == 2:
        assert "error" not in outcome.check().output
    else:
        assert outcome.codes == [2, 2], outcome.output
        assert "rank 0 is one of 3 processes, but rank 1 one of 2 (WORLD_SIZE)" in outcome.output


def pause():
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1)  # so that the watchdog looks before the step has ended


def test_a_process_that_was_stopped_for_longer_than_the_limit_has_not_stalled(runs, tmp_path):
    argv = [*runs.argv("paused", shards=1), "--stall-timeout", "0.05"]
    processes, logs = start_apart(tmp_path, argv, (at_step, pause, 2), [{}])
    ranks.wait_for(lambda: ranks.is_stopped(processes[0].pid))
    time.sleep(5)
    os.kill(processes[0].pid, signal.SIGCONT)
    output = end_of(processes, logs).check().output
    assert re.search(r"this process was stopped for [45] s", output)
    assert "stalled" not in output  # it might end before it is ended


def stop_rank_0():
    if os.environ["RANK"] == "0":
        at_step(pause, 2)


def test_processes_that_were_stopped_for_longer_than_a_collective_may_take_say_so(runs, tmp_path):
    argv = [*runs.argv("suspended", shards=2), "--dist-timeout", "0.1", "--stall-timeout", "1"]
    processes, logs = start_apart(tmp_path, argv, (stop_rank_0,))
    ranks.wait_for(lambda: ranks.is_stopped(processes[0].pid))
    time.sleep(2)  # until rank 1 waits for it
    os.kill(processes[1].pid, signal.SIGSTOP)
    time.sleep(8)
    for process in processes:
        os.kill(process.pid, signal.SIGCONT)
    codes, outputs = end_of(processes, logs)
    assert codes == [1, 1]
    words = "while training: all ranks are there, but one was stopped"
    assert [output.count(words) for output in outputs] == [1, 1], outputs


def test_a_run_that_goes_on_after_it_was_said_to_have_stalled_ends_all_the_same(runs, tmp_path):
    argv = [*runs.argv("late", shards=1), "--stall-timeout", "0.05"]
    (process,), (log,) = start_apart(tmp_path, argv, (at_step, partial(time.sleep, 5), 1), [{}])
    assert end_of([process], [log])[0] == [1]
    assert "finished" not in log.read_text()
    assert json.loads((runs.folder / "late" / "status.json").read_text())["state"] == "failed"


def dawdle():
    """Be slow on rank 1 between two collectives of the start, first by scanning a folder, then by a download."""
    build = train.build_metrics

    def build_slowly(*args):
        if os.environ["RANK"] == "1":
            with open(os.devnull, "wb", buffering=0) as file:
                for work in (Progress("scanning", 8).update, partial(file.write, bytes(1 << 17))):
                    for _ in range(8):
                        time.sleep(0.5)
                        work()
        return build(*args)

    train.build_metrics = build_slowly


def test_a_rank_that_waits_for_a_slow_one_is_not_ended(runs, tmp_path):
    end_of(*start_apart(tmp_path, runs.argv("slow", "--stall-timeout", 2.5 / 60, shards=2), (dawdle,))).check()


def test_a_rank_that_fails_while_a_save_begins_ends_the_run_with_its_cause(runs, tmp_path):
    argv = runs.argv(tmp_path / "out", shards=2)
    outcome = end_of(*start_apart(tmp_path, argv, (at_step, fail, 2, "state_dict")))
    assert outcome.codes[0] in (1, 2)
    assert "a surprise" in outcome.outputs[0]
    assert "RuntimeError: a surprise" in json.loads((tmp_path / "out" / "status.json").read_text())["reason"]
    assert re.search("train.py: error.*rank 0", outcome.outputs[1])  # whose store ended with it
