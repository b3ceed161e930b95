"""A trace of some steps, and what is said of it."""

import gzip
import json
import re

from checkpointing.finder import OWN_FILES
from monitoring import profile
from tests.ranks import run_ranks, train_rank

ARGV = """
    --model resnet18 --synthetic 40 --train-crop-size 16 --val-resize-size 16 --val-crop-size 16 --batch-size 4
    --epochs 1 --lr 0.01 --device cpu --workers 0 --print-freq 100
""".split()


def test_a_profile_traces_as_many_steps_as_asked_for(tmp_path):
    out = tmp_path / "out"
    argv = [*ARGV, "--output-dir", str(out), "--profile", "3"]
    output = run_ranks(train_rank, 1, argv, log_folder=tmp_path).check().output
    trace = json.loads(gzip.decompress((out / profile.TRACE_NAME).read_bytes()))
    steps = {event["name"] for event in trace["traceEvents"] if event["name"].startswith("ProfilerStep")}
    assert steps == {f"ProfilerStep#{profile.NUM_FIRST + number}" for number in range(3)}
    assert re.search(r"\n +aten::convolution_backward .* 60 *\n", output)  # three steps of the 20 layers of ResNet-18
    assert "profile" not in (out / "recipe.toml").read_text()
    assert OWN_FILES.fullmatch(profile.TRACE_NAME)


def test_a_run_too_short_to_trace_says_so_and_ends_well(tmp_path):
    argv = [*ARGV, "--synthetic", "8", "--output-dir", str(tmp_path / "out"), "--profile", "3"]
    output = run_ranks(train_rank, 1, argv, log_folder=tmp_path).check().output
    assert "warning: --profile: the run ended before there were steps to trace" in output


def test_a_trace_that_cannot_be_written_ends_no_run(tmp_path):
    out = tmp_path / "out"
    (out / profile.TRACE_NAME).mkdir(parents=True)
    argv = [*ARGV, "--output-dir", str(out), "--profile", "1"]
    output = run_ranks(train_rank, 1, argv, log_folder=tmp_path).check().output
    assert "warning: --profile: " in output
