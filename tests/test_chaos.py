"""Faults, kills and power cuts lose nothing and change nothing: a short round of what `make chaos` does at length."""

import io
import json
import os
import random
import shutil
import signal
import sys
import zipfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from distributed.decision import StepDecisions, WatchedLoader
from distributed.signals import Signals
from scripts import pack, prepare
from tests import crash
from tests.archives import jpeg, tar_of
from tests.chaos import CAMPAIGNS, POINTS, Chaos, run_scenario
from tests.crash import CHANGING, SCENARIOS, Call, Trial, Trouble, Watch, read_log
from tests.faults import FAULTS, OPTIONS, STEP, TERM, FaultyRuns
from tests.images import write_images
from tests.ranks import REPOSITORY, run_check, run_ranks, some_slow, start_torchrun, torchrun_environment, wait_for
from tests.started import PLAIN


@pytest.fixture(scope="module")
def chaos(tmp_path_factory):
    return Chaos(tmp_path_factory.mktemp("chaos"), seed=1)


ROUNDS = {"kills": 2, "resizes": 1, "signals": 2, "bitflips": 500}


@pytest.mark.parametrize("kind", some_slow({**CAMPAIGNS, **ROUNDS}, CAMPAIGNS.keys() - ROUNDS))
def test_faults_lose_nothing_and_change_nothing(chaos, kind):
    number = ROUNDS.get(kind, 1)
    chaos.run(kind, number)
    assert chaos.problems == []
    assert chaos.counts[kind] >= number


def flip_a_bit(out):
    state = torch.load(out / "checkpoint.pth", weights_only=True)
    next(iter(state["model"].values())).view(torch.int32).flatten()[0] ^= 1
    torch.save(state, out / "checkpoint.pth")


def change_a_loss(out):
    path = out / "metrics.jsonl"
    path.write_text(path.read_text().replace('"loss": ', '"loss": 1', 1))


def test_the_oracle_sees_each_change(chaos, monkeypatch):
    monkeypatch.setattr(chaos, "counts", Counter())
    monkeypatch.setattr(chaos, "problems", [])
    plain, whole = CAMPAIGNS["signals"], chaos.runs.folder / "whole"
    chaos.reference(plain)
    chaos.runs.run("whole", 1).check()
    touch, unlink = (lambda out: (out / "x.pth.tmp.7").touch()), (lambda out: next(out.glob("events.*")).unlink())
    for number, change in enumerate([lambda out: None, flip_a_bit, change_a_loss, touch, unlink]):
        shutil.copytree(whole, chaos.out)
        change(chaos.out)
        chaos.compare(plain, "changed")
        assert chaos.counts["different"] == number
    shutil.move(whole, chaos.out)
    assert chaos.note_loss(13) == 12
    assert chaos.counts["lost"] == 1
    (chaos.out / "checkpoint-00000011.pth").write_bytes(b"cut")
    chaos.note_loss(12)
    assert chaos.counts["lost"] == 2
    shutil.rmtree(chaos.out)


NAMES = [scenario.name for scenario in SCENARIOS]
LIKE_OTHERS = {
    "new with average, saving late", "new without resume", "from elsewhere, overwriting", "interrupted",
    "from elsewhere, best elsewhere", "damaged newest",
}  # fmt: skip


@pytest.mark.parametrize("name", some_slow(NAMES, LIKE_OTHERS))
def test_no_point_of_a_run_loses_anything(name, tmp_path):
    counts, problems = run_scenario(NAMES.index(name), dict.fromkeys(POINTS, 1), tmp_path)
    assert problems == []
    assert counts.keys() >= POINTS.keys()


def test_no_power_failure_after_a_save_leaves_none_and_a_disk_that_syncs_nothing_is_found(tmp_path):
    trial = Trial(SCENARIOS[0], tmp_path / "trial")
    for state in crash.possible_states(trial):
        saves = [content[0] for path, content in state.image.items() if path.endswith(".pth")]
        assert not state.saved or any(zipfile.is_zipfile(io.BytesIO(save)) for save in saves)
    log = [entry for entry in trial.recorded.log if not (isinstance(entry, Call) and entry.name == "fsync")]
    log = log[: 1 + next(number for number, entry in enumerate(log) if entry[0] == "saved")]
    bare = [state for state in crash.possible_states(trial, log) if state.saved and not state.image]
    trial.attempt("power_loss", crash.lose_power, bare[0])
    assert trial.counts["lost"] == 1, trial.problems


IMAGES = {f"n01440764_{number}.JPEG": jpeg(number) for number in range(2)}


def run_prepare(sources: Path) -> dict:
    prepare.prepare(prepare.get_args_parser().parse_args([str(sources), "out", "--skip-md5", "--splits", "train"]))
    return {str(path): path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}


def write_pack(sources: Path) -> dict:
    plan = pack.plan_shards
    sys.argv = f"pack --data-path {sources} out --short-side 16 --workers 1".split()
    pack.plan_shards = lambda splits, _: plan(splits, 3000)
    pack.work()
    pack.plan_shards = plan
    return {str(path): path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}


def record(disk: Path, log: Path, work, source) -> None:
    os.chdir(disk)
    Watch(disk, log, Trouble())
    work(source)


@pytest.mark.parametrize("work", [run_prepare, write_pack])
def test_a_power_cut_at_any_moment_changes_nothing(work, tmp_path, monkeypatch):
    source, disk = write_images(tmp_path / "sources", {"train": [2, 2]}), tmp_path / "disk"
    disk.mkdir()
    (source / prepare.TRAIN_TAR).write_bytes(tar_of({"n01440764.tar": tar_of(IMAGES)}))
    shutil.copytree(disk, tmp_path / "before")
    run_ranks(record, 1, disk, tmp_path / "log", work, source, log_folder=tmp_path).check()
    monkeypatch.chdir(disk)
    monkeypatch.setattr(sys, "argv", sys.argv)  # which work changes
    expected, now, rng, num_odd = work(source), crash.Disk(tmp_path / "before"), random.Random(0), 0
    for call in [*(each for each in read_log(tmp_path / "log") if each[1] in CHANGING), None]:
        images = list(now.images())
        zeros = [image for image in images if any(file and file[0] and not any(file[0]) for file in image.values())]
        image = rng.choice(rng.choice([zeros, images]) or images)  # files of the right length as often as all others
        crash.write_image(image, disk)
        os.chdir(disk)
        assert work(source) == expected, call
        num_odd += image != images[0]
        if isinstance(call, Call):
            now.apply(call)
    assert num_odd > 5


ANYWHERE = ["--model", PLAIN]  # which a Python of its own knows


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    return FaultyRuns(image_folder, tmp_path_factory.mktemp("runs"), OPTIONS)


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_has_its_outcome_and_a_resumed_run_the_same_bits(runs, what):
    runs.strike(what, what.replace(" ", "-"), 3 - FAULTS[what].world_size)


def restarted_by(agent):
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
    file = open(Path(folder, os.environ["RANK"]), "a", buffering=1)  # noqa: SIM115
    os.register_at_fork(before=lambda: file.write(f"{len(os.listdir('/proc/self/task'))}\n"))


def test_loader_processes_are_forked_before_there_are_other_threads(runs, tmp_path):
    stop = [(1, "models.ema.ExponentialMovingAverage.forward", 1, "before", TERM)]
    runs.run("forks", 2, "--workers", 2, faults=stop).check()
    runs.run("forks", 2, "--workers", 2, prepare=(count_threads, str(tmp_path))).check()
    for rank in "01":
        assert {*(tmp_path / rank).read_text().split()} == {"1"}
    runs.check_same("forks")


def iterate(rank, world_size, lengths, rounds_at_stop, folder):
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
    for stop, expected in [(0, [[0, cause]] * 3), (2, [[0, 1, 2], [0, 1], [0]])]:
        run_check(3, iterate, tmp_path, [3, 2, 1], stop, str(tmp_path))
        assert [json.loads((tmp_path / f"seen{rank}.json").read_text()) for rank in range(3)] == expected


def left_running(folder):
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # gone meanwhile
            found += [int(line.parent.name)] * (str(folder).encode() in line.read_bytes())
    return found


@pytest.fixture
def agent(runs):
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
