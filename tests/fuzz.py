"""Mutate everything that is read from disk: each case ends right, or in one line with an exit code.

`python -m tests.fuzz --cases 10000 --seed 0`; `--case N` repeats one with its traceback. Cases run in children forked
from one warm parent, which call the reading functions as the program does. Never may one end in a traceback, take over
ten seconds, write outside its own folder or start a program: an audit hook sees what Python is asked to do.
"""

import argparse
import contextlib
import copy
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import traceback
import zipfile
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.utils.tensorboard  # its import takes longer than a case
from PIL import Image
from torch import nn

import config
import data
import errors
import metrics
import models
import optim
import options
import presets
import sampler
import train
from checkpointing import guard
from checkpointing.checkpoint import RunState
from checkpointing.schema import check_schema
from checkpointing.status import StatusFile
from checkpointing.store import CheckpointManager
from checkpointing.weights import load_weights
from distributed import collectives
from distributed.launch import read_launch
from loading import forms, index, tars
from monitoring import monitor, records
from tests.images import write_images

LIMIT_S = 10
CHUNK = 25  # cases of one child

SCALARS = [
    None, True, False, -1, 0, 1, 2, 3, 1 << 31, 1 << 53, 1 << 63, -(1 << 70), 10**30, 10**400, 0.5, -0.0, float("nan"),
    float("inf"), -float("inf"), 1e308, 5e-324, "", "x", "a\nb", "\ud800", "\0", "../../x", "/", "0", "auto",
    "x" * 70000,
]  # fmt: skip


def tensors() -> list[torch.Tensor]:
    """Return tensors that no checkpoint holds, or not in most places."""
    return [
        torch.zeros(0), torch.zeros(3), torch.tensor(float("nan")), torch.tensor(3),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2, 2).to_sparse(), torch.empty(3, device="meta"), torch.zeros(1).expand(100_000, 100_000),
        torch.zeros(3, 3).T, torch.ones(4, dtype=torch.bool), torch.zeros(2, dtype=torch.float16),
        nn.Parameter(torch.zeros(2)), torch.zeros(5, dtype=torch.uint16),
    ]  # fmt: skip


def nested(rng: random.Random) -> Any:
    """Return a value of values: deep, of itself, or a short text that unfolds to more than there is memory for."""
    kind = rng.randrange(5)
    if kind == 0:
        value = []
        for _ in range(rng.choice([3, 30, 300])):
            value = [value]
    elif kind == 1:
        value = {}
        value["again"] = value
    elif kind == 2:
        value = ["x"]
        for _ in range(30):
            value = [value] * 10
    else:
        value = rng.choice([[], {}, [[]], {"a": {}}, {1: 2}, (1, 2), {None: 1}])
    return value


def places(value: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """Return every (container, key) in nested dicts and lists."""
    if depth > 5 or not isinstance(value, (dict, list)):
        return []
    keys = list(value) if isinstance(value, dict) else range(len(value))
    return [place for key in keys for place in [(value, key), *places(value[key], depth + 1)]]


def mutate(value: Any, rng: random.Random, *, is_plain: bool) -> None:
    """Change one thing in nested dicts and lists: a value, a key, what is there."""
    # The shallow ones, which are few, as often as those of a long list.
    levels = [[(value, key) for key in value], places(value)]
    container, key = rng.choice(rng.choice(levels))
    what = rng.randrange(8)
    if what == 0 and isinstance(container, dict):
        del container[key]
    elif what == 1 and isinstance(container, dict):
        container[rng.choice(["x", "", "a\nb", "step"] if is_plain else ["x", "", 7, -1, None, 1.5])] = container[key]
    elif what == 2:
        container[key] = copy.deepcopy(rng.choice(places(value))[0])
    elif what == 3 and type(container[key]) in (int, float):
        container[key] = rng.choice([-1, 1, 2, 0.5, 1e18]) * container[key] + rng.choice([0, 1, -1, 0.5])
    elif what == 4 and not is_plain:
        container[key] = rng.choice(tensors())
    elif what == 5:
        container[key] = nested(rng) if not is_plain else rng.choice([[], {}, [[]], {"a": {}}, [1] * 9])
    else:
        container[key] = rng.choice(SCALARS)


def scramble(content: bytes, rng: random.Random, head: int | None = None) -> bytes:
    """Flip, overwrite, cut, repeat or insert bytes, in the first `head` ones for the most part."""
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        end = min(len(content), head or len(content)) if rng.random() < 0.8 else len(content)
        place = rng.randrange(max(end, 1))
        what = rng.randrange(7)
        if what == 0 and content:
            content[place % len(content)] ^= 1 << rng.randrange(8)
        elif what == 1:
            content[place : place + 4] = rng.choice([b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f"])
        elif what == 2:
            del content[place:]
        elif what == 3:
            content[place:place] = content[: rng.randrange(1, 200)]
        elif what == 4:
            del content[place : place + rng.randrange(1, 20)]
        elif what == 5:
            content[place : place + 2] = rng.randbytes(2)
        else:
            content += rng.randbytes(rng.randrange(1, 2000))
    return bytes(content)


class Tiny(nn.Module):
    """As little of a model as has what models have."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, num_classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return class scores."""
        return self.fc(self.norm(self.conv(image)).mean((2, 3)))


class Bench:
    """What all cases start from, made once, before any of them is forked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.images = write_images(folder / "images", {"train": [9, 7], "val": [2, 2]})
        self.tar = folder / "train.tar"
        with tarfile.open(self.tar, "w") as archive:
            for path in sorted((self.images / "train").rglob("*")):
                archive.add(path, str(path.relative_to(self.images / "train")))
        for path in [self.images, *self.images.rglob("*"), self.tar]:
            os.utime(path, (1e9, 1e9))
        self.argv = ["--data-path", str(self.images), "--model", "resnet18", "--batch-size", "8", "--device", "cpu"]
        self.argv += ["--workers", "0", "--train-crop-size", "32", "--val-resize-size", "32", "--val-crop-size", "32"]
        with contextlib.redirect_stdout(io.StringIO()):
            self.truth = forms.open_source(self.images / "train")
            self.dataset, self.dataset_test = self.build_datasets(self.args())
            self.states = {opt: self.save(opt) for opt in ("sgd", "adamw", "rmsprop")}
        self.image_files = self.draw_images()

    def args(self, *more: str) -> argparse.Namespace:
        """Return the options of a run, as far as `train.main` gets before it reads anything."""
        args = config.parse_args([*self.argv, "--model-ema", *more])
        return config.on_machine(args)[0]

    def build_datasets(self, args: argparse.Namespace) -> tuple:
        return data.build_datasets(str(self.images / "train"), str(self.images / "val"), args)

    def parts(self, args: argparse.Namespace) -> dict:
        """Return what a run saves, of a tiny model."""
        torch.manual_seed(0)
        model = Tiny()
        optimizer = optim.build_optimizer(args, optim.build_parameter_groups(args, model))
        return {
            "model": model,
            "optimizer": optim.OptimizerState(optimizer),
            "model_ema": models.build_ema(args, model),
            "scaler": torch.amp.GradScaler("cpu", enabled=True),
            "log_window": metrics.Tally([metrics.Accuracy()]),
        }

    def facts(self, args: argparse.Namespace) -> dict:
        return guard.run_facts(args, "pillow", self.dataset, self.dataset_test)

    def save(self, opt: str) -> dict:
        """Return the state of a run after three steps, the second of which ended an epoch."""
        args = self.args("--opt", opt)
        args = config.with_shards(args.replaced(resume=""), None)
        parts = self.parts(args)
        run = RunState(len(self.dataset) // 8, self.facts(args), parts)
        for step in range(3):
            make_step(parts)
            run.start_epoch(step // run.steps_per_epoch)
            run.advance()
            if run.steps == run.steps_per_epoch:
                run.note_results({"val": {"acc1": 50.0}, "val_ema": {"acc1": 40.0}}, "acc1")
        return run.state_dict()

    @staticmethod
    def draw_images() -> list[bytes]:
        """Return an image in each of several formats, among them some that may start a program."""
        image = Image.effect_noise((40, 32), 60).convert("RGB")
        files = []
        for kind in ("JPEG", "PNG", "BMP", "TIFF", "WEBP", "PPM", "GIF", "EPS", "ICO", "TGA"):
            with contextlib.suppress(OSError, KeyError):
                buffer = io.BytesIO()
                image.save(buffer, kind)
                files += [buffer.getvalue()] * (5 if kind == "JPEG" else 1)
        buffer = io.BytesIO()
        image.save(
            buffer, "JPEG", progressive=True, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\1\x01\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"
        )
        return [*files, buffer.getvalue()]


def make_step(parts: dict) -> None:
    """Do what a step does to the parts of a run."""
    model, optimizer = parts["model"], parts["optimizer"].optimizer
    optimizer.zero_grad()
    loss = model(torch.ones(2, 3, 8, 8)).square().mean()
    parts["scaler"].scale(loss).backward()
    parts["scaler"].step(optimizer)
    parts["scaler"].update()
    parts["model_ema"].update_parameters(model)


def go_on(bench: Bench, out: Path, opt: str, rng: random.Random) -> None:
    """Resume from a folder as `train.main` does, make a step, and save."""
    resume = rng.choice(["auto", "auto", str(out / "checkpoint-00000003.pth")])
    is_test = rng.random() < 0.15
    args = bench.args("--opt", opt, "--output-dir", str(out), "--resume", resume, *(["--test-only"] if is_test else []))
    manager = CheckpointManager(out)
    args, state = train.find_checkpoint(args, manager)
    assert state is not None
    if is_test:
        presets.build_presets(args)
        guard.check_data(state, args, None, bench.dataset_test)
        models.load_evaluated(args, Tiny(), state)
        return
    guard.check_data(state, args, bench.dataset, bench.dataset_test)
    parts = bench.parts(args)
    position = RunState(len(bench.dataset) // args.global_batch_size, bench.facts(args), parts)
    position.resume(state, None, args.epochs)
    manager.adopt(args.resume, position)
    if position.steps == position.steps_per_epoch:
        position.start_epoch(position.epoch + 1)
    make_step(parts)
    position.advance()
    parts["log_window"].state_dict()
    assert manager.save(position, is_last=True)
    check_schema(position.state_dict(), "what is saved again")


def case_checkpoint(bench: Bench, folder: Path, rng: random.Random) -> None:
    """The newest of three checkpoints is whole and says something else."""
    opt = rng.choice(list(bench.states))
    out = folder / "out"
    out.mkdir()
    good = bench.states[opt]
    position = {"epoch": 0, "steps": 1, "is_evaluated": False}
    torch.save(
        {**good, "step": 1, "epoch": -1, "position": position, "best": None, "best_ema": None},
        out / "checkpoint-00000001.pth",
    )
    state = copy.deepcopy(good)
    mutate(state, rng, is_plain=False)
    with contextlib.suppress(RecursionError):
        torch.save(state, out / "checkpoint-00000003.pth")
    go_on(bench, out, opt, rng)


def case_archive(bench: Bench, folder: Path, rng: random.Random) -> None:
    """The newest checkpoint is an archive that torch.save did not write."""
    opt = rng.choice(list(bench.states))
    out = folder / "out"
    out.mkdir()
    buffer = io.BytesIO()
    torch.save(bench.states[opt], buffer, _use_new_zipfile_serialization=rng.random() < 0.9)
    content = buffer.getvalue()
    is_scrambled = rng.random() < 0.25 or not zipfile.is_zipfile(buffer)
    content = scramble(content, rng) if is_scrambled else rewrite(content, rng)
    path = out / "checkpoint-00000003.pth"
    path.write_bytes(content)
    if rng.random() < 0.05:
        os.truncate(path, rng.choice([200 << 30, 1 << 30, 5 << 30]))
    go_on(bench, out, opt, rng)


def case_weights(bench: Bench, folder: Path, rng: random.Random) -> None:
    """A file of weights as other scripts write them says something else, or is another archive."""
    state = copy.deepcopy(bench.states["sgd"])
    state["args"] = argparse.Namespace(**state["args"])
    key, average = rng.choice([("model", "model_ema"), ("state_dict", "state_dict_ema")])
    content = {key: state["model"], average: state["model_ema"], "arch": "x", "args": state["args"], "epoch": 3}
    if rng.random() < 0.6:
        mutate(rng.choice([content, content[key], content[average], vars(content["args"])]), rng, is_plain=False)
    buffer = io.BytesIO()
    with contextlib.suppress(RecursionError):
        torch.save(content, buffer, _use_new_zipfile_serialization=rng.random() < 0.9)
    content = buffer.getvalue()
    if rng.random() < 0.5:
        content = rewrite(content, rng) if zipfile.is_zipfile(buffer) else scramble(content, rng)
    (folder / "w.pth").write_bytes(content)
    weights = load_weights(folder / "w.pth", is_average=rng.random() < 0.5)
    models.load_matching(Tiny(), weights, "it", Tiny, 2)


def rewrite(content: bytes, rng: random.Random) -> bytes:
    """Write an archive anew: compressed, with records missing, twice, of other sizes, or another pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(buffer, "w") as target:
        names = source.namelist()
        victim = rng.choice(names + [name for name in names if name.endswith("data.pkl")] * 20)
        what = rng.randrange(7)
        for name in names:
            record = source.read(name)
            if name == victim:
                if what == 0:
                    continue
                if what == 1:
                    record = scramble(record, rng)
                elif what == 2:
                    record = record[: len(record) // 2]
                elif what == 3:
                    record *= 3
                elif what == 4:
                    target.writestr(rng.choice([name, name.upper(), f"../{name}", "x"]), record)
                elif what == 5:
                    target.writestr(name, bytes(20_000_000), zipfile.ZIP_DEFLATED)
                    continue
            target.writestr(name, record, zipfile.ZIP_DEFLATED if what == 6 and rng.random() < 0.5 else 0)
    return buffer.getvalue()


def write_json(path: Path, value: Any, rng: random.Random) -> None:
    """Write a value that was mutated as a value, or as text."""
    if rng.random() < 0.7:
        mutate(value, rng, is_plain=True)
    text = json.dumps(value).encode() + b"\n"
    path.write_bytes(text if rng.random() < 0.7 else scramble(text, rng))


def case_status(bench: Bench, folder: Path, rng: random.Random) -> None:
    """status.json and run.json say something else."""
    start = {"position": [3, False], "count": 2}
    state = RunState(2, {}, {})
    state.epoch, state.steps, state.is_resumed = 1, 1, True
    status = {"state": "preempted", "reason": "", "step": 3, "requeue": True, "start": start, "time": 1.5}
    write_json(folder / "status.json", status, rng)
    (folder / "checkpoint-00000003.pth").touch()
    os.environ["TORCHELASTIC_RUN_ID"] = "7"
    write_json(folder / "run.json", {"launch": read_launch().agent, "command": ["train.py"], "pid": 1}, rng)
    CheckpointManager(folder).is_restarted()
    status_file = StatusFile(folder, state)
    found = status_file.count_start()
    assert type(found["count"]) is int
    assert found["count"] >= 1
    status_file.replace("running", start=found if rng.random() < 0.5 else None)
    written = json.loads((folder / "status.json").read_text())
    assert written["step"] == 3
    assert type(written["requeue"]) is bool


def case_metrics(bench: Bench, folder: Path, rng: random.Random) -> None:
    """metrics.jsonl says something else; what is kept is of steps that were made."""
    lines = []
    for step in range(1, 7):
        record = {"kind": "train" if step % 3 else "val", "step": step, "epoch": 0, "loss": 1.5, "lr": 0.1, "time": 1.5}
        if rng.random() < 0.3:
            mutate(record, rng, is_plain=True)
        lines.append(json.dumps(record).encode())
    content = b"\n".join(lines) + b"\n"
    (folder / "metrics.jsonl").write_bytes(content if rng.random() < 0.5 else scramble(content, rng))
    state = RunState(2, {}, {})
    state.epoch, state.steps, state.is_resumed = rng.choice([1, 2]), rng.choice([0, 1, 2]), True
    state.is_evaluated = state.steps == 2 and rng.random() < 0.5
    writer = monitor.Monitor(folder, state)
    writer.open()
    with writer:
        writer.write("train", state.step + 1, state.epoch, loss=1.0)
        records.read_epochs(writer.records())
    for line in (folder / "metrics.jsonl").read_text().splitlines()[:-1]:
        assert json.loads(line)["step"] <= state.step


def check_index(found: index.ImageIndex) -> None:
    """Name and read every image of an index."""
    dataset = object.__new__(data.IndexedImageFolder)
    preset = presets.ClassificationPresetEval(crop_size=8, resize_size=8)
    dataset.root, dataset.transform, dataset.seed, dataset.index = found.root, preset, 0, found
    dataset.classes = found.classes
    found.fingerprint()
    for number in range(min(len(found), 50)):
        found.name(number), found.path(number)
        with contextlib.suppress(errors.ImageError):
            dataset.load(number)


def case_cache(bench: Bench, folder: Path, rng: random.Random) -> None:
    """The index cache is damaged: what is found is what is there."""
    root = folder / "images"
    shutil.copytree(bench.images, root, symlinks=True)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    cache = index.cache_paths(root / "train")[0]
    arrays = dict(bench.truth.arrays)
    states = [index._state(os.stat(root / path)) for path in map(index.decode, bench.truth.arrays["watched"])]
    arrays["states"] = numpy.array(states, dtype=numpy.int64).reshape(-1, 3)
    buffer = io.BytesIO()
    (numpy.savez_compressed if rng.random() < 0.1 else numpy.savez)(buffer, **arrays)
    content = buffer.getvalue()
    cache.write_bytes(content if rng.random() < 0.1 else scramble(content, rng))
    found = forms.open_source(root / "train")
    assert found.fingerprint() == bench.truth.fingerprint()
    check_index(found)


def case_recipe(bench: Bench, folder: Path, rng: random.Random) -> None:
    """A recipe says something else; what is accepted is written as a recipe that says the same."""
    path = folder / "recipe.toml"
    text = rng.choice(sorted(config.RECIPES_DIR.glob("*.toml"))).read_text()
    lines = text.splitlines()
    if rng.random() < 0.7:
        numbers = [number for number, line in enumerate(lines) if "=" in line]
        number = rng.choice(numbers)
        values = [
            "nan", "inf", "-inf", "1e308", "-1", "0", "1", "2", "1000000", "9223372036854775807", "1" * 400, "true",
            '""', '"x"', '"a\\nb"', '"\\u0000"', "[]", "[1, 2]", "[1e308, nan]", "{}", "1979-05-27", '"../../x"', "0.5",
            "-0.0",
        ]  # fmt: skip
        lines[number] = lines[number].split("=")[0] + "= " + rng.choice(values)
        if rng.random() < 0.2:
            lines.insert(number, rng.choice([lines[number], "[x]", "[data]", "x = 1", "resume = 'auto'"]))
        text = "\n".join(lines) + "\n"
    content = text.encode() if rng.random() < 0.7 else scramble(text.encode(), rng)
    path.write_bytes(content)
    check_options(config.parse_args(["--recipe", str(path), "--data-path", str(folder)]), folder)


def check_options(args: argparse.Namespace, folder: Path) -> None:
    """Check that options are resolved to a recipe that says the same."""
    again = folder / "again.toml"
    again.write_bytes(config.write_recipe(args).encode())
    repeated = config.parse_args(["--recipe", str(again)])
    left_out = {"given"} | {name for name, option in options.BY_NAME.items() if option.recipe == options.NEVER}
    differing = {name for name in vars(args) if getattr(args, name) != getattr(repeated, name)} - left_out
    assert not differing, differing


def case_tar(bench: Bench, folder: Path, rng: random.Random) -> None:
    """A tar's headers say something else, with a right checksum as often as not."""
    content = bytearray(bench.tar.read_bytes())
    for _ in range(rng.choice([1, 1, 2])):
        headers = [
            place for place in range(0, len(content) - 512, 512) if content[place + 257 : place + 262] == b"ustar"
        ]
        place = rng.choice(headers)
        field, size = rng.choice(
            [(0, 100), (100, 8), (124, 12), (124, 12), (136, 12), (156, 1), (157, 100), (257, 8), (345, 155)]
        )
        value = rng.choice([
            rng.randbytes(size), bytes(size), b"7" * size, b"\xff" * size, b"\x80" + rng.randbytes(size - 1),
            b"../../../x.jpg".ljust(size, b"\0"), b"/x/y.jpg".ljust(size, b"\0"), b"-1".ljust(size, b"\0"),
            rng.choice([b"L", b"K", b"x", b"g", b"S", b"1", b"2", b"3", b"5", b"D"]),
        ])  # fmt: skip
        content[place + field : place + field + min(size, len(value))] = value[:size]
        if rng.random() < 0.7:
            header = bytes(content[place : place + 148]) + b" " * 8 + bytes(content[place + 156 : place + 512])
            content[place + 148 : place + 156] = b"%06o\0 " % sum(header)
    if rng.random() < 0.3:
        content = scramble(bytes(content), rng)
    (folder / "train.tar").write_bytes(content)
    os.utime(folder / "train.tar", (1e9, 1e9))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    check_index(forms.open_source(folder / "train"))


def case_manifest(bench: Bench, folder: Path, rng: random.Random) -> None:
    """A pack's manifest says something else."""
    (folder / "train-000000.tar").symlink_to(bench.tar)
    shard = {"file": "train-000000.tar", "images": 16, "bytes": bench.tar.stat().st_size, "sha256": "0" * 64}
    manifest = {"kind": tars.PACK_KIND, "format": tars.PACK_FORMAT, "state": "complete"}
    write_json(folder / "manifest.json", {**manifest, "splits": {"train": {"shards": [shard], "images": 16}}}, rng)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    check_index(forms.open_source(folder / "train"))


def case_image(bench: Bench, folder: Path, rng: random.Random) -> None:
    """An image is none, or claims to be another: a sample of the right shape, or an error that names it."""
    root = folder / "images"
    shutil.copytree(bench.images, root, symlinks=True)
    victim = sorted((root / "train").rglob("*.jpg"))[0]
    victim.write_bytes(scramble(rng.choice(bench.image_files), rng, head=rng.choice([30, 300, None])))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    args = bench.args("--bad-images", rng.choice(["error", "skip"]), *rng.choice([[], ["--backend", "pil"]]))
    dataset, _ = data.build_datasets(str(root / "train"), str(root / "val"), args)
    image = dataset.load(sampler.SampleKey(0, 0, 0))[0]
    assert image.shape[0] == 3
    assert image.dtype == torch.uint8


KINDS = {
    case_checkpoint: 30, case_archive: 15, case_status: 8, case_metrics: 5, case_cache: 8,
    case_recipe: 12, case_tar: 10, case_manifest: 3, case_image: 15, case_weights: 12,
}  # fmt: skip


def kind_of(number: int) -> Any:
    """Return the kind of a case."""
    return random.Random(number).choices(list(KINDS), KINDS.values())[0]


# Audit events of what starts a program, and of what changes a file whose path comes first (or second as well).
STARTS = {"os.exec", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen", "pty.spawn"}
CHANGES = {
    "os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate",
    "os.utime", "shutil.copyfile", "shutil.move", "shutil.rmtree",
}  # fmt: skip


class Watch:
    """An audit hook that notes programs that are started, and changes outside a folder."""

    def __init__(self) -> None:
        self.folder, self.found, self.shown = None, [], -1
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple) -> None:
        """Look at one event."""
        if self.folder is None:
            return
        if event in STARTS:
            words = arguments[1] if event == "subprocess.Popen" else arguments
            is_revision = [*words][:2] == ["git", "--no-optional-locks"] and words[2] == "status"
            if not is_revision:
                self.found.append(f"started {words}")
        elif event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self.look(arguments[0])
        elif event in CHANGES:
            for path in arguments[1:2] if event in ("os.symlink", "shutil.copyfile") else arguments[:2]:
                self.look(path)

    def look(self, path: Any) -> None:
        """Note a path that is changed and outside."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        path = os.path.realpath(os.fsdecode(path))
        if not path.startswith(f"{self.folder}{os.sep}") and path not in (self.folder, "/dev/null"):
            self.found.append(f"changed {path}")


def run_case(bench: Bench, number: int, seed: int, watch: Watch, folder: Path) -> str:
    """Run one case in this process; return right, refused, or what is wrong."""
    kind = kind_of(number)
    folder.mkdir()
    environment = dict(os.environ)
    rng = random.Random(f"{seed} {number}")
    watch.found, watch.folder = [], os.path.realpath(folder)
    output = io.StringIO()
    start = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            kind(bench, folder, rng)
        outcome = "right"
    except (errors.UserError, errors.ImageError) as error:
        line = errors.one_line(str(error))
        outcome = "refused" if line and errors.is_printable(line) else f"not one line: {line!a:.300}"
        if error.exit_code not in (1, 2, 4):
            outcome = f"exit code {error.exit_code}"
    except BaseException as error:
        frames = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        outcome = f"{type(error).__name__}: {str(error)!a:.200} at {' '.join(frames[-4:])}"
        if number == watch.shown:
            traceback.print_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        watch.folder = None
        os.environ.clear()
        os.environ.update(environment)
    if time.monotonic() - start > LIMIT_S:
        outcome = f"took {time.monotonic() - start:.0f} s: {outcome}"
    shutil.rmtree(folder, ignore_errors=True)
    return "; ".join(watch.found) or outcome


def _ring(*_: Any) -> None:
    raise TimeoutError(f"over {LIMIT_S} s")


def run_chunk(bench: Bench, numbers: list[int], seed: int, folder: Path, log: Path) -> None:
    """Run some cases in this process, forked for them, and write their outcomes to a file."""
    signal.signal(signal.SIGALRM, _ring)
    limit = 6 << 30  # of what a case may claim
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)  # of decoders in C
    watch, file = Watch(), os.open(log, os.O_WRONLY | os.O_CREAT)
    for number in numbers:
        os.write(file, f"{number}\t\n".encode())
        outcome = run_case(bench, number, seed, watch, folder / str(number))
        os.write(file, f"{number}\t{outcome}\n".encode(errors="replace"))


def run_cases(bench: Bench, numbers: list[int], seed: int, folder: Path, num_children: int) -> dict[int, str]:
    """Run cases in forked children; the case that ends or hangs its child is one finding, and the rest are run anew."""
    waiting = [numbers[first : first + CHUNK] for first in range(0, len(numbers), CHUNK)]
    running, outcomes = {}, {}
    while waiting or running:
        while waiting and len(running) < num_children:
            log = folder / f"{waiting[-1][0]}-{len(outcomes)}.log"
            log.touch()
            pid = os.fork()
            if not pid:
                try:
                    run_chunk(bench, waiting[-1], seed, folder, log)
                finally:
                    os._exit(0)
            running[pid] = waiting.pop(), log
        time.sleep(0.02)
        for pid, (chunk, log) in list(running.items()):
            is_late = time.time() - log.stat().st_mtime > 2 * LIMIT_S
            if is_late:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if is_late else os.WNOHANG)
            if ended:
                del running[pid]
                rows = [line.split("\t", 1) for line in log.read_text(errors="replace").splitlines()]
                why = f"hung for {2 * LIMIT_S} s" if is_late else f"ended the process (status {status})"
                found = {int(number): outcome or why for number, outcome in rows}
                outcomes |= found
                left = [number for number in chunk if number not in found]
                waiting += [left] if left else []
    return outcomes


def fuzz(num_cases: int, seed: int = 0, num_children: int = 2) -> dict[int, str]:
    """Run that many cases; return the outcome of each."""
    os.environ.pop("TORCHELASTIC_RUN_ID", None)
    torch.set_num_threads(1)
    collectives.setup_for_distributed(True)
    with tempfile.TemporaryDirectory(prefix="fuzz") as name:
        bench = Bench(Path(name))
        (Path(name) / "cases").mkdir()
        return run_cases(bench, list(range(num_cases)), seed, Path(name) / "cases", num_children)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="repeat this one alone, in this process, and show its traceback")
    args = parser.parse_args()
    start = time.monotonic()
    if args.case is not None:
        signal.signal(signal.SIGALRM, _ring)
        with tempfile.TemporaryDirectory(prefix="fuzz") as name:
            watch = Watch()
            watch.shown = args.case
            outcome = run_case(Bench(Path(name)), args.case, args.seed, watch, Path(name) / "case")
        print(f"case {args.case} {kind_of(args.case).__name__}: {outcome}")
        return
    outcomes = fuzz(args.cases, args.seed)
    wrong = {number: outcome for number, outcome in outcomes.items() if outcome not in ("right", "refused")}
    for number, outcome in sorted(wrong.items()):
        print(f"case {number} {kind_of(number).__name__}: {outcome}")
    kinds = [kind_of(number).__name__.removeprefix("case_") for number in outcomes]
    print(", ".join(f"{kind} {kinds.count(kind)}" for kind in sorted(set(kinds))))
    right, refused = (list(outcomes.values()).count(word) for word in ("right", "refused"))
    seconds = time.monotonic() - start
    print(f"fuzz: cases={len(outcomes)} right={right} refused={refused} wrong={len(wrong)} seconds={seconds:.0f}")
    sys.exit(bool(wrong) or len(outcomes) < args.cases)


if __name__ == "__main__":
    main()
