"""A script written for torchvision's references/classification runs on our folder, and means the same there.

torchvision_steps.json was recorded from torchvision's own folder (release 0.21). Where the environment variable
TORCHVISION_REFERENCES names such a folder, the script runs there as well and is compared with it step by step. On two
processes it cannot: torchvision's folder needs a GPU for each.
"""

import json
import os
from pathlib import Path

import pytest
from torch.utils.data.distributed import DistributedSampler

from tests import torchvision_script
from tests.endings import flatten
from tests.images import write_images
from tests.ranks import REPOSITORY, run_ranks

EXPECTED = json.loads(Path(__file__).with_name("torchvision_steps.json").read_text())

# Where our result is meant to be another one.
STATED = {
    "parser": {
        "/0/device": None,  # the accelerator that is there, else the CPU
        "/0/workers": None,  # 16, but no more than cores
        "/0/output_dir": None,  # runs/<model>, not the current folder
        "/0/backend": None,  # a faster way, within one grey level
    },
    # Schedules are functions of the position: nothing of them is saved.
    "main_trains": {"/1/keys": "model optimizer epoch args"},
    "main_resumes_and_tests_only": {"/1/keys": "model optimizer epoch args"},
    "main_with_much": {"/1/keys": "model optimizer epoch args model_ema"},
    # An epoch has as many samples as the set has images: no multiple of 256.
    "repeated_augmentation": {"/cut/0": 300, "/cut/1": 300},
}

# Whose numbers are means of pixels: one grey level is 1 / 255 / 0.224.
OF_PIXELS = ("datasets", "load_data", "plain_loaders", "presets_")
GREY_LEVEL = 0.018


def check_steps(results, stated):
    """Check the results of all steps, where `stated` lists what is meant to be another."""
    assert list(results) == list(EXPECTED), "a step is missing"
    for step, recorded in EXPECTED.items():
        ours, expected = flatten({step: results[step]}), flatten({step: recorded})
        changes = {f"/{step}{name}": value for name, value in stated.get(step, {}).items()}
        assert all(expected[name] != value for name, value in changes.items()), "there is no difference to state"
        expected |= changes
        assert list(ours) == list(expected), results[step]
        tolerance = GREY_LEVEL if step.startswith(OF_PIXELS) else 0.0
        for name, value in expected.items():
            is_float = isinstance(value, float)
            assert type(ours[name]) is type(value), name
            assert ours[name] == (pytest.approx(value, rel=1e-4, abs=tolerance) if is_float else value), name


def read_steps(text):
    """Return the results of a script's steps, by name."""
    lines = [line.removeprefix("step ").split(": ", 1) for line in text.splitlines() if line.startswith("step ")]
    return {name: json.loads(result) for name, result in lines}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """28 training images, seven batches of four, and 12 of validation, of six classes."""
    return write_images(tmp_path_factory.mktemp("six"), {"train": [6, 5, 5, 4, 4, 4], "val": [2] * 6})


def run_script(folder, images, out):
    outcome = run_ranks(torchvision_script.main, 1, str(folder), str(images), str(out), log_folder=out, timeout_s=240)
    assert outcome.codes == [0], outcome.output  # where a step fails, its line says why
    return read_steps(outcome.output)


def test_script_means_the_same(images, tmp_path):
    check_steps(run_script(REPOSITORY, images, tmp_path), STATED)


def test_expected_is_torchvisions(images, tmp_path):
    folder = os.environ.get("TORCHVISION_REFERENCES")
    if not folder:
        pytest.skip("TORCHVISION_REFERENCES names no folder references/classification of torchvision")
    check_steps(run_script(Path(folder), images, tmp_path), {})


def test_two_processes_work_as_there(images, tmp_path):
    arguments = (str(REPOSITORY), str(images), str(tmp_path / "out"), "ranks")
    outcome = run_ranks(torchvision_script.main, 2, *arguments, log_folder=tmp_path)
    two = [read_steps(text) for text in outcome.check().outputs]
    for rank, results in enumerate(two):
        assert results["ranks_join"] == [True, 2, True, 2]
        assert results["ranks_print"] == ("plain forced ", "forced ")[rank]
        assert results["ranks_reduce"] == [[3, [1, 20], 0.5, [3.0, 1.0]], [4, 12.0, 3.0], 15.0]
        assert results["ranks_save"] == 0
        assert results["ranks_train"] == [True, True, ["float"]]  # one model
        # They share an epoch as torch's sampler deals it.
        sampled = results["ranks_sample"]
        for epoch, order in enumerate(sampled["epochs"]):
            sampler = DistributedSampler(range(28), num_replicas=2, rank=rank)
            sampler.set_epoch(epoch)
            # Stated: whole steps of 2 x 4, where torchvision's last batch has two images.
            assert order == list(sampler)[:12]
        assert sampled["shapes"] == [[4, 3, 32, 32]] * 3
        folders = [label for label, count in enumerate([6, 5, 5, 4, 4, 4]) for _ in range(count)]
        assert sampled["labels"] == [folders[image] for image in sampled["epochs"][1]]
        assert results["ranks_repeat"][:2] == [2, True]
        assert results["ranks_repeat"][2] == EXPECTED["repeated_augmentation"][f"rank {rank}"][2]
    # Each image is evaluated once. Stated: batch k is rank k mod W's, and so the same as on one process; torchvision
    # deals single images.
    assert [results["ranks_sample"]["test"] for results in two] == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7]]
    assert [results["ranks_sample"]["test_labels"] for results in two] == [[[0, 0, 1, 1], [4, 4, 5, 5]], [[2, 2, 3, 3]]]
