"""scripts/monitoring_benchmark.py: what it counts is all that surrounds a step, and all pictures of an evaluation."""

import json
import subprocess
import sys

from tests.ranks import REPOSITORY


def test_costs_of_watching_are_measured(tmp_path):
    path = tmp_path / "figures.json"
    command = [sys.executable, "-m", "scripts.benchmark", "monitoring", "--steps", "30", "--images", "700"]
    done = subprocess.run(
        [*command, "--json", str(path)], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(path.read_text())
    step, evaluation = figures["step"], figures["evaluation"]
    assert 0 < step["median_s"] <= step["largest_s"]
    assert step["mean_s"] <= step["largest_s"]
    assert figures["ratios"]["step_of_50_ms"] == step["mean_s"] / 0.05
    assert 0 < step["log_s"] < step["mean_s"]
    assert figures["ratios"]["log_of_50_ms"] == step["log_s"] / 0.05
    assert evaluation["pictures"] == 4
    assert figures["evaluation_s"] == evaluation["observe_s"] + evaluation["draw_s"] > 0
    assert sorted(tmp_path.iterdir()) == [path]  # the run's folder is gone
