"""The same bits, whatever happens: kills, restarts, and any number of processes."""

import pytest

from tests.endings import differing
from tests.runs import FLAG, Runs, assert_same


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    runs = Runs(image_folder, tmp_path_factory.mktemp("runs"))
    runs.run("undisturbed", 4, FLAG).check()
    return runs


def test_the_reference_run_trains(runs):
    final = runs.final("undisturbed")
    assert (final["/step"], final["/epoch"]) == (9, 2)
    kinds = [record["kind"] for record in runs.metrics("undisturbed")]
    # Every second step of the nine, and the last.
    assert kinds == ["train", "val", "val_ema", *["train", "train", "val", "val_ema"] * 2]


def test_one_process_has_the_bits_of_four(runs):
    runs.run("one", 1, FLAG).check()
    assert_same(runs, "one")


def test_three_shards_on_three_processes_and_on_one(runs):
    argv = [FLAG, "--epochs", 1, "--lr-warmup-epochs", 0]
    runs.run("three3", 3, *argv, shards=3).check()
    runs.run("three1", 1, *argv, shards=3).check()
    assert_same(runs, "three1", "three3")


def test_negative_control_without_the_flag_bits_differ_but_not_the_start_and_learning_rates(runs):
    runs.run("plain4", 4, "--print-freq", 1).check()
    runs.run("plain1", 1, "--print-freq", 1).check()
    assert differing(runs.final("plain4"), runs.final("plain1")) != []
    four, one = runs.metrics("plain4"), runs.metrics("plain1")
    # The first step sees the same weights, images and mixing; what differs is the order of one float32 sum.
    assert four[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-6)
    assert [(r["step"], r.get("lr")) for r in four] == [(r["step"], r.get("lr")) for r in one]


# 9 steps, 3 an epoch; saved after steps 2, 3 (before and after evaluation), 4, 6, 6, 8, 9 and 9. Each start of a run
# goes on where the one before it was killed: on how many processes, with how many of loaders, and where it is killed.
STEP, SAVE = "torch.optim.SGD.step", "checkpointing.store.CheckpointManager.save"
KILLS = {
    "inside epochs": [
        (4, 0, STEP, 1, "after"),  # before any save
        (1, 2, STEP, 2, "before"),
        (2, 1, SAVE, 1, "after"),  # right after a save
        (2, 0, STEP, 5, "before"),  # inside a log window
    ],
    "at a boundary": [
        (2, 0, STEP, 3, "after"),  # before its save
        (2, 1, SAVE, 1, "after"),  # before the first evaluation
        (1, 0, "models.ema.ExponentialMovingAverage.forward", 2, "before"),  # during evaluation
        (2, 0, SAVE, 1, "before"),  # between the result and its save
        (1, 1, SAVE, 1, "after"),  # after the result's save
    ],
    "in a save and at the end": [
        (2, 0, "os.replace", 8, "before"),
        (1, 1, STEP, 5, "after"),  # in the last epoch
        (2, 0, "train.evaluate_all", 1, "before"),  # before the last evaluation
    ],
}


@pytest.mark.parametrize("place", KILLS)
def test_killed_again_and_again_and_resumed_on_other_processes_same_bits(runs, place):
    name = place.replace(" ", "-")
    for world_size, num_workers, *fault in KILLS[place]:
        argv = [FLAG, "--resume", "auto", "--workers", num_workers]
        killed = runs.run(name, world_size, *argv, faults=[(3 if world_size == 4 else 0, *fault)])
        assert -9 in killed.codes, killed.output
    runs.run(name, 2, FLAG, "--resume", "auto").check()
    assert_same(runs, name)


def test_restart_of_a_finished_run_prints_its_result_and_changes_nothing(runs):
    before = (runs.folder / "undisturbed" / "metrics.jsonl").read_bytes()
    outcome = runs.run("undisturbed", 2, FLAG, "--resume", "auto").check()
    assert "finished 3 epochs, 9 steps" in outcome.output
    assert "best val_ema/acc1" in outcome.output
    assert (runs.folder / "undisturbed" / "metrics.jsonl").read_bytes() == before
