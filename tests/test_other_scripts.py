"""Command lines of other projects: a whole command that does the same, or the unknown word, or the reason.

published_lines.json was typed from the projects' sources, not from other_scripts.toml: what a line without flags means,
lines that the projects or their users published, and lines typed for their flags. A meaning holds options here beside
`base`, null for the default here; or `only` these; or a part of the reason why there is no command.
"""

import json
import math
import random
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import timm.optim
import timm.scheduler
import torch
import torchvision

from checkpointing.first_weights import choose_published_options
from checkpointing.published import resolve_weights
from errors import UserError
from models.optim import lr_at
from monitoring.preview import preview
from settings import config
from settings.options import BY_NAME, defaults
from settings.other_scripts import DATA, SCRIPTS, build_script_parser

REPOSITORY = Path(__file__).parents[1]
PUBLISHED = json.loads(Path(__file__).with_name("published_lines.json").read_text())


def answer(line):
    with pytest.raises(UserError) as caught:
        config.parse_args(shlex.split(line))
    return str(caught.value)


def command_of(text):
    """Return the words after train.py of the command in an answer, or None."""
    found = re.search(r"\n  (?:python|torchrun [^\n]*?) train\.py (.*)", text)
    return found and shlex.split(found[1])


def meaning_of(words, is_filled=False):
    """Return the options that a command here gives another value than their default, or timm's configuration does."""
    args = config.parse_args(words)
    if is_filled and not (args.checkpoint.test_only or args.model.weights):
        args, _ = choose_published_options(args)
    values = args.flat()
    preset = config.parse_args(["--data-path", "none"]).flat() | defaults() | {"model": None, "mean": None, "std": None}
    shown = {name: values[name] for name in BY_NAME if values[name] != preset[name]}
    plain = {"model": "resnet18", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    return {name: value for name, value in shown.items() if plain.get(name) != value}


def expected_of(meaning, base):
    """Return the options that a meaning of published_lines.json stands for."""
    expected = meaning.get("only") or {name: value for name, value in (base | meaning).items() if value is not None}
    falls = re.fullmatch("every (.*) of (.*)", str(expected.get("lr_milestones")))
    if falls:
        every, epochs = float(falls[1]), int(falls[2])
        falling = [epoch for epoch in range(1, epochs) if epoch // every > (epoch - 1) // every]
        expected["lr_milestones"] = falling
    return expected


def rounded(value):
    """Return a value with the numbers in it to five digits."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return f"{value:.5g}" if isinstance(value, float) else value


@pytest.mark.parametrize("script", PUBLISHED)
@pytest.mark.parametrize("origin", ["published", "typed"])
def test_a_line_is_answered_by_what_it_means_in_its_project(script, origin):
    rows = PUBLISHED[script]
    assert len(rows["published"]) + len(rows["typed"]) >= 30
    for line, meaning in rows[origin].items():
        # Published lines are read as they stand, if a train.py of timm's has not the same flags.
        is_plain = origin == "published" and not (script == "timm/validate.py" and "--checkpoint" not in line)
        text = answer(line if is_plain else f"{script} {line}")
        words = command_of(text)
        if isinstance(meaning, str):
            assert words is None, line
            assert meaning in text, line
            continue
        assert words, (line, text)
        got, expected = meaning_of(words, "timm" not in script), expected_of(meaning, rows["base"])
        assert rounded(got) == rounded(expected), (line, text)


@pytest.mark.parametrize(("line", "expected"), [
    ("--data-path d --batchsize 8", "--batchsize is unknown; did you mean --batch-size?"),
    ("--data-path d --batch_size 8", "python train.py --data-path d --batch-size 8"),
    ("--data-path d --batch_size x", "invalid int value"),
    ("-a resnet18 --b 512 D --foo 3", "--foo is unknown to examples/main.py"),
    ("--data-path d --optimizer adamw", "--optimizer is unknown; here --opt N"),
    ("--data-path d --recipe resnet50-v1 --drop-path 0.2", "--drop-path is unknown; here --stochastic-depth N"),
    ("--data-path d --recipe x --update_freq 2", "--update_freq is unknown; not here: see --global-batch-size"),
    ("--data-path d --recipe x --sched cosine", "--sched is unknown; here --lr-scheduler cosineannealinglr"),
    ("--data-path d --recipe x --dist-eval", "--dist-eval is unknown; not here: always so"),
    ("D --epochs 3 -b 8", "timm/train.py, examples/main.py read these words, and their defaults differ"),
    ("main.py D -b 8", "here\n  python train.py --data-path D --batch-size 8"),
    ("D --model resnet50 --sched cosin", "--sched cosin: cosine, step, multistep and poly are here"),
    ("D --modell resnet50 --sched cosine", "--modell is unknown to timm/train.py; did you mean --model?"),
    ("yolo classify train data=x", "Ultralytics"), ("classify train data=x", "Ultralytics"),
    ("tools/train.py configs/resnet/resnet50_8xb32_in1k.py --work-dir w", "mmpretrain"),
    ("--model_name_or_path google/vit --do_train", "Hugging Face's"), ("--validation_split 0.2 --d x", "Keras"),
])  # fmt: skip
def test_what_is_not_understood_is_said_and_no_command_is_derived_from_it(line, expected):
    text = answer(line)
    assert expected in text
    assert "the batch" not in text
    assert (command_of(text) is not None) == ("\n  python" in expected or "dashes" in text)


def test_every_command_to_begin_from_resolves():
    for _, start in DATA["others"].values():
        config.parse_args(shlex.split(start))


@pytest.mark.parametrize("flags", [
    "", "--min-lr 1e-3", "--sched step", "--sched step --decay-epochs 2.4 --decay-rate 0.97",
    "--sched poly --min-lr 0.01",
    "--sched multistep --decay-milestones 30 60", "--warmup-epochs 0", "--warmup-prefix --warmup-lr 1e-3",
])  # fmt: skip
def test_learning_rates_are_timms(flags):
    given = dict(zip(flags.split()[::2], flags.split()[1::2], strict=False)) if "prefix" not in flags else {}
    words = command_of(answer(f"D --model resnet18 --lr 0.4 {flags}"))
    schedule = config.parse_args(words).schedule
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.4)
    theirs, epochs = timm.scheduler.create_scheduler_v2(
        optimizer, given.get("--sched", "cosine"), num_epochs=300, decay_epochs=float(given.get("--decay-epochs", 90)),
        decay_rate=float(given.get("--decay-rate", 0.1)), min_lr=float(given.get("--min-lr", 0)),
        warmup_epochs=int(given.get("--warmup-epochs", 5)), warmup_prefix="prefix" in flags,
        warmup_lr=1e-3 if "prefix" in flags else 1e-5,
        decay_milestones=[30, 60] if "multistep" in flags else [90, 180, 270],
    )  # fmt: skip
    assert schedule.epochs == epochs
    for epoch in (0, 1, 4, 5, 23, 29, 30, 59, 60, 89, 90, 91, 180, 269, 270, 299):
        theirs.step(epoch)
        assert lr_at(schedule, epoch, 0.4) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-4), epoch


@pytest.mark.parametrize("line", [
    "convnext/main.py --data_path D --lr 0.4 --min_lr 0.01 --warmup_epochs 5 --epochs 50",
    "mae/main_finetune.py --data_path D --lr 0.4 --min_lr 0.01 --warmup_epochs 5 --epochs 50",
    "beit/run_class_finetuning.py --model beit_base_patch16_224 --data_path D --lr 0.4 --min_lr 0.01 --epochs 50",
])  # fmt: skip
def test_learning_rates_of_a_step_are_those_of_convnext_mae_and_beit(line):
    schedule = config.parse_args(command_of(answer(line))).schedule
    assert schedule.lr_per_step
    for epoch in (0.0, 0.5, 2.5, 4.9, 5.0, 7.25, 31.5, 49.9):  # mae's util/lr_sched.py; the others' differ by one step
        share = 0.5 * (1 + math.cos(math.pi * (epoch - 5) / 45))
        expected = 0.4 * epoch / 5 if epoch < 5 else 0.01 + 0.39 * share
        assert lr_at(schedule, epoch, 0.4) == pytest.approx(expected, abs=1e-9), epoch


@pytest.mark.parametrize(("line", "expected"), [
    ("-a vgg11 --world-size 1 D", "--batch-size 128 --global-batch-size 256"), ("-a vgg11 -b 65 D", "--batch-size 32"),
    ("D --model resnet18 --grad-accum-steps 4 -b 8", "--batch-size 8 --global-batch-size 64"),
    ("D --model resnet18 -b 128 --lr-base 0.2", "--lr-warmup-decay 5e-05"),  # of 0.2 * 2 * 128 / 256
])  # fmt: skip
def test_under_torchrun_the_command_begins_with_it_and_counts_its_processes(monkeypatch, line, expected):
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name, value in {**place, "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    text = answer(line)
    assert "\n  torchrun --nproc_per_node=2 train.py" in text
    assert expected in text


@pytest.mark.filterwarnings("error:Arguments other than a weight enum")
def test_pretrained_is_what_torchvisions_own_pretrained_loads():
    for name in torchvision.models.list_models(module=torchvision.models):
        with pytest.raises((UserWarning, ValueError)) as caught:  # before anything is loaded
            torchvision.models.get_model_builder(name)(pretrained=True)
        expected = re.search(r"passing `weights=(\w+\.\w+)`", str(caught.value))[1]
        assert (
            str(resolve_weights(config.parse_args(command_of(answer(f"-a {name} --pretrained D"))).model)) == expected
        )


# Values of flags that take no word of any kind.
WORDS = {
    "opt": ["sgd", "adamw", "lamb", "adam", "fusedadamw", "lookahead_adam"], "device": ["cpu"],
    "sched": ["cosine", "step", "multistep", "poly", "tanh"], "aa": ["rand-m9-mstd0.5-inc1", "original", "3a"],
    "remode": ["pixel", "const", "rand"], "mixup-mode": ["batch", "elem", "pair"], "backend": ["PIL", "tensor"],
    "interpolation": ["bicubic", "bilinear"], "clip-mode": ["norm", "agc", "value"], "amp-dtype": ["bfloat16"],
    "lr-base-scale": ["linear", "sqrt"], "crop-mode": ["center", "squash"], "lr-scheduler": ["cosineannealinglr"],
    "lr-warmup-method": ["linear"], "auto-augment": ["ra", "ta_wide"], "torchcompile-mode": ["default"],
    "cfg": ["swin_tiny_patch4_window7_224.yaml"], "model-kwargs": ["act_layer=gelu"], "gp": ["avg"],
}  # fmt: skip
MODELS = {
    "timm/train.py": "resnet18", "timm/validate.py": "resnet18", "examples/main.py": "resnet18",
    "torchvision/train.py": "resnet18", "deit/main.py": "deit_tiny_patch16_224", "convnext/main.py": "convnext_tiny",
    "mae/main_finetune.py": "vit_base_patch16", "beit/run_class_finetuning.py": "beit_base_patch16_224",
}  # fmt: skip
FILES = {"finetune", "checkpoint", "initial-checkpoint", "pretrained-path", "weights", "resume", "use-ema", "eval",
         "pretrained", "test-only", "world-size", "gpu", "in-chans", "input-size"}  # fmt: skip


def draw(script, rng, left_out=()):
    """Return a command line of a script's flags, with values of their kinds, that begins with its name."""
    parser, _ = build_script_parser(script)
    flags = [action for action in parser._actions if action.option_strings and action.dest not in left_out]
    words = []
    for action in rng.sample(flags, rng.choice([1, 2, 4])):
        words.append(rng.choice(action.option_strings))
        count = {None: 1, "?": 0, "+": 2, "*": 1}.get(action.nargs, action.nargs)
        kinds = {int: [1, 2, 8, 64], float: [0, 0.1, 0.5, 1e-3], str.lower: ["true", "false"], str: ["word"]}
        values = WORDS.get(action.dest, kinds.get(action.type, []))
        words += [str(rng.choice([MODELS[script]] if action.dest == "model" else values)) for _ in range(count)]
    spelled = {"--data-path", "--data_path"} & parser._option_string_actions.keys()
    needed = {f"{flag}": "D" for flag in spelled} | ({"--cfg": WORDS["cfg"][0]} if "swin" in script else {})
    needed |= {"--model": MODELS[script]} if "beit" in script else {}
    words += [word for flag, value in needed.items() if flag not in words for word in (flag, value)]
    return shlex.join([script, *(["D"] if not spelled else []), *words])


def check_drawn(script, number):
    """Draw lines; each is answered by a command that resolves, or by one line without one. Return the outcomes."""
    rng = random.Random(script)
    outcomes = Counter()
    for _ in range(number):
        line = draw(script, rng)
        text = answer(line)
        words = command_of(text)
        outcomes["command" if words else "reason"] += 1
        if words is None:
            assert len(text.splitlines()) == 1, line
            assert "does what no command here does: " in text or "argument --" in text or "has no model" in text, text
            continue
        args = config.parse_args(words)
        assert args.optimization.opt.removeprefix("timm/") in [*timm.optim.list_optimizers(), "rmsprop"], line
        assert timm.is_model(args.model.model.removeprefix("timm/").partition(".")[0]), line
    return outcomes


@pytest.mark.parametrize("script", SCRIPTS)
def test_drawn_lines_are_answered(script):
    assert check_drawn(script, 25)["command"] > 2


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_five_hundred_drawn_lines_are_answered(script):
    outcomes = check_drawn(script, 500)
    print(script, dict(outcomes))
    assert outcomes["command"] > 80


def commands(script, number, file):
    """Return commands here for drawn lines of a script, on synthetic images or on the file of a model's weights."""
    rng = random.Random(number)
    found = []
    while len(found) < number:
        more = {"timm/validate.py": f" --model test_resnet --checkpoint {file}"}.get(script, "")
        words = command_of(answer(draw(script, rng, FILES) + more))
        if words:
            found.append(words)
    return found


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "test_resnet.pth"
    torch.save(timm.create_model("test_resnet").state_dict(), path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_twenty_commands_pass_a_dry_run(script, weights):
    for words in commands(script, 20, weights):
        assert "learning rate at the start of epoch" in preview(config.parse_args([*words, "--dry-run"])), words


@pytest.mark.parametrize("script", ["timm/train.py", "swin/main.py"])
def test_a_command_passes_a_dry_run(script, weights):
    (words,) = commands(script, 1, weights)
    run = [sys.executable, "train.py", *words, "--dry-run"]
    done = subprocess.run(run, check=False, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert "learning rate at the start of epoch" in done.stdout, done.stderr
