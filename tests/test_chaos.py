"""A short round of what `make chaos` does at length, and power cuts of tools: nothing lost, nothing different."""

import io
import json
import os
import random
import shutil
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from checkpointing import folder as folders
from checkpointing import store
from errors import StorageError
from scripts import pack, prepare
from tests.archives import jpeg, tar_of
from tests.calls import CHANGING, Call, Trouble, Watch, read_log
from tests.chaos import CAMPAIGNS, Chaos, run_scenario
from tests.crash import SCENARIOS, Trial
from tests.images import write_images
from tests.power_loss import Disk, lose_power, possible_states, write_image
from tests.ranks import run_ranks, some_slow


@pytest.fixture(scope="module")
def chaos(tmp_path_factory):
    return Chaos(tmp_path_factory.mktemp("chaos"), seed=1)


# How many faults of a kind strike; the campaigns themselves compare each run with an uninterrupted one.
ROUNDS = {"kills": 2, "resizes": 1, "signals": 2, "bitflips": 500}


@pytest.mark.parametrize("kind", some_slow({**CAMPAIGNS, **ROUNDS}, CAMPAIGNS.keys() - ROUNDS))
def test_faults_lose_nothing_and_change_nothing(chaos, kind):
    number = ROUNDS.get(kind, 1)
    chaos.run(kind, number)
    assert chaos.problems == []
    assert chaos.counts[kind] >= number


def flip_a_bit(out, name="checkpoint.pth"):
    state = torch.load(out / name, weights_only=True)
    next(iter(state["model"].values())).view(torch.int32).flatten()[0] ^= 1
    torch.save(state, out / name)


def change_a_line(out):
    lines = (out / "metrics.jsonl").read_text().splitlines()
    (out / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps({**json.loads(lines[-1]), "loss": 0.5})]))


def be_requeued(out):
    record = json.loads((out / "status.json").read_text())
    (out / "status.json").write_text(json.dumps({**record, "state": "preempted", "requeue": True}))


def double_a_point(out):
    with SummaryWriter(out) as writer:
        writer.add_scalar("val/acc1", 50.0, 12)


def forget_an_option(out):
    text = (out / "recipe.toml").read_text()
    (out / "recipe.toml").write_text("\n".join(line for line in text.splitlines() if "label-smoothing" not in line))


CHANGES = {
    "a flipped bit": flip_a_bit,
    "a flipped bit of the best": lambda out: flip_a_bit(out, "best.pth"),
    "no best average": lambda out: (out / "best_ema.pth").unlink(),
    "a wrong name": lambda out: (out / "checkpoint-00000012.pth").rename(out / "checkpoint-00000013.pth"),
    "a changed line": change_a_line,
    "a file left over": lambda out: (out / "checkpoint.pth.tmp.7").touch(),
    "a wrong state": be_requeued,
    "a doubled point": double_a_point,
    "no points": lambda out: [path.unlink() for path in out.glob("events.*")],
    "a lost option": forget_an_option,
}


def test_the_oracle_sees_each_change(tmp_path):
    """The negative control: each of these must be counted."""
    chaos, plain = Chaos(tmp_path, seed=1), CAMPAIGNS["signals"]
    chaos.reference(plain)
    chaos.runs.run("whole", 1).check()
    for number, (what, change) in enumerate({"nothing": lambda out: None, **CHANGES}.items()):
        shutil.copytree(tmp_path / "runs" / "whole", chaos.out)
        change(chaos.out)
        chaos.compare(plain, what)
        assert chaos.counts["different"] == number, what
    shutil.copytree(tmp_path / "runs" / "whole", chaos.out)
    assert chaos.note_loss(13) == 12
    assert chaos.counts["lost"] == 1
    (chaos.out / "checkpoint-00000011.pth").write_bytes(b"cut")
    chaos.note_loss(12)
    assert chaos.counts["lost"] == 2


NAMES = [scenario.name for scenario in SCENARIOS]
# Points of each scenario.
SHORT = {"crash_points": 1, "failing_calls": 1, "power_loss": 1}
LIKE_OTHERS = {
    "new with average, saving late", "new without resume", "from elsewhere, overwriting", "interrupted",
    "from elsewhere, best elsewhere", "damaged newest",
}  # fmt: skip


@pytest.mark.parametrize("name", some_slow(NAMES, LIKE_OTHERS))
def test_no_point_of_a_run_loses_anything(name, tmp_path):
    counts, problems = run_scenario(NAMES.index(name), SHORT, tmp_path)
    assert problems == []
    assert all(counts[kind] >= 0.5 * SHORT[kind] for kind in SHORT)


# Negative controls: each of these must be found.


def holds_a_save(state):
    contents = [content[0] for path, content in state.image.items() if path.endswith(".pth")]
    return any(zipfile.is_zipfile(io.BytesIO(content)) for content in contents)


def test_no_power_failure_after_a_save_leaves_none_and_a_disk_that_syncs_nothing_is_found(tmp_path):
    trial = Trial(SCENARIOS[0], tmp_path / "trial")
    assert all(holds_a_save(state) for state in possible_states(trial) if state.saved)
    log = [entry for entry in trial.recorded.log if not (isinstance(entry, Call) and entry.name == "fsync")]
    log = log[: 1 + next(number for number, entry in enumerate(log) if entry[0] == "saved")]
    bare = [state for state in possible_states(trial, log) if state.saved and not state.image]
    trial.attempt("power_loss", lose_power, bare[0])
    assert trial.counts["lost"] == 1, trial.problems


def write_in_place():
    def written(path, content, verify=None):
        with open(path, "wb") as file:
            content(file) if callable(content) else file.write(content)

    folders.write_atomically = written


def test_a_file_that_is_written_in_place_is_found(tmp_path):
    trial = Trial(SCENARIOS[0], tmp_path / "trial", spoil=(write_in_place,))
    paths = {call.number: call.paths[0] for call in trial.recorded.calls()}
    halves = [point for point in trial.kill_points() if point.is_half and paths[point.number].endswith("3.pth")]
    trial.attempt("crash_points", Trial.kill, halves[0])
    assert "corrupt" in trial.problems[0]


def hide_failures():
    wait_for_save = store.CheckpointManager.wait_for_save

    def forget(manager, **options):
        was_saving = manager.is_written
        with suppress(StorageError):
            wait_for_save(manager, **options)
        return was_saving

    store.CheckpointManager.wait_for_save = forget


def test_a_save_that_hides_that_it_failed_is_found(tmp_path):
    trial = Trial(SCENARIOS[0], tmp_path / "trial", spoil=(hide_failures,))
    writes = [point for point in trial.failures() if (point.name, point.code, point.lasts) == ("write", 28, True)]
    trial.attempt("failing_calls", Trial.fail, writes[len(writes) // 2])
    assert trial.counts["lost"] == 1, trial.problems


IMAGES = {f"n01440764_{number}.JPEG": jpeg(number) for number in range(3)}


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
    Watch(disk, log, Trouble(), CHANGING)
    work(source)


@pytest.mark.parametrize("work", [run_prepare, write_pack])
def test_a_power_cut_at_any_moment_changes_nothing(work, tmp_path, monkeypatch):
    """Watch work on a disk, then do it again on a disk of each moment at which the power may fail."""
    source, disk = write_images(tmp_path / "sources", {"train": [4, 3]}), tmp_path / "disk"
    disk.mkdir()
    (source / prepare.TRAIN_TAR).write_bytes(tar_of({"n01440764.tar": tar_of(IMAGES)}))
    shutil.copytree(disk, tmp_path / "before")
    run_ranks(record, 1, disk, tmp_path / "log", work, source, log_folder=tmp_path).check()
    monkeypatch.chdir(disk)
    monkeypatch.setattr(sys, "argv", sys.argv)  # which work changes
    expected, now, rng, num_odd = work(source), Disk(tmp_path / "before"), random.Random(0), 0
    for call in [*read_log(tmp_path / "log"), None]:
        images = list(now.images())
        zeros = [image for image in images if any(file and file[0] and not any(file[0]) for file in image.values())]
        image = rng.choice(rng.choice([zeros, images]) or images)  # files of the right length as often as all others
        write_image(image, disk)
        os.chdir(disk)
        assert work(source) == expected, call
        num_odd += image != images[0]
        if isinstance(call, Call):
            now.apply(call)
    assert num_odd > 5
