"""scripts/tool.py, and models.py, average.py and reestimate_bn.py."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from argparse import ArgumentTypeError, Namespace
from contextlib import nullcontext
from pathlib import Path

import numpy
import pytest
import torch
import torchvision

import data
from errors import UserError
from scripts import (
    benchmark,
    check,
    evaluate,
    make_digits,
    models,
    pack,
    prepare,
    reestimate_bn,
    report,
    tool,
)
from scripts.trained import open_trained
from tests.ranks import REPOSITORY, Outcome, run_ranks, tool_rank
from tests.runs import state_at
from tests.started import refused, run_train


def run(tmp_path: Path, name: str, *argv, largest_file=None) -> Outcome:
    """Run a tool in a process of its own, and return what became of it."""
    return run_ranks(tool_rank, 1, name, argv, None, None, largest_file, log_folder=tmp_path, timeout_s=60)


def error_line(outcome: Outcome, name: str) -> str:
    """Return the one line that a refused command must leave."""
    assert outcome.codes == [2], outcome.output
    lines = outcome.output.splitlines()
    errors = [line for line in lines if line.startswith(f"python -m scripts.{name}: error: ")]
    assert len(errors) == 1, outcome.output
    assert lines[-1] == errors[0]
    assert "Traceback" not in outcome.output
    return errors[0]


def call(monkeypatch, capsys, tool, *argv):
    """Run a tool's command line here; return its exit code and what it printed."""
    monkeypatch.setattr(sys, "argv", ["tool", *map(str, argv)])
    with pytest.raises(SystemExit) as end:
        tool.main()
    return end.value.code, capsys.readouterr().out


def refusal(monkeypatch, capfd, tool, *argv):
    """Run a tool's command line here, and return the one line by which it is refused."""
    monkeypatch.setattr(sys, "argv", ["tool", *map(str, argv)])
    with pytest.raises(SystemExit) as end:
        tool.main()
    printed = capfd.readouterr()
    assert end.value.code == 2, printed
    assert (printed.out, len(printed.err.splitlines())) == ("", 1), printed
    return printed.err.rstrip()


@pytest.mark.parametrize(
    ("module", "name", "argv"),
    [
        (evaluate, "x.pth", "{file} --set val={folder} --json {file}"),
        (evaluate, "x.json", "x.pth --set val={folder} --per-class {file}"),
        (check, "x.png", "{folder} --json {file}"),
        (report, "metrics.jsonl", "{folder} --out {file}"),
        (benchmark, "x.JPEG", "step --json {file}"),
    ],
    ids=str,
)
def test_an_output_replaces_no_file_of_another_kind(monkeypatch, capfd, tmp_path, module, name, argv):
    (tmp_path / name).write_text("kept")
    line = refusal(monkeypatch, capfd, module, *argv.format(file=tmp_path / name, folder=tmp_path).split())
    assert f"{tmp_path / name} is there already, and only files named *." in line
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "kept"


def test_an_output_is_new_or_replaces_an_earlier_one(tmp_path):
    of_json = tool.output_file(".json", ".jso")
    (tmp_path / "a.JSON").write_text("old")
    (tmp_path / "link.json").symlink_to("nowhere")
    for name in ("a.JSON", "new", "new.pth", "link.json"):
        assert of_json(str(tmp_path / name)) == tmp_path / name
    for name, words in [
        ("", "expected a path, and it is empty"), (str(tmp_path), "expected a file in a folder that is there"),
        (str(tmp_path / "a.JSON" / "b.json"), "expected a file in a folder that is there"),
    ]:  # fmt: skip
        with pytest.raises(ArgumentTypeError, match=words):
            of_json(name)


def test_make_digits_writes_into_no_other_images(monkeypatch, capfd, tmp_path):
    pytest.importorskip("sklearn")
    (tmp_path / "train" / "0").mkdir(parents=True)
    (tmp_path / "train" / "0" / "digit-0000.png").touch()  # its own, which it replaces
    (tmp_path / "train" / "n01440764").mkdir()
    assert "n01440764" in refusal(monkeypatch, capfd, make_digits, tmp_path)
    assert not (tmp_path / "val").exists()


@pytest.mark.parametrize(
    ("module", "argv"),
    [
        (make_digits, [""]),
        (prepare, [".", ""]),
        (prepare, ["", "out"]),
        (pack, ["--short-side", "9", "--data-path", ".", ""]),
    ],
)
def test_an_empty_path_is_not_the_current_folder(monkeypatch, capfd, tmp_path, module, argv):
    monkeypatch.chdir(tmp_path)
    assert "expected a path, and it is empty" in refusal(monkeypatch, capfd, module, *argv)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("module", "argv"),
    [
        (make_digits, "digits --gpu 0"), (make_digits, "digits more"), (check, "data --evaluate"),
        (pack, "out --short-side 9 --pretrained"),
    ],
)  # fmt: skip
def test_an_unknown_argument_is_not_answered_by_an_option_of_another_command(monkeypatch, capfd, module, argv):
    line = refusal(monkeypatch, capfd, module, *argv.split())
    assert "unrecognized argument" in line
    assert not {"--data-path", "--device", "--test-only", "--weights"} & set(line.split())


def raising(error):
    """Return the work of a tool that fails."""

    def work():
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (OSError(36, "File name too long", "w/xxx"), 2, "w/xxx: File name too long; give another path"),
        (PermissionError(13, "Permission denied", "a"), 2, "a: Permission denied; give another path"),
        (BrokenPipeError(32, "Broken pipe"), 1, "standard output cannot be written: Broken pipe"),
        (OSError(5, "Input/output error", "a"), 1, "[Errno 5] Input/output error: 'a'"),
        (UserError("a\nb\tc"), 2, "a b\tc"),
    ],
)
def test_every_error_is_one_line(capsys, error, code, line):
    with pytest.raises(SystemExit) as end:
        tool.run("name", raising(error), "interrupted")
    assert (end.value.code, capsys.readouterr().err) == (code, f"name: error: {line}\n")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["-m", "scripts.models", "resnet18", ">", "/dev/full"], 1, ["No space left on device"]),
        (["-m", "scripts.models", "resnet18", ">&-", "<&-"], 0, []),
        (["-m", "scripts.models", "rezzznet", ">&-", "<&-", "2>&1"], 2, []),
    ],
)
def test_standard_output_that_is_full_or_closed(argv, code, words):
    command = f"{sys.executable} {' '.join(argv)}"
    done = subprocess.run(["sh", "-c", command], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    lines = [f"python -m scripts.models: error: standard output cannot be written: {word}" for word in words]
    assert (done.returncode, done.stderr.splitlines()) == (code, lines)


def test_models_are_listed_with_torchvisions_own_numbers(monkeypatch, capsys):
    code, printed = call(monkeypatch, capsys, models, "--json")
    rows = {row["name"]: row for row in json.loads(printed, parse_constant=pytest.fail)}
    assert code == 0
    assert list(rows) == sorted(torchvision.models.list_models(module=torchvision.models))
    for name, row in rows.items():
        best = torchvision.models.get_model_weights(name).DEFAULT
        expected = best.meta["num_params"], best.meta["_ops"], best.meta["_file_size"]
        assert (row["params"], row["flops"], row["size"]) == expected
        assert row["acc1"] == best.meta["_metrics"]["ImageNet-1K"]["acc@1"]
        assert set(row["all_weights"]) == {member.name for member in torchvision.models.get_model_weights(name)}
    trained = {path.stem: tomllib.loads(path.read_text())["model"]["model"]
               for path in (REPOSITORY / "recipes").glob("*.toml")}  # fmt: skip
    assert {recipe: name for name, row in rows.items() for recipe in row["recipes"]} == {
        recipe: name for recipe, name in trained.items() if not name.startswith("timm/")
    }


def test_models_are_sorted_and_filtered(monkeypatch, capsys):
    argv = ["net", "--json", "--sort", "acc1", "--max-params", "30", "--min-acc1", "75"]
    rows = json.loads(call(monkeypatch, capsys, models, *argv)[1])
    assert [row["acc1"] for row in rows] == sorted((row["acc1"] for row in rows), reverse=True)
    assert len(rows) > 10
    assert all(row["acc1"] >= 75 and row["params"] <= 30e6 and "net" in row["name"] for row in rows)
    assert call(monkeypatch, capsys, models, "wide_resnet50")[1].split()[-2:] == ["V2", "v2"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["reznet50"], "no model has this word in its name; did you mean resnet50?"),
        (["--min-acc1", "99"], "give wider bounds"),
    ],
)
def test_models_that_are_not_there(tmp_path, argv, words):
    assert words in error_line(run(tmp_path, "models", *argv), "models")


def weights_in(path):
    return torch.load(path, weights_only=True)["model"]


def mean_of(paths):
    """The mean of the weights of checkpoints by numpy, in float64; integers rounded down."""
    states = [weights_in(path) for path in paths]
    return {
        name: numpy.mean([state[name].numpy() for state in states], axis=0, dtype="float64").astype("float32")
        if states[0][name].is_floating_point()
        else sum(int(state[name]) for state in states) // len(states)
        for name in states[0]
    }


def assert_mean(path, paths):
    found, expected = weights_in(path), mean_of(paths)
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert numpy.array_equal(tensor.numpy(), expected[name]), name


def test_a_runs_last_checkpoints_are_averaged(started, tmp_path):
    paths = [started.out / f"checkpoint-{step:08d}.pth" for step in (6, 5)]
    output = tmp_path / "an average.pth"
    outcome = run(tmp_path, "average", started.out, "--last", 2, "--output", output).check()
    assert f"python -m scripts.reestimate_bn '{output}' --data-path" in outcome.output
    assert_mean(output, paths)
    trained = open_trained(str(output))
    assert trained.args.model == "timm/tiny_test"
    assert (trained.args.val_crop_size, trained.args.val_resize_size) == (32, 32)
    assert trained.classes == ["class0", "class1", "class2"]
    assert torch.load(output, weights_only=True)["averaged"] == list(map(str, paths))
    # Training starts from it, and no run goes on from it.
    argv = [*started.argv, "--epochs", 1]
    run_train(tmp_path, *argv, "--output-dir", tmp_path / "next", "--weights", output).check()
    resumed = run_train(tmp_path, *argv, "--output-dir", tmp_path / "other", "--resume", output)
    refused(resumed, "it lacks", "pass it to --weights")


def test_the_average_of_one_file_is_that_file_in_our_form(tmp_path):
    model = torchvision.models.mnasnet0_5(num_classes=3)
    args = Namespace(
        model="mnasnet0_5", interpolation="bilinear", val_crop_size=192, val_resize_size=200, nested={1: 2}
    )
    torch.save({"model": model.state_dict(), "epoch": 3, "args": args}, tmp_path / "torchvisions.pth")
    run(tmp_path, "average", tmp_path / "torchvisions.pth", "--output", tmp_path / "ours.pth").check()
    trained = open_trained(str(tmp_path / "ours.pth"))
    assert (trained.args.model, trained.args.val_crop_size, trained.args.val_resize_size) == ("mnasnet0_5", 192, 200)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in trained.model.state_dict().items())


def test_checkpoints_that_cannot_be_averaged(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    states = {
        "run/checkpoint-00000002": {},
        "run/checkpoint-00000004": {},
        "model": {"args": {**state_at(2)["args"], "model": "vgg11"}},
        "shape": {"model": {"weight": torch.ones(3)}},
        "classes": {"data": {**state_at(2)["data"], "classes": ["a", "c"]}},
    }
    for name, changes in states.items():
        torch.save({**state_at(2), **changes}, tmp_path / f"{name}.pth")
    first, output = folder / "checkpoint-00000002.pth", tmp_path / "averaged.pth"
    os.link(first, folder / "best.pth")
    for argv, words in [
        ([first, tmp_path / "model.pth"], "in its model"),
        ([first, tmp_path / "shape.pth"], "holds other weights than"),
        ([first, tmp_path / "classes.pth"], "in its classes"),
        ([first, tmp_path / "missing.pth"], "missing.pth is no file"),
        ([first, folder / "best.pth"], "is the same file as"),
        ([folder, "--last", 5], "holds 2 numbered checkpoints, fewer than --last 5"),
        ([folder, "--last", 2, "--output", folder / "best_ema.pth"], "a run's own checkpoints have such names"),
        ([folder, "--last", 2, "--output", tmp_path / "no" / "a.pth"], "expected a file in a folder that is there"),
        ([tmp_path / "shape.pth", "--output", tmp_path / "shape.pth"], "is one of the files"),
    ]:
        assert words in error_line(run(tmp_path, "average", "--output", output, *argv), "average")
    assert not output.exists()


def test_statistics_are_those_of_torchs_own_update(started, image_folder, tmp_path):
    checkpoint, output = started.out / "checkpoint.pth", tmp_path / "new.pth"
    command = [checkpoint, "--data-path", image_folder, "--output", output, "--batch-size", 8, "--workers", 0]
    outcome = run(tmp_path, "reestimate_bn", *command, "--device", "cpu").check()
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
    assert open_trained(str(output)).classes == ["class0", "class1", "class2"]
    again = tmp_path / "again.pth"
    run(tmp_path, "reestimate_bn", *command[:4], again, *command[5:], "--images", 31, "--device", "cpu").check()
    assert again.read_bytes() == output.read_bytes()


class Pair(torch.nn.Module):
    """Two BatchNorms, one of which no image passes; and layers that draw in training."""

    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)
        self.bn = torch.nn.BatchNorm2d(3, momentum=0.3)
        self.aux = torch.nn.BatchNorm2d(3)
        torch.nn.init.constant_(self.aux.running_mean, 2.0)

    def forward(self, image):
        return self.bn(self.drop(image))


def test_only_what_images_pass_is_estimated():
    model = Pair()
    model.bn.running_mean.fill_(9.0)
    batches = [torch.randn(4, 3, 5, 5) + step for step in range(3)]
    reestimate_bn.reestimate(model, iter(batches), nullcontext())
    torch.testing.assert_close(model.bn.running_mean, torch.stack(batches).mean((0, 1, 3, 4)))
    variances = [batch.transpose(0, 1).flatten(1).var(1) for batch in batches]
    torch.testing.assert_close(model.bn.running_var, torch.stack(variances).mean(0))
    assert model.aux.running_mean.tolist() == [2.0] * 3
    assert (model.bn.momentum, model.aux.momentum) == (0.3, 0.1)
    assert not any(module.training for module in model.modules())


def test_statistics_that_cannot_be_estimated(started_anywhere, image_folder, tmp_path):
    plain = torchvision.models.squeezenet1_1(num_classes=3)
    torch.save({"model": plain.state_dict(), "args": {"model": "squeezenet1_1"}}, tmp_path / "plain.pth")
    bad = weights_in(started_anywhere.out / "checkpoint.pth")
    next(iter(bad.values())).fill_(float("nan"))
    torch.save({"model": bad, "args": {"model": "timm/test_resnet", "val_crop_size": 32}}, tmp_path / "nan.pth")
    checkpoint, output = started_anywhere.out / "checkpoint.pth", tmp_path / "new.pth"
    command = ["--workers", 0, "--device", "cpu", "--output", output, "--data-path"]
    for argv, words in [
        ([tmp_path / "plain.pth", *command, image_folder], "squeezenet1_1 has no BatchNorm"),
        ([tmp_path / "nan.pth", *command, image_folder], "its statistics are not finite"),
        ([checkpoint, *command, image_folder, "--output", checkpoint], "a run's own checkpoints have such names"),
        ([checkpoint, *command, image_folder, "--images", 1], "--images 1: Expected more than 1 value per channel"),
    ]:
        assert words in error_line(run(tmp_path, "reestimate_bn", *argv), "reestimate_bn")
    full = run(tmp_path, "reestimate_bn", checkpoint, *command, image_folder, largest_file=1000)
    assert "cannot be written" in error_line(full, "reestimate_bn")
    assert not list(tmp_path.glob("new.pth*"))


def run_as_nobody(name, argv):
    """Run a tool's command line as a user who may not write everywhere."""
    if os.geteuid() == 0:
        os.setuid(65534)
    tool_rank(name, argv)


@pytest.mark.parametrize(
    ("name", "argv", "words"),
    [
        ("average", "FILE FILE2 --output OUT/a.pth", "in a folder that is there and can be written to"),
        ("export", "FILE --format weights --output OUT", "cannot be written to; choose another --output"),
    ],
)
def test_a_folder_that_cannot_be_written_to_is_found_before_the_work(started, tmp_path, name, argv, words):
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are closed to others
        folder = Path(place)
        (folder / "out").mkdir(mode=0o555)
        folder.chmod(0o755)
        torch.save({"model": {"weight": torch.ones(2)}}, folder / "wrong.pth")  # of no model: opening it would say so
        shutil.copy(started.out / "checkpoint.pth" if name == "export" else folder / "wrong.pth", folder / "a.pth")
        shutil.copy(folder / "a.pth", folder / "b.pth")
        places = {"FILE": folder / "a.pth", "FILE2": folder / "b.pth", "OUT": folder / "out", "IMAGES": folder}
        places["OUT/a.pth"] = folder / "out" / "a.pth"
        command = [places.get(word, word) for word in argv.split()]
        assert words in error_line(run_ranks(run_as_nobody, 1, name, command, log_folder=tmp_path), name)


def test_an_average_that_was_killed_is_the_same_when_it_is_started_again(started, tmp_path):
    argv = [started.out, "--last", 2, "--output"]
    run(tmp_path, "average", *argv, tmp_path / "whole.pth").check()
    for when in ("before", "after"):
        file, fault = tmp_path / f"{when}.pth", ("os.replace", 1, when)
        assert run_ranks(tool_rank, 1, "average", [*argv, file], None, fault, log_folder=tmp_path).codes == [-9]
        assert file.exists() == (when == "after")
        run(tmp_path, "average", *argv, file).check()
        assert file.read_bytes() == (tmp_path / "whole.pth").read_bytes()
