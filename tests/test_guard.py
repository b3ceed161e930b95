"""What a resumed run may change."""

import re
import shutil
from contextlib import nullcontext

import pytest
import torch

import train  # noqa: F401
from checkpointing import guard, held_out
from errors import UserError
from loading.decode import FORMATS
from settings import config, machine, options
from settings.options import BY_NAME
from tests.ranks import REPOSITORY

FREE = {name for name, option in BY_NAME.items() if option.resume in (options.FREE, options.SILENT)}
BITS = ["--use-deterministic-algorithms"]


def parse(*argv):
    """Return the options of a command line as a run has them, on one process of a machine without accelerator."""
    args = config.parse_args(["--data-path", "d", "--device", "cpu", "--workers", "0", *map(str, argv)])
    folder = args.checkpoint.output_dir or "runs/x"
    return args.replaced(rank=0, gpu=0, is_launched=False, world_size=1, output_dir=folder)


def state_of(args):
    args = args.replaced(global_batch_size=args.optimization.global_batch_size or args.optimization.batch_size)
    here = guard.describe_environment(args.data, args.distributed)
    return {"args": args.as_saved(), "environment": here, "data": {"num_images": 9, "num_classes": 3}}


def check(theirs, ours, changes):
    """Check our options against those of a checkpoint in which something is changed, or missing if it is None."""
    state = state_of(parse(*theirs))
    for name, value in changes.items():
        part = state["args" if name in ("reference_global_batch", "mixup_alpha") else "environment"]
        part.pop(name, None)
        part |= {} if value is None else {name: value}
    guard.check_options(state, parse(*ours, "--resume", "auto"))


@pytest.mark.parametrize("name", sorted(BY_NAME.keys() - {"allow_change", "test_only", "list_recipes", "dry_run"}))
def test_what_is_free_may_change_and_what_changes_numbers_may_not(name):
    args = parse("--resume", "auto", *["--model-ema"] * (name == "epochs"))
    state = state_of(args)
    if name == "global_batch_size":
        args = args.replaced(global_batch_size=32)
    state["args"][name] = "mps" if name == "device" else "another"
    if name in ("mean", "std"):  # else they are the checkpoint's
        args.origin.given.append(name)
    refusal = pytest.raises(UserError, match=f"{name.replace('_', '-')} another in the checkpoint")
    with nullcontext() if name in FREE else refusal:
        guard.check_options(state, args)


LINEAR = ["--recipe", "resnet50-v2", "--lr-scaling", "linear"]


# The checkpoint's options, ours, what is changed in the checkpoint, and what one line names.
REFUSED = {
    "several": (
        [], ["--model", "resnet50", "--lr", 0.5, "--lr-scheduler", "cosineannealinglr"], {},
        [
            "model resnet18 in the checkpoint, resnet50 now", "lr 0.1 in", "lr-scheduler steplr",
            "model cannot be changed: give the checkpoint's", "give --allow-change lr,lr-scheduler",
        ],
    ),
    **{
        option[-1]: (["--epochs", 10, *option], ["--epochs", 15, *option], {}, ["epochs 10", "--allow-change epochs"])
        for option in (["--lr-scheduler", "cosineannealinglr"], ["--lr-scheduler", "linearlr"], ["--model-ema"])
    },
    "threads": (BITS, BITS, {"threads": 99}, ["threads 99 in the checkpoint, 1 now", "--allow-change threads"]),
    "world size": (["--sync-bn"], ["--sync-bn"], {"world_size": 4}, ["world-size 4 in", "--allow-change world-size"]),
    "compiled": ([*BITS, "--compile"], [*BITS, "--compile"], {"world_size": 4}, ["--allow-change world-size"]),
    "another reference": (
        LINEAR, LINEAR, {"reference_global_batch": 256},
        ["lr-scaling linear from 256 in the checkpoint, linear from 1024"],
    ),
    "an option that is younger": (
        [], ["--mixup-alpha", 0.2], {"mixup_alpha": None}, ["mixup-alpha unknown in the checkpoint, 0.2 now"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_each_difference_and_what_to_do(name):
    *given, words = REFUSED[name]
    with pytest.raises(UserError) as caught:
        check(*given)
    assert [word for word in words if word not in str(caught.value)] == []


# What is allowed or harmless, and the lines that are printed.
ALLOWED = ["--epochs", 15, "--model-ema", "--allow-change", "epochs"]
PRINTED = {
    "nothing": ([], [], {}, []),
    "the same reference": (
        LINEAR, [*LINEAR, "--lr-scaling-batch", 256], {"reference_global_batch": 256},
        ["options that changed: lr-scaling-batch None in the checkpoint, 256 now"],
    ),
    "an option that is younger": ([], [], {"mixup_alpha": None}, []),
    "fewer decoders": ([], [], dict.fromkeys(("heif", "avif", "webp", "libtiff", "source")), []),
    "epochs": (["--epochs", 10], ["--epochs", 15], {}, ["options that changed: epochs 10 in the checkpoint, 15 now"]),
    "allowed": (["--epochs", 10, "--model-ema"], ALLOWED, {}, ["changed as --allow-change says: epochs 10 in the"]),
    "processes": ([], [], {"world_size": 4, "threads": 99}, ["options that changed: world-size 4 in the checkpoint"]),
    "versions": ([], [], {"torch": "2.11.0", "cpu": "ABACUS"}, ["versions that changed: torch 2.11.0 in"]),
    "decoders": ([], [], {"heif": "pillow-heif 1.0 libheif 1.17", "webp": "0.9"}, ["versions that changed: "]),
    "other code": ([], [], {"source": "0" * 16}, ["versions that changed: source 0000000000000000 in the checkpoint"]),
    "another GPU": (["--device", "cuda:1"], ["--device", "cuda:0"], {}, []),
    "device": ([*BITS, "--device", "cuda"], BITS, {}, ["options that changed: device cuda", "versions that changed"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_what_is_harmless_or_allowed_is_printed(name, capsys):
    *given, begins = PRINTED[name]
    check(*given)
    lines = capsys.readouterr().out.splitlines()
    assert [line[: len(begin)] for line, begin in zip(lines, begins, strict=True)] == begins
    assert ("bit-identical results are not guaranteed" in "".join(lines)) == (name == "device")


class Images(list):
    classes = ("a", "b", "c")

    def __init__(self, **identity):
        super().__init__(range(9))
        self.index = self
        self.place = {"form": "tars", "path": "/data", "sizes": "s", "times": "t", "checksums": None} | identity

    def fingerprint(self):
        return "aa"

    def identity(self):
        return self.place


@pytest.mark.parametrize(("there", "here", "outcome"), [
    ({}, {"sizes": "other"}, "refused"),
    ({}, {"sizes": "other", "path": "/elsewhere", "times": "other"}, "refused"),
    ({"checksums": "c"}, {"checksums": "other"}, "refused"),
    ({}, {"times": "other"}, "printed"),
    ({}, {"times": "other", "path": "/elsewhere"}, "free"),
    ({"form": "folder", "sizes": None}, {"times": "other"}, "free"),
    ({}, {"form": "class tars", "sizes": "other", "times": "other"}, "free"),
    ({"checksums": "c"}, {}, "free"),
    # Of three sizes one may be that of a file put in the place of a damaged one.
    ({"sample": "0:7 1:8 2:9"}, {"form": "folder", "sample": "0:7 1:5 2:9"}, "free"),
    ({"sample": "0:7 1:8 2:9"}, {"form": "folder", "sample": "0:7 1:5 2:5"}, "refused"),
    ({"sample": "0:7 1:8 2:9"}, {"sample": ""}, "free"),
])  # fmt: skip
def test_sizes_are_compared_within_a_form_and_times_within_a_path(there, here, outcome, capsys):
    theirs, ours = ((Images(), Images(**place)) for place in (there, here))
    state = state_of(parse()) | {"data": guard.describe_data(*theirs)}
    words = r"cannot resume .*: data of val: (sizes|checksums|most of 3 compared images) "
    args = parse("--resume", "auto")
    with pytest.raises(UserError, match=words) if outcome == "refused" else nullcontext():
        guard.check_data(state, args, *ours)
    assert ("data of val: /data " in capsys.readouterr().out) == (outcome == "printed")


@pytest.mark.parametrize(("theirs", "fraction", "fold", "expected"), [
    ({"minival": 0.2, "minival_fold": 1}, 0.2, 1, True), ({"minival": 0.2, "minival_fold": 1}, 0.2, 0, False),
    ({"minival": 0.2}, 0.1, 0, True), ({"minival": 0.2}, 0.3, 0, False), ({"minival": 0.2}, 0.1, 1, False),
    ({"minival": 0.2, "minival_fold": "0"}, 0.2, 0, False), ({"minival": None}, 0.2, 0, False), ({}, 0.2, 0, False),
])  # fmt: skip
def test_a_run_has_held_out_what_is_held_out_here_or_more(theirs, fraction, fold, expected):
    assert held_out.holds_out(theirs, fraction, fold) is expected


def test_own_code_may_lie_elsewhere_on_another_machine():
    def hash_of(schedule):
        args = parse("--lr-scheduler", schedule, "--epochs", 3).replaced(code="lr_scheduler 0123")
        return guard.find_hashes(args, {"classes": ["a"], "val": {}}, torch.nn.Linear(1, 1))["options"]

    assert hash_of("/one/mine.py:f") == hash_of("/other/mine.py:f") != hash_of("/one/mine.py:g")


# The modules that make the pixels of each format, and what they say of themselves.
LIBRARIES = {kind: [("PIL", "__version__")] for kind in ("PNG", "BMP", "PPM")} | {
    "JPEG": [("PIL._imaging", "libjpeg_turbo_version"), ("torchcodec", "__version__")],
    "TIFF": [("PIL._imaging", "libtiff_version")],
    "WEBP": [("PIL._webp", "webpdecoder_version")],
    "AVIF": [("PIL._avif", "libavif_version")],
    "HEIF": [("pillow_heif", "__version__"), ("_pillow_heif", "get_lib_info")],
}


@pytest.mark.parametrize("kind", [*FORMATS, "HEIF"])
def test_the_version_of_whatever_makes_pixels_is_recorded(kind):
    args = parse("--workers", 1)
    known = " ".join(map(str, guard.describe_environment(args.data, args.distributed).values()))
    for module, name in LIBRARIES[kind]:
        if module == "torchcodec" and not machine.find_torchcodec():
            continue
        found = getattr(pytest.importorskip(module), name)
        found = found()["libheif"] if callable(found) else found
        assert re.search(r"\d+\.\d+[.\d]*", str(found))[0] in known


def test_the_hash_of_the_project_is_that_of_its_code_wherever_it_lies(tmp_path):
    for folder in "checkpointing distributed loading metrics models monitoring scripts settings .".split():
        (tmp_path / folder).mkdir(exist_ok=True)
        for path in (REPOSITORY / folder).glob("*.py"):
            shutil.copy(path, tmp_path / folder)
    ours = guard.hash_project(REPOSITORY)
    for name in ("mine.py", "scripts/report.py"):  # a user's own, and a tool
        (tmp_path / name).write_text("x = 1\n")
    assert guard.hash_project(tmp_path) == ours
    for name in ("train.py", "data.py", "models/ema.py"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text.replace("def ", "def  ", 1))
        assert guard.hash_project(tmp_path) != ours
        (tmp_path / name).write_text(text)
