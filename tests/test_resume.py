"""What `--resume`, `--overwrite` and `--output-dir` accept, refuse and fall back on."""

import argparse
import json
import os
import shutil

import pytest
import torch
import torchvision
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from checkpointing.archive import load_checkpoint
from checkpointing.folder import CheckpointFolder
from checkpointing.weights import load_weights
from files import write_atomically
from tests.endings import differing, flatten
from tests.images import pack_classes, pack_shards, write_images
from tests.started import DAMAGES, damage_flipped, damage_truncated, refused, run_train, state_of


def test_the_newest_three_numbered_checkpoints_stay(started):
    names = sorted(path.name for path in started.out.glob("*.pth"))
    assert names == ["best.pth", *(f"checkpoint-{step:08d}.pth" for step in (4, 5, 6)), "checkpoint.pth"]


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
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=[pytest.mark.dist, pytest.mark.slow])])
def test_auto_falls_back_to_the_newest_good_checkpoint(started, tmp_path, damage, world_size):
    out = started.copy(tmp_path / "out")
    newest = out / "checkpoint-00000006.pth"
    newest.unlink()  # the copy of a hard link: damage this name's content only
    shutil.copy(out / "checkpoint-00000005.pth", newest)
    damage(newest)
    (out / "checkpoint.pth").unlink()
    os.link(out / "checkpoint-00000004.pth", out / "checkpoint.pth")
    batch = ["--batch-size", 8 // world_size, "--global-batch-size", 8]
    state = torch.load(out / "checkpoint-00000005.pth", weights_only=True)
    state["shards"]["num_shards"] = state["args"]["num_shards"] = world_size
    state["args"]["batch_size"] = 8 // world_size
    torch.save(state, out / "checkpoint-00000005.pth")
    argv = ["--resume", "auto", "--epochs", 2, *batch]
    outcome = started.go_on(tmp_path, out, *argv, world_size=world_size).check()
    (line,) = [line for line in outcome.output.splitlines() if line.startswith(f"checkpoint {newest} ")]
    assert line.endswith("resuming from checkpoint-00000005.pth, 1 step earlier")
    assert "kept as checkpoint-00000006.pth.corrupt" in outcome.output
    assert "resumed step 5 " in outcome.output
    assert (out / "checkpoint-00000006.pth.corrupt").exists()
    assert not (out / "executed").exists()
    assert os.path.samefile(out / "checkpoint.pth", out / "checkpoint-00000006.pth")
    if world_size == 1:  # two shards have other BatchNorm statistics than one
        ours, theirs = (load_checkpoint(folder / "checkpoint.pth", "it")["model"] for folder in (out, started.out))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


MESSAGES = {
    "damage_flipped": "is damaged (record data/",
    "damage_folder": "is not a file",
    "damage_hostile": "contains code (posix.system) and was refused; nothing in it was run",
    "damage_hostile_legacy": "contains code (posix.system) and was refused; nothing in it was run",
    "damage_hostile_pickle": "is damaged or no checkpoint (a pickle that torch.save did not write; nothing in it was",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_path_to_a_damaged_checkpoint_is_refused(started, tmp_path, damage):
    out = started.copy(tmp_path / "out")
    path = out / "checkpoint-00000004.pth"
    damage(path)
    message = MESSAGES.get(damage.__name__, "is damaged or no checkpoint (")
    refused(started.go_on(tmp_path, out, "--resume", path), f"{path} {message}")
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


def test_the_linked_names_count_where_the_numbered_files_are_gone(started, tmp_path):
    out = started.copy(tmp_path / "out")
    for path in out.glob("checkpoint-*.pth"):
        path.unlink()
    assert "resumed step 6 " in started.go_on(tmp_path, out, "--resume", "auto").check().output
    assert (out / "checkpoint-00000009.pth").exists()


@pytest.mark.parametrize(
    "argv",
    [
        ["--workers", 2],
        ["--checkpoint-steps", 2, "--checkpoint-minutes", 0],
        ["--keep-last", 2],
        ["--print-freq", 1],
        ["--best-metric", "loss"],
        ["--dist-timeout", 5, "--no-use-v2", "--cache-dataset"],
    ],
)
def test_what_may_change_freely_changes_no_bit(started, tmp_path, argv):
    out = started.copy(tmp_path / "out")
    path = out / "checkpoint-00000004.pth"
    outcome = started.go_on(tmp_path, out, "--resume", path, "--epochs", 2, *argv).check()
    assert f"options that changed: {argv[0][2:]} " in outcome.output or "; " in outcome.output
    ours, theirs = (load_checkpoint(folder / "checkpoint.pth", "it") for folder in (out, started.out))
    for part in ("model", "optimizer"):
        assert differing(flatten(ours[part]), flatten(theirs[part])) == []


def test_what_changed_is_said_and_no_temporary_file_is_left(started, tmp_path):
    out = started.copy(tmp_path / "out")
    (out / "checkpoint-00000009.pth.tmp.77").write_bytes(b"half")
    argv = ["--resume", "auto", "--lr", 0.5, "--allow-change", "lr"]
    more = ["--print-freq", 1, "--workers", 1, "--weights", started.out / "best.pth"]
    outcome = started.go_on(tmp_path, out, *argv, *more).check()
    assert "changed as --allow-change says: lr 0.05 in the checkpoint, 0.5 now" in outcome.output
    (free,) = [line for line in outcome.output.splitlines() if line.startswith("options that changed: ")]
    assert set(free.removeprefix("options that changed: ").split("; ")) == {
        "workers 0 in the checkpoint, 1 now",
        "epochs 2 in the checkpoint, 3 now",  # of which steplr's rates do not depend
        "print-freq 2 in the checkpoint, 1 now",
        f"weights None in the checkpoint, {started.out}/best.pth now (not read: the checkpoint has the run's own)",
        f"output-dir {started.out} in the checkpoint, {out} now",
    }
    assert list(out.glob("*.tmp*")) == []
    recipe = (out / "recipe.toml").read_text()
    outcome = started.go_on(tmp_path, out, *argv, *more).check()  # the same command again; nothing is left to do
    assert "--allow-change lr: as in the checkpoint" in outcome.output
    assert (out / "recipe.toml").read_text() == recipe


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


def test_going_back_to_the_best_loses_nothing_when_killed_at_once(started, tmp_path):
    """From best.pth (step 3), killed before the first save, and again by auto: still from step 3."""
    out = started.copy(tmp_path / "out")
    for resume in [out / "best.pth", "auto"]:
        faults = [(0, "torch.optim.SGD.step", 1, "before")]
        outcome = started.go_on(tmp_path, out, "--resume", resume, faults=faults)
        assert outcome.codes == [-9]
        assert "resumed step 3 " in outcome.output
    assert load_checkpoint(out / "best.pth", "best")["step"] == 3
    assert {path.name for path in out.glob("superseded-*")} >= {"superseded-checkpoint-00000006.pth"}


def test_best_stays_where_it_is_older_than_what_is_resumed(started, tmp_path):
    out = started.copy(tmp_path / "out")
    step = load_checkpoint(out / "best.pth", "best")["step"]
    assert step == 3
    started.go_on(tmp_path, out, "--resume", out / "checkpoint-00000005.pth", "--epochs", 2).check()
    best = load_checkpoint(out / "best.pth", "best")
    assert best["step"] == load_checkpoint(out / "checkpoint.pth", "newest")["best"]["step"]


def test_best_comes_along_into_another_folder(started, tmp_path):
    fresh = tmp_path / "fresh"
    started.go_on(tmp_path, fresh, "--resume", started.out / "checkpoint.pth").check()
    expected = load_checkpoint(fresh / "checkpoint.pth", "newest")["best"]["step"]
    assert load_checkpoint(fresh / "best.pth", "best")["step"] == expected
    lone = tmp_path / "lone.pth"
    shutil.copy(started.out / "checkpoint-00000005.pth", lone)
    alone = tmp_path / "alone"
    assert "best.pth starts anew" in started.go_on(tmp_path, alone, "--resume", lone).check().output
    assert (alone / "best.pth").exists()


def test_a_damaged_best_is_set_aside_and_linked_anew(started, tmp_path):
    out = started.copy(tmp_path / "out")
    damage_flipped(out / "best.pth")
    started.go_on(tmp_path, out, "--resume", "auto").check()
    assert load_checkpoint(out / "best.pth", "best")["step"] >= 6
    assert (out / "best.pth.corrupt").exists()


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


def test_overwrite_killed_half_way_leaves_nothing_to_go_on_with(started, tmp_path):
    out = started.copy(tmp_path / "out")
    faults = [(0, "pathlib.Path.unlink", 4, "before")]
    assert started.go_on(tmp_path, out, "--overwrite", faults=faults).codes == [-9]
    assert list(out.glob("checkpoint-*.pth")) == []


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


def test_other_threads_are_refused_under_the_flag(started, tmp_path):
    out = started.copy(tmp_path / "out")
    for name in ("checkpoint-00000006.pth", "checkpoint.pth"):
        state = torch.load(out / name, weights_only=True)
        state["environment"]["threads"] = 2
        torch.save(state, out / name)
    refused(
        started.go_on(tmp_path, out, "--resume", "auto"), "CPU threads (OMP_NUM_THREADS) 2 in the checkpoint, 1 now"
    )


def test_another_decoder_is_refused_and_another_version_is_said(started, tmp_path):
    refused(
        started.go_on(tmp_path, started.copy(tmp_path / "other"), "--resume", "auto", "--decoder", "torchcodec"),
        "decoder pillow in the checkpoint, torchcodec now",
    )
    out = started.copy(tmp_path / "older")
    for file in ("checkpoint-00000006.pth", "checkpoint.pth"):
        state = torch.load(out / file, weights_only=True)
        assert state["environment"]["decoder"].startswith("pillow ")
        state["environment"]["decoder"] = "pillow 1"
        torch.save(state, out / file)
    outcome = started.go_on(tmp_path, out, "--resume", "auto").check()
    assert outcome.output.count("decoder pillow 1 wrote this checkpoint") == 1


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
        (["--batch-size", "4"], ["batch-size 8 in the checkpoint, 4 now", "batch-size cannot be changed"]),
        (["--global-batch-size", "16"], ["global-batch-size 8 in the checkpoint, 16 now", "cannot be changed"]),
        (["--opt", "adamw"], ["opt sgd in the checkpoint, adamw now", "opt cannot be changed"]),
        (["--seed", "1"], ["seed 0 in the checkpoint, 1 now", "give --allow-change seed"]),
        (["--lr", "0.5", "--amp"], ["lr 0.05 in", "amp False in", "give --allow-change lr,amp"]),
        (["--lr", "0.5", "--amp", "--allow-change", "lr"], ["amp False in", "give --allow-change amp"]),
        (
            ["--lr-scheduler", "linearlr"],
            ["lr-scheduler steplr", "epochs 2 in the checkpoint, 3 now (linearlr spreads"],
        ),
        (["--start-epoch", "1"], ["--start-epoch 1"]),
        (["--norm-weight-decay", "0", "--allow-change", "norm-weight-decay"], ["parameter groups"]),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(started, tmp_path, argv, words):
    out = started.copy(tmp_path / "out")
    refused(started.go_on(tmp_path, out, "--resume", "auto", *argv), *words)


def test_a_checkpoint_of_other_data_is_refused(started, tmp_path):
    out = started.copy(tmp_path / "out")
    more = write_images(tmp_path / "more", {"train": [9, 9, 9, 9], "val": [1, 1, 1, 1]})
    outcome = started.go_on(tmp_path, out, "--resume", "auto", "--data-path", more)
    refused(outcome, "holds 3 classes", "has 4", "--weights")
    other = write_images(tmp_path / "other", {"train": [9, 9, 9], "val": [1, 1, 1]})
    refused(
        started.go_on(tmp_path, out, "--resume", "auto", "--data-path", other),
        "num_images 29 in the checkpoint, 27 now",
    )


@pytest.mark.dist
def test_a_world_size_that_does_not_divide_the_shards_is_refused_with_those_that_do(started, tmp_path):
    out = tmp_path / "out"
    argv = ["--epochs", 1, "--batch-size", 2, "--global-batch-size", 12]
    refused(started.go_on(tmp_path, out, *argv, world_size=4), "6 shards", "on 4 processes", "use 1, 3 or 6")


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


def test_a_checkpoint_of_torchvisions_script_gives_its_weights_and_is_not_gone_on_from(started, tmp_path):
    model = torchvision.models.shufflenet_v2_x0_5(num_classes=3)
    theirs = tmp_path / "model_7.pth"
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    with torch.no_grad():
        average.module.fc.weight.zero_()
    state = {"model": model.state_dict(), "model_ema": average.state_dict(), "epoch": 7}
    torch.save({**state, "args": argparse.Namespace(model="shufflenet_v2_x0_5")}, theirs)
    outcome = started.go_on(tmp_path, tmp_path / "out", "--resume", theirs)
    refused(outcome, "another script, such as torchvision's", "argparse.Namespace", "pass it to --weights")
    weights = ["--model", "shufflenet_v2_x0_5", "--weights", theirs]
    argv = [*weights, "--test-only"]
    raw = started.go_on(tmp_path, tmp_path / "out", *argv).check().output
    assert f"--weights {theirs}: the raw weights of shufflenet_v2_x0_5, not their average, which --ema takes" in raw
    assert "Test: Acc@1" in raw
    averaged = started.go_on(tmp_path, tmp_path / "out", *argv, "--ema").check().output
    # Scores of zero but for the bias: every image gets the class whose bias is the largest.
    num_right = {0: 3, 1: 2, 2: 2}[int(model.fc.bias.argmax())]
    assert f"Test: Acc@1 {100 * num_right / 7:.3f}" in averaged
    started.go_on(tmp_path, tmp_path / "out", *weights, "--epochs", 1).check()


def test_curves_go_on_over_a_kill_without_overlap(started, tmp_path):
    out = tmp_path / "out"
    # Killed two steps after the last save, and again after an evaluation was logged and before it was saved.
    faults = [(0, "torch.optim.SGD.step", 3, "after")]
    assert started.go_on(tmp_path, out, "--print-freq", 1, "--checkpoint-steps", 2, faults=faults).codes == [-9]
    faults = [(0, "checkpointing.store.CheckpointManager.save", 2, "before")]
    argv = ["--print-freq", 1, "--checkpoint-steps", 2, "--resume", "auto"]
    assert started.go_on(tmp_path, out, *argv, faults=faults).codes == [-9]
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')  # torn by a kill
    started.go_on(tmp_path, out, *argv).check()
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, 10))
    assert [r["step"] for r in records if r["kind"] == "val"] == [3, 6, 9]
    events = EventAccumulator(str(out), size_guidance={"scalars": 0}).Reload()
    train_tags = {
        f"train/{name}"
        for name in [
            "loss",
            "lr",
            "acc1",
            "acc5",
            "images_per_s",
            "images_per_s_per_device",
            "data_wait",
            "grad_norm",
            "weight_norm",
            "memory_gib",
        ]
    }
    assert set(events.Tags()["scalars"]) == train_tags | {"val/loss", "val/acc1", "val/acc5"}
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 10))
    assert [event.step for event in events.Scalars("val/acc1")] == [3, 6, 9]
    losses = [r["loss"] for r in records if r["kind"] == "train"]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(losses, rel=1e-6)  # float32 there


@pytest.mark.parametrize("form", [pack_shards, pack_classes])
def test_a_run_goes_on_from_a_tar_to_the_same_bits(started, image_folder, tmp_path, form):
    """Killed inside an epoch on tars, gone on with on the same, and begun on a folder and gone on with on tars."""
    tars, out = tmp_path / "tars", tmp_path / "out"
    form(image_folder / "train", tars)
    shutil.copytree(image_folder / "val", tars / "val")
    argv = ["--data-path", tars, "--epochs", 2, "--workers", 1]
    faults = [(0, "checkpointing.store.CheckpointManager.save", 6, "before")]
    assert started.go_on(tmp_path, out, *argv, faults=faults).codes == [-9]
    assert "resumed step 4 " in started.go_on(tmp_path, out, *argv, "--resume", "auto").check().output
    other = tmp_path / "other"
    begun = started.out / "checkpoint-00000004.pth"
    assert "resumed step 4 " in started.go_on(tmp_path, other, *argv, "--resume", begun).check().output
    expected = load_checkpoint(started.out / "checkpoint.pth", "it")
    for folder in (out, other):
        found = load_checkpoint(folder / "checkpoint.pth", "it")
        assert found["step"] == 6
        for name in ("fingerprint", "num_images", "classes"):
            assert found["data"][name] == expected["data"][name]
        assert all(torch.equal(found["model"][name], value) for name, value in expected["model"].items())


def test_half_a_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write(file):
        file.write(b"ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, write)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"old"]


def test_checkpoints_are_sorted_by_number_and_not_by_name(tmp_path):
    for name in ["checkpoint-99999999.pth", "checkpoint-100000000.pth", "checkpoint-7.pth", "checkpoint.pth"]:
        (tmp_path / name).touch()
    found = [path.name for path in CheckpointFolder(tmp_path).numbered()]
    assert found == ["checkpoint-100000000.pth", "checkpoint-99999999.pth"]


# Between two renames, through links, from elsewhere


def steps_of(folder):
    """Return the step that each checkpoint in a folder is of, by name."""
    return {path.name: load_checkpoint(path, path.name)["step"] for path in folder.glob("*.pth")}


@pytest.mark.parametrize("call", [4, 5, 6])
def test_a_kill_between_the_names_of_the_last_save_is_made_good(started, tmp_path, call):
    """An epoch of three steps: a link at each, and after the evaluation checkpoint.pth, best.pth and best_ema.pth."""
    out = tmp_path / "out"
    argv = [*started.argv, "--model-ema", "--output-dir", out, "--epochs", 1, "--resume", "auto"]
    assert run_train(tmp_path, *argv, faults=[(0, "os.link", call, "before")]).codes == [-9]
    assert "best_ema.pth" not in steps_of(out)
    assert "finished 1 epoch, 3 steps" in run_train(tmp_path, *argv).check().output
    numbered = [f"checkpoint-{step:08d}.pth" for step in (1, 2, 3)]
    names = [*numbered, "best.pth", "best_ema.pth", "checkpoint.pth"]
    assert steps_of(out) == dict(zip(names, [1, 2, 3, 3, 3, 3], strict=True))
    assert json.loads((out / "status.json").read_text())["state"] == "finished"
    assert list(out.glob("*.tmp*")) == []


def test_a_finished_run_is_finished_in_another_folder_too(started, tmp_path):
    argv = ["--resume", started.out / "checkpoint.pth", "--epochs", 2]
    outcome = started.go_on(tmp_path, tmp_path / "new", *argv).check()
    assert "finished 2 epochs, 6 steps" in outcome.output
    assert steps_of(tmp_path / "new")["best.pth"] == steps_of(started.out)["best.pth"]
    assert json.loads((tmp_path / "new" / "status.json").read_text())["state"] == "finished"


@pytest.mark.parametrize("call", range(1, 9))
def test_a_start_from_elsewhere_that_was_killed_begins_again(started, tmp_path, call):
    """Killed before each rename of its start; after its first own save, only auto goes on."""
    out, resume = tmp_path / "out", ["--resume", started.out / "checkpoint.pth"]
    assert started.go_on(tmp_path, out, *resume, faults=[(0, "os.replace", call, "before")]).codes == [-9]
    assert all(path.stat().st_size for path in out.glob("*.pth"))
    started.go_on(tmp_path, out, *resume, faults=[(0, "checkpointing.store.CheckpointManager.save", 2, "before")])
    refused(started.go_on(tmp_path, out, *resume), "holds a run already", "--resume auto")
    assert "resumed step 7 " in started.go_on(tmp_path, out, "--resume", "auto").check().output


def test_the_folder_itself_may_be_a_link(started, tmp_path):
    out = started.copy(tmp_path / "real")
    (tmp_path / "out").symlink_to(out)
    started.go_on(tmp_path, tmp_path / "out", "--resume", "auto").check()
    assert steps_of(out)["checkpoint.pth"] == 9


def test_the_average_of_a_checkpoint_can_be_started_from(started, tmp_path):
    out = tmp_path / "out"
    options = ["--model-ema", "--model-ema-steps", 1, "--lr", 0.1, "--epochs", 1]
    started.go_on(tmp_path, out, *options).check()
    expected = load_checkpoint(out / "best_ema.pth", "best")
    argv = ["--test-only", "--weights", out / "best_ema.pth"]
    raw = started.go_on(tmp_path, tmp_path / "a", *argv).check().output
    assert (
        f"--weights {out / 'best_ema.pth'}: the raw weights of timm/tiny_test, not their average, which --ema takes"
        in raw
    )
    average = started.go_on(tmp_path, tmp_path / "a", *argv, "--ema").check().output
    assert f"--weights {out / 'best_ema.pth'}: the average" in average
    scores = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()[-2:]]
    for output, score in zip([raw, average], scores, strict=True):
        assert f"Test: Acc@1 {score['acc1']:.3f} Acc@5 {score['acc5']:.3f} loss {score['loss']:.3f} n=7" in output
    weights = load_weights(out / "best_ema.pth", is_average=True)
    assert all(torch.equal(weight, expected["model_ema"][f"module.{name}"]) for name, weight in weights.items())
    assert weights.keys() == expected["model"].keys()
    refused(started.go_on(tmp_path, out, "--test-only", "--weights", started.out / "best.pth", "--ema"), "no average")
