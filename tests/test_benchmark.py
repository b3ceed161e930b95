"""scripts/benchmark.py: each command measures real work and writes its figures; none is judged."""

import json
import statistics

import pytest
import torch

from scripts import benchmark
from settings import config
from tests.exports import run_tool
from tests.ranks import module_rank, run_ranks

SMALL = "--model squeezenet1_1 --train-crop-size 32 --batch-size 2 --device cpu --rounds 2".split()


def check_figures(tmp_path, ratios, *argv, num_ranks=1, part=None):
    """Run a command, and check that each ratio is the median of the ratios within each round."""
    path = tmp_path / "figures.json"
    argv = [*argv, "--json", path]
    run_ranks(module_rank, num_ranks, "scripts.benchmark", argv, log_folder=tmp_path, timeout_s=120).check()
    figures = json.loads(path.read_text())
    figures = figures[part] if part else figures
    assert list(figures["ratios"]) == ratios
    for name, (median, *_) in figures["ratios"].items():
        ways = [figures["rates"][way] for way in name.split(" / ")]
        assert median == pytest.approx(statistics.median(a / b for a, b in zip(*ways, strict=True)))


@pytest.mark.parametrize("split", ["train", "val"])
def test_loader(image_folder, tmp_path, split):
    command = ["loader", "--data-path", image_folder, "--rounds", 2, "--images", 5]
    ways = [str(image_folder)] + [f"{image_folder}, torchcodec"] * bool(config.find_torchcodec())
    check_figures(tmp_path, [f"{way} / torchvision" for way in ways], *command, part=split)


def test_step(tmp_path):
    command = ["step", *SMALL, "--steps", 2, "--amp", "--amp-dtype", "bfloat16", "--channels-last"]
    check_figures(tmp_path, ["ours / bare"], *command)


@pytest.mark.dist
def test_a_step_on_several_processes(tmp_path):
    check_figures(tmp_path, ["ours / bare", "same bits / ours"], "step", *SMALL, "--steps", 2, num_ranks=2)


def test_the_bare_step_makes_the_updates_of_the_loop():
    """On the same batches, the loop and its limit end in the same weights and average: nothing is left out of it."""
    modern = "--model-ema --model-ema-steps 4 --clip-grad-norm 1 --global-batch-size 4 --lr-warmup-epochs 0".split()
    argv = [*SMALL[:-2], *modern, "--lr-scheduler", "steplr", "--no-lr-per-step"]
    args = benchmark.training_args(argv, dropout=0.0)
    loop, bare = benchmark.OurLoop(args, 2), benchmark.BareStep(args, 2)
    loop.loader = [(bare.image, bare.target)] * 4
    assert loop() == bare() == 8
    for ours, theirs in [(loop.model, bare.model), (loop.model_ema, bare.model_ema)]:
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("loader", "--data-path"), ("step --rounds 0", "--rounds"), ("step --json no/figures", "--json"),
        ("step --modle x", "--model"), ("saving", "COMMAND"),
    ],
)  # fmt: skip
def test_a_wrong_command_is_one_line_and_exit_code_2(tmp_path, argv, words):
    outcome, output = run_tool(tmp_path, "benchmark", *argv.split(), code=2)
    assert output == ""
    assert words in outcome.output.splitlines()[-1]
