"""scripts/gpu_report.py on the CPU: rows of what was measured, and none of what was not."""

import json
import time
from pathlib import Path

import pytest
import torch

from scripts import gpu_report, tool
from scripts.gpu_report import Row
from tests.exports import refused
from tests.ranks import module_rank, run_ranks, tool_rank
from tests.started import PLAIN


def test_on_a_cpu_there_are_no_rows_of_gpus_and_no_table(tmp_path):
    argv = ["--device", "cpu", "--model", PLAIN, "--crop", 32, "--batch-size", 2, "--steps", 20]
    argv += ["--json", tmp_path / "report.json"]
    page = tool.ROOT / "docs" / "performance.md"
    before = page.read_text()
    done = run_ranks(module_rank, 1, "scripts.gpu_report", argv, log_folder=tmp_path).check()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["rows"].keys() == {
        "step, float32", "a run of two epochs, and one resumed after the first", "`resnet50-fast16`, made-up images",
    }, done.output  # fmt: skip
    assert report["rows"]["a run of two epochs, and one resumed after the first"] == "the same bits"
    assert "tests of `-m gpu`: not measured" in done.output
    assert page.read_text() == before


@pytest.mark.parametrize(("row", "limit_s", "words"), [
    (Row("a", ["-c \"raise SystemExit('train.py: error: no memory')\""], str), 60, "no memory"),
    (Row("a", ["-c 'import time; time.sleep(60)'"], str), 0, "20 minutes are over"),
    (Row("a", [], gpu_report.read_step), 60, "FileNotFoundError"),
    (Row("a", [], gpu_report.read_recipe), 60, "FileNotFoundError"),
])  # fmt: skip
def test_what_fails_has_no_result_and_a_line_that_says_why(row, limit_s, words, tmp_path, capsys):
    assert gpu_report.measure(row, tmp_path, time.monotonic() + limit_s) is None
    assert words in capsys.readouterr().out


def test_readers_tell_a_good_result_from_a_bad_one(tmp_path):
    for name, value in {"whole": 1.0, "resumed": 2.0}.items():
        (tmp_path / name).mkdir()
        torch.save({"model": {"a": torch.tensor(value), "b": torch.tensor(0.0)}}, tmp_path / name / "checkpoint.pth")
    assert gpu_report.read_resume(tmp_path) == "1 of 2 tensors differ"
    for counts, expected in {
        'tests="5" failures="1" errors="1" skipped="2"': "1 passed, 2 failed, 2 skipped",
        'tests="5" failures="0" errors="0" skipped="5"': None,
    }.items():
        (tmp_path / "tests.xml").write_text(f"<testsuites><testsuite {counts}/></testsuites>")
        assert gpu_report.read_tests(tmp_path) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("argv", [[], ["--device", "foo"]])
def test_without_a_gpu_it_is_refused_in_one_line(tmp_path, argv):
    refused(run_ranks(tool_rank, 1, "gpu_report", argv, log_folder=tmp_path), "gpu_report", 2)
    assert not Path("gpu-report.json").exists()
