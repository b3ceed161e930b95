"""How an error ends a process, and what it says."""

import time

import pytest

import errors
import launch
from tests.ranks import in_group, run_ranks


def leave_group(rank, world_size, ranks, error):
    if rank in ranks:
        errors.end_by(error, launch.read_launch())
    time.sleep(30)


@pytest.mark.dist
def test_an_error_of_all_ranks_is_printed_once(tmp_path):
    outcome = run_ranks(
        in_group, 2, leave_group, (0, 1), errors.UserError("what you gave"), timeout_s=25, log_folder=tmp_path
    )
    assert outcome.codes[0] == 2
    assert outcome.output.count("what you gave") == 1
    assert "train.py: error: what you gave\n" in outcome.outputs[0]


@pytest.mark.dist
def test_an_error_of_one_rank_names_it(tmp_path):
    outcome = run_ranks(
        in_group, 2, leave_group, (1,), errors.ImageError("what you gave"), timeout_s=25, log_folder=tmp_path
    )
    assert outcome.codes[1] == 1
    assert "train.py: error on rank 1: what you gave\n" in outcome.outputs[1]


def test_what_means_that_the_machine_gives_no_more_is_known_by_number_and_by_text():
    for error in [OSError(24, "Too many open files"), RuntimeError("[enforce fail] Too many open files (24)")]:
        assert str(errors.explain_limit(error)).startswith("Too many open files; raise `ulimit -n`, which is ")
    assert "ulimit -u" in str(errors.explain_limit(RuntimeError("can't start new thread")))
    assert "out of memory" in str(errors.explain_limit(MemoryError()))
    for error in [RuntimeError("shapes differ"), OSError(5, "Input/output error"), ValueError("Too many open files")]:
        assert errors.explain_limit(error) is None
