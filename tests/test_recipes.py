"""Recipes and torchvision's published commands: each resolves, and builds what it means."""

import functools
import json
import math
import re
import shlex
import tomllib

import numpy as np
import pytest
import timm.loss
import timm.scheduler
import timm.utils
import torch
import torchvision
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, MultiStepLR, SequentialLR, StepLR
from torchvision.transforms import autoaugment

import data
import presets
from errors import UserError
from models import optim
from models.build import build_ema, build_without_memory
from models.losses import build_criterion
from monitoring import preview
from settings import checks, config, recipes
from tests.images import pack_shards
from tests.ranks import REPOSITORY, run_ranks, some_slow, train_rank
from transforms import RandomMix

RECIPES = sorted(path.stem for path in recipes.RECIPES_DIR.glob("*.toml"))


def argv_of_recipe(name):
    command = recipes.read_recipe(recipes.find_recipe(name)).get("command", "")
    own = [f"--model={REPOSITORY}/{found}" for found in re.findall(r"--model (\S+\.py:\S+)", command)]
    return ["--recipe", name, "--dry-run", *own]


@functools.cache
def options_by_name(name):
    args = config.parse_args(argv_of_recipe(name))
    batch = args.optimization.global_batch_size or args.optimization.batch_size
    return args.replaced(is_launched=False, device="cpu", global_batch_size=batch)


def needs_timm(args):
    return any(str(value).startswith("timm/") for value in args.flat().values())


def one_of_each(key, names=RECIPES):
    return list({str(key(options_by_name(name))): name for name in reversed(names)}.values())


NEW = (
    "--batch-size 128 --lr 0.5 --lr-scheduler cosineannealinglr --lr-warmup-epochs 5 --lr-warmup-method linear "
    "--auto-augment ta_wide --epochs 600 --random-erase 0.1 --label-smoothing 0.1 --mixup-alpha 0.2 --cutmix-alpha 1.0 "
)

# The commands of torchvision's classification README, with the broken ones fixed.
COMMANDS = [
    "--model alexnet --lr 1e-2",
    "--model inception_v3 --test-only --weights Inception_V3_Weights.IMAGENET1K_V1",
    "--model resnet50",
    "--model mobilenet_v2 --epochs 300 --lr 0.045 --wd 0.00004 --lr-step-size 1 --lr-gamma 0.98",
    "--model mobilenet_v3_large --epochs 600 --opt rmsprop --batch-size 128 --lr 0.064 --wd 0.00001 --lr-step-size 2 "
    "--lr-gamma 0.973 --auto-augment imagenet --random-erase 0.2",
    "--model efficientnet_b0 --test-only --weights EfficientNet_B0_Weights.IMAGENET1K_V1",
    f"--model efficientnet_v2_s {NEW} --weight-decay 0.00002 --norm-weight-decay 0.0 --train-crop-size 300 --model-ema "
    "--val-crop-size 384 --val-resize-size 384 --ra-sampler --ra-reps 4",
    "--model regnet_x_400mf --epochs 100 --wd 0.00005 --lr-scheduler=cosineannealinglr --lr-warmup-method=linear "
    "--lr-warmup-epochs=5 --lr-warmup-decay=0.1 --batch-size 128 --lr=0.8",
    "--model vit_b_16 --epochs 300 --batch-size 512 --opt adamw --lr 0.003 --wd 0.3 --lr-scheduler cosineannealinglr "
    "--lr-warmup-method linear --lr-warmup-epochs 30 --lr-warmup-decay 0.033 --amp --label-smoothing 0.11 "
    "--mixup-alpha 0.2 --clip-grad-norm 1 --ra-sampler --cutmix-alpha 1.0 --model-ema --auto-augment ra",
    f"--model convnext_tiny {NEW} --opt adamw --lr 1e-3 --weight-decay 0.05 --norm-weight-decay 0.0 --train-crop-size "
    "176 --model-ema --val-resize-size 232 --ra-sampler --ra-reps 4",
    "--model swin_t --epochs 300 --batch-size 128 --opt adamw --lr 0.001 --weight-decay 0.05 --norm-weight-decay 0.0 "
    "--bias-weight-decay 0.0 --transformer-embedding-decay 0.0 --lr-scheduler cosineannealinglr --lr-min 0.00001 "
    "--lr-warmup-method linear --lr-warmup-epochs 20 --lr-warmup-decay 0.01 --amp --label-smoothing 0.1 --mixup-alpha "
    "0.8 --clip-grad-norm 5.0 --cutmix-alpha 1.0 --random-erase 0.25 --interpolation bicubic --auto-augment ta_wide "
    "--model-ema --ra-sampler --ra-reps 4 --val-resize-size 224",
    "--model maxvit_t --epochs 400 --batch-size 128 --opt adamw --lr 3e-3 --weight-decay 0.05 --lr-scheduler "
    "cosineannealinglr --lr-min 1e-5 --lr-warmup-method linear --lr-warmup-epochs 32 --label-smoothing 0.1 "
    "--mixup-alpha 0.8 --clip-grad-norm 1.0 --interpolation bicubic --auto-augment ta_wide --ra-magnitude 15 "
    "--model-ema --val-resize-size 224 --val-crop-size 224 --train-crop-size 224 --amp --model-ema-steps 32 "
    "--transformer-embedding-decay 0 --sync-bn",
]

OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}
POLICIES = {
    "ta_wide": autoaugment.TrivialAugmentWide, "ra": autoaugment.RandAugment, "imagenet": autoaugment.AutoAugment,
}  # fmt: skip


def options_of(command):
    """Read a command's options by its own, other rules: {name: text or True}, the last one counts."""
    words = command.replace("=", " ").replace("--wd ", "--weight-decay ").split()
    options = {}
    for word, following in zip(words, [*words[1:], "--end"], strict=True):
        if word.startswith("--"):
            options[word[2:]] = True if following.startswith("--") else following
    return options


@pytest.mark.parametrize("command", COMMANDS)
def test_torchvisions_published_commands_build_what_they_mean(command, monkeypatch):
    said = options_of(command)
    args = config.parse_args([*shlex.split(command), "--data-path", "imagenet"])
    for name, text in said.items():
        value = args.flat()[name.replace("-", "_")]
        assert value is True if text is True else value == type(value)(text), name

    args = args.replaced(is_launched=False, global_batch_size=8 * args.optimization.batch_size, device="cpu")
    model = build_without_memory(args, 1000)
    with monkeypatch.context() as patch:  # memory that is not drawn to is never there
        for draw in ("kaiming_normal_", "kaiming_uniform_", "normal_", "trunc_normal_", "uniform_", "xavier_uniform_"):
            patch.setattr(nn.init, draw, lambda tensor, *_, **__: tensor)
        reference = torchvision.models.get_model(said["model"], weights=None)
    shapes = [[(n, p.shape) for n, p in each.named_parameters()] for each in (model, reference)]
    assert shapes[0] == shapes[1]
    groups = optim.build_parameter_groups(args.optimization, model)
    decays = {float(value) for name, value in said.items() if "weight-decay" in name or "embedding-decay" in name}
    decays |= set() if "weight-decay" in said else {1e-4}
    assert {group["weight_decay"] for group in groups} <= decays
    assert len(groups) > 1 or "norm-weight-decay" not in said
    optimizer = optim.build_optimizer(args.optimization, args.precision, args.model.model, groups)
    assert type(optimizer) is OPTIMIZERS[said.get("opt", "sgd")]
    assert optimizer.defaults["lr"] == float(said.get("lr", 0.1))
    criterion = build_criterion(args)
    criterion = criterion.criterion if said["model"] == "inception_v3" else criterion
    assert criterion.label_smoothing == float(said.get("label-smoothing", 0))
    train, _ = presets.build_presets(args.data, args.augmentation)
    policies = [step for step in train.transforms.transforms if type(step) in POLICIES.values()]
    assert [type(step) for step in policies] == ([POLICIES[said["auto-augment"]]] if "auto-augment" in said else [])
    batch, _ = data.build_batch_transforms(args.augmentation, args.precision.channels_last, 1000, torch.device("cpu"))
    assert (batch.erase.p if batch.erase else 0) == float(said.get("random-erase", 0))
    assert isinstance(batch.mix, RandomMix) == ("mixup-alpha" in said)
    if "mixup-alpha" in said:
        assert batch.mix.mixup.alpha == float(said["mixup-alpha"])
        assert batch.mix.cutmix.alpha == float(said["cutmix-alpha"]) if "cutmix-alpha" in said else not batch.mix.cutmix


def test_every_recipe_resolves_and_says_where_it_is_from():
    for name in RECIPES:
        recipe, path = recipes.read_recipe(recipes.find_recipe(name)), recipes.find_recipe(name)
        facts = set() if "an experiment" in recipe.get("notes", "") else {"expected-acc1", "tolerance"}
        assert {"title", "source", "evaluation", "reproduced"} | facts <= recipe.keys(), name
        assert path.stat().st_size < 2000, name  # it says what differs from the defaults
        # The features of this one are given on the command line.
        remarks = [line.split()[0] for line in checks.remarks(options_by_name(name))]
        assert remarks == (["--freeze"] if name == "resnet50-linear" else []), name
        assert (recipe["reproduced"] is False) == (name not in ("digits", "imagenette")), name


ONE_OF_A_KIND = one_of_each(
    lambda args: (args.optimization.opt, args.schedule.lr_scheduler, args.model.model_ema, needs_timm(args))
)


@pytest.mark.parametrize("name", some_slow(RECIPES, {*RECIPES} - {*ONE_OF_A_KIND}))
def test_a_preview_of_every_recipe_names_no_option_without_effect(name):
    text = preview.preview(config.parse_args(argv_of_recipe(name)))
    assert "learning rate at the start of epoch 0: " in text
    assert "has no effect" not in text
    if name not in ("digits", "imagenette"):
        assert "assuming 1,281,167 images of 1,000 classes" in text
        assert "--lr is meant for a global batch of" in text


SOURCES = json.loads((REPOSITORY / "tests" / "recipe_sources.json").read_text())
# A batch of all processes is compared by the processes of the source; paths and what was typed are not the source's.
OF_THE_START = {"recipe", "data_path", "given", "typed", "reference_global_batch", "dry_run", "global_batch_size"}


def same(source, ours):
    if isinstance(source, float) and isinstance(ours, float):
        return math.isclose(source, ours, rel_tol=1e-6)
    return source == ours


def disagreements(row, name):
    """Return the options, and the accuracy, in which a recipe differs from what was typed from its source."""
    words = [*row["options"].split(), *row["recipes"][name].split()]
    if "--model" not in words:
        words += ["--model", name.rpartition("-")[0]]  # torchvision's
    words = [f"{REPOSITORY}/{word}" if word.startswith("examples/") else word for word in words]
    theirs = config.parse_args([*words, "--data-path", "imagenet", "--dry-run"])
    ours, source = config.parse_args(argv_of_recipe(name)).flat(), theirs.flat()
    source["global_batch_size"] = row["gpus"] * theirs.optimization.batch_size
    found = {option: (source[option], ours[option]) for option in source if option not in OF_THE_START}
    found["global_batch_size"] = source["global_batch_size"], ours["global_batch_size"]
    expected = recipes.read_recipe(recipes.find_recipe(name)).get("expected-acc1")
    found["acc1"] = row.get("acc1", {}).get(name, expected), expected
    return {option: values for option, values in found.items() if not same(*values)}


@pytest.mark.parametrize("row", SOURCES["rows"], ids=lambda row: next(iter(row["recipes"])))
def test_options_are_those_typed_from_the_sources(row):
    found = {name: disagreements(row, name) for name in row["recipes"]}
    differs = {option for each in found.values() for option in each}
    assert differs == {*row.get("differs", [])}, found


def test_every_recipe_is_typed_from_its_source_or_named_as_unread():
    typed = [name for row in SOURCES["rows"] for name in row["recipes"]]
    assert sorted([*typed, *SOURCES["unread"], *SOURCES["ours"]]) == RECIPES  # each once


def test_expected_accuracies_are_those_of_torchvisions_weights():
    names = [name for name in RECIPES if name.endswith(("-v1", "-v2"))]
    assert len(names) >= 70
    for name in names:
        recipe = recipes.read_recipe(recipes.find_recipe(name))
        model, _, version = name.rpartition("-")
        weights = torchvision.models.get_model_weights(model)[f"IMAGENET1K_{version.upper()}"]
        metrics = weights.meta["_metrics"]["ImageNet-1K"]
        assert (recipe["expected-acc1"], recipe["expected-acc5"]) == (metrics["acc@1"], metrics["acc@5"]), name
        args = config.parse_args(["--recipe", name, "--dry-run"])
        preset = weights.transforms()
        assert (args.augmentation.val_resize_size, args.augmentation.val_crop_size) == (
            preset.resize_size[0],
            preset.crop_size[0],
        ), name
        assert args.augmentation.interpolation == preset.interpolation.value, name


def test_the_list_of_recipes_names_each_once_fits_the_terminal_and_is_filtered(monkeypatch):
    lines = recipes.list_recipes().splitlines()
    assert [line.split()[0] for line in lines[1:-2]] == RECIPES
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, recipes.list_recipes().splitlines()[:-1])) == 60
    names = [line.split()[0] for line in recipes.list_recipes("FFCV").splitlines()[1:-2]]
    assert names == [name for name in RECIPES if "-fast" in name]  # all twelve name it as their source
    assert tomllib.loads(recipes.list_recipes("digits")) == recipes.read_recipe(recipes.find_recipe("digits"))
    with pytest.raises(UserError, match="no recipe contains this word; did you mean digits"):
        recipes.list_recipes("digitz")


DRY = ["--dry-run", "--model", "squeezenet1_1"]


def test_a_dry_run_touches_nothing_and_needs_no_gpu(tmp_path):
    out = tmp_path / "out"
    argv = ["--recipe", "resnet18-v1", "--sync-bn", "--batch-size", "128", "--global-batch-size", "4096", "--dry-run"]
    argv += ["--output-dir", str(out), "--data-path", str(tmp_path / "none")]
    outcome = run_ranks(train_rank, 1, argv, log_folder=tmp_path).check()
    assert "sync-bn = true" in outcome.output
    assert "# 4096 images per step: 1 process x 32 micro-batches x 128\n" in outcome.output
    assert "# --sync-bn: needs 32 processes, one for each micro-batch\n" in outcome.output
    assert "# counted for 1 process: torchrun --nproc_per_node=N in place of python counts for N\n" in outcome.output
    outcome = run_ranks(train_rank, 2, [*argv, "--no-sync-bn"], log_folder=tmp_path).check()
    assert "# 4096 images per step: 2 processes x 16 micro-batches x 128\n# counted for 2 processes: " in outcome.output
    assert not out.exists()


def test_a_dry_run_says_and_refuses_what_the_run_would():
    idle = ["--synthetic", "8192", "--lr-min", "1", "--model-ema-decay", "0.9"]
    text = preview.preview(config.parse_args([*idle, *DRY]))
    assert [line.split()[1] for line in text.splitlines() if "no effect" in line] == ["--model-ema-decay", "--lr-min"]
    # By torchvision's formula 1 - decay is (1 - 0.99998) x 4096 x 32 / epochs, at most 1.
    for epochs, decay in [("2", 0), ("90", 1 - (1 - 0.99998) * 4096 * 32 / 90)]:
        argv = ["--synthetic", "8192", "--model-ema", *DRY, "--global-batch-size", "4096", "--epochs", epochs]
        (line,) = re.findall(r"--model-ema: .*", preview.preview(config.parse_args(argv)))
        assert f"decay {decay:.6g} " in line
        assert ("is a copy of the weights" in line) is (decay == 0)
    for words in ("--device mps", "--resume nowhere.pth", "--train-crop-size 8", "--best-metric f2"):
        with pytest.raises(UserError, match=words):
            preview.preview(config.parse_args(["--synthetic", "64", *words.split(), *DRY]))


def test_a_dry_run_counts_the_images_that_are_there(image_folder, tmp_path):
    pack_shards(image_folder / "train", tmp_path)
    for folder in (image_folder, tmp_path):
        argv = ["--data-path", str(folder), "--dry-run", "--batch-size", "8", "--epochs", "2"]
        text = preview.preview(config.parse_args(argv))
        assert "29 images in 3 classes" in text
        assert "3 steps per epoch, 6 in total; 5 images left out" in text


@pytest.mark.parametrize(("argv", "words"), [
    ("--train-crop-size-min 160", "needs --crop-ramp-epochs"),
    ("--train-crop-size-min 160 --crop-ramp-epochs 9 3", "the first before the last"),
    ("--train-crop-size-min 300 --crop-ramp-epochs 1 3", "is above --train-crop-size"),
    ("--stochastic-depth 0.1", "resnet50 does not support it"),
    ("--dropout 0.1", "has no dropout layer"),
    ("--minival 0.2 --minival-fold 5", "--minival-fold 5 of --minival 0.2: expected 0 to 4"),
    ("--world-size 2", "no launcher has set RANK"),
])  # fmt: skip
def test_impossible_combinations_are_one_line(argv, words):
    with pytest.raises(UserError, match=rf"^[^\n]*{words}[^\n]*$"):
        preview.preview(config.parse_args(["--recipe", "resnet50-v2", "--dry-run", *argv.split()]))


def test_without_timm_the_message_says_what_to_install(monkeypatch):
    # The import system's own way to say that a module is not there.
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    for argv in (["--model", "timm/resnet50"], ["--opt", "timm/lamb"]):
        with pytest.raises(UserError, match="pip install timm"):
            preview.preview(config.parse_args(["--synthetic", "--dry-run", *argv]))


# As torchvision puts torch's together, and as timm's script has its own; timm's warm-up is no prefix.
SCHEDULERS = {
    ("cosineannealinglr", True): lambda sgd, args: CosineAnnealingLR(
        sgd, args.schedule.epochs - args.schedule.lr_warmup_epochs, eta_min=args.schedule.lr_min
    ),
    ("steplr", True): lambda sgd, args: StepLR(sgd, args.schedule.lr_step_size, args.schedule.lr_gamma),
    ("multisteplr", True): lambda sgd, args: MultiStepLR(sgd, args.schedule.lr_milestones, args.schedule.lr_gamma),
    ("cosineannealinglr", False): lambda sgd, args, **warmup: timm.scheduler.CosineLRScheduler(
        sgd, args.schedule.epochs, lr_min=args.schedule.lr_min, **warmup
    ),
    ("exponentiallr", False): lambda sgd, args, **warmup: timm.scheduler.StepLRScheduler(
        sgd, 1, args.schedule.lr_gamma, warmup_prefix=False, **warmup
    ),
}


def schedulers_rates(args):
    sgd, is_torchs = (
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=args.optimization.lr),
        args.schedule.lr_warmup_prefix,
    )
    warmup = {
        "warmup_t": args.schedule.lr_warmup_epochs,
        "warmup_lr_init": args.optimization.lr * args.schedule.lr_warmup_decay,
    }
    scheduler = SCHEDULERS[args.schedule.lr_scheduler, is_torchs](sgd, args, **({} if is_torchs else warmup))
    if is_torchs and args.schedule.lr_warmup_epochs:
        first = LinearLR(sgd, args.schedule.lr_warmup_decay, total_iters=args.schedule.lr_warmup_epochs)
        scheduler = SequentialLR(sgd, [first, scheduler], milestones=[args.schedule.lr_warmup_epochs])
    for epoch in range(args.schedule.epochs):
        yield sgd.param_groups[0]["lr"]
        sgd.step()
        scheduler.step(*[] if is_torchs else [epoch + 1])


def corners_rates(args):
    """Return the rate of each epoch: a triangle as ffcv's, a trapezium for a cool-down."""
    if args.schedule.lr_scheduler == "wsd":
        peak, low = args.optimization.lr, args.optimization.lr * args.schedule.lr_warmup_decay
        corners = [
            0,
            args.schedule.lr_warmup_epochs,
            args.schedule.epochs - args.schedule.lr_cooldown_epochs,
            args.schedule.epochs,
        ]
        return np.interp(range(args.schedule.epochs), corners, [low, peak, peak, args.schedule.lr_min])
    return np.interp(
        range(args.schedule.epochs),
        [0, args.schedule.lr_warmup_epochs, args.schedule.epochs],
        [1e-4 * args.optimization.lr, args.optimization.lr, 0.0],
    )


def rates_of(args):
    if (
        args.schedule.lr_scheduler not in ("linearlr", "wsd")
        and args.schedule.lr_warmup_prefix
        and args.schedule.lr_per_step
    ):
        return None  # no other code has such a schedule: torch's have none for each step
    return [args.schedule.epochs, *(value for name, value in sorted(args.flat().items()) if name.startswith("lr"))]


@pytest.mark.parametrize("name", one_of_each(rates_of, [name for name in RECIPES if rates_of(options_by_name(name))]))
def test_learning_rates_are_the_sources(name):
    args = options_by_name(name)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=args.optimization.lr)
    lr_scheduler = optim.LRScheduler(args.schedule, optimizer)
    num, rates = (10 if args.schedule.epochs < 1000 else 2) if args.schedule.lr_per_step else 1, []
    for part in range(args.schedule.epochs * num):
        lr_scheduler.set_position(*divmod(part, num), num)
        rates.append(optimizer.param_groups[0]["lr"])
    assert "-fast" not in name or args.schedule.lr_warmup_epochs == 2
    # The same schedule over epochs that are cut into so many parts, each of which is one.
    names = ("epochs", "lr_warmup_epochs", "lr_step_size", "lr_cooldown_epochs")
    given = vars(args.schedule)
    counts = {name: given[name] and given[name] * num for name in names}
    cut = args.replaced(**counts, lr_gamma=args.schedule.lr_gamma ** (1 / num))
    reference = corners_rates if args.schedule.lr_scheduler in ("linearlr", "wsd") else schedulers_rates
    assert rates == pytest.approx(list(reference(cut)), rel=1e-9, abs=1e-11)


AVERAGED = [name for name in RECIPES if options_by_name(name).model.model_ema]


@pytest.mark.parametrize(
    "name", one_of_each(lambda args: (args.model.model_ema_adjust, args.model.model_ema_decay), AVERAGED)
)
def test_averages_move_as_the_source_says(name):
    """By torchvision's adjustment with its defaults, which all its recipes have, or by timm's update."""
    args, model = options_by_name(name), nn.Linear(3, 2)
    ours = build_ema(args, model)
    if args.model.model_ema_adjust:
        assert ours.decay == pytest.approx(
            1 - min(1, 2e-5 * args.optimization.global_batch_size * 32 / args.schedule.epochs), abs=1e-12
        )
        return
    theirs = timm.utils.ModelEmaV2(model, decay=args.model.model_ema_decay)
    for _ in range(4):
        ours.update_parameters(model)
        theirs.update(model)
        with torch.no_grad():
            model.weight.add_(torch.randn(2, 3) * 1e4)
    assert torch.allclose(ours.module.weight, theirs.module.weight, rtol=1e-4)


LOSSES = one_of_each(
    lambda args: (
        args.optimization.label_smoothing,
        args.optimization.bce_loss,
        args.optimization.bce_target_thresh,
        needs_timm(args),
    )
)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("share", [1.0, 0.7, 0.05])
def test_losses_are_the_sources(name, share):
    args, target = options_by_name(name), torch.tensor([3, 1, 4, 1, 5, 9])
    output = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)) * 3
    criterion = build_criterion(args.replaced(model="resnet18"))
    pairs = [(share, target), (1 - share, target.roll(1))]
    mixed = sum(weight * nn.functional.one_hot(hard, 10) for weight, hard in pairs)
    # timm mixes with the images in their opposite order.
    timms = sum(
        weight * timm.data.mixup.mixup_target(hard, 10, 1.0, args.optimization.label_smoothing)
        for weight, hard in pairs
    )
    if args.optimization.bce_loss:
        expected = timm.loss.BinaryCrossEntropy(target_threshold=args.optimization.bce_target_thresh)(output, timms)
    elif needs_timm(args):
        expected = timm.loss.SoftTargetCrossEntropy()(output, timms)
    else:
        expected = nn.CrossEntropyLoss(label_smoothing=args.optimization.label_smoothing)(output, mixed)
    assert float(criterion(output, mixed)) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(("size", "momentum", "eps", "magnitude", "prob"), [
    ("small", 0.95, 1e-6, 9, 0.5), ("medium", 0.997, 1e-3, 15, 0.7),
])  # fmt: skip
def test_mobilenets_have_the_batchnorm_decay_and_operations_of_googles_files(size, momentum, eps, magnitude, prob):
    args = options_by_name(f"mobilenetv4_conv_{size}")
    model = build_without_memory(args, 1000)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {(round(1 - norm.momentum, 9), norm.eps) for norm in norms} == {(momentum, eps)}
    still = [
        group["params"] for group in optim.build_parameter_groups(args.optimization, model) if not group["weight_decay"]
    ]
    assert {id(p) for params in still for p in params} == {id(p) for norm in norms for p in norm.parameters()}
    policy = presets.build_presets(args.data, args.augmentation)[0].policy.transforms[0].policy
    assert {(op.name, op.prob) for op in policy.ops} >= {("Invert", prob), ("SolarizeAdd", prob)}
    assert (len(policy.ops), policy.num_layers) == (15, 2)  # Google's sixteen but Cutout
    assert {min(op.magnitude, op.magnitude_max or 10) for op in policy.ops} == {magnitude}


def test_fast_crops_grow_as_in_ffcv():
    ramps = {16: (11, 13), 24: (17, 20), 32: (23, 27), 40: (29, 34), 56: (41, 48), 88: (65, 76)}
    for epochs, (first, last) in ramps.items():
        for model in ("resnet18", "resnet50"):
            args = options_by_name(f"{model}-fast{epochs}")
            train, evaluation = presets.build_presets(args.data, args.augmentation)
            between = [int(np.round(np.interp(epoch, [first, last], [160, 192]) / 32)) * 32 for epoch in range(epochs)]
            assert [train.size_at(epoch) for epoch in range(epochs)] == between
            assert (between[0], between[-1]) == (160, 192)
            # ffcv cuts out 224 / 256 of the shorter side, and resizes that.
            assert round(256 * 256 / 224) == evaluation.resize_size
