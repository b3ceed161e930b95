"""A script written for torchvision's references/classification runs on our folder, and means the same there.

torchvision_steps.json was recorded from torchvision's own folder (release 0.21). Where the environment variable
TORCHVISION_REFERENCES names such a folder, the script runs there as well and is compared with it step by step. On two
processes it cannot: torchvision's folder needs a GPU for each.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.data.distributed import DistributedSampler

from tests import torchvision_script
from tests.images import write_images
from tests.ranks import REPOSITORY, run_ranks

EXPECTED = json.loads(Path(__file__).with_name("torchvision_steps.json").read_text())

# Where our result is meant to be another one: at which place of a step's result, and what it is.
STATED = [
    ("parser", [0, "device"], None),  # the accelerator that is there, else the CPU
    ("parser", [0, "workers"], None),  # 16, but no more than cores
    ("parser", [0, "output_dir"], None),  # runs/<model>, not the current folder
    ("parser", [0, "backend"], None),  # a faster way, within one grey level
    # Schedules are functions of the position: nothing of them is saved.
    ("main_trains", [1, "keys"], ["model", "optimizer", "epoch", "args"]),
    ("main_resumes_and_tests_only", [1, "keys"], ["model", "optimizer", "epoch", "args"]),
    ("main_with_much", [1, "keys"], ["model", "optimizer", "epoch", "args", "model_ema"]),
    # An epoch has as many samples as the set has images: no multiple of 256.
    ("repeated_augmentation", ["cut", 0], 300),
    ("repeated_augmentation", ["cut", 1], 300),
]

# Whose numbers are means of pixels: one grey level is 1 / 255 / 0.224.
OF_PIXELS = ("datasets", "load_data", "plain_loaders", "presets_")
GREY_LEVEL = 0.018


def is_same(result, expected, tolerance):
    """Tell whether two results are the same, numbers within the tolerance."""
    if isinstance(expected, float) and isinstance(result, float):
        return result == pytest.approx(expected, rel=1e-4, abs=tolerance)
    if type(result) is not type(expected):
        return False
    if isinstance(expected, dict):
        return list(result) == list(expected) and is_same(list(result.values()), list(expected.values()), tolerance)
    if isinstance(expected, list):
        pairs = zip(result, expected, strict=False)
        return len(result) == len(expected) and all(is_same(*pair, tolerance) for pair in pairs)
    return result == expected


def check_step(step, results, expected):
    assert step in results, f"the script did not come to {step}: {list(results)[-1:]}"
    result = results[step]
    if isinstance(result, str) and result.startswith("failed: "):
        pytest.fail(result)
    tolerance = GREY_LEVEL if step.startswith(OF_PIXELS) else 0.0
    assert is_same(result, expected[step], tolerance), f"{result}\nand not\n{expected[step]}"


def read_steps(text):
    """Return the results of a script's steps, by name; text where a step failed."""
    lines = [line.removeprefix("step ").split(": ", 1) for line in text.splitlines() if line.startswith("step ")]
    return {name: result if result.startswith("failed: ") else json.loads(result) for name, result in lines}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """28 training images, seven batches of four, and 12 of validation, of six classes."""
    return write_images(tmp_path_factory.mktemp("six"), {"train": [6, 5, 5, 4, 4, 4], "val": [2] * 6})


def run_script(folder, images, out):
    command = [sys.executable, "-W", "ignore", torchvision_script.__file__, str(folder), str(images), str(out)]
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=out, env=environment)
    return done, read_steps(done.stdout)


@pytest.fixture(scope="module")
def ours(images, tmp_path_factory):
    """The script's process on our folder, and the results of its steps."""
    return run_script(REPOSITORY, images, tmp_path_factory.mktemp("ours"))


def test_script_runs_wholly(ours):
    done, results = ours
    failed = [f"{step}: {text}" for step, text in results.items() if str(text).startswith("failed: ")]
    assert not failed, "\n".join(failed)
    assert (done.returncode, list(results)) == (0, list(EXPECTED)), done.stderr


@pytest.mark.parametrize("step", EXPECTED)
def test_step_means_the_same(step, ours):
    expected = json.loads(json.dumps(EXPECTED))
    for name, (*path, last), value in STATED:
        place = expected[name]
        for key in path:
            place = place[key]
        assert place[last] != value, f"{name} has no difference to state"
        place[last] = value
    check_step(step, ours[1], expected)


def test_expected_is_torchvisions(images, tmp_path):
    folder = os.environ.get("TORCHVISION_REFERENCES")
    if not folder:
        pytest.skip("TORCHVISION_REFERENCES names no folder references/classification of torchvision")
    done, results = run_script(Path(folder), images, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for step in EXPECTED:
        check_step(step, results, EXPECTED)


@pytest.fixture(scope="module")
def two(images, tmp_path_factory):
    """Results of the script's steps on two processes."""
    folder = tmp_path_factory.mktemp("two")
    arguments = (str(REPOSITORY), str(images), str(folder / "out"), "ranks")
    outcome = run_ranks(torchvision_script.main, 2, *arguments, log_folder=folder)
    return [read_steps(text) for text in outcome.check().outputs]


def test_two_processes_join_print_and_save_as_there(two):
    for rank, results in enumerate(two):
        assert results["ranks_join"] == [True, 2, True, 2]
        assert results["ranks_print"] == ("plain forced ", "forced ")[rank]
        assert results["ranks_reduce"] == [[3, [1, 20], 0.5, [3.0, 1.0]], [4, 12.0, 3.0], 15.0]
        assert results["ranks_save"] == 0


def test_two_processes_share_an_epoch_as_torchs_sampler_deals_it(two):
    for rank, results in enumerate(two):
        sampled = results["ranks_sample"]
        for epoch, images in enumerate(sampled["epochs"]):
            sampler = DistributedSampler(range(28), num_replicas=2, rank=rank)
            sampler.set_epoch(epoch)
            # Stated: whole steps of 2 x 4, where torchvision's last batch has two images.
            assert images == list(sampler)[:12]
        assert sampled["shapes"] == [[4, 3, 32, 32]] * 3
        folders = [label for label, count in enumerate([6, 5, 5, 4, 4, 4]) for _ in range(count)]
        assert sampled["labels"] == [folders[image] for image in sampled["epochs"][1]]
        assert results["ranks_repeat"][:2] == [2, True]
        assert results["ranks_repeat"][2] == EXPECTED["repeated_augmentation"][f"rank {rank}"][2]


def test_two_processes_evaluate_each_image_once(two):
    # Stated: batch k is rank k mod W's, and so the same as on one process; torchvision deals single images.
    assert [results["ranks_sample"]["test"] for results in two] == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7]]
    assert [results["ranks_sample"]["test_labels"] for results in two] == [[[0, 0, 1, 1], [4, 4, 5, 5]], [[2, 2, 3, 3]]]


def test_two_processes_train_one_model(two):
    assert [results["ranks_train"] for results in two] == [[True, True, ["float"]]] * 2
