"""SECURITY.md's promises about the code itself: read from its syntax, so that a new module is held to them too."""

import ast
import os
import shutil
import types

import pytest
import torch
from PIL import Image

import train
from checkpointing.archive import load_checkpoint
from checkpointing.weights import load_weights
from errors import UserError
from tests.images import write_images
from tests.ranks import REPOSITORY, run_ranks, train_rank
from tests.started import SMALL, Hostile

FOLDERS = {path.parent for path in REPOSITORY.glob("*/__init__.py")} - {REPOSITORY / "tests"} | {REPOSITORY}
SOURCES = sorted(path for folder in FOLDERS for path in folder.glob("*.py"))

FORBIDDEN_MODULES = {
    "PIL.EpsImagePlugin", "PIL.ImageGrab", "PIL.ImageShow",
    "cloudpickle", "dill", "ftplib", "joblib", "marshal", "pickle", "requests", "shelve", "smtplib", "telnetlib",
    "torch.distributed.checkpoint", "torch.hub", "urllib", "urllib3", "http", "yaml",
}  # fmt: skip

# By the last part of the name, whatever it is called on.
FORBIDDEN_CALLS = {
    "add_safe_globals", "all_gather_object", "broadcast_object_list", "create_connection", "extract", "extractall",
    "gather_object", "load_state_dict_from_url", "popen", "recv_object_list", "safe_globals", "scatter_object_list",
    "send_object_list", "system", "unpack_archive", "urlopen", "urlretrieve",
}  # fmt: skip

# Such calls that are made, and the one place of each.
PLACES = {
    # The one class beyond plain data that a file of weights may hold: it has attributes and no code.
    "torch.serialization.safe_globals([argparse.Namespace])": "archive.py",
}


def dotted(node):
    """Return the dotted name of an expression, or what is left of it."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def constant(call, name):
    """Return the constant that a call passes by name, or None."""
    return next((k.value.value for k in call.keywords if k.arg == name and isinstance(k.value, ast.Constant)), None)


def keywords(call):
    """Return the names by which a call passes something."""
    return {keyword.arg for keyword in call.keywords}


# What opens an image in any format that Pillow knows, unless it is told which ones, or how.
OPENERS = (".Image.open", ".ImageFolder", ".DatasetFolder", ".pil_loader", ".default_loader")


def opens_any_format(tree):
    """Return where images may be opened in a format that nobody named."""
    nodes = list(ast.walk(tree))
    told = {id(node.func) for node in nodes if isinstance(node, ast.Call) and ({"formats", "loader"} & keywords(node))}
    found = [f".{dotted(node)}" for node in nodes if id(node) not in told]
    found += [
        f".{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    return [name for name in found if name.endswith(OPENERS)]


def offences(tree):
    """Return what of a module's syntax is not promised away."""
    found = opens_any_format(tree)
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [dotted(node)]
        found += [
            name
            for name in names
            if any(name == module or name.startswith(f"{module}.") for module in FORBIDDEN_MODULES)
        ]
        if isinstance(node, ast.Call):
            found += call_offences(node)
    return found


def call_offences(call):
    name = dotted(call.func)
    last = name.split(".")[-1]
    found = []
    if name in ("eval", "exec", "compile", "__import__"):
        found.append(f"{name}()")
    if last in FORBIDDEN_CALLS and ast.unparse(call) not in PLACES:
        found.append(f"{name}()")
    if name == "torch.load" and constant(call, "weights_only") is not True:
        found.append("torch.load() without weights_only=True")
    if constant(call, "allow_pickle") is True:
        found.append(f"{name}(allow_pickle=True)")
    if constant(call, "shell") is True:
        found.append(f"{name}(shell=True)")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_module_unpickles_extracts_evaluates_or_downloads(path):
    assert offences(ast.parse(path.read_text())) == []


OFFENCES = """
import pickle
from pickle import loads
import torch.distributed.checkpoint as dcp
from torch.distributed import checkpoint
torch.distributed.checkpoint.load(state)
torch.load(path)
torch.load(path, weights_only=False)
torch.serialization.add_safe_globals([Namespace])
torch.serialization.safe_globals([argparse.Namespace, Thing])
numpy.load(path, allow_pickle=True)
eval(text)
subprocess.run(text, shell=True)
os.system(text)
archive.extractall(folder)
dist.broadcast_object_list(values)
from urllib.request import urlopen
torch.hub.load_state_dict_from_url(url)
Image.open(file)
open_image = Image.open
from PIL.Image import open
from PIL import EpsImagePlugin
datasets.ImageFolder(folder, transform)
from torchvision.datasets.folder import pil_loader
"""


@pytest.mark.parametrize("line", OFFENCES.split("\n")[1:-1])
def test_each_of_them_would_be_found(line):
    assert offences(ast.parse(line)) != []


def test_what_only_sounds_alike_is_not():
    lines = "model.eval()\nmodel.compile()\ntorch.load(path, weights_only=True)\nnumpy.load(path)\njson.load(file)"
    lines += "\nImage.open(file, formats=['PNG'])\nImage.fromarray(pixels)\nimage.open()"
    assert offences(ast.parse(lines)) == []


def test_what_is_forbidden_elsewhere_is_called_in_one_place():
    """A namespace is taken where weights are read, never for a checkpoint that a run goes on from."""
    calls = [(path.name, node) for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))]
    for call, place in PLACES.items():
        assert [name for name, node in calls if isinstance(node, ast.Call) and ast.unparse(node) == call] == [place]
    users = [name for name, node in calls if isinstance(node, ast.Call) and "takes_namespace" in keywords(node)]
    assert users == ["weights.py"]


def run_watched(folder, argv):
    """Run a command, or open an image, with a Ghostscript on PATH that leaves a file behind."""
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    if len(argv) == 1:
        Image.open(argv[0]).load()
    else:
        train_rank(argv)


@pytest.mark.parametrize("is_ours", [False, True])
def test_no_image_starts_a_program(tmp_path, is_ours):
    programs, executed = tmp_path / "programs", tmp_path / "executed"
    programs.mkdir()
    (programs / "gs").write_text(f"#!/bin/sh\ntouch {executed}\n")
    (programs / "gs").chmod(0o755)
    root = write_images(tmp_path / "images", {"train": [4, 4], "val": [2, 2]})
    postscript = root / "train" / "class0" / "image001.jpg"
    Image.new("RGB", (8, 8)).save(postscript, "EPS")
    shutil.copy(postscript, root / "val" / "class1" / "image001.jpg")
    argv = ["--data-path", root, "--output-dir", tmp_path / "out", *SMALL, "--batch-size", 4, "--epochs", 1]
    argv = [*argv, "--bad-images", "skip"] if is_ours else [postscript]
    outcome = run_ranks(run_watched, 1, programs, list(map(str, argv)), log_folder=tmp_path)
    assert outcome.codes == [1], outcome.output
    # The training leaves such an image out, the evaluation does not.
    assert ("val/class1/image001.jpg (class class1): " in outcome.output) == is_ours
    assert executed.exists() != is_ours


def test_hostile_files_are_refused_even_where_the_environment_says_otherwise(monkeypatch, tmp_path):
    """TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD turns off the default, not what is written in the call."""
    path, executed = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth", tmp_path / "executed"
    path.parent.mkdir(parents=True)
    torch.save({"format": 1, "model": Hostile(executed)}, path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(UserError, match="contains code"):
        load_checkpoint(path, "hostile.pth")
    with pytest.raises(UserError, match="contains code"):
        load_weights(path)
    args = types.SimpleNamespace(model="resnet18", weights="IMAGENET1K_V1")
    with pytest.raises(UserError, match="in torch's cache is damaged or contains code and was refused; remove it"):
        train.start_weights(args, None)
    assert not executed.exists()
