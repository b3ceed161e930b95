"""Two runs in one process, as in a notebook or a sweep: each is as in a process of its own, and leaves no trace."""

import builtins
import gc
import importlib
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from settings.choices import TABLES
from settings.options import BY_NAME
from tests.archives import tar_of
from tests.endings import Ending
from tests.ranks import run_ranks
from tests.started import SMALL_PLAIN
from tests.test_extending import PAGE
from tests.tiny import Tiny

MORE = '''
import gc, os, signal
from torch import nn
import helper

calls = []

def scaled():
    return lambda output, target: helper.FACTOR * nn.functional.cross_entropy(output, target)

def counting():
    return lambda output, target: calls.append(0) or len(calls) * nn.functional.cross_entropy(output, target)

def stopped(*numbers):
    """Change settings; in the third call of the loss change more, then send signals, or fail for a 0."""
    gc.disable()
    torch.set_num_threads(3)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = torch.utils.deterministic.fill_uninitialized_memory = False
    def criterion(output, target):
        calls.append(target)
        if len(calls) == 3:
            torch.set_default_dtype(torch.float64)
            for number in numbers:
                os.kill(os.getpid(), number) if number else 1 / 0
        return nn.functional.cross_entropy(output, target)
    return criterion

def untroubled(): return stopped()
def failing(): return stopped(0)
def term(): return stopped(signal.SIGTERM)
def interrupted(): return stopped(signal.SIGINT)
def interrupted_twice(): return stopped(signal.SIGINT, signal.SIGINT)
'''
MINE = "\n".join(PAGE) + MORE
OPTIONS = "--batch-size 4 --epochs 2 --print-freq 1 --lr 0.05 --lr-scheduler steplr --lr-step-size 9 --overwrite"


def data(seed):
    found, generator = {}, numpy.random.default_rng(seed)
    for split, number in (("train", 12), ("val", 3)):
        names = {}
        for image in range(number):
            file = io.BytesIO()
            Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=numpy.uint8)).save(file, "BMP")
            names[f"{split}/class{image % 3}/{image:02d}.bmp"] = file.getvalue()
        found[f"data/{split}.tar"] = tar_of(names)
    return found


def weights(seed, more=""):
    torch.manual_seed(seed)
    torch.save(dict(Tiny(3).state_dict()), file := io.BytesIO())
    return f"--weights {{}}/w.pth {more}", {"w.pth": file.getvalue()}


# What changes of all code of one's own: by option, the function, the words before and after.
OWN_CODE = {
    "model": ("net", "width=16", "width=8"),
    "opt": ("signs", "p.grad.sign()", "p.grad.cos()"),
    "criterion": ("focal", "** 2 * each", "** 3 * each"),
    "auto-augment": ("quarters", "90 * random", "45 * random"),
    "lr-scheduler": ("sawtooth", "% 10 / 10", "% 10 / 5"),
    "metrics": ("surest", "share > 0.9", "share > 0.4"),
    "logger": ("Lines", 'record.get("loss")', '"again"'),
    "data-path": ("stripes", "return number % 2", "return 1 - number % 2"),
}
CHANGED = MINE
for _, before, after in OWN_CODE.values():
    assert CHANGED.count(before) == 1
    CHANGED = CHANGED.replace(before, after)


def files(seed):
    texts = {"r.toml": f"[optimization]\nweight-decay = 0.{seed}\n"}
    texts |= {"w.csv": f"class,weight\nclass0,1\nclass1,{seed}\nclass2,1\n"}
    return "--recipe {}/r.toml --class-weights {}/w.csv", {**texts, **data(seed)}


# For each kind of input: the options of two runs, and the files that are written before each.
SCALED = "--criterion {}/own/mine.py:scaled"
OWN_WORDS = " ".join(f"--{option} {{}}/own/mine.py:{name}" for option, (name, *_) in OWN_CODE.items())
KINDS = {
    "own code": ((OWN_WORDS, {}), (OWN_WORDS, {"own/mine.py": CHANGED})),
    "a module that own code imports": ((SCALED, {}), (SCALED, {"own/helper.py": "FACTOR = 2\n"})),
    "the state of a module": (("--criterion {}/own/mine.py:counting", {}),) * 2,
    "a module of the same name": (
        (SCALED, {}), (SCALED.replace("own", "other"), {"other/mine.py": MINE, "other/helper.py": "FACTOR = 2\n"}),
    ),
    "images, recipe and class weights": (files(1), files(2)),
    "weights, once refused": (weights(1, "--test-only"), weights(1), weights(2)),
    "checkpoint": ((f"{SCALED} --epochs 1", {}), (f"{SCALED} --resume auto --no-overwrite", {})),
    "determinism": (("--use-deterministic-algorithms", {}), ("", {})),
}  # fmt: skip


def write(folder, files):
    """Write files, all of one time: Python, and whoever else goes by time and size, takes two contents for one."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        os.utime(path, (10**9, 10**9))


def argv_of(folder, out, options):
    words = f"{' '.join(SMALL_PLAIN)} --data-path {{}}/data {OPTIONS} {options} --output-dir {{}}/{out}"
    return words.replace("{}", str(folder)).split()


def run_in_a_row(folder, out, runs, is_one_command=False):
    import train
    from errors import UserError
    from settings.config import parse_args

    sys.dont_write_bytecode = False
    if is_one_command:
        sys.path.insert(0, str(folder / "own"))
        helper = importlib.import_module("helper")
    args = parse_args(argv_of(folder, out, runs[0][0]))
    given = dict(vars(args))
    for options, files in runs:
        write(folder, files)
        args = args if is_one_command else parse_args(argv_of(folder, out, options))
        refusal = pytest.raises(UserError, match="does not say how its images are prepared")
        with refusal if "--test-only" in options else nullcontext():
            train.main(args)
        assert not is_one_command or (vars(args) == given and sys.modules["helper"] is helper)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, {"own/mine.py": MINE, "own/helper.py": "FACTOR = 1\n", "r.toml": "", "w.csv": "", **data(1)})
    return tmp_path


def test_there_is_a_pair_of_runs_for_each_option_that_takes_own_code():
    assert {name for name in TABLES if f"{BY_NAME[name].flag} {{}}/own/mine.py:" in OWN_WORDS} == TABLES.keys()


@pytest.mark.parametrize("kind", [*KINDS, "the same options"])
def test_a_second_run_in_a_process_is_that_of_a_fresh_one(kind, folder):
    is_one_command = kind == "the same options"
    runs = KINDS["a module that own code imports" if is_one_command else kind]
    run_ranks(run_in_a_row, 1, folder, "a", runs, is_one_command, log_folder=folder).check()
    for compiled in [*folder.rglob("__pycache__")]:
        shutil.rmtree(compiled)
    for run in runs if kind == "checkpoint" else runs[-1:]:
        run_ranks(run_in_a_row, 1, folder, "b", [run], log_folder=folder).check()
    assert Ending(folder / "a").differences(Ending(folder / "b")) == []
    codes = [json.loads((folder / out / "run.json").read_text())["args"]["code"] for out in "ab"]
    assert codes[0] == codes[1]
    if kind == "own code":
        lines = [(folder / out / "lines.txt").read_text() for out in "ab"]
        assert lines[0].endswith(lines[1])  # behind those of the first run
        assert lines[0].count("again") == len(lines[1].splitlines())


def settings_of_process():
    return {
        "print": builtins.print, "stdout": sys.stdout, "stderr": sys.stderr, "path": [*sys.path],
        "module": sys.modules.get("helper"), "garbage": gc.isenabled(), "dtype": torch.get_default_dtype(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
        ),
        "precision": (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
        "threads": torch.get_num_threads(),
        "generators": (random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist()),
        "signals": [signal.getsignal(number) for number in range(1, 16) if number != signal.SIGCHLD],
        "locks": [path for path in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if path.endswith(".lock")],
        "children": [child.pid for child in multiprocessing.active_children()],
    }  # fmt: skip


def run_into_trouble(folder):
    import train
    from errors import PreemptedError
    from settings.config import parse_args

    torch.use_deterministic_algorithms(True, warn_only=True)
    before, errors = settings_of_process(), []  # which hold the frames of what was stopped, as a notebook does
    for options, kind in {
        "untroubled": type(None), "interrupted --test-only --resume {}/a/checkpoint.pth": KeyboardInterrupt,
        "failing": ZeroDivisionError, "term": PreemptedError, "interrupted": PreemptedError,
        "interrupted_twice": KeyboardInterrupt, "interrupted --use-deterministic-algorithms": PreemptedError,
    }.items():  # fmt: skip
        argv = argv_of(folder, "a", "--workers 2 --eval-batch-size 1 --criterion {}/own/mine.py:" + options)
        error = None
        try:
            train.main(parse_args(argv))
        except BaseException as caught:
            error = caught
        assert type(error) is kind, (options, error)
        errors.append(error)
        after = settings_of_process()
        changed = [(name, before[name], after[name]) for name in before if after[name] != before[name]]
        assert not changed, (options, changed)


def test_a_run_leaves_its_process_as_it_was_however_it_ends(folder):
    run_ranks(run_into_trouble, 1, folder, log_folder=folder).check()
