"""Weights of others: safetensors files, names of the Hugging Face hub, and checkpoints of timm's script."""

import argparse
import os
import sys
from types import SimpleNamespace

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.utils import CheckpointSaver, ModelEmaV3

import config
import models
from checkpointing.weights import fetch_from_hub, load_weights
from errors import UserError
from scripts.trained import open_trained
from tests.images import write_images
from tests.ranks import run_ranks
from tests.started import SMALL_ANYWHERE, refused, run_train


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
    argv = ["--data-path", images, *SMALL_ANYWHERE, "--output-dir", tmp_path / "out"]
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


def fetch_each(folder, names):
    os.environ.update(HF_HUB_CACHE=str(folder), HF_HUB_OFFLINE="1")
    for name in [name for name in sys.modules if name.split(".")[0] == "huggingface_hub"]:
        del sys.modules[name]  # which has read the environment
    for name, kind in names:
        try:
            weights = load_weights(fetch_from_hub(name), is_average=kind == "ema")
            print(weights.kind, float(weights["weight"]))
        except UserError as error:
            print("refused", error)


def test_a_name_of_the_hub_means_a_file_there(tmp_path):
    checkpoint = {"model": {"weight": torch.tensor([1.0])}, "model_ema": {"module.weight": torch.tensor([2.0])}}
    write_hub(
        tmp_path,
        {
            "model.safetensors": lambda path: save_file({"weight": torch.tensor([3.0])}, path),
            "best.pth": lambda path: torch.save(checkpoint, path),
        },
    )
    names = [
        ("hf-hub:someone/something", "raw"), ("hf-hub:someone/something/best.pth", "ema"),
        ("hf-hub:someone/nothing", "raw"),
    ]  # fmt: skip
    ran = run_ranks(fetch_each, 1, tmp_path, names, log_folder=tmp_path).check()
    whole, average, missing = ran.output.splitlines()
    assert (whole, average) == ("a bare state dict 3.0", "the average 2.0")
    assert missing.startswith("refused --weights hf-hub:someone/nothing: cannot fetch model.safetensors: ")


@pytest.fixture(params=["resnet18", "vit_tiny_patch16_224"])
def timms(request, tmp_path):
    """A checkpoint as timm's own saver writes it, of options as its script has them; its model and its average."""
    torch.manual_seed(0)
    kwargs = {"depth": 1} if "vit" in request.param else {}
    model = timm.create_model(request.param, num_classes=3, **kwargs)
    average = ModelEmaV3(model, decay=0.5)
    with torch.no_grad():
        for parameter in average.module.parameters():
            parameter.mul_(0.5)
    args = argparse.Namespace(
        model=request.param, model_kwargs=kwargs, img_size=64 if "vit" not in request.param else None, input_size=None,
        crop_pct=None, mean=None, std=None, interpolation="", gp=None, bn_eps=None, bn_momentum=None, opt="sgd",
        num_classes=3, drop=0.0, amp=False,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    saver = CheckpointSaver(model, optimizer, args=args, model_ema=average, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(3, metric=60.0)
    return SimpleNamespace(path=tmp_path / "last.pth.tar", model=model.eval(), average=average.module.eval(), args=args)


def test_a_checkpoint_of_timms_script_is_of_timms_model(timms):
    expected_config = timms.model.default_cfg
    size = timms.args.img_size or expected_config["input_size"][-1]
    image = torch.randn(2, 3, size, size)
    for is_average, expected in ((False, timms.model), (True, timms.average)):
        trained = open_trained(str(timms.path), is_average=is_average)
        assert trained.args.model == f"timm/{timms.args.model}"
        assert (trained.args.val_crop_size, trained.args.val_resize_size) == (
            size,
            int(size / expected_config["crop_pct"]),
        )
        assert trained.args.mean == list(expected_config["mean"])
        assert trained.args.interpolation == expected_config["interpolation"]
        assert torch.equal(trained.model(image), expected(image))
    with pytest.raises(UserError, match=f"{timms.path.name} holds the raw weights of timm/{timms.args.model}"):
        open_trained(str(timms.path), model="resnet18")


def test_a_run_starts_from_a_checkpoint_of_timms_script(timms):
    weights = load_weights(timms.path)
    assert weights.kind == f"the raw weights of timm/{timms.args.model}, not their average, which --ema takes"
    argv = ["--synthetic", "--model", f"timm/{timms.args.model}", "--weights", str(timms.path)]
    argv += ["--model-kwargs", "depth=1"] if timms.args.model_kwargs else []
    model = models.build_model(config.parse_args(argv), 3, load_weights(timms.path, is_average=True))
    for name, value in timms.average.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_a_name_that_timms_models_do_not_have_is_asked_for(tmp_path):
    """Without its options timm's saver writes the name of the class; its script takes models from elsewhere too."""
    model = timm.create_model("test_resnet", num_classes=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for args in (None, argparse.Namespace(model="hf-hub:timm/test_resnet.r160_in1k")):
        CheckpointSaver(model, optimizer, args=args)._save(tmp_path / "w.pth", 0)
        with pytest.raises(UserError, match="does not say of which model it is; give --model NAME"):
            open_trained(str(tmp_path / "w.pth"))
        assert open_trained(str(tmp_path / "w.pth"), model="timm/test_resnet").args.model == "timm/test_resnet"
