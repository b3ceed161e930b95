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


def compare(runs, *argv, step):
    runs.run("undisturbed", 1, FLAG, *argv).check()
    for world_size, number in [(1, 2), (2, 4)]:  # of that process
        argv_of_start = [FLAG, *argv, "--resume", "auto", "--checkpoint-steps", 1]
        killed = runs.run("killed", world_size, *argv_of_start, faults=[(0, step, number, "after")])
        assert -9 in killed.codes, killed.output
    runs.run("killed", 1, FLAG, *argv, "--resume", "auto").check()
    assert_same(runs, "killed")


def model_of(path):
    return load_checkpoint(path, str(path))["model"]


def test_the_classifier_trains_first_and_then_everything(image_folder, tmp_path):
    runs = Runs(image_folder, tmp_path, PLAIN_OPTIONS)
    argv = ["--freeze-epochs", 1, "--model", "timm/tiny_test"]
    compare(runs, *argv, step="torch.optim.SGD.step")
    args = config.parse_args(runs.argv("x", *argv))
    first = build_model(args, 3).state_dict()
    runs.run("first", 1, FLAG, *argv, "--stop-epoch", 1).check()
    after = model_of(tmp_path / "first" / "checkpoint.pth")
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, first[name])}
    assert moved == {"fc.weight", "fc.bias"}  # neither weights nor statistics below it
    last = model_of(tmp_path / "undisturbed" / "checkpoint.pth")
    assert all(not torch.equal(tensor, after[name]) for name, tensor in last.items())
    runs.run("frozen", 1, FLAG, "--model", "timm/tiny_test", "--freeze", "--stop-epoch", 1).check()
    assert differing(after, model_of(tmp_path / "frozen" / "checkpoint.pth")) == []
    records = [[each for each in runs.metrics(name) if each["step"] <= 3] for name in ("undisturbed", "frozen")]
    for ours, theirs in zip(*records, strict=True):
        assert (ours.get("loss"), ours.get("grad_norm")) == (theirs.get("loss"), theirs.get("grad_norm"))


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
    compare(runs, *argv, step="schedulefree.adamw_schedulefree.AdamWScheduleFree.step")  # saved more often, too
    state = load_checkpoint(tmp_path / "undisturbed" / "checkpoint.pth", "it")
    optimizer = state["optimizer"]
    names = [name for name, _ in build_model(config.parse_args(runs.argv("x", *argv)), 3).named_parameters()]
    order = [number for group in optimizer["param_groups"] for number in group["params"]]
    assert sorted(order) == [*range(len(names))]
    model, trained = state["model"], state["trained_weights"]
    assert trained.keys() == set(names)
    zs = [optimizer["state"][number]["z"] for number in order]
    for name in names:
        like = [z for z in zs if z.shape == model[name].shape]
        assert min((0.1 * z + 0.9 * model[name] - trained[name]).abs().max() for z in like) < 1e-5
        assert not torch.equal(model[name], trained[name])
    best = tmp_path / "undisturbed" / "checkpoint.pth"
    argv = ["--test-only", "--resume", best, "--data-path", image_folder, "--device", "cpu", "--workers", 0]
    said = run_train(tmp_path, *argv).check().output
    recorded = [each for each in runs.metrics("undisturbed") if each["kind"] == "val"][-1]
    assert f"Test: Acc@1 {recorded['acc1']:.3f}" in said
    assert f"loss {recorded['loss']:.3f}" in said


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

net = Deep

def loss():
    def compute(output, target):
        if not isinstance(output, tuple):  # in evaluation
            return F.cross_entropy(output, target)
        scores, early, more = output
        return F.cross_entropy(scores, target) + 0.5 * F.cross_entropy(early, target)
    return compute

scores_only = lambda: F.cross_entropy
"""


def test_a_model_of_several_outputs_trains_by_a_loss_of_ones_own_alone(image_folder, tmp_path):
    mine, out, images = tmp_path / "own.py", tmp_path / "out", image_folder / "val"
    mine.write_text(DEEP)
    argv = [*SMALL, *"--mean 0.5 0.5 0.5 --std 0.5 0.5 0.5 --batch-size 8 --epochs 2 --print-freq 1".split(), FLAG]
    argv += ["--data-path", image_folder, "--model", f"{mine}:net", "--output-dir", out]
    refused(run_train(tmp_path, *argv), "its output is a tuple of 3, which needs a loss of your own: give --criterion")
    outcome = run_train(tmp_path, *argv, "--criterion", f"{mine}:scores_only")
    refused(outcome, "--criterion", "a tuple of 3, as the model returns in training")
    run_train(tmp_path, *argv, "--criterion", f"{mine}:loss").check()
    exec(DEEP, defined := {})
    torch.manual_seed(0)
    assert not torch.equal(model_of(out / "checkpoint.pth")["early.weight"], defined["net"](3).early.weight)
    val = [each for each in read_metrics(out / "metrics.jsonl") if each["kind"] == "val"][-1]
    model = ["--model", f"{mine}:net"]
    _, output = run_tool(tmp_path, "predict", out / "checkpoint.pth", images, *model, "--json")
    formats = ["--format", "onnx", "torch-export", "--output", tmp_path]
    run_tool(tmp_path, "export", out / "checkpoint.pth", *model, *formats)
    expected = json.loads(output)["images"]
    # The loss of an evaluation is that of the scores alone, which tools give.
    shares = [{top["class"]: top["probability"] for top in each["top"]} for each in expected]
    truths = [Path(each["file"]).parent.name for each in expected]
    losses = [-math.log(share[truth]) for share, truth in zip(shares, truths, strict=True)]
    assert val["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-2)
    for file in ("net.onnx", "net.pt2"):
        found = json.loads(run_tool(tmp_path, "predict", tmp_path / file, images, "--json")[1])["images"]
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours["file"], ours["class"]) == (theirs["file"], theirs["class"])
            assert ours["probability"] == pytest.approx(theirs["probability"], abs=1e-4)
    _, text = run_tool(tmp_path, "evaluate", out / "checkpoint.pth", *model, "--set", f"val={images}", "--workers", 0)
    assert f"{val['acc1']:.3f}" in text
    said = run_train(tmp_path, *argv, "--test-only", "--resume", out / "checkpoint.pth").check().output
    assert f"Test: Acc@1 {val['acc1']:.3f}" in said
