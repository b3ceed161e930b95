"""Options and recipes: torchvision's flags and defaults, errors of one line, and command lines of other scripts."""

import argparse
import json
import re
import shlex
import tomllib
from contextlib import nullcontext
from pathlib import Path

import pytest
import timm.scheduler
import torch
import torchvision
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode

from checkpointing.published import resolve_weights
from errors import UserError
from models.optim import lr_at
from scripts import tool
from settings import choices, config, options, other_scripts
from settings.packages import find_timm_config
from settings.parser import build_parser
from settings.rules import OwnCode

DATA = ["--data-path", "images"]


def parse(*argv):
    return config.parse_args([*DATA, *argv])


def refusal(*argv):
    with pytest.raises(UserError) as caught:
        config.parse_args(list(argv))
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_other_spellings_and_cases_are_taken_as_torchvision_takes_them():
    args = parse(*"--opt SGD_Nesterov --lr-scheduler CosineAnnealingLR --synthetic -b 8 -j 3 --wd 0.5".split())
    assert (args.optimization.opt, args.schedule.lr_scheduler, args.data.synthetic) == (
        "sgd_nesterov",
        "cosineannealinglr",
        12_800,
    )
    assert (args.optimization.batch_size, args.data.workers, args.optimization.weight_decay) == (8, 3, 0.5)


@pytest.mark.parametrize(("argv", "words"), [
    (["--batch=8"], "--batch is --batch-size; the command here: python train.py"),
    (["--bach-size", "8"], "--bach-size 8 is unknown; did you mean --batch-size?"),
    (["images"], "unrecognized argument: images is unknown"),
    (["--pretrained"], "--weights IMAGENET1K_V1"),
    (["--lr-scheduler", "cosine"], "--lr-scheduler cosine: unknown schedule"),
    (["--opt", "adamww"], "did you mean adamw? timm's are written timm/NAME, your own FILE.py:FUNCTION"),
    (["--recipe", "digit"], "--recipe digit: no such recipe; did you mean digits?"),
    (["--recipe", f"recipes/{'x' * 256}.toml"], "no such recipe"),
    (["--batch-size", "12", "--global-batch-size", "64"], "is not a multiple of --batch-size 12; give 60"),
    (["--batch-size", "12", "--global-batch-size", "6"], "is not a multiple of --batch-size 12; give 12"),
    (["--overwrite", "--resume", "auto"], "give only one of them"),
    (["--test-only"], "--test-only needs something to evaluate"),
    (["--test-only", "--resume", "auto"], "needs --output-dir"),
    (["--resume", "auto", "--allow-change", "lr,epoch"], "--allow-change epoch: there is no such option; did you"),
    (["--resume", "auto", "--allow-change", "model"], "--allow-change model: a resumed run cannot change it"),
    (["--epochs", "five"], "argument --epochs: invalid int value: 'five'"),
    (["--lr-scaling", "linear"], "--lr-scaling linear needs --lr-scaling-batch"),
    (["--lr-scaling-batch", "256"], "--lr-scaling-batch has no effect without --lr-scaling linear, sqrt"),
    (["--start-epoch", "3", "--stop-epoch", "3"], "expected less than --stop-epoch 3"),
    (["--blur-prob", "1", "--train-crop-size", "6"], "--blur-prob needs training images of 7 pixels or more"),
    *(
        (["--eval-data", "a=b", text], f"--eval-data {text}: expected NAME=DIR")
        for text in ("a=c", "val=c", "x_ema=c", "c", "a/b=c", "b=", "=b")
    ),
    (["--clip-agc", "0.1", "--clip-grad-value", "1"], "give only one of them"),
    (["-b--"], "argument -b/--batch-size: expected a value, not --"),
    (["--weights", f"runs/{'x' * 256}", "--ema"], "...: a name in it has more than 255 characters"),
    (["--weights", "m.pth", "--ema"], "--weights m.pth is not there or no file; give --weights FILE"),
    (["--ema"], "--weights is not given; give --weights FILE"),
    (["--output-dir", ""], "--output-dir is empty"),
    (["--multi-label"], "--multi-label: softmax losses need exactly one class per image; give --criterion bce"),
    (["--multi-label", "/", "--bce-loss"], "--multi-label /: expected one character that separates labels, other"),
    (["--multi-label", "--bce-loss", "--synthetic", "64"], "--synthetic images have one class"),
    (["--multi-label", "--bce-loss", "--balanced-sampler"], "--balanced-sampler needs exactly one class per image"),
    (["--multi-label", "--bce-loss", "--metrics", "balanced_acc"], "balanced_acc exactly one class per image"),
    (["--allow-change", "lr"], "--allow-change has no effect without --resume"),
    (["--crop-ramp-epochs", "1", "2"], "--crop-ramp-epochs has no effect without --train-crop-size-min"),
    (["--metrics", "map"], "--metrics: map needs several labels per image"),
])  # fmt: skip
def test_what_is_mistyped_contradictory_or_empty_is_refused_with_the_right_word(argv, words):
    assert words in refusal(*DATA, *argv)


def test_a_run_cannot_write_into_its_own_images(tmp_path, monkeypatch):
    inside = str(tmp_path / "train" / "runs")
    assert "lies inside train/" in refusal("--data-path", str(tmp_path), "--output-dir", inside)
    (tmp_path / "val").mkdir()
    monkeypatch.chdir(tmp_path / "val")  # where runs/MODEL would be
    assert "inside val/" in refusal("--data-path", "..")
    config.parse_args(["--data-path", "..", "--test-only", "--weights", "DEFAULT"])
    config.parse_args(["--data-path", "..", "--output-dir", str(tmp_path / "trained")])


def test_no_list_of_names_holds_one_twice():
    values = {"metrics": "f1", "extensions": ".avif", "logger": "tensorboard", "eval_data": "a=b"}
    values["model_kwargs"] = "width=8"
    lists = {option.dest for option in options.BY_NAME.values() if option.nargs in ("*", "+")}
    assert values.keys() == lists - {"mean", "std", "lr_milestones"}  # of numbers, which may be equal
    for dest, value in values.items():
        message = refusal(*DATA, f"{options.BY_NAME[dest].flag}", value, value)
        assert options.BY_NAME[dest].flag in message
        assert re.search("twice|two loggers|a different NAME", message)
    assert parse("--extensions", ".AVIF", "--extensions", ".heic").data.extensions == [".avif", ".heic"]


def test_an_address_is_refused_wherever_a_local_path_is_needed_without_its_secrets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table, types = options.BY_NAME.values(), (str, options.lower)
    texts = {option.dest for option in table if option.type in types and not option.choices}
    for dest in sorted(texts - {"list_recipes", "device", *options.TAKES_ADDRESS}):
        message = refusal(*DATA, f"{options.BY_NAME[dest].flag}=s3://me:secret@bucket/run")
        assert "secret" not in message or dest in ("recipe", "model"), message
        if dest != "recipe":  # "no such recipe"
            assert message.startswith(f"{options.BY_NAME[dest].flag} s3://...: expected a local path, not an address; ")
            assert "aws s3 sync" in message
    assert not list(tmp_path.iterdir())


def test_a_home_folder_is_expanded_wherever_a_path_is_given(tmp_path, monkeypatch, recipe):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", home := str(tmp_path / "home"))
    words = ["--output-dir=~/x", "--data-path=~/images", "--model=~/own.py:f", "--eval-data", "a=~/b", "c=d~/e"]
    args = parse(*words, "--multi-label=~", "--criterion=bce")
    assert (args.checkpoint.output_dir, args.data.data_path, args.model.model) == (
        f"{home}/x",
        f"{home}/images",
        f"{home}/own.py:f",
    )
    assert (type(args.model.model), args.data.eval_data, args.data.multi_label) == (
        OwnCode,
        [f"a={home}/b", "c=d~/e"],
        "~",
    )
    assert parse("--output-dir=~").checkpoint.output_dir == home
    assert config.parse_args(recipe('[data]\ndata-path = "~/images"\n')).data.data_path == f"{home}/images"
    assert (
        config.resolve(argparse.Namespace(output_dir="~/x", synthetic=8)).checkpoint.output_dir == f"{home}/x"
    )  # a notebook's
    parser = tool.build_parser("tool", "", "A tool.")
    parser.add_argument("--json", type=tool.output_file(".json"))
    parser.add_argument("path", nargs="*", type=tool.as_place)
    (tmp_path / "home").mkdir()
    found = parser.parse_args(["--json=~/a.json", "~/b", "d~/c"])
    assert (found.json, found.path) == (Path(home, "a.json"), [Path(home, "b"), Path("d~/c")])
    # A run of before this was so is in a folder of that name, and goes on there.
    (tmp_path / "~" / "x").mkdir(parents=True)
    assert parse("--output-dir=~/x", "--resume", "auto").checkpoint.output_dir == "~/x"
    with pytest.raises(UserError, match="~nobody-here is nobody's home folder here; give a whole path"):
        parse("--eval-data", "a=~nobody-here/x")


OUT_OF_RANGE = [
    *[(option, "0", "1 or more") for option in ["--batch-size", "--epochs", "--print-freq", "--world-size"]],
    *[(option, "-1", "0 or more") for option in ["--workers", "--lr", "--lr-warmup-epochs", "--seed", "--momentum"]],
    *[(option, value, "a number from 0 to 1") for value in ["-0.1", "1.1"] for option in ["--crop-scale", "--dropout"]],
    *[(option, "1", "below 1") for option in ["--label-smoothing", "--model-ema-decay", "--momentum"]],
    *[(option, "0", "above 0") for option in ["--clip-grad-norm", "--lr-gamma", "--minival"]],
    *[("--lr", value, "a finite number") for value in ["nan", "inf", "-inf"]],
    ("--minival", "2", "0 to 0.5"),
    ("--keep-last", "1", "2 or more"),
    ("--dist-timeout", "0", "0.001 or more"),
    ("--ra-magnitude", "31", "30"),  # RandAugment has 31 magnitudes and fails at the first image otherwise
]


def test_a_number_out_of_range_is_refused():
    for option, value, expected in OUT_OF_RANGE:
        message = refusal(*DATA, f"{option}={value}")
        assert message.startswith(f"{option} ")
        assert expected in message


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        path = tmp_path / "given.toml"
        path.write_text(text, encoding="utf-8")
        return ["--recipe", str(path)]

    return write


RECIPE = """
title = "a title"
expected-acc1 = 76.1
[data]
data-path = "some images"
workers = 0
[augmentation]
mean = [0, 0.5, 1]
[model]
model-ema = true
sync-bn = false
[optimization]
lr = 1
wd = 2e-5
opt = "SGD"
[precision]
amp = true
amp-dtype = "bfloat16"
"""


def test_a_recipe_gives_options_and_the_command_line_wins_wherever_it_stands(recipe):
    argv = recipe(RECIPE)
    args = config.parse_args(argv)
    given = {"data_path": "some images", "workers": 0, "mean": [0.0, 0.5, 1.0], "model_ema": True, "sync_bn": False}
    given |= {"lr": 1.0, "weight_decay": 2e-5, "opt": "sgd", "amp": True, "amp_dtype": "bfloat16"}
    assert repr({name: args.flat()[name] for name in given}) == repr(given)  # and their types
    assert args.origin.given == sorted({*given, "recipe"})
    own = ["--lr", "0.25", "--no-model-ema", "--no-amp"]  # --amp-dtype without effect is in the recipe
    for order in ([*argv, *own], [*own, *argv]):
        args = config.parse_args(order)
        assert (args.optimization.lr, args.optimization.weight_decay, args.model.model_ema, args.precision.amp) == (
            0.25,
            2e-5,
            False,
            False,
        )
        assert args.origin.given == sorted({*given, "recipe"})


@pytest.mark.parametrize(("text", "message"), [
    ("[optimisation]\nlr = 1.0\n", "unknown table [optimisation]; did you mean optimization?"),
    ("[optimization]\nmomentun = 0.9\n", "unknown option momentun in [optimization]; did you mean momentum?"),
    ("[model]\nno-sync-bn = true\n", "unknown option no-sync-bn in [model]"),
    ("tolerence = 0.1\n", "unknown fact tolerence; did you mean tolerance?"),
    ('[optimization]\nlr = "0.1"\n', 'lr = "0.1", but lr takes a number'),
    ("[optimization]\nopt = 1979-05-27\n", 'opt = "1979-05-27", but opt takes a string'),
    ("[model]\nsync-bn = 1\n", "sync-bn = 1, but sync-bn takes true or false"),
    ("[augmentation]\nmean = [0.5, 0.5]\n", "--mean has 2 values, but --in-chans is 3"),
    ("[optimization]\nlr = -1.0\n", "--lr -1.0: expected 0 or more"),
    ("[optimization\n", "is not valid TOML"),
])  # fmt: skip
def test_what_a_recipe_may_not_say(recipe, text, message):
    assert message in refusal(*DATA, *recipe(text))


# Where and how a run was started is no part of what it computes.
NOT_COMPUTED = "recipe given output_dir overwrite resume start_epoch world_size dist_url typed".split()


def computed(args):
    return {name: value for name, value in args.flat().items() if name not in NOT_COMPUTED}


ROUND_TRIPS = [
    "--data-path images --model swin_t --opt adamw --norm-weight-decay 0.0 --lr-min 0.00001 --amp --model-ema -b 128",
    "--synthetic 64 --lr 1e-30 --wd 0.30000000000000004 --model-ema-decay 0.99998 --output-dir out --resume auto",
    """--data-path 'with "quotes" and \\ and ' --weights 'tab\there' --workers 0 --device cpu""",
    "--data-path 'umlaut \u00e4, kanji \u56f3, camera \U0001f4f7 and control \x7f\x01'",
]


@pytest.mark.parametrize("command", ROUND_TRIPS)
def test_a_written_recipe_says_the_same(command, recipe):
    args = config.parse_args(shlex.split(command))
    text = config.write_recipe(args)
    again = config.parse_args(recipe(text))
    assert computed(again) == computed(args)
    assert config.write_recipe(again) == text


def test_a_written_recipe_holds_the_defaults_and_what_was_given_but_neither_place_nor_machine(recipe):
    elsewhere = ["--output-dir", "here", "--resume", "auto", "--world-size", "4", "--dist-url", "tcp://host:1"]
    again = config.parse_args(recipe(config.write_recipe(parse(*elsewhere))))
    assert (again.checkpoint.output_dir, again.checkpoint.resume) == (None, "")
    assert (again.distributed.world_size, again.distributed.dist_url) == (1, "env://")
    table = tomllib.loads(config.write_recipe(config.on_machine(parse())[0]))
    assert "workers" not in table["data"]
    assert "device" not in table.get("distributed", {})
    assert table["optimization"]["momentum"] == 0.9
    assert "clip-grad-norm" not in table["optimization"]  # TOML has no word for none


def test_what_is_derived_is_said_once(monkeypatch):
    args = parse("--model", "resnet50")
    record, lines = config.on_machine(args)
    assert (args.checkpoint.output_dir, args.data.workers) == (None, None)
    assert record.checkpoint.output_dir == "runs/resnet50"
    assert 1 <= record.data.workers <= 16
    for option in ("--device", "--workers", "--output-dir"):
        assert sum(line.startswith(option) for line in lines) == 1
    assert config.on_machine(record) == (record, [])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000")  # processes share the cores of a node
    for name, value in {"RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert config.on_machine(parse())[0].data.workers == 1


def test_the_table_names_what_torch_and_torchvision_have():
    """It repeats their names, so that help needs neither; here they are asked."""
    assert [mode.value for mode in InterpolationMode] == options.INTERPOLATIONS
    assert {policy.value for policy in AutoAugmentPolicy} < set(choices.POLICIES)
    assert set(options.COMPILE_MODES) <= set(torch._inductor.list_mode_options())
    types = {getattr(torch, name) for name in options.BY_NAME["amp_dtype"].choices}
    assert types == {torch.bfloat16, torch.float16, torch.float32}


HERE = ["--device", "cpu", "--workers", "0", "--output-dir", "out"]


def lines_about(*argv):
    """Return the first word of each line that a run begins with, given options that nothing is derived from."""
    return [line.split()[0] for line in config.on_machine(parse(*HERE, *argv))[1]]


@pytest.mark.parametrize(("given", "expected"), [
    (["--ra-sampler", "--ra-reps", "2", "--model-ema-decay", "0.9", "--model-ema-steps", "8"],
     ["--model-ema-steps", "--model-ema-decay"]),
    (["--model-ema", "--model-ema-decay", "0.9"], []),
    (["--lr-gamma", "0.2", "--lr-min", "0.01", "--lr-scheduler", "cosineannealinglr"], ["--lr-gamma"]),
    (["--lr-min", "0.01", "--lr-power", "2", "--lr-warmup-decay", "0.1", "--ra-magnitude", "3"],
     ["--ra-magnitude", "--lr-warmup-decay", "--lr-power", "--lr-min"]),
    (["--val-crop-size", "256", "--val-resize-size", "224"], ["--val-crop-size"]),
    (["--freeze"], ["--freeze"]),
    (["--freeze-below", "layer2"], ["--freeze"]),
    (["--freeze-below", "layer2", "--freeze", "--weights", "DEFAULT"], ["--freeze-below"]),
    (["--epochs", "9", "--stop-epoch", "9"], ["--stop-epoch"]),
    (["--epochs", "9", "--patience", "9"], ["--patience"]),
    (["--epochs", "9", "--mixup-alpha", "1", "--mixup-off-epoch", "9"], ["--mixup-off-epoch"]),
    (["--epochs", "9", "--mixup-alpha", "1", "--mixup-switch-prob", "1"], ["--mixup-switch-prob"]),
    (["--epochs", "9", "--weights", "DEFAULT", "--freeze-epochs", "9"], ["--freeze-epochs"]),
    (["--epochs", "9", "--weights", "DEFAULT", "--freeze-epochs", "8", "--patience", "8"], []),
    (["--weights", "DEFAULT", "--freeze", "--freeze-epochs", "1", "--norm-weight-decay", "0"],
     ["--freeze-epochs", "--norm-weight-decay"]),
    (["--freeze", "--weights", "DEFAULT", "--layer-decay", "0.5", "--clip-agc", "1", "--stochastic-depth", "0.5"],
     ["--stochastic-depth", "--layer-decay", "--clip-agc"]),
    (["--opt", "adamw", "--momentum", "0.1"], ["--momentum"]),
    (["--synthetic", "64", "--crop-scale", "0.2", "--auto-augment", "ra", "--grayscale-prob", "1",
      "--blur-prob", "1"],
     ["--data-path", "--crop-scale", "--auto-augment", "--grayscale-prob", "--blur-prob"]),
    (["--test-only", "--resume", "a.pth", "--weights", "IMAGENET1K_V1"], ["--weights"]),
])  # fmt: skip
def test_an_option_without_effect_or_with_an_unlikely_one_is_said(given, expected):
    assert lines_about(*given) == expected


def test_defaults_in_a_recipe_are_no_options_without_effect(recipe):
    written = recipe(config.write_recipe(parse("--lr-scheduler", "cosineannealinglr")))  # holds every option
    assert lines_about(*written) == []
    assert lines_about(*written, "--lr-gamma", "0.2") == ["--lr-gamma"]


# All flags of timm's train.py, of 2022 and of 2026, with a value each.
TIMMS = """
    --aa rand-m9|--amp|--amp-dtype bfloat16|--amp-impl native|--apex-amp|--aug-repeats 3|--aug-splits 3
    --batch-size 8|--bce-loss|--bce-pos-weight 1|--bce-sum|--bce-target-thresh 0.2|--bn-eps 1|--bn-momentum 1
    --channels-last|--checkpoint-hist 3|--class-map f|--clip-grad 1|--clip-mode norm|--color-jitter 0.4
    --color-jitter-prob 1|--config f|--cooldown-epochs 3|--crop-pct 0.9|--cutmix 1|--cutmix-minmax 0 1
    --data-dir d|--dataset n|--dataset-download|--dataset-trust-remote-code|--decay-epochs 3
    --decay-milestones 3 4|--decay-rate 0.1|--device cpu|--device-modules m|--dist-bn reduce|--dr 0.1
    --drop 0.1|--drop-block 0.1|--drop-connect 0.1|--drop-path 0.1|--epoch-repeats 2|--epochs 9
    --eval-metric top1|--experiment n|--fast-norm|--fuser n|--gaussian-blur-prob 1|--gp avg
    --grad-accum-steps 2|--grad-checkpointing|--grayscale-prob 1|--head-init-bias 1|--head-init-scale 1
    --hflip 0.5|--img-size 160|--in-chans 1|--initial-checkpoint f|--input-img-mode L|--input-key k
    --input-size 3 160 160|--interpolation bicubic|--jsd-loss|--layer-decay 0.7|--layer-decay-min-scale 0
    --layer-decay-no-opt-scale 0|--local-rank 0|--local_rank 0|--log-interval 3|--log-wandb|--lr 0.1
    --lr-base 0.1|--lr-base-scale sqrt|--lr-base-size 256|--lr-cycle-decay 1|--lr-cycle-limit 1
    --lr-cycle-mul 1|--lr-k-decay 1|--lr-noise 0.1 0.2|--lr-noise-pct 1|--lr-noise-std 1|--mean 0 0 0
    --min-lr 1e-6|--mixup 0.1|--mixup-mode batch|--mixup-off-epoch 3|--mixup-prob 1|--mixup-switch-prob 1
    --model resnet50|--model-dtype float16|--model-ema|--model-ema-decay 0.9|--model-ema-force-cpu
    --model-ema-warmup|--model-kwargs a=1|--momentum 0.9|--native-amp|--no-aug|--no-ddp-bb|--no-prefetcher
    --no-resume-opt|--num-classes 3|--opt lamb|--opt-betas 0.9 0.99|--opt-eps 1e-8|--opt-kwargs a=1|--output d
    --patience-epochs 3|--pin-mem|--pretrained|--pretrained-path f|--ratio 0.7 1.3|--recount 1
    --recovery-interval 3|--remode pixel|--reprob 0.1|--resplit|--resume f|--save-images|--scale 0.3 1
    --sched cosine|--sched-on-updates|--seed 3|--smoothing 0.1|--split-bn|--start-epoch 0|--std 1 1 1|--sync-bn
    --synchronize-step|--target-key k|--torchcompile|--torchcompile-mode default|--torchscript
    --train-crop-mode m|--train-interpolation random|--train-num-samples 3|--train-split train|--tta 2
    --use-multi-epochs-loader|--val-interval 2|--val-num-samples 3|--val-split val|--validation-batch-size 8
    --vflip 0.1|--wandb-project n|--wandb-resume-id n|--wandb-tags a b|--warmup-epochs 5|--warmup-lr 1e-5
    --warmup-prefix|--weight-decay 0.1|--worker-seeding all|--workers 3|-b 8|-c f|-j 3|-vb 8
"""
KNOWN = {*build_parser()._option_string_actions}


def translated(line):
    """Return what is said of each unknown flag of a command line, and the command here, or None."""
    with pytest.raises(UserError, match="unrecognized") as caught:
        config.parse_args(shlex.split(line))
    end = r"(?:the command here(?: \(.*\))?: python train\.py ?(.*)|.*--help lists the options\)?)"
    found = re.fullmatch(rf"unrecognized arguments?:(.*)(?:\n|; |\? ){end}", str(caught.value), re.DOTALL)
    return found[1].removeprefix("\n").strip().split("\n  "), found[2]


def test_every_flag_of_timms_is_known_or_answered():
    for flag in re.split(r"[|\n] *", TIMMS.strip()):
        if flag.split()[0] not in KNOWN:
            phrases, line = translated(f"{flag} --data-path d")
            assert ["unknown" in phrase for phrase in phrases] == [False], flag
            assert "--data-path" in line, flag
            assert {word for word in line.split() if word.startswith("--")} <= KNOWN, flag


@pytest.mark.parametrize(("line", "expected"), [
    ("--decay-epochs 2.4 --decay-rate .97 --sched step", "--lr-scheduler exponentiallr --lr-gamma 0.987389"),
    ("--lr-base 0.1 --opt adamw", "--lr 0.1 --opt timm/adamw --lr-scaling sqrt --lr-scaling-batch 256"),
    ("-a resnet18 --dist-backend nccl --multiprocessing-distributed --rank 0",
     "--model resnet18 --batch-size 256 --global-batch-size 256"),
    ("-a vgg11 -b 64 --world-size 2", "--model vgg11 --batch-size 64 --global-batch-size 128"),
    ("--recipe digits -a vgg11 -b 8", "--recipe digits --model vgg11 -b 8"), ("--apex --apex-opt-level O0", ""),
    ("-p 1 --batch_size 8", "--print-freq 1 --batch-size 8 --global-batch-size 8"),
    ("--gp max --model-kwargs a=1 --model-kwargs b=2", "--model-kwargs a=1 b=2 global_pool=max"),
    ("--lr-base 0.1 --lr-base-size 512", "--lr 0.1 --lr-scaling-batch 512 --lr-scaling linear"),
    ("--tta 2", "--eval-flip"), ("--torchcompile inductor", "--compile"), ("--torchcompile", "--compile"),
    ("--apex --apex-opt-level O1", "--amp"), ("--gaussian-blur-prob 0.2", "--blur-prob 0.2"),
    ("--clip-grad 0.02 --clip-mode agc", "--clip-agc 0.02"),
    # torchvision's parser takes unique beginnings; forks name a file.
    ("--batch 64 --epoch 3 --tes", "--batch-size 64 --epochs 3 --test-only"),
    ("--pretrained best.pth.tar", "--weights best.pth.tar"),
    ("--sched poly --decay-rate 0.9", "--lr-scheduler polylr --lr-power 0.9"),
    ("--amp-dtype bfloat16 --native-amp", "--amp-dtype bfloat16 --amp"),
    ("--gpu 1 --fp16", "--device cuda:1 --amp --batch-size 256 --global-batch-size 256"),
    ("--reprob 0.2", "--random-erase 0.2 --random-erase-fill pixel"),
    ("--clip-grad 2 --clip-mode value", "--clip-grad-value 2"), ("--aa v0 --color-jitter 1", "--auto-augment timm/v0"),
    ("--sched cosine --dr 0.2", "--lr-scheduler cosineannealinglr"), ("--decay-milestones 3 4", "--lr-milestones 2 3"),
    ("--pin-mem --model-ema", "--model-ema --model-ema-steps 1 --no-model-ema-adjust --model-ema-decay 0.9998"),
    ("--epochs 10 --warmup-epochs 5 --warmup-prefix", "--epochs 15 --lr-warmup-epochs 5 --lr-warmup-method linear "
     "--lr-warmup-prefix --lr-warmup-decay 0.0001"),
    ("--input-size 3 8 8 --crop-pct 0.5", "--in-chans 3 --train-crop-size 8 --val-crop-size 8 --val-resize-size 16"),
    ("--lr-base 0.5 --warmup-lr 1e-4 -b 64 --opt lamb --grad-accum-steps 16", "--lr 0.5 -b 64 --opt timm/lamb "
     "--lr-scaling sqrt --lr-scaling-batch 256 --lr-warmup-epochs 5 --lr-warmup-method linear --no-lr-warmup-prefix "
     "--global-batch-size 1024 --lr-warmup-decay 0.0001"),
    # A whole command; timm resizes 160 / 0.95 to 168.
    ("--model resnet50 --aa rand-m7-mstd0.5-inc1 --smoothing 0.1 --mixup 0.1 --cutmix 1.0 --warmup-epochs 5 "
     "--warmup-lr 1e-4 --min-lr 1e-6 --sched cosine --lr 5e-3 --opt lamb --weight-decay .02 --bce-loss --crop-pct 0.95 "
     "--img-size 160 --native-amp --recount 1 --reprob 0.25 --remode const --model-ema -b 256 --grad-accum-steps 2 "
     "--log-interval 10 --output /runs --experiment a --drop-path 0.1 --scale 0.35 1.0",
     "--model timm/resnet50 --auto-augment timm/rand-m7-mstd0.5-inc1 --label-smoothing 0.1 --mixup-alpha 0.1 "
     "--cutmix-alpha 1.0 --lr-warmup-epochs 5 --lr-warmup-method linear --lr-min 1e-6 --lr-scheduler cosineannealinglr "
     "--lr 5e-3 --opt timm/lamb --weight-decay .02 --bce-loss --train-crop-size 160 --val-crop-size 160 --amp "
     "--random-erase 0.25 --random-erase-fill zero --model-ema -b 256 --print-freq 10 --output-dir /runs/a "
     "--stochastic-depth 0.1 --crop-scale 0.35 --no-lr-warmup-prefix --model-ema-steps 1 --no-model-ema-adjust "
     "--model-ema-decay 0.9998 --val-resize-size 168 --global-batch-size 512 --lr-warmup-decay 0.02"),
])  # fmt: skip
def test_lines(line, expected):
    assert translated(f"d {line}")[1].replace(" --no-decay-1d", "") == f"--data-path d {expected}".rstrip()


@pytest.mark.parametrize("line", [
    "--batchsize 32", "--modle x", "--torchcompile eager", "--mod x",
    "--lr-w 3", "--sched cosin --dr 0.2", "--sched plateau", "--output",
    "--remode rand", "--drop-path 0.2 --dropout 0.1 --drop 0.3", "e --batch_size 64 -j8", "--batch_size x",
    "--recipe resnet50-v1 --crop-pct 0.9", "--input-size 3 96 64", "--arch", "--data-dir d --modell vgg11",
    "--smoothing 0.1 --epoch", "--xyzzy", "--batch_size 1 --modell",
])  # fmt: skip
def test_no_command_is_proposed_where_a_word_is_not_understood(line):
    assert translated(f"d {line}")[1] is None


@pytest.mark.parametrize("flag", ["--epoch 5", "--epo 5", "--dataset_dir d", "--wandb-proj x", "--scale-lr 1"])
def test_no_typo_is_taken_for_a_flag_that_is_not_here(flag):
    meant = re.findall(r"did you mean (--[\w-]+)", " ".join(translated(f"--data-path d {flag}")[0]))
    assert all(name in KNOWN or other_scripts.FLAGS[name].here.startswith("--") for name in meant)


def test_the_page_shows_the_rows():
    page = (Path(__file__).parents[1] / "docs" / "other-scripts.md").read_text()
    assert page.endswith(f"\n\n{other_scripts.table_of()}\n"), "python -m settings.other_scripts prints the table"


@pytest.mark.parametrize(("line", "expected"), [
    ("--drop-path 0.1 --drop-connect 0.2", "--drop-connect 0.2 conflicts with other flags over --stochastic-depth;"),
    ("--pretrained --pretrained-path f", "is not needed with --pretrained-path'"),
    ("--jsd", "--jsd is not supported here'"),
    ("--aa v0 --color-jitter 0.4", "--color-jitter 0.4 is not needed with --aa'"), ("--xyzzy", "--xyzzy is unknown'"),
    ("--sched cosin", "--sched cosin is not supported here; did you mean cosine?"),
    ("--dr 0.1", "--dr 0.1 is --lr-gamma 0.1'"),
    ("--data-dir 'my photos'", "my photos is --data-path 'my photos'"), ("--recount 2", "(one rectangle)'"),
    ("--recovery-interval 0", "is not needed here'"),
    ("--bach-size 8", "is unknown; did you mean --batch-size'"), ("--policy-magnitude 15", "is --ra-magnitude 15'"),
    ("--vflip 0. --no-aug", "--vflip 0. is not needed here'"), ("--warmup-epochs 5", "5 --lr-warmup-method linear'"),
    ("--recovery-interval 9", "is --checkpoint-steps 9'"), ("--remode rand", "rand is nearer pixel)'"),
    ("--clip-mode x", "not supported here'"), ("--decay-epochs 40.0", "is --lr-step-size 40'"),
    ("--batch_size 8", "is --batch-size'"), ("--opt-foo 3", "is unknown'"), ("--vflip 0.5", "not supported here'"),
])  # fmt: skip
def test_what_is_said_of_a_flag(line, expected):
    assert expected in str(translated(line)[0])


@pytest.mark.parametrize("flags", ["step", "poly", "multistep", "cosine --warmup-epochs 5"])
def test_learning_rates_are_timms(flags):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.4)
    args = config.parse_args(shlex.split(translated(f"--data-path d --epochs 300 --lr 0.4 --sched {flags}")[1]))
    warmup = 5 * ("warmup" in flags)
    scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer, flags.split()[0], num_epochs=300, warmup_epochs=warmup)
    for epoch in (0, 4, 5, 39, 40, 88, 89, 90, 180, 269, 270, 299):
        scheduler.step(epoch)
        assert lr_at(args.schedule, epoch, 0.4) == pytest.approx(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(("model", "share"), [("efficientnet_b2", 0.9), ("vit_base_patch16_384", 1), ("resnet18", 0.9)])
def test_the_resized_side_is_timms_for_the_models_own_size(model, share):
    theirs = timm.data.resolve_data_config({"crop_pct": share}, find_timm_config(f"timm/{model}").to_dict())
    args = config.parse_args(translated(f"--data-path d --model {model} --crop-pct {share}")[1].split())
    assert timm.data.create_transform(**theirs).transforms[0].size == args.augmentation.val_resize_size


# pytorch/examples: args.batch_size = int(args.batch_size / ngpus_per_node), 256 by default; --world-size is of nodes.
@pytest.mark.parametrize(("line", "expected"), [
    ("--data-path d --grad-accum-steps 4 -b 8", "--data-path d -b 8 --no-decay-1d --global-batch-size 64"),
    ("-a vgg11 --world-size 1 D", "--model vgg11 --data-path D --batch-size 128 --global-batch-size 256"),
    ("-a vgg11 -b 65 D", "--model vgg11 --batch-size 32 --global-batch-size 64 --data-path D"),
])  # fmt: skip
def test_under_torchrun_the_command_begins_with_it_and_counts_its_processes(monkeypatch, line, expected):
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name, value in {**place, "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=re.escape(f"torchrun --nproc_per_node=2 train.py {expected}") + "(\n|$)"):
        config.parse_args(line.split())


@pytest.mark.filterwarnings("error:Arguments other than a weight enum")
def test_pretrained_is_what_torchvisions_own_pretrained_loads():
    for name in torchvision.models.list_models(module=torchvision.models):
        with pytest.raises((UserWarning, ValueError)) as caught:  # before anything is loaded
            torchvision.models.get_model_builder(name)(pretrained=True)
        expected = re.search(r"passing `weights=(\w+\.\w+)`|No weights available", str(caught.value))[1]
        args = config.parse_args(translated(f"-a {name} --pretrained -e D")[1].split())
        with nullcontext() if expected else pytest.raises(UserError, match="no weights of torchvision's"):
            assert str(resolve_weights(args.model)) == expected


def test_help_on_a_word(capsys):
    for word, expected in (("cutmix", "--cutmix-alpha"), ("drop-path", "--stochastic-depth P")):
        with pytest.raises(SystemExit):
            config.parse_args(["--help", word])
        shown = capsys.readouterr().out
        assert expected in shown
        assert "--epochs" not in shown
    with pytest.raises(UserError, match="--help xyzzy"):
        config.parse_args(["--help", "xyzzy"])


PUBLISHED = json.loads(Path(__file__).with_name("published_lines.json").read_text())


def answer_to(line):
    """Return the command that a published one is here, or the flags that have no meaning here."""
    words, parser = shlex.split(line), build_parser()
    try:
        _, unknown = parser.parse_known_args(words)
    except UserError as error:
        return [str(error)]
    command = other_scripts.OtherCommand(words, parser._option_string_actions)
    if not unknown:
        return line
    strangers = [phrase.partition(" is unknown")[0] for phrase in command.phrases if " is unknown" in phrase]
    if strangers or not command.is_understood:
        return strangers
    assert not parser.parse_known_args(command.words)[1]
    return shlex.join(command.words)


def test_a_published_command_is_answered_as_it_was_judged():
    """From READMEs, scripts and documentation of public repositories; each answer was read by a person."""
    assert {line: answer_to(line) for line in PUBLISHED} == PUBLISHED
