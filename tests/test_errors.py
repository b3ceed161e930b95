"""How an error ends a process, and what it says."""

import csv
import io
import time

import pytest
import torch

import errors
import files
from distributed import launch
from tests.exports import run_tool, write_checkpoint
from tests.images import write_images
from tests.ranks import in_group, run_ranks


def leave_group(rank, world_size, ranks, error):
    if rank in ranks:
        errors.end_by(error, launch.read_launch())
    time.sleep(30)


@pytest.mark.dist
@pytest.mark.parametrize(("ranks", "error", "where"), [
    ((0, 1), errors.UserError("what you gave"), ""), ((1,), errors.ImageError("what you gave"), " on rank 1"),
    pytest.param((1,), errors.UserError("what you gave"), " on rank 1", marks=pytest.mark.slow),  # ten seconds later
])  # fmt: skip
def test_an_error_is_printed_once_and_names_the_rank_if_it_is_of_one(tmp_path, ranks, error, where):
    outcome = run_ranks(in_group, 2, leave_group, ranks, error, timeout_s=25, log_folder=tmp_path)
    assert outcome.codes[ranks[0]] == error.exit_code
    assert outcome.output.count("what you gave") == 1
    assert f"train.py: error{where}: what you gave\n" in outcome.outputs[ranks[0]]


def test_what_means_that_the_machine_gives_no_more_is_known_by_number_and_by_text():
    for error in [OSError(24, "Too many open files"), RuntimeError("[enforce fail] Too many open files (24)")]:
        assert str(errors.explain_limit(error)).startswith("Too many open files; raise `ulimit -n`")
    # A thread's stack that finds no memory fails by these errors, too.
    for error in [RuntimeError("can't start new thread"), RuntimeError("Resource temporarily unavailable"),
                  BlockingIOError(11, "Resource temporarily unavailable")]:  # fmt: skip
        assert "or no memory for one; raise `ulimit -u` or `ulimit -v`" in str(errors.explain_limit(error))
    assert str(errors.explain_limit(FileNotFoundError(2, "No such file"))).startswith("the current folder was removed")
    for error in [
        MemoryError(),
        RuntimeError("could not create a primitive"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ]:
        assert "out of memory" in str(errors.explain_limit(error))
    for error in [RuntimeError("shapes differ"), OSError(5, "Input/output error"), ValueError("Too many open files")]:
        assert errors.explain_limit(error) is None


def test_a_long_error_is_cut_and_keeps_its_ends():
    line = errors.error_line("train.py: error", f"--lr {'[' * 10_000}: expected a number; give --lr 0.1")
    assert line.startswith("train.py: error: --lr [[[")
    assert line.endswith("[[[: expected a number; give --lr 0.1")
    assert len(line) < 300


# Names of classes, and their cells: after the one quote that a spreadsheet takes for "this is text".
NAMES = {"=1+1": "'=1+1", "-0.5": "'-0.5", "@x": "'@x", "\x1b[2Jx": "\\x1b[2Jx"}


def test_names_are_no_formulas_in_a_table_and_no_commands_to_a_terminal(tmp_path):
    images = write_images(tmp_path / "images", {"val": [1] * len(NAMES)}, size=(40, 32))
    for number, name in enumerate(sorted(NAMES)):
        (images / "val" / f"class{number}").rename(images / "val" / name)
    described = {"classes": sorted(NAMES), "num_images": len(NAMES)}
    checkpoint = write_checkpoint(tmp_path, data=described)
    files = ["--predictions", tmp_path / "p.csv", "--json", tmp_path / "r.json"]
    outcome, text = run_tool(tmp_path, "evaluate", checkpoint, "--set", f"s={images / 'val'}", *files, "--workers", 0)
    shown = run_tool(tmp_path, "predict", checkpoint, images / "val")[1]
    cells = {cell for row in csv.reader(io.StringIO((tmp_path / "p.csv").read_text())) for cell in row}
    assert set(NAMES.values()) <= cells
    assert not any(cell[:1] in "=+@\t\r" or "\x1b" in cell for cell in cells - {""})
    assert "\x1b" not in outcome.output + text + shown


def test_numbers_in_a_table_stay_numbers():
    content = files.as_csv([["a, b", -0.5, -3], ["+1", float("-inf"), None]])
    assert content == b'\xef\xbb\xbf"a, b",-0.5,-3\n\'+1,-inf,\n'
