"""What torchvision's train.py and ours do with commands that show every option: `python -m tests.torchvision_options`.

With TORCHVISION_REFERENCES naming torchvision's folder, this runs each command of torchvision_options.json with both
scripts, and writes there what it did: `there`, and `here` where that differs. In numbers they can be compared although
they draw apart: training images have one colour each, so that no crop and no flip changes them, an epoch is one step
unless the command says otherwise, and the first weights follow from a formula. The model's scores show the side of the
images. Where torchvision draws all the same, `draws` names the test of our draws, and their numbers are left out.

torchvision's script needs a GPU for each of several processes. To run here, it joins by gloo at the store of this
module, and has `torch.cuda.set_device`, DDP's `device_ids` and `torch.tensor(device="cuda")` replaced by their
likes for the CPU. Each of its processes prints here, since it prints the mean loss of a process's own images.
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
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import torch
import torchvision
from PIL import Image
from torch import nn
from torch.distributed import PrefixStore, TCPStore
from torchvision.models._api import Weights, WeightsEnum, register_model
from torchvision.models._utils import _ovewrite_value_param
from torchvision.transforms._presets import ImageClassification

from tests.ranks import REPOSITORY, run_ranks, torchrun_environment

PATH = Path(__file__).with_suffix(".json")
TABLE = json.loads(PATH.read_text())

# A command of the table is on so many processes, and has words after these, whose options they replace; ` ; ` begins
# another one after it. LOADED is a checkpoint of the first one whose `args` torch is allowed to load.
BASE = (
    "--data-path WORK/images --model small --device cpu --epochs 2 --workers 0 --train-crop-size 32 --val-crop-size 32 "
    "--val-resize-size 36 --print-freq 1 --backend PIL --output-dir OUT --batch-size"
)
NUM_IMAGES = 16


# The images and the model.


def write_images(folder):
    """Write sets of six or seven classes: training images of one colour each, validation images of stripes."""
    for name, num_train, num_val in [("images", NUM_IMAGES, 8), ("odd", NUM_IMAGES, 9), ("many", 256, 8)]:
        for split, number in [("train", num_train), ("val", num_val)]:
            for index in range(number):
                directory = folder / name / split / f"class{index % 6}"
                directory.mkdir(parents=True, exist_ok=True)
                colour = tuple((index * factor + 31) % 256 for factor in (37, 59, 101))
                image = Image.new("RGB", (40, 32), colour)
                for left in range(0, 40 if split == "val" else 0, 7 + index % 4):
                    image.paste(colour[::-1], (left, left // 3, left + 3, 32))
                image.save(directory / f"image{index:03d}.png")
    shutil.copytree(folder / "images", folder / "seven")
    for split in ("train", "val"):
        shutil.copytree(folder / "seven" / split / "class1", folder / "seven" / split / "class6")


SEEN = []  # (is it training, side, a number of each image) of each batch


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
        if not image.is_meta:  # as where the model is tried
            SEEN.append((self.training, image.shape[-1], (mean * mean.new_tensor([1.0, 10.0, 100.0])).sum(1).tolist()))
        edges = 5 * image.diff(dim=3).abs().mean((2, 3))  # which interpolations draw with other strengths
        side = torch.full_like(mean[:, :1], image.shape[-1] / 32)
        hidden = self.norm(self.fc1(torch.cat([mean, edges, side], 1))).tanh()
        return self.fc2(hidden + self.class_token * self.position_embedding + self.relative_position_bias_table)


class Small_Weights(WeightsEnum):  # noqa: N801
    """Weights as torchvision publishes them, of six classes."""

    V1 = Weights(
        url="https://download.pytorch.org/models/small.pth",
        transforms=partial(ImageClassification, crop_size=24, resize_size=40),
        meta={"categories": list("abcdef")},
    )

    def get_state_dict(self, *args, **options):
        return {name: value.cos() for name, value in Small(6, nn.LayerNorm).state_dict().items()}


def small(*, weights: Small_Weights | None = None, num_classes: int = 6):
    """As torchvision's functions build their models."""
    weights = Small_Weights.verify(weights)
    if weights is not None:
        num_classes = _ovewrite_value_param("num_classes", num_classes, len(weights.meta["categories"]))
    model = Small(num_classes, nn.LayerNorm)
    if weights is not None:
        model.load_state_dict(weights.get_state_dict())
    return model


def small_bn(*, weights: Small_Weights | None = None, num_classes: int = 6):
    return Small(num_classes, nn.BatchNorm1d)


def register_models():
    """Let the models and the weights be torchvision's."""
    torchvision.models.Small_Weights = Small_Weights
    for function in (small, small_bn):
        function.__module__ = "torchvision.models.small"
        register_model()(function)


# One command, in one process.


def import_torchvision(folder, store):
    """Return torchvision's script, made to run on a CPU; ours has the same modules' names."""
    sys.path.insert(0, str(folder))
    for name in ("presets", "sampler", "train", "transforms", "utils"):
        sys.modules.pop(name, None)
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
    """The lines of each epoch, with its last rate, loss and accuracy, and the evaluations, in what a script prints."""
    epochs, evaluations, loss = {}, [], None
    for line in printed.splitlines():
        if found := TRAINING.match(line):
            epoch = epochs.setdefault(found[1], {"lines": []})
            epoch["lines"].append(found[2])
            epoch |= {name: float(found[place]) for name, place in [("lr", 3), ("loss", 4), ("acc1", 5)]}
        elif found := re.match(r"Test: .*\[0/(\d+)\] .* loss: \S+ \((\S+)\)", line):
            loss = float(found[2]) if found[1] == "1" else None  # torchvision shows no other than the first batch's
        elif found := RESULT.match(line):
            evaluations.append([found[1], float(found[4]) if found[4] else loss, float(found[2]), float(found[3])])
    return {"epochs": epochs, "evaluations": evaluations}


def sums(state):
    """The sum of a state's numbers, and their norm."""
    values = torch.cat([value.double().flatten() for value in state.values() if value.is_floating_point()])
    return [round(float(values.sum()), 4), round(float(values.norm()), 4)]


def read_checkpoint(folder):
    """What the last checkpoint holds."""
    path = Path(folder or "nowhere") / "checkpoint.pth"
    if not path.exists():
        return {}
    checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    result = {"saved": checkpoint["epoch"], "weights": sums(checkpoint["model"])}
    if "model_ema" in checkpoint:
        result["updates"] = int(checkpoint["model_ema"].pop("n_averaged"))
        result["average"] = sums(checkpoint["model_ema"])
    return result


def run_command(train, parse, words):
    """Run a command, and return what came of it in this process."""
    SEEN.clear()
    printed, original = io.StringIO(), builtins.print
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            args = parse(words)
            train.main(args)
        except (Exception, SystemExit) as error:
            return {"refused": printed.getvalue().splitlines()[-1] if isinstance(error, SystemExit) else str(error)}
        finally:  # as where the process ends
            if console := sys.modules.get("monitoring.console"):
                console.log.close()
            builtins.print = original
            torch.use_deterministic_algorithms(False)
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    trained = [numbers for is_training, _, numbers in SEEN if is_training]
    return {
        **read_printed(printed.getvalue()),
        "sides": sorted({f"{'train' if is_training else 'val'} {side}" for is_training, side, _ in SEEN}),
        "trained": sum(map(len, trained)),
        "evaluated": sum(len(numbers) for is_training, _, numbers in SEEN if not is_training),
        "different": sorted({round(number, 2) for numbers in trained for number in numbers}),
        **read_checkpoint(args.output_dir),
        "cached": len([*Path(os.environ["HOME"], ".torch").rglob("*.pt")]),
    }


def main(folder, work, processes):
    """Run all commands for two processes in this one of them, or half of those for one; write what came of each."""
    part = int(os.environ.get("RANK", os.environ.get("PART")))
    os.environ["HOME"] = str(work / f"home-{processes}-{part}")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    register_models()
    store, results = None, {}
    if processes == 2:  # as torchrun has them meet, each time by another attempt
        store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=part == 0, wait_for_workers=False)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if folder == REPOSITORY:
        train, parse = importlib.import_module("train"), importlib.import_module("settings.config").parse_args
    else:
        train = import_torchvision(folder, store)
        parse = train.get_args_parser().parse_args
    for number, name in enumerate(name for name in TABLE["commands"] if name.startswith(str(processes))):
        if processes == 2 or number % 2 == part:
            out = work / f"out-{processes}-{number}"
            places = {"WORK": work, "OUT": out, "LOADED": out / "checkpoint.pth"}
            places["PORT"] = os.environ.get("MASTER_PORT", "29500")
            results[name] = []
            for run, words in enumerate(name[3:].split(" ; ")):
                os.environ["TORCHELASTIC_RESTART_COUNT"] = str(10 * number + run)
                line = f"{BASE} {NUM_IMAGES // processes} {words}"
                line = re.sub("|".join(places), lambda found, of=places: str(of[found[0]]), line)
                with torch.serialization.safe_globals([argparse.Namespace] if "LOADED" in words else []):
                    result = run_command(train, parse, line.split())
                if "refused" in result:
                    text = result["refused"].replace(str(out), "OUT").replace(str(work), "WORK")
                    result["refused"] = " ".join(text.split())[:90]
                results[name].append(result)
            shutil.rmtree(Path(os.environ["HOME"], ".torch"), ignore_errors=True)
    (work / f"result-{processes}-{part}.json").write_text(json.dumps(results))
    if store is not None and part == 1:
        store.set("done", "")
    elif store is not None:  # whose server this process has
        store.wait(["done"])


# All commands, on all processes.


def as_one(rank, world_size, port):
    """Two processes that know nothing of each other, and share the commands for one."""
    return {"PART": str(rank)}


def run_all(folder, work, processes=(1, 2)):
    """Run the commands with a folder's script, and return what came of each."""
    write_images(work)
    for number in processes:
        launcher = as_one if number == 1 else torchrun_environment
        run_ranks(main, 2, folder, work, number, log_folder=work, launcher=launcher, timeout_s=300).check()
    return collect(work, processes)


def collect(work, processes):
    """What came of each command: images and losses of both processes together, where there are two."""
    parts = [json.loads(path.read_text()) for path in sorted(work.glob("result-*.json"))]
    found = {}
    for name in [name for name in TABLE["commands"] if int(name[0]) in processes]:
        runs, *others = [part[name] for part in parts if name in part]
        for run, other in zip(runs, *others, strict=True) if others else ():
            for key in {"trained", "evaluated", "different"} & run.keys():
                run[key] += other[key]
            for epoch, values in other.get("epochs", {}).items():
                for key in ("loss", "acc1"):
                    run["epochs"][epoch][key] = round((run["epochs"][epoch][key] + values[key]) / 2, 5)
            for own, values in zip(run.get("evaluations", ()), other.get("evaluations", ()), strict=False):
                own[1] = own[1] and round((own[1] + values[1]) / 2, 5)
        for run in runs:
            run |= {"different": len({*run["different"]})} if "different" in run else {}
        found[name] = runs
    return found


def is_same(ours, theirs, name, drawn=()):
    """Whether two values are the same but for what is drawn, or not shown there, and for the digits that are shown."""
    if name in drawn or theirs is None:
        return True
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(is_same(ours[key], theirs[key], key, drawn) for key in ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(is_same(*pair, name) for pair in zip(ours, theirs, strict=True))
    if not isinstance(ours, float) or not isinstance(theirs, float):
        return ours == theirs
    tolerance = {"rel_tol": 1e-3} if name == "lr" else {"abs_tol": 2e-4 if name in ("weights", "average") else 1.1e-3}
    return math.isclose(ours, theirs, **tolerance)


def differences(ours, theirs, row):
    """Return for each run of a command what differs in ours, and {} for two refusals."""
    drawn = ("evaluations", "different", "weights", "average", "loss", "acc1") if "draws" in row else ()
    found = []
    for run, other in zip(ours, theirs, strict=True):
        if "refused" in run or "refused" in other:
            found.append(run if run.keys() != other.keys() else {})
        else:
            names = [name for name in other | run if not is_same(run.get(name), other.get(name, ""), name, drawn)]
            found.append({name: run.get(name) for name in names})
    return found


def record():
    """Write the table anew."""
    folder = Path(os.environ["TORCHVISION_REFERENCES"])
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        there, here = run_all(folder, Path(one)), run_all(REPOSITORY, Path(other))
    lines = []
    for name, row in TABLE["commands"].items():
        row = {key: row[key] for key in ("draws", "stated") if key in row} | {"there": there[name]}
        if any(different := differences(here[name], there[name], row)):
            row["here"] = different
        lines.append(f"{json.dumps(name)}: {json.dumps(row)}")
    TABLE["options"] = re.findall(r'"(--[a-z0-9-]+)",', (folder / "train.py").read_text())
    PATH.write_text(f'{{"options": {json.dumps(TABLE["options"])},\n"commands": {{\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    importlib.import_module("tests.torchvision_options").record()
