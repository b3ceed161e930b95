"""Images are prepared as said or published and every export holds the model: torchvision and timm are the oracles."""

import csv
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
import torchvision
from PIL import Image, ImageOps
from torch.nn import functional as F

from checkpointing.first_weights import add_published_options, choose_published_options
from checkpointing.preprocessing import choose_preprocessing
from checkpointing.weights import BARE, Weights
from errors import UserError
from models.build import check_model
from scripts.scores import share_text
from scripts.trained import open_trained
from settings import config
from settings.options import BY_NAME
from tests.endings import differing
from tests.exports import CLASSES, MODEL, plain_model, plain_probabilities, run_tool, write_checkpoint
from tests.exports import refused as refused_tool
from tests.images import turn, write_images
from tests.ranks import REPOSITORY, module_rank, run_ranks
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
def net(tmp_path_factory):
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


def test_every_tool_prepares_images_as_timm_configures_the_model(net, tmp_path):
    folder, model = net
    compared, given = Compared(tmp_path, folder, model, CONFIGURED), ["--model", TIMMS]
    compared.check_all(folder / "net.pth", *given, origin=f"as timm configures {TIMMS}")
    for file in compared.export(folder / "net.pth", *given, "--format", "onnx", "safetensors"):
        compared.predict(file, origin="as in the exported file")
    compared.evaluate(file, origin="as in the exported file")


def test_a_model_of_ones_own_is_prepared_as_given_and_as_the_file_says_from_then_on(net, tmp_path):
    folder, model = net
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
def test_nothing_is_assumed_of_a_model_that_nothing_is_published_about(tool, argv, given, net, tmp_path):
    folder, _ = net
    argv = [word.replace("images", f"{folder}/images") for word in argv]
    outcome, _ = run_tool(tmp_path, tool, folder / "net.pth", "--model", PLAIN, *argv, *given, code=2)
    assert [flag for flag in FLAGS if flag in refused_tool(outcome, tool)] == (["--std"] if given else FLAGS)


def test_a_dry_run_refuses_weights_of_another_model(net, tmp_path):
    folder, _ = net
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
        assert str(weights) in trained.origin
        evaluated, _ = taken("--test-only", "--model", "efficientnet_b1", "--weights", str(path))
        for args in (trained.args, evaluated):
            assert (args.augmentation.val_resize_size, args.augmentation.val_crop_size) == (
                published.resize_size[0],
                published.crop_size[0],
            )
            assert (args.augmentation.interpolation, args.augmentation.mean) == (
                published.interpolation.value,
                published.mean,
            )


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


def test_weights_that_fit_and_mean_something_else_are_refused(net, tmp_path):
    folder, model = net
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
    return choose_published_options(config.parse_args(["--synthetic", *argv]))


def test_timms_models_are_given_images_as_timms_config_says():
    for name in ("test_vit", "vit_small_patch16_224", "resnet10t", "tf_efficientnet_lite1"):
        args, notes = taken("--model", f"timm/{name}")
        expected = timm.data.resolve_data_config({}, pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
        size = expected["input_size"][-1]
        assert (args.augmentation.mean, args.augmentation.std) == (list(expected["mean"]), list(expected["std"])), name
        sizes = (
            args.augmentation.train_crop_size,
            args.augmentation.val_crop_size,
            args.augmentation.val_resize_size,
            args.augmentation.interpolation,
        )
        assert sizes == (size, size, math.floor(size / expected["crop_pct"]), expected["interpolation"]), name
        assert f"as timm configures timm/{name}" in notes[0]
    args, _ = taken("--model", "timm/vit_base_patch16_clip_224.openai")  # the tag's, and not the default's
    assert args.augmentation.mean == list(timm.get_pretrained_cfg("vit_base_patch16_clip_224.openai").mean) != [0.5] * 3
    check_model(args.replaced(is_launched=False))
    args, _ = taken("--model", "timm/test_vit", "--mean", "0.1", "0.2", "0.3", "--val-crop-size", "96")
    assert (args.augmentation.mean, args.augmentation.std) == ([0.1, 0.2, 0.3], [0.5, 0.5, 0.5])
    assert (args.augmentation.val_crop_size, args.augmentation.val_resize_size, args.augmentation.train_crop_size) == (
        96,
        101,
        224,
    )  # 96 / 0.95
    args, notes = taken("--model", "resnet18", "--std", "1", "1", "1")
    assert (args.augmentation.mean, args.augmentation.std, notes) == ([0.485, 0.456, 0.406], [1.0, 1.0, 1.0], [])


def test_a_resumed_run_takes_the_checkpoints_and_of_before_the_crop_mode_the_centre(capsys):
    squashing = "timm/convnext_tiny.in12k_ft_in1k_384"
    args, notes = taken("--model", squashing)
    assert args.augmentation.crop_mode == "squash"
    assert "--crop-mode squash" in notes[0]
    args = args.replaced(rank=0, world_size=1)
    shards = {"global_batch_size": 32, "num_shards": 1}
    theirs = {name: value for name, value in args.flat().items() if name in BY_NAME}
    theirs["mean"] = [0.25, 0.5, 0.75]
    resumed = config.assign(args, {"args": theirs, "shards": shards})
    assert (resumed.augmentation.crop_mode, resumed.augmentation.mean, resumed.augmentation.std) == (
        "squash",
        [0.25, 0.5, 0.75],
        args.augmentation.std,
    )
    del theirs["crop_mode"]
    assert config.assign(args, {"args": theirs, "shards": shards}).augmentation.crop_mode == "center"
    assert "--crop-mode center: as in the checkpoint" in capsys.readouterr().out


# Of a logit, those of the model are about 3, or of a probability: kernels sum in other orders.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    checkpoint = write_checkpoint(folder)
    forms = ["--format", "weights", "safetensors", "onnx", "torch-export"]
    output = run_tool(folder, "export", checkpoint, *forms, "--output", folder / "out")[1]
    images = write_images(folder / "images", {"train": [2, 1], "val": [2]}, size=(60, 50))  # some lie deeper
    (images / "notes.txt").write_text("no image")
    return checkpoint, folder / "out", output, images, sorted(map(str, images.rglob("*.jpg")))


def test_only_whole_files_are_there_and_the_output_names_each(exported):
    _, out, output, *_ = exported
    names = {path.name for path in out.iterdir()}
    files = json.loads((out / f"{MODEL}.json").read_text())["files"]
    assert names == {*files, f"{MODEL}.json"}
    assert {Path(name).suffix for name in files} == {".pth", ".onnx", ".pt2", ".safetensors"}
    for name, facts in files.items():
        assert facts["sha256"] == hashlib.sha256((out / name).read_bytes()).hexdigest()
    lines = output.splitlines()
    assert [line.split(":")[0] for line in lines] == "preprocessing weights safetensors onnx torch-export".split()
    assert all("largest difference of logits" in line for line in lines[3:5]), output


def test_weights_and_safetensors_load_into_torchvision_bear_their_hash_and_say_what_they_are(exported, tmp_path):
    checkpoint, out, *_ = exported
    path, expected = next(out.glob("*.pth")), plain_model(checkpoint).state_dict()
    assert path.name == f"{MODEL}-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}.pth"
    where = {"model_dir": str(tmp_path), "check_hash": True, "progress": False, "weights_only": True}
    assert differing(torch.hub.load_state_dict_from_url(path.as_uri(), **where), expected) == []
    path = out / f"{MODEL}.safetensors"
    assert differing(safetensors.torch.load_file(path), expected) == []
    with safetensors.safe_open(path, "pt") as file:
        texts = file.metadata()
    assert (texts["model"], json.loads(texts["classes"])) == (MODEL, CLASSES)
    preprocessing = json.loads(texts["preprocessing"])
    assert "as in the checkpoint" in preprocessing.pop("origin")
    assert preprocessing == {
        "resize_size": 40, "crop_size": 32, "interpolation": "bicubic", "backend": "pil",
        "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225],
        "crop_mode": "center", "exif": False, "grey_range": None,
    }  # fmt: skip


def test_onnx_and_programs_take_any_number_of_images_and_need_no_other_file(exported):
    checkpoint, out, *_ = exported
    model, program = plain_model(checkpoint), torch.export.load(out / f"{MODEL}.pt2").module()
    alone = (out / f"{MODEL}.onnx").read_bytes()  # from memory, so that no other file can be read
    session = pytest.importorskip("onnxruntime").InferenceSession(alone, providers=["CPUExecutionProvider"])
    assert [(each.name, each.shape) for each in session.get_inputs()] == [("input", ["batch", 3, 32, 32])]
    assert [(each.name, each.shape) for each in session.get_outputs()] == [("logits", ["batch", 4])]
    for batch_size in (1, 5):
        images = torch.randn(batch_size, 3, 32, 32)
        with torch.no_grad():
            expected, found = model(images), program(images)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
        found = torch.from_numpy(session.run(None, {"input": images.numpy()})[0])
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_an_example_uses_it_without_this_project(exported, tmp_path):
    checkpoint, out, *_, files = exported
    command = [sys.executable, REPOSITORY / "examples" / "onnx_alone.py", f"{out / MODEL}.onnx", files[0]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    name, share = done.stdout.rsplit(maxsplit=1)
    expected, best = plain_probabilities(plain_model(checkpoint), files[0]).max(0)
    assert name == CLASSES[best]
    assert float(share) == pytest.approx(expected.item(), abs=TOLERANCE)


def test_average_lies_beside_the_raw_weights_and_another_checkpoint_is_refused(exported, tmp_path):
    checkpoint, *_ = exported
    for extra in ([], ["--ema"]):
        run_tool(tmp_path, "export", checkpoint, "--format", "weights", "--output", tmp_path / "out", *extra)
    for end, key in (("", "model"), ("-ema", "model_ema")):
        expected = plain_model(checkpoint, key).state_dict()
        found = torch.load(next((tmp_path / "out").glob(f"{MODEL}{end}-????????.pth")), weights_only=True)
        assert differing(found, expected) == []
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    other = write_checkpoint(tmp_path, "other.pth", seed=5)
    outcome, _ = run_tool(tmp_path, "export", other, "--format", "weights", "--output", tmp_path / "out", code=2)
    assert "describes other weights" in refused_tool(outcome, "export")
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def move_a_number():
    save = safetensors.torch.save

    def wrong(tensors, metadata):
        tensors["classifier.1.bias"] = torch.nextafter(tensors["classifier.1.bias"], torch.tensor(9.0))
        return save(tensors, metadata)

    safetensors.torch.save = wrong


def test_a_file_that_is_not_the_checkpoint_gets_no_name(exported, tmp_path):
    argv = [exported[0], "--format", "safetensors", "--output", tmp_path / "out"]
    outcome = run_ranks(module_rank, 1, "scripts.export", argv, (move_a_number,), log_folder=tmp_path)
    assert "read back and classifier.1.bias differs from the checkpoint's" in refused_tool(outcome, "export")
    assert list((tmp_path / "out").iterdir()) == []


def test_json_stands_alone_on_standard_output_and_tables_say_the_same(exported, tmp_path):
    _, out, *_, files = exported
    hostile = tmp_path / "a <b>&, 'c'.jpg"
    hostile.write_bytes(Path(files[0]).read_bytes())
    files, stdout = [str(hostile), *files[::-1]], tmp_path / "stdout"
    argv = [out / f"{MODEL}.pt2", *files, "--json", "--topk", 2, "--csv", tmp_path / "found.csv"]
    done = run_ranks(module_rank, 1, "scripts.predict", argv, (), None, stdout, log_folder=tmp_path).check()
    predictions = json.loads(stdout.read_text())["images"]
    assert [(each["file"], len(each["top"])) for each in predictions] == [(file, 2) for file in files]
    assert all(line.startswith(("predicting: ", "preprocessing: ")) for line in done.output.splitlines()), done.output
    # As a spreadsheet reads it, which knows UTF-8 by its mark.
    content = (tmp_path / "found.csv").read_bytes()
    header, *rows = csv.reader(content.removeprefix("\ufeff".encode()).decode().splitlines())
    assert content.startswith("\ufeff".encode())
    assert header == ["file", "true class", "predicted 1", "share 1", "predicted 2", "share 2"]
    table = run_tool(tmp_path, "predict", *argv[:-5])[1].splitlines()
    for row, line, each in zip(rows, table, predictions, strict=True):
        assert row[:2] == [each["file"], ""]
        expected = [(best["class"], pytest.approx(best["probability"], rel=1e-5)) for best in each["top"]]
        assert [*zip(row[2::2], map(float, row[3::2]), strict=True)] == expected
        assert line.startswith(each["file"])
        assert f"{100 * each['probability']:5.1f}% {each['class']}" in line


def test_published_weights_are_opened_by_name(tmp_path):
    """From torch's cache, where a file of the right name stands for the one of the network."""
    torch.manual_seed(1)
    model = torchvision.models.squeezenet1_1().eval()
    published, cache = torchvision.models.SqueezeNet1_1_Weights.IMAGENET1K_V1, tmp_path / "checkpoints"
    cache.mkdir()
    torch.save(model.state_dict(), cache / os.path.basename(published.url))
    images = write_images(tmp_path / "images", {"val": [1]}, size=(300, 260))
    argv, home = ["squeezenet1_1.IMAGENET1K_V1", images, "--json", "--topk", 1000], (torch.hub.set_dir, str(tmp_path))
    run_ranks(module_rank, 1, "scripts.predict", argv, home, None, tmp_path / "stdout", log_folder=tmp_path).check()
    [prediction] = json.loads((tmp_path / "stdout").read_text())["images"]
    image = published.transforms()(Image.open(prediction["file"]).convert("RGB"))
    with torch.no_grad():
        expected = model(image[None]).double().softmax(dim=1)[0]
    assert prediction["class"] == published.meta["categories"][int(expected.argmax())]
    assert prediction["probability"] == pytest.approx(expected.max().item(), abs=TOLERANCE)


def test_a_list_is_read_and_the_page_begins_with_the_surest_mistake(exported, tmp_path):
    checkpoint, *_, files = exported
    content = torch.load(checkpoint, weights_only=True)
    content["data"]["classes"] = ["class0", "class1", "<c>", "d"]
    torch.save(content, tmp_path / "named.pth")
    shutil.copy(files[0], tmp_path / "1.jpg")
    # The folders of `files` have the names of classes; a list has its own.
    rows = [{"path": files[1], "label": "d"}, {"path": "1.jpg"}, {"path": "1.jpg", "label": "<c>"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    argv = [tmp_path / "named.pth", tmp_path / "a.jsonl", *files[2:], "--json", "--html", tmp_path / "page.html"]
    predictions = json.loads(run_tool(tmp_path, "predict", *argv)[1])["images"]
    assert [each["file"] for each in predictions] == [files[1], *[str(tmp_path / "1.jpg")] * 2, *files[2:]]
    truths = ["d", None, "<c>", *(Path(file).parent.name for file in files[2:])]
    pairs = sorted(zip(predictions, truths, strict=True), key=lambda pair: pair[0]["probability"])
    groups = {"wrong": [], "": [], "right": []}
    for each, truth in pairs:
        mark = "" if truth is None else "right" if each["class"] == truth else "wrong"
        lines = [Path(each["file"]).name, *(f"{top['probability']:.1%} {top['class']}" for top in each["top"])]
        groups[mark].append([mark, *lines, *([f"{mark}: is {truth}"] if truth else [])])
    groups["wrong"].reverse()
    page = (tmp_path / "page.html").read_text().replace("&nbsp;", " ")
    found = re.findall('<figure class="(.*?)">.*?<figcaption>(.*?)</figcaption>', page)
    expected = json.dumps([line for group in groups.values() for line in group]).replace("<c>", "&lt;c&gt;")
    assert json.dumps([[mark, *text.split("<br>")] for mark, text in found]) == expected
    assert all(groups.values())
    assert f"<td>right, of images of a known class<td>{share_text(len(groups['right']), len(pairs) - 1)}<" in page


def test_classes_are_numbers_where_nothing_names_them_and_unreadable_images_are_named(exported, tmp_path):
    checkpoint, *_, images, files = exported
    torch.save(torch.load(checkpoint, weights_only=True)["model"], tmp_path / "bare.pth")
    truncated, empty, pipe = (tmp_path / name for name in ("truncated.jpg", "empty.png", "pipe.jpg"))
    truncated.write_bytes(Path(files[0]).read_bytes()[:300])
    empty.write_bytes(b"")
    os.mkfifo(pipe)  # which nobody writes to
    sizes = ["--val-resize-size", 40, "--val-crop-size", 32, "--interpolation", "bicubic"]
    argv = [truncated, images, empty, pipe, "--json", "--model", MODEL, *sizes]
    outcome, output = run_tool(tmp_path, "predict", tmp_path / "bare.pth", *argv, code=1)
    model, found = plain_model(checkpoint), json.loads(output)["images"]
    for each, file in zip(found, files, strict=True):
        shares, order = plain_probabilities(model, file).sort(descending=True)
        assert [int(top["class"]) for top in each["top"]] == order.tolist()
        assert [top["probability"] for top in each["top"]] == pytest.approx(shares.tolist(), abs=TOLERANCE)
        assert each == {"file": file, **each["top"][0], "top": each["top"]}
    named = [line.split(" cannot be read: ")[0] for line in outcome.output.splitlines() if " cannot be read: " in line]
    assert [Path(name).name for name in named] == [truncated.name, empty.name, pipe.name]


def test_mistakes_are_one_line(exported, tmp_path, monkeypatch, capsys):
    checkpoint, out, _, images, _ = exported
    (tmp_path / "empty").mkdir()
    content = torch.load(checkpoint, weights_only=True)
    torch.save({**content, "data": {"classes": ["a", "b"]}}, tmp_path / "two.pth")
    (tmp_path / "lost.csv").write_text("path\nlost.jpg\n")
    (tmp_path / "wrong.csv").write_text(f"path,label\n{images}/train/class0/image000.jpg,e\n")
    for ending in ("onnx", "pt2", "safetensors"):
        (tmp_path / f"junk.{ending}").write_bytes(b"junk")
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), tmp_path / "foreign.pt2")
    write_checkpoint(tmp_path, "other.pth", args={"model": "no_such_model"})
    content["model"]["classifier.1.bias"][0] = torch.nan
    torch.save(content, tmp_path / "nan.pth")
    monkeypatch.chdir(tmp_path)
    published = ["--output", tmp_path / "out", "--format"]
    for name, argv, words in [
        ("predict", ["gone.pth", images], "gone.pth: no such file"),
        ("predict", [checkpoint, "gone.jpg"], "gone.jpg: no such file or folder"),
        ("predict", [checkpoint, "empty"], "empty holds no images"),
        ("predict", [checkpoint, "lost.csv"], "lost.csv, line 2: lost.jpg is no file; the column path"),
        ("predict", [checkpoint, "wrong.csv"], "label 'e' is no class's name in the checkpoint; correct or"),
        ("predict", ["two.pth", images], "has a classifier for 4 classes, but the data has 2"),
        ("predict", [checkpoint, images, "--device", "meta"], "finds no such device on this machine; try --device cpu"),
        ("predict", [out / f"{MODEL}.onnx", images, "--ema", "--device", "cuda"], "leave out --ema and --device"),
        ("predict", ["junk.onnx", images], "junk.onnx cannot be opened"),
        ("predict", ["junk.pt2", images], "junk.pt2 cannot be opened"),
        ("predict", ["junk.safetensors", images], "junk.safetensors is damaged or no safetensors file"),
        ("predict", ["foreign.pt2", images], "foreign.pt2 does not say how its images are prepared"),
        ("predict", ["nan.pth", images], "nan.pth are not finite: its weights are broken"),
        ("export", ["nan.pth", *published, "weights"], "nan.pth are not finite: its weights are broken"),
        ("export", [checkpoint, *published, "onxx"], "onxx"),
        ("export", ["other.pth", *published, "onnx"], "no_such_model: not a torchvision classification model"),
    ]:
        outcome, output = run_tool(tmp_path, name, *argv, code=5 if "nan" in str(argv[0]) else 2)
        assert words in refused_tool(outcome, name, outcome.codes[0]), outcome.output
        assert output == "" or name == "export"
    assert not list(tmp_path.glob("out/*"))


def test_damaged_description_is_one_line(exported, tmp_path):
    _, out, _, images, _ = exported
    path = out / f"{MODEL}.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        texts, weights = file.metadata(), safetensors.torch.load_file(path)
    preprocessing = json.loads(texts["preprocessing"])
    for change in (
        {"preprocessing": json.dumps({**preprocessing, "crop_size": -1})},
        {"preprocessing": json.dumps({**preprocessing, "mean": [0, 0]})},
        {"preprocessing": "{"},
        {"classes": '["one"]'},
        {"num_classes": "many"},
        {"model": "no\nmodel"},
    ):
        path = tmp_path / "damaged.safetensors"
        safetensors.torch.save_file(weights, path, {**texts, **change})
        outcome, _ = run_tool(tmp_path, "predict", path, images, code=2)
        assert "its description is damaged" in refused_tool(outcome, "predict")
