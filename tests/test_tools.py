"""scripts/models.py, average.py, reestimate_bn.py, tune_resize.py and convert.py."""

import json
import resource
import sys
import tomllib
from pathlib import Path

import pytest
import torchvision

from scripts import models
from tests.ranks import REPOSITORY, Outcome, run_ranks


def tool_process(name, argv, largest_file=None):
    """Run a tool's command line in this process."""
    import importlib

    tool = importlib.import_module(f"scripts.{name}")
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.argv = [name, *map(str, argv)]
    tool.main()


def run(tmp_path: Path, name: str, *argv, largest_file=None) -> Outcome:
    """Run a tool in a process of its own, and return what became of it."""
    return run_ranks(tool_process, 1, name, argv, largest_file, log_folder=tmp_path, timeout_s=60)


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


def test_models_are_listed_with_torchvisions_own_numbers(monkeypatch, capsys):
    code, printed = call(monkeypatch, capsys, models, "--json")
    rows = {row["name"]: row for row in json.loads(printed)}
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
    rows = json.loads(call(monkeypatch, capsys, models, "--json", "--sort", "acc1", "--max-params", "30")[1])
    assert [row["acc1"] for row in rows] == sorted((row["acc1"] for row in rows), reverse=True)
    assert max(row["params"] for row in rows) <= 30e6
    assert len(rows) > 20
    rows = json.loads(call(monkeypatch, capsys, models, "net", "--json", "--sort", "flops", "--min-acc1", "80")[1])
    assert [row["flops"] for row in rows] == sorted(row["flops"] for row in rows)
    assert all(row["acc1"] >= 80 and "net" in row["name"] for row in rows)


def test_the_table_of_models_fits_its_width(monkeypatch, capsys):
    rows = models.list_facts("resnet50", is_timm=False)
    wide, narrow = models.table(rows, 200), models.table(rows, 74)
    assert "80.858" in wide[1]
    assert "v1 v2" in wide[1]
    assert max(map(len, narrow)) <= 74
    hidden = len(rows[0]["recipes"]) - len(narrow[1].split()[6:-1])
    assert narrow[1].endswith(f" +{hidden}")
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
        (["--timm"], "give a WORD"),
        (["--min-acc1", "99"], "give wider bounds"),
        (["--max-params", "nan"], "nan"),
    ],
)
def test_models_that_are_not_there(tmp_path, argv, words):
    assert words in error_line(run(tmp_path, "models", *argv), "models")
