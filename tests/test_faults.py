"""Every fault of tests/faults.py has its required outcome; restarts by torchrun and by hand; a real torchrun."""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from distributed.decision import StepDecisions, WatchedLoader
from distributed.signals import Signals
from tests.faults import FAULTS, OPTIONS, STEP, TERM, FaultyRuns
from tests.ranks import REPOSITORY, run_check, some_slow, start_torchrun, torchrun_environment, wait_for
from tests.started import PLAIN

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

ANYWHERE = ["--model", PLAIN]  # which a Python of its own knows


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    return FaultyRuns(image_folder, tmp_path_factory.mktemp("runs"), OPTIONS)


# Which `make chaos` tries as well, and of which another one is tried here.
LIKE_ANOTHER = {"a signal in an evaluation", "a save that fails on two ranks", "a closed terminal"}


@pytest.mark.parametrize("what", some_slow(FAULTS, LIKE_ANOTHER))
def test_a_fault_has_its_outcome_and_a_resumed_run_the_same_bits(runs, what):
    runs.strike(what, what.replace(" ", "-"), 3 - FAULTS[what].world_size)


def restarted_by(agent):
    """Return what gives the environment of ranks that a torchrun has restarted."""
    variables = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": agent}
    return lambda *rank: torchrun_environment(*rank) | variables


def test_torchruns_restart_resumes_its_own_run_and_no_other(runs):
    stop = [(1, STEP, 2, "after", TERM)]
    for name, agent in (("restart", "7"), ("foreign", "8")):
        runs.run(name, 2, launcher=restarted_by("7"), faults=stop).check()
        outcome = runs.run(name, 2, "--resume", "", *["--overwrite"] * (agent == "7"), launcher=restarted_by(agent))
        assert outcome.codes[0] == (0 if agent == "7" else 2), outcome.output
    assert "--resume" in outcome.output
    runs.check_same("restart")


def count_threads(folder):
    """Write down how many threads there are at each fork."""
    file = open(Path(folder, os.environ["RANK"]), "a", buffering=1)  # noqa: SIM115
    os.register_at_fork(before=lambda: file.write(f"{len(os.listdir('/proc/self/task'))}\n"))


def test_loader_processes_are_forked_before_there_are_other_threads(runs, tmp_path):
    """A thread may hold a lock at the fork; also where a resumed run begins with the evaluation."""
    stop = [(1, "models.ema.ExponentialMovingAverage.forward", 1, "before", TERM)]
    runs.run("forks", 2, "--workers", 2, faults=stop).check()
    runs.run("forks", 2, "--workers", 2, prepare=(count_threads, str(tmp_path))).check()
    for rank in "01":
        assert {*(tmp_path / rank).read_text().split()} == {"1"}
    runs.check_same("forks")


def iterate(rank, world_size, lengths, rounds_at_stop, folder):
    """Iterate over a loader of this rank's length; rank 0 gets a signal in a round."""
    signals, seen = Signals(), []

    def stop(cause):
        raise StopAsyncIteration(cause)

    try:
        for batch in WatchedLoader(range(lengths[rank]), StepDecisions(signals), stop):
            seen.append(batch)
            if rank == 0 and batch == rounds_at_stop:
                signals.number = signal.SIGTERM
    except StopAsyncIteration as error:
        seen.append(str(error))
    Path(folder, f"seen{rank}.json").write_text(json.dumps(seen))


@pytest.mark.dist
def test_ranks_with_different_numbers_of_batches_leave_in_the_same_round(tmp_path):
    cause = "SIGTERM on rank 0"
    # Asked for in the last round, nothing waits for a round that does not come.
    for stop, expected in [(0, [[0, cause]] * 3), (2, [[0, 1, 2], [0, 1], [0]])]:
        run_check(3, iterate, tmp_path, [3, 2, 1], stop, str(tmp_path))
        assert [json.loads((tmp_path / f"seen{rank}.json").read_text()) for rank in range(3)] == expected


# A real torchrun


def left_running(folder):
    """Return the processes whose command line names a folder."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # gone meanwhile
            found += [int(line.parent.name)] * (str(folder).encode() in line.read_bytes())
    return found


@pytest.fixture
def agent(runs):
    """A function that starts a real torchrun; it and its ranks end with the test."""
    agents = []

    def start(name, *extra, options=()):
        command = [*options, REPOSITORY / "train.py", *runs.argv(name, *ANYWHERE, *extra)]
        agents.append(start_torchrun(2, *command, log=runs.folder / f"{name}.log"))
        return agents[-1]

    yield start
    for each in agents:
        each.kill()


@pytest.mark.dist
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_torchrun_that_is_ended_leaves_a_saved_run_and_no_process(runs, agent, number):
    """SIGTERM to the agent, which tells every process of its group; SIGKILL, of which the kernel tells the ranks."""
    name = f"agent-{number}"
    started = agent(name, "--epochs", 200, "--print-freq", 1, "--workers", 2)
    metrics = runs.folder / name / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 2)
    os.kill(started.pid, number)
    started.join(60)
    wait_for(lambda: not left_running(runs.folder / name), 30)
    status = runs.status(name)
    assert status["state"] == "preempted", (runs.folder / f"{name}.log").read_text()
    assert status["step"] in runs.saved(name)


@pytest.mark.dist
def test_torchrun_restarts_a_killed_rank_and_the_run_ends_with_the_same_bits(runs, agent):
    started = agent("elastic", "--checkpoint-steps", 1, "--resume", "", options=["--max-restarts=2"])
    out = runs.folder / "elastic"
    wait_for(lambda: list(out.glob("checkpoint-0*.pth")))
    ranks = [process for process in left_running(out) if process != started.pid]
    os.kill(max(ranks), signal.SIGKILL)
    started.join(120)
    assert started.exitcode == 0, (runs.folder / "elastic.log").read_text()
    runs.run("undisturbed-anywhere", 1, *ANYWHERE).check()
    runs.check_same("elastic", "undisturbed-anywhere")
