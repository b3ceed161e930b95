"""A short round of tests/crash.py and tests/power_loss.py: no point at which a kill, an error or a power loss loses."""

import pytest

from tests.rounds import Rounds

# Points of each scenario.
SHORT = {"crash_points": 4, "failing_calls": 4, "power_loss": 6}


@pytest.mark.parametrize("kind", SHORT)
def test_no_point_of_a_run_loses_anything(kind, tmp_path):
    counts, problems = Rounds({kind: SHORT[kind]}, tmp_path).finish()
    assert problems == []
    assert counts[kind] >= 40
    assert counts["lost"] == 0
