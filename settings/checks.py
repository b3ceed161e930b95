"""Checks of the options, as far as they need no device, and remarks on options that are seldom meant as they are given.

Each check takes all options and raises the error of the first mistake in its group. `CHECKS` is in the order in which
mistakes are reported. Each remark of `REMARKS` returns a line, or an empty string.
"""

import os
import re
from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

from errors import UserError, counted, did_you_mean, is_printable
from settings import options
from settings.choices import LOGGERS, OPTIMIZERS, POLICIES, TABLES
from settings.custom_code import parse_kwargs
from settings.machine import default_folder
from settings.options import (
    BY_NAME,
    STATISTICS,
    AugmentationOptions,
    CheckpointOptions,
    DataOptions,
    ModelOptions,
    MonitoringOptions,
    OptimizationOptions,
    PrecisionOptions,
    ScheduleOptions,
    StartOptions,
)
from settings.rules import Option, as_list, split_custom
from settings.stages import Parsed


def validate(args: Parsed) -> None:
    """Raise UserError for the first option that cannot be used, as far as that shows before a device is touched."""
    values = args.flat()
    # Not left to argparse: recipes, checkpoints and a script's namespace bring values that no parser has seen.
    for name, option in BY_NAME.items():
        _check_value(option, values[name])
    check_names(args)
    for check in CHECKS:
        check(*_groups_of(check, args))
    options.parse_allowed(args.checkpoint.allow_change)


def remarks(args: Parsed) -> list[str]:
    """Return a line about each option that has no effect in this run, and about those that are seldom meant so."""
    lines = []
    values = args.flat()
    # Only what is not the default: the recipe that a run writes holds the defaults too, which nobody meant.
    for name, option in BY_NAME.items():
        if values[name] != option.default and (why := option.why_idle(values)):
            lines.append(f"{option.flag} has no effect {why}")
    return lines + [line for remark in REMARKS if (line := remark(*_groups_of(remark, args)))]


def _groups_of(check: Callable[..., Any], args: Parsed) -> list[Any]:
    """Return the groups of options that a check reads, by the names of its parameters."""
    return [getattr(args, name) for name in signature(check).parameters]


def _check_value(option: Option, value: Any) -> None:
    """Refuse numbers out of bounds, and text that no record or recipe could hold."""
    option.check(value)
    for text in as_list(value):
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


def check_names(args: Parsed) -> None:
    """Check the names that the tables of `choices` hold; those of models are looked up when they are built."""
    parse_kwargs(args.model.model_kwargs)
    for option, (kind, table) in TABLES.items():
        value = args.flat()[option]
        if value and table:
            for name in as_list(value):
                _check_name(option, kind, table, name)


def _check_name(option: str, kind: str, table: Collection[str], name: str) -> None:
    """Refuse a name that is in no table, not timm's and no code of the user's own."""
    has_timms = option in ("opt", "auto_augment")
    if name in table or split_custom(name) or (has_timms and name.startswith("timm/")):
        return
    hint = did_you_mean(name, table) or f" (known: {', '.join(table)});"
    timms = "timm's are written timm/NAME, " if has_timms else ""
    raise UserError(f"{BY_NAME[option].flag} {name}: unknown {kind}{hint} {timms}your own FILE.py:FUNCTION")


def check_data(start: StartOptions, data: DataOptions) -> None:
    """Check that there are images to read, and the extensions of their files."""
    if data.data_path is None and data.synthetic is None and not start.dry_run:
        raise UserError("--data-path is needed: a folder with train/ and val/; or --synthetic, to run without data")
    for extension in data.extensions or ():
        # Names are compared by their ends, so that jpg without its dot would also take a file named mapjpg.
        if extension[0] != ".":
            raise UserError(f"--extensions {extension}: expected a dot and letters, such as .avif")


def check_batch(optimization: OptimizationOptions) -> None:
    """Check that micro-batches make up the global batch; `assign` counts them."""
    total, each = optimization.global_batch_size, optimization.batch_size
    # A smaller micro-batch would weigh its images more: the gradient is the mean of the micro-batches' means.
    if total is not None and total % each:
        nearest = max(total // each, 1) * each
        raise UserError(f"--global-batch-size {total} is not a multiple of --batch-size {each}; give {nearest}")


def check_held_out(data: DataOptions) -> None:
    """Check the fold of the minival, and the names of further evaluation sets."""
    # The tolerances: a quotient of floats may come out just below a whole number of folds.
    if data.minival and (data.minival_fold + 0.999) * data.minival > 1:
        last = int(1 / data.minival + 1e-9) - 1
        raise UserError(f"--minival-fold {data.minival_fold} of --minival {data.minival}: expected 0 to {last}")
    misnamed = _find_misnamed(data.eval_data or ())
    if misnamed is not None:
        reserved = "train, epoch, val, minival and names ending in _ema are reserved"
        expected = "expected NAME=DIR with a different NAME of letters, digits and . - _ for each set"
        raise UserError(f"--eval-data {misnamed}: {expected}; {reserved}")


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


def check_crops(augmentation: AugmentationOptions) -> None:
    """Check progressive resizing, and that training images are large enough for the blur."""
    smallest, ramp = augmentation.train_crop_size_min, augmentation.crop_ramp_epochs
    if smallest and not ramp:
        raise UserError("--train-crop-size-min needs --crop-ramp-epochs, the epochs between which the size grows")
    if ramp and not 0 <= ramp[0] < ramp[1]:
        raise UserError(f"--crop-ramp-epochs {ramp[0]} {ramp[1]}: expected two epochs, the first before the last")
    if smallest and smallest > augmentation.train_crop_size:
        raise UserError(f"--train-crop-size-min {smallest} is above --train-crop-size {augmentation.train_crop_size}")
    # The kernel has 13 pixels, and torch mirrors 6 at each edge: it needs more than that many.
    if augmentation.blur_prob and (smallest or augmentation.train_crop_size) < 7:
        remedy = "give a larger crop size, or remove --blur-prob"
        raise UserError(f"--blur-prob needs training images of 7 pixels or more; {remedy}")


def check_flips(augmentation: AugmentationOptions) -> None:
    """Check that alternating flips are not given a probability too."""
    if augmentation.hflip_mode == "alternating" and augmentation.hflip_prob != BY_NAME["hflip_prob"].default:
        why = "--hflip-mode alternating flips each image in every second epoch"
        remedy = "give --hflip-prob 0.5, or --hflip-mode random"
        raise UserError(f"--hflip-prob {augmentation.hflip_prob}: {why}; {remedy}")


def check_optimization(optimization: OptimizationOptions) -> None:
    """Check the scaling of the learning rate, and that one option at most clips gradients."""
    if optimization.lr_scaling != "none" and optimization.reference_global_batch is None:
        needed = "--lr-scaling-batch, the global batch size that --lr is meant for, or a recipe that sets it"
        raise UserError(f"--lr-scaling {optimization.lr_scaling} needs {needed}")
    if [optimization.clip_agc, optimization.clip_grad_norm, optimization.clip_grad_value].count(None) < 2:
        flags = "--clip-agc, --clip-grad-norm and --clip-grad-value"
        raise UserError(f"{flags} all clip the gradients; give only one of them")


def check_channels(data: DataOptions, augmentation: AugmentationOptions) -> None:
    """Check that all that depends on the number of channels fits it."""
    for name in STATISTICS:
        number = len(getattr(augmentation, name))
        if number != data.in_chans:
            has = f"--{name} has {counted(number, 'value')}, but --in-chans is {data.in_chans}"
            raise UserError(f"{has}; give one value per channel, or another --in-chans")
    if data.in_chans == 3:
        return
    for name in ("auto_augment", "color_jitter", "grayscale_prob"):
        if getattr(augmentation, name):
            flag = BY_NAME[name].flag
            raise UserError(f"{flag} needs three colour channels, but --in-chans is {data.in_chans}; remove {flag}")


def check_class_weights(optimization: OptimizationOptions) -> None:
    """Check that weights of classes are there, and that the loss uses them."""
    weights, loss = optimization.class_weights, optimization.criterion
    if weights is None:
        return
    # The loss, which reads the file, is built after the data is opened, on a network disk minutes later.
    if weights != "balanced" and not os.path.isfile(weights):
        remedy = "give balanced, or a list with the columns class and weight"
        raise UserError(f"--class-weights {weights}: no such file; {remedy}")
    if split_custom(loss or ""):
        remedy = "weight the classes in it, or remove one of the two"
        raise UserError(f"--criterion {loss}, your own loss, ignores --class-weights; {remedy}")


def check_multi_label(
    data: DataOptions,
    augmentation: AugmentationOptions,
    optimization: OptimizationOptions,
    checkpoint: CheckpointOptions,
    monitoring: MonitoringOptions,
) -> None:
    """Check what several labels of an image allow: losses, metrics and options of single classes do not fit them."""
    if data.multi_label:
        if data.synthetic is not None and not checkpoint.test_only:
            trouble = "needs the labels of a list, but --synthetic images have one class each"
            raise UserError(f"--multi-label {trouble}; remove one of the two")
        if not optimization.bce_loss and not split_custom(optimization.criterion or ""):
            remedy = "give --criterion bce, or your own loss"
            raise UserError(f"--multi-label: softmax losses need exactly one class per image; {remedy}")
        if len(data.multi_label) > 1 or data.multi_label == "/":
            expected = "expected one character that separates labels, other than /"
            raise UserError(f"--multi-label {data.multi_label}: {expected}")
        values = {**vars(augmentation), **vars(optimization)}
        for name in ("balanced_sampler", "label_smoothing", "teacher"):
            if values[name]:
                raise UserError(f"{BY_NAME[name].flag} needs exactly one class per image; remove it or --multi-label")
    if ("balanced_acc" if data.multi_label else "map") in (monitoring.metrics or ()):
        needs = "map needs several labels per image (--multi-label), balanced_acc exactly one class per image"
        raise UserError(f"--metrics: {needs}")


def check_loggers(monitoring: MonitoringOptions) -> None:
    """Check that loggers do not exclude each other, have names of their own, and are installed."""
    if "none" in monitoring.logger and monitoring.logger != ["none"]:
        raise UserError("--logger none cannot be combined with other loggers; remove it or them")
    # loggers.jsonl knows a logger by this last part, so that a file of one's own may move.
    short = [os.path.basename(name) for name in monitoring.logger]
    for name in monitoring.logger:
        if short.count(os.path.basename(name)) > 1:
            raise UserError(f"--logger {name}: two loggers have this name; give it once, or rename one of the files")
    for name in monitoring.logger:
        package = LOGGERS[name].package if name in LOGGERS else ""
        # By its origin: the folder that W&B makes for its runs bears the package's name.
        if package and getattr(find_spec(package), "origin", None) is None:
            raise UserError(f"--logger needs {package}, which is not installed here: pip install {package}")


def check_modes(augmentation: AugmentationOptions, precision: PrecisionOptions) -> None:
    """Check that one sampler sets the order, and that nothing is chosen by timing where bits must repeat."""
    if augmentation.balanced_sampler and augmentation.ra_sampler:
        raise UserError("--balanced-sampler and --ra-sampler both set the sampling order; give only one of them")
    # Timings differ from start to start, and another kernel adds in another order: a resumed run would diverge.
    if precision.use_deterministic_algorithms and (precision.compile or "").startswith("max-autotune"):
        why = "chooses kernels by timing them, which --use-deterministic-algorithms forbids"
        raise UserError(f"--compile {precision.compile} {why}; use --compile default")


def check_epochs(schedule: ScheduleOptions) -> None:
    """Check that epochs are left to train, and that a patience has evaluations to count."""
    first = schedule.start_epoch
    for flag, end in [("--epochs", schedule.epochs), ("--stop-epoch", schedule.stop_epoch)]:
        if end is not None and first >= end:
            raise UserError(f"--start-epoch {first}: expected less than {flag} {end}; epochs count from 0")
    if schedule.patience is not None and schedule.eval_every == 0:
        why = "--patience counts evaluations, and --eval-every 0 evaluates once, at the end"
        raise UserError(f"{why}; give one of them")


def check_start(model: ModelOptions, checkpoint: CheckpointOptions) -> None:
    """Check what a run starts from, and what an evaluation evaluates."""
    if checkpoint.overwrite and checkpoint.resume == "auto":
        raise UserError("--overwrite starts over, but --resume auto resumes; give only one of them")
    if checkpoint.test_only and not model.weights and not checkpoint.resume:
        raise UserError("--test-only needs something to evaluate: --weights NAME|FILE or --resume PATH")
    if model.ema:
        _check_average(model.weights)
    # The default folder bears the model's name, which an evaluation takes from the checkpoint in that folder.
    if checkpoint.test_only and checkpoint.resume == "auto" and checkpoint.output_dir is None:
        raise UserError("--test-only --resume auto needs --output-dir, the folder to look in")


def _check_average(weights: str | None) -> None:
    """Refuse `--ema` without a file that may hold an average."""
    trouble = "is not given"
    if weights:
        # Published weights by name hold one set of weights; only a checkpoint's file holds the average beside them.
        if weights.startswith("hf-hub:") or os.path.isfile(weights):
            return
        trouble = f"{weights} is not there or no file"
    raise UserError(f"--ema loads the average of a file, and --weights {trouble}; give --weights FILE, or remove --ema")


def check_repeats(data: DataOptions, monitoring: MonitoringOptions) -> None:
    """Refuse a value that a list holds twice."""
    for name, values in [("extensions", data.extensions), ("metrics", monitoring.metrics)]:
        for value in values or ():
            if values.count(value) > 1:
                raise UserError(f"--{name} {value} is given twice; give it once")


def check_interpolation(data: DataOptions, augmentation: AugmentationOptions) -> None:
    """Refuse interpolations that torchvision's transforms would refuse at the first image that needs them."""
    on_images = {"nearest", "nearest-exact", "bilinear", "bicubic"}
    known, needed_by = set(options.INTERPOLATIONS), ""
    if data.backend == "tensor":
        known, needed_by = on_images, "--backend tensor"
    if augmentation.auto_augment in POLICIES:
        # A policy rotates and shears; AugMix works on tensors with either backend.
        known = on_images
        if data.backend == "tensor" or augmentation.auto_augment == "augmix":
            # torchvision's affine and rotate refuse any other mode for tensors, though its resize takes four.
            known = {"nearest", "bilinear"}
        needed_by = f"--auto-augment {augmentation.auto_augment}"
    given = augmentation.interpolation
    if given not in known:
        raise UserError(f"--interpolation {given}: {needed_by} supports {', '.join(sorted(known))}")


def check_output_dir(
    start: StartOptions, data: DataOptions, model: ModelOptions, checkpoint: CheckpointOptions
) -> None:
    """Refuse an output folder among the class folders: every folder there is a class."""
    # By real paths: a run's folder behind a link into train/ would be a class of the next scan as well.
    folder = os.path.realpath(checkpoint.output_dir or default_folder(model.model))
    if not data.data_path or checkpoint.test_only or start.dry_run:
        return
    places, path = ["train", "val"], Path(data.data_path)
    # With --minival and without a split, the folders in the data path may be the classes (`loading.missing`).
    if data.minival and not [*path.glob("*train*"), *path.glob("images.*")]:
        places.append("")
    for place in places:
        if Path(folder).is_relative_to(os.path.realpath(os.path.join(data.data_path, place))):
            trouble = f"lies inside {place or data.data_path}/ of the images, where it would count as a class"
            raise UserError(f"--output-dir {folder} {trouble}")


# In this order: a command line with two mistakes is told the first one.
CHECKS = (
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


def _remark_on_weights(model: ModelOptions, checkpoint: CheckpointOptions) -> str:
    if model.weights and checkpoint.resume and checkpoint.test_only:
        return "--weights has no effect: the checkpoint of --resume is evaluated"
    return ""


def _remark_on_padding(data: DataOptions, augmentation: AugmentationOptions) -> str:
    crop_px, resize_px = augmentation.val_crop_size, augmentation.val_resize_size
    if crop_px <= resize_px or data.synthetic is not None:
        return ""
    effect = "images whose shorter side is resized to less than the crop are padded with black, as in torchvision"
    return f"--val-crop-size {crop_px} is above --val-resize-size {resize_px}: {effect}"


def _remark_on_random_features(model: ModelOptions, checkpoint: CheckpointOptions) -> str:
    is_frozen = model.freeze or model.freeze_below or model.freeze_epochs
    # A model of the user's own may load weights by itself.
    has_weights = model.weights or checkpoint.resume or checkpoint.test_only or split_custom(model.model)
    if is_frozen and not has_weights:
        return "--freeze and options like it without --weights train on the features of random weights"
    return ""


def _remark_on_own_loss(optimization: OptimizationOptions) -> str:
    if optimization.label_smoothing and split_custom(optimization.criterion or ""):
        return f"--label-smoothing has no effect with --criterion {optimization.criterion}, a loss of your own"
    return ""


def _remark_on_balance(augmentation: AugmentationOptions, optimization: OptimizationOptions) -> str:
    if augmentation.balanced_sampler and optimization.class_weights == "balanced":
        flags = "--balanced-sampler and --class-weights balanced"
        return f"{flags} both compensate for class imbalance: small classes are boosted twice"
    return ""


def _remark_on_momentum(optimization: OptimizationOptions) -> str:
    is_given = optimization.momentum != BY_NAME["momentum"].default
    if is_given and optimization.opt in OPTIMIZERS and "momentum" not in OPTIMIZERS[optimization.opt].options:
        return f"--momentum has no effect with --opt {optimization.opt}"
    return ""


def _remark_on_late_epochs(augmentation: AugmentationOptions, schedule: ScheduleOptions) -> str:
    values = {**vars(augmentation), **vars(schedule)}
    for name in ("stop_epoch", "mixup_off_epoch", "patience"):
        if (values[name] or 0) >= schedule.epochs:
            return f"{BY_NAME[name].flag} {values[name]} has no effect with --epochs {schedule.epochs}"
    return ""


def _remark_on_frozen_epochs(model: ModelOptions, schedule: ScheduleOptions) -> str:
    if model.freeze_epochs >= schedule.epochs:
        flags = f"--freeze-epochs {model.freeze_epochs} of --epochs {schedule.epochs}"
        return f"{flags}: the layers below the classifier never train"
    return ""


def _remark_on_switching(augmentation: AugmentationOptions) -> str:
    is_given = augmentation.mixup_switch_prob != BY_NAME["mixup_switch_prob"].default
    if is_given and bool(augmentation.mixup_alpha) != bool(augmentation.cutmix_alpha):
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
