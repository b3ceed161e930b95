"""Runs of a test's own: around its own steps, at a step and nothing else, and of a recipe with a bit of everything."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import torch

import data
from checkpointing.archive import load_checkpoint
from checkpointing.schema import FORMAT
from checkpointing.store import CheckpointManager
from distributed.decision import StepDecisions
from distributed.signals import Signals
from metrics import build_metrics
from monitoring.monitor import Monitor
from run import Run
from tests.endings import differing, flatten, read_metrics
from tests.ranks import module_rank, run_ranks, train_rank


def set_variables(environment):
    os.environ.update(environment)


def run_forked(words, env=None, **_):
    """Stand for `subprocess.run` of a Python whose imports are there: a rank that is forked from the warm server."""
    place, *argv = map(str, words[1:])
    module, *argv = argv if place == "-m" else [Path(place).stem, *argv]
    with tempfile.TemporaryDirectory() as folder:
        done = run_ranks(module_rank, 1, module, argv, (set_variables, dict(env or {})), log_folder=Path(folder))
    return subprocess.CompletedProcess(words, done.codes[0], done.output, done.output)


def run_of(args, folder, model, optimizer, sampler, device, kind=Run):
    """Return a run as `train.main` builds it that logs nothing, in a folder that it has not been opened in."""
    shards = sampler.shards
    args = args.replaced(output_dir=str(folder), batch_size=shards.batch_size, num_shards=shards.num_shards)
    images = data.SyntheticImages(sampler.num_images, 8)
    run = kind(
        args, None, CheckpointManager(folder), StepDecisions(Signals()),
        sampler=sampler, datasets=(images, images), model=model, metrics=build_metrics(args, len(images.classes)),
        parts={"model": model, "optimizer": optimizer},
    )  # fmt: skip
    run.monitor = Monitor(None, run.state, {})
    return run


def state_at(step, value=0.0, **more):
    """Return the smallest state that the schema accepts: of a run of 16 images in epochs of two steps."""
    epoch, steps = divmod(step, 2) if step % 2 or not step else (step // 2 - 1, 2)
    split = {"fingerprint": "0123456789abcdef", "form": "folder", "path": "/data", "times": "0"}
    split |= {"sizes": None, "checksums": None}
    plain = {
        "format": FORMAT,
        "optimizer": {"state": {}, "param_groups": []},
        "epoch": epoch - (steps < 2),
        "position": {"epoch": epoch, "steps": steps, "is_evaluated": False},
        "best": None,
        "best_ema": None,
        "args": {
            "model": "resnet18", "epochs": 1 << 40, "start_epoch": 0, "batch_size": 8, "lr_scaling": "none",
            "weights": None, "reference_global_batch": None,
        },
        "shards": {"global_batch_size": 8, "num_shards": 1},
        "data": {"num_images": 16, **split, "num_classes": 2, "classes": ["a", "b"], "val": {"num_images": 2, **split}},
        "environment": {"world_size": 1, "threads": 1},
    }  # fmt: skip
    return {**plain, "step": step, "model": {"weight": torch.full((8,), value)}, **more}


class FixedRun:
    """A run at a step of which only what the store reads is there."""

    steps_per_epoch = 2

    def __init__(self, step, best=None):
        self.step, self.bests = step, {"best": best, "best_ema": None}

    @property
    def best_now(self):
        return [name for name, best in self.bests.items() if best is not None and best["step"] == self.step]

    def state_dict(self):
        return state_at(self.step, **self.bests)


# BatchNorm, dropout, momentum, EMA, random crops and flips, an augmentation policy, repeated augmentation, erasing,
# mixing, clipping and a rate for each step and layer.
# 29 images in batches of 8: 3 steps an epoch, and 5 images left out.
OPTIONS = """
    --model timm/test_efficientnet --dropout 0.2 --device cpu
    --train-crop-size 32 --val-resize-size 32 --val-crop-size 32
    --auto-augment ta_wide --random-erase 0.3 --mixup-alpha 0.2 --cutmix-alpha 1.0 --label-smoothing 0.1
    --model-ema --model-ema-steps 2 --model-ema-decay 0.9 --lr 0.05 --lr-warmup-epochs 1 --clip-grad-norm 1.0
    --epochs 3 --print-freq 2 --workers 0 --checkpoint-steps 2 --ra-sampler --lr-scheduler cosineannealinglr
    --lr-per-step --layer-decay 0.9 --norm-weight-decay 0.0
""".split()
FLAG = "--use-deterministic-algorithms"


class Runs:
    def __init__(self, images, folder, options=OPTIONS):
        self.images, self.folder, self.options = images, folder, options

    def argv(self, name, *extra, shards=4):
        batch = ["--batch-size", 8 // shards, "--global-batch-size", 8 // shards * shards]
        words = ["--data-path", self.images, "--output-dir", self.folder / name, *self.options, *batch, *extra]
        return [str(word) for word in words]

    def run(self, name, world_size, *extra, faults=(), prepare=(), shards=4, **how):
        logs = self.folder / f"{name}-logs"
        logs.mkdir(parents=True, exist_ok=True)
        argv = self.argv(name, *extra, shards=shards)
        return run_ranks(train_rank, world_size, argv, list(faults), prepare, log_folder=logs, **how)

    def status(self, name):
        path = self.folder / name / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def saved(self, name):
        return sorted(int(path.name[11:19]) for path in (self.folder / name).glob("checkpoint-0*.pth"))

    def final(self, name):
        path = self.folder / name / "checkpoint.pth"
        return flatten({k: v for k, v in load_checkpoint(path, str(path)).items() if k not in ("args", "environment")})

    def metrics(self, name):
        return read_metrics(self.folder / name / "metrics.jsonl")


def assert_same(runs, name, reference="undisturbed"):
    assert differing(runs.final(name), runs.final(reference)) == []
    assert runs.metrics(name) == runs.metrics(reference)
