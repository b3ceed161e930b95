"""What `--resume`, `--overwrite` and `--output-dir` accept, refuse and fall back on."""

import argparse
import json
import os
import shutil

import pytest
import torch
import torchvision

from checkpointing.archive import load_checkpoint
from tests.endings import differing, differing_results, flatten
from tests.started import DAMAGES, damage_truncated, refused, run_train, state_of


def check_same_weights(ours, theirs, *parts):
    found, expected = (load_checkpoint(folder / "checkpoint.pth", "it") for folder in (ours, theirs))
    for part in parts or ("model", "optimizer"):
        assert differing(flatten(found[part]), flatten(expected[part])) == []
    return found, expected


def test_a_checkpoint_is_plain_data_and_its_model_is_torchvisions(started, tmp_path):
    out = tmp_path / "out"
    run_train(tmp_path, *started.argv, "--output-dir", out, "--epochs", 1, "--model", "shufflenet_v2_x0_5").check()
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        state = torch.load(out / "checkpoint.pth", weights_only=True)
    finally:
        torch.serialization.add_safe_globals(allowed)
    torchvision.models.shufflenet_v2_x0_5(num_classes=3).load_state_dict(state["model"])
    assert state["epoch"] == 0
    assert state["args"]["model"] == "shufflenet_v2_x0_5"


@pytest.mark.parametrize("name", ["checkpoint.pth", "superseded-checkpoint-00000004.pth"])
def test_a_folder_with_any_checkpoint_in_it_is_refused_and_stays(started, tmp_path, name):
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(started.out / "checkpoint-00000004.pth", out / name)
    before = state_of(out)
    refused(started.go_on(tmp_path, out), "already holds a run", "--resume auto", "--overwrite")
    refused(started.go_on(tmp_path, out, "--resume", started.out / "checkpoint-00000005.pth"), "already holds a run")
    assert state_of(out) == before


def test_overwrite_removes_our_files_only_and_starts_over(started, tmp_path):
    out = started.copy(tmp_path / "out")
    (out / "notes.txt").write_text("mine")
    started.go_on(tmp_path, out, "--overwrite", "--epochs", 1).check()
    assert (out / "notes.txt").read_text() == "mine"
    assert not (out / "checkpoint-00000006.pth").exists()
    assert json.loads((out / "metrics.jsonl").read_text().splitlines()[0])["step"] == 2


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_its_path_and_passed_over_by_auto(started, tmp_path, damage):
    out = started.copy(tmp_path / "out")
    newest = out / "checkpoint-00000006.pth"
    newest.unlink()  # the copy of a hard link: damage this name's content only
    shutil.copy(out / "checkpoint-00000005.pth", newest)
    DAMAGES[damage](newest)
    (out / "checkpoint.pth").unlink()
    os.link(out / "checkpoint-00000004.pth", out / "checkpoint.pth")
    before = state_of(out)
    refused(started.go_on(tmp_path, out, "--resume", newest), newest)
    assert state_of(out) == before
    outcome = started.go_on(tmp_path, out, "--resume", "auto", "--epochs", 2).check()
    assert sum(line.startswith(f"checkpoint {newest} ") for line in outcome.output.splitlines()) == 1
    assert "resumed step 5 " in outcome.output
    assert (out / "checkpoint-00000006.pth.corrupt").exists()
    assert not (out / "executed").exists()
    assert os.path.samefile(out / "checkpoint.pth", newest)
    assert differing_results(out, started.out) == []


def test_auto_stops_at_another_format_and_where_all_checkpoints_are_damaged(started, tmp_path):
    out = started.copy(tmp_path / "out")
    state = torch.load(out / "checkpoint-00000006.pth", weights_only=True)
    torch.save({**state, "format": 1}, out / "checkpoint-00000006.pth")
    refused(started.go_on(tmp_path, out, "--resume", "auto"), "has format 1", "use the version that wrote it")
    assert list(out.glob("*.corrupt")) == []
    for path in out.glob("*.pth"):
        damage_truncated(path)
    words = ["checkpoints in", "none usable", "is damaged", "--overwrite"]
    refused(started.go_on(tmp_path, out, "--resume", "auto"), *words, code=4)


def test_test_only_takes_the_checkpoints_own_model_and_sizes(started, image_folder, tmp_path):
    last = json.loads((started.out / "metrics.jsonl").read_text().splitlines()[-1])
    argv = ["--data-path", image_folder, "--test-only", "--resume", started.out / "checkpoint.pth", "--device", "cpu"]
    outcome = run_train(tmp_path, *argv, "--batch-size", 8, "--workers", 0).check()
    assert "--val-crop-size 32: as in the checkpoint" in outcome.output
    assert f"Acc@1 {last['acc1']:.3f} loss {last['loss']:.3f} n=7" in outcome.output


def test_test_only_and_a_refused_resume_write_nothing_where_the_newest_is_damaged(started, tmp_path):
    out = started.copy(tmp_path / "out")
    damage_truncated(out / "checkpoint-00000006.pth")
    (out / ".lock").unlink()
    before = state_of(out)
    outcome = started.go_on(tmp_path, out, "--resume", "auto", "--test-only").check()
    assert "n=7" in outcome.output
    assert "resuming from checkpoint-00000005.pth, 1 step earlier" in outcome.output
    assert not (out / ".lock").exists()
    outcome = started.go_on(tmp_path, out, "--resume", "auto", "--lr", 0.7)
    refused(outcome, "--resume auto", "lr", "0.7")
    assert outcome.output.index("checkpoint-00000006.pth is damaged") < outcome.output.index("train.py: error: ")
    assert state_of(out) == before
    outcome = started.go_on(tmp_path, tmp_path / "none", "--resume", "auto", "--test-only")
    refused(outcome, "there is no checkpoint", "none")


def test_an_older_file_supersedes_the_newer_ones_and_loses_nothing_when_killed_at_once(started, tmp_path):
    out, kill = started.copy(tmp_path / "out"), [(0, "torch.optim.SGD.step", 1, "before")]
    for resume in [out / "checkpoint-00000004.pth", "auto"]:
        outcome = started.go_on(tmp_path, out, "--resume", resume, "--epochs", 2, faults=kill)
        assert outcome.codes == [-9]
        assert "resumed step 4 " in outcome.output
    assert (out / "superseded-checkpoint-00000006.pth").exists()
    started.go_on(tmp_path, out, "--resume", "auto", "--epochs", 2).check()
    check_same_weights(out, started.out)


def test_a_path_elsewhere_brings_its_best_along(started, tmp_path):
    fresh = tmp_path / "fresh"
    outcome = started.go_on(tmp_path, fresh, "--resume", started.out / "checkpoint.pth").check()
    assert "resumed step 6 " in outcome.output
    assert "the next best becomes" not in outcome.output
    assert min(json.loads(line)["step"] for line in (fresh / "metrics.jsonl").read_text().splitlines()) > 6
    expected = load_checkpoint(fresh / "checkpoint.pth", "newest")["best"]["step"]
    assert load_checkpoint(fresh / "best.pth", "best")["step"] == expected
    lone, alone = tmp_path / "lone.pth", tmp_path / "alone"
    shutil.copy(started.out / "checkpoint-00000005.pth", lone)
    assert "the next best becomes best.pth" in started.go_on(tmp_path, alone, "--resume", lone).check().output
    assert (alone / "best.pth").exists()


def test_the_same_command_with_start_epoch_can_be_given_again(started, tmp_path):
    out = tmp_path / "out"
    for faults in ([(0, "checkpointing.store.CheckpointManager.save", 2, "before")], []):
        outcome = started.go_on(tmp_path, out, "--start-epoch", 1, "--resume", "auto", faults=faults)
    assert "resumed step 4 (epoch 1, step 1 of 3 in it)" in outcome.check().output


@pytest.mark.parametrize(("argv", "words"), [
    ("--resume none.pth", ["none.pth", "is not a file"]), ("--start-epoch 1", ["--start-epoch 1"]),
    ("--norm-weight-decay 0 --allow-change norm-weight-decay", ["parameter groups"]),
])  # fmt: skip
def test_a_checkpoint_of_another_run_is_refused(started, tmp_path, argv, words):
    out = started.copy(tmp_path / "out")
    refused(started.go_on(tmp_path, out, "--resume", "auto", *argv.split()), *words)


def test_weights_of_others_are_no_checkpoint_and_the_message_names_weights(started, tmp_path):
    model = torchvision.models.shufflenet_v2_x0_5(num_classes=3).state_dict()
    torch.save(model, tmp_path / "w.pth")
    namespace = argparse.Namespace(model="shufflenet_v2_x0_5")
    torch.save({"model": model, "epoch": 7, "args": namespace}, tmp_path / "model_7.pth")
    for name in ("w.pth", "model_7.pth"):
        refused(started.go_on(tmp_path, tmp_path / "out", "--resume", tmp_path / name), "--weights")


@pytest.mark.dist
def test_a_world_size_that_does_not_divide_the_shards_is_refused_with_those_that_do(started, tmp_path):
    argv = ["--epochs", 1, "--batch-size", 2, "--global-batch-size", 12]
    outcome = started.go_on(tmp_path, tmp_path / "out", *argv, world_size=4)
    refused(outcome, "6 micro-batches", "on 4 processes", "use one of 1, 3, 6")
