"""What `--resume`, `--overwrite` and `--output-dir` accept, refuse and fall back on."""

import argparse
import json
import os
import shutil

import pytest
import torch
import torchvision

from checkpointing.archive import load_checkpoint
from checkpointing.folder import CheckpointFolder
from tests.endings import differing, differing_results, flatten
from tests.images import pack_shards
from tests.started import DAMAGES, damage_truncated, refused, run_train, state_of


def test_a_checkpoint_is_plain_data_and_its_model_is_torchvisions(started, tmp_path):
    out = tmp_path / "out"
    run_train(tmp_path, *started.argv, "--output-dir", out, "--epochs", 1, "--model", "shufflenet_v2_x0_5").check()
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        state = torch.load(out / "checkpoint.pth", weights_only=True)
    finally:
        torch.serialization.add_safe_globals(allowed)

    def check(value, name):
        if isinstance(value, dict):
            assert all(type(key) in (str, int) for key in value), name
            for key, item in value.items():
                check(item, f"{name}/{key}")
        elif isinstance(value, list):
            for item in value:
                check(item, name)
        else:
            assert type(value) in (str, int, float, bool, type(None), torch.Tensor), (name, type(value))

    check(state, "")
    torchvision.models.shufflenet_v2_x0_5(num_classes=3).load_state_dict(state["model"])
    assert state["epoch"] == 0
    assert state["args"]["model"] == "shufflenet_v2_x0_5"


def test_a_folder_with_a_run_is_refused_without_a_word_about_it(started, tmp_path):
    out = started.copy(tmp_path / "out")

    def files():  # the lock names whoever had it last
        return sorted((path.name, path.stat().st_size) for path in out.iterdir() if path.name != ".lock")

    before = files()
    refused(started.go_on(tmp_path, out), "holds a run already", "--resume auto", "--overwrite")
    assert files() == before


def test_overwrite_removes_our_files_only_and_starts_over(started, tmp_path):
    out = started.copy(tmp_path / "out")
    (out / "notes.txt").write_text("mine")
    started.go_on(tmp_path, out, "--overwrite", "--epochs", 1).check()
    assert (out / "notes.txt").read_text() == "mine"
    assert not (out / "checkpoint-00000006.pth").exists()
    assert json.loads((out / "metrics.jsonl").read_text().splitlines()[0])["step"] == 2


def test_auto_starts_afresh_where_nothing_has_been_saved(started, tmp_path):
    out = tmp_path / "out"
    killed = started.go_on(tmp_path, out, "--resume", "auto", faults=[(0, "torch.optim.SGD.step", 1, "before")])
    assert killed.codes == [-9]
    assert list(out.glob("*.pth")) == []
    outcome = started.go_on(tmp_path, out, "--resume", "auto", "--epochs", 1).check()
    assert "no checkpoint in" in outcome.output
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


@pytest.mark.parametrize("damage", DAMAGES)
def test_auto_falls_back_to_the_newest_good_checkpoint(started, tmp_path, damage):
    out = started.copy(tmp_path / "out")
    newest = out / "checkpoint-00000006.pth"
    newest.unlink()  # the copy of a hard link: damage this name's content only
    shutil.copy(out / "checkpoint-00000005.pth", newest)
    damage(newest)
    (out / "checkpoint.pth").unlink()
    os.link(out / "checkpoint-00000004.pth", out / "checkpoint.pth")
    outcome = started.go_on(tmp_path, out, "--resume", "auto", "--epochs", 2).check()
    assert sum(line.startswith(f"checkpoint {newest} ") for line in outcome.output.splitlines()) == 1
    assert "resumed step 5 " in outcome.output
    assert (out / "checkpoint-00000006.pth.corrupt").exists()
    assert not (out / "executed").exists()
    assert os.path.samefile(out / "checkpoint.pth", newest)
    assert differing_results(out, started.out) == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_path_to_a_damaged_checkpoint_is_refused(started, tmp_path, damage):
    out = started.copy(tmp_path / "out")
    path = out / "checkpoint-00000004.pth"
    damage(path)
    refused(started.go_on(tmp_path, out, "--resume", path), path)
    assert not (out / "executed").exists()
    assert path.exists()
    assert (out / "checkpoint-00000006.pth").exists()
    assert list(out.glob("*.corrupt")) == []


def test_auto_stops_where_all_checkpoints_are_damaged(started, tmp_path):
    out = started.copy(tmp_path / "out")
    for path in out.glob("*.pth"):
        damage_truncated(path)
    words = ["checkpoints in", "none usable", "is damaged", "Not starting over", "--overwrite"]
    refused(started.go_on(tmp_path, out, "--resume", "auto"), *words, code=4)
    refused(started.go_on(tmp_path, out, "--resume", "auto"), *words, code=4)


@pytest.mark.parametrize("argv", [["--workers", 2, "--checkpoint-steps", 2], ["--print-freq", 1, "--keep-last", 2]])
def test_what_may_change_freely_changes_no_bit(started, tmp_path, argv):
    out = started.copy(tmp_path / "out")
    path = out / "checkpoint-00000004.pth"
    outcome = started.go_on(tmp_path, out, "--resume", path, "--epochs", 2, *argv).check()
    assert argv[0][2:] in outcome.output
    ours, theirs = (load_checkpoint(folder / "checkpoint.pth", "it") for folder in (out, started.out))
    for part in ("model", "optimizer"):
        assert differing(flatten(ours[part]), flatten(theirs[part])) == []


def test_test_only_takes_the_checkpoints_own_model_and_sizes(started, image_folder, tmp_path):
    last = json.loads((started.out / "metrics.jsonl").read_text().splitlines()[-1])
    argv = ["--data-path", image_folder, "--test-only", "--resume", started.out / "checkpoint.pth", "--device", "cpu"]
    outcome = run_train(tmp_path, *argv, "--batch-size", 8, "--workers", 0).check()
    assert "--val-crop-size 32: as in the checkpoint" in outcome.output
    assert f"Acc@1 {last['acc1']:.3f} Acc@5 {last['acc5']:.3f} loss {last['loss']:.3f} n=7" in outcome.output


def test_a_folder_with_any_checkpoint_in_it_is_refused(started, tmp_path):
    for name in ["best.pth", "checkpoint-00000004.pth.corrupt", "superseded-checkpoint-00000004.pth"]:
        out = tmp_path / name
        out.mkdir()
        shutil.copy(started.out / "best.pth", out / name)
        refused(started.go_on(tmp_path, out), "holds a run already")
        assert (out / name).exists()


def test_going_back_loses_nothing_when_killed_at_once(started, tmp_path):
    """Killed before the first save, and again by auto: still from the older step."""
    out = started.copy(tmp_path / "out")
    for resume in [out / "checkpoint-00000004.pth", "auto"]:
        faults = [(0, "torch.optim.SGD.step", 1, "before")]
        outcome = started.go_on(tmp_path, out, "--resume", resume, faults=faults)
        assert outcome.codes == [-9]
        assert "resumed step 4 " in outcome.output
    assert {path.name for path in out.glob("superseded-*")} >= {"superseded-checkpoint-00000006.pth"}


def test_best_comes_along_into_another_folder(started, tmp_path):
    fresh = tmp_path / "fresh"
    started.go_on(tmp_path, fresh, "--resume", started.out / "checkpoint.pth").check()
    expected = load_checkpoint(fresh / "checkpoint.pth", "newest")["best"]["step"]
    assert load_checkpoint(fresh / "best.pth", "best")["step"] == expected
    lone = tmp_path / "lone.pth"
    shutil.copy(started.out / "checkpoint-00000005.pth", lone)
    alone = tmp_path / "alone"
    assert "the next best becomes best.pth" in started.go_on(tmp_path, alone, "--resume", lone).check().output
    assert (alone / "best.pth").exists()


def test_another_format_stops_and_is_not_taken_for_damage(started, tmp_path):
    out = started.copy(tmp_path / "out")
    state = torch.load(out / "checkpoint-00000006.pth", weights_only=True)
    torch.save({**state, "format": 1}, out / "checkpoint-00000006.pth")
    refused(started.go_on(tmp_path, out, "--resume", "auto"), "has format 1", "use the version that wrote it")
    assert list(out.glob("*.corrupt")) == []


def test_a_refused_resume_changes_nothing(started, tmp_path):
    out = started.copy(tmp_path / "out")
    damage_truncated(out / "checkpoint-00000006.pth")
    before = state_of(out)
    refused(started.go_on(tmp_path, out, "--resume", "auto", "--seed", 1), "seed 0 in the checkpoint")
    assert state_of(out) == before


def test_a_damaged_checkpoint_is_named_before_an_option_that_cannot_change(started, tmp_path):
    out = started.copy(tmp_path / "out")
    damage_truncated(out / "checkpoint-00000006.pth")
    outcome = started.go_on(tmp_path, out, "--resume", "auto", "--lr", 0.7)
    refused(outcome, "--resume auto", "lr", "0.7")
    lines = outcome.output.splitlines()
    (damaged,) = [number for number, line in enumerate(lines) if "checkpoint-00000006.pth is damaged" in line]
    (refusal,) = [number for number, line in enumerate(lines) if line.startswith("train.py: error: ")]
    assert damaged < refusal
    assert not list(out.glob("*.corrupt"))


def test_test_only_without_a_checkpoint_is_refused(started, tmp_path):
    outcome = started.go_on(tmp_path, tmp_path / "none", "--resume", "auto", "--test-only")
    refused(outcome, "there is no checkpoint", "none")


def test_test_only_writes_nothing_where_the_newest_is_damaged(started, tmp_path):
    out = started.copy(tmp_path / "out")
    damage_truncated(out / "checkpoint-00000006.pth")
    (out / ".lock").unlink()
    before = state_of(out)
    outcome = started.go_on(tmp_path, out, "--resume", "auto", "--test-only").check()
    assert "n=7" in outcome.output
    assert "00000006.pth is damaged or no checkpoint" in outcome.output
    assert "resuming from checkpoint-00000005.pth, 1 step earlier" in outcome.output
    assert "kept as" not in outcome.output
    assert state_of(out) == before
    assert not (out / ".lock").exists()


def test_an_average_that_is_new_begins_as_the_model(started, tmp_path):
    out = tmp_path / "out"
    faults = [(0, "checkpointing.store.CheckpointManager.save", 4, "before")]  # of the first evaluation
    assert started.go_on(tmp_path, out, faults=faults).codes == [-9]
    outcome = started.go_on(
        tmp_path, out, "--resume", "auto", "--model-ema", "--epochs", 1, "--allow-change", "model-ema,epochs"
    ).check()
    results = [line.split("Acc@1")[1] for line in outcome.output.splitlines() if "Acc@1" in line]
    assert results[0] == results[1]


def test_the_same_command_with_start_epoch_can_be_given_again(started, tmp_path):
    out = tmp_path / "out"
    for faults in ([(0, "checkpointing.store.CheckpointManager.save", 2, "before")], []):
        outcome = started.go_on(tmp_path, out, "--start-epoch", 1, "--resume", "auto", faults=faults)
    assert "resumed step 4 (epoch 1, step 1 of 3 in it)" in outcome.check().output


def test_a_missing_path_is_refused(started, tmp_path):
    refused(started.go_on(tmp_path, tmp_path / "out", "--resume", tmp_path / "none.pth"), "none.pth", "is not a file")
    assert not list((tmp_path / "out").glob("*.pth"))


def test_a_state_dict_is_no_checkpoint_and_the_message_names_weights(started, tmp_path):
    torch.save(torchvision.models.shufflenet_v2_x0_5(num_classes=3).state_dict(), tmp_path / "w.pth")
    refused(started.go_on(tmp_path, tmp_path / "out", "--resume", tmp_path / "w.pth"), "no checkpoint", "--weights")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "shufflenet_v2_x1_0"], ["timm/tiny_test", "shufflenet_v2_x1_0"]),
        (["--start-epoch", "1"], ["--start-epoch 1"]),
        (["--norm-weight-decay", "0", "--allow-change", "norm-weight-decay"], ["parameter groups"]),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(started, tmp_path, argv, words):
    out = started.copy(tmp_path / "out")
    refused(started.go_on(tmp_path, out, "--resume", "auto", *argv), *words)


@pytest.mark.dist
def test_a_world_size_that_does_not_divide_the_shards_is_refused_with_those_that_do(started, tmp_path):
    out = tmp_path / "out"
    argv = ["--epochs", 1, "--batch-size", 2, "--global-batch-size", 12]
    refused(started.go_on(tmp_path, out, *argv, world_size=4), "6 micro-batches", "on 4 processes", "use 1, 3 or 6")


def test_a_path_elsewhere_needs_an_empty_folder(started, tmp_path):
    out = started.copy(tmp_path / "out")
    refused(started.go_on(tmp_path, out, "--resume", started.out / "checkpoint.pth"), "holds a run already")
    fresh = tmp_path / "fresh"
    outcome = started.go_on(tmp_path, fresh, "--resume", started.out / "checkpoint.pth").check()
    assert "resumed step 6 " in outcome.output
    steps = [json.loads(line)["step"] for line in (fresh / "metrics.jsonl").read_text().splitlines()]
    assert min(steps) > 6


def test_an_older_file_supersedes_the_newer_ones(started, tmp_path):
    out = started.copy(tmp_path / "out")
    outcome = started.go_on(tmp_path, out, "--resume", out / "checkpoint-00000004.pth", "--epochs", 2).check()
    assert "checkpoint-00000006.pth is newer" in outcome.output
    assert (out / "superseded-checkpoint-00000006.pth").exists()
    # The steps that were taken back are done again, and end as they did.
    ours, theirs = (load_checkpoint(folder / "checkpoint.pth", "it")["model"] for folder in (out, started.out))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_checkpoint_of_torchvisions_script_is_refused_and_weights_is_named(started, tmp_path):
    model, theirs = torchvision.models.shufflenet_v2_x0_5(num_classes=3), tmp_path / "model_7.pth"
    namespace = argparse.Namespace(model="shufflenet_v2_x0_5")
    torch.save({"model": model.state_dict(), "epoch": 7, "args": namespace}, theirs)
    refused(started.go_on(tmp_path, tmp_path / "out", "--resume", theirs), "argparse.Namespace", "--weights")
    argv = ["--model", "shufflenet_v2_x0_5", "--weights", theirs]
    started.go_on(tmp_path, tmp_path / "out", *argv, "--epochs", 1).check()


def test_a_run_resumes_from_a_tar_to_the_same_bits(started, image_folder, tmp_path):
    """Begun on class folders and resumed on tars."""
    tars, out = tmp_path / "tars", tmp_path / "out"
    pack_shards(image_folder / "train", tars)
    shutil.copytree(image_folder / "val", tars / "val")
    argv = ["--data-path", tars, "--epochs", 2, "--workers", 1, "--resume", started.out / "checkpoint-00000004.pth"]
    started.go_on(tmp_path, out, *argv).check()
    found, expected = (load_checkpoint(folder / "checkpoint.pth", "it") for folder in (out, started.out))
    assert found["step"] == 6
    for name in ("fingerprint", "num_images", "classes"):
        assert found["data"][name] == expected["data"][name]
    assert differing(flatten(found["model"]), flatten(expected["model"])) == []


def test_checkpoints_are_sorted_by_number_and_not_by_name(tmp_path):
    for name in ["checkpoint-99999999.pth", "checkpoint-100000000.pth", "checkpoint-7.pth", "checkpoint.pth"]:
        (tmp_path / name).touch()
    found = [path.name for path in CheckpointFolder(tmp_path).numbered()]
    assert found == ["checkpoint-100000000.pth", "checkpoint-99999999.pth"]
