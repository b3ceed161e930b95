"""scripts/gpu_report.py on the CPU: rows of what was measured, and none of what was not."""

import json
import shlex
import subprocess
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from errors import UserError
from scripts import gpu_report, tool
from scripts.gpu_report import Row
from settings import config
from tests.exports import refused
from tests.ranks import run_ranks, tool_rank
from tests.runs import run_forked
from tests.started import PLAIN


def test_on_a_cpu_there_are_no_rows_of_gpus_and_no_table(tmp_path, image_folder, monkeypatch, capsys):
    report_file, page = tmp_path / "report.json", tool.ROOT / "docs" / "performance.md"
    argv = ["--device", "cpu", "--model", PLAIN, "--crop", 32, "--batch-size", 2, "--steps", 20, "--json", report_file]
    before = page.read_text()

    def report(*more):
        monkeypatch.setattr("sys.argv", ["gpu_report", *map(str, [*argv, *more])])
        with pytest.raises(SystemExit, match=r"^0$"):
            gpu_report.main()
        return json.loads(report_file.read_text())["rows"]

    none_ran = subprocess.CompletedProcess("tests of a GPU", 5, "", "")
    monkeypatch.setattr(
        gpu_report.subprocess, "run", lambda words, **how: none_ran if "pytest" in words else run_forked(words, **how)
    )
    rows, run, output = report(), f"{PLAIN}, batch 2, bfloat16, NHWC", capsys.readouterr().out
    bits = "a run of two epochs, and one resumed after the first"
    assert rows.keys() == {run, "step, float32", bits, "`resnet50-fast16`, made-up images"}, output
    assert rows[bits] == {"result": "the same bits"}
    assert rows[run].keys() == {"images_per_s", "data_wait", "memory_gib", "first_step_s", "eval_images_per_s"}
    assert "tests of `-m gpu`: not measured" in output
    assert page.read_text() == before
    after = report("--data-path", image_folder, "--only", "JPEGs")  # which keep the others
    assert {name: after[name] for name in rows} == rows
    assert [name.split(", ")[2:4:2] for name in after if name not in rows] == [["JPEGs"]]


@pytest.mark.parametrize(("row", "limit_s", "words"), [
    (Row("a", ["-c \"raise SystemExit('train.py: error: no memory')\""], str), 60, "no memory"),
    (Row("a", ["-c 'import time; time.sleep(60)'"], str), 0, "20 minutes are over"),
    (Row("a", [], gpu_report.read_step), 60, "FileNotFoundError"),
])  # fmt: skip
def test_what_fails_has_no_result_and_a_line_that_says_why(row, limit_s, words, tmp_path, capsys):
    assert gpu_report.measure(row, tmp_path, time.monotonic() + limit_s) is None
    assert words in capsys.readouterr().out


def test_readers_tell_a_good_result_from_a_bad_one(tmp_path):
    for name, value in {"whole": 1.0, "resumed": 2.0}.items():
        (tmp_path / name).mkdir()
        torch.save({"model": {"a": torch.tensor(value), "b": torch.tensor(0.0)}}, tmp_path / name / "checkpoint.pth")
    assert gpu_report.read_resume(tmp_path) == {"result": "1 of 2 tensors differ"}
    suite = "<testsuites><testsuite tests='5' failures='{0}' errors='{0}' skipped='{1}'/></testsuites>"
    (tmp_path / "tests.xml").write_text(suite.format(1, 2))
    assert gpu_report.read_tests(tmp_path) == {"result": "1 passed, 2 failed, 2 skipped"}
    (tmp_path / "tests.xml").write_text(suite.format(0, 5))
    with pytest.raises(UserError, match="every test was skipped"):
        gpu_report.read_tests(tmp_path)


def test_a_runs_figures_are_of_all_lines_but_the_first(tmp_path):
    # 32 images a step; the first takes 5 s, each other one 0.1 s; the second evaluation 2 s for 400 images.
    rates = {10: 320 / 5.9, 20: 320.0, 30: 320.0}
    base = {"epoch": 0, "time": 0.0}
    records = [
        {"kind": "train", "step": step, "images": 32 * step, "images_per_s": rate, "data_wait": 0.25, "memory_gib": 3.0}
        for step, rate in rates.items()
    ]
    ends = {"epoch": 1.0, "val": 1.0 + 2 / 3600}
    records += [{"kind": kind, "step": 30, "n": 400, "hours": hours} for kind, hours in ends.items()]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(base | each) + "\n" for each in records))
    expected = {"images_per_s": 320, "data_wait": 0.25, "memory_gib": 3, "first_step_s": 5, "eval_images_per_s": 200}
    assert gpu_report.read_run("run", tmp_path) == pytest.approx(expected)


def test_torchvisions_rate_counts_the_wait_for_data(tmp_path):
    line = "Epoch: [0]  [{0}/40]  eta: 0:00:01  lr: 0.1  loss: 6.9 (7.0)  img/s: 999.0 (900.0)  time: {1}  data: 0.1\n"
    (tmp_path / "output.txt").write_text("".join(map(line.format, (0, 10, 20), (9.0, 0.4, 0.4))) + "Test: time: 1\n")
    assert gpu_report.read_torchvisions(8, tmp_path) == pytest.approx({"images_per_s": 20, "data_wait": 0.25})


def test_a_rate_is_judged_by_one_process_the_cards_peak_and_a_published_one():
    # ResNet-50 has 4.09 G products of the forward pass (torchvision's page), a third of those of a step.
    assert gpu_report.count_flops("resnet50", None) == pytest.approx(6 * 4.09e9, rel=0.01)
    row = Row("resnet50", [], str, "resnet50")
    for rate, is_bad in {1500: True, 2000: False}.items():
        found = {"images_per_s": rate}
        gpu_report.judge(row, found, {}, "NVIDIA H100 80GB HBM3", None)
        assert found["mfu"] == pytest.approx(rate * 6 * 4.09e9 / 989e12, rel=0.01)
        assert ("something is wrong" in found["published"]) is is_bad
    found = {"images_per_s": 3000}
    gpu_report.judge(row._replace(processes=4, single="one"), found, {"one": {"images_per_s": 1000}}, "RTX 9999", None)
    assert found == {"images_per_s": 3000, "efficiency": 0.75}


def test_four_gpus_have_rows_of_one_two_and_four(tmp_path):
    options = Namespace(device="cuda", model=["resnet50", "vit_b_16"], batch_size=[8, 4], steps=50, crop=None)
    options.data_path = None
    rows = list(gpu_report.build_rows(options, tmp_path, 4))
    runs = [row for row in rows if row.model]
    assert [(row.model, row.processes) for row in runs] == [
        *[("resnet50", count) for count in (1, 1, 2, 4, 1, 1)], *[("vit_b_16", 1)] * 4
    ]  # fmt: skip
    assert [row.single for row in runs if row.processes > 1] == [runs[1].name] * 2
    assert "--nproc_per_node=4" in runs[3].commands[0]
    for row in runs:
        words = shlex.split(row.commands[0])
        config.parse_args(words[words.index("train.py") + 1 :])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_in_one_line(tmp_path):
    refused(run_ranks(tool_rank, 1, "gpu_report", [], log_folder=tmp_path), "gpu_report", 2)
    assert not Path("gpu-report.json").exists()
