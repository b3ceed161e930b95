"""The same bits, whatever happens: kills, restarts, and any number of processes."""

import json

import pytest
import torch

import monitor
from checkpointing.archive import load_checkpoint
from tests.chaos import flatten
from tests.ranks import run_ranks, train_rank

# BatchNorm, dropout, momentum, EMA, random crops and flips, an augmentation policy, repeated augmentation, erasing,
# mixing, clipping and a rate for each step and layer.
# 29 images in batches of 8: 3 steps an epoch, and 5 images left out.
OPTIONS = """
    --model mobilenet_v3_small --train-crop-size 32 --val-resize-size 32 --val-crop-size 32 --device cpu
    --auto-augment ta_wide --random-erase 0.3 --mixup-alpha 0.2 --cutmix-alpha 1.0 --label-smoothing 0.1
    --model-ema --model-ema-steps 2 --model-ema-decay 0.9 --lr 0.05 --lr-warmup-epochs 1 --clip-grad-norm 1.0
    --epochs 3 --print-freq 2 --workers 0 --checkpoint-steps 2 --ra-sampler --lr-scheduler cosineannealinglr
    --lr-per-step --layer-decay 0.9 --norm-weight-decay 0.0
""".split()
FLAG = "--use-deterministic-algorithms"


class Runs:
    """Runs of one recipe on the same images, each in a folder of its own."""

    def __init__(self, images, folder):
        self.images = images
        self.folder = folder

    def run(self, name, world_size, *extra, faults=(), shards=4, timeout_s=120):
        out = self.folder / name
        logs = self.folder / f"{name}-logs"
        logs.mkdir(exist_ok=True)
        batch = ["--batch-size", str(8 // shards), "--global-batch-size", str(8 // shards * shards)]
        argv = ["--data-path", str(self.images), "--output-dir", str(out), *OPTIONS, *batch, *map(str, extra)]
        return run_ranks(train_rank, world_size, argv, list(faults), log_folder=logs, timeout_s=timeout_s)

    def final(self, name):
        """Return everything that a run ended with, as {name: tensor or number}."""
        path = self.folder / name / "checkpoint.pth"
        return flatten({k: v for k, v in load_checkpoint(path, str(path)).items() if k not in ("args", "environment")})

    def metrics(self, name):
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if k not in monitor.MACHINE_FIELDS} for line in lines]


def differing(ours, theirs):
    assert ours.keys() == theirs.keys()
    return [
        name
        for name, value in ours.items()
        if not (torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name])
    ]


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    runs = Runs(image_folder, tmp_path_factory.mktemp("runs"))
    runs.run("undisturbed", 4, FLAG).check()
    return runs


def assert_same(runs, name, reference="undisturbed"):
    assert differing(runs.final(name), runs.final(reference)) == []
    assert runs.metrics(name) == runs.metrics(reference)


def test_the_reference_run_trains(runs):
    final = runs.final("undisturbed")
    assert final["/step"] == 9
    assert final["/epoch"] == 2
    kinds = [record["kind"] for record in runs.metrics("undisturbed")]
    assert kinds == ["train", "train", "val", "val_ema"] * 3


@pytest.mark.parametrize("world_size", [1, 2])
def test_other_world_size_same_bits(runs, world_size):
    runs.run(f"world{world_size}", world_size, FLAG).check()
    assert_same(runs, f"world{world_size}")


def test_three_shards_on_three_processes_and_on_one(runs):
    runs.run("three3", 3, FLAG, shards=3).check()
    runs.run("three1", 1, FLAG, shards=3).check()
    assert_same(runs, "three1", "three3")


def test_negative_control_with_ddps_own_all_reduce(runs):
    runs.run("plain4", 4).check()
    runs.run("plain2", 2).check()
    assert differing(runs.final("plain4"), runs.final("plain2")) != []


def test_without_the_flag_same_start_and_learning_rates(runs):
    runs.run("plain4b", 4).check()
    runs.run("plain1b", 1).check()
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
    "during evaluation": ("models.ExponentialMovingAverage.forward", 2, "before"),
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
