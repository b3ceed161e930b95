"""scripts/tool.py and average.py."""

import os
import shlex
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path

import numpy
import pytest
import torch
import torchvision

import data
from errors import UserError
from scripts import average, benchmark, check, evaluate, make_digits, pack, prepare, report, tool
from scripts.trained import open_trained
from tests.exports import refused
from tests.ranks import Outcome, run_ranks, tool_rank
from tests.runs import state_at
from tests.started import refused as refused_run
from tests.started import run_train


def run(tmp_path: Path, name: str, *argv, largest_file=None) -> Outcome:
    return run_ranks(tool_rank, 1, name, argv, None, None, largest_file, log_folder=tmp_path, timeout_s=60)


@pytest.mark.parametrize(
    ("module", "argv", "words"),
    [
        # An output replaces no file of another kind.
        (evaluate, "x.pth --set val=. --json a.pth", "a.pth is there already, and only files named *.json"),
        (evaluate, "x.pth --set val=. --predictions a.pth", "only files named *.csv"),
        (report, ". --out a.pth", "only files named *.html"),
        (benchmark, "step --json a.pth", "only files named *.json"),
        (make_digits, ".", "a.pth is not one of these digits, and stays"),
        # An empty path is not the current folder.
        (make_digits, "''", "expected a path, and it is empty"),
        (prepare, ". http:/me:secret@host/p", "argument OUT: expected a local path, not an address"),
        (evaluate, "x.pth --set val=. --html s3://me@bucket/a.html", "--html: expected a local path, not an address"),
        (make_digits, "digits --gpu 0", "unrecognized argument"),
        (check, "train", "has no train/"),
        (check, ". --expect-train many", "--expect-train"),
        (check, ". --workers 100000", "--workers 100000"),
        (benchmark, "step --rounds 0", "--rounds"),
        (benchmark, "step --json no/figures", "--json"),
        (benchmark, "step --modle x", "--model"),
        (benchmark, "loader --data-path . --against timm --cores 0", "--cores"),
        (pack, "out --data-path in --short-side 9 --pretrained", "unrecognized argument"),
    ],
)
def test_a_wrong_command_is_one_line_and_changes_nothing(monkeypatch, capfd, tmp_path, module, argv, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.pth").write_text("kept")
    (tmp_path / "a.pth").write_text("kept")
    monkeypatch.setattr(sys, "argv", ["tool", *shlex.split(argv)])
    with pytest.raises(SystemExit) as end:
        module.main()
    printed = capfd.readouterr()
    assert (end.value.code, printed.out, len(printed.err.splitlines())) == (2, "", 1), printed
    assert words in printed.err
    assert "secret" not in printed.err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.pth", "a.pth", "train"]
    assert (tmp_path / "a.pth").read_text() == "kept"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (OSError(36, "File name too long", "w/xxx"), 2, "w/xxx: File name too long; give another path"),
        (BrokenPipeError(32, "Broken pipe"), 1, "standard output cannot be written: Broken pipe"),
        (OSError(5, "Input/output error", "a"), 1, "[Errno 5] Input/output error: 'a'"),
        (UserError("a\nb\tc"), 2, "a b\tc"),
    ],
)
def test_every_error_is_one_line(capsys, error, code, line):
    def work():
        raise error

    with pytest.raises(SystemExit) as end:
        tool.run("name", work, "interrupted")
    assert (end.value.code, capsys.readouterr().err) == (code, f"name: error: {line}\n")


def weights_in(path):
    return torch.load(path, weights_only=True)["model"]


def test_a_runs_last_checkpoints_are_averaged(started, tmp_path):
    paths = [started.out / f"checkpoint-{step:08d}.pth" for step in (6, 5)]
    output = tmp_path / "an average.pth"
    outcome = run(tmp_path, "average", started.out, "--last", 2, "--output", output).check()
    assert "--reestimate-bn DATA_PATH" in outcome.output
    found, states = weights_in(output), [weights_in(path) for path in paths]
    assert list(found) == list(states[0])
    for name, tensor in found.items():  # integers are rounded down
        mean = numpy.mean([state[name].numpy() for state in states], axis=0, dtype="float64")
        assert numpy.array_equal(tensor.numpy(), mean.astype(tensor.numpy().dtype)), name
    trained = open_trained(str(output))
    assert (trained.args.model, trained.args.val_crop_size, len(trained.classes)) == ("timm/tiny_test", 32, 3)
    assert torch.load(output, weights_only=True)["averaged"] == list(map(str, paths))
    # Training starts from it, and no run goes on from it.
    argv = [*started.argv, "--epochs", 1]
    run_train(tmp_path, *argv, "--output-dir", tmp_path / "next", "--weights", output).check()
    resumed = run_train(tmp_path, *argv, "--output-dir", tmp_path / "other", "--resume", output)
    refused_run(resumed, "pass it to --weights")


def test_the_average_of_one_file_is_that_file_in_our_form(tmp_path):
    model = torchvision.models.mnasnet0_5(num_classes=3)
    args = Namespace(model="mnasnet0_5", val_crop_size=192, val_resize_size=200, nested={1: 2})
    torch.save({"model": model.state_dict(), "epoch": 3, "args": args}, tmp_path / "torchvisions.pth")
    wrapped = torch.nn.DataParallel(model).state_dict()
    torch.save({"arch": "mnasnet0_5", "state_dict": wrapped, "best_acc1": 1.0}, tmp_path / "examples.pth")
    for name, sizes in (("torchvisions", (192, 200)), ("examples", (224, 256))):
        run(tmp_path, "average", tmp_path / f"{name}.pth", "--output", tmp_path / "ours.pth").check()
        trained = open_trained(str(tmp_path / "ours.pth"))
        assert trained.args.model == "mnasnet0_5"
        assert (trained.args.val_crop_size, trained.args.val_resize_size) == sizes
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in trained.model.state_dict().items())


def test_checkpoints_that_cannot_be_averaged(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    state = state_at(2)
    states = {
        "run/checkpoint-00000002": state,
        "run/checkpoint-00000004": state,
        "model": state | {"args": state["args"] | {"model": "vgg11"}},
        "shape": state | {"model": {"weight": torch.ones(3)}},
        "classes": state | {"data": state["data"] | {"classes": ["a", "c"]}},
    }
    for name, content in states.items():
        torch.save(content, tmp_path / f"{name}.pth")
    first, output = folder / "checkpoint-00000002.pth", tmp_path / "averaged.pth"
    os.link(first, folder / "best.pth")
    for argv, words in [
        ([first, tmp_path / "model.pth"], "in its model"),
        ([first, tmp_path / "shape.pth"], "has different weights than"),
        ([first, tmp_path / "classes.pth"], "in its classes"),
        ([first, "--images", 5], "--images has no effect without --reestimate-bn"),
        ([first, folder / "best.pth"], "is the same file as"),
        ([folder, "--last", 5], "holds 2 numbered checkpoints, fewer than --last 5"),
        ([folder, "--last", 2, "--output", folder / "best_ema.pth"], "a run's own checkpoints have such names"),
        ([tmp_path / "shape.pth", "--output", tmp_path / "shape.pth"], "is one of the files"),
    ]:
        assert words in refused(run(tmp_path, "average", "--output", output, *argv), "average")
    assert not output.exists()


def test_statistics_are_those_of_torchs_own_update(started, image_folder, tmp_path):
    checkpoint, output = started.out / "checkpoint.pth", tmp_path / "new.pth"
    command = [checkpoint, "--reestimate-bn", image_folder, "--batch-size", 8, "--device", "cpu", "--output"]
    outcome = run(tmp_path, "average", *command, output).check()
    assert "re-estimated on 24 training images" in outcome.output
    trained = open_trained(str(checkpoint))
    images = data.IndexedImageFolder(image_folder / "train", trained.preset)
    order = torch.randperm(29, generator=torch.Generator().manual_seed(0))[:24]
    batches = [torch.stack([images[number][0] for number in part.tolist()]) for part in order.split(8)]
    expected, before = trained.model, weights_in(checkpoint)
    torch.optim.swa_utils.update_bn(batches, expected)
    found = weights_in(output)
    assert list(found) == list(expected.state_dict())
    moved = set()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)  # pixels are normalised in another order
        moved |= set() if torch.equal(found[name], before[name]) else {name.rsplit(".", 1)[-1]}
    assert moved == {"running_mean", "running_var", "num_batches_tracked"}


class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bn, self.aux = torch.nn.BatchNorm2d(3, momentum=0.3), torch.nn.BatchNorm2d(3)
        torch.nn.init.constant_(self.aux.running_mean, 2.0)

    def forward(self, image):
        return self.bn(image)


def test_a_layer_that_no_image_passes_keeps_its_statistics():
    model, batches = Pair(), [torch.randn(4, 3, 5, 5) + step for step in range(3)]
    average.reestimate(model, iter(batches), nullcontext())
    torch.testing.assert_close(model.bn.running_mean, torch.stack(batches).mean((0, 1, 3, 4)))
    assert model.aux.running_mean.tolist() == [2.0] * 3
    assert (model.bn.momentum, model.bn.training) == (0.3, False)


def test_statistics_that_cannot_be_estimated(started, image_folder, tmp_path):
    plain = torchvision.models.squeezenet1_1(num_classes=3)
    torch.save({"model": plain.state_dict(), "args": {"model": "squeezenet1_1"}}, tmp_path / "plain.pth")
    bad = weights_in(started.out / "checkpoint.pth")
    next(iter(bad.values())).fill_(3e38)
    torch.save({"model": bad, "args": {"model": "timm/tiny_test", "val_crop_size": 32}}, tmp_path / "huge.pth")
    checkpoint, output = started.out / "checkpoint.pth", tmp_path / "new.pth"
    command = ["--device", "cpu", "--output", output, "--reestimate-bn"]
    for name, words in [("plain", "squeezenet1_1 has no BatchNorm"), ("huge", "its statistics are not finite")]:
        outcome = run(tmp_path, "average", tmp_path / f"{name}.pth", *command, image_folder)
        assert words in refused(outcome, "average")
    full = run(tmp_path, "average", checkpoint, *command, image_folder, largest_file=1000)
    assert "cannot be written" in refused(full, "average")
    assert not list(tmp_path.glob("new.pth*"))
