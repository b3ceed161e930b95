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
    assert final["/step"] == 9
    assert final["/epoch"] == 2
    kinds = [record["kind"] for record in runs.metrics("undisturbed")]
    # Every second step of the nine, and the last.
    assert kinds == ["train", "val", "val_ema", *["train", "train", "val", "val_ema"] * 2]


@pytest.mark.parametrize("world_size", [1, 2])
def test_other_world_size_same_bits(runs, world_size):
    runs.run(f"world{world_size}", world_size, FLAG).check()
    assert_same(runs, f"world{world_size}")


def test_three_shards_on_three_processes_and_on_one(runs):
    model = ["--model", "mobilenet_v3_small"]  # and with one of torchvision's models
    runs.run("three3", 3, FLAG, *model, shards=3).check()
    runs.run("three1", 1, FLAG, *model, shards=3).check()
    assert_same(runs, "three1", "three3")


def test_negative_control_with_ddps_own_all_reduce(runs):
    runs.run("plain4", 4).check()
    runs.run("plain2", 2).check()
    assert differing(runs.final("plain4"), runs.final("plain2")) != []


def test_without_the_flag_same_start_and_learning_rates(runs):
    each_step = ["--print-freq", 1]
    runs.run("plain4b", 4, *each_step).check()
    runs.run("plain1b", 1, *each_step).check()
    four, one = runs.metrics("plain4b"), runs.metrics("plain1b")
    # The first step sees the same weights, images and mixing; what differs is the order of one float32 sum.
    assert four[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-6)
    assert [(r["step"], r.get("lr")) for r in four] == [(r["step"], r.get("lr")) for r in one]


# 9 steps, 3 an epoch; saved after steps 2, 3 (before and after evaluation), 4, 6, 6, 8, 9 and 9.
KILLS = {
    "mid-epoch, two steps after a save": ("torch.optim.SGD.step", 2, "before"),
    "mid-epoch, before any save": ("torch.optim.SGD.step", 1, "after"),
    "right after a save inside an epoch": ("checkpointing.store.CheckpointManager.save", 1, "after"),
    "at a boundary, before its save": ("torch.optim.SGD.step", 3, "after"),
    "at a boundary, before the first evaluation": ("checkpointing.store.CheckpointManager.save", 2, "after"),
    "during evaluation": ("models.ema.ExponentialMovingAverage.forward", 2, "before"),
    "between the result and its save": ("checkpointing.store.CheckpointManager.save", 3, "before"),
    "after the result's save": ("checkpointing.store.CheckpointManager.save", 3, "after"),
    "in the middle of a save": ("os.replace", 8, "before"),
    "inside a log window": ("torch.optim.SGD.step", 5, "before"),
    "in the last epoch": ("torch.optim.SGD.step", 8, "after"),
    "before the last evaluation": ("train.evaluate_all", 3, "before"),
}


@pytest.mark.parametrize("place", KILLS)
def test_killed_and_resumed_same_bits(runs, place):
    name = "kill-" + place.replace(" ", "-").replace(",", "")
    killed = runs.run(name, 2, FLAG, faults=[(0, *KILLS[place])])
    assert killed.codes[0] == -9, killed.output
    runs.run(name, 2, FLAG, "--resume", "auto").check()
    assert_same(runs, name)


def test_another_number_of_processes_and_workers_after_each_kill(runs):
    """4 -> 1 -> 2 processes, inside a log window too, with other loader processes each time."""
    assert (
        runs.run("elastic", 4, FLAG, "--checkpoint-steps", 1, faults=[(3, "torch.optim.SGD.step", 2, "after")]).codes[3]
        == -9
    )
    one = runs.run(
        "elastic", 1, FLAG, "--checkpoint-steps", 1, "--resume", "auto", "--workers", 2,
        faults=[(0, "torch.optim.SGD.step", 4, "before")],
    )  # fmt: skip
    assert one.codes == [-9], one.output
    runs.run("elastic", 2, FLAG, "--checkpoint-steps", 1, "--resume", "auto", "--workers", 1).check()
    assert_same(runs, "elastic")


def test_killed_again_and_again_same_bits(runs):
    """Every start is killed after one more step; the run ends all the same."""
    argv = [FLAG, "--checkpoint-steps", 1, "--resume", "auto"]
    codes = []
    while codes[-1:] != [0] and len(codes) < 12:
        codes += runs.run("often", 1, *argv, faults=[(0, "torch.optim.SGD.step", 2, "after")]).codes
    assert codes == [-9] * (len(codes) - 1) + [0]
    assert len(codes) > 4
    assert_same(runs, "often")


def test_restart_of_a_finished_run_prints_its_result_and_changes_nothing(runs):
    before = (runs.folder / "undisturbed" / "metrics.jsonl").read_bytes()
    outcome = runs.run("undisturbed", 2, FLAG, "--resume", "auto").check()
    assert "finished 3 epochs, 9 steps" in outcome.output
    assert "best val_ema/acc1" in outcome.output
    assert (runs.folder / "undisturbed" / "metrics.jsonl").read_bytes() == before
