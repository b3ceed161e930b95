"""Weights as the Hugging Face hub has them: safetensors files, and names of the hub."""

import os
import subprocess
import sys

import pytest
import timm
import torch
from safetensors.torch import save_file

from checkpointing.weights import fetch_from_hub, load_weights
from errors import UserError
from tests.images import write_images
from tests.ranks import REPOSITORY
from tests.started import SMALL, refused, run_train


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=3)


def test_a_safetensors_file_is_a_state_dict(model, tmp_path):
    path = tmp_path / "w.safetensors"
    save_file(model.state_dict(), path, metadata={"format": "pt"})
    weights = load_weights(path)
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    with pytest.raises(UserError, match="holds no average"):
        load_weights(path, is_average=True)


@pytest.mark.parametrize("damage", [lambda old: old[: len(old) // 2], lambda old: b"", lambda old: b"\xff" * len(old)])
def test_a_damaged_one_is_refused_in_one_line(model, tmp_path, damage):
    path = tmp_path / "w.safetensors"
    save_file(model.state_dict(), path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match="no safetensors file, or a damaged one") as refusal:
        load_weights(path)
    assert "\n" not in str(refusal.value)


def test_a_run_starts_from_one(model, tmp_path):
    images = write_images(tmp_path / "images", {"train": [4, 4, 4], "val": [1, 1, 1]})
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    argv = ["--data-path", images, *SMALL, "--output-dir", tmp_path / "out"]
    weights = ["--weights", tmp_path / "w.safetensors"]
    ran = run_train(tmp_path, *argv, *weights, "--test-only").check()
    assert "w.safetensors: a bare state dict" in ran.output
    save_file({"other": torch.zeros(1)}, tmp_path / "w.safetensors")
    refused(run_train(tmp_path, *argv, *weights, "--test-only"), "belongs to another model")


def write_hub(folder, files):
    """Write a repository of the hub as its package caches it."""
    home = folder / "models--someone--something"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("1" * 40)
    (home / "snapshots" / ("1" * 40)).mkdir(parents=True)
    for name, write in files.items():
        write(home / "snapshots" / ("1" * 40) / name)


FETCH = """
import sys
from checkpointing.weights import fetch_from_hub, load_weights
from errors import UserError
try:
    weights = load_weights(fetch_from_hub(sys.argv[1]), is_average=sys.argv[2] == "ema")
    print(weights.kind, float(weights["weight"]))
except UserError as error:
    print("refused", error)
"""


def fetch(folder, name, kind="raw"):
    environment = {**os.environ, "HF_HUB_CACHE": str(folder), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", FETCH, name, kind]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_name_of_the_hub_means_a_file_there(tmp_path):
    checkpoint = {"model": {"weight": torch.tensor([1.0])}, "model_ema": {"module.weight": torch.tensor([2.0])}}
    write_hub(
        tmp_path,
        {
            "model.safetensors": lambda path: save_file({"weight": torch.tensor([3.0])}, path),
            "best.pth": lambda path: torch.save(checkpoint, path),
        },
    )
    assert fetch(tmp_path, "hf-hub:someone/something") == "a bare state dict 3.0\n"
    assert fetch(tmp_path, "hf-hub:someone/something/best.pth", "ema") == "the average 2.0\n"
    missing = fetch(tmp_path, "hf-hub:someone/nothing")
    assert missing.startswith("refused --weights hf-hub:someone/nothing: cannot fetch model.safetensors: ")
    assert missing.count("\n") == 1


def test_a_name_without_its_parts_is_refused():
    for name in ("hf-hub:", "hf-hub:someone", "hf-hub:/x"):
        with pytest.raises(UserError, match="expected hf-hub:ORG/NAME"):
            fetch_from_hub(name)
