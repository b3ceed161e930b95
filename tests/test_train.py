"""train.py: exact evaluation, torchvision's names, one writer, and runs from the command line."""

import ast
import graphlib
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import metrics
import sampler
import train
from settings import config
from tests.ranks import REPOSITORY, run_check
from tests.started import refused, run_train
from tests.test_metrics import ClassAccuracy, EvenImages, device_loader


def scorer(num_classes, rank):
    """Return a model whose BatchNorm statistics matter, and differ between the ranks before they are broadcast."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, num_classes))
    model[0].running_mean.fill_(rank)
    return model


def evaluate_rank(rank, world_size, folder):
    found = []
    for num_images, batch_size in [(1, 8), (7, 1), (50, 8), (101, 8)]:
        generator = torch.Generator().manual_seed(2)
        features = torch.randn(num_images, 6, generator=generator)
        labels = torch.randint(3, (num_images,), generator=generator)
        keys = sampler.EvalSampler(num_images, batch_size, rank, world_size)
        loader = device_loader((features, labels), batch_size, keys)
        measured = [metrics.Accuracy(), ClassAccuracy(3), EvenImages()]
        found.append(train.measure(scorer(3, rank), nn.CrossEntropyLoss(), loader, "cpu", metrics=measured))
        assert found[-1]["n"] == num_images
    (folder / f"{world_size}.{rank}").write_text(json.dumps(found))


@pytest.mark.dist
def test_evaluation_is_the_same_in_every_bit_at_any_world_size(tmp_path):
    for world_size in [1, 2, 3, 4]:
        run_check(world_size, evaluate_rank, tmp_path, tmp_path)
    assert len({(tmp_path / f"{n}.{rank}").read_text() for n in [1, 2, 3, 4] for rank in range(n)}) == 1


def test_evaluation_says_that_a_sampler_repeats_images_and_refuses_it_of_our_own_loaders(capsys):
    dataset = TensorDataset(torch.randn(4, 6), torch.zeros(4, dtype=torch.int64))
    sampler, words = [0, 1, 2, 3, 0], "evaluated 5 images of a set of 4"
    train.evaluate(scorer(3, 0), nn.CrossEntropyLoss(), DataLoader(dataset, sampler=sampler), "cpu")
    assert words in capsys.readouterr().out
    loader = DataLoader(dataset, sampler=sampler)
    loader.numbers = lambda: iter([None] * len(loader))  # as our loaders know those of their images
    with pytest.raises(RuntimeError, match=words):
        train.evaluate(scorer(3, 0), nn.CrossEntropyLoss(), loader, "cpu")


def test_weights_that_are_not_finite_are_not_evaluated(started, tmp_path):
    state = torch.load(started.out / "checkpoint.pth", weights_only=True)
    next(iter(state["model"].values()))[0] = math.nan
    torch.save(state["model"], tmp_path / "nan.pth")
    outcome = run_train(tmp_path, *started.argv, "--test-only", "--weights", tmp_path / "nan.pth")
    refused(outcome, "the weights of the model are not finite", code=5)


def test_a_set_without_a_length_is_evaluated_and_trained_on():
    batches = [(torch.randn(2, 6), torch.tensor([0, 1]))] * 3
    args = Namespace(print_freq=10, clip_grad_norm=None, lr_warmup_epochs=0, model_ema_steps=32)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train.train_one_epoch(model, nn.CrossEntropyLoss(), optimizer, batches, "cpu", 0, args)
    assert train.evaluate(model, nn.CrossEntropyLoss(), batches, "cpu") >= 0


def test_every_train_command_of_the_readme_and_docs_parses(documented_commands, tmp_path, monkeypatch):
    assert [len(documented_commands[page]) >= 3 for page in ("README.md", "runs.md", "launching.md")] == [True] * 3
    monkeypatch.chdir(tmp_path)
    for command in itertools.chain(*documented_commands.values()):
        for word in command:
            if word.endswith(".pth"):  # a checkpoint of the reader's
                Path(word).parent.mkdir(parents=True, exist_ok=True)
                Path(word).touch()
        if command != ["--help"]:
            config.parse_args(command)


def test_every_link_of_the_documents_leads_somewhere():
    def anchors(path):
        headings = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", path.read_text(), flags=re.S), flags=re.M)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    assert len(links) > 10
    for page, link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.is_file(), (page.name, link)
        assert not anchor or anchor in anchors(target), (page.name, link)
    assert (REPOSITORY / "README.md").stat().st_size <= 8192


def test_draws_of_a_bare_loop_are_others_in_each_epoch():
    """Dropout is addressed by the step since the beginning."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(12, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    masks = []
    model[1].register_forward_hook(lambda module, inputs, output: masks.append(output.detach() == 0))
    args = config.parse_args(["--synthetic"])
    loader = [(torch.ones(4, 3, 2, 2), torch.tensor([0, 1, 2, 0]))] * 2
    for epoch in (0, 1):
        train.train_one_epoch(model, torch.nn.CrossEntropyLoss(), optimizer, loader, torch.device("cpu"), epoch, args)
    assert not any(torch.equal(masks[first], masks[second]) for first in range(4) for second in range(first))


MASKS = """
import torch
class Net(torch.nn.Linear):
    def forward(self, image):
        mask = torch.nn.functional.dropout(torch.ones(64), training=self.training)
        print("mask", *mask.long().tolist(), sep="")
        return super().forward(image.mean(dim=(2, 3)))
def net(num_classes):
    return Net(3, num_classes)
"""


def test_each_step_of_a_run_has_draws_of_its_own(tmp_path):
    (tmp_path / "masks.py").write_text(MASKS)
    argv = ["--synthetic", "24", "--model", f"{tmp_path}/masks.py:net", "--batch-size", "8", "--epochs", "2"]
    argv += ["--train-crop-size=32", "--val-crop-size=32", "--val-resize-size=32"]
    output = run_train(tmp_path, *argv, "--output-dir", str(tmp_path / "out")).check().output
    training = output.partition("Epoch: [0]")[2]  # all but the first two steps
    assert len({*re.findall(r"mask(\d+)", training)} - {"1" * 64}) == 4


def imports_of(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in nodes if isinstance(node, ast.ImportFrom)}


def test_imports_only_point_down():
    """The layers of CONTRIBUTING.md: each module may import those of the lines above its own; a package is one."""
    layers = [
        "errors randomness", "distributed files", "settings", "checkpointing loading",
        "metrics presets sampler transforms", "models", "monitoring", "data run utils", "train", "touchstone",
    ]  # fmt: skip
    packages = {path.parent.name for path in REPOSITORY.glob("*/__init__.py")} - {"bench", "scripts", "tests"}
    everything = {path.stem for path in REPOSITORY.glob("*.py")} | packages
    assert everything == set(" ".join(layers).split())
    for level, names in enumerate(layers):
        for name in names.split():
            paths = [*REPOSITORY.glob(f"{name}.py"), *REPOSITORY.glob(f"{name}/*.py")]
            imported = {each.split(".")[0] for path in paths for each in imports_of(path)} - {name}
            assert imported & everything <= set(" ".join(layers[:level]).split()), name


def test_no_two_modules_of_a_package_need_each_other():
    paths = [path for path in REPOSITORY.glob("*/*.py") if path.parent.name not in ("bench", "scripts", "tests")]
    needs = {f"{path.parent.name}.{path.stem}": imports_of(path) for path in paths}
    graphlib.TopologicalSorter(needs).prepare()  # which names the modules of a circle


def doors():
    """Return the modules that CONTRIBUTING.md says a plain run does not import."""
    table = (REPOSITORY / "CONTRIBUTING.md").read_text().partition("| is imported for |")[2].partition("\n\n")[0]
    return {name for row in table.splitlines()[1:] for name in re.findall(r"`((?:\w+/)?\w+\.py)`", row.split("|")[1])}


PLAIN_RUN = """
import sys
import train
from settings import config
options = ["--model", "mnasnet0_5", "--device=cpu", "--batch-size=8", "--epochs=2", "--workers=1"]
options += ["--train-crop-size=32", "--val-resize-size=32", "--val-crop-size=32"]
options += ["--data-path", sys.argv[1], "--output-dir", "out"]
for more in ["--stop-epoch=1"], ["--resume=auto"], ["--resume=out/checkpoint.pth", "--test-only"]:
    try:
        train.main(config.parse_args([*options, *more]))
    except train.PreemptedError as stop:
        print(stop)
files = {name: str(getattr(module, "__file__", "")) for name, module in list(sys.modules.items())}
print("imported:", *(name for name, path in files.items() if path.startswith(sys.argv[2])))
"""


def reading_list():
    """Return the names of the modules that CONTRIBUTING.md says to read for a plain run, without their folders."""
    table = (REPOSITORY / "CONTRIBUTING.md").read_text().partition("| lines entered |")[2].partition("\n\n")[0]
    return set(re.findall(r"(\w+)(?:\.py)?`", table))


def test_a_plain_run_needs_no_module_behind_a_door(image_folder, tmp_path):
    """All of them are deleted from a copy, in which a run trains, stops, resumes, ends and is evaluated."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    paths = {path for path in listed.splitlines() if not path.startswith(("tests/", "docs/", ".ci/"))}
    assert doors() < paths
    for path in paths - doors():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / path, tmp_path / path)
    command = [sys.executable, "-c", PLAIN_RUN, image_folder, tmp_path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^Test: Acc@1 .* n=7$", done.stdout, flags=re.M)) == 3, done.stdout
    imported = {name.rpartition(".")[2] for name in done.stdout.rpartition("imported: ")[2].split()}
    assert imported - {path.parent.name for path in tmp_path.glob("*/__init__.py")} <= reading_list()


def test_train_py_stays_small():
    source = (REPOSITORY / "train.py").read_text()
    main = next(node for node in ast.parse(source).body if getattr(node, "name", "") == "main")
    assert len(source.splitlines()) <= 335
    assert main.end_lineno - main.lineno + 1 <= 45
