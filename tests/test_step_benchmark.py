"""scripts/step_benchmark.py: what is compared does the same work, and the models behind the figures are right."""

import argparse
import json

import pytest
import torch

from monitoring import gauges
from scripts import step_benchmark
from tests.exports import run_tool

CPU = torch.device("cpu")


def parse(*argv):
    parser = argparse.ArgumentParser()
    step_benchmark.add_commands(parser.add_subparsers())
    small = ["--model", "squeezenet1_1", "--train-crop-size", "32", "--batch-size", "2", "--device", "cpu"]
    return parser.parse_args([argv[0], *small, "--steps", "2", "--rounds", "1", *argv[1:]])


def test_a_step_is_measured_with_every_ratio():
    figures = step_benchmark.benchmark_step(parse("step", "--amp", "--amp-dtype", "bfloat16", "--channels-last"))
    assert set(figures["ratios"]) == {
        "loop_vs_bare", "loop_vs_torchvision", "loop_vs_bare_ema_clip_accumulation",
        "loop_vs_torchvision_ema_clip_accumulation",
    }  # fmt: skip
    rates = figures["plain"]["rates"]
    assert figures["ratios"]["loop_vs_bare"] == pytest.approx(rates["loop"][0] / rates["bare"][0])
    json.dumps(figures)


def test_the_bare_step_makes_the_updates_of_the_loop():
    """On the same batches, the loop and its limit end in the same weights and average: nothing is left out of it."""
    args = step_benchmark.training_args(parse("step"), *step_benchmark.MODERN, "--global-batch-size", "4")
    args.lr_warmup_epochs, args.lr_per_step, args.lr_scheduler, args.dropout = 0, False, "steplr", 0.0
    loop, bare = (build(args, CPU, 2) for build in (step_benchmark.OurLoop, step_benchmark.BareStep))
    loop.loader = [bare.batch] * 4
    assert loop() == bare() == 8
    for name, value in bare.model.state_dict().items():
        torch.testing.assert_close(loop.model.state_dict()[name], value, rtol=1e-6, atol=1e-7)
    for name, value in bare.model_ema.state_dict().items():
        torch.testing.assert_close(loop.model_ema.state_dict()[name], value, rtol=1e-6, atol=1e-7)


def test_torchvisions_way_takes_its_own_options():
    args = step_benchmark.training_args(parse("step", "--channels-last"), "--global-batch-size", "4")
    theirs = step_benchmark.TorchvisionsWay(args, CPU, 3)
    assert theirs() == 6
    assert next(theirs.model.parameters()).is_contiguous()
    assert args.channels_last


SIZES = "--train-crop-size 224 --val-crop-size 224".split()


@pytest.mark.parametrize(("model", "gmac"), [("resnet18", 1.814), ("resnet50", 4.089), ("vit_b_16", 17.564)])
def test_operations_are_those_that_torchvision_publishes(model, gmac):
    """Its tables count multiply-adds of the forward pass (weights.meta["_ops"]); backward passes double them."""
    args = step_benchmark.training_args(parse("step"), "--model", model, *SIZES)
    flops = step_benchmark.count_flops(args, 1000) / 1e9
    # The first layer needs no gradient of its input, and torchvision counts some attention otherwise.
    assert flops == pytest.approx(2 * 3 * gmac, rel=0.05)


def test_the_model_of_scaling_is_its_formula():
    row = {"nproc": 2, "batch_size": 10, "step_s": 1.2, "data_s": 0.1, "compute_s": 0.3, "all_reduce_s": 0.5}
    row["gradient_bytes"] = 1e9
    # 2 x 1/2 x 1 GB in 0.5 s; of four: 2 x 3/4 x 1 GB at 2 GB/s = 0.75 s
    found = step_benchmark.predict([row], 4)
    assert found["bandwidth_gb_per_s"] == pytest.approx(2.0)
    assert found["images_per_s_best"] == pytest.approx(40 / (0.1 + 0.1 + 0.75))
    assert found["images_per_s_worst"] == pytest.approx(40 / (0.1 + 0.3 + 0.75 + 0.3))
    assert step_benchmark.predict([row], 2)["images_per_s_worst"] == pytest.approx(20 / 1.2)  # what was measured
    assert step_benchmark.predict([row | {"nproc": 1}], 1)["bandwidth_gb_per_s"] is None  # there is none to measure
    hidden = row | {"step_s": 0.6}
    assert step_benchmark.predict([hidden], 4)["images_per_s_worst"] == pytest.approx(40 / (0.1 + 0.3 + 0.75))


@pytest.mark.dist
def test_loops_are_compared_on_real_processes(tmp_path):
    path = tmp_path / "figures.json"
    argv = "step --model squeezenet1_1 --train-crop-size 32 --batch-size 2 --device cpu --steps 2 --rounds 3".split()
    more = ["--nproc", 2, "--compare", "ddp,deterministic", "--json", path]
    _, output = run_tool(tmp_path, "benchmark", *argv, *more)
    figures = json.loads(path.read_text())
    rates = figures["rates"]
    pairs = sorted(ours / theirs for ours, theirs in zip(rates["deterministic"], rates["ddp"], strict=True))
    assert figures["ratios"] == {"deterministic_vs_ddp": pytest.approx(pairs[1])}
    assert figures["nproc"] == 2
    assert "2 processes" in output


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("step --nproc 2", "--nproc 2 needs --compare ddp,deterministic"),
        ("saving --every 3", "--every 3: expected 4 or more"),
        ("step --compare ddp", "--compare: ddp: expected two or more of ddp, deterministic"),
        ("step --compare ddp,fast", "--compare: ddp,fast: expected two or more of ddp, deterministic"),
    ],
)
def test_processes_and_ways_that_do_not_fit(tmp_path, argv, message):
    outcome, output = run_tool(tmp_path, "benchmark", *argv.split(), code=2)
    assert output == ""
    assert message in outcome.output.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.dist
def test_scaling_starts_real_processes(tmp_path):
    path = tmp_path / "figures.json"
    argv = "scaling --model squeezenet1_1 --train-crop-size 32 --batch-size 2 --device cpu --steps 2 --rounds 1".split()
    _, output = run_tool(tmp_path, "benchmark", *argv, "--nproc", 1, 2, "--json", path)
    figures = json.loads(path.read_text())
    assert [row["nproc"] for row in figures["measured"]] == [1, 2]
    assert figures["measured"][0]["efficiency"] == 1.0
    assert [row["nproc"] for row in figures["predicted"]] == [4, 8, 16]
    assert "ring" in output


def test_peaks_are_of_known_devices_only():
    assert step_benchmark.peak_tflops(argparse.Namespace(amp=False), CPU) is None
    for peaks in gauges.PEAK_TFLOPS.values():
        assert peaks["float32"] < peaks["float16"]


def test_steps_beside_a_save_are_measured_in_a_real_run(tmp_path):
    path = tmp_path / "figures.json"
    argv = "saving --model squeezenet1_1 --train-crop-size 32 --batch-size 2 --device cpu --every 4 --rounds 2".split()
    _, output = run_tool(tmp_path, "benchmark", *argv, "--json", path)
    figures = json.loads(path.read_text())
    assert [len(row) for row in figures["step_ratios"]] == [4, 4]
    # The plain step is the median of the last half, here of two: their mean, which their ratios have as 1.
    assert all(sum(row[2:]) == pytest.approx(2) for row in figures["step_ratios"])
    costs = [plain * (sum(row) - 4) for plain, row in zip(figures["plain_s"], figures["step_ratios"], strict=True)]
    assert figures["save_costs_s"] == pytest.approx(costs)
    assert figures["ratios"]["saving_vs_plain"] == pytest.approx(sum(row[0] for row in figures["step_ratios"]) / 2)
    assert output.startswith("2 saves of ")  # the run's own lines go elsewhere
