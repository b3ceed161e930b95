"""No point of a run at which a kill, an error or a power failure loses anything: some of each scenario."""

import io
import zipfile
from contextlib import suppress

import pytest

from checkpointing import folder as folders
from checkpointing import store
from errors import StorageError
from tests.calls import Call
from tests.chaos import run_scenario
from tests.crash import SCENARIOS, Trial
from tests.power_loss import lose_power, possible_states
from tests.ranks import some_slow

NAMES = [scenario.name for scenario in SCENARIOS]
# Points of each scenario.
SHORT = {"crash_points": 1, "failing_calls": 1, "power_loss": 1}
LIKE_OTHERS = {
    "new with average, saving late", "new without resume", "from elsewhere, overwriting", "interrupted",
    "from elsewhere, best elsewhere", "damaged newest",
}  # fmt: skip


@pytest.mark.parametrize("name", some_slow(NAMES, LIKE_OTHERS))
def test_no_point_of_a_run_loses_anything(name, tmp_path):
    counts, problems = run_scenario(NAMES.index(name), SHORT, tmp_path)
    assert problems == []
    assert all(counts[kind] >= 0.5 * SHORT[kind] for kind in SHORT)


# Negative controls: each of these must be found.


def holds_a_save(state):
    contents = [content[0] for path, content in state.image.items() if path.endswith(".pth")]
    return any(zipfile.is_zipfile(io.BytesIO(content)) for content in contents)


def test_no_power_failure_after_a_save_leaves_none_and_a_disk_that_syncs_nothing_is_found(tmp_path):
    trial = Trial(SCENARIOS[0], tmp_path / "trial")
    assert all(holds_a_save(state) for state in possible_states(trial) if state.saved)
    log = [entry for entry in trial.recorded.log if not (isinstance(entry, Call) and entry.name == "fsync")]
    log = log[: 1 + next(number for number, entry in enumerate(log) if entry[0] == "saved")]
    bare = [state for state in possible_states(trial, log) if state.saved and not state.image]
    trial.attempt("power_loss", lose_power, bare[0])
    assert trial.counts["lost"] == 1, trial.problems


def write_in_place():
    def written(path, content, verify=None):
        with open(path, "wb") as file:
            content(file) if callable(content) else file.write(content)

    folders.write_atomically = written


def test_a_file_that_is_written_in_place_is_found(tmp_path):
    trial = Trial(SCENARIOS[0], tmp_path / "trial", spoil=(write_in_place,))
    paths = {call.number: call.paths[0] for call in trial.recorded.calls()}
    halves = [point for point in trial.kill_points() if point.is_half and paths[point.number].endswith("3.pth")]
    trial.attempt("crash_points", Trial.kill, halves[0])
    assert "corrupt" in trial.problems[0]


def hide_failures():
    wait_for_save = store.CheckpointManager.wait_for_save

    def forget(manager, **options):
        was_saving = manager.is_written
        with suppress(StorageError):
            wait_for_save(manager, **options)
        return was_saving

    store.CheckpointManager.wait_for_save = forget


def test_a_save_that_hides_that_it_failed_is_found(tmp_path):
    trial = Trial(SCENARIOS[0], tmp_path / "trial", spoil=(hide_failures,))
    writes = [point for point in trial.failures() if (point.name, point.code, point.lasts) == ("write", 28, True)]
    trial.attempt("failing_calls", Trial.fail, writes[len(writes) // 2])
    assert trial.counts["lost"] == 1, trial.problems
