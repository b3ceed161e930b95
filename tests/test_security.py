"""SECURITY.md's promises about the code itself: read from its syntax, so that a new module is held to them too."""

import ast
import os

import pytest
import torch
from PIL import Image

from checkpointing.archive import load_checkpoint
from checkpointing.first_weights import start_weights
from checkpointing.weights import load_weights
from errors import UserError
from settings.stages import Parsed
from tests.images import write_images
from tests.ranks import REPOSITORY, run_ranks, train_rank
from tests.started import SMALL, Hostile

FOLDERS = {path.parent for path in REPOSITORY.glob("*/__init__.py")} - {REPOSITORY / "tests"} | {REPOSITORY}
SOURCES = sorted(path for folder in FOLDERS for path in folder.glob("*.py"))

# By the beginning of the dotted name.
FORBIDDEN_MODULES = {
    "PIL.EpsImagePlugin", "PIL.ImageGrab", "PIL.ImageShow",
    "cloudpickle", "dill", "ftplib", "joblib", "marshal", "pickle", "requests", "shelve", "smtplib", "telnetlib",
    "torch.distributed.checkpoint", "torch.hub", "urllib", "urllib3", "http", "yaml",
}  # fmt: skip

# By the last part of the name, whatever it is called on.
FORBIDDEN_CALLS = {
    "SourceFileLoader", "add_safe_globals", "all_gather_object", "broadcast_object_list", "create_connection",
    "exec_module", "extract", "extractall", "gather_object", "load_module", "load_state_dict_from_url", "popen",
    "recv_object_list", "run_module", "run_path", "safe_globals", "scatter_object_list", "send_object_list", "system",
    "unpack_archive", "urlopen", "urlretrieve",
}  # fmt: skip

# What opens an image in any format that Pillow knows, unless the call says which ones, or how.
OPENERS = (".Image.open", ".ImageFolder", ".DatasetFolder", ".pil_loader", ".default_loader")
# The one class beyond plain data that a file of weights may hold: it has attributes and no code.
NAMESPACE = "torch.serialization.safe_globals([argparse.Namespace])"


def names_of(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [ast.unparse(node)] if isinstance(node, (ast.Attribute, ast.Name)) else []


def call_offences(call):
    name, passed = ast.unparse(call.func), {each.arg: ast.unparse(each.value) for each in call.keywords}
    is_forbidden = name in ("eval", "exec", "compile", "__import__")
    is_forbidden |= name.split(".")[-1] in FORBIDDEN_CALLS and ast.unparse(call) != NAMESPACE
    is_forbidden |= name == "torch.load" and passed.get("weights_only") != "True"
    return [name] * (is_forbidden or "True" in (passed.get("allow_pickle"), passed.get("shell")))


def offences(tree):
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    found = [name for call in calls for name in call_offences(call)]
    says_how = {id(call.func) for call in calls if {"formats", "loader"} & {each.arg for each in call.keywords}}
    for node in nodes:
        for name in names_of(node):
            is_opener = f".{name}".endswith(OPENERS) and id(node) not in says_how
            if is_opener or any(f"{name}.".startswith(f"{module}.") for module in FORBIDDEN_MODULES):
                found.append(name)
    return found


OFFENCES = """
from pickle import loads
torch.distributed.checkpoint.load(state)
torch.load(path)
torch.serialization.safe_globals([argparse.Namespace, Thing])
numpy.load(path, allow_pickle=True)
eval(text)
subprocess.run(text, shell=True)
runpy.run_path(path)
open_image = Image.open
datasets.ImageFolder(folder, transform)
"""


def test_no_module_unpickles_extracts_evaluates_or_downloads():
    trees = {str(path.relative_to(REPOSITORY)): ast.parse(path.read_text()) for path in SOURCES}
    found = {name: offences(tree) for name, tree in trees.items()}
    assert found.pop("settings/own_code.py") == ["spec.loader.exec_module"]  # a user's own files are run in one place
    client = found["loading/stores.py"]
    found["loading/stores.py"] = [name for name in client if name.split(".")[0] not in ("http", "urllib")]
    found["bench/benchmark.py"].remove("datasets.ImageFolder")  # of a folder that is there
    found["distributed/joining.py"].remove("socket.create_connection")  # closed at once, to see whether rank 0 listens
    assert not any(found.values()), found
    # A namespace is accepted where weights are read, never for a checkpoint that a run resumes.
    calls = [(name, node) for name, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert [name for name, call in calls if ast.unparse(call) == NAMESPACE] == ["checkpointing/archive.py"]
    users = {name for name, call in calls if "takes_namespace" in [each.arg for each in call.keywords]}
    assert users == {"checkpointing/weights.py"}
    assert [line for line in OFFENCES.split("\n")[1:-1] if not offences(ast.parse(line))] == []
    lines = "model.eval()\nmodel.compile()\ntorch.load(path, weights_only=True)\nnumpy.load(path)\njson.load(file)"
    lines += "\nImage.open(file, formats=['PNG'])\nImage.fromarray(pixels)\nimage.open()"
    assert offences(ast.parse(lines)) == []


def run_watched(folder, argv):
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
    argv = ["--data-path", root, "--output-dir", tmp_path / "out", *SMALL, "--batch-size", 4, "--epochs", 1]
    argv = list(map(str, argv if is_ours else [postscript]))
    outcome = run_ranks(run_watched, 1, programs, argv, log_folder=tmp_path)
    assert outcome.codes == [1], outcome.output
    assert ("train/class0/image001.jpg (class class0): " in outcome.output) == is_ours
    assert executed.exists() != is_ours


def test_hostile_files_are_refused_even_where_the_environment_says_otherwise(monkeypatch, tmp_path):
    """TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD turns off the default, not what is written in the call."""
    path, executed = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth", tmp_path / "executed"
    path.parent.mkdir(parents=True)
    torch.save({"format": 1, "model": Hostile(executed)}, path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    for read in (lambda path: load_checkpoint(path, "hostile.pth"), load_weights):
        with pytest.raises(UserError, match="contains code"):
            read(path)
    args = Parsed().replaced(model="resnet18", weights="IMAGENET1K_V1")
    with pytest.raises(UserError, match="in torch's cache is damaged or contains code and was refused; remove it"):
        start_weights(args, None)
    assert not executed.exists()
