"""scripts/benchmark.py: each command measures real work and writes its figures; none is judged."""

import json
import statistics
import subprocess
import sys
from importlib.util import find_spec

import numpy
import pytest
import torch

from scripts import benchmark, race
from settings import config
from tests.exports import run_tool
from tests.ranks import module_rank, run_ranks

SMALL = "--model squeezenet1_1 --train-crop-size 32 --batch-size 2 --device cpu --rounds 2".split()


def check_figures(tmp_path, ratios, *argv, num_ranks=1, part=None):
    path = tmp_path / "figures.json"
    argv = [*argv, "--json", path]
    run_ranks(module_rank, num_ranks, "scripts.benchmark", argv, log_folder=tmp_path, timeout_s=120).check()
    figures = json.loads(path.read_text())
    figures = figures[part] if part else figures
    assert list(figures["ratios"]) == ratios
    for name, (median, *_) in figures["ratios"].items():
        ways = [figures["rates"][way] for way in name.split(" / ")]
        assert median == pytest.approx(statistics.median(a / b for a, b in zip(*ways, strict=True)))


def test_loader(image_folder, tmp_path):
    command = ["loader", "--data-path", image_folder, "--rounds", 2, "--images", 5]
    ways = [str(image_folder)] + [f"{image_folder}, torchcodec"] * bool(config.find_torchcodec())
    check_figures(tmp_path, [f"{way} / torchvision" for way in ways], *command, part="val")
    assert {"train", "val"} <= json.loads((tmp_path / "figures.json").read_text()).keys()


@pytest.mark.dist
def test_a_step_on_one_process_and_on_several(tmp_path):
    check_figures(tmp_path, ["ours / bare"], "step", *SMALL, "--steps", 2, "--amp", "--amp-dtype", "bfloat16")
    check_figures(tmp_path, ["ours / bare", "same bits / ours"], "step", *SMALL, "--steps", 2, num_ranks=2)


def test_the_bare_step_makes_the_updates_of_the_loop():
    modern = "--model-ema --model-ema-steps 4 --clip-grad-norm 1 --global-batch-size 4 --lr-warmup-epochs 0".split()
    argv = [*SMALL[:-2], *modern, "--lr-scheduler", "steplr", "--no-lr-per-step"]
    args = benchmark.training_args(argv, dropout=0.0)
    loop, bare = benchmark.OurLoop(args, 2), benchmark.BareStep(args, 2)
    loop.loader = [(bare.image, bare.target)] * 4
    assert loop() == bare() == 8
    for ours, theirs in [(loop.model, bare.model), (loop.model_ema, bare.model_ema)]:
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.cluster
def test_a_race(image_folder, tmp_path):
    command = ["loader", "--data-path", image_folder, "--rounds", 2, "--images", 9, "--batch-size", 4]
    command += ["--against", "ours-pillow", "torchvision", "torchvision-uint8", "--cores", 2]
    ratios = [f"ours / {name}" for name in ("ours-pillow", "torchvision", "torchvision-uint8")]
    check_figures(tmp_path, ratios, *command)
    rows = json.loads((tmp_path / "figures.json").read_text())["loaders"][1:]
    psnr = {name: float(words.partition(" ")[0]) for name, _, _, words, _ in rows}
    assert psnr["torchvision"] == psnr["torchvision-uint8"] == 99
    assert psnr["ours"] == psnr["ours-pillow"] > 40


def test_a_loader_that_is_not_installed_is_one_line_and_starts_nothing(tmp_path):
    if find_spec("streaming"):
        pytest.skip("it is installed")
    command = "loader", "--data-path", tmp_path, "--against", "streaming"
    outcome, output = run_tool(tmp_path, "benchmark", *command, code=2)
    assert output == ""
    assert "--against streaming: not installed; pip install " in outcome.output.splitlines()[-1]


def two_batches(numbers, seed=0):
    images = numpy.random.default_rng(seed).integers(0, 256, (len(numbers), 3, 224, 224), dtype=numpy.uint8)
    return lambda: iter([(images[:2], numpy.array(numbers[:2])), (torch.from_numpy(images[2:]), numbers[2:])])


@pytest.mark.parametrize(("numbers", "seed", "words"), [
    ([3, 1, 0], 1, "3 of 4 images in 3 crops"), ([0, 1, 2, 2], 1, "3 of 4 images in 4"),
    ([0, 1, 2, 3, 3], 1, "4 of 4 images in 5"), ([0, 1, 2, 3], 0, "the same crops"),
])  # fmt: skip
def test_a_pass_shows_each_image_once_in_other_crops(numbers, seed, words):
    first = race.make_pass(two_batches([0, 1, 2, 3]), 4, [])
    assert len(race.make_pass(two_batches([3, 1, 0, 2], 1), 4, first)) == 4
    with pytest.raises(ValueError, match=words):
        race.make_pass(two_batches(numbers, seed), 4, first)


def test_the_cpu_time_of_a_group_is_that_of_all_its_processes():
    burn = "import time, threading, resource, subprocess, sys\nwhile time.process_time() < 0.3: pass\n"
    more = "thread = threading.Thread(target=lambda: sum(range(3_000_000))); thread.start(); thread.join()\n"
    more += "subprocess.run([sys.executable, '-c', sys.argv[1]])\n"
    more += "used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]\n"
    more += "print(sum(each.ru_utime + each.ru_stime for each in used), flush=True)\ninput()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", burn + more, burn], process_group=0, **pipes) as process:
        expected = float(process.stdout.readline())
        assert race.cpu_seconds({process.pid}) == pytest.approx(expected, abs=0.03)
        process.communicate("\n")
    assert expected > 0.6
