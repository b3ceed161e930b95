"""scripts/benchmark.py: every figure is there, of every decoder and form of the data; none is judged."""

import importlib.util
import json

import pytest

from scripts.benchmark import recommend
from tests.ranks import module_rank, run_ranks


def test_the_loader_benchmark_writes_every_figure(image_folder, tmp_path):
    argv = ["loader", "--data-path", image_folder, "--workers", 1, "--pack", f"copy={image_folder}", "--rounds", 1]
    argv += ["--batch-size", 8, "--json", tmp_path / "f"]
    outcome = run_ranks(module_rank, 1, "scripts.benchmark", argv, (), None, tmp_path / "stdout", log_folder=tmp_path)
    errors = outcome.check().output
    figures = json.loads((tmp_path / "f").read_text())
    decoders = ["pillow", "torchcodec"] if importlib.util.find_spec("torchcodec") else ["pillow"]
    names = {f"{folder}, {decoder}" for folder in ("raw", "copy") for decoder in decoders}
    for kind in ("train", "eval", "end_to_end"):
        assert figures[kind].keys() == {"torchvision", *names}
        assert figures["ratios"][kind] == figures[kind]["raw, pillow"]["ratio"] > 0
    ours = [figures["end_to_end"][name] for name in names]
    # (1 process x 2 batches ahead + 2) x 8 images x 3 x 224 x 224; a process of its own has a few MiB at least.
    assert {row["shared_mib"] for row in ours} == {4 * 8 * 3 * 224**2 / 2**20}
    assert all(1 < row["worker_mib"] < 1000 for row in ours)
    assert all(min(stages.values()) > 0 for stages in figures["stages_us"].values())
    assert figures["stages_us"].keys() == figures["pixel_difference"].keys() == names
    for splits in figures["pixel_difference"].values():
        # The images are enlarged, on which two roundings may add up.
        assert all(one["mean"] < 0.3 and one["max"] <= 2 for one in splits.values())
    assert f"recommended: {figures['recommendation']}" in (tmp_path / "stdout").read_text()
    assert "Corrupt JPEG" not in errors


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["loader", "--data-path", "no", "--pack", "folder"], "folder: expected NAME=DIR"),
        (["loader", "--data-path", "no"], "--data-path no "),
        (["step", "--rounds", "0"], "--rounds: 0: expected 1 or more"),
        (["scaling", "--nproc", "1", "x"], "--nproc: x: expected 1 or more"),
        (["monitoring", "--json", "no/figures"], "no/figures: expected a file"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_exit_code_2(argv, words, tmp_path):
    outcome = run_ranks(module_rank, 1, "scripts.benchmark", argv, log_folder=tmp_path)
    assert outcome.codes == [2]
    assert len(outcome.output.splitlines()) == 1
    assert words in outcome.output


@pytest.mark.parametrize(
    ("decoders", "words"),
    [
        (["pillow"], "torchcodec was not measured"),
        (["torchcodec"], "pillow, the default, was not measured"),
        (["torchcodec", "pillow"], "--decoder torchcodec: 1.20 times as fast"),
    ],
)
def test_a_decoder_is_recommended_where_both_were_measured(decoders, words):
    rates = {"pillow": 100.0, "torchcodec": 120.0}
    figures = {"train": {f"raw, {name}": {"images_per_s": rates[name]} for name in decoders}}
    assert recommend(figures, decoders).startswith(words)
