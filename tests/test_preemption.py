"""Ending well: signals anywhere, on any rank; hangs, dead processes, losses that are not finite."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from distributed.decision import StepDecisions, WatchedLoader
from distributed.signals import Signals
from distributed.watch import FiniteWatch, StallWatchdog
from tests.endings import differing_results
from tests.ranks import REPOSITORY, run_ranks, start_torchrun, torchrun_environment, train_rank
from tests.started import PLAIN

# 29 images in 4 shards of 2: 3 steps an epoch, 6 in all; nothing is saved but at the ends of epochs.
OPTIONS = """
    --model timm/tiny_test --train-crop-size 32 --val-resize-size 32 --val-crop-size 32 --device cpu --workers 0
    --model-ema --model-ema-steps 1 --epochs 2 --print-freq 2 --lr 0.05 --mixup-alpha 0.2
    --use-deterministic-algorithms --batch-size 2 --global-batch-size 8 --resume auto
""".split()
ANYWHERE = ["--model", PLAIN]  # which a Python of its own knows


class Runs:
    """Runs of one recipe on the same images, each in a folder of its own."""

    def __init__(self, images, folder):
        self.images, self.folder = images, folder
        self.agents = []

    def argv(self, name, *extra):
        return ["--data-path", str(self.images), "--output-dir", str(self.folder / name), *OPTIONS, *map(str, extra)]

    def run(self, name, world_size, *extra, target=train_rank, faults=(), **how):
        logs = self.folder / f"{name}-logs"
        logs.mkdir(exist_ok=True)
        return run_ranks(target, world_size, self.argv(name, *extra), faults, log_folder=logs, **how)

    def status(self, name):
        return json.loads((self.folder / name / "status.json").read_text())

    def check_same(self, name, reference="undisturbed"):
        assert differing_results(self.folder / name, self.folder / reference) == []


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    runs = Runs(image_folder, tmp_path_factory.mktemp("runs"))
    runs.run("undisturbed", 1).check()
    yield runs
    for agent in runs.agents:
        agent.kill()  # those of a test that failed; their ranks end with them


TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
# Where a signal strikes rank 1 of 2, and the steps that are done when all have stopped: the next one, too, where no
# line is due. Where a save is being written, they wait for their agreement in the step in which that ends.
PLACES = {
    "while the data are read": ([("data.build_datasets", 1, "after", TERM)], [0]),
    "before the first step": ([("torch.optim.SGD.step", 1, "before", TERM)], [1]),
    "in an epoch": ([("torch.optim.SGD.step", 5, "after", USR1)], [5, 6]),
    "in an evaluation": ([("models.ExponentialMovingAverage.forward", 1, "before", TERM)], [3]),
    "a closed terminal": ([("torch.optim.SGD.step", 4, "after", signal.SIGHUP)], [4]),
    "Ctrl-C": ([("torch.optim.SGD.step", 2, "after", INT)], [3]),
    "twice": ([("torch.optim.SGD.step", 2, "before", TERM), ("torch.optim.SGD.zero_grad", 2, "after", TERM)], [3]),
}


@pytest.mark.parametrize("place", PLACES)
def test_all_ranks_stop_after_the_same_step_and_go_on_with_the_same_bits(runs, place):
    faults, steps = PLACES[place]
    name = place.replace(" ", "-")
    outcome = runs.run(name, 2, faults=[(1, *fault) for fault in faults]).check()
    status = runs.status(name)
    step = status["step"]
    assert step in steps
    cause = f"{signal.Signals(faults[0][-1]).name} on rank 1: all 2 ranks stopped after step {step}"
    assert outcome.output.count(cause) == 1, outcome.output
    assert (status["state"], status["requeue"]) == ("preempted", True)
    assert cause in status["reason"]
    saved = [path.name for path in (runs.folder / name).glob("checkpoint-*.pth")]
    assert (f"checkpoint-{step:08d}.pth" in saved) == (step > 0)
    runs.run(name, 1).check()
    runs.check_same(name)


def test_a_signal_during_a_save_waits_for_it(runs):
    runs.run("in-save", 1, "--checkpoint-steps", 2, faults=[(0, "torch.save", 1, "before", TERM)]).check()
    step = runs.status("in-save")["step"]
    assert (runs.folder / "in-save" / f"checkpoint-{step:08d}.pth").exists()
    runs.run("in-save", 2).check()
    runs.check_same("in-save")


def test_ctrl_c_twice_stops_one_process_at_once(runs):
    step = "torch.optim.SGD.step"
    outcome = runs.run("ctrl-c-twice", 1, faults=[(0, step, 2, "before", INT), (0, step, 2, "after", INT)])
    assert outcome.codes == [1], outcome.output
    assert "SIGINT: stopping after this step; once more to stop at once" in outcome.output
    assert outcome.output.count("error: interrupted") == 1
    assert runs.status("ctrl-c-twice")["requeue"] is False


def test_three_starts_in_vain_are_not_requeued_and_an_automatic_fourth_is_refused(runs):
    early = [(0, "data.build_datasets", 1, "after", TERM)]
    asked = []
    for _ in range(3):
        runs.run("stuck", 1, faults=early).check()
        asked.append(runs.status("stuck")["requeue"])
    assert asked == [True, True, False]

    def restarted(rank, world_size, port):
        return {**torchrun_environment(rank, world_size, port), "TORCHELASTIC_RESTART_COUNT": "1"}

    outcome = runs.run("stuck", 2, launcher=restarted)
    assert outcome.codes[0] == 1, outcome.output
    assert outcome.output.count("no progress: start number 4 in a row from step 0") == 1
    assert runs.status("stuck")["state"] == "failed"
    runs.run("stuck", 1).check()  # a person may try
    runs.check_same("stuck")


def test_torchruns_restart_goes_on_from_what_was_saved_and_erases_nothing(runs):
    def restarted(rank, world_size, port):
        environment = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "7"}
        return {**torchrun_environment(rank, world_size, port), **environment}

    stop = [(1, "torch.optim.SGD.step", 2, "after", TERM)]
    runs.run("restart", 2, launcher=restarted, faults=stop).check()
    outcome = runs.run("restart", 2, "--resume", "", "--overwrite", launcher=restarted).check()
    assert outcome.output.count("restarted by torchrun: resuming from the newest checkpoint") == 1
    runs.check_same("restart")


def test_a_restart_does_not_take_another_launchs_run_for_its_own(runs):
    def restarted(rank, world_size, port):
        environment = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "8"}
        return {**torchrun_environment(rank, world_size, port), **environment}

    runs.run("foreign", 2, faults=[(1, "torch.optim.SGD.step", 2, "after", TERM)]).check()
    outcome = runs.run("foreign", 2, "--resume", "", launcher=restarted)
    assert outcome.codes[0] == 2, outcome.output
    assert outcome.output.count("holds a run already") == 1


def break_a_loss(argv, faults):
    """Train, where rank 1's fourth loss is not a number."""
    import train

    build, calls = train.build_criterion, []

    def build_broken(args):
        criterion = build(args)

        def broken(output, target):
            calls.append(1)
            spoilt = len(calls) == 4 and os.environ.get("RANK") == "1"
            return criterion(output, target) * (float("nan") if spoilt else 1.0)

        return broken

    train.build_criterion = build_broken
    train_rank(argv, faults)


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_and_is_never_saved(runs):
    # Two shards a rank and step: rank 1's fourth loss is in step 1.
    outcome = runs.run("nan", 2, "--print-freq", 100, "--checkpoint-steps", 1, target=break_a_loss)
    assert set(outcome.codes) <= {5, -15}, outcome.output
    assert outcome.output.count("the loss of step 1 is not finite; stopped") == 1
    assert [path.name for path in (runs.folder / "nan").glob("checkpoint-0*.pth")] == ["checkpoint-00000001.pth"]
    status = runs.status("nan")
    assert (status["state"], status["requeue"]) == ("failed", False)


def test_a_watch_names_the_first_step_whose_loss_is_not_finite():
    watch = FiniteWatch(torch.device("cpu"))
    for step, value in enumerate([1.0, 2.0, float("inf"), float("nan")]):
        watch.note(step, [torch.tensor(0.5), torch.tensor(value)])
    assert watch.first_bad() == 2
    watch = FiniteWatch(torch.device("cpu"))
    watch.note(0, [torch.tensor(1.0)])
    assert watch.first_bad() is None


def test_a_hung_rank_ends_the_run_with_stacks_and_images_of_the_others(runs):
    stop = [(1, "torch.optim.SGD.step", 2, "before", signal.SIGSTOP)]
    start = time.monotonic()
    outcome = runs.run("hung", 2, "--stall-timeout", 0.05, faults=stop)
    assert outcome.codes[0] == 1, outcome.output
    assert time.monotonic() - start < 60
    assert "stalled for 3 s (--stall-timeout); 2 steps done, images of the next: [" in outcome.outputs[0], (
        outcome.output
    )
    assert "train_one_epoch" in outcome.outputs[0]
    assert runs.status("hung")["reason"] == "stalled for 3 s (--stall-timeout)"
    assert list((runs.folder / "hung").glob("checkpoint*")) == []


def hang_a_loader(argv, faults):
    """Train, where reading an image in a loader process never ends."""
    from loading import folder

    folder.FolderIndex.read = hang_in_read
    train_rank(argv, faults)


def hang_in_read(index, number):
    """Stand for a disk that does not answer."""
    time.sleep(600)


def test_a_loader_process_that_does_not_answer_is_shown(runs):
    outcome = runs.run("hung-loader", 1, "--workers", 2, "--stall-timeout", 0.05, target=hang_a_loader)
    assert outcome.codes == [1], outcome.output
    assert outcome.output.count("Python stacks of its loader process") == 4  # of both sets
    assert " in hang_in_read" in outcome.output


def count_threads(argv, folder):
    """Train, and write down how many threads there are at each fork."""
    counts = Path(folder, os.environ["RANK"])

    def note():
        with open(counts, "a") as file:
            file.write(f"{len(os.listdir('/proc/self/task'))}\n")

    os.register_at_fork(before=note)
    train_rank(argv)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_loader_processes_are_forked_before_there_are_other_threads(runs, tmp_path):
    """Of which one may hold a lock for ever: also where a resumed run begins with the evaluation."""
    stop = [(1, "models.ExponentialMovingAverage.forward", 1, "before", TERM)]
    runs.run("forks", 2, "--workers", 2, faults=stop).check()
    outcome = runs.run("forks", 2, "--workers", 2, target=count_threads, faults=str(tmp_path)).check()
    assert "Test: Acc@1" in outcome.output
    for rank in "01":
        assert (tmp_path / rank).read_text().split() == ["1"] * 4  # two for each set
    runs.check_same("forks")


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("torch.optim.SGD.step", signal.SIGSTOP),
        ("models.ExponentialMovingAverage.forward", signal.SIGSTOP),
        ("torch.optim.SGD.step", signal.SIGKILL),
    ],
)
def test_a_rank_that_is_stopped_or_killed_is_named_by_another(runs, place, number):
    name = f"lost-{place}-{number}"
    outcome = runs.run(name, 2, "--dist-timeout", 0.05, faults=[(1, place, 1, "before", number)])
    assert outcome.codes[0] == 1, outcome.output
    assert "Traceback" not in outcome.output
    [line] = [line for line in outcome.output.splitlines() if "error" in line]
    assert "no answer from rank 1: " in line
    assert runs.status(name)["state"] == "failed"
    assert len(list((runs.folder / name).glob("checkpoint-0*"))) <= 1  # nothing after the last whole step


def test_the_stall_watchdog_is_quiet_while_something_happens():
    reports = []
    watchdog = StallWatchdog(0.2, lambda: "testing", reports.append)
    watchdog.start()
    for _ in range(10):
        time.sleep(0.05)
        watchdog.beat()
    watchdog.end()
    assert reports == []


def kill_a_loader(argv, faults):
    """Train, and SIGKILL one of the loader processes after the first step."""
    step = torch.optim.SGD.step

    def step_and_kill(self, *args, **kwargs):
        step(self, *args, **kwargs)
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        time.sleep(0.5)

    torch.optim.SGD.step = step_and_kill
    train_rank(argv, faults)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_loader_process_is_named_as_such(runs):
    outcome = runs.run("loader", 1, "--workers", 2, target=kill_a_loader)
    assert outcome.codes == [1], outcome.output
    assert outcome.output.count("most likely it was out of memory: use fewer --workers") == 1
    assert "Traceback" not in outcome.output
    assert runs.status("loader")["state"] == "failed"


def raise_in_a_step(argv, faults):
    """Train, and raise what nobody expects in the second step, as running out of a GPU's memory would."""
    step, calls = torch.optim.SGD.step, []

    def step_or_raise(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return step(self, *args, **kwargs)

    torch.optim.SGD.step = step_or_raise
    train_rank(argv, faults)


def test_an_unexpected_error_ends_the_process_at_once_with_its_traceback(runs):
    start = time.monotonic()
    outcome = runs.run("raised", 1, "--workers", 2, target=raise_in_a_step)
    assert outcome.codes == [1], outcome.output
    assert time.monotonic() - start < 20
    assert "RuntimeError: out of memory" in outcome.output
    assert "train_one_epoch" in outcome.output
    assert runs.status("raised")["state"] == "failed"
    runs.run("raised", 1).check()  # which needs the lock
    runs.check_same("raised")


def lose_the_terminal(argv, faults):
    """Train with a terminal that goes away: each write fails from the second step on."""
    step, calls = torch.optim.SGD.step, []

    def step_and_lose(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, 1)
            os.dup2(full, 2)
        return step(self, *args, **kwargs)

    torch.optim.SGD.step = step_and_lose
    train_rank(argv, faults)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_terminal_that_is_gone_costs_no_run(runs):
    hup = [(0, "torch.optim.SGD.zero_grad", 4, "after", signal.SIGHUP)]
    runs.run("terminal", 1, target=lose_the_terminal, faults=hup).check()
    assert runs.status("terminal")["state"] == "preempted"
    runs.run("terminal", 1).check()
    runs.check_same("terminal")


def watch_rank(lengths, rounds_at_stop, folder):
    """Iterate over a loader of this rank's length; rank 0 gets a signal in a round."""
    import types

    import utils
    from distributed import collectives

    args = types.SimpleNamespace(device="cpu", world_size=1, dist_url="env://", dist_timeout=1)
    utils.init_distributed_mode(args)
    signals, seen = Signals(), []

    def stop(cause):
        raise StopAsyncIteration(cause)

    try:
        for batch in WatchedLoader(range(lengths[utils.get_rank()]), StepDecisions(signals), stop, lambda: None):
            seen.append(batch)
            if utils.get_rank() == 0 and batch == rounds_at_stop:
                signals.number = signal.SIGTERM
    except StopAsyncIteration as error:
        seen.append(str(error))
    Path(folder, f"seen{utils.get_rank()}.json").write_text(json.dumps(seen))
    collectives.shut_down()


def test_ranks_with_different_numbers_of_batches_leave_in_the_same_round(tmp_path):
    cause = "SIGTERM on rank 0"
    for stop, expected in [(None, [[0, 1, 2], [0, 1], [0]]), (0, [[0, cause], [0, cause], [0, cause]]), (2, None)]:
        run_ranks(watch_rank, 3, [3, 2, 1], stop, str(tmp_path), log_folder=tmp_path).check()
        seen = [json.loads((tmp_path / f"seen{rank}.json").read_text()) for rank in range(3)]
        if expected:
            assert seen == expected
        else:  # asked for in the last round: nobody waits for a round that does not come
            assert seen == [[0, 1, 2], [0, 1], [0]]


def left_running(folder):
    """Return the processes whose command line names a folder."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if str(folder).encode() in (process / "cmdline").read_bytes():
                    found.append(int(process.name))
            except OSError:  # gone meanwhile
                continue
    return found


def wait_for(condition, timeout_s=90):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def start_agent(runs, name, *extra, options=()):
    command = [*options, REPOSITORY / "train.py", *runs.argv(name, *ANYWHERE, *extra)]
    runs.agents.append(start_torchrun(2, *command, log=runs.folder / f"{name}.log"))
    return runs.agents[-1]


# Long enough to be struck in the middle; the same images and options else.
LONG = ["--epochs", 200, "--print-freq", 1, "--workers", 2]


@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_torchrun_that_is_ended_leaves_a_saved_run_and_no_process(runs, number):
    """SIGTERM to the agent, which tells every process of its group; SIGKILL, of which the kernel tells the ranks."""
    name = f"agent-{number}"
    agent = start_agent(runs, name, *LONG)
    metrics = runs.folder / name / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 2)
    os.kill(agent.pid, number)
    agent.join(60)
    wait_for(lambda: not left_running(runs.folder / name), 30)
    status = runs.status(name)
    assert status["state"] == "preempted", (runs.folder / f"{name}.log").read_text()
    assert (runs.folder / name / f"checkpoint-{status['step']:08d}.pth").exists()
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert status["step"] - max(record["step"] for record in records) in (0, 1)


@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_torchrun_restarts_a_killed_rank_and_the_run_ends_as_if_nothing_had_been(runs):
    agent = start_agent(runs, "elastic", "--checkpoint-steps", 1, "--resume", "", options=["--max-restarts=2"])
    out = runs.folder / "elastic"
    wait_for(lambda: list(out.glob("checkpoint-0*.pth")))
    ranks = [process for process in left_running(out) if process != agent.pid]
    os.kill(max(ranks), signal.SIGKILL)
    agent.join(120)
    assert agent.exitcode == 0, (runs.folder / "elastic.log").read_text()
    assert "resuming from the newest checkpoint" in (runs.folder / "elastic.log").read_text()
    runs.run("undisturbed-anywhere", 1, *ANYWHERE).check()
    runs.check_same("elastic", "undisturbed-anywhere")
