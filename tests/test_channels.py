"""Grey images, and images with alpha: Pillow, torchvision, timm and numpy are the oracles."""

import io
import json
import re
from functools import partial

import numpy
import pytest
import timm
import torch
import torchvision
from PIL import Image
from timm.data.loader import adapt_to_chs
from timm.models import adapt_input_conv
from torchvision import transforms

from errors import BadImageError, UserError
from loading.decode import Decoding, ImageFile, decode_plainly
from models.build import build_model
from presets import ClassificationPresetEval, ClassificationPresetTrain
from settings import config
from tests.exports import run_tool
from tests.images import FILES, encoded, picture, write_images
from tests.runs import FLAG, Runs
from tests.started import SMALL, refused, run_train
from tests.test_modes import FOUR, GREY, GREY16, PALETTE, ROWS, png

MODES = {1: "L", 4: "RGBA"}
ALPHA = {
    "faint": encoded(Image.fromarray(numpy.dstack([picture(), picture(mode="L").rotate(180)])), "PNG"),
    "palette with alpha": encoded(Image.fromarray(PALETTE).convert("P"), "PNG", transparency=bytes(range(0, 256, 2))),
    "transparent colour": png(FOUR[..., :3], 2, b"\0\x10" * 3, bits=8),
}
PHOTOGRAPHS = {name: payload for name, payload in {**FILES, **ALPHA}.items() if name != "one row"}  # too small to crop


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")  # Pillow's, about its own conversion here
@pytest.mark.parametrize("name", PHOTOGRAPHS)
@pytest.mark.parametrize("in_chans", MODES)
def test_pixels_are_torchvisions_of_pillows_conversion(name, in_chans):
    payload = PHOTOGRAPHS[name]
    image = Image.open(io.BytesIO(payload)).convert(MODES[in_chans])
    resized, drawn = partial(ClassificationPresetEval, resize_size=31), ClassificationPresetTrain
    steps = {resized: [transforms.Resize(31), transforms.CenterCrop(24)]}
    steps |= {drawn: [transforms.RandomResizedCrop(24), transforms.RandomHorizontalFlip()]}
    for build, plain in steps.items():
        for backend, most in (("pil", 0), (None, 2)):  # grey levels
            torch.manual_seed(3)
            found = build(crop_size=24, backend=backend, in_chans=in_chans).load(payload)
            torch.manual_seed(3)
            expected = transforms.Compose([*plain, transforms.PILToTensor()])(image)
            assert found.shape == expected.shape == (in_chans, 24, 24)
            assert (found.int() - expected.int()).abs().max() <= most
    box = ImageFile(payload, Decoding(MODES[in_chans])).decode(3, 5, 20, 20)
    assert torch.equal(box, transforms.functional.pil_to_tensor(image)[:, 3:23, 5:25])


def test_files_of_every_mode_become_grey_and_rgba():
    for name, row in ROWS.items():
        for payload, expected in row:
            if isinstance(expected, str) or "I;16" in name:
                continue  # refused, and not as Pillow converts it
            images = (decode_plainly(payload, how=Decoding(mode)) for mode in ("RGB", "L", "RGBA"))
            rgb, grey, rgba = map(numpy.asarray, images)
            assert numpy.array_equal(rgb, rgba[..., :3]), name
            assert "alpha" in name or "transparent" in name or "RGBa" in name or rgba[..., 3].min() == 255, name
            # That of ITU-R 601-2, as Pillow's page has it; Y itself may be of a colour outside of RGB.
            wanted = GREY if name == "`YCbCr`" else rgb @ numpy.array([0.299, 0.587, 0.114])
            assert numpy.abs(grey - wanted).max() <= 1, name
    assert numpy.array_equal(decode_plainly(encoded(Image.fromarray(GREY16), "PNG"), how=Decoding("L")), GREY16 >> 8)
    # Pillow would compare such a colour with pixels of 8 bits.
    for keyed in (png(GREY16, 0, b"\x10\0"), png(FOUR.astype(numpy.uint16)[..., :3] * 257, 2, b"\0\x10" * 3)):
        decode_plainly(keyed, how=Decoding("L"))
        with pytest.raises(BadImageError, match="transparent colour has 16 bits"):
            decode_plainly(keyed, how=Decoding("RGBA"))


def resolved(*words):
    return config.parse_args([*"--synthetic 8 --device cpu --train-crop-size 32 --val-crop-size 32".split(), *words])


def test_mean_and_deviation_are_by_default_those_of_timm():
    for in_chans in MODES:
        args = resolved("--in-chans", str(in_chans))
        imagenets = config.IMAGENET_MEAN, config.IMAGENET_STD
        assert [tuple(args.mean), tuple(args.std)] == [adapt_to_chs(values, in_chans) for values in imagenets]


@pytest.mark.parametrize(("words", "message"), [
    ("--in-chans 1 --mean 0.4 0.5 0.6", "--mean has 3 values, but --in-chans is 1"),
    ("--std 0.5", "--std has 1 value, but --in-chans is 3"),
    ("--in-chans 1 --auto-augment ra", "remove --auto-augment"),
    ("--in-chans 4 --auto-augment timm/rand-m7", "remove --auto-augment"),
    ("--in-chans 1 --color-jitter 0.4", "remove --color-jitter"),
    ("--in-chans 1 --model googlenet --weights IMAGENET1K_V1", "rescales the three channels"),
    ("--in-chans 1 --model timm/tiny_test --model-kwargs in_chans=3", "set by another option"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(words, message):
    with pytest.raises(UserError, match=re.escape(message)):
        build_model(resolved(*words.split()), 5)


def test_first_layers_are_adapted_as_in_timm(tmp_path, capsys):
    for name in ("timm/tiny_test", "squeezenet1_1"):
        make = timm.create_model if "/" in name else torchvision.models.get_model
        weights = make(name.rpartition("/")[2]).state_dict()
        first = next(iter(weights))
        for in_chans in MODES:
            args = resolved("--model", name, "--in-chans", str(in_chans))
            found = build_model(args, 1000, weights, "x").state_dict()
            assert f"x: {first} of 3 channels is" in capsys.readouterr().out
            assert torch.equal(found[first], adapt_input_conv(in_chans, weights[first].clone()))
            assert all(torch.equal(each, found[key]) for key, each in weights.items() if key != first)
            with pytest.raises(UserError, match="x is for 3 channels, but --in-chans is"):
                build_model(args.replaced(test_only=True), 1000, weights, "x")
        back = build_model(resolved("--model", name), 1000, found, "x").state_dict()
        assert torch.equal(back[first], adapt_input_conv(3, found[first].clone(), base_chans=4))
    (tmp_path / "net.py").write_text("def a(num_classes):\n    pass\n")
    with pytest.raises(UserError, match="unexpected keyword argument 'in_chans'"):
        build_model(resolved("--model", f"{tmp_path / 'net.py'}:a", "--in-chans", "1"), 5)


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    options = "--in-chans 1 --epochs 2 --checkpoint-steps 1 --random-erase 0.3 --mixup-alpha 1".split()
    runs = Runs(image_folder, tmp_path_factory.mktemp("grey"), [*SMALL, *options])
    runs.run("undisturbed", 2, FLAG).check()
    return runs


def test_evaluation_and_tools_take_the_channels_from_the_checkpoint(runs, tmp_path):
    out, images = runs.folder / "undisturbed", runs.images
    pixels = numpy.asarray(Image.open(out / "picture-first-batch-00000000.png"))[30:60, 10:80].astype(int)
    assert numpy.ptp(pixels, axis=2).max() == 0 < numpy.ptp(pixels)  # the first image, grey and not empty
    line = [each for each in (out / "log.txt").read_text().splitlines() if each.startswith("Test: Acc@1")][-1]
    argv = ["--data-path", images, "--device", "cpu", "--workers", 0, "--test-only"]
    for words in (["--resume", out / "checkpoint.pth"], ["--weights", out / "checkpoint.pth", *SMALL]):
        assert line in run_train(tmp_path, *argv, *words).check().output
    refused(run_train(tmp_path, *argv, *SMALL, "--weights", out / "best.pth", "--in-chans", 3), "give --in-chans 1")
    run_tool(tmp_path, "export", out / "best.pth", "--format", "weights", "onnx", "--output", tmp_path / "out")
    shares = []
    for file in [out / "best.pth", *(file for file in (tmp_path / "out").iterdir() if file.suffix != ".json")]:
        _, text = run_tool(tmp_path, "predict", file, images / "val", "--json")
        shares += [[each["probability"] for each in json.loads(text)["images"]]]
    assert shares == [pytest.approx(shares[0], abs=1e-4)] * 3  # the tolerance of an export


def test_the_statistics_of_the_training_images(tmp_path):
    train = write_images(tmp_path / "images", {"train": [3, 2], "val": [1, 1]}) / "train"
    (train / "class0" / "faint.png").write_bytes(ALPHA["faint"])
    for in_chans, mode in {**MODES, 3: "RGB"}.items():
        images = [Image.open(path).convert(mode) for path in train.rglob("*.*")]
        values = [numpy.asarray(image, float).reshape(-1, in_chans) / 255 for image in images]
        mean = numpy.mean([each.mean(axis=0) for each in values], axis=0)
        std = numpy.sqrt(numpy.mean([((each - mean) ** 2).mean(axis=0) for each in values], axis=0))
        _, text = run_tool(tmp_path, "check", train.parent, "--json", tmp_path / "r.json", "--statistics", in_chans)
        found = json.loads((tmp_path / "r.json").read_text())["splits"]["train"]
        assert (found["mean"], found["std"]) == (pytest.approx(mean.tolist()), pytest.approx(std.tolist()))
        words = (" ".join(f"{value:.4f}" for value in each) for each in (mean, std))
        assert "--mean {} --std {} (".format(*words) in text
