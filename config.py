"""Options: the parser, recipes, validation, and the record of what was resolved."""

import argparse
import json
import math
import os
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision.models
from torchvision.models import list_models
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode

import guard
from checkpoint import memory_bytes
from decode import DECODERS
from errors import UserError, did_you_mean, is_printable
from models import COMPILE_MODES, MEASURED_MODES
from optim import lr_at, schedule
from precision import AMP_DTYPES
from presets import IMAGENET_MEAN, IMAGENET_STD

RECIPES_DIR = Path(__file__).parent / "recipes"

OPTIMIZERS = ["adamw", "rmsprop", "sgd", "sgd_nesterov"]
POLICIES = ["ra", "ta_wide", "augmix", *sorted(policy.value for policy in AutoAugmentPolicy)]

# What a recipe says about itself; facts for people, options of nothing.
RECIPE_FACTS = {
    "title", "source", "command", "expected-acc1", "expected-acc5", "tolerance", "evaluation",
    "reference-global-batch", "hardware", "hours", "reproduced", "notes",
}  # fmt: skip

# Where a run is and how it was started, not what it computes: left out of the recipe that it writes.
NOT_IN_RECIPE = {
    "recipe", "output_dir", "overwrite", "resume", "allow_change", "start_epoch", "test_only", "world_size", "dist_url",
    "dist_timeout", "stall_timeout",
}  # fmt: skip

# Derived from the machine where they are not given.
MACHINE_OPTIONS = {"device", "workers"}


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the word that was probably meant."""

    def error(self, message: str) -> None:
        """Raise the error instead of printing two pages of usage first, on every rank."""
        raise UserError(f"{message} (--help lists the options)")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:
        """Parse all of `args`; an unknown option is an error that names the nearest one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return parsed
        word = unknown[0].split("=")[0]
        known = [option for action in self._actions for option in action.option_strings]
        longer = [option for option in known if option.startswith(word)] if word.startswith("--") else []
        hint = f"; write {longer[0]} in full" if longer else did_you_mean(word, known)
        raise UserError(f"unrecognized argument {unknown[0]}{hint} (--help lists the options)")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Show each option's default, where it has one to speak of."""

    def _get_help_string(self, action: argparse.Action) -> str:
        default = action.default
        if default is None or default is False or default is argparse.SUPPRESS or default == "":
            return action.help
        return super()._get_help_string(action)


def get_args_parser(add_help: bool = True) -> argparse.ArgumentParser:
    """Return the parser of all options, torchvision's among them, in nine groups."""
    parser = OneLineParser(
        prog="train.py",
        usage="train.py [--recipe NAME] [--data-path DIR] [options]",
        description="Train and evaluate image classification models: torchvision's commands, exact and hard to kill.",
        epilog="A recipe (recipes/*.toml) is a command line written down; the real command line wins over it.",
        add_help=add_help,
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--recipe", metavar="NAME", help="options to start from: a name in recipes/, or a TOML file")
    parser.add_argument(
        "--list-recipes", action="store_true", help="print the recipes with what they promise, and exit"
    )
    parser.add_argument(
        "--dry-run", action="store_true",
        help="print what the options resolve to, the batch arithmetic and the learning rates, and exit",
    )  # fmt: skip
    _add_data(parser.add_argument_group("data"))
    _add_augmentation(parser.add_argument_group("augmentation"))
    _add_model(parser.add_argument_group("model"))
    _add_optimization(parser.add_argument_group("optimization"))
    _add_schedule(parser.add_argument_group("schedule"))
    _add_precision(parser.add_argument_group("precision"))
    _add_checkpoint(parser.add_argument_group("checkpoint"))
    _add_monitoring(parser.add_argument_group("monitoring"))
    _add_distributed(parser.add_argument_group("distributed"))
    return parser


def _switch(group: Any, name: str, meaning: str) -> None:
    group.add_argument(name, action=argparse.BooleanOptionalAction, default=False, help=meaning)


def _add_data(group: Any) -> None:
    group.add_argument(
        "--data-path", metavar="DIR",
        help="folder that holds train/ and val/, one folder a class, or train.tar and val.tar, or shards of them",
    )  # fmt: skip
    group.add_argument(
        "--bad-images", default="error", choices=["error", "skip"],
        help="what to do about a training image that cannot be read: stop, or take the next one and say so after each "
        "epoch; in evaluation it always stops",
    )  # fmt: skip
    group.add_argument(
        "--synthetic", metavar="IMAGES", type=int, nargs="?", const=12_800,
        help="train on this many made-up images (12800 if no number is given) of 1000 classes; needs no data",
    )  # fmt: skip
    group.add_argument(
        "-j", "--workers", metavar="N", type=int,
        help="loader processes for each training process (default: 16, or fewer if there are fewer cores)",
    )  # fmt: skip
    group.add_argument(
        "--worker-type", choices=["process", "thread"], default="process",
        help="what the workers are; threads copy no batch between processes, and take no --auto-augment or --backend",
    )  # fmt: skip
    group.add_argument("--prefetch-factor", metavar="N", default=2, type=int, help="batches each worker is ahead")
    _switch(group, "--cache-dataset", "accepted as torchvision's; the index of the images is cached anyway")
    group.add_argument(
        "--backend", type=str.lower, choices=["pil", "tensor"],
        help="exact pixels: pil = Pillow's, torchvision's default; tensor = torchvision's tensor resize (default: a "
        "faster way, within one grey level of pil)",
    )  # fmt: skip
    group.add_argument(
        "--decoder", choices=sorted(DECODERS), default="pillow",
        help="what decodes JPEGs: torchcodec is an optional extra, faster, and may differ by a grey level",
    )  # fmt: skip
    group.add_argument(
        "--decode-device", choices=["cpu", "cuda"], default="cpu",
        help="cuda = the GPU decodes, crops and resizes JPEGs (TorchCodec's nvJPEG), or it is said why it cannot; its "
        "pixels differ from the CPU's by some grey levels; what it cannot decode, the CPU does",
    )  # fmt: skip
    _switch(group, "--use-v2", "accepted as torchvision's; changes no number here")


def _add_augmentation(group: Any) -> None:
    group.add_argument("--train-crop-size", metavar="PX", default=224, type=int, help="side of a training crop")
    group.add_argument(
        "--train-crop-size-min", metavar="PX", type=int,
        help="progressive resolution: train at this size until --crop-ramp-epochs begin, growing to --train-crop-size",
    )  # fmt: skip
    group.add_argument(
        "--crop-ramp-epochs",
        metavar=("FIRST", "LAST"),
        type=int,
        nargs=2,
        help="when the crops grow, in steps of 32 px",
    )
    group.add_argument("--val-resize-size", metavar="PX", default=256, type=int, help="shorter side in evaluation")
    group.add_argument("--val-crop-size", metavar="PX", default=224, type=int, help="side of the central crop")
    group.add_argument(
        "--interpolation", default="bilinear", choices=[mode.value for mode in InterpolationMode], help="of a resize"
    )
    group.add_argument(
        "--crop-scale",
        metavar="SHARE",
        default=0.08,
        type=float,
        help="smallest share of an image's area that a training crop shows",
    )
    group.add_argument("--hflip-prob", metavar="P", default=0.5, type=float, help="odds of a mirrored image")
    group.add_argument(
        "--auto-augment", metavar="POLICY",
        help=f"augmentation policy: {', '.join(POLICIES)}, or timm/SPECIFICATION such as "
        "timm/rand-m7-mstd0.5-inc1 (default: none)",
    )  # fmt: skip
    group.add_argument("--ra-magnitude", metavar="M", default=9, type=int, help="magnitude of --auto-augment ra")
    group.add_argument("--augmix-severity", metavar="S", default=3, type=int, help="severity of --auto-augment augmix")
    group.add_argument("--random-erase", metavar="P", default=0.0, type=float, help="odds of an erased rectangle")
    group.add_argument(
        "--mixup-alpha", metavar="A", default=0.0, type=float, help="mixup: the alpha of its Beta distribution; 0 = off"
    )
    group.add_argument("--cutmix-alpha", metavar="A", default=0.0, type=float, help="cutmix: likewise")
    group.add_argument(
        "--mixup-prob", metavar="P", default=1.0, type=float, help="odds of a batch that is mixed at all"
    )
    group.add_argument(
        "--mixup-switch-prob", metavar="P", default=0.5, type=float, help="odds of cutmix, where mixup is on as well"
    )
    group.add_argument("--mixup-off-epoch", metavar="N", type=int, help="first epoch without mixing (default: never)")
    _switch(group, "--ra-sampler", "repeated augmentation: each image --ra-reps times, in different shards")
    group.add_argument("--ra-reps", metavar="N", default=3, type=int, help="repetitions of --ra-sampler")


def _add_model(group: Any) -> None:
    group.add_argument(
        "--model", metavar="NAME", default="resnet18", help="any of torchvision's classifiers, or timm/NAME"
    )
    group.add_argument(
        "--weights", metavar="NAME|FILE",
        help="weights to start from: torchvision's name of them, a state dict, or a checkpoint of this script",
    )  # fmt: skip
    _switch(group, "--ema", "take the average of the weights (model_ema) out of --weights FILE, not the raw ones")
    _switch(group, "--freeze", "train the classifier alone; the layers below stay as they are, in evaluation mode")
    group.add_argument(
        "--stochastic-depth", metavar="P", type=float, help="of the deepest layer (default: the model's)"
    )
    group.add_argument("--dropout", metavar="P", type=float, help="of every dropout layer (default: the model's)")
    _switch(group, "--eval-flip", "evaluate each image and its mirror image, and average the two outputs")
    _switch(group, "--sync-bn", "BatchNorm over the whole global batch; needs as many processes as shards")
    _switch(group, "--model-ema", "keep and evaluate an exponential moving average of the weights")
    group.add_argument("--model-ema-steps", metavar="N", default=32, type=int, help="steps between two averagings")
    group.add_argument(
        "--model-ema-decay", metavar="D", default=0.99998, type=float,
        help="decay of the average a sample, of which the decay a step is derived",
    )  # fmt: skip


def _add_optimization(group: Any) -> None:
    group.add_argument("-b", "--batch-size", metavar="N", default=32, type=int, help="images a process and step")
    group.add_argument(
        "--global-batch-size", metavar="N", type=int,
        help="images a step over all processes, a multiple of --batch-size; what the processes are too few for, they "
        "accumulate (default: --batch-size x processes of the first start)",
    )  # fmt: skip
    group.add_argument("--seed", metavar="N", default=0, type=int, help="of everything random")
    group.add_argument(
        "--opt", metavar="NAME", type=str.lower, default="sgd",
        help=f"the optimizer: {', '.join(OPTIMIZERS)}, or timm/NAME such as timm/lamb",
    )  # fmt: skip
    group.add_argument("--opt-betas", metavar=("B1", "B2"), type=float, nargs=2, help="of adamw (default: 0.9 0.999)")
    group.add_argument("--opt-eps", metavar="EPS", type=float, help="of adamw and rmsprop (default: 1e-8, 0.0316)")
    group.add_argument("--lr", default=0.1, type=float, help="peak learning rate; scaled only if --lr-scaling says so")
    group.add_argument(
        "--lr-scaling", default="none", choices=["none", "linear", "sqrt"],
        help="how the rate follows the global batch, from the recipe's reference-global-batch",
    )  # fmt: skip
    group.add_argument(
        "--layer-decay", metavar="F", type=float, help="factor of the rate from each layer to the one below it"
    )
    group.add_argument("--momentum", metavar="M", default=0.9, type=float, help="of sgd and rmsprop")
    group.add_argument("--wd", "--weight-decay", metavar="W", default=1e-4, type=float, dest="weight_decay", help="L2")
    group.add_argument("--norm-weight-decay", metavar="W", type=float, help="of normalisation layers (default: --wd)")
    group.add_argument("--bias-weight-decay", metavar="W", type=float, help="of biases (default: --wd)")
    group.add_argument(
        "--transformer-embedding-decay",
        metavar="W",
        type=float,
        help="of class and position embeddings (default: --wd)",
    )
    group.add_argument("--label-smoothing", metavar="P", default=0.0, type=float, help="of the cross-entropy")
    _switch(group, "--bce-loss", "one binary cross-entropy a class in place of the softmax's")
    group.add_argument("--bce-target-thresh", metavar="T", type=float, help="count a class as there above this target")
    group.add_argument("--clip-grad-norm", metavar="NORM", type=float, help="largest gradient norm (default: no limit)")


def _add_schedule(group: Any) -> None:
    group.add_argument("--epochs", metavar="N", default=90, type=int, help="epochs to train")
    group.add_argument("--start-epoch", metavar="N", default=0, type=int, help="first epoch, without a checkpoint")
    group.add_argument(
        "--lr-scheduler", type=str.lower, default="steplr",
        choices=["cosineannealinglr", "exponentiallr", "linearlr", "steplr"],
        help="schedule after the warm-up; linearlr falls to --lr-min at the end",
    )  # fmt: skip
    group.add_argument("--lr-warmup-epochs", metavar="N", default=0, type=int, help="epochs of warm-up")
    group.add_argument(
        "--lr-warmup-method", type=str.lower, default="constant", choices=["constant", "linear"], help="its shape"
    )
    group.add_argument("--lr-warmup-decay", metavar="F", default=0.01, type=float, help="factor that it begins with")
    group.add_argument("--lr-step-size", metavar="N", default=30, type=int, help="epochs between two steps of steplr")
    group.add_argument("--lr-gamma", metavar="F", default=0.1, type=float, help="factor of steplr and exponentiallr")
    group.add_argument(
        "--lr-min", metavar="LR", default=0.0, type=float, help="where cosineannealinglr and linearlr end"
    )
    _switch(group, "--lr-per-step", "change the rate at each step, not at each epoch as torchvision does")


def _add_precision(group: Any) -> None:
    _switch(group, "--amp", "automatic mixed precision, in training and evaluation")
    group.add_argument(
        "--amp-dtype", choices=sorted(AMP_DTYPES),
        help="what --amp computes in; float16 scales the loss, bfloat16 need not (default: float16)",
    )  # fmt: skip
    group.add_argument(
        "--tf32", action=argparse.BooleanOptionalAction,
        help="float32 matrix products and convolutions of NVIDIA GPUs with inputs rounded to TF32, or neither "
        "(default: convolutions only, as torch has it)",
    )  # fmt: skip
    _switch(group, "--channels-last", "keep images and weights in NHWC order, which tensor cores are fastest with")
    group.add_argument(
        "--compile", metavar="MODE", nargs="?", const="default", choices=COMPILE_MODES,
        help=f"compile the model, for training and evaluation: {', '.join(COMPILE_MODES)} (default: no; alone: "
        "default). The same bits then need the same number of processes",
    )  # fmt: skip
    _switch(
        group,
        "--grad-checkpointing",
        "keep no activations inside the model's blocks and compute them again: less memory, a third more work",
    )
    _switch(
        group,
        "--use-deterministic-algorithms",
        "the same bits after any restart and on 1, 2, 4, 8 ... processes: deterministic kernels and order of sums",
    )


def _add_checkpoint(group: Any) -> None:
    group.add_argument("--output-dir", metavar="DIR", help="where everything goes (default: runs/MODEL)")
    _switch(group, "--overwrite", "remove what an earlier run left in the output folder, and start over")
    group.add_argument(
        "--resume", metavar="PATH|auto", default="",
        help="go on from this checkpoint; auto: from the newest good one in the output folder, if there is one",
    )  # fmt: skip
    group.add_argument(
        "--allow-change", metavar="NAMES",
        help="resume although these options, which change the numbers of the run, are others than the checkpoint's: "
        "names with commas between them, such as lr,epochs; data: names, labels or sizes of files",
    )  # fmt: skip
    group.add_argument(
        "--checkpoint-steps", metavar="N", type=int, help="save every N steps too, not only around each evaluation"
    )
    group.add_argument(
        "--checkpoint-minutes", metavar="MIN", default=10.0, type=float,
        help="save when the last checkpoint is this old; 0 = never for that reason",
    )  # fmt: skip
    group.add_argument("--keep-last", metavar="N", default=3, type=int, help="numbered checkpoints to keep")
    group.add_argument(
        "--keep-every", metavar="K", type=int, help="keep for good what is saved at the end of every K-th epoch"
    )
    group.add_argument(
        "--best-metric", default="acc1", choices=["acc1", "acc5", "loss"],
        help="what best.pth is best in, on the validation set, and best_ema.pth with the average of --model-ema",
    )  # fmt: skip
    _switch(
        group,
        "--save-per-node",
        "keep a copy of each checkpoint in the output folder of every node, where they share no disk; --resume auto "
        "takes the newest of all nodes",
    )
    _switch(group, "--test-only", "evaluate and exit; takes --weights or --resume")


def _add_monitoring(group: Any) -> None:
    group.add_argument("--print-freq", metavar="N", default=10, type=int, help="steps between two log lines")
    group.add_argument(
        "--stall-timeout", metavar="MIN", default=20, type=float,
        help="minutes without a step after which a run counts as hung: every process says where, and the run ends; "
        "0 = never",
    )  # fmt: skip


def _add_distributed(group: Any) -> None:
    group.add_argument("--device", help="cuda, cpu, mps ... (default: the accelerator that is there, else cpu)")
    group.add_argument(
        "--world-size", metavar="N", default=1, type=int, help="processes, where a launcher sets RANK but not this"
    )
    group.add_argument("--dist-url", metavar="URL", default="env://", help="where the processes meet")
    group.add_argument(
        "--grad-compression", default="none", choices=["bf16", "none"],
        help="what gradients are rounded to on their way between processes",
    )  # fmt: skip
    group.add_argument(
        "--dist-timeout", metavar="MIN", default=30, type=float,
        help="minutes that the processes wait for each other in a step",
    )  # fmt: skip


def find_recipe(name: str) -> Path:
    """Return the path of a recipe given by name or by path.

    Raises:
        UserError: there is none.
    """
    path = Path(name) if name.endswith(".toml") else RECIPES_DIR / f"{name}.toml"
    if not path.is_file():
        known = sorted(recipe.stem for recipe in RECIPES_DIR.glob("*.toml"))
        raise UserError(f"--recipe {name}: no such recipe{did_you_mean(name, known)} (there are {', '.join(known)})")
    return path


def read_recipe(path: Path) -> dict[str, Any]:
    """Return a recipe's tables and facts.

    Raises:
        UserError: it is not TOML, or says something that no recipe can say.
    """
    try:
        recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"recipe {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, a number of too many digits
        raise UserError(f"recipe {path} is not valid TOML: {error}") from error
    groups = [group.title for group in get_args_parser()._action_groups[2:]]
    for name, value in recipe.items():
        if name in groups and not isinstance(value, dict):
            raise UserError(f"recipe {path}: {name} must be a table, [{name}], with options in it")
        if isinstance(value, dict) and name not in groups:
            known = ", ".join(sorted(groups))
            raise UserError(f"recipe {path}: unknown table [{name}]{did_you_mean(name, groups)} (known: {known})")
        if name not in groups and name not in RECIPE_FACTS:
            known = sorted(RECIPE_FACTS) + sorted(groups)
            raise UserError(f"recipe {path}: unknown fact {name}{did_you_mean(name, known)}")
    batch = recipe.get("reference-global-batch")
    if batch is not None and (not isinstance(batch, int) or isinstance(batch, bool) or batch < 1):
        raise UserError(f"recipe {path}: reference-global-batch = {batch!r}, expected a positive integer")
    return recipe


def recipe_argv(path: Path, recipe: dict[str, Any]) -> list[str]:
    """Turn a recipe into the command line that it stands for: tables are option groups, keys their long options.

    Raises:
        UserError: an option that its group does not have, or a value of another type than the option's.
    """
    argv = []
    for group in get_args_parser()._action_groups[2:]:
        options = {name[2:]: action for action in group._group_actions for name in action.option_strings}
        known = [name for name in options if f"--{name}" in options[name].option_strings and name[:3] != "no-"]
        for key, value in recipe.get(group.title, {}).items():
            if key not in known:
                raise UserError(f"recipe {path}: unknown option {key} in [{group.title}]{did_you_mean(key, known)}")
            argv += _recipe_option(path, key, value, options[key])
    return argv


def list_recipes() -> str:
    """Return a table of the recipes: name, model, expected accuracy, where from, and whether it was reproduced."""
    rows = [("recipe", "model", "Acc@1", "global batch", "epochs", "reproduced", "source")]
    for path in sorted(RECIPES_DIR.glob("*.toml")):
        recipe = read_recipe(path)
        options = {key: value for table in recipe.values() if isinstance(table, dict) for key, value in table.items()}
        facts = (options.get("model"), recipe.get("expected-acc1"), recipe.get("reference-global-batch"))
        rest = (options.get("epochs"), recipe.get("reproduced") or "no", recipe.get("source"))
        rows.append((path.stem, *("-" if fact is None else str(fact) for fact in (*facts, *rest))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _recipe_option(path: Path, key: str, value: Any, action: argparse.Action) -> list[str]:
    """Write one key of a recipe as it would stand on a command line."""
    if isinstance(action, argparse.BooleanOptionalAction):
        expected, is_right = "true or false", isinstance(value, bool)
        argv = [f"--{key}" if value else f"--no-{key}"]
    elif action.nargs == 2:
        expected = "two numbers"
        is_right = isinstance(value, list) and [type(item) in (int, float) for item in value] == [True, True]
        argv = [f"--{key}", *map(str, value)] if is_right else []
    else:
        kinds = {int: ("an integer", int), float: ("a number", int | float)}
        expected, kind = kinds.get(action.type, ("a string", str))
        is_right = isinstance(value, kind) and not isinstance(value, bool)
        argv = [f"--{key}={value}"]
    if not is_right:
        raise UserError(f"recipe {path}: {key} = {json.dumps(value, default=str)}, but {key} takes {expected}")
    return argv


def write_recipe(args: argparse.Namespace) -> str:
    """Return the TOML text of a recipe that runs what `args` says, wherever it is run.

    Every option is written, defaults too, so that a later default cannot change it; but for those that say where and
    how this run was started, and those that were derived from this machine.
    """
    parser = get_args_parser()
    lines = [f"title = {json.dumps(f'{args.model}, as resolved by train.py')}"]
    if args.reference_global_batch is not None:
        lines.append(f"reference-global-batch = {args.reference_global_batch}")
    for group in parser._action_groups[2:]:
        table = []
        for action in group._group_actions:
            value = getattr(args, action.dest)
            is_derived = action.dest in MACHINE_OPTIONS and action.dest not in args.given
            if action.dest in NOT_IN_RECIPE or is_derived or value is None or value == "":
                continue
            name = next(option for option in action.option_strings if option.startswith("--"))[2:]
            table.append(f"{name} = {_toml(value)}")
        if table:
            lines += ["", f"[{group.title}]", *table]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """Write a plain value as TOML: JSON but for floats, characters beyond the first 65,536 and DEL."""
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and validate a command line, with its recipe ahead of it.

    Raises:
        UserError: anything that is wrong with it, in one line.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    recipe_parser = OneLineParser(add_help=False, allow_abbrev=False)
    recipe_parser.add_argument("--recipe")
    name = recipe_parser.parse_known_args(argv)[0].recipe
    reference = None
    if name is not None:
        path = find_recipe(name)
        recipe = read_recipe(path)
        argv = recipe_argv(path, recipe) + argv
        reference = recipe.get("reference-global-batch")
    args = get_args_parser().parse_args(argv)
    args.given = _given(argv)
    args.mean, args.std = list(IMAGENET_MEAN), list(IMAGENET_STD)
    args.reference_global_batch = reference
    if not args.list_recipes:
        validate(args)
    return args


def _given(argv: Sequence[str]) -> list[str]:
    """Return the names of the options that a command line sets, whatever it sets them to."""
    parser = get_args_parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return sorted(vars(parser.parse_args(argv)))


def derive(args: argparse.Namespace) -> list[str]:
    """Fill in the options that follow from this machine, and return a line about each.

    Raises:
        UserError: the device that was asked for is not there.
    """
    lines = []
    if args.device is None:
        is_there = torch.accelerator.is_available()
        args.device = torch.accelerator.current_accelerator().type if is_there else "cpu"
        lines.append(
            f"--device {args.device}: {'the accelerator that is there' if is_there else 'no accelerator found'}"
        )
    try:
        kind = torch.device(args.device).type
    except RuntimeError as error:
        raise UserError(f"--device {args.device} is no device; give cpu, cuda, cuda:1 ...") from error
    if kind != "cpu" and not (
        torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == kind
    ):
        raise UserError(
            f"--device {args.device}: this machine has none that torch {torch.__version__} can use; try cpu"
        )
    if args.workers is None:
        # Those that this process may use, which in a container or a job are fewer than the machine's.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        # torchrun's word for it, and Slurm's, such as 8(x2)
        on_node = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
        processes = int(re.match(r"\d+", on_node)[0])
        args.workers = min(16, max(cores // processes, 1))
        lines.append(f"--workers {args.workers}: {cores} cores, {processes} processes on this node, at most 16")
    if args.output_dir is None:
        args.output_dir = f"runs/{args.model}"
        lines.append(f"--output-dir {args.output_dir}")
    if args.sync_bn and kind == "cpu":
        raise UserError("--sync-bn needs a GPU; torch has no synchronised BatchNorm on the CPU")
    return lines + _without_effect(args)


def _without_effect(args: argparse.Namespace) -> list[str]:
    """Return a line about each option that changes nothing."""
    lines = []
    if args.decoder != "pillow" and not _is_fast(args):
        lines.append(f"--decoder {args.decoder} has no effect: exact pixels and rare interpolations take Pillow's")
        args.decoder = "pillow"
    if args.decode_device != "cpu" and (reason := _needs_pixels(args)):
        lines.append(f"--decode-device {args.decode_device} has no effect: {reason}")
        args.decode_device = "cpu"
    if args.batch_size == 1 and (args.mixup_alpha or args.cutmix_alpha):
        lines.append(
            "--mixup-alpha and --cutmix-alpha have no effect: --batch-size 1 leaves no other image to mix with"
        )
    if args.synthetic is not None and args.data_path is not None:
        lines.append(f"--synthetic: --data-path {args.data_path} is not read")
    for name, meaning in [
        ("use_v2", "version 1 of torchvision's transforms is used, whose distributions are those of version 2"),
        ("cache_dataset", "which images there are is cached anyway, and checked at every start"),
    ]:
        if getattr(args, name):
            lines.append(f"--{name.replace('_', '-')} has no effect: {meaning}")
    return lines


def check_taken(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Check options that were taken from a checkpoint as if they had been given.

    Raises:
        UserError: the first that cannot be used.
    """
    for action in get_args_parser()._actions:
        value = getattr(args, action.dest, None)
        if action.dest not in names or (value == action.default and type(value) is type(action.default)):
            continue
        kind = bool if isinstance(action, argparse.BooleanOptionalAction) else action.type or str
        kind = kind if isinstance(kind, type) else str
        if type(value) is not kind or (action.choices and value not in action.choices):
            raise UserError(f"{action.option_strings[-1]} {value!r} in the checkpoint is no value of this option")
    validate(args)


def validate(args: argparse.Namespace) -> None:
    """Check what can be checked of the options before a device or a disk is touched.

    Raises:
        UserError: the first option that cannot be used.
    """
    _validate_texts(args)
    _validate_numbers(args)
    _validate_names(args)
    if args.data_path is None and args.synthetic is None and not args.dry_run:
        raise UserError("--data-path is needed: a folder with train/ and val/; or --synthetic, to run without data")
    if args.global_batch_size is not None and args.global_batch_size % args.batch_size:
        raise UserError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of --batch-size {args.batch_size}; "
            f"the nearest below is {args.global_batch_size // args.batch_size * args.batch_size}"
        )
    _validate_interpolation(args)
    _validate_workers(args)
    _validate_resolution(args)
    _validate_memory(args)
    _validate_optimization(args)
    _validate_precision(args)
    if args.lr_warmup_epochs >= args.epochs and args.lr_scheduler == "cosineannealinglr":
        raise UserError(
            f"--lr-warmup-epochs {args.lr_warmup_epochs} leaves nothing of --epochs {args.epochs} for the cosine"
        )
    if args.output_dir == "":
        raise UserError("--output-dir is empty; name a folder, or leave it out for runs/MODEL")
    if args.start_epoch >= args.epochs:
        raise UserError(
            f"--start-epoch {args.start_epoch}: expected less than --epochs {args.epochs}; epochs count from 0"
        )
    _validate_checkpoint(args)


def _validate_texts(args: argparse.Namespace) -> None:
    """Refuse what neither a recipe nor a message could repeat: other names than UTF-8's, and more than one line."""
    for name, value in vars(args).items():
        if isinstance(value, str) and not is_printable(value):
            raise UserError(
                f"--{name.replace('_', '-')} {value!a}: expected one line of UTF-8; rename it, or give a link to it"
            )


def _validate_checkpoint(args: argparse.Namespace) -> None:
    if args.overwrite and args.resume == "auto":
        raise UserError("--overwrite starts over and --resume auto goes on; give one of them")
    if args.test_only and not (args.weights or args.resume):
        raise UserError("--test-only needs something to evaluate: --weights NAME|FILE or --resume PATH")
    if args.ema and not (args.weights and Path(args.weights).is_file()):
        raise UserError("--ema is about --weights FILE, and there is no such file; give one, or leave it out")
    _validate_bad_images(args)
    if args.test_only and args.resume == "auto" and args.output_dir is None:
        raise UserError("--test-only --resume auto needs --output-dir, the folder to look in")
    if args.keep_last < 2:
        raise UserError(
            f"--keep-last {args.keep_last}: expected 2 or more, so that one is left where the newest is damaged"
        )
    guard.parse_allowed(args.allow_change, [action.dest for action in get_args_parser()._actions])
    if args.allow_change is not None and not args.resume and not args.test_only:
        raise UserError("--allow-change is about what --resume may find changed; give that too, or neither")


def _validate_bad_images(args: argparse.Namespace) -> None:
    if args.bad_images == "skip" and args.test_only:
        raise UserError("--bad-images skip is about training; in evaluation give --bad-images error, or leave it out")
    if args.bad_images == "skip" and args.decode_device != "cpu" and not _needs_pixels(args):
        raise UserError(
            f"--bad-images skip: with --decode-device {args.decode_device} an image is found bad when it is too late "
            "to take another one; give one of them"
        )
    if args.bad_images == "skip" and args.synthetic is not None:
        raise UserError("--bad-images skip has no effect on --synthetic images; leave it out")


def _validate_names(args: argparse.Namespace) -> None:
    """Check names of which some come from timm; those are looked up when they are built."""
    for option, given, known, what in [
        ("--model", args.model, list_models(module=torchvision.models), "classification model of torchvision"),
        ("--opt", args.opt, OPTIMIZERS, "optimizer"),
        ("--auto-augment", args.auto_augment, POLICIES, "augmentation policy"),
    ]:
        if given is not None and given not in known and not given.startswith("timm/"):
            hint = did_you_mean(given, known) or f" (there are {', '.join(known)})"
            raise UserError(f"{option} {given} is no {what}{hint}; timm's are written timm/NAME")


def _validate_resolution(args: argparse.Namespace) -> None:
    if (args.train_crop_size_min is None) != (args.crop_ramp_epochs is None):
        raise UserError("--train-crop-size-min and --crop-ramp-epochs go together: from which size, and when it grows")
    if args.crop_ramp_epochs is not None:
        first, last = args.crop_ramp_epochs
        if not 0 <= first < last:
            raise UserError(f"--crop-ramp-epochs {first} {last}: expected two epochs, the first before the last")
        if args.synthetic is not None:
            raise UserError("--train-crop-size-min has no effect on --synthetic images; leave it out")
        if args.train_crop_size_min > args.train_crop_size:
            raise UserError(
                f"--train-crop-size-min {args.train_crop_size_min} is above --train-crop-size {args.train_crop_size}"
            )
    if args.model.startswith("vit_") and args.train_crop_size != args.val_crop_size:
        raise UserError(
            f"--model {args.model} takes images of one size; --train-crop-size {args.train_crop_size} and "
            f"--val-crop-size {args.val_crop_size} differ"
        )


def _validate_memory(args: argparse.Namespace) -> None:
    side = max(args.train_crop_size, args.val_crop_size)
    needed = args.batch_size * 3 * side**2
    if needed > memory_bytes():
        raise UserError(
            f"--batch-size {args.batch_size} of {side} px are {needed / 1e9:,.0f} GB of pixels, more than this "
            "machine's memory; use fewer or smaller ones"
        )


def _validate_precision(args: argparse.Namespace) -> None:
    if args.amp_dtype is not None and not args.amp:
        raise UserError(f"--amp-dtype {args.amp_dtype} has an effect under --amp only; add --amp, or leave it out")
    if args.use_deterministic_algorithms and args.compile in MEASURED_MODES:
        raise UserError(
            f"--compile {args.compile} chooses kernels by how fast they are on the day, which "
            "--use-deterministic-algorithms excludes; use --compile default"
        )
    if args.use_deterministic_algorithms and args.grad_compression != "none":
        raise UserError(
            f"--grad-compression {args.grad_compression} is about DDP's all-reduce, which "
            "--use-deterministic-algorithms does without; leave one of them out"
        )


def _validate_optimization(args: argparse.Namespace) -> None:
    if args.lr_scaling != "none" and args.reference_global_batch is None:
        raise UserError(
            f"--lr-scaling {args.lr_scaling} needs a --recipe with a reference-global-batch, which --lr is for"
        )
    _validate_rates(args)
    if args.opt == "sgd_nesterov" and args.momentum == 0:
        raise UserError("--opt sgd_nesterov needs a --momentum above 0")
    if args.opt_betas is not None and not all(0 <= beta < 1 for beta in args.opt_betas):
        raise UserError(f"--opt-betas {args.opt_betas[0]} {args.opt_betas[1]}: expected two numbers from 0 to below 1")
    if args.opt_betas is not None and args.opt in ("rmsprop", "sgd", "sgd_nesterov"):
        raise UserError(f"--opt-betas: --opt {args.opt} has none")
    if args.opt_eps is not None and args.opt in ("sgd", "sgd_nesterov"):
        raise UserError(f"--opt-eps: --opt {args.opt} has none")
    if args.bce_target_thresh is not None and not args.bce_loss:
        raise UserError("--bce-target-thresh is about --bce-loss; give that too")
    if args.freeze and args.layer_decay is not None:
        raise UserError("--layer-decay is about the layers that --freeze leaves as they are; give one of them")


def _validate_rates(args: argparse.Namespace) -> None:
    """Refuse a schedule that grows beyond what a float32 holds."""
    try:
        rates = [lr_at(epoch, peak=args.lr, **schedule(args)) for epoch in (args.epochs - 1, args.epochs - 1e-9)]
    except OverflowError:
        rates = [math.inf]
    if max(rates) > _AT_MOST["lr"]:
        raise UserError(
            f"--lr-gamma {args.lr_gamma}: the learning rate grows beyond {_AT_MOST['lr']:g} in --epochs {args.epochs}"
        )


def _validate_interpolation(args: argparse.Namespace) -> None:
    """Refuse what torchvision's transforms would refuse at the first image that needs it."""
    known, needed_by = {mode.value for mode in InterpolationMode}, ""
    if args.backend == "tensor":
        known, needed_by = {"nearest", "nearest-exact", "bilinear", "bicubic"}, "--backend tensor"
    if args.auto_augment is not None and not args.auto_augment.startswith("timm/"):
        # Of a policy's rotations and shears; AugMix works on tensors with either backend.
        is_tensor = args.backend == "tensor" or args.auto_augment == "augmix"
        known = {"nearest", "bilinear"} if is_tensor else {"nearest", "nearest-exact", "bilinear", "bicubic"}
        needed_by = f"--auto-augment {args.auto_augment}"
    if args.interpolation not in known:
        raise UserError(f"--interpolation {args.interpolation}: {needed_by} takes {', '.join(sorted(known))}")


def _is_fast(args: argparse.Namespace) -> bool:
    """Return whether images are loaded the fast way, by --decoder and with draws of their own."""
    return args.backend is None and args.interpolation in ("bilinear", "bicubic")


def _needs_pixels(args: argparse.Namespace) -> str:
    """Return why images must be decoded where they are loaded, or nothing."""
    if args.synthetic is not None:
        return "made-up images are not decoded"
    if args.auto_augment is not None:
        return f"--auto-augment {args.auto_augment} works on images on the CPU"
    return "" if _is_fast(args) else "exact pixels and rare interpolations are Pillow's or torchvision's, on the CPU"


def _validate_workers(args: argparse.Namespace) -> None:
    """Refuse threads where they would draw from the one generator of the process."""
    if args.worker_type == "process" or (_is_fast(args) and args.auto_augment is None):
        return
    given = f"--interpolation {args.interpolation}" if args.backend is None else f"--backend {args.backend}"
    given = given if args.auto_augment is None else f"--auto-augment {args.auto_augment}"
    raise UserError(
        f"--worker-type thread: {given} draws from the one generator of the process; use --worker-type process"
    )


# Options with a smallest value that makes sense, and that value; then those that lie between 0 and 1.
_AT_LEAST = {
    "batch_size": 1, "global_batch_size": 1, "workers": 0, "epochs": 1, "start_epoch": 0, "print_freq": 1,
    "checkpoint_steps": 1, "checkpoint_minutes": 0, "keep_every": 1, "train_crop_size": 1, "val_resize_size": 1,
    "val_crop_size": 1, "lr": 0, "lr_min": 0,
    "weight_decay": 0, "norm_weight_decay": 0, "bias_weight_decay": 0, "transformer_embedding_decay": 0,
    "lr_warmup_epochs": 0, "lr_step_size": 1, "ra_reps": 1, "ra_magnitude": 0, "mixup_alpha": 0, "cutmix_alpha": 0,
    "model_ema_steps": 1, "world_size": 1, "synthetic": 1, "seed": 0, "lr_gamma": 0, "momentum": 0, "clip_grad_norm": 0,
    "stall_timeout": 0, "augmix_severity": 1, "prefetch_factor": 1, "train_crop_size_min": 1, "mixup_off_epoch": 0,
    "opt_eps": 0,
}  # fmt: skip
# Beyond these lies no run that could be made, and numbers that torch or the clock cannot hold.
_AT_MOST = {
    "augmix_severity": 10, "batch_size": 1 << 24, "checkpoint_minutes": 1e9, "clip_grad_norm": 1e12,
    "cutmix_alpha": 1e9, "dist_timeout": 1e6, "epochs": 10**9, "global_batch_size": 1 << 31,
    "lr": 1e30, "lr_gamma": 1e9, "lr_min": 1e30, "mixup_alpha": 1e9, "momentum": 1e12, "opt_eps": 1e12,
    "prefetch_factor": 4096, "ra_magnitude": 30,
    "seed": (1 << 32) - 1, "stall_timeout": 1e6, "synthetic": 1 << 40, "train_crop_size": 16384, "val_crop_size": 16384,
    "val_resize_size": 16384, "weight_decay": 1e6, "norm_weight_decay": 1e6, "bias_weight_decay": 1e6,
    "transformer_embedding_decay": 1e6, "workers": 1024, "world_size": 1 << 20,
}  # fmt: skip
_MOST_COUNT = 1 << 53  # of steps, epochs and the like: what a float still counts
_PROBABILITIES = [
    "crop_scale", "random_erase", "hflip_prob", "label_smoothing", "model_ema_decay", "lr_warmup_decay", "mixup_prob",
    "mixup_switch_prob", "stochastic_depth", "dropout", "layer_decay", "bce_target_thresh",
]  # fmt: skip


def _validate_numbers(args: argparse.Namespace) -> None:
    for name, given in vars(args).items():
        option = "--wd" if name == "weight_decay" else "--" + name.replace("_", "-")
        for value in given if isinstance(given, list) else [given]:
            if type(value) in (int, float):
                _validate_number(name, option, value)
    if args.dist_timeout <= 0:
        raise UserError(f"--dist-timeout {args.dist_timeout}: expected a number of minutes above 0")


def _validate_number(name: str, option: str, value: float) -> None:
    if type(value) is float and not math.isfinite(value):
        raise UserError(f"{option} {value}: expected a finite number")
    least, most = _AT_LEAST.get(name, -_MOST_COUNT), _AT_MOST.get(name, _MOST_COUNT)
    if value < least:
        raise UserError(f"{option} {value}: expected {least} or more")
    if value > most:
        given = value if type(value) is float or value < 1 << 63 else "of that many digits"
        raise UserError(f"{option} {given}: expected {least if name in _AT_LEAST else 0} to {most:.10g}")
    if name in _PROBABILITIES and not 0 <= value <= 1:
        raise UserError(f"{option} {value}: expected a number from 0 to 1")
