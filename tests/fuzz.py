"""Mutate everything that is read from disk: each case ends right, or in one line with an exit code.

A case runs in a child forked from a warm parent, and calls the reading functions as the program does. Never may one
end in a traceback, take over ten seconds, write outside its own folder or start a program: an audit hook sees what
Python is asked to do.
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
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.utils.tensorboard  # its import takes longer than a case
from PIL import Image
from torch import nn

import data
import errors
import metrics
import presets
import sampler
import train
from checkpointing import guard
from checkpointing.checkpoint import RunState
from checkpointing.schema import check_schema
from checkpointing.store import CheckpointManager
from checkpointing.weights import load_weights
from distributed import collectives
from distributed.launch import read_launch
from loading import decode, forms, index
from models import optim
from models.build import build_ema
from models.matching import load_matching
from models.trained import load_evaluated
from settings import config, options, recipes
from tests import images
from tests.tiny import Tiny

LIMIT_S = 10

SCALARS = [
    None, True, False, -1, 0, 1, 2, 3, 1 << 31, 1 << 53, 1 << 63, -(1 << 70), 10**30, 10**400, 0.5, -0.0, float("nan"),
    float("inf"), -float("inf"), 1e308, 5e-324, "", "x", "a\nb", "\ud800", "\0", "../../x", "/", "0", "auto",
    "x" * 70000,
]  # fmt: skip

# What no checkpoint holds, or not in most places.
TENSORS = [
    torch.zeros(0), torch.zeros(3), torch.tensor(float("nan")), torch.tensor(3), torch.zeros(2, dtype=torch.complex64),
    torch.zeros(2, 2).to_sparse(), torch.empty(3, device="meta"), torch.zeros(1).expand(100_000, 100_000),
    torch.zeros(3, 3).T, torch.ones(4, dtype=torch.bool), torch.zeros(2, dtype=torch.float16),
    nn.Parameter(torch.zeros(2)), torch.zeros(5, dtype=torch.uint16),
]  # fmt: skip

PLAIN_NESTS = [[], {}, [[]], {"a": {}}, [1] * 9]


def nests() -> list:
    circle, deep, unfolding = {}, [], ["x"]
    circle["again"] = circle
    for _ in range(300):
        deep = [deep]
    for _ in range(30):
        unfolding = [unfolding] * 10
    return [circle, deep, unfolding, [[[[]]]], {1: 2}, (1, 2), {None: 1}, *PLAIN_NESTS]


def places(value: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    if depth > 5 or not isinstance(value, (dict, list)):
        return []
    keys = list(value) if isinstance(value, dict) else range(len(value))
    return [place for key in keys for place in [(value, key), *places(value[key], depth + 1)]]


def mutate(value: Any, rng: random.Random, *, is_json: bool) -> None:
    # The shallow ones, which are few, as often as those of a long list.
    container, key = rng.choice(rng.choice([[(value, key) for key in value], places(value)]))
    what = rng.randrange(8)
    if what == 0 and isinstance(container, dict):
        del container[key]
    elif what == 1 and isinstance(container, dict):
        container[rng.choice(["x", "", "a\nb", "step"] if is_json else ["x", "", 7, -1, None, 1.5])] = container[key]
    elif what == 2:
        container[key] = copy.deepcopy(rng.choice(places(value))[0])
    elif what == 3 and type(container[key]) in (int, float):
        container[key] = rng.choice([-1, 1, 2, 0.5, 1e18]) * container[key] + rng.choice([0, 1, -1, 0.5])
    elif what == 4 and not is_json:
        container[key] = rng.choice(TENSORS)
    elif what == 5:
        container[key] = copy.copy(rng.choice(PLAIN_NESTS if is_json else nests()))
    else:
        container[key] = rng.choice(SCALARS)


def scramble(content: bytes, rng: random.Random, head: int | None = None) -> bytes:
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        end = min(len(content), head or len(content)) if rng.random() < 0.8 else len(content)
        place = rng.randrange(max(end, 1))
        # What replaces so many bytes from there.
        length, new = rng.choice([
            (4, b"\xff" * 4), (4, bytes(4)), (4, b"\x7f\xff\xff\xff"), (4, b"\xff\xff\xff\x7f"), (2, rng.randbytes(2)),
            (len(content), b""), (rng.randrange(1, 20), b""), (0, content[: rng.randrange(1, 200)]),
            (1, bytes(byte ^ 1 << rng.randrange(8) for byte in content[place : place + 1])),
        ])  # fmt: skip
        content[place : place + length] = new
    return bytes(content + rng.randbytes(rng.choice([0, 0, 0, 0, 0, 0, 1, 2000])))


def write_archive(path: Path, state: dict, rng: random.Random) -> None:
    buffer = io.BytesIO()
    with contextlib.suppress(RecursionError):
        torch.save(state, buffer, _use_new_zipfile_serialization=rng.random() < 0.95)
    content = buffer.getvalue()
    path.write_bytes(content if rng.random() < 0.6 else scramble(content, rng))


class Bench:
    def __init__(self, folder: Path) -> None:
        self.images = images.write_images(folder / "images", {"train": [9, 7], "val": [2, 2]})
        images.pack_whole(self.images / "train", folder)
        self.tar = folder / "train.tar"
        for path in [self.images, *self.images.rglob("*"), self.tar]:
            os.utime(path, (1e9, 1e9))
        self.argv = ["--data-path", str(self.images), "--model", "resnet18", "--batch-size", "8", "--device", "cpu"]
        self.argv += ["--workers", "0", "--train-crop-size", "32", "--val-resize-size", "32", "--val-crop-size", "32"]
        self.truth = forms.open_source(self.images / "train")
        args = self.args()
        self.dataset, self.dataset_test = data.build_datasets(*config.split_dirs(args.data.data_path), args)
        self.states = {opt: self.save(opt) for opt in ("sgd", "adamw", "rmsprop")}
        self.image_files = list(images.FILES.values())
        # Some of which may start a program.
        self.image_files += [images.encoded(Image.new("RGB", (40, 32)), kind) for kind in ("EPS", "GIF", "ICO", "TGA")]

    def args(self, *more: str) -> argparse.Namespace:
        return config.on_machine(config.parse_args([*self.argv, "--model-ema", *more]))[0]

    def run(self, args: argparse.Namespace) -> RunState:
        torch.manual_seed(0)
        model = Tiny(2)
        optimizer = optim.build_optimizer(
            args.optimization, args.precision, args.model.model, optim.build_parameter_groups(args.optimization, model)
        )
        parts = {
            "model": model,
            "optimizer": optim.OptimizerState(optimizer),
            "model_ema": build_ema(args, model),
            "scaler": torch.amp.GradScaler("cpu", enabled=True),
            "log_window": metrics.Tally([metrics.Accuracy()]),
        }
        facts = guard.run_facts(args, self.dataset, self.dataset_test)
        return RunState(len(self.dataset) // 8, facts, parts)

    def save(self, opt: str) -> dict:
        args = self.args("--opt", opt)
        run = self.run(config.assign(args.replaced(resume=""), None))
        for step in range(3):
            run.start_epoch(step // run.steps_per_epoch)
            make_step(run)
            if run.steps == run.steps_per_epoch:
                run.note_results({"val": {"acc1": 50.0}, "val_ema": {"acc1": 40.0}}, "acc1")
        return run.state_dict()


def make_step(run: RunState) -> None:
    model, optimizer, scaler = run.parts["model"], run.parts["optimizer"].optimizer, run.parts["scaler"]
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 3, 8, 8)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    run.parts["model_ema"].update_parameters(model)
    run.steps += 1


def case_checkpoint(bench: Bench, folder: Path, rng: random.Random) -> None:
    """The newest checkpoint says something else, or torch did not write it: resume as `train.main` does, and save."""
    opt, resume = rng.choice(list(bench.states)), rng.choice(["auto", "auto", str(folder / "checkpoint-00000003.pth")])
    good = bench.states[opt]
    position = {"epoch": 0, "steps": 1, "is_evaluated": False}
    older = {**good, "step": 1, "epoch": -1, "position": position, "best": None, "best_ema": None}
    torch.save(older, folder / "checkpoint-00000001.pth")
    state = copy.deepcopy(good)
    if rng.random() < 0.7:
        mutate(state, rng, is_json=False)
    write_archive(folder / "checkpoint-00000003.pth", state, rng)
    is_test = rng.random() < 0.15
    args = bench.args("--opt", opt, "--output-dir", str(folder), "--resume", resume, *["--test-only"] * is_test)
    manager = CheckpointManager(folder)
    args, state = train.find_checkpoint(args, manager)
    assert state is not None
    guard.check_data(state, args, None if is_test else bench.dataset, bench.dataset_test)
    if is_test:
        presets.build_presets(args.data, args.augmentation)
        load_evaluated(args, Tiny(2), state)
        return
    run = bench.run(args)
    run.resume(state, None, args.schedule.epochs)
    manager.take_over(args.checkpoint.resume, run)
    if run.steps == run.steps_per_epoch:
        run.start_epoch(run.epoch + 1)
    make_step(run)
    assert manager.save(run, is_last=True)
    check_schema(run.state_dict(), "what is saved again")


def case_weights(bench: Bench, folder: Path, rng: random.Random) -> None:
    state = copy.deepcopy(bench.states["sgd"])
    args = argparse.Namespace(**state["args"])
    key, average = rng.choice([("model", "model_ema"), ("state_dict", "state_dict_ema")])
    content = {key: state["model"], average: state["model_ema"], "arch": "x", "args": args, "epoch": 3}
    if rng.random() < 0.6:
        mutate(rng.choice([content, content[key], content[average], vars(args)]), rng, is_json=False)
    write_archive(folder / "w.pth", content, rng)
    weights = load_weights(folder / "w.pth", is_average=rng.random() < 0.5)
    load_matching(Tiny(2), weights, "it", Tiny, 2)


def case_description(bench: Bench, folder: Path, rng: random.Random) -> None:
    (folder / "checkpoint-00000003.pth").touch()
    os.environ["TORCHELASTIC_RUN_ID"] = "7"
    value = {"launch": read_launch().agent, "command": ["train.py"], "pid": 1}
    if rng.random() < 0.7:
        mutate(value, rng, is_json=True)
    text = json.dumps(value).encode() + b"\n"
    (folder / "run.json").write_bytes(text if rng.random() < 0.7 else scramble(text, rng))
    CheckpointManager(folder).is_restarted()


def check_index(root: Path) -> index.ImageIndex:
    dataset = data.IndexedImageFolder(root, presets.ClassificationPresetEval(crop_size=8))
    found = dataset.index
    found.fingerprint()
    for number in range(min(len(found), 50)):
        found.name(number), found.path(number)
        with contextlib.suppress(errors.ImageError):
            dataset.load(number)
    return found


def case_cache(bench: Bench, folder: Path, rng: random.Random) -> None:
    """The index cache is damaged: what is found is what is there."""
    root = folder / "images"
    shutil.copytree(bench.images, root, symlinks=True)
    states = [index._state(os.stat(root / path)) for path in map(index.decode, bench.truth.arrays["watched"])]
    arrays = {**bench.truth.arrays, "states": numpy.array(states, dtype=numpy.int64).reshape(-1, 3)}
    buffer = io.BytesIO()
    (numpy.savez_compressed if rng.random() < 0.1 else numpy.savez)(buffer, **arrays)
    content = buffer.getvalue()
    index.cache_path(root / "train").write_bytes(content if rng.random() < 0.1 else scramble(content, rng))
    assert check_index(root / "train").fingerprint() == bench.truth.fingerprint()


RECIPE_VALUES = [
    "nan", "inf", "-inf", "1e308", "-1", "0", "1", "2", "1000000", "9223372036854775807", "1" * 400, "true",
    '""', '"x"', '"a\\nb"', '"\\u0000"', "[]", "[1, 2]", "[1e308, nan]", "{}", "1979-05-27", '"../../x"', "0.5",
    "-0.0",
]  # fmt: skip


def case_recipe(bench: Bench, folder: Path, rng: random.Random) -> None:
    """A recipe says something else; what is accepted is written as a recipe that says the same."""
    path, written = folder / "recipe.toml", folder / "again.toml"
    lines = rng.choice(sorted(recipes.RECIPES_DIR.glob("*.toml"))).read_text().splitlines()
    if rng.random() < 0.7:
        number = rng.choice([number for number, line in enumerate(lines) if "=" in line])
        lines[number] = lines[number].split("=")[0] + "= " + rng.choice(RECIPE_VALUES)
        if rng.random() < 0.2:
            lines.insert(number, rng.choice([lines[number], "[x]", "[data]", "x = 1", "resume = 'auto'"]))
    content = "\n".join([*lines, ""]).encode()
    path.write_bytes(content if rng.random() < 0.7 else scramble(content, rng))
    args = config.parse_args(["--recipe", str(path), "--data-path", str(folder)])
    written.write_bytes(config.write_recipe(args).encode())
    repeated = config.parse_args(["--recipe", str(written)])
    left_out = {"given", "typed"} | {name for name, option in options.BY_NAME.items() if option.recipe == options.NEVER}
    again = repeated.flat()
    differing = {name for name, value in args.flat().items() if value != again[name]} - left_out
    assert not differing, differing


def case_tar(bench: Bench, folder: Path, rng: random.Random) -> None:
    """A tar's headers say something else, with a right checksum as often as not."""
    content = bytearray(bench.tar.read_bytes())
    for _ in range(rng.choice([1, 1, 2])):
        place = rng.choice([at for at in range(0, len(content) - 512, 512) if content[at + 257 : at + 262] == b"ustar"])
        field, size = rng.choice(
            [(0, 100), (100, 8), (124, 12), (124, 12), (136, 12), (156, 1), (157, 100), (257, 8), (345, 155)]
        )
        value = rng.choice([
            rng.randbytes(size), b"7" * size, b"\xff" * size, b"\x80" + rng.randbytes(size - 1), b"../../../x.jpg",
            b"/x/y.jpg", b"-1", rng.choice([b"L", b"K", b"x", b"g", b"S", b"1", b"2", b"3", b"5", b"D"]),
        ])  # fmt: skip
        content[place + field : place + field + size] = value[:size].ljust(size, b"\0")
        if rng.random() < 0.7:
            header = bytes(content[place : place + 148]) + b" " * 8 + bytes(content[place + 156 : place + 512])
            content[place + 148 : place + 156] = b"%06o\0 " % sum(header)
    (folder / "train.tar").write_bytes(content if rng.random() < 0.7 else scramble(bytes(content), rng))
    os.utime(folder / "train.tar", (1e9, 1e9))
    check_index(folder / "train")


def case_image(bench: Bench, folder: Path, rng: random.Random) -> None:
    """An image is none, or claims to be another: a right sample, or an error that names it; alike by TorchCodec."""
    root = folder / "images"
    shutil.copytree(bench.images, root, symlinks=True)
    victim = sorted((root / "train").rglob("*.jpg"))[0]
    victim.write_bytes(scramble(rng.choice(bench.image_files), rng, head=rng.choice([30, 300, None])))
    args = bench.args(*rng.choice([[], ["--backend", "pil"]]))
    dataset, _ = data.build_datasets(str(root / "train"), str(root / "val"), args)
    found = []
    for prepare in (lambda: None, decode.use_torchcodec):
        prepare()
        try:
            found.append(dataset.load(sampler.SampleKey(0, 0, 0))[0])
        except errors.ImageError as error:
            found.append(error)
    if isinstance(found[0], Exception):
        assert str(found[1]) == str(found[0])
        raise found[0]
    assert torch.equal(*found)
    assert found[0].shape[0] == 3
    assert found[0].dtype == torch.uint8


KINDS = {
    case_checkpoint: 45, case_description: 8, case_cache: 8, case_recipe: 12, case_tar: 10,
    case_image: 15, case_weights: 12,
}  # fmt: skip


def kind_of(number: int) -> Callable:
    return random.Random(number).choices(list(KINDS), KINDS.values())[0]


# Audit events of what starts a program, and of what changes a file.
STARTS = {"os.exec", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen", "pty.spawn"}
CHANGES = {
    "os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate",
    "os.utime", "shutil.rmtree",
}  # fmt: skip


def watch(folder: str, found: list[str], event: str, arguments: tuple) -> None:
    paths = []
    if event in STARTS:
        words = arguments[1] if event == "subprocess.Popen" else arguments
        if [*words][:3] != ["git", "--no-optional-locks", "status"]:
            found.append(f"started {words}")
    elif event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        paths = arguments[:1]
    elif event in CHANGES:
        paths = arguments[1:2] if event == "os.symlink" else arguments[:2]
    paths = [os.path.realpath(os.fsdecode(path)) for path in paths if isinstance(path, (str, bytes, os.PathLike))]
    outside = [path for path in paths if not f"{path}/".startswith(f"{folder}/") and path != "/dev/null"]
    found += [f"changed {path}" for path in outside]


def try_case(bench: Bench, number: int, seed: int, folder: Path) -> str:
    folder.mkdir()
    found, output = [], io.StringIO()
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # KeyboardInterrupt when the time is over
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    sys.addaudithook(partial(watch, os.path.realpath(folder), found))
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            kind_of(number)(bench, folder, random.Random(f"{seed} {number}"))
        outcome = "right"
    except (errors.UserError, errors.ImageError) as error:
        line = errors.one_line(str(error))
        outcome = "refused" if line and errors.is_printable(line) else f"not one line: {line!a:.300}"
        if error.exit_code not in (1, 2, 4):
            outcome = f"exit code {error.exit_code}"
    except BaseException as error:
        frames = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        outcome = f"{type(error).__name__}: {str(error)!a:.200} at {' '.join(frames[-9:])}"
    signal.setitimer(signal.ITIMER_REAL, 0)
    return "; ".join(found) or outcome


def run_case(bench: Bench, number: int, seed: int, folder: Path) -> str:
    result = folder / f"{number}.txt"
    pid = os.fork()
    if not pid:
        try:
            limit = 6 << 30  # bytes that a case may claim
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CPU, (2 * LIMIT_S, 2 * LIMIT_S))  # for a loop in C
            os.dup2(os.open(os.devnull, os.O_RDWR), 2)  # of decoders in C
            descriptor = os.open(result, os.O_WRONLY | os.O_CREAT)
            os.write(descriptor, try_case(bench, number, seed, folder / str(number)).encode(errors="replace"))
        finally:
            os._exit(0)
    status = os.waitpid(pid, 0)[1]
    outcome = result.read_text() if result.exists() else ""
    shutil.rmtree(folder / str(number), ignore_errors=True)
    return outcome or f"ended the process (status {status})"


def run_cases(numbers: range, seed: int) -> dict[int, str]:
    os.environ.pop("TORCHELASTIC_RUN_ID", None)
    torch.set_num_threads(1)
    collectives.setup_for_distributed(True)
    with tempfile.TemporaryDirectory(prefix="fuzz") as name:
        with contextlib.redirect_stdout(io.StringIO()):
            bench = Bench(Path(name))
        return {number: run_case(bench, number, seed, Path(name)) for number in numbers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.monotonic()
    with ProcessPoolExecutor(2) as pool:
        work = [pool.submit(run_cases, range(first, args.cases, 2), args.seed) for first in range(2)]
    outcomes = {number: outcome for each in work for number, outcome in each.result().items()}
    wrong = {number: outcome for number, outcome in outcomes.items() if outcome not in ("right", "refused")}
    for number, outcome in sorted(wrong.items()):
        print(f"case {number} {kind_of(number).__name__}: {outcome}")
    right = list(outcomes.values()).count("right")
    print(f"fuzz: cases={len(outcomes)} right={right} wrong={len(wrong)} seconds={time.monotonic() - start:.0f}")
    sys.exit(bool(wrong) or len(outcomes) < args.cases)


if __name__ == "__main__":
    main()
