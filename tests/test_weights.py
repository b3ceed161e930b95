"""Files of weights: as torchvision, pytorch/examples, timm, the hub and safetensors have them, and of other sizes."""

import argparse
import gzip
import io
import os
import pickle
import random
import types
import zipfile

import huggingface_hub
import numpy
import pytest
import timm
import torch
import torchvision
from safetensors.torch import save, save_file
from timm.data.readers.reader_image_folder import find_images_and_targets
from timm.layers import resample_abs_pos_embed, resize_rel_pos_bias_table
from timm.utils import CheckpointSaver, ModelEmaV3, natural_key
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision.models.vision_transformer import interpolate_embeddings

import utils
from checkpointing.archive import read_checkpoint
from checkpointing.class_order import find_disorder
from checkpointing.first_weights import start_weights
from checkpointing.weights import fetch_from_hub, load_weights
from errors import UserError
from models.build import build_model
from models.trained import load_evaluated
from scripts.trained import open_trained
from settings import config
from tests.endings import differing
from tests.images import write_images
from tests.ranks import run_ranks, tool_rank
from tests.started import SMALL_ANYWHERE, Hostile, run_train


class Wrapped(nn.Module):
    """Names its model as DistributedDataParallel and DataParallel do."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def small_model(seed=0):
    torch.manual_seed(seed)
    return torchvision.models.mnasnet0_5(num_classes=3)  # which notes the version of its state dict


def averaged(model):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    for each in (model, small_model(1)):
        average.update_parameters(each)
    return average


NAMESPACE = argparse.Namespace(model="mnasnet0_5", lr=0.1, layers=[1, 2], data_path="/data", device=None)
SCRIPTS = {
    "a bare state dict": lambda model: model.state_dict(),
    "DDP": lambda model: Wrapped(model).state_dict(),
    "compiled": lambda model: torch.compile(model).state_dict(),
    "compiled in DDP": lambda model: Wrapped(torch.compile(model)).state_dict(),
    "DDP, compiled": lambda model: torch.compile(Wrapped(model)).state_dict(),
    "a bare average": lambda model: AveragedModel(model).state_dict(),
    "PyTorch's tutorial": lambda model: {"epoch": 3, "model_state_dict": model.state_dict(), "loss": torch.tensor(0.4)},
    "Lightning": lambda model: {
        "pytorch-lightning_version": "2.5.0", "state_dict": nn.ModuleDict({"model": torch.compile(model)}).state_dict(),
    },
    "torchvision": lambda model: {
        "model": model.state_dict(), "optimizer": torch.optim.SGD(model.parameters(), 0.1).state_dict(),
        "lr_scheduler": {"last_epoch": 3}, "epoch": 3, "args": NAMESPACE, "model_ema": averaged(model).state_dict(),
    },
    "pytorch/examples": lambda model: {
        "epoch": 4, "arch": "mnasnet0_5", "state_dict": Wrapped(model).state_dict(), "best_acc1": torch.tensor(0.5),
        "optimizer": torch.optim.SGD(model.parameters(), 0.1).state_dict(), "scheduler": {"last_epoch": 4},
    },
    "timm": lambda model: {
        "epoch": 4, "arch": "mnasnet0_5", "state_dict": torch.compile(model).state_dict(), "version": 2,
        "args": NAMESPACE, "state_dict_ema": averaged(model).module.state_dict(), "metric": 70.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("script", SCRIPTS)
def test_files_of_other_scripts_give_the_models_own_weights_and_their_average(tmp_path, script, is_old):
    model, path = small_model(), tmp_path / "w.pth"
    torch.save(SCRIPTS[script](model), path, _use_new_zipfile_serialization=not is_old)
    before = set(torch.serialization.get_safe_globals())
    weights = load_weights(path)
    assert set(torch.serialization.get_safe_globals()) == before
    expected = model.state_dict()
    assert list(weights) == list(expected)
    assert differing(weights, expected) == []
    assert weights._metadata[""] == expected._metadata[""]
    name = "timm/mnasnet0_5" if script == "timm" else "mnasnet0_5"
    assert weights.kind.startswith(f"the raw weights of {name}") == (script in list(SCRIPTS)[-3:])
    assert ("which --ema selects" in weights.kind) == (script in ("torchvision", "timm"))
    if script in ("torchvision", "timm"):
        average, other = load_weights(path, is_average=True), small_model(1).state_dict()["layers.0.weight"]
        torch.testing.assert_close(average["layers.0.weight"], (expected["layers.0.weight"] + other) / 2)
        assert list(average) == list(expected)
        assert average.kind == f"the average of {name}"


def test_a_part_in_data_parallel_has_its_own_names(tmp_path):
    with torch.device("meta"):
        names, model = list(torchvision.models.alexnet().state_dict()), torchvision.models.alexnet(num_classes=3)
    model.features = Wrapped(model.features)
    state = dict.fromkeys(model.state_dict(), torch.zeros(1))  # names are enough
    torch.save({"arch": "alexnet", "state_dict": state}, tmp_path / "w.pth")
    weights = load_weights(tmp_path / "w.pth")
    assert list(weights) == names
    assert "alexnet" in weights.kind
    assert "timm" not in weights.kind


class Thing:
    """A class of whoever wrote the file."""


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("place", [
    lambda hostile: argparse.Namespace(args=argparse.Namespace(model=[hostile])), lambda hostile: hostile,
])  # fmt: skip
def test_code_beside_or_in_a_namespace_is_refused(tmp_path, place, is_old):
    for culprit in (Hostile(tmp_path / "executed"), Thing()):
        content = {"model": small_model().state_dict(), "args": place(culprit)}
        torch.save(content, tmp_path / "w.pth", _use_new_zipfile_serialization=not is_old)
        with pytest.raises(UserError, match="contains code"):
            load_weights(tmp_path / "w.pth")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(("content", "words"), [
    ({"model": argparse.Namespace(weight=torch.zeros(1))}, "holds no weights as `model`"),
    ({"model": {"weight": argparse.Namespace()}}, "holds no weights as `model`"),
    (argparse.Namespace(model={}), "holds a Namespace, not a checkpoint"),
    ({"epoch": 3}, "holds no weights: expected a state dict, or a checkpoint with one as model or state_dict"),
    ({"state_dict": {"a": torch.ones(1)}, "best": numpy.float64(0.5)}, r"numpy objects \(.* save float\(x\) or"),
    ({"state_dict": {"a": torch.ones(1)}, "curve": numpy.arange(3)}, r"numpy objects \(numpy.* or x.tolist\(\)"),
    ({"module.a": torch.zeros(1), "a": torch.ones(1)}, "holds the same weights twice"),
])  # fmt: skip
def test_a_file_without_weights_is_refused(tmp_path, content, words):
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(UserError, match=words):
        load_weights(tmp_path / "w.pth")


def zipped(*names):
    with zipfile.ZipFile(stream := io.BytesIO(), "w") as archive:
        for name in names:
            archive.writestr(name, "weights")
    return stream.getvalue()


OTHER_FILES = {
    "it is empty": b"",
    "not a torch.save archive": b"hello\n",
    "contains code": pickle.dumps(os.system, protocol=2),
    "a web page": b"\n<!DOCTYPE html><html>Too many requests. Try later.</html>",
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "a zip archive of m.pth; unpack it": zipped("m.pth"),
    "a zip archive of config.json, model.weights.h5": zipped("config.json", "model.weights.h5", "of.keras"),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "ONNX": b"\x08\x07\x12\x07pytorch\x1a\x052.0.1" + bytes(100),
    "safetensors; name it so": save({"weight": torch.ones(1)}),
    "gzip; unpack it": gzip.compress(b"weights"),
    "a pickle not of torch.save": pickle.dumps({"weight": [1.0]}),
    "it begins with b'PAR1": b"PAR1" + bytes(100),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", OTHER_FILES)
def test_a_file_of_another_kind_is_called_by_its_first_bytes_at_every_door(kind, tmp_path):
    path, ours = tmp_path / "w.pth", tmp_path / "w.safetensors"
    for each in (path, ours):
        each.write_bytes(OTHER_FILES[kind])
    doors = [lambda: load_weights(path), lambda: open_trained(str(path))]
    if not kind.startswith(("a zip", "safetensors", "contains", "not a torch")):
        doors += [lambda: read_checkpoint(path, "x"), lambda: load_weights(ours)]
    for read in doors:
        with pytest.raises(UserError, match=f"{kind}|begins with b.*{kind}"):
            read()


def test_an_order_is_doubtful_where_timms_is_another():
    for seed in range(300):
        names = sorted({"".join(random.Random(3 * seed + each).choices("aB1029-_", k=3)) for each in range(3)})
        found = [bool(find_disorder(script, names)) for script in ("timm", "another", "torchvision")]
        assert found == [sorted(names, key=natural_key) != names] * 2 + [False]


@pytest.mark.parametrize("name", ["timm.pth", "w.safetensors", "torchvision.pth"])
def test_classes_without_names_are_in_the_order_of_the_script_or_refused(tmp_path, name):
    """A model that always answers its class 1 hits folder 2 if it is timm's, and folder 10 if it is torchvision's."""
    images, path = write_images(tmp_path, {split: [2, 6, 2, 1, 1] for split in ("train", "val")}), tmp_path / name
    folders = [images / split / f"class{number}" for split in ("train", "val") for number in range(5)]
    folders = [each.rename(each.with_name(new)) for each, new in zip(folders, ["1", "2", "10", "ant", "Cat"] * 2)]  # noqa: B905
    model, args = timm.create_model("test_resnet", num_classes=5), argparse.Namespace(model="test_resnet", img_size=32)
    model.fc.weight.data[:], model.fc.bias.data[:] = 0, 9 * torch.eye(5)[1]
    CheckpointSaver(model, torch.optim.SGD(model.parameters()), args=args)._save(tmp_path / "timm.pth", 0)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    torch.save({"model": model.state_dict()}, tmp_path / "torchvision.pth")
    by_torchvision = 100 * torchvision.datasets.ImageFolder(images / "val").targets.count(1) / 12
    by_timm = 100 * [label for _, label in find_images_and_targets(str(images / "val"))[0]].count(1) / 12
    argv = ["--data-path", images, *SMALL_ANYWHERE, "--batch-size", 4, "--epochs", 1, "--output-dir", tmp_path / "out"]
    tested = [*argv, "--test-only", "--weights", path]
    tool = [path, "--set", f"val={images / 'val'}", *SMALL_ANYWHERE[-2:], "--val-crop-size=32", "--val-resize-size=32"]

    def evaluations():
        yield run_train(tmp_path, *tested)
        yield run_ranks(
            tool_rank, 1, "evaluate", [*tool, "--device=cpu", "--workers=0"], None, None, log_folder=tmp_path
        )

    if name != "torchvision.pth":
        refusals = [*evaluations()]
        if name == "timm.pth":
            refusals += [run_train(tmp_path, *argv, word, path) for word in ("--weights", "--teacher")]
        assert all(each.codes == [2] and "class 1 is 2 in the checkpoint, 10 now" in each.output for each in refusals)
        allowed = run_train(tmp_path, *tested, "--allow-change", "data").check().output
        assert f"Acc@1 {by_torchvision:.3f}" in allowed
        for number, folder in enumerate(folders):
            folder.rename(folder.with_name(f"{number % 5}-{folder.name}"))
    expected = by_torchvision if name == "torchvision.pth" else by_timm
    assert all(f"{expected:.3f}" in each.check().output for each in evaluations())


@pytest.mark.parametrize("names", [["a", "b" * 256, "c"], ["a", 1, "c"], "abc", ["a", "b", "c"]])
def test_names_that_no_class_can_have_are_not_taken(tmp_path, names):
    content = {"model": small_model().state_dict(), "args": {"model": "mnasnet0_5"}, "data": {"classes": names}}
    torch.save(content, tmp_path / "w.pth")
    assert load_weights(tmp_path / "w.pth").classes == (names if names == ["a", "b", "c"] else None)


# What averaging and storing give is compared with torchvision's own in tests/test_torchvision_script.py.
@pytest.mark.parametrize(("content", "error", "words"), [
    ({"model": {"weight": torch.zeros(2), "other": torch.zeros(1)}}, KeyError, "model.pth: half, other"),
    ({"model": {"weight": torch.zeros(3), "half": torch.ones(1)}}, KeyError, ": weight"),
    ({"state_dict": {}}, UserError, "no weights as `model`"), ({"model": Thing()}, UserError, "contains code"),
    *(({"model": {"weight": odd, "half": torch.ones(1)}}, UserError, "other.pth: weight is .*, and cannot be averaged")
        for odd in (torch.full([2], torch.nan), torch.zeros(2) * 1j, torch.zeros(2).int(), torch.zeros(2).to("meta"))),
])  # fmt: skip
def test_checkpoints_that_do_not_fit_are_not_averaged(tmp_path, content, error, words):
    torch.save({"model": {"weight": torch.zeros(2), "half": torch.ones(1).half()}}, tmp_path / "model.pth")
    torch.save(content, tmp_path / "other.pth")
    with pytest.raises(error, match=words):
        utils.average_checkpoints([tmp_path / "model.pth", tmp_path / "other.pth"])
    with pytest.raises(ValueError, match="no checkpoints"):
        utils.average_checkpoints([])
    torch.save({"model": {}}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="holds no weights as `model`"):
        utils.store_model_weights(small_model(), tmp_path / "other.pth")


def test_a_safetensors_file_is_a_state_dict_and_a_damaged_one_is_refused(tmp_path):
    model, path = small_model(), tmp_path / "w.safetensors"
    save_file(model.state_dict(), path, metadata={"format": "pt"})
    weights = load_weights(path)
    assert differing(weights, model.state_dict()) == []
    with pytest.raises(UserError, match=r"holds no average \(model_ema or state_dict_ema\); remove --ema"):
        load_weights(path, is_average=True)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"\xff" * len(whole)):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"^[^\n]*is damaged or no safetensors file[^\n]*$"):
            load_weights(path)


def test_a_name_of_the_hub_means_a_file_there(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    checkpoint = {"model": {"weight": torch.tensor([1.0])}, "model_ema": {"module.weight": torch.tensor([2.0])}}
    home = tmp_path / "models--someone--something"  # as the hub's package caches a repository
    files = home / "snapshots" / ("1" * 40)
    files.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(files.name)
    save_file({"weight": torch.tensor([3.0])}, files / "model.safetensors")
    torch.save(checkpoint, files / "best.pth")
    assert load_weights(fetch_from_hub("hf-hub:someone/something"))["weight"] == 3
    assert load_weights(fetch_from_hub("hf-hub:someone/something/best.pth"), is_average=True)["weight"] == 2
    with pytest.raises(UserError, match=r"hf-hub:someone/nothing: cannot fetch model\.safetensors: "):
        fetch_from_hub("hf-hub:someone/nothing")


def test_a_start_from_weights_says_what_was_another_in_their_training(tmp_path, capsys):
    theirs = {"model": "mnasnet0_5", "mean": [0.25, 0.5, 0.75], "std": [0.229, 0.224, 0.225]}
    torch.save({"model": small_model().state_dict(), "args": theirs}, tmp_path / "w.pth")
    argv = ["--synthetic", "--model", "mnasnet0_5", "--weights", str(tmp_path / "w.pth")]
    for more, said in ([], ["--mean: 0.25 0.5 0.75; give it to keep it"]), (["--mean", "0.1", "0.2", "0.3"], []):
        start_weights(config.parse_args([*argv, *more]), types.SimpleNamespace(classes=["a", "b", "c"]))
        lines = capsys.readouterr().out.splitlines()[1:]
        assert [line.rpartition("trained with another ")[2] for line in lines] == said


@pytest.mark.parametrize(("name", "size", "kwargs"), [
    ("resnet18", 64, {}), ("vit_tiny_patch16_224", None, {"depth": 1}),
])  # fmt: skip
def test_a_checkpoint_of_timms_script_is_of_timms_model_for_tools_and_runs(name, size, kwargs, tmp_path):
    """As timm's own saver writes it, of options as its script has them."""
    torch.manual_seed(0)
    model, path = timm.create_model(name, num_classes=3, **kwargs), tmp_path / "last.pth.tar"
    average, optimizer = ModelEmaV3(model, decay=0.5), torch.optim.SGD(model.parameters(), 0.1)
    with torch.no_grad():
        for parameter in average.module.parameters():
            parameter.mul_(0.5)
    args = argparse.Namespace(
        model=name, model_kwargs=kwargs, img_size=size, input_size=None, crop_pct=None, mean=None, std=None,
        interpolation="", gp=None, bn_eps=None, bn_momentum=None, opt="sgd", num_classes=3, drop=0.0, amp=False,
    )  # fmt: skip
    saver = CheckpointSaver(model, optimizer, args=args, model_ema=average, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(3, metric=60.0)
    known = model.default_cfg
    size = size or known["input_size"][-1]
    image = torch.randn(2, 3, size, size)
    for is_average, expected in ((False, model.eval()), (True, average.module.eval())):
        trained = open_trained(str(path), is_average=is_average)
        args = trained.args
        assert (args.model.model, args.augmentation.mean, args.augmentation.interpolation) == (
            f"timm/{name}",
            [*known["mean"]],
            known["interpolation"],
        )
        assert (args.augmentation.val_crop_size, args.augmentation.val_resize_size) == (
            size,
            int(size / known["crop_pct"]),
        )
        assert torch.equal(trained.model(image), expected(image))
    with pytest.raises(UserError, match=f"{path.name} holds the raw weights of timm/{name}"):
        open_trained(str(path), model="resnet18")
    assert load_weights(path).kind == f"the raw weights of timm/{name}, not their average, which --ema selects"
    argv = ["--synthetic", "--model", f"timm/{name}", "--weights", str(path), "--model-kwargs"]
    args = config.parse_args([*argv, *(f"{key}={value}" for key, value in kwargs.items())])
    started = build_model(args, 3, load_weights(path, is_average=True)).state_dict()
    assert differing(started, average.module.state_dict()) == []
    # Without its options timm's saver writes the name of the class.
    CheckpointSaver(model, optimizer)._save(path, 0)
    with pytest.raises(UserError, match="does not name its model; give --model NAME"):
        open_trained(str(path))


def noisy(model):
    """A model's state dict, of no zeros: some embeddings begin as zeros."""
    values = model.state_dict().items()
    return {name: torch.rand(value.shape) if value.is_floating_point() else value for name, value in values}


DEIT, SWIN = "deit_tiny_distilled_patch16_224", "swin_tiny_patch4_window7_224"
SWIN_KWARGS = {"depths": (1, 1, 1, 1), "embed_dim": 24, "num_heads": (1, 1, 1, 1)}


def vit_of_64():
    with torch.device("meta"):  # the values follow
        return torchvision.models.VisionTransformer(64, 32, 12, 12, 768, 3072, num_classes=3)


def by_torchvision(name, old, shape):
    size = 32 * round((shape[1] - 1) ** 0.5)
    return interpolate_embeddings(size, 32, {"encoder.pos_embedding": old})["encoder.pos_embedding"]


def by_timm(name, old, shape):
    if "table" not in name:
        return resample_abs_pos_embed(old, [round((shape[1] - 2) ** 0.5)] * 2, num_prefix_tokens=2)
    side = round(shape[0] ** 0.5 + 1) // 2
    return resize_rel_pos_bias_table(old, new_window_size=(side, side), new_bias_shape=shape)


@pytest.mark.parametrize(("name", "build", "size", "kwargs", "resize"), [
    ("vit_b_32", vit_of_64, 96, {}, by_torchvision),
    (f"timm/{DEIT}", lambda: timm.create_model(DEIT, num_classes=3, depth=1), 64, {"depth": 1}, by_timm),
    (f"timm/{SWIN}", lambda: timm.create_model(SWIN, num_classes=3, **SWIN_KWARGS), 128, SWIN_KWARGS, by_timm),
])  # fmt: skip
def test_positions_are_resized_as_torchvision_and_timm_do(name, build, size, kwargs, resize, capsys):
    """Those of `--weights`, and those of a checkpoint that is evaluated and of its average."""
    weights, argv = noisy(build()), f"--synthetic --model {name} --weights w.pth --train-crop-size {size}".split()
    kwargs = [f"{key}={value}" for key, value in kwargs.items()]
    args = config.parse_args([*argv, f"--val-crop-size={size}", "--model-kwargs", *kwargs])
    model = build_model(args, 3, dict(weights))
    found = {"weights": model.state_dict()}
    average = {f"module.{key}": -value if value.is_floating_point() else value for key, value in weights.items()}
    state = {"model": weights, "model_ema": {"n_averaged": torch.tensor(3), **average}}
    model_ema = load_evaluated(args.replaced(test_only=True, resume="c.pth"), model, state)
    found |= {"checkpoint": model.state_dict(), "average": model_ema.module.state_dict()}
    resized = [key for key, value in found["weights"].items() if value.shape != weights[key].shape]
    assert resized
    for kind, values in found.items():
        for key, value in values.items():
            sign = -1 if kind == "average" and value.is_floating_point() else 1
            if key in resized:
                expected = resize(key, sign * weights[key], value.shape)
                torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)
            else:
                assert torch.equal(value, sign * weights[key])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": trained at another image size; resized ")[0] for line in lines] == [
        "--weights w.pth", "--resume c.pth", "the average of --resume c.pth",
    ]  # fmt: skip
    assert f"resized {resized[0]}" in lines[0]
