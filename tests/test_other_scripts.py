"""Command lines of other projects: a whole command that does the same, or the unknown word, or the reason.

published_lines.json was typed from the projects' sources, not from other_scripts.toml: lines that were published, and
others for their flags. A meaning holds options beside `base`, null for the default; or `only` these; or a reason.
"""

import json
import math
import random
import re
import shlex
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import timm.optim
import timm.scheduler
import torch
import torchvision

from checkpointing.first_weights import choose_published_options
from checkpointing.published import resolve_weights
from errors import UserError
from models.build import check_name
from models.optim import lr_at
from monitoring.preview import preview
from settings import config
from settings.options import BY_NAME
from settings.other_scripts import SCRIPTS, build_script_parser, true_or_false

PRESET = config.parse_args(["--synthetic"]).flat() | {"synthetic": None}
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
    return rounded({name: values[name] for name in BY_NAME if values[name] != PRESET[name]})


def expected_of(meaning, base):
    """Return the options that a meaning of published_lines.json stands for."""
    expected = meaning.get("only") or {name: value for name, value in (base | meaning).items() if value is not None}
    falls = re.fullmatch("every (.*) of (.*)", str(expected.get("lr_milestones")))
    if falls:
        every, end = float(falls[1]), int(falls[2])
        expected["lr_milestones"] = [epoch for epoch in range(1, end) if epoch // every > (epoch - 1) // every]
    return rounded(expected)


def rounded(values):
    """Return values with the numbers in them to five digits."""
    return json.loads(json.dumps(values), parse_float=lambda text: f"{float(text):.5g}")


@pytest.mark.parametrize("script", PUBLISHED)
@pytest.mark.parametrize("origin", ["published", "typed"])
def test_a_line_is_answered_by_what_it_means_in_its_project(script, origin):
    rows = PUBLISHED[script]
    assert len(rows["published"]) + len(rows["typed"]) >= 30
    for line, meaning in rows[origin].items():
        # Published lines are read as they stand, but validate.py's whose flags train.py has too.
        is_plain = origin == "published" and (script != "timm/validate.py" or "--checkpoint" in line)
        text = answer(line if is_plain else f"{script} {line}")
        words = command_of(text)
        if isinstance(meaning, str):
            assert meaning in text, line
            assert words is None, line
        else:
            assert meaning_of(words, "timm" not in script) == expected_of(meaning, rows["base"]), (line, text)


@pytest.mark.parametrize(("line", "expected"), [
    ("--data-path d --batch_size 8", "python train.py --data-path d --batch-size 8"),
    ("-a resnet18 --b 512 D --foo 3", "--foo is unknown to examples/main.py"),
    ("--data-path d --optimizer adamw", "--optimizer is unknown; here --opt N"),
    ("--data-path d --recipe resnet50-v1 --drop-path 0.2", "--drop-path is unknown; here --stochastic-depth N"),
    ("--data-path d --recipe x --update_freq 2", "--update_freq is unknown; not here: see --global-batch-size"),
    ("--data-path d --recipe x --sched cosine", "--sched is unknown; here --lr-scheduler cosineannealinglr"),
    ("--data-path d --model resnet50 --warmup-epochs 5", "--warmup-epochs is unknown; here --lr-warmup-epochs N"),
    ("--data-path d --model resnet50 --finetune f --lr 1", "--finetune is unknown; here --weights N"),
    ("--epoch 3", "--epoch is unknown; did you mean --epochs?"),
    ("main.py", "main.py read these words, and their defaults differ"),
    ("D --epochs 3 -b 8", "timm/train.py, examples/main.py read these words, and their defaults differ"),
    ("main.py D -b 8", "here\n  python train.py --data-path D --batch-size 8"),
    ("D --modell resnet50 --sched cosine", "--modell is unknown to timm/train.py; did you mean --model?"),
    ("yolo classify train data=x", "Ultralytics"), ("classify train data=x", "Ultralytics"),
    ("configs/resnet/resnet50.py --work-dir w", "mmpretrain"), ("--validation_split 0.2 --d x", "Keras"),
    ("--model_name_or_path google/vit --do_train", "Hugging Face's"), ("D --lr 1 --train-crop-mode r", "other crops"),
])  # fmt: skip
def test_what_is_not_understood_is_said_and_no_command_is_derived_from_it(line, expected):
    text = answer(line)
    assert expected in text
    assert "the batch" not in text
    if "begin from" in text:
        config.parse_args(shlex.split(text.partition("train.py ")[2]))
    assert (command_of(text) is not None) == ("\n  python" in expected or "dashes" in text)


@pytest.mark.parametrize(("flags", "theirs"), [
    ("", {}), ("--min-lr 1e-3", {"min_lr": 1e-3}), ("--warmup-epochs 0", {"warmup_epochs": 0}),
    ("--warmup-prefix --warmup-lr 1e-3", {"warmup_prefix": True, "warmup_lr": 1e-3}),
    ("--sched step", {"sched": "step"}), ("--sched poly --min-lr 0.01", {"sched": "poly", "min_lr": 0.01}),
    ("--sched step --decay-epochs 2.4 --dr 0.97", {"sched": "step", "decay_epochs": 2.4, "decay_rate": 0.97}),
    ("--sched multistep --decay-milestones 30 60", {"sched": "multistep", "decay_milestones": [30, 60]}),
])  # fmt: skip
def test_learning_rates_are_timms(flags, theirs):
    schedule = config.parse_args(command_of(answer(f"D --model resnet18 --lr 0.4 {flags}"))).schedule
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.4)
    scheduler, epochs = timm.scheduler.create_scheduler_v2(optimizer, **{"warmup_epochs": 5, **theirs})
    assert schedule.epochs == epochs
    for epoch in (0, 1, 4, 5, 23, 29, 30, 59, 60, 89, 90, 91, 180, 269, 270, 299):
        scheduler.step(epoch)
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
    ("-a vgg11 D", "--batch-size 128"), ("-a vgg11 -b 65 --world-size 2 D", "--global-batch-size 128"),
    ("D --model resnet18 --grad-accum-steps 4 -b 8", "--batch-size 8 --global-batch-size 64"),
    ("deit/main.py --data-path D --mixup-prob 0.5", "--mixup-prob 0.5"), ("D --lr-base 0.2 --aa v0", "decay 5e-05"),
])  # fmt: skip
def test_under_torchrun_the_command_begins_with_it_and_counts_its_processes(monkeypatch, line, expected):
    place = "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1 LOCAL_RANK=0 TORCHELASTIC_RUN_ID=1"
    for setting in place.split():
        monkeypatch.setenv(*setting.split("="))
    text = answer(line)
    assert "\n  torchrun --nnodes=1 --nproc_per_node=2 train.py" in text
    assert expected in text


def test_a_model_of_timms_is_suggested_by_its_name_here():
    with pytest.raises(UserError, match="did you mean timm/vit_base_patch16_224"):
        check_name("vit_base_patch16_224")


@pytest.mark.filterwarnings("error:Arguments other than a weight enum")
def test_pretrained_is_what_torchvisions_own_pretrained_loads():
    for name in torchvision.models.list_models(module=torchvision.models):
        with pytest.raises((UserWarning, ValueError)) as caught:  # before anything is loaded
            torchvision.models.get_model_builder(name)(pretrained=True)
        expected = re.search(r"passing `weights=(\w+\.\w+)`|No weights available", str(caught.value))[1]
        words = command_of(answer(f"-a {name} --pretrained D"))
        assert expected == (words and str(resolve_weights(config.parse_args(words).model)))


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
    "deit/main.py": "deit_tiny_patch16_224", "convnext/main.py": "convnext_tiny",
    "mae/main_finetune.py": "vit_base_patch16", "beit/run_class_finetuning.py": "beit_base_patch16_224",
}  # fmt: skip
NEEDED = {"swin/main.py": ["--cfg"], "beit/run_class_finetuning.py": ["--model"]}
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
        kinds = {int: [1, 2, 8, 64], float: [0, 0.1, 0.5, 1e-3], true_or_false: ["true", "false"], str: ["word"]}
        values = {**WORDS, "model": [MODELS.get(script, "resnet18")]}.get(action.dest, kinds.get(action.type))
        words += [str(rng.choice(values)) for _ in range(count)]
    spelled = {"--data-path", "--data_path"} & parser._option_string_actions.keys()
    needed = {**dict.fromkeys(spelled, "D"), "--cfg": WORDS["cfg"][0], "--model": MODELS.get(script)}
    needed = {flag: needed[flag] for flag in [*spelled, *NEEDED.get(script, ())] if flag not in words}
    words += [word for pair in needed.items() for word in pair]
    return shlex.join([script, *(["D"] if not spelled else []), *words])


@pytest.mark.parametrize(("number", "at_least"), [(25, 2), pytest.param(500, 80, marks=pytest.mark.slow)])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_drawn_line_is_answered_by_a_command_that_resolves_or_by_one_line(script, number, at_least):
    rng = random.Random(script)
    found = 0
    for _ in range(number):
        line = draw(script, rng)
        text = answer(line)
        words = command_of(text)
        if words is None:
            assert re.fullmatch(".*(does what no command here does: |argument --|has no model).*", text), line
            continue
        found += 1
        args = config.parse_args(words)
        assert args.optimization.opt.removeprefix("timm/") in [*timm.optim.list_optimizers(), "rmsprop"], line
        assert timm.is_model(args.model.model.removeprefix("timm/").partition(".")[0]), line
    print(f"{script}: {found} commands of {number}")
    assert found > at_least


def commands(script, number, folder):
    """Return commands here for drawn lines of a script, those of an evaluation with a file of weights."""
    file = folder / "weights.pth"
    torch.save(timm.create_model("test_resnet").state_dict(), file)
    more = f" --model test_resnet --checkpoint {file}" if script == "timm/validate.py" else ""
    rng = random.Random(number)
    drawn = (command_of(answer(draw(script, rng, FILES) + more)) for _ in iter(int, 1))
    return list(islice(filter(None, drawn), number))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_twenty_commands_pass_a_dry_run(script, tmp_path):
    for words in commands(script, 20, tmp_path):
        assert "learning rate at the start of epoch" in preview(config.parse_args([*words, "--dry-run"])), words


@pytest.mark.parametrize("script", ["timm/train.py", "swin/main.py"])
def test_a_command_passes_a_dry_run(script, tmp_path):
    (words,) = commands(script, 1, tmp_path)
    run = [sys.executable, "train.py", *words, "--dry-run"]
    assert b"learning rate at the start of" in subprocess.check_output(run, cwd=Path(__file__).parents[1])
