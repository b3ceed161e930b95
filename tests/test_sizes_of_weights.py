"""Weights of a model for images of another size: their positions are resized as torchvision and timm resize them."""

import re

import pytest
import timm
import torch
import torchvision
from timm.layers import resample_abs_pos_embed, resize_rel_pos_bias_table
from torchvision.models.vision_transformer import interpolate_embeddings

import config
import models
from scripts.trained import open_trained
from tests.images import write_images
from tests.started import SMALL, run_train


def start(name, size, weights, *argv, num_classes=3):
    sizes = ["--train-crop-size", str(size), "--val-crop-size", str(size)]
    args = config.parse_args(["--synthetic", "--model", name, "--weights", "w.pth", *sizes, *argv])
    return models.build_model(args, num_classes, weights).state_dict()


def noisy(model):
    """A model's state dict, of no zeros: some embeddings begin as zeros."""
    torch.manual_seed(0)
    return {name: value + torch.rand_like(value) if value.is_floating_point() else value for name, value in
            model.state_dict().items()}  # fmt: skip


def assert_all_but(found, weights, *names):
    for name, value in found.items():
        assert name in names or torch.equal(value, weights[name]), name


@pytest.fixture(scope="module")
def vit_weights():
    return noisy(torchvision.models.VisionTransformer(64, 32, 12, 12, 768, 3072, num_classes=3))


@pytest.mark.parametrize("size", [32, 96])
def test_torchvisions_vit(size, vit_weights, capsys):
    found = start("vit_b_32", size, dict(vit_weights))
    expected = interpolate_embeddings(size, 32, dict(vit_weights))["encoder.pos_embedding"]
    assert torch.equal(found["encoder.pos_embedding"], expected)
    assert_all_but(found, vit_weights, "encoder.pos_embedding")
    num_positions = (size // 32) ** 2 + 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        "--weights w.pth: made for images of another size; resized encoder.pos_embedding from (1, 5, 768) to "
        f"(1, {num_positions}, 768)"
    )


def test_timms_vit_and_another_classifier(capsys):
    weights = noisy(timm.create_model("deit_tiny_distilled_patch16_224", num_classes=5))
    found = start("timm/deit_tiny_distilled_patch16_224", 64, dict(weights))
    assert torch.equal(found["pos_embed"], resample_abs_pos_embed(weights["pos_embed"], [4, 4], num_prefix_tokens=2))
    heads = [f"{head}.{part}" for head in ("head", "head_dist") for part in ("weight", "bias")]
    assert_all_but(found, weights, "pos_embed", *heads)
    assert found["head.weight"].shape == found["head_dist.weight"].shape == (3, 192)
    out = capsys.readouterr().out
    assert "resized pos_embed from (1, 198, 192) to (1, 18, 192)" in out
    assert "classifier of 5 classes left out" in out


def test_timms_windows(capsys):
    weights = noisy(timm.create_model("swin_tiny_patch4_window7_224", num_classes=3))
    found = start("timm/swin_tiny_patch4_window7_224", 128, dict(weights))
    tables = [name for name, value in found.items() if value.shape != weights[name].shape]
    assert all("relative_position_bias_table" in name for name in tables)
    for name in tables:
        side = round(found[name].shape[0] ** 0.5 + 1) // 2
        expected = resize_rel_pos_bias_table(
            weights[name], new_window_size=(side, side), new_bias_shape=found[name].shape
        )
        assert torch.equal(found[name], expected), name
    assert_all_but(found, weights, *tables)
    assert len(tables) >= 1
    assert re.search(r"resized layers\S+ .*from \(169, \d+\)", capsys.readouterr().out)


def small_vit(size):
    return torchvision.models.VisionTransformer(size, 32, 1, 2, 64, 64, num_classes=3)


TIMMS = "vit_tiny_patch16_224"


@pytest.mark.parametrize(
    ("build", "resize"),
    [
        (small_vit, lambda name, old, shape: interpolate_embeddings(96, 32, {name: old})[name]),
        (
            lambda size: timm.create_model(TIMMS, num_classes=3, depth=1, img_size=size),
            lambda name, old, shape: resample_abs_pos_embed(old, [6, 6]),
        ),
        (
            lambda size: timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1), img_size=size),
            lambda name, old, shape: resize_rel_pos_bias_table(old, [int(shape[0] ** 0.5 + 1) // 2] * 2, shape),
        ),
    ],
)
def test_a_checkpoint_is_evaluated_at_another_size(tmp_path, capsys, build, resize):
    """The weights and their average, as `--weights` resizes them."""
    args = config.parse_args(["--synthetic", "--test-only", "--resume", "c.pth"])
    weights, model = noisy(build(64)), build(96)
    signs = {name: -1 if value.is_floating_point() else 1 for name, value in weights.items()}
    average = {f"module.{name}": signs[name] * value for name, value in weights.items()}
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    resized = [name for name in weights if weights[name].shape != shapes[name]]
    assert resized

    state = {"model": weights, "model_ema": {"n_averaged": torch.tensor(3), **average}}
    model_ema = models.load_evaluated(args, model, state)
    for net, is_average in ((model, False), (model_ema.module, True)):
        expected = {name: (signs[name] if is_average else 1) * value for name, value in weights.items()}
        found = net.state_dict()
        assert_all_but(found, expected, *resized)
        for name in resized:
            torch.testing.assert_close(found[name], resize(name, expected[name], shapes[name]), rtol=0, atol=1e-6)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"--resume c.pth: made for images of another size; resized {resized[0]}")


def test_train_and_the_tools_evaluate_a_checkpoint_at_another_size(tmp_path):
    images = write_images(tmp_path / "images", {"train": [4, 4], "val": [2, 2]})
    argv = ["--data-path", images, *SMALL, "--batch-size", 4, "--model", f"timm/{TIMMS}", "--model-kwargs", "depth=1"]
    out = tmp_path / "out"
    run_train(tmp_path, *argv, "--epochs", 1, "--model-ema", "--output-dir", out).check()
    path = out / "checkpoint.pth"
    argv = ["--data-path", images, "--device", "cpu", "--workers", 0, "--batch-size", 4, "--test-only"]
    ran = run_train(tmp_path, *argv, "--resume", path, "--val-crop-size", 48).check()
    said = "made for images of another size; resized pos_embed from (1, 5, 192) to (1, 10, 192)"
    assert ran.output.count(f"--resume {path}: {said}") == ran.output.count("made for images") == 1
    asked = ["--ema", "--val-crop-size", 48]
    by_weights = run_train(tmp_path, *argv, "--weights", path, *asked, "--model", f"timm/{TIMMS}", "--model-kwargs",
                           "depth=1", "--val-resize-size", 32).check().output  # fmt: skip
    (line,) = [line for line in ran.output.splitlines() if line.startswith("Test: EMA Acc@1")]
    assert line.replace("EMA ", "") in by_weights
    trained = open_trained(str(path), is_average=True, given={"val_crop_size": 48, "val_resize_size": 48})
    assert trained.model.pos_embed.shape == (1, 10, 192)
