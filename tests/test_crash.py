"""A short round of tests/crash.py and tests/power_loss.py: no point at which a kill, an error or a power loss loses."""

import json
import multiprocessing

import pytest

from tests.crash import SCENARIOS, summarize
from tests.rounds import run_round

# Those that reach each part of the protocol once, and every n-th of their points.
SHORT = {"crash_points": 16, "failing_calls": 160, "power_loss": 240}


@pytest.mark.parametrize("kind", SHORT)
def test_no_point_of_a_run_loses_anything(kind, tmp_path):
    counts, problems = run_round(kind, tmp_path, every=SHORT[kind])
    assert problems == []
    assert counts[kind] > 60
    assert counts["lost"] == 0
