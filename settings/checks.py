"""Checks of the options, as far as they need no device, and remarks on options that are seldom meant as they are given.

Each check takes all options and raises the error of the first mistake in its group. `CHECKS` is in the order in which
mistakes are reported. Each remark of `REMARKS` returns a line, or an empty string.
"""

import os
import re
from argparse import Namespace
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from errors import UserError, counted, did_you_mean, is_printable
from settings import options
from settings.choices import LOGGERS, OPTIMIZERS, POLICIES, TABLES
from settings.custom_code import parse_kwargs
from settings.machine import default_folder
from settings.options import BY_NAME, STATISTICS, Option, split_custom


def validate(args: Namespace) -> None:
    """Raise UserError for the first option that cannot be used, as far as that shows before a device is touched."""
    for name, option in BY_NAME.items():
        _check_value(option, getattr(args, name))
    for check in CHECKS:
        check(args)
    options.parse_allowed(args.allow_change)


def remarks(args: Namespace) -> list[str]:
    """Return a line about each option that has no effect in this run, and about those that are seldom meant so."""
    lines = []
    for name, option in BY_NAME.items():
        if getattr(args, name) != option.default:
            why = option.why_idle(args)
            if why:
                lines.append(f"{option.flag} has no effect {why}")
    return lines + [line for line in (remark(args) for remark in REMARKS) if line]


def _check_value(option: Option, value: Any) -> None:
    """Refuse numbers out of bounds, and text that no record or recipe could hold."""
    option.check(value)
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str):
            _check_text(option, text)


def _check_text(option: Option, text: str) -> None:
    """Refuse empty text, long names, and those that are not one line of UTF-8, which no recipe could repeat."""
    if not is_printable(text):
        raise UserError(f"{option.flag} {text!a}: expected one line of UTF-8; rename it, or give a link to it")
    if not text and option.default != "":
        raise UserError(f"{option.flag} is empty; give a value, or remove it")
    # NAME_MAX of Linux's and macOS's file systems, which a run would meet only where it makes the file.
    if max(map(len, re.split("[/,]", text))) > 255:
        raise UserError(f"{option.flag} {text[:20]}...: a name in it has more than 255 characters")
    # A local folder named s3: would be made. The rest of an address may hold a password, so it is not printed.
    if "://" in text and option.dest not in options.TAKES_ADDRESS:
        raise UserError(f"{option.flag} {text.partition('//')[0]}//...: {options.NO_ADDRESS}")


def check_names(args: Namespace) -> None:
    """Check the names that the tables of `choices` hold; those of models are looked up when they are built."""
    parse_kwargs(args.model_kwargs)
    for option, (kind, table) in TABLES.items():
        value = getattr(args, option)
        if not value or not table:
            continue
        for name in value if isinstance(value, list) else [value]:
            _check_name(option, kind, table, name)


def _check_name(option: str, kind: str, table: Collection[str], name: str) -> None:
    """Refuse a name that is in no table, not timm's and no code of the user's own."""
    has_timms = option in ("opt", "auto_augment")
    is_timms = has_timms and name.startswith("timm/")
    if name in table or split_custom(name) or is_timms:
        return
    hint = did_you_mean(name, table) or f" (known: {', '.join(table)});"
    timms = "timm's are written timm/NAME, " if has_timms else ""
    raise UserError(f"{BY_NAME[option].flag} {name}: unknown {kind}{hint} {timms}your own FILE.py:FUNCTION")


def check_data(args: Namespace) -> None:
    """Check that there are images to read, and the extensions of their files."""
    if args.data_path is None and args.synthetic is None and not args.dry_run:
        raise UserError("--data-path is needed: a folder with train/ and val/; or --synthetic, to run without data")
    for extension in args.extensions or ():
        if extension[0] != ".":
            raise UserError(f"--extensions {extension}: expected a dot and letters, such as .avif")


def check_batch(args: Namespace) -> None:
    """Check that micro-batches make up the global batch; `assign` counts them."""
    if args.global_batch_size is not None and args.global_batch_size % args.batch_size:
        nearest = max(args.global_batch_size // args.batch_size, 1) * args.batch_size
        raise UserError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of --batch-size {args.batch_size}; "
            f"give {nearest}"
        )


def check_held_out(args: Namespace) -> None:
    """Check the fold of the minival, and the names of further evaluation sets."""
    # The tolerances: a quotient of floats may come out just below a whole number of folds.
    if args.minival and (args.minival_fold + 0.999) * args.minival > 1:
        last = int(1 / args.minival + 1e-9) - 1
        raise UserError(f"--minival-fold {args.minival_fold} of --minival {args.minival}: expected 0 to {last}")
    misnamed = _find_misnamed(args.eval_data or ())
    if misnamed is not None:
        raise UserError(
            f"--eval-data {misnamed}: expected NAME=DIR with a different NAME of letters, digits and . - _ for each "
            "set; train, epoch, val, minival and names ending in _ema are reserved"
        )


def _find_misnamed(texts: Sequence[str]) -> str | None:
    """Return the first NAME=DIR whose name is unusable, or that of other records, or None."""
    taken = ["train", "epoch", "val", "minival"]
    for text in texts:
        name, _, place = text.partition("=")
        # Names label lines, records and curves, where NAME_ema is the score of the averaged weights.
        is_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*(?<!_ema)", name, re.ASCII)
        if not place or not is_name or name in taken:
            return text
        taken.append(name)
    return None


def check_crops(args: Namespace) -> None:
    """Check progressive resizing, and that training images are large enough for the blur."""
    smallest = args.train_crop_size_min
    ramp = args.crop_ramp_epochs
    if smallest and not ramp:
        raise UserError("--train-crop-size-min needs --crop-ramp-epochs, the epochs between which the size grows")
    if ramp and not 0 <= ramp[0] < ramp[1]:
        raise UserError(f"--crop-ramp-epochs {ramp[0]} {ramp[1]}: expected two epochs, the first before the last")
    if smallest and smallest > args.train_crop_size:
        raise UserError(f"--train-crop-size-min {smallest} is above --train-crop-size {args.train_crop_size}")
    # The kernel has 13 pixels, and torch mirrors 6 at each edge: it needs more than that many.
    if args.blur_prob and (smallest or args.train_crop_size) < 7:
        raise UserError(
            "--blur-prob needs training images of 7 pixels or more; give a larger crop size, or remove --blur-prob"
        )


def check_flips(args: Namespace) -> None:
    """Check that alternating flips are not given a probability too."""
    if args.hflip_mode == "alternating" and args.hflip_prob != BY_NAME["hflip_prob"].default:
        raise UserError(
            f"--hflip-prob {args.hflip_prob}: --hflip-mode alternating flips each image in every second epoch; give "
            "--hflip-prob 0.5, or --hflip-mode random"
        )


def check_optimization(args: Namespace) -> None:
    """Check the scaling of the learning rate, and that one option at most clips gradients."""
    if args.lr_scaling != "none" and args.reference_global_batch is None:
        raise UserError(
            f"--lr-scaling {args.lr_scaling} needs --lr-scaling-batch, the global batch size that --lr is meant for, "
            "or a recipe that sets it"
        )
    if [args.clip_agc, args.clip_grad_norm, args.clip_grad_value].count(None) < 2:
        raise UserError(
            "--clip-agc, --clip-grad-norm and --clip-grad-value all clip the gradients; give only one of them"
        )


def check_channels(args: Namespace) -> None:
    """Check that all that depends on the number of channels fits it."""
    for name in STATISTICS:
        number = len(getattr(args, name))
        if number != args.in_chans:
            raise UserError(
                f"--{name} has {counted(number, 'value')}, but --in-chans is {args.in_chans}; give one value per "
                "channel, or another --in-chans"
            )
    if args.in_chans == 3:
        return
    for name in ("auto_augment", "color_jitter", "grayscale_prob"):
        if getattr(args, name):
            flag = BY_NAME[name].flag
            raise UserError(f"{flag} needs three colour channels, but --in-chans is {args.in_chans}; remove {flag}")


def check_class_weights(args: Namespace) -> None:
    """Check that weights of classes are there, and that the loss uses them."""
    if args.class_weights is None:
        return
    if args.class_weights != "balanced" and not os.path.isfile(args.class_weights):
        raise UserError(
            f"--class-weights {args.class_weights}: no such file; give balanced, or a list with the columns class and "
            "weight"
        )
    if split_custom(args.criterion or ""):
        raise UserError(
            f"--criterion {args.criterion}, your own loss, ignores --class-weights; weight the classes in it, or "
            "remove one of the two"
        )


def check_multi_label(args: Namespace) -> None:
    """Check what several labels of an image allow: losses, metrics and options of single classes do not fit them."""
    if args.multi_label:
        if args.synthetic is not None and not args.test_only:
            raise UserError(
                "--multi-label needs the labels of a list, but --synthetic images have one class each; remove one of "
                "the two"
            )
        if not args.bce_loss and not split_custom(args.criterion or ""):
            raise UserError(
                "--multi-label: softmax losses need exactly one class per image; give --criterion bce, or your own loss"
            )
        if len(args.multi_label) > 1 or args.multi_label == "/":
            raise UserError(
                f"--multi-label {args.multi_label}: expected one character that separates labels, other than /"
            )
        for name in ("balanced_sampler", "label_smoothing", "teacher"):
            if getattr(args, name):
                raise UserError(f"{BY_NAME[name].flag} needs exactly one class per image; remove it or --multi-label")
    unfit = "balanced_acc" if args.multi_label else "map"
    if unfit in (args.metrics or ()):
        raise UserError(
            "--metrics: map needs several labels per image (--multi-label), balanced_acc exactly one class per image"
        )


def check_loggers(args: Namespace) -> None:
    """Check that loggers do not exclude each other, have names of their own, and are installed."""
    if "none" in args.logger and args.logger != ["none"]:
        raise UserError("--logger none cannot be combined with other loggers; remove it or them")
    # loggers.jsonl knows a logger by this last part, so that a file of one's own may move.
    short = [os.path.basename(name) for name in args.logger]
    for name in args.logger:
        if short.count(os.path.basename(name)) > 1:
            raise UserError(f"--logger {name}: two loggers have this name; give it once, or rename one of the files")
    for name in args.logger:
        package = LOGGERS[name].package if name in LOGGERS else ""
        if package and not _is_installed(package):
            raise UserError(f"--logger needs {package}, which is not installed here: pip install {package}")


def _is_installed(package: str) -> bool:
    """Tell whether a package can be imported; the folder that W&B makes for its runs bears the package's name."""
    return getattr(find_spec(package), "origin", None) is not None


def check_modes(args: Namespace) -> None:
    """Check that one sampler sets the order, and that nothing is chosen by timing where bits must repeat."""
    if args.balanced_sampler and args.ra_sampler:
        raise UserError("--balanced-sampler and --ra-sampler both set the sampling order; give only one of them")
    if args.use_deterministic_algorithms and (args.compile or "").startswith("max-autotune"):
        raise UserError(
            f"--compile {args.compile} chooses kernels by timing them, which --use-deterministic-algorithms forbids; "
            "use --compile default"
        )


def check_epochs(args: Namespace) -> None:
    """Check that epochs are left to train, and that a patience has evaluations to count."""
    if args.start_epoch >= args.epochs:
        raise UserError(
            f"--start-epoch {args.start_epoch}: expected less than --epochs {args.epochs}; epochs count from 0"
        )
    if args.stop_epoch is not None and args.start_epoch >= args.stop_epoch:
        raise UserError(
            f"--start-epoch {args.start_epoch}: expected less than --stop-epoch {args.stop_epoch}; epochs count from 0"
        )
    if args.patience is not None and args.eval_every == 0:
        raise UserError(
            "--patience counts evaluations, and --eval-every 0 evaluates once, at the end; give one of them"
        )


def check_start(args: Namespace) -> None:
    """Check what a run starts from, and what an evaluation evaluates."""
    if args.overwrite and args.resume == "auto":
        raise UserError("--overwrite starts over, but --resume auto resumes; give only one of them")
    if args.test_only and not args.weights and not args.resume:
        raise UserError("--test-only needs something to evaluate: --weights NAME|FILE or --resume PATH")
    if args.ema:
        _check_average(args.weights)
    if args.test_only and args.resume == "auto" and args.output_dir is None:
        raise UserError("--test-only --resume auto needs --output-dir, the folder to look in")


def _check_average(weights: str | None) -> None:
    """Refuse `--ema` without a file that may hold an average."""
    trouble = "is not given"
    if weights:
        if weights.startswith("hf-hub:") or os.path.isfile(weights):
            return
        trouble = f"{weights} is not there or no file"
    raise UserError(f"--ema loads the average of a file, and --weights {trouble}; give --weights FILE, or remove --ema")


def check_repeats(args: Namespace) -> None:
    """Refuse a value that a list holds twice."""
    for name in ("extensions", "metrics"):
        values = getattr(args, name) or ()
        for value in values:
            if values.count(value) > 1:
                raise UserError(f"--{name} {value} is given twice; give it once")


def check_interpolation(args: Namespace) -> None:
    """Refuse interpolations that torchvision's transforms would refuse at the first image that needs them."""
    on_images = {"nearest", "nearest-exact", "bilinear", "bicubic"}
    known = set(options.INTERPOLATIONS)
    needed_by = ""
    if args.backend == "tensor":
        known = on_images
        needed_by = "--backend tensor"
    if args.auto_augment in POLICIES:
        # A policy rotates and shears; AugMix works on tensors with either backend.
        known = on_images
        if args.backend == "tensor" or args.auto_augment == "augmix":
            known = {"nearest", "bilinear"}
        needed_by = f"--auto-augment {args.auto_augment}"
    if args.interpolation not in known:
        raise UserError(f"--interpolation {args.interpolation}: {needed_by} supports {', '.join(sorted(known))}")


def check_output_dir(args: Namespace) -> None:
    """Refuse an output folder among the class folders: every folder there is a class."""
    folder = os.path.realpath(args.output_dir or default_folder(args))
    if not args.data_path or args.test_only or args.dry_run:
        return
    for split in ("train", "val"):
        if Path(folder).is_relative_to(os.path.realpath(os.path.join(args.data_path, split))):
            raise UserError(
                f"--output-dir {folder} lies inside {split}/ of the images, where it would count as a class"
            )


# In this order: a command line with two mistakes is told the first one.
CHECKS = (
    check_names,
    check_data,
    check_batch,
    check_held_out,
    check_crops,
    check_flips,
    check_optimization,
    check_channels,
    check_class_weights,
    check_multi_label,
    check_loggers,
    check_modes,
    check_epochs,
    check_start,
    check_repeats,
    check_interpolation,
    check_output_dir,
)


def _remark_on_weights(args: Namespace) -> str:
    if args.weights and args.resume and args.test_only:
        return "--weights has no effect: the checkpoint of --resume is evaluated"
    return ""


def _remark_on_padding(args: Namespace) -> str:
    if args.val_crop_size > args.val_resize_size and args.synthetic is None:
        return (
            f"--val-crop-size {args.val_crop_size} is above --val-resize-size {args.val_resize_size}: images whose "
            "shorter side is resized to less than the crop are padded with black, as in torchvision"
        )
    return ""


def _remark_on_random_features(args: Namespace) -> str:
    is_frozen = args.freeze or args.freeze_below or args.freeze_epochs
    # A model of the user's own may load weights by itself.
    has_weights = args.weights or args.resume or args.test_only or split_custom(args.model)
    if is_frozen and not has_weights:
        return "--freeze and options like it without --weights train on the features of random weights"
    return ""


def _remark_on_own_loss(args: Namespace) -> str:
    if args.label_smoothing and split_custom(args.criterion or ""):
        return f"--label-smoothing has no effect with --criterion {args.criterion}, a loss of your own"
    return ""


def _remark_on_balance(args: Namespace) -> str:
    if args.balanced_sampler and args.class_weights == "balanced":
        return (
            "--balanced-sampler and --class-weights balanced both compensate for class imbalance: small classes are "
            "boosted twice"
        )
    return ""


def _remark_on_momentum(args: Namespace) -> str:
    is_given = args.momentum != BY_NAME["momentum"].default
    if is_given and args.opt in OPTIMIZERS and "momentum" not in OPTIMIZERS[args.opt].options:
        return f"--momentum has no effect with --opt {args.opt}"
    return ""


def _remark_on_late_epochs(args: Namespace) -> str:
    for name in ("stop_epoch", "mixup_off_epoch", "patience"):
        epoch = getattr(args, name) or 0
        if epoch >= args.epochs:
            return f"{BY_NAME[name].flag} {epoch} has no effect with --epochs {args.epochs}"
    return ""


def _remark_on_frozen_epochs(args: Namespace) -> str:
    if args.freeze_epochs >= args.epochs:
        return (
            f"--freeze-epochs {args.freeze_epochs} of --epochs {args.epochs}: the layers below the classifier never "
            "train"
        )
    return ""


def _remark_on_switching(args: Namespace) -> str:
    is_given = args.mixup_switch_prob != BY_NAME["mixup_switch_prob"].default
    if is_given and bool(args.mixup_alpha) != bool(args.cutmix_alpha):
        return "--mixup-switch-prob has no effect unless --mixup-alpha and --cutmix-alpha are both on"
    return ""


REMARKS = (
    _remark_on_weights,
    _remark_on_padding,
    _remark_on_random_features,
    _remark_on_own_loss,
    _remark_on_balance,
    _remark_on_momentum,
    _remark_on_late_epochs,
    _remark_on_frozen_epochs,
    _remark_on_switching,
)
