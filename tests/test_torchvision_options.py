"""Every option of torchvision's train.py does here what it does there, on one process and on two, or the pages say it.

torchvision_options.json is the table: each command's result `there`, from running torchvision's script (release 0.21),
and `here` where ours differs, with words of the page that states it. `python -m tests.test_torchvision_options` writes
it, with TORCHVISION_REFERENCES naming torchvision's folder; a new command is a row with no `there`.
Numbers can be compared although the scripts draw apart: training images have one colour each, so that no crop and no
flip changes them, an epoch is one step unless the command says otherwise, and the first weights follow from a formula.
Where a command draws all the same, `draws` names the test of our draws, and what depends on them is not compared.
torchvision's script needs a GPU for each of several processes: here it joins by gloo, and each of its processes prints.
"""

import argparse
import builtins
import contextlib
import importlib
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torchvision
from PIL import Image
from torch import nn
from torch.distributed import PrefixStore, TCPStore
from torchvision.models._api import Weights, WeightsEnum, register_model
from torchvision.models._utils import _ovewrite_value_param
from torchvision.transforms._presets import ImageClassification

import data
import train
from errors import UserError
from monitoring import pictures
from tests.ranks import REPOSITORY, run_ranks, torchrun_environment

PATH = Path(__file__).with_name("torchvision_options.json")
TABLE = json.loads(PATH.read_text())
COMMANDS = TABLE["commands"]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *REPOSITORY.glob("docs/*.md")]

# A command of the table is on so many processes, and has words after these, whose options they replace; ` ; ` begins
# another one after it. LOADED is a checkpoint of the first one whose `args` torch is allowed to load.
BASE = (
    "--data-path WORK/images --model small --device cpu --epochs 2 --workers 0 --train-crop-size 32 --val-crop-size 32 "
    "--val-resize-size 36 --print-freq 1 --backend PIL --output-dir OUT --batch-size"
)
NUM_IMAGES = 16
COLOURS = [tuple((index * factor + 31) % 256 for factor in (37, 59, 101)) for index in range(256)]


def write_images(folder):
    """Write sets of six or seven classes: training images of one colour each, validation images of stripes."""
    for name, num_train, num_val in [("images", NUM_IMAGES, 8), ("odd", NUM_IMAGES, 9), ("many", 256, 8)]:
        for split, number in [("train", num_train), ("val", num_val)]:
            for index in range(number):
                directory = folder / name / split / f"class{index % 6}"
                directory.mkdir(parents=True, exist_ok=True)
                image = Image.new("RGB", (40, 32), COLOURS[index])
                for left in range(0, 40 if split == "val" else 0, 7 + index % 4):
                    image.paste(COLOURS[index][::-1], (left, left // 3, left + 3, 32))
                image.save(directory / f"image{index:03d}.png")
    shutil.copytree(folder / "images", folder / "seven")
    for split in ("train", "val"):
        shutil.copytree(folder / "seven" / split / "class1", folder / "seven" / split / "class6")


MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
SEEN = []  # of each batch: is it training, side, type of the scores, colour of each image


class Small(nn.Module):
    """A classifier of each channel's mean and edges, and of the side, with parameters of all names that count."""

    def __init__(self, num_classes, norm):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(7, 8), norm(8), nn.Linear(8, num_classes)
        for name in ("class_token", "position_embedding", "relative_position_bias_table"):
            self.register_parameter(name, nn.Parameter(torch.empty(8)))
        for number, parameter in enumerate(self.parameters()):
            values = torch.sin(torch.arange(parameter.numel()) * 1.7 + number) * 0.5
            parameter.data = values.view(parameter.shape)

    def forward(self, image):
        mean = image.mean((2, 3))
        edges = 5 * image.diff(dim=3).abs().mean((2, 3))  # which interpolations draw with other strengths
        side = torch.full_like(mean[:, :1], image.shape[-1] / 32)
        hidden = self.norm(self.fc1(torch.cat([mean, edges, side], 1))).tanh()
        scores = self.fc2(hidden + self.class_token * self.position_embedding + self.relative_position_bias_table)
        if not image.is_meta:  # as where the model is tried
            colours = ((mean * STD + MEAN) * 255).round().tolist()
            SEEN.append((self.training, image.shape[-1], str(scores.dtype), colours))
        return scores


class Small_Weights(WeightsEnum):  # noqa: N801
    V1 = Weights(
        url="https://download.pytorch.org/models/small.pth",
        transforms=partial(ImageClassification, crop_size=24, resize_size=40),
        meta={"categories": list("abcdef")},
    )

    def get_state_dict(self, *args, **options):
        return {name: value.cos() for name, value in Small(6, nn.LayerNorm).state_dict().items()}


def small(*, weights: Small_Weights | None = None, num_classes: int = 6):
    if (weights := Small_Weights.verify(weights)) is not None:
        num_classes = _ovewrite_value_param("num_classes", num_classes, len(weights.meta["categories"]))
    model = Small(num_classes, nn.LayerNorm)
    if weights is not None:
        model.load_state_dict(weights.get_state_dict())
    return model


def small_bn(*, weights: Small_Weights | None = None, num_classes: int = 6):
    return Small(num_classes, nn.BatchNorm1d)


def import_torchvision(folder, store):
    """Return torchvision's script, made to run on a CPU; ours has the same modules' names."""
    sys.path.insert(0, str(folder))
    for name in ("presets", "sampler", "train", "transforms", "utils"):
        del sys.modules[name]
    tensor, init, ddp = torch.tensor, torch.distributed.init_process_group, nn.parallel.DistributedDataParallel

    def join(backend, init_method, **numbers):
        own = {"store": PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)}
        init("gloo", **(own if init_method == "env://" else {"init_method": init_method}), **numbers)

    torch.distributed.init_process_group = join
    torch.cuda.set_device = lambda device: None
    nn.parallel.DistributedDataParallel = lambda model, device_ids: ddp(model)
    torch.tensor = lambda *args, **options: tensor(*args, **{k: v for k, v in options.items() if v != "cuda"})
    importlib.import_module("utils").setup_for_distributed = lambda is_master: None
    return importlib.import_module("train")


TRAINING = re.compile(r"Epoch: \[(\d+)\]  \[ *(\d+/\d+)\] .* lr: (\S+) .* loss: \S+ \((\S+)\)  acc1: \S+ \((\S+)\)")
RESULT = re.compile(r"Test: *(\w*) Acc@1 (\S+) Acc@5 (\S+)(?: loss (\S+) n=\d+)?$")


def read_printed(printed):
    """Return each epoch's lines, last rate, loss and accuracy, and the evaluations, in what a script prints."""
    epochs, evaluations, loss = {}, [], None
    for line in printed.splitlines():
        if found := TRAINING.match(line):
            lines = epochs.get(found[1], {"lines": []})["lines"] + [found[2]]
            epochs[found[1]] = {"lines": lines, "lr": float(found[3]), "loss": float(found[4]), "acc1": float(found[5])}
        elif found := re.match(r"Test: .*\[0/(\d+)\] .* loss: \S+ \((\S+)\)", line):
            loss = float(found[2]) if found[1] == "1" else None  # torchvision shows no other than the first batch's
        elif found := RESULT.match(line):
            evaluations.append([found[1], float(found[4]) if found[4] else loss, float(found[2]), float(found[3])])
    return {"epochs": epochs, "evaluations": evaluations}


def sums(state):
    values = torch.cat([value.double().flatten() for value in state.values() if value.is_floating_point()])
    return [round(float(values.sum()), 4), round(float(values.norm()), 4)]


def read_checkpoint(path):
    if not path.exists():
        return {}
    checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    result = {"saved": checkpoint["epoch"], "weights": sums(checkpoint["model"])}
    if "model_ema" in checkpoint:
        result["updates"] = int(checkpoint["model_ema"].pop("n_averaged"))
        result["average"] = sums(checkpoint["model_ema"])
    return result


def run_command(main, parse, refusals, words):
    SEEN.clear()
    printed, original, modes = io.StringIO(), builtins.print, []
    set_mode = torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms = lambda mode, **options: (modes.append(mode), set_mode(mode, **options))
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            args = parse(words)
            main(args)
        except (refusals, SystemExit) as error:
            return {"refused": printed.getvalue().splitlines()[-1] if isinstance(error, SystemExit) else str(error)}
        finally:  # as where the process ends
            if console := sys.modules.get("monitoring.console"):
                console.log.close()
            builtins.print = original
            torch.use_deterministic_algorithms = set_mode
            set_mode(False)
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    seen = [(is_training, tuple(colour)) for is_training, _, _, colours in SEEN for colour in colours]
    trained = [colour for is_training, colour in seen if is_training]
    return {
        **read_printed(printed.getvalue()),
        "sides": sorted({f"{'train' if is_training else 'val'} {side}" for is_training, side, _, _ in SEEN}),
        "types": sorted({kind for _, _, kind, _ in SEEN}),
        "trained": len(trained),
        "evaluated": len(seen) - len(trained),
        "different": trained,
        "altered": not {*trained} <= {*COLOURS},  # as erasing, mixing and policies do
        "deterministic": True in modes,  # ours sets it back
        **read_checkpoint(Path(getattr(args, "checkpoint", args).output_dir or "nowhere") / "checkpoint.pth"),
        "cached": len([*Path(os.environ["HOME"], ".torch").rglob("*.pt")]),
    }


def run_row(run, name, out, work):
    places = {"WORK": str(work), "OUT": str(out), "LOADED": f"{out}/checkpoint.pth"}
    places["PORT"] = os.environ.get("MASTER_PORT", "")
    results = []
    for words in name[3:].split(" ; "):
        # Processes meet as restarted by torchrun: at its store, each time under another name.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1)
        line = f"{BASE} {NUM_IMAGES // int(name[0])} {words}"
        line = re.sub("|".join(places), lambda found: places[found[0]], line)
        with torch.serialization.safe_globals([argparse.Namespace] if "LOADED" in words else []):
            result = run(line.split())
        if "refused" in result:
            text = result["refused"].replace(str(out), "OUT").replace(str(work), "WORK")
            result["refused"] = " ".join(text.split())[:90]
        results.append(result)
    shutil.rmtree(Path(os.environ["HOME"], ".torch"), ignore_errors=True)
    return results


def main(folder, work, processes):
    """Run the rows for two processes in this one of them, or half of those for one; write what came of each."""
    part = int(os.environ.get("RANK", os.environ.get("PART")))
    os.environ["HOME"] = str(work / f"home-{processes}-{part}")
    warnings.simplefilter("ignore")
    torchvision.models.Small_Weights = Small_Weights  # as if torchvision published them
    for function in (small, small_bn):
        function.__module__ = "torchvision.models.small"
        register_model()(function)
    # What costs our runs most, and nothing here compares: waits for a disk, a look at the images, and pictures.
    os.fsync = lambda file: None
    data.in_child = lambda work, limit_s: work()
    pictures.Pictures.watched = lambda self, loader: loader
    pictures.Pictures.draw = lambda self: None
    store = None
    if processes == 2:
        port = int(os.environ["MASTER_PORT"])
        store = TCPStore("127.0.0.1", port, is_master=part == 0, wait_for_workers=False)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if folder == REPOSITORY:
        script, parse = importlib.import_module("train"), importlib.import_module("settings.config").parse_args
    else:
        script = import_torchvision(folder, store)
        parse = script.get_args_parser().parse_args
    run = partial(run_command, script.main, parse, UserError if folder == REPOSITORY else Exception)
    names = list(enumerate(name for name in COMMANDS if name[0] == str(processes)))
    for_me = names if processes == 2 else names[part::2]
    results = {name: run_row(run, name, work / f"out-{number}-{processes}", work) for number, name in for_me}
    (work / f"result-{processes}-{part}.json").write_text(json.dumps(results))
    if processes == 2 and part == 1:
        store.set("done", "")
    elif processes == 2:  # whose server this process has
        store.wait(["done"])


def run_all(folder, work, processes=(1, 2)):
    write_images(work)
    for number in processes:
        # Two processes share the rows for one, and are told nothing of each other.
        launcher = torchrun_environment if number == 2 else lambda rank, *_: {"PART": str(rank)}
        run_ranks(main, 2, folder, work, number, log_folder=work, launcher=launcher, timeout_s=180).check()
    parts = [json.loads(path.read_text()) for path in sorted(work.glob("result-*.json"))]
    found = {name: [part[name] for part in parts if name in part] for name in COMMANDS}
    return {name: list(map(joined, *runs)) for name, runs in found.items() if runs}


def joined(run, *others):
    """Return what one process did, or two: the images of both, and the mean of their losses where both print them."""
    for other in others:
        for key in {"trained", "evaluated", "different"} & run.keys():
            run[key] += other[key]
        for epoch, values in other.get("epochs", {}).items():
            for key in ("loss", "acc1"):
                run["epochs"][epoch][key] = round((run["epochs"][epoch][key] + values[key]) / 2, 5)
        for own, values in zip(run.get("evaluations", ()), other.get("evaluations", ()), strict=False):
            own[1] = own[1] and round((own[1] + values[1]) / 2, 5)
    return run | ({"different": len({*map(tuple, run["different"])})} if "different" in run else {})


def is_same(ours, theirs, name, drawn=()):
    """Tell whether two values are the same, but for what is drawn or not shown there, and the digits that are shown."""
    if name in drawn or theirs is None:
        return True
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(is_same(ours[key], theirs[key], key, drawn) for key in ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(is_same(*pair, name) for pair in zip(ours, theirs, strict=True))
    if not isinstance(ours, float) or not isinstance(theirs, float):
        return ours == theirs
    # Losses have four digits, and ours of an evaluation three. Kernels of other processors differ in the seventh.
    tolerance = {"lr": 1e-6, "evaluations": 1.1e-3}.get(name, 2e-4)
    return math.isclose(ours, theirs, rel_tol=1e-5, abs_tol=tolerance)


def differences(ours, theirs, row):
    """Return for each run of a row what differs in ours, and {} for two refusals."""
    drawn = ("evaluations", "different", "weights", "average", "loss", "acc1") if "draws" in row else ()
    found = []
    for run, other in zip(ours, theirs, strict=True):
        if "refused" in run or "refused" in other:
            found.append(run if run.keys() != other.keys() else {})
        else:
            names = [name for name in other | run if not is_same(run.get(name), other.get(name, ""), name, drawn)]
            found.append({name: run.get(name) for name in names})
    return found


def read_options(folder):
    code = "import train; print(*[f for a in train.get_args_parser(add_help=False)._actions for f in a.option_strings])"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, stdout=-1, text=True, check=True).stdout.split()


def record():
    folder = Path(os.environ["TORCHVISION_REFERENCES"])
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        there, here = run_all(folder, Path(one)), run_all(REPOSITORY, Path(other))
    lines = []
    for name, row in COMMANDS.items():
        row = {key: row[key] for key in ("draws", "stated") if key in row} | {"there": there[name]}
        if any(different := differences(here[name], there[name], row)):
            row["here"] = different
        lines.append(f"{json.dumps(name)}: {json.dumps(row)}")
    options = json.dumps(read_options(folder))
    PATH.write_text(f'{{"options": {options},\n"commands": {{\n' + ",\n".join(lines) + "\n}}\n")


def test_the_table_has_each_option_on_one_process_and_on_two():
    options = {flag: action.dest for action in train.get_args_parser()._actions for flag in action.option_strings}
    assert len(TABLE["options"]) > 50
    assert options.keys() >= {*TABLE["options"]}
    for processes in "12":
        words = [word for name in COMMANDS if name[0] == processes for word in re.split("[ =]", name[3:])]
        given = {options.get(word) for word in words}  # beside those of BASE
        assert [flag for flag in TABLE["options"] if options[flag] not in given] == []


def test_each_difference_is_stated_and_what_is_drawn_has_a_test_of_its_own():
    pages = " ".join(" ".join(page.read_text() for page in PAGES).split())
    for name, row in COMMANDS.items():
        assert ("here" in row) == ("stated" in row), name
        assert row.get("stated", "") in pages, name
        file, _, function = row.get("draws", "").partition("::")
        assert not file or f"def {function}(" in Path(__file__).with_name(file).read_text(), name


@pytest.mark.parametrize("processes", [1, 2])
def test_options_do_what_the_table_says(tmp_path, processes):
    found = run_all(REPOSITORY, tmp_path, (processes,))
    for name, runs in found.items():
        here = COMMANDS[name].get("here", [{}] * len(runs))
        pairs = zip(COMMANDS[name]["there"], here, strict=True)
        expected = [ours if "refused" in {*there, *ours} and ours else {**there, **ours} for there, ours in pairs]
        assert differences(runs, expected, COMMANDS[name]) == [{}] * len(runs), name


def test_the_table_is_torchvisions(tmp_path):
    folder = os.environ.get("TORCHVISION_REFERENCES")
    if not folder:
        pytest.skip("TORCHVISION_REFERENCES names no folder references/classification of torchvision")
    assert read_options(folder) == TABLE["options"]
    for name, runs in run_all(Path(folder), tmp_path).items():
        assert differences(runs, COMMANDS[name]["there"], COMMANDS[name]) == [{}] * len(runs), name


if __name__ == "__main__":
    importlib.import_module("tests.test_torchvision_options").record()
