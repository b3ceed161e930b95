"""Runs that are not one loop over one set of weights: frozen at first, of two kinds of weights, of several outputs."""

import json
import math
from pathlib import Path

import pytest
import torch

from checkpointing.archive import load_checkpoint
from models.build import build_model
from settings import config
from tests.endings import differing, read_metrics
from tests.exports import run_tool
from tests.runs import FLAG, OPTIONS, Runs, assert_same
from tests.started import SMALL, refused, run_train

PLAIN_OPTIONS = " ".join(OPTIONS).replace("--layer-decay 0.9", "").split()


def compare(runs, *argv, faults):
    """Compare runs on one and two processes, and killed at steps and resumed, with one that nothing disturbs."""
    runs.run("undisturbed", 1, FLAG, *argv).check()
    runs.run("two", 2, FLAG, *argv).check()
    assert_same(runs, "two")
    for number, (rank, where, step, when) in enumerate(faults):
        name = f"killed{number}"
        killed = runs.run(name, 1 + number % 2, FLAG, *argv, faults=[(rank, where, step, when)])
        assert -9 in killed.codes, killed.output
        runs.run(name, 2 - number % 2, FLAG, *argv, "--resume", "auto").check()
        assert_same(runs, name)


def model_of(path):
    return load_checkpoint(path, str(path))["model"]


# `--freeze-epochs`


def test_the_classifier_trains_first_and_then_everything(image_folder, tmp_path):
    runs = Runs(image_folder, tmp_path, PLAIN_OPTIONS)
    argv = ["--freeze-epochs", 1, "--model", "timm/tiny_test"]
    compare(runs, *argv, faults=[(0, "torch.optim.SGD.step", step, "after") for step in (2, 5)])
    args = config.parse_args(runs.argv("x", *argv))
    first = build_model(args, 3).state_dict()
    runs.run("first", 1, FLAG, *argv, "--stop-epoch", 1).check()
    after = model_of(tmp_path / "first" / "checkpoint.pth")
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, first[name])}
    assert moved == {"fc.weight", "fc.bias"}  # neither weights nor statistics below it
    last = model_of(tmp_path / "undisturbed" / "checkpoint.pth")
    assert all(not torch.equal(tensor, after[name]) for name, tensor in last.items())
    # The oracle of the first epoch: a run that trains its classifier alone.
    runs.run("frozen", 1, FLAG, "--model", "timm/tiny_test", "--freeze", "--stop-epoch", 1).check()
    assert differing(after, model_of(tmp_path / "frozen" / "checkpoint.pth")) == []
    records = [[each for each in runs.metrics(name) if each["step"] <= 3] for name in ("undisturbed", "frozen")]
    for ours, theirs in zip(*records, strict=True):
        assert (ours.get("loss"), ours.get("grad_norm")) == (theirs.get("loss"), theirs.get("grad_norm"))


# Optimizers with `train()` and `eval()`

SCHEDULE_FREE = """
import schedulefree

def adamw(params, lr, weight_decay):
    return schedulefree.AdamWScheduleFree(params, lr=lr, weight_decay=weight_decay, warmup_steps=2)
"""


def test_a_schedule_free_optimizer_evaluates_its_average_and_trains_its_own_weights(image_folder, tmp_path):
    pytest.importorskip("schedulefree")
    (tmp_path / "own.py").write_text(SCHEDULE_FREE)
    runs = Runs(image_folder, tmp_path, [*PLAIN_OPTIONS, "--opt", f"{tmp_path / 'own.py'}:adamw", "--lr", "0.01"])
    argv = ["--model", "timm/tiny_test", "--lr-scheduler", "steplr", "--no-model-ema", "--lr-warmup-epochs", 0]
    kill = "schedulefree.adamw_schedulefree.AdamWScheduleFree.step"
    compare(runs, *argv, faults=[(0, kill, step, "after") for step in (2, 5)])
    # However often it is saved, it trains the same.
    runs.run("often", 1, FLAG, *argv, "--checkpoint-steps", 1).check()
    assert_same(runs, "often")
    state = load_checkpoint(tmp_path / "undisturbed" / "checkpoint.pth", "it")
    optimizer = state["optimizer"]
    names = [name for name, _ in build_model(config.parse_args(runs.argv("x", *argv)), 3).named_parameters()]
    order = [number for group in optimizer["param_groups"] for number in group["params"]]
    assert sorted(order) == [*range(len(names))]
    model, trained = state["model"], state["trained_weights"]
    assert trained.keys() == set(names)
    shapes = {}
    for number in order:
        z = optimizer["state"][number]["z"]
        shapes.setdefault(tuple(z.shape), []).append(z)
    for name in names:
        # Its paper: y = (1 - beta) z + beta x.
        candidates = shapes[tuple(model[name].shape)]
        errors = [(0.1 * z + 0.9 * model[name] - trained[name]).abs().max() for z in candidates]
        assert min(errors) < 1e-5
        assert not torch.equal(model[name], trained[name])
    # What was evaluated is what was saved.
    best = tmp_path / "undisturbed" / "checkpoint.pth"
    argv = ["--test-only", "--resume", best, "--data-path", image_folder, "--device", "cpu", "--workers", 0]
    said = run_train(tmp_path, *argv).check().output
    recorded = [each for each in runs.metrics("undisturbed") if each["kind"] == "val"][-1]
    assert f"Test: Acc@1 {recorded['acc1']:.3f}" in said
    assert f"loss {recorded['loss']:.3f}" in said


# Models with several outputs

DEEP = """
from torch import nn
from torch.nn import functional as F

class Deep(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU())
        self.early, self.fc = nn.Linear(8, num_classes), nn.Linear(8, num_classes)

    def forward(self, images):
        features = self.stem(images)
        return self.fc(features.mean((2, 3))), self.early(features.amax((2, 3))), {"features": features}

def net(num_classes):
    return Deep(num_classes)

def loss():
    def compute(output, target):
        if not isinstance(output, tuple):  # in evaluation
            return F.cross_entropy(output, target)
        scores, early, more = output
        return F.cross_entropy(scores, target) + 0.5 * F.cross_entropy(early, target)
    return compute

def scores_only():
    return F.cross_entropy
"""


def test_a_model_of_several_outputs_trains_by_a_loss_of_ones_own(image_folder, tmp_path):
    (tmp_path / "own.py").write_text(DEEP)
    small = [*SMALL, "--mean", "0.5", "0.5", "0.5", "--std", "0.5", "0.5", "0.5"]
    argv = [*small, "--data-path", image_folder, "--model", f"{tmp_path / 'own.py'}:net", "--batch-size", 8]
    own, out = ["--criterion", f"{tmp_path / 'own.py'}:loss"], tmp_path / "out"
    run_train(tmp_path, *argv, *own, "--epochs", 2, "--output-dir", out, "--print-freq", 1, FLAG).check()
    records = read_metrics(out / "metrics.jsonl")
    exec((tmp_path / "own.py").read_text(), defined := {})
    args = config.parse_args([str(word) for word in argv])
    torch.manual_seed(args.seed)
    first = defined["net"](3)
    last = model_of(out / "checkpoint.pth")
    assert not torch.equal(last["early.weight"], first.state_dict()["early.weight"])
    val = [each for each in records if each["kind"] == "val"][-1]
    images = image_folder / "val"
    _, output = run_tool(tmp_path, "predict", out / "checkpoint.pth", images, "--model", args.model, "--json")
    exported = tmp_path / "exported"
    model = ["--model", args.model]
    run_tool(
        tmp_path, "export", out / "checkpoint.pth", *model, "--format", "onnx", "torch-export", "--output", exported
    )
    expected = json.loads(output)["images"]
    # The loss of an evaluation is that of the scores alone, which tools give.
    shares = [{top["class"]: top["probability"] for top in each["top"]} for each in expected]
    truths = [Path(each["file"]).parent.name for each in expected]
    losses = [-math.log(share[truth]) for share, truth in zip(shares, truths, strict=True)]
    assert val["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-2)
    for file in (exported / "net.onnx", exported / "net.pt2"):
        found = json.loads(run_tool(tmp_path, "predict", file, images, "--json")[1])["images"]
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours["file"], ours["class"]) == (theirs["file"], theirs["class"])
            assert ours["probability"] == pytest.approx(theirs["probability"], abs=1e-4)
    sets = ["--set", f"val={images}", "--workers", 0]
    _, text = run_tool(tmp_path, "evaluate", out / "checkpoint.pth", *model, *sets)
    assert f"{val['acc1']:.3f}" in text
    said = run_train(tmp_path, *argv, "--test-only", "--resume", out / "checkpoint.pth").check().output
    assert f"Test: Acc@1 {val['acc1']:.3f}" in said


def test_a_loss_that_cannot_take_the_outputs_is_refused_before_training(image_folder, tmp_path):
    (tmp_path / "own.py").write_text(DEEP)
    small = [*SMALL, "--mean", "0.5", "0.5", "0.5", "--std", "0.5", "0.5", "0.5"]
    argv = [*small, "--data-path", image_folder, "--model", f"{tmp_path / 'own.py'}:net", "--batch-size", 8]
    argv += ["--output-dir", tmp_path / "o"]
    refused(run_train(tmp_path, *argv), "its output is a tuple of 3, which needs a loss of your own: give --criterion")
    own = ["--criterion", f"{tmp_path / 'own.py'}:scores_only"]
    refused(run_train(tmp_path, *argv, *own), "--criterion", "a tuple of 3, as the model returns in training")
