"""scripts/tool.py, and models.py, average.py, reestimate_bn.py, tune_resize.py and convert.py."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from argparse import ArgumentTypeError, Namespace
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
import torchvision
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

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
    tune_resize,
)
from scripts import convert as convert_module
from scripts.trained import open_trained
from tests.images import write_images
from tests.ranks import REPOSITORY, Outcome, run_ranks, tool_rank
from tests.runs import state_at
from tests.started import Hostile, refused, run_train


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
        (tune_resize, "x.pth", "{file} --data-path {folder} --json {file}"),
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


def test_timms_models_are_counted(monkeypatch, capsys):
    timm = pytest.importorskip("timm")
    rows = json.loads(call(monkeypatch, capsys, models, "resnet18", "--timm", "--json")[1])
    row = next(row for row in rows if row["name"] == "timm/resnet18")
    assert row["params"] == sum(parameter.numel() for parameter in timm.create_model("resnet18").parameters())
    assert row["flops"] == pytest.approx(torchvision.models.ResNet18_Weights.DEFAULT.meta["_ops"], rel=0.01)


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


@pytest.fixture(params=["val", "minival"])
def evaluated(tmp_path, request):
    """A run's folder with checkpoints after steps 2, 4 ... 10, of which that after step 6 is only there as the best."""
    folder = tmp_path / "evaluated"
    folder.mkdir()
    values = {2: (10.0, 2.0), 4: (30.0, 1.2), 6: (50.0, 1.5), 8: (40.0, 1.0), 10: (20.0, 1.1), 12: (60.0, 0.5)}
    records = []
    for step, (acc1, loss) in values.items():
        record = {"step": step, "epoch": step // 2 - 1, "time": 1.0}
        records += [{"kind": request.param, "acc1": acc1, "loss": loss, **record}]
        records += [{"kind": f"{request.param}_ema", "acc1": 99.0, **record}]
        if step <= 10:
            torch.save(state_at(step, float(step)), folder / f"checkpoint-{step:08d}.pth")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "checkpoint-00000006.pth").rename(folder / "best.pth")
    return folder


def test_a_runs_best_checkpoints_are_averaged(evaluated, tmp_path):
    output = tmp_path / "averaged.pth"
    for argv, steps in [(["--best", 2], [6, 8]), (["--best", 3, "--metric", "loss"], [8, 10, 4])]:
        run(tmp_path, "average", evaluated, *argv, "--output", output).check()
        assert torch.equal(weights_in(output)["weight"], torch.full((8,), sum(steps) / len(steps)))
    line = error_line(run(tmp_path, "average", evaluated, "--best", 6, "--output", output), "average")
    assert "holds 5 checkpoints of the 6 that were evaluated, fewer than --best 6" in line
    line = error_line(
        run(tmp_path, "average", evaluated, "--best", 2, "--metric", "ac1", "--output", output), "average"
    )
    assert "has only these results: acc1, loss" in line


def test_checkpoints_that_cannot_be_averaged(evaluated, started, tmp_path):
    os.link(evaluated / "best.pth", evaluated / "same.pth")
    states = {
        "model": {"args": {**state_at(2)["args"], "model": "vgg11"}},
        "shape": {"model": {"weight": torch.ones(3)}},
    }
    states["classes"] = {"data": {**state_at(2)["data"], "classes": ["a", "c"]}}
    for name, changes in states.items():
        torch.save({**state_at(2), **changes}, tmp_path / f"{name}.pth")
    first, output = evaluated / "best.pth", tmp_path / "averaged.pth"
    for argv, words in [
        ([first, tmp_path / "model.pth"], "in its model"),
        ([first, tmp_path / "shape.pth"], "holds other weights than"),
        ([first, tmp_path / "classes.pth"], "in its classes"),
        ([first, tmp_path / "missing.pth"], "missing.pth is no file"),
        ([first, evaluated / "same.pth"], "is the same file as"),
        ([evaluated, "--last", 5], "holds 4 numbered checkpoints, fewer than --last 5"),
        ([tmp_path, "--best", 1], "holds no metrics.jsonl"),
    ]:
        line = error_line(run(tmp_path, "average", *argv, "--output", output), "average")
        assert words in line
    assert not output.exists()
    command = [evaluated, "--last", 2, "--output"]
    for output, words in [
        (evaluated / "best_ema.pth", "a run's own checkpoints have such names"),
        (tmp_path / "no" / "a.pth", "expected a file in a folder that is there"),
    ]:
        assert words in error_line(run(tmp_path, "average", *command, output), "average")
    other = [tmp_path / "shape.pth"]
    assert "is one of the files" in error_line(run(tmp_path, "average", *other, "--output", *other), "average")


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


def test_each_cell_is_a_plain_evaluation(started, image_folder, tmp_path):
    checkpoint = started.out / "checkpoint.pth"
    command = [checkpoint, "--data-path", image_folder, "--resize", "32-48:8", "--crop", "32,40", "--device", "cpu"]
    files = ["--json", tmp_path / "sweep.json"]
    outcome = run(tmp_path, "tune_resize", *command, *files, "--batch-size", 3, "--workers", 1).check()
    rows = [line.split() for line in outcome.output.splitlines()]
    found = {int(row[0]): row[1:] for row in rows if row and row[0] in ("32", "40", "48")}
    assert list(found) == [32, 40, 48]
    assert found[32][1] == "-"
    cells = {(resize, crop): found[resize][place] for resize in found for place, crop in enumerate((32, 40))}
    for (resize, crop), value in cells.items():
        if crop > resize:
            continue
        argv = ["--data-path", image_folder, "--device", "cpu", "--workers", 0, "--test-only", "--resume", checkpoint]
        plain = run_train(tmp_path, *argv, "--val-resize-size", resize, "--val-crop-size", crop).check().output
        assert f"Test: Acc@1 {value.rstrip('*')} " in plain
    best = max(float(value.rstrip("*")) for value in cells.values() if value != "-")
    assert [float(value[:-1]) for value in cells.values() if value.endswith("*")] == [best]
    written = json.loads((tmp_path / "sweep.json").read_text())
    assert {(cell["resize"], cell["crop"]): f"{cell['acc1']:.3f}" for cell in written["results"]} == {
        cell: value.rstrip("*") for cell, value in cells.items() if value != "-"
    }
    assert all(cell["n"] == 7 for cell in written["results"])


def test_a_set_of_some_classes_is_scored_among_these_by_sweeps_and_evaluations_alike(started, image_folder, tmp_path):
    shutil.copytree(image_folder / "val", tmp_path / "part" / "val")
    shutil.rmtree(tmp_path / "part" / "val" / "class0")
    argv = [started.out / "checkpoint.pth", "--device", "cpu", "--workers", 0, "--json", tmp_path / "found.json"]
    run(tmp_path, "tune_resize", *argv, "--data-path", tmp_path / "part", "--resize", "32").check()
    swept = json.loads((tmp_path / "found.json").read_text())["best"]
    run(tmp_path, "evaluate", *argv, "--set", f"val={tmp_path / 'part' / 'val'}").check()
    found = json.loads((tmp_path / "found.json").read_text())["sets"]["val"]
    assert (swept["acc1"], swept["nll"], swept["n"]) == (found["acc1"], found["nll"], 4)


def test_sizes_are_ranges_and_lists():
    assert tune_resize.sizes("224-288:16") == [224, 240, 256, 272, 288]
    assert tune_resize.sizes("256,224,230-231") == [224, 230, 231, 256]
    for text in ("", "0", "288-224", "224-256:0", "1-99999", "32-99999999999", "9" * 5000, "a", "224-"):
        with pytest.raises(ArgumentTypeError, match=r"expected sizes such as 224-288:16 or 224,256, from 1 to"):
            tune_resize.sizes(text)


def test_a_sweep_of_broken_weights(started, image_folder, tmp_path):
    content = torch.load(started.out / "checkpoint.pth", weights_only=True)
    list(content["model"].values())[-1].fill_(torch.nan)
    torch.save(content, tmp_path / "nan.pth")
    argv = ["--data-path", image_folder, "--resize", "32", "--workers", 0, "--device", "cpu"]
    outcome = run(tmp_path, "tune_resize", tmp_path / "nan.pth", *argv, "--json", tmp_path / "sweep.json")
    assert outcome.codes == [5], outcome.output
    assert outcome.output.splitlines()[-1].endswith("are not finite: its weights are broken")
    assert not (tmp_path / "sweep.json").exists()


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


def test_sweeps_that_cannot_be_made(started, image_folder, tmp_path):
    write_images(tmp_path / "other", {"val": [1, 1, 1, 1]})
    shutil.copytree(image_folder / "val", tmp_path / "renamed" / "val")
    (tmp_path / "renamed" / "val" / "class1").rename(tmp_path / "renamed" / "val" / "class1b")
    command = [started.out / "checkpoint.pth", "--device", "cpu", "--workers", 0, "--data-path"]
    for argv, words in [
        ([image_folder, "--crop", "64", "--resize", "32"], "--crop 64 is larger than --resize 32"),
        ([image_folder, "--crop", "nine"], "argument --crop: nine: expected sizes such as"),
        ([tmp_path / "other", "--crop", "32"], "class3 is none of the 3 classes of the checkpoint"),
        ([tmp_path / "renamed", "--crop", "32"], "class1b is none of the 3 classes of the checkpoint"),
    ]:
        assert words in error_line(run(tmp_path, "tune_resize", *command, *argv), "tune_resize")
    several = run_ranks(tool_rank, 2, "tune_resize", [*command, image_folder], log_folder=tmp_path, timeout_s=60)
    assert 2 in several.codes, several.output  # the other one is ended with it
    assert "2 processes were started, and this tool is one" in several.output


def trained_net(build):
    """A model after two steps of SGD, its optimizer and its average."""
    torch.manual_seed(0)
    model = build(num_classes=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    for _ in range(2):
        model(torch.randn(2, 3, 32, 32)).sum().backward()
        optimizer.step()
        average.update_parameters(model)
    return model, optimizer, average


def convert(tmp_path, source, to, *argv):
    """Convert a file; return the new one and what was said."""
    output = tmp_path / f"{to}-{len(list(tmp_path.glob('*.pth')))}.pth"
    outcome = run(tmp_path, "convert", source, "--to", to, "--output", output, *argv).check()
    return output, outcome.output


def load(path):
    return torch.load(path, weights_only=True)


def assert_equal(found, expected):
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_torchvisions_checkpoint_comes_and_goes(tmp_path):
    model, optimizer, average = trained_net(torchvision.models.mnasnet0_5)
    args = Namespace(model="mnasnet0_5", norm_weight_decay=0.0, opt="sgd", val_crop_size=192, val_resize_size=200,
                     weights=None, world_size=8, nested={"a": 1})  # fmt: skip
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "args": args,
               "model_ema": average.state_dict(), "lr_scheduler": {"last_epoch": 4}}  # fmt: skip
    torch.save(content, tmp_path / "theirs.pth")
    ours, said = convert(tmp_path, tmp_path / "theirs.pth", "touchstone")
    assert "left out: lr_scheduler, optimizer: no other script can use it" in said
    assert "left out: args nested: no plain values" in said
    trained = open_trained(str(ours), is_average=True)
    assert (trained.args.model, trained.args.val_crop_size, trained.args.val_resize_size) == ("mnasnet0_5", 192, 200)
    assert_equal(trained.model.state_dict(), average.module.state_dict())

    back, _ = convert(tmp_path, ours, "torchvision")
    found = load(back)
    assert (found["epoch"], found["args"]["world_size"]) == (3, 8)
    plain = torchvision.models.mnasnet0_5(num_classes=3)
    plain_average = AveragedModel(plain, use_buffers=True)
    plain.load_state_dict(found["model"])
    plain_average.load_state_dict(found["model_ema"])
    assert_equal(plain.state_dict(), model.state_dict())
    assert found["model"]._metadata == model.state_dict()._metadata
    assert_equal(plain_average.state_dict(), average.state_dict())


def test_examples_checkpoint_comes_and_goes(tmp_path):
    model, optimizer, _ = trained_net(torchvision.models.mnasnet0_5)
    state = torch.nn.DataParallel(model).state_dict()
    content = {"epoch": 4, "arch": "mnasnet0_5", "state_dict": state, "best_acc1": torch.tensor(61.5),
               "optimizer": optimizer.state_dict(), "scheduler": {"last_epoch": 4}}  # fmt: skip
    torch.save(content, tmp_path / "theirs.pth")
    ours, said = convert(tmp_path, tmp_path / "theirs.pth", "touchstone")
    assert "left out: optimizer, scheduler" in said
    assert load(ours)["epoch"] == 3
    assert_equal(open_trained(str(ours)).model.state_dict(), model.state_dict())
    found = load(convert(tmp_path, ours, "pytorch-examples")[0])
    assert_equal(found["state_dict"], state)
    assert (found["epoch"], found["arch"], found["best_acc1"]) == (4, "mnasnet0_5", torch.tensor(61.5))
    names = convert_module.in_parallel({"features.0.weight": 1, "classifier.1.weight": 2}, "alexnet")
    assert list(names) == ["features.module.0.weight", "classifier.1.weight"]


def test_timms_checkpoint_comes_and_goes(tmp_path):
    timm = pytest.importorskip("timm")
    build = partial(timm.create_model, "test_efficientnet")
    model, optimizer, average = trained_net(build)
    args = Namespace(model="test_efficientnet", crop_pct=0.8, img_size=64, interpolation="bicubic", mean=None, std=None,
                     input_size=None, opt="sgd", aug_splits=0)  # fmt: skip
    state = {"state_dict": model.state_dict(), "state_dict_ema": average.module.state_dict()}
    facts = {"epoch": 4, "arch": "test_efficientnet", "version": 2, "metric": 70.0, "args": args}
    content = {**facts, **state, "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "theirs.pth")
    ours, _ = convert(tmp_path, tmp_path / "theirs.pth", "touchstone")
    for is_average, expected in ((False, model), (True, average.module)):
        trained = open_trained(str(ours), is_average=is_average)
        assert_equal(trained.model.state_dict(), expected.state_dict())
        assert trained.args.model == "timm/test_efficientnet"
        sizes = trained.args.val_crop_size, trained.args.val_resize_size, trained.args.interpolation
        assert sizes == (64, 80, "bicubic")
        assert trained.args.mean == list(model.default_cfg["mean"])
    back, _ = convert(tmp_path, ours, "timm")
    assert {name: load(back)[name] for name in ("epoch", "arch", "version", "metric")} == {
        name: content[name] for name in ("epoch", "arch", "version", "metric")
    }
    for is_average, expected in ((False, model), (True, average.module)):
        other = build(num_classes=3)
        timm.models.load_checkpoint(other, str(back), use_ema=is_average)
        assert_equal(other.state_dict(), expected.state_dict())


def test_a_run_is_converted_and_trained_on(started, tmp_path):
    source = started.out / "checkpoint.pth"
    theirs, said = convert(tmp_path, source, "timm")
    assert all(word in said.split("left out: ")[1] for word in ("environment", "format", "position"))
    back, _ = convert(tmp_path, theirs, "touchstone")
    assert_equal(load(back)["model"], load(source)["model"])
    assert open_trained(str(back)).classes == ["class0", "class1", "class2"]
    argv = [*started.argv, "--epochs", 1, "--output-dir", tmp_path / "next"]
    assert "the raw weights of timm/tiny_test" in run_train(tmp_path, *argv, "--weights", back).check().output
    refused(run_train(tmp_path, *argv, "--resume", back, "--overwrite"), "it lacks", "pass it to --weights")


def test_a_model_that_both_have_becomes_the_others(tmp_path):
    timm = pytest.importorskip("timm")
    model = torchvision.models.resnet18(num_classes=3)
    torch.save(model.state_dict(), tmp_path / "bare.pth")
    path, said = convert(tmp_path, tmp_path / "bare.pth", "timm", "--model", "resnet18")
    assert "as timm/resnet18" in said
    other = timm.create_model("resnet18", num_classes=3)
    other.load_state_dict(load(path)["state_dict"])
    image = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(other.eval()(image), model.eval()(image))


def test_checkpoints_that_cannot_be_converted(started, tmp_path):
    model = torchvision.models.mnasnet0_5(num_classes=3)
    torch.save(model.state_dict(), tmp_path / "bare.pth")
    torch.save({"arch": "resnet18", "state_dict": model.state_dict(), "best_acc1": 3.0}, tmp_path / "misnamed.pth")
    torch.save({"model": model.state_dict(), "args": Hostile(tmp_path / "executed")}, tmp_path / "hostile.pth")
    run_of_ours, output = started.out / "checkpoint.pth", tmp_path / "new.pth"
    for source, to, argv, words in [
        (tmp_path / "bare.pth", "touchstone", ["--model", "resnet18"], "belongs to another model"),
        (tmp_path / "misnamed.pth", "touchstone", [], "belongs to another model"),
        (tmp_path / "hostile.pth", "timm", [], "contains code (posix.system) and was refused"),
        (run_of_ours, "torchvision", [], "it has no model with the weights of timm/tiny_test"),
    ]:
        line = error_line(run(tmp_path, "convert", source, "--to", to, "--output", output, *argv), "convert")
        assert words in line
    assert not (tmp_path / "executed").exists()
    full = run(tmp_path, "convert", run_of_ours, "--to", "timm", "--output", output, largest_file=1000)
    assert "new.pth cannot be written: the ulimit" in error_line(full, "convert")
    assert not list(tmp_path.glob("new.pth*"))


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("average", "RUN --last 2 --output FILE"),
        ("tune_resize", "CHECKPOINT --data-path IMAGES --resize 32,40 --workers 0 --device cpu --json FILE"),
    ],
)
def test_a_tool_that_was_killed_gives_the_same_file_when_it_is_started_again(
    started, image_folder, tmp_path, name, argv
):
    places = {"RUN": started.out, "CHECKPOINT": started.out / "checkpoint.pth", "IMAGES": image_folder}

    def command(file):
        return [places.get(word, file if word == "FILE" else word) for word in argv.split()]

    run(tmp_path, name, *command(tmp_path / "whole")).check()
    for when in ("before", "after"):
        file = tmp_path / f"{when}.json"  # any ending will do for weights
        fault = "os.replace", 1, when
        assert run_ranks(tool_rank, 1, name, command(file), None, fault, log_folder=tmp_path).codes == [-9]
        assert file.exists() == (when == "after")
        run(tmp_path, name, *command(file)).check()
        assert file.read_bytes() == (tmp_path / "whole").read_bytes()
