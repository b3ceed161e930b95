"""Mean, standard deviation and sizes of images, as the model, its weights and a checkpoint want them."""

import math

import pytest
import timm
import torch
from timm.data import resolve_data_config

import config
import data
import models
from checkpointing.archive import load_checkpoint
from errors import UserError
from monitoring.preview import preview
from scripts.trained import open_trained
from tests.images import write_images
from tests.started import refused, run_train

VIT = "timm/test_vit"  # timm's config says 0.5 for both, and 160 pixels
SMALL = ["--train-crop-size", "32", "--val-crop-size", "32", "--val-resize-size", "32", "--device", "cpu"]


def settled(*argv):
    args = config.parse_args(["--synthetic", *argv])
    return data.take_published_options(args)


def test_timms_models_are_given_images_as_timms_config_says():
    """The oracle is timm's own rule for evaluation; training crops have the same size."""
    for name in ("test_vit", "vit_small_patch16_224", "resnet10t", "tf_efficientnet_lite1"):
        args, notes = settled("--model", f"timm/{name}")
        expected = resolve_data_config({}, pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
        size = expected["input_size"][-1]
        assert (args.mean, args.std) == (list(expected["mean"]), list(expected["std"])), name
        sizes = (args.train_crop_size, args.val_crop_size, args.val_resize_size, args.interpolation)
        assert sizes == (size, size, math.floor(size / expected["crop_pct"]), expected["interpolation"]), name
        assert f"as timm configures timm/{name}" in notes[0]
    args, _ = settled("--model", "timm/vit_base_patch16_clip_224.openai")  # the tag's, and not the default's
    assert args.mean == list(timm.get_pretrained_cfg("vit_base_patch16_clip_224.openai").mean) != [0.5] * 3
    models.check_model(args.replaced(distributed=False))
    args, _ = settled("--model", VIT, "--mean", "0.1", "0.2", "0.3", "--val-crop-size", "96")
    assert (args.mean, args.std) == ([0.1, 0.2, 0.3], [0.5, 0.5, 0.5])
    assert (args.val_crop_size, args.val_resize_size, args.train_crop_size) == (96, 101, 224)  # 96 / 0.95
    args, notes = settled("--model", "resnet18", "--std", "1", "1", "1")
    assert (args.mean, args.std, notes) == ([0.485, 0.456, 0.406], [1.0, 1.0, 1.0], [])


def test_batches_are_normalised_by_the_options():
    args, _ = settled("--model", VIT, "--std", "0.25", "0.5", "1")
    train, evaluation = data.build_batch_transforms(args.replaced(num_shards=1), 10, torch.device("cpu"))
    image = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    expected = (image.double() / 255 - 0.5) / torch.tensor([0.25, 0.5, 1.0]).view(3, 1, 1)
    for transform in (train, evaluation):
        normalised, _ = transform(image, torch.tensor([0, 1]), None)
        torch.testing.assert_close(normalised.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_dry_run_prints_a_recipe_that_repeats_them(tmp_path):
    text = preview(config.parse_args(["--synthetic", "--model", VIT, *SMALL]))
    path = tmp_path / "again.toml"
    path.write_text(text)
    assert "--mean 0.5 0.5 0.5 --std 0.5 0.5 0.5" in text.splitlines()[1]
    args = config.parse_args(["--recipe", str(path), "--synthetic"])
    assert (args.mean, args.std) == ([0.5] * 3, [0.5] * 3)


def trained_with(out):
    return load_checkpoint(out / "checkpoint.pth", str(out))["args"]


def test_a_resumed_run_and_an_evaluation_take_the_checkpoints(tmp_path):
    images = write_images(tmp_path / "images", {"train": [8, 8], "val": [2, 2]})
    out = tmp_path / "out"
    argv = ["--data-path", images, "--output-dir", out, "--model", VIT, *SMALL, "--batch-size", 8, "--workers", 0]
    run_train(tmp_path, *argv, "--epochs", 1, "--mean", 0.25, 0.5, 0.75).check()
    trained = trained_with(out)
    assert (trained["mean"], trained["std"]) == ([0.25, 0.5, 0.75], [0.5] * 3)

    refused(run_train(tmp_path, *argv, "--resume", "auto", "--epochs", 2, "--mean", 0.5, 0.5, 0.5), "mean")
    resumed = run_train(tmp_path, *argv, "--resume", "auto", "--epochs", 2).check()
    assert "--mean 0.25 0.5 0.75: as in the checkpoint" in resumed.output
    assert trained_with(out)["mean"] == [0.25, 0.5, 0.75]
    tested = run_train(tmp_path, *argv, "--resume", out / "checkpoint.pth", "--test-only").check()
    assert "--mean [0.25, 0.5, 0.75]: as in the checkpoint" in tested.output
    (out / "two\nlines.pth").write_bytes((out / "checkpoint.pth").read_bytes())
    trained = open_trained(str(out / "two\nlines.pth"))
    assert (trained.args.mean, trained.args.std) == ([0.25, 0.5, 0.75], [0.5] * 3)


def test_a_state_dict_and_timms_checkpoint_take_timms(tmp_path):
    model = timm.create_model("test_vit", num_classes=3, img_size=224)
    torch.save(model.state_dict(), tmp_path / "bare.pth")
    torch.save({"state_dict": model.state_dict(), "args": {"mean": None}}, tmp_path / "timm.pth")
    for file in ("bare.pth", "timm.pth"):
        assert open_trained(str(tmp_path / file), model=VIT).args.mean == [0.5] * 3


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "inception_v3"], ["--train-crop-size 224"]),
        (["--model", "vit_b_16", "--train-crop-size", "225", "--val-crop-size", "225"], ["16 pixels", "size 224"]),
        (["--model", "maxvit_t", "--val-crop-size", "256"], ["--val-crop-size 256"]),
        (["--model", "timm/swin_tiny_patch4_window7_224", "--val-crop-size", "256"],
         ["--train-crop-size 224"]),
        (["--model", "timm/levit_128s", "--train-crop-size", "256"],
         ["--train-crop-size 256"]),
        (["--model", "timm/test_vitt"], ["did you mean timm/test_vit"]),
        (["--model", "timm/test_vit.r160_in1"], ["did you mean timm/test_vit.r160_in1k"]),
    ],
)  # fmt: skip
def test_a_size_that_the_model_cannot_take_is_refused_with_one_that_fits(argv, words):
    args = config.parse_args(["--synthetic", *argv]).replaced(distributed=False)
    with pytest.raises(UserError) as refusal:
        models.check_model(args)
    for word in words:
        assert word in str(refusal.value)
    assert "\n" not in str(refusal.value)
