"""Images are prepared as options, weights or a published configuration say; torchvision and timm are oracles."""

import json
import math
import re

import pytest
import timm
import torch
import torchvision
from PIL import Image, ImageOps
from torch.nn import functional as F

import data
from checkpointing.published import add_published_options, choose_preprocessing
from checkpointing.weights import BARE, Weights
from errors import UserError
from models.build import check_model
from scripts.trained import open_trained
from settings import config
from settings.options import BY_NAME
from tests.exports import refused as refused_tool
from tests.exports import run_tool
from tests.images import turn, write_images
from tests.started import PLAIN, refused, run_train
from tests.tiny import Tiny

TIMMS = "timm/tiny_test"
# What timm's configuration of it says, and what the user says of a model of their own.
CONFIGURED = {"resize": 168, "crop": 160, "interpolation": "bicubic", "mean": [0.5] * 3, "std": [0.5] * 3}
CHOSEN = {
    "resize": 37, "crop": 31, "interpolation": "lanczos", "mean": [0.1, 0.2, 0.3], "std": [0.9, 0.25, 0.6],
    "crop_mode": "border", "exif": True,
}  # fmt: skip
OPTIONS = "--val-resize-size 37 --val-crop-size 31 --interpolation lanczos --mean 0.1 0.2 0.3".split()
OPTIONS += "--std 0.9 0.25 0.6 --crop-mode border --exif".split()
FLAGS = ["--val-resize-size", "--val-crop-size", "--interpolation", "--mean", "--std"]
MACHINE = ["--workers", "0", "--device", "cpu"]


def settled(module, generator):
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) - (0.5 if tensor.ndim > 1 else 0))
    for tensor in list(module.parameters())[-2:]:
        tensor.data.mul_(30)
    return module.eval()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    write_images(folder / "images", {"train": [6, 6, 6], "val": [4, 5, 3]}, size=(230, 190))
    for number, path in enumerate(sorted((folder / "images").rglob("*.jpg"))):
        turn(path, number % 8 + 1)
    model = settled(Tiny(3), torch.Generator().manual_seed(4))
    torch.save(model.state_dict(), folder / "net.pth")
    return folder, model


def plain(model, folder, values):
    steps = timm.data.create_transform(
        (3, values["crop"], values["crop"]), interpolation=values["interpolation"], mean=values["mean"],
        std=values["std"], crop_pct=values["crop"] / (values["resize"] + 0.5), crop_mode=values.get("crop_mode"),
    )  # fmt: skip
    turned = ImageOps.exif_transpose if values.get("exif") else lambda image: image
    paths = sorted((folder / "images" / "val").rglob("*.jpg"))
    images = torch.stack([steps(turned(Image.open(path))) for path in paths])
    labels = torch.tensor([int(path.parent.name[-1]) for path in paths])
    with torch.no_grad():
        scores = model(images).double()
    acc1 = 100 * (scores.argmax(1) == labels).double().mean().item()
    return dict(zip(map(str, paths), scores.softmax(1), strict=True)), F.cross_entropy(scores, labels).item(), acc1


def in_json(values, origin):
    return {
        "val_resize_size": values["resize"], "val_crop_size": values["crop"], "interpolation": values["interpolation"],
        "mean": values["mean"], "std": values["std"], "crop_mode": values.get("crop_mode", "center"),
        "exif": values.get("exif", False), "grey_range": None, "origin": origin,
    }  # fmt: skip


class Compared:
    def __init__(self, tmp_path, folder, model, values):
        self.tmp_path, self.folder, self.values = tmp_path, folder, values
        self.probabilities, self.loss, self.acc1 = plain(model, folder, values)
        imagenets = {"resize": 256, "crop": 224, "interpolation": "bilinear"}
        imagenets |= {"mean": config.IMAGENET_MEAN, "std": config.IMAGENET_STD}
        assert abs(plain(model, folder, imagenets)[1] - self.loss) > 0.1  # so that a wrong preparation shows

    def check(self, loss, acc1):
        # Our resize of some interpolations differs from Pillow's by a grey level.
        assert loss == pytest.approx(self.loss, abs=0.02)
        assert acc1 == pytest.approx(self.acc1, abs=1e-3)

    def predict(self, file, *argv, origin):
        outcome, output = run_tool(self.tmp_path, "predict", file, self.folder / "images" / "val", "--json", *argv)
        found = json.loads(output)
        assert found["preprocessing"] == in_json(self.values, origin)
        assert f": {origin}" in next(each for each in outcome.output.splitlines() if each.startswith("preprocessing"))
        assert len(found["images"]) == len(self.probabilities)
        for each in found["images"]:
            shares = {top["class"]: top["probability"] for top in each["top"]}
            for label, share in enumerate(self.probabilities[each["file"]].tolist()):
                assert shares[str(label)] == pytest.approx(share, abs=1e-3)

    def evaluate(self, file, *argv, origin):
        argv = ["--set", f"val={self.folder / 'images' / 'val'}", "--json", self.tmp_path / "r.json", *MACHINE, *argv]
        run_tool(self.tmp_path, "evaluate", file, *argv)
        found = json.loads((self.tmp_path / "r.json").read_text())
        assert found["preprocessing"] == in_json(self.values, origin)
        self.check(found["sets"]["val"]["nll"], found["sets"]["val"]["acc1"])

    def test_only(self, file, *argv, origin):
        argv = ["--test-only", "--weights", file, "--data-path", self.folder / "images", *MACHINE, *argv]
        said = run_train(self.tmp_path, *argv).check().output
        assert f": {origin}" in next(each for each in said.splitlines() if each.startswith("preprocessing: "))
        acc1, loss = re.search(r"Test: Acc@1 ([\d.]+) .*loss ([\d.]+) n=12", said).groups()
        self.check(float(loss), float(acc1))

    def check_all(self, file, *argv, origin):
        for use in (self.predict, self.evaluate, self.test_only):
            use(file, *argv, origin=origin)

    def export(self, file, *argv):
        out = self.tmp_path / "exported"
        run_tool(self.tmp_path, "export", file, "--output", out, *argv)
        return [each for each in sorted(out.iterdir()) if each.suffix != ".json"]


def test_every_tool_prepares_images_as_timm_configures_the_model(made, tmp_path):
    folder, model = made
    compared, given = Compared(tmp_path, folder, model, CONFIGURED), ["--model", TIMMS]
    compared.check_all(folder / "net.pth", *given, origin=f"as timm configures {TIMMS}")
    for file in compared.export(folder / "net.pth", *given, "--format", "onnx", "safetensors"):
        compared.predict(file, origin="as in the exported file")
    compared.evaluate(file, origin="as in the exported file")


def test_a_model_of_ones_own_is_prepared_as_given_and_as_the_file_says_from_then_on(made, tmp_path):
    folder, model = made
    compared, given = Compared(tmp_path, folder, model, CHOSEN), ["--model", PLAIN]
    compared.check_all(folder / "net.pth", *given, *OPTIONS, origin="as given")
    for file in compared.export(folder / "net.pth", *given, *OPTIONS, "--format", "weights", "torch-export"):
        compared.predict(file, *given * (file.suffix != ".pt2"), origin="as in the exported file")
    output, known = tmp_path / "checkpoint.pth", in_json(CHOSEN, "")
    torch.save({"model": model.state_dict(), "args": {"model": PLAIN, **known}}, output)
    compared.check_all(output, *given, origin="as in the checkpoint")
    statistics = ["--reestimate-bn", folder / "images", "--output", tmp_path / "again.pth", "--batch-size", "6"]
    run_tool(tmp_path, "average", output, *given, *statistics, "--device", "cpu")
    kept = torch.load(tmp_path / "again.pth", weights_only=True)["args"]
    assert {**kept, **known, "origin": None} == {**kept, "origin": None}
    _, text = run_tool(tmp_path, "predict", output, folder / "images", *given, "--mean", 0, 0, 0, "--json")
    found = json.loads(text)["preprocessing"]
    assert (found["mean"], found["std"], found["val_crop_size"]) == ([0, 0, 0], CHOSEN["std"], CHOSEN["crop"])
    assert "as given (--mean)" in found["origin"]


@pytest.mark.parametrize(("tool", "argv", "given"), [
    ("predict", ["images"], []), ("evaluate", ["--set", "val=images/val"], OPTIONS[:-4]),
    ("export", ["--format", "weights", "--output", "x"], OPTIONS[:-4]),
])  # fmt: skip
def test_nothing_is_assumed_of_a_model_that_nothing_is_published_about(tool, argv, given, made, tmp_path):
    folder, _ = made
    argv = [word.replace("images", f"{folder}/images") for word in argv]
    outcome, _ = run_tool(tmp_path, tool, folder / "net.pth", "--model", PLAIN, *argv, *given, code=2)
    assert [flag for flag in FLAGS if flag in refused_tool(outcome, tool)] == (["--std"] if given else FLAGS)


def test_a_dry_run_refuses_weights_of_another_model(made, tmp_path):
    folder, _ = made
    argv = ["--data-path", folder / "images", "--batch-size", 4, *MACHINE, "--dry-run", "--model", TIMMS, "--weights"]
    run_train(tmp_path, *argv, folder / "net.pth").check()
    torch.save({"other.weight": torch.ones(3, 8)}, tmp_path / "own.pth")
    refused(run_train(tmp_path, *argv, tmp_path / "own.pth"), "own.pth belongs to another model", "docs/runs.md")


def test_a_file_that_torchvision_publishes_is_prepared_as_published(tmp_path):
    state = torchvision.models.get_model("efficientnet_b1").state_dict()
    for weights in torchvision.models.EfficientNet_B1_Weights:
        path = tmp_path / weights.url.rpartition("/")[2]
        torch.save(state, path)
        trained, published = open_trained(str(path), model="efficientnet_b1"), weights.transforms()
        args = trained.args
        assert (args.val_resize_size, args.val_crop_size) == (published.resize_size[0], published.crop_size[0])
        assert (args.interpolation, args.mean) == (published.interpolation.value, published.mean)
        assert str(weights) in trained.origin


def test_timms_weights_are_prepared_as_their_tag_says():
    for name in ("resnet18.a1_in1k", "resnet18.tv_in1k", "resnet18.fb_swsl_ig1b_ft_in1k"):
        known = timm.get_pretrained_cfg(name)
        for file in (known.url and known.url.rpartition("/")[2], f"hf-hub:{known.hf_hub_id}"):
            weights = Weights()
            weights.kind, weights.file, weights.options = BARE, file, {}
            add_published_options(weights, "timm/resnet18")
            found = weights.options
            assert (found["interpolation"], found["mean"]) == (known.interpolation, list(known.mean)), (name, file)
            assert found["val_resize_size"] == math.floor(known.input_size[-1] / known.crop_pct)


def test_weights_that_fit_and_mean_something_else_are_refused(made, tmp_path):
    folder, model = made
    argv = ["--test-only", "--data-path", folder / "images", *MACHINE, "--model", TIMMS, "--weights"]
    state = model.state_dict()
    for content, words in [
        ({name: tensor.to(torch.int8) for name, tensor in state.items()}, ["is quantized", "torch.int8"]),
        ({"model": state, "args": {"model": "timm/test_resnet"}}, ["--model timm/test_resnet"]),
        ({"model": state, "args": {"model": TIMMS, "model_kwargs": ["depth=2"]}}, ["blocks.1."]),  # built as it says
    ]:
        torch.save(content, tmp_path / "other.pth")
        refused(run_train(tmp_path, *argv, tmp_path / "other.pth"), *words)
    for name, mean in (("a", 0.5), ("b", 0.4)):
        sizes = {**in_json(CONFIGURED, ""), "mean": [mean] * 3}
        torch.save({"model": state, "args": {"model": TIMMS, **sizes}}, tmp_path / f"{name}.pth")
    pair = [tmp_path / "a.pth", tmp_path / "b.pth", "--output", tmp_path / "mean.pth"]
    assert "preprocessing" in refused_tool(run_tool(tmp_path, "average", *pair, code=2)[0], "average")


def test_what_a_file_says_and_cannot_be_used_is_refused_and_timms_crop_mode_is_followed():
    args = config.parse_args(["--model", "resnet18", "--test-only", "--weights", "x.pth", "--synthetic"])
    for name, value in [("interpolation", "cubic"), ("val_crop_size", "224"), ("mean", 0.5), ("std", [1, 1])]:
        with pytest.raises(UserError, match=f"--{name.replace('_', '-')} "):
            choose_preprocessing(args, "x.pth", {name: value})
    for mode in ("squash", "other"):
        weights = Weights()
        weights.script, weights.kind, weights.file = "timm", "the raw weights", "x.pth"
        weights.options = {"model": "timm/resnet18", "crop_mode": mode}
        add_published_options(weights, "timm/resnet18")
        assert weights.options["crop_mode"] == mode
    with pytest.raises(UserError, match="holds --crop-mode other, which cannot be used; give --crop-mode"):
        choose_preprocessing(args, "x.pth", weights.options)


def taken(*argv):
    return data.choose_published_options(config.parse_args(["--synthetic", *argv]))


def test_timms_models_are_given_images_as_timms_config_says():
    for name in ("test_vit", "vit_small_patch16_224", "resnet10t", "tf_efficientnet_lite1"):
        args, notes = taken("--model", f"timm/{name}")
        expected = timm.data.resolve_data_config({}, pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
        size = expected["input_size"][-1]
        assert (args.mean, args.std) == (list(expected["mean"]), list(expected["std"])), name
        sizes = (args.train_crop_size, args.val_crop_size, args.val_resize_size, args.interpolation)
        assert sizes == (size, size, math.floor(size / expected["crop_pct"]), expected["interpolation"]), name
        assert f"as timm configures timm/{name}" in notes[0]
    args, _ = taken("--model", "timm/vit_base_patch16_clip_224.openai")  # the tag's, and not the default's
    assert args.mean == list(timm.get_pretrained_cfg("vit_base_patch16_clip_224.openai").mean) != [0.5] * 3
    check_model(args.replaced(distributed=False))
    args, _ = taken("--model", "timm/test_vit", "--mean", "0.1", "0.2", "0.3", "--val-crop-size", "96")
    assert (args.mean, args.std) == ([0.1, 0.2, 0.3], [0.5, 0.5, 0.5])
    assert (args.val_crop_size, args.val_resize_size, args.train_crop_size) == (96, 101, 224)  # 96 / 0.95
    args, notes = taken("--model", "resnet18", "--std", "1", "1", "1")
    assert (args.mean, args.std, notes) == ([0.485, 0.456, 0.406], [1.0, 1.0, 1.0], [])


def test_a_resumed_run_takes_the_checkpoints_and_of_before_the_crop_mode_the_centre(capsys):
    squashing = "timm/convnext_tiny.in12k_ft_in1k_384"
    args, notes = taken("--model", squashing)
    assert args.crop_mode == "squash"
    assert "--crop-mode squash" in notes[0]
    args = args.replaced(rank=0, world_size=1)
    shards = {"global_batch_size": 32, "num_shards": 1}
    theirs = {name: value for name, value in vars(args).items() if name in BY_NAME}
    theirs["mean"] = [0.25, 0.5, 0.75]
    resumed = config.assign(args, {"args": theirs, "shards": shards})
    assert (resumed.crop_mode, resumed.mean, resumed.std) == ("squash", [0.25, 0.5, 0.75], args.std)
    del theirs["crop_mode"]
    assert config.assign(args, {"args": theirs, "shards": shards}).crop_mode == "center"
    assert "--crop-mode center: as in the checkpoint" in capsys.readouterr().out
