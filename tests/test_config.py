"""Options and recipes: torchvision's flags and defaults, and errors of one line."""

import argparse
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode

from errors import UserError
from scripts import tool
from settings import choices, config, options
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
    (["--bach-size", "8"], "--bach-size is unknown; did you mean --batch-size?"),
    (["images"], "images is unknown"),
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


def test_help_on_a_word(capsys):
    for word, expected in (("cutmix", "--cutmix-alpha"), ("drop-path", "here --stochastic-depth N")):
        with pytest.raises(SystemExit):
            config.parse_args(["--help", word])
        shown = capsys.readouterr().out
        assert expected in shown
        assert "--epochs" not in shown
    with pytest.raises(UserError, match="--help xyzzy"):
        config.parse_args(["--help", "xyzzy"])
