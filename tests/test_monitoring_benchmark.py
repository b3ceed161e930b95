"""scripts/monitoring_benchmark.py: what it counts is all that surrounds a step, and all pictures of an evaluation."""

import json
import os

from tests.ranks import module_rank, run_ranks


def test_costs_of_watching_are_measured(tmp_path):
    folder = tmp_path / "here"
    folder.mkdir()
    path = folder / "figures.json"
    argv = ["monitoring", "--steps", 30, "--images", 700, "--json", path]
    run_ranks(module_rank, 1, "scripts.benchmark", argv, (os.chdir, folder), log_folder=tmp_path).check()
    figures = json.loads(path.read_text())
    step, evaluation = figures["step"], figures["evaluation"]
    assert 0 < step["median_s"] <= step["largest_s"]
    assert step["mean_s"] <= step["largest_s"]
    assert figures["ratios"]["step_of_50_ms"] == step["mean_s"] / 0.05
    assert 0 < step["log_s"] < step["mean_s"]
    assert figures["ratios"]["log_of_50_ms"] == step["log_s"] / 0.05
    assert evaluation["pictures"] == 4
    assert figures["evaluation_s"] == evaluation["observe_s"] + evaluation["draw_s"] > 0
    assert sorted(folder.iterdir()) == [path]  # the run's folder is gone
