"""Resolve the options of command line, recipe, machine and checkpoint; read and write recipes."""

import argparse
import functools
import importlib
import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Collection, Sequence
from contextlib import redirect_stdout, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, TypeVar

from distributed.launch import Launch, read_launch
from errors import UserError, aligned, counted, did_you_mean, end_by, end_process, in_one_line, is_printable, one_line
from settings import options
from settings.choices import LOGGERS, OPTIMIZERS, POLICIES, TABLES
from settings.custom_code import own_code, parse_kwargs
from settings.options import (
    ALWAYS,
    BY_NAME,
    GROUPS,
    IF_GIVEN,
    OPTIONS,
    STATISTICS,
    Option,
    fit_statistics,
    split_custom,
)

RECIPES_DIR = Path(__file__).parents[1] / "recipes"

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# Endings of archives that no form of data is.
ARCHIVES = (".zip", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".7z", ".rar")

# Metadata of a recipe for readers, not options.
RECIPE_FACTS = {
    "title", "source", "command", "expected-acc1", "expected-acc5", "tolerance", "evaluation",
    "reference-global-batch", "hardware", "hours", "reproduced", "notes",
}  # fmt: skip

# Remarks on options that are used as given, but seldom meant so: as `CONTRADICTIONS`.
REMARKS: list[tuple[Callable[[argparse.Namespace], Any], str]] = [
    (lambda args: args.weights and args.resume and args.test_only,
     "--weights has no effect: the checkpoint of --resume is evaluated"),
    (lambda args: args.val_crop_size > args.val_resize_size and args.synthetic is None,
     "--val-crop-size {val_crop_size} is above --val-resize-size {val_resize_size}: images whose shorter side is "
     "resized to less than the crop are padded with black, as in torchvision"),
    (lambda args: (args.freeze or args.freeze_below or args.freeze_epochs)
     and not (args.weights or args.resume or args.test_only or split_custom(args.model)),
     "--freeze and options like it without --weights train on the features of random weights"),
    (lambda args: args.label_smoothing and split_custom(args.criterion or ""),
     "--label-smoothing has no effect with --criterion {criterion}, a loss of your own"),
    (lambda args: args.balanced_sampler and args.class_weights == "balanced",
     "--balanced-sampler and --class-weights balanced both compensate for class imbalance: small classes are boosted "
     "twice"),
    (lambda args: args.momentum != BY_NAME["momentum"].default
     and args.opt in OPTIMIZERS and "momentum" not in OPTIMIZERS[args.opt].options,
     "--momentum has no effect with --opt {opt}"),
    (lambda args: next((f"{BY_NAME[name].flag} {getattr(args, name)}" for name in (
        "stop_epoch", "mixup_off_epoch", "patience") if (getattr(args, name) or 0) >= args.epochs), None),
     "{found} has no effect with --epochs {epochs}"),
    (lambda args: args.freeze_epochs >= args.epochs,
     "--freeze-epochs {freeze_epochs} of --epochs {epochs}: the layers below the classifier never train"),
    (lambda args: args.mixup_switch_prob != BY_NAME["mixup_switch_prob"].default
     and bool(args.mixup_alpha) != bool(args.cutmix_alpha),
     "--mixup-switch-prob has no effect unless --mixup-alpha and --cutmix-alpha are both on"),
]  # fmt: skip


def is_installed(package: str) -> bool:
    """Tell whether a package can be imported; the folder that W&B makes for its runs bears the package's name."""
    return getattr(find_spec(package), "origin", None) is not None


def _misnamed(texts: Sequence[str]) -> str | None:
    """Return the first NAME=DIR whose name is unusable, or that of other records, or None."""
    taken = ["train", "epoch", "val", "minival"]
    for text in texts:
        name, _, place = text.partition("=")
        if not place or not re.fullmatch(r"[A-Za-z0-9][\w.-]*(?<!_ema)", name, re.ASCII) or name in taken:
            return text
        taken.append(name)
    return None


# Contradictions that would waste a run, in the order of their checks: a condition, and a message that may quote the
# value of any option, and that of the condition as `found`.
CONTRADICTIONS: list[tuple[Callable[[argparse.Namespace], Any], str]] = [
    (lambda args: args.data_path is None and args.synthetic is None and not args.dry_run,
     "--data-path is needed: a folder with train/ and val/; or --synthetic, to run without data"),
    (lambda args: next((each for each in args.extensions or () if each[0] != "."), ""),
     "--extensions {found}: expected a dot and letters, such as .avif"),
    (lambda args: (args.global_batch_size or 0) % args.batch_size
     and max(args.global_batch_size // args.batch_size, 1) * args.batch_size,
     "--global-batch-size {global_batch_size} is not a multiple of --batch-size {batch_size}; give {found}"),
    (lambda args: args.minival and (args.minival_fold + 0.999) * args.minival > 1 and int(1 / args.minival + 1e-9) - 1,
     "--minival-fold {minival_fold} of --minival {minival}: expected 0 to {found}"),
    (lambda args: _misnamed(args.eval_data or ()),
     "--eval-data {found}: expected NAME=DIR with a different NAME of letters, digits and . - _ for each set; train, "
     "epoch, val, minival and names ending in _ema are reserved"),
    (lambda args: args.train_crop_size_min and not args.crop_ramp_epochs,
     "--train-crop-size-min needs --crop-ramp-epochs, the epochs between which the size grows"),
    (lambda args: args.crop_ramp_epochs and not 0 <= args.crop_ramp_epochs[0] < args.crop_ramp_epochs[1],
     "--crop-ramp-epochs {crop_ramp_epochs[0]} {crop_ramp_epochs[1]}: expected two epochs, the first before the last"),
    (lambda args: (args.train_crop_size_min or 0) > args.train_crop_size,
     "--train-crop-size-min {train_crop_size_min} is above --train-crop-size {train_crop_size}"),
    (lambda args: args.blur_prob and (args.train_crop_size_min or args.train_crop_size) < 7,
     "--blur-prob needs training images of 7 pixels or more; give a larger crop size, or remove --blur-prob"),
    (lambda args: args.hflip_mode == "alternating" and args.hflip_prob != BY_NAME["hflip_prob"].default,
     "--hflip-prob {hflip_prob}: --hflip-mode alternating flips each image in every second epoch; give --hflip-prob "
     "0.5, or --hflip-mode random"),
    (lambda args: args.lr_scaling != "none" and args.reference_global_batch is None,
     "--lr-scaling {lr_scaling} needs --lr-scaling-batch, the global batch size that --lr is meant for, or a recipe "
     "that sets it"),
    (lambda args: [args.clip_agc, args.clip_grad_norm, args.clip_grad_value].count(None) < 2,
     "--clip-agc, --clip-grad-norm and --clip-grad-value all clip the gradients; give only one of them"),
    (lambda args: next((f"--{name} has {counted(len(getattr(args, name)), 'value')}" for name in STATISTICS
                        if len(getattr(args, name)) != args.in_chans), ""),
     "{found}, but --in-chans is {in_chans}; give one value per channel, or another --in-chans"),
    (lambda args: args.in_chans != 3 and next(
        (BY_NAME[name].flag for name in ("auto_augment", "color_jitter", "grayscale_prob") if getattr(args, name)), ""),
     "{found} needs three colour channels, but --in-chans is {in_chans}; remove {found}"),
    (lambda args: args.class_weights not in (None, "balanced") and not os.path.isfile(args.class_weights),
     "--class-weights {class_weights}: no such file; give balanced, or a list with the columns class and weight"),
    (lambda args: split_custom(args.criterion or "") and args.class_weights,
     "--criterion {criterion}, your own loss, ignores --class-weights; weight the classes in it, or remove one of "
     "the two"),
    (lambda args: args.multi_label and args.synthetic is not None and not args.test_only,
     "--multi-label needs the labels of a list, but --synthetic images have one class each; remove one of the two"),
    (lambda args: args.multi_label and not (args.bce_loss or split_custom(args.criterion or "")),
     "--multi-label: softmax losses need exactly one class per image; give --criterion bce, or your own loss"),
    (lambda args: args.multi_label and (len(args.multi_label) > 1 or args.multi_label == "/"),
     "--multi-label {multi_label}: expected one character that separates labels, other than /"),
    (lambda args: args.multi_label and next((BY_NAME[name].flag for name in (
        "balanced_sampler", "label_smoothing", "teacher") if getattr(args, name)), None),
     "{found} needs exactly one class per image; remove it or --multi-label"),
    (lambda args: ("balanced_acc" if args.multi_label else "map") in (args.metrics or ()),
     "--metrics: map needs several labels per image (--multi-label), balanced_acc exactly one class per image"),
    (lambda args: "none" in args.logger and args.logger != ["none"],
     "--logger none cannot be combined with other loggers; remove it or them"),
    (lambda args: next((name for name in args.logger if [*map(os.path.basename, args.logger)].count(
        os.path.basename(name)) > 1), None),
     "--logger {found}: two loggers have this name; give it once, or rename one of the files"),
    (lambda args: next((LOGGERS[name].package for name in args.logger if name in LOGGERS and LOGGERS[name].package
                        and not is_installed(LOGGERS[name].package)), None),
     "--logger needs {found}, which is not installed here: pip install {found}"),
    (lambda args: args.balanced_sampler and args.ra_sampler,
     "--balanced-sampler and --ra-sampler both set the sampling order; give only one of them"),
    (lambda args: args.use_deterministic_algorithms and (args.compile or "").startswith("max-autotune"),
     "--compile {compile} chooses kernels by timing them, which --use-deterministic-algorithms forbids; use "
     "--compile default"),
    (lambda args: args.start_epoch >= args.epochs,
     "--start-epoch {start_epoch}: expected less than --epochs {epochs}; epochs count from 0"),
    (lambda args: args.stop_epoch is not None and args.start_epoch >= args.stop_epoch,
     "--start-epoch {start_epoch}: expected less than --stop-epoch {stop_epoch}; epochs count from 0"),
    (lambda args: args.patience is not None and args.eval_every == 0,
     "--patience counts evaluations, and --eval-every 0 evaluates once, at the end; give one of them"),
    (lambda args: args.overwrite and args.resume == "auto",
     "--overwrite starts over, but --resume auto resumes; give only one of them"),
    (lambda args: args.test_only and not (args.weights or args.resume),
     "--test-only needs something to evaluate: --weights NAME|FILE or --resume PATH"),
    (lambda args: args.ema
     and not (args.weights and (args.weights.startswith("hf-hub:") or os.path.isfile(args.weights)))
     and (f"{args.weights} is not there or no file" if args.weights else "is not given"),
     "--ema loads the average of a file, and --weights {found}; give --weights FILE, or remove --ema"),
    (lambda args: args.test_only and args.resume == "auto" and args.output_dir is None,
     "--test-only --resume auto needs --output-dir, the folder to look in"),
    (lambda args: next((f"--{name} {each}" for name in ("extensions", "metrics") for each in getattr(args, name) or ()
                        if getattr(args, name).count(each) > 1), ""),
     "{found} is given twice; give it once"),
]  # fmt: skip


class Parsed(argparse.Namespace):
    """Every option, as the command line or its recipe gives it, or its default: the first of three stages.

    Options of each stage are immutable. `given` lists those that were given, `typed` those of the command line itself.
    """

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"options are immutable; set {name} by `replaced`, which returns a changed copy")

    __delattr__ = None

    def replaced(self, **changes: Any) -> Self:
        """Return options of the same stage with some values changed."""
        return type(self)(**{**vars(self), **changes})


Options = TypeVar("Options", bound=Parsed)


class Resolved(Parsed):
    """The options of this machine and of its launcher too: device, workers, output folder, rank, number of processes.

    Those of published weights are filled in, and later those of the checkpoint to evaluate.
    """


class Assigned(Resolved):
    """The global batch and its micro-batches too, a resumed run's or this one's: nothing changes any more."""


# Versions of TorchCodec and Pillow that decode JPEGs to the same bits: tests/test_decode.py compares them.
PROVEN_DECODERS = {("0.17", "13.0")}


@functools.cache
def find_torchcodec() -> str:
    """Return the version of TorchCodec, if it and Pillow are installed in a pair of `PROVEN_DECODERS`; else nothing."""
    try:
        found = version("torchcodec"), version("pillow")
        if tuple(each.rpartition(".")[0] for each in found) in PROVEN_DECODERS:
            importlib.import_module("torchcodec.decoders")
            return found[0]
    except Exception:  # it is missing, or was built for another torch
        pass
    return ""


def fast_decoder(args: Any) -> str:
    """Return `find_torchcodec` where loader processes use it: for Pillow's pixels resized by our own way."""
    is_used = getattr(args, "workers", 0) and args.backend is None and args.synthetic is None
    return find_torchcodec() if is_used else ""


def find_recipe(name: str) -> Path:
    """Return the path of a recipe given by name or by path; UserError if there is none."""
    path = Path(name) if name.endswith(".toml") else RECIPES_DIR / f"{name}.toml"
    if not os.path.isfile(path):  # unlike Path.is_file, also takes a name that is too long
        known = sorted(recipe.stem for recipe in RECIPES_DIR.glob("*.toml"))
        raise UserError(f"--recipe {name}: no such recipe{did_you_mean(name, known)} (--list-recipes lists all)")
    return path


def read_recipe(path: Path) -> dict[str, Any]:
    """Return a recipe's tables and facts; UserError if it is not TOML, or holds an unknown table or fact."""
    try:
        recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"recipe {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, a number of too many digits
        raise UserError(f"recipe {path} is not valid TOML: {error}") from error
    for name, value in recipe.items():
        kind, shown, known = "fact", name, RECIPE_FACTS
        if isinstance(value, dict):
            kind, shown, known = "table", f"[{name}]", GROUPS
        if name not in known:
            hint = did_you_mean(name, known) or f" (known: {', '.join(sorted(known))})"
            raise UserError(f"recipe {path}: unknown {kind} {shown}{hint}")
    batch = recipe.get("reference-global-batch")
    if batch is not None and (type(batch) is not int or not 1 <= batch < options.MOST_COUNT):
        raise UserError(f"recipe {path}: reference-global-batch = {batch!r}, expected a positive integer")
    return recipe


def recipe_values(path: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a recipe's tables give; UserError for an unknown one, or a value of another type."""
    values = {}
    for group in GROUPS:
        known = {key: option for option in OPTIONS[group] for key in option.keys}
        for key, value in recipe.get(group, {}).items():
            if key not in known:
                raise UserError(f"recipe {path}: unknown option {key} in [{group}]{did_you_mean(key, known)}")
            with in_one_line(f"recipe {path}"):
                values[known[key].dest] = known[key].from_toml(value)
    return values


def list_recipes(word: str = "") -> str:
    """Return the text of the recipe of this name, or a table of those that hold the word; UserError if none does."""
    paths = sorted(RECIPES_DIR.glob("*.toml"), key=lambda path: path.stem)
    texts = {path.stem: path.read_text(encoding="utf-8") for path in paths}
    if word in texts:
        return texts[word].rstrip()
    rows = [["recipe", "Acc@1", "title"]]
    for path in paths:
        if word.lower() in f"{path.stem}\n{texts[path.stem]}".lower():
            recipe = read_recipe(path)
            rows.append([path.stem, str(recipe.get("expected-acc1", "-")), recipe["title"]])
    if len(rows) == 1:
        raise UserError(f"--list-recipes {word}: no recipe contains this word{did_you_mean(word, texts)}")
    num_columns = shutil.get_terminal_size().columns
    lines = [line[:num_columns] for line in aligned(rows, range(len(rows[0])))]
    return "\n".join([*lines, "", "--list-recipes NAME prints a whole recipe with its source; --recipe NAME uses it"])


def write_recipe(args: Assigned) -> str:
    """Return the TOML text of a recipe that repeats this run on any machine.

    It holds defaults too, so that a later change of a default cannot change the run. It leaves out where and how this
    run was started, and options derived from this machine.
    """
    lines = [f"title = {json.dumps(f'{args.model}, as resolved by train.py')}"]
    if args.code:  # for readers: code is run where a command line names it
        lines.append(f"notes = {json.dumps(f'SHA-256 of own code: {args.code}')}")
    if args.reference_global_batch is not None:
        lines.append(f"reference-global-batch = {args.reference_global_batch}")
    for group in GROUPS:
        table = []
        for option in OPTIONS[group]:
            value = getattr(args, option.dest)
            is_kept = option.recipe == ALWAYS or (option.recipe == IF_GIVEN and option.dest in args.given)
            if is_kept and value is not None and value != "":
                # JSON, but for floats, characters beyond the first 65,536 and DEL.
                text = repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
                table.append(f"{option.name} = {text}".replace("\x7f", "\\u007f"))
        if table:
            lines += ["", f"[{group}]", *table]
    return "\n".join(lines) + "\n"


def parse_args(argv: Sequence[str] | None = None) -> Parsed:
    """Parse and validate a command line, with its recipe ahead of it; UserError if either cannot be used."""
    parser = options.build_parser()
    parser.explain, parser.lines_about = _explain, _lines_about
    typed = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if "recipe" not in typed:
        return resolve(typed)
    path = find_recipe(typed.recipe)
    recipe = read_recipe(path)
    given = argparse.Namespace(**{**recipe_values(path, recipe), **vars(typed)})
    # A recipe of own code cannot name its model; without one the default would be trained.
    if "model" not in given and (found := re.search(r"--model \S+\.py:\S+", str(recipe.get("command")))):
        raise UserError(f"--recipe {typed.recipe} names no model; give {found[0]}, or another one")
    return resolve(given, recipe.get("reference-global-batch"), typed=vars(typed).keys())


def _explain(words: Sequence[str], parser: argparse.ArgumentParser) -> UserError:
    """Return the error about a command line that cannot be parsed, which may be of another script."""
    from settings import other_scripts

    return other_scripts.explain(words, parser)


def _lines_about(word: str) -> list[str]:
    """Return what other scripts' flags that hold a word are here."""
    from settings import other_scripts

    return other_scripts.lines_about(word)


def read_command_line() -> Parsed:
    """Return the script's options; print help, a list or a mistake at once and end, without torch."""
    launch = Launch()
    try:
        launch = read_launch()
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere if launch.rank else sys.stdout):
            args = parse_args()
            if args.list_recipes is not None:
                text = list_recipes(args.list_recipes)
                with suppress(OSError):  # the reader has left
                    print(text)
                end_process(0)
        os.getcwd()  # fails if the current folder was removed, in which MKL cannot start
        if args.synthetic is None and not args.dry_run:
            _check_data_path(args.data_path)
    except BaseException as error:
        end_by(error, launch)
    return args


def split_dirs(args: Parsed) -> tuple[str, str]:
    """Return the folders of the training and of the validation images."""
    path = args.data_path or ""
    return os.path.join(path, "train"), os.path.join(path, "val")


def default_folder(args: Parsed) -> str:
    """Return the output folder of a run that was given none."""
    return f"runs/{options.short_name(args.model)}"


def evaluated_set(args: Parsed) -> str:
    """Return the name of the evaluation set in logs and records."""
    return "minival" if args.minival and args.synthetic is None else "val"


def _check_data_path(path: str) -> None:
    """Refuse a folder that is not there; `loading.forms` looks into it, with torch."""
    if not os.path.isdir(path) and not split_custom(path) and "://" not in path:
        makers = {
            "data/digits": f"; create it with {sys.executable} -m scripts.make_digits {path}",
            "data/imagenette2-320": "; docs/imagenette.md says how to download it",
            **dict.fromkeys(ARCHIVES, "; unpack it first"),
        }
        hint = next((maker for end, maker in makers.items() if path.endswith(end)), "")
        raise UserError(f"--data-path {path} is not a folder; give the folder with train/ and val/{hint}")


def resolve(
    given: argparse.Namespace,
    reference_global_batch: int | None = None,
    *,
    typed: Collection[str] | None = None,
    foreign: Collection[str] = (),
) -> Parsed:
    """Merge given options with the defaults of the others, and check them; options of any stage are returned unchanged.

    Args:
        given: the given options, with or without the defaults of the others.
        reference_global_batch: the global batch that the recipe's learning rate is for.
        typed: names of the options that the command line itself gives; by default all given ones.
        foreign: names of options that a script uses in its own way, which are not validated.

    Raises:
        UserError: the first option that cannot be used.
    """
    if isinstance(given, Parsed):
        return given.replaced(code=_hash_own(vars(given)))  # a file may have changed since
    values, preset = _choose_loss(vars(given), vars(given) if typed is None else typed), options.defaults()
    values = {name: options.expand_home(name, value) for name, value in values.items()}
    is_sparse = not preset.keys() <= values.keys()
    if values.get("recipe") and reference_global_batch is None and not is_sparse:
        raise UserError(f"--recipe {given.recipe}: the parser alone reads no recipe; call config.parse_args instead")
    names = sorted(name for name in values.keys() & preset if is_sparse or values[name] != preset[name])
    typed, values = names if typed is None else typed, preset | values
    values |= {
        "given": names,
        "reference_global_batch": values["lr_scaling_batch"] or reference_global_batch,
        # For models of timm, `published.choose_published_options` replaces these.
        "mean": list(values["mean"] or fit_statistics(IMAGENET_MEAN, values["in_chans"])),
        "std": list(values["std"] or fit_statistics(IMAGENET_STD, values["in_chans"])),
        "model_kwargs": sorted(values["model_kwargs"] or ()) or None,
        "best_metric": "map" if values["multi_label"] and "best_metric" not in names else values["best_metric"],
        "typed": sorted(typed),
        # Code runs only from a file that the command line names: see `custom_code.load_function`.
        "trusted": [text for name, text in own_code(values) if name in typed],
        "code": _hash_own(values),
    }
    args = Parsed(**values)
    if args.list_recipes is None:
        checked = args.replaced(**{name: preset[name] for name in foreign})
        validate(checked)
        for option in map(BY_NAME.get, sorted(typed)):
            if option.is_strict and (why := option.why_idle(checked)).startswith("without"):
                raise UserError(f"{option.flag} has no effect {why}; give that too, or remove {option.flag}")
    return args


def _hash_own(values: dict[str, Any]) -> str:
    """Return the hashes of the files that options name and that change numbers."""
    weights = [(name, values[name]) for name in ("class_weights", "teacher") if os.path.isfile(values[name] or "")]
    files = [*own_code(values), *weights]
    if not files:
        return ""
    from settings.own_code import hash_code

    return hash_code(files)


def _choose_loss(values: dict[str, Any], typed: Collection[str]) -> dict[str, Any]:
    """Return given options with one spelling of each loss: `--bce-loss` for bce, and neither for cross_entropy.

    Of a command line and a recipe that differ the command line's counts.
    """
    name, is_bce = values.get("criterion"), bool(values.get("bce_loss"))
    if name is None:
        return values
    if is_bce and name != "bce" and ("criterion" in typed) != ("bce_loss" in typed):
        name, is_bce = (name, False) if "criterion" in typed else ("bce", True)
    if is_bce and name != "bce":
        raise UserError(f"--criterion {name} and --bce-loss are different losses; give only one of them")
    is_plain = name in ("bce", "cross_entropy")
    return {**values, "criterion": None if is_plain else name, "bce_loss": name == "bce"}


def find_device(args: Parsed) -> str:
    """Return the device of `--device`, by default this machine's accelerator or the CPU; UserError if it is missing."""
    import torch  # not above: help need not wait for it

    from distributed import collectives

    accelerator = collectives.find_accelerator()
    device = args.device or accelerator or "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UserError(f"--device {device}: not a device; give cpu, cuda, cuda:1 ...") from error
    if kind not in ("cpu", accelerator):
        raise UserError(
            f"--device {device}: torch {torch.__version__} finds no such device on this machine; try --device cpu"
        )
    return device


def on_machine(args: Parsed) -> tuple[Resolved, list[str]]:
    """Return the options completed for this machine and its launcher, a line about each derived one, and remarks.

    UserError if the device is not there, or the launcher's variables are incomplete.
    """
    from distributed import collectives  # not above: help need not wait for torch

    launch = collectives.read_rank(args.world_size, args.dist_url)
    device, cores = find_device(args), collectives.count_cores()
    if args.sync_bn and launch.is_launched and device.startswith("cpu"):  # alone there is nothing to synchronise
        raise UserError("--sync-bn needs a GPU; torch has no synchronised BatchNorm on the CPU")
    place = f"{counted(cores, 'core')}, {counted(launch.num_local, 'process')} on this node, at most 16"
    if launch.cores:
        place = f"of this process's {counted(launch.cores, 'core')} (srun --cpus-per-task), at most 16"
    derived = {
        "device": (device, "no accelerator found" if device == "cpu" else "the accelerator found"),
        "workers": (min(16, cores, launch.cores or max(cores // launch.num_local, 1)), place),
        "output_dir": (default_folder(args), "from the model's name"),
    }
    derived = {name: each for name, each in derived.items() if getattr(args, name) is None}
    lines = [f"{BY_NAME[name].flag} {value}: {origin}" for name, (value, origin) in derived.items()]
    changes = {name: value for name, (value, _) in derived.items()} | {
        "rank": launch.rank,
        "world_size": launch.world_size,
        "distributed": launch.is_launched,
        "gpu": collectives.choose_gpu(launch, device),
    }
    lines, args = lines + remarks(args), Resolved(**{**vars(args), **changes})
    is_as_asked = args.amp and ({"amp", "amp_dtype"} & {*args.typed} or "amp" not in args.given)
    if (slow := slow_type(args)) and is_as_asked:
        lines.append(f"--amp: {slow}")
    elif slow:
        lines.append(f"--amp-dtype float32: {slow}; to use bfloat16 anyway, give --amp --amp-dtype bfloat16")
        args = args.replaced(amp_dtype="float32")
    if args.amp and device == "cpu" and args.amp_dtype in (None, "float16"):
        lines.append("--amp uses float16, which is slow on a CPU; see --amp-dtype")
    return args, lines


def slow_type(args: Parsed) -> str:
    """Say that a run computes in bfloat16, as timm's Muon does by itself, on a CPU that is slow in it; else empty."""
    from distributed import collectives  # not above: help need not wait for torch

    is_muon = args.opt.startswith("timm/") and args.opt.endswith("muon") and not args.test_only
    is_used = (args.amp and args.amp_dtype == "bfloat16") or (is_muon and args.amp_dtype != "float32")
    if not is_used or not (args.device or "").startswith("cpu") or collectives.has_fast_bfloat16():
        return ""
    return "this processor has no bfloat16 instructions, and is 2 to 12 times slower in bfloat16 than in float32"


def agree_on_type(args: Resolved, trained: dict | None) -> Resolved:
    """Return options with rank 0's `--amp-dtype`, or the checkpoint's where a processor chose it or ours, and say so.

    Collective: every rank must call it.
    """
    from distributed import collectives

    ours = collectives.call_on_master(lambda: args.amp_dtype)
    args, theirs = args.replaced(amp_dtype=ours), ours if trained is None else trained.get("amp_dtype")
    is_chosen = "float32" in (ours, theirs) and ours != theirs and "amp_dtype" not in args.typed
    if is_chosen and BY_NAME["amp_dtype"].is_value(theirs):
        args = args.replaced(amp_dtype=theirs)
        print("; ".join([f"--amp-dtype {theirs or 'bfloat16'}: as in the checkpoint", slow_type(args)]).rstrip("; "))
    return args


def remarks(args: Parsed) -> list[str]:
    """Return a line about each option that has no effect in this run, and about those that are seldom meant so."""
    lines = [
        f"{option.flag} has no effect {why}"
        for name, option in BY_NAME.items()
        if getattr(args, name) != option.default and (why := option.why_idle(args))
    ]
    return lines + [text.format(**vars(args), found=found) for condition, text in REMARKS if (found := condition(args))]


def as_trained(args: Options, trained: dict) -> tuple[Options, list[str]]:
    """Use the checkpoint's evaluation options where none were given; errors and result as of `_with_options_of`."""
    own = trained.get("criterion") if split_custom(str(trained.get("criterion"))) else None
    names = {name for name, option in BY_NAME.items() if option.is_of_checkpoint} - ({"criterion"} if own else set())
    args, lines = _with_options_of(args, trained, [name for name in BY_NAME if name in names])
    if "model" not in args.given and split_custom(args.model):
        raise UserError(f"the checkpoint's model is {args.model}, {options.WHY_TYPED}")
    if own and args.criterion is None:
        lines.append(f"evaluating with cross-entropy; give --criterion {own} for the checkpoint's own loss")
    if trained.get("decoder") == "torchcodec":
        lines.append("the checkpoint's run decoded with TorchCodec; Pillow's pixels may differ by a grey level")
    return args, [*lines, *filter(None, [slow_type(args)])]


def _with_options_of(args: Options, trained: dict, names: Sequence[str]) -> tuple[Options, list[str]]:
    """Take the checkpoint's values of the named options that were not given; return all options, and a line for each.

    UserError if the checkpoint holds an impossible value.
    """
    changes, lines = {}, []
    for name in names:
        option, value = BY_NAME[name], trained.get(name, getattr(args, name))
        is_unknown = name in (*STATISTICS, "in_chans") and value is None  # as in timm's own checkpoints
        if name in args.given or is_unknown or value == getattr(args, name):
            continue
        if not option.is_value(value):
            raise UserError(f"{option.flag} {value!r} in the checkpoint: not a valid value of this option")
        changes[name] = value
        words = " ".join(map(str, value)) if isinstance(value, list) else value
        lines.append(one_line(f"{option.flag} {words}: as in the checkpoint"))
    args = args.replaced(**changes)
    validate(args)
    return args, lines


def assign(args: Resolved, state: dict | None) -> Assigned:
    """Add the global batch and its micro-batches: the resumed run's, else by --batch-size and number of processes."""
    if state is None:
        global_batch_size = args.global_batch_size or args.batch_size * args.world_size
        shards = {"global_batch_size": global_batch_size, "num_shards": global_batch_size // args.batch_size}
        return Assigned(**{**vars(args), **shards})
    # Checkpoints of before an option had its default.
    known = options.with_defaults(state["args"])
    args, lines = _with_options_of(args, known, [name for name in BY_NAME if options.is_filled_in(name, args)])
    for line in lines:
        print(line)
    shards = {name: state["shards"][name] for name in ("global_batch_size", "num_shards")}
    # GoogLeNet and Inception rescale inputs only for published weights.
    weights = args.weights if "weights" in args.given else state["args"]["weights"]
    return Assigned(**{**vars(args), **shards, "weights": weights})


def validate(args: Parsed) -> None:
    """Raise UserError for the first option that cannot be used, as far as that shows before a device is touched."""
    for name, option in BY_NAME.items():
        value = getattr(args, name)
        option.check(value)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                _validate_text(option, text)
    _validate_names(args)
    for condition, message in CONTRADICTIONS:
        if found := condition(args):
            raise UserError(message.format(**vars(args), found=found))
    _validate_interpolation(args)
    out = os.path.realpath(args.output_dir or default_folder(args))
    for root in split_dirs(args) if args.data_path and not (args.test_only or args.dry_run) else ():
        if Path(out).is_relative_to(os.path.realpath(root)):
            raise UserError(
                f"--output-dir {out} lies inside {Path(root).name}/ of the images, where it would count as a class"
            )
    options.parse_allowed(args.allow_change)


def _validate_text(option: Option, text: str) -> None:
    """Refuse empty text, long names, and those that are not one line of UTF-8, which no recipe could repeat."""
    if not is_printable(text):
        raise UserError(f"{option.flag} {text!a}: expected one line of UTF-8; rename it, or give a link to it")
    if not text and option.default != "":
        raise UserError(f"{option.flag} is empty; give a value, or remove it")
    if max(map(len, re.split("[/,]", text))) > 255:
        raise UserError(f"{option.flag} {text[:20]}...: a name in it has more than 255 characters")
    if "://" in text and option.dest not in options.TAKES_ADDRESS:  # of which the rest may hold a password
        raise UserError(f"{option.flag} {text.partition('//')[0]}//...: {options.NO_ADDRESS}")


def _validate_names(args: Parsed) -> None:
    """Check the names that the tables of `choices` hold; those of models are looked up when they are built."""
    parse_kwargs(args.model_kwargs)
    for option, (kind, table) in TABLES.items():
        value = getattr(args, option)
        for name in (value if isinstance(value, list) else [value]) if table and value else ():
            has_timms = option in ("opt", "auto_augment")
            if name not in table and not split_custom(name) and not (has_timms and name.startswith("timm/")):
                hint = did_you_mean(name, table) or f" (known: {', '.join(table)});"
                timms = "timm's are written timm/NAME, " if has_timms else ""
                raise UserError(f"{BY_NAME[option].flag} {name}: unknown {kind}{hint} {timms}your own FILE.py:FUNCTION")


def _validate_interpolation(args: Parsed) -> None:
    """Refuse interpolations that torchvision's transforms would refuse at the first image that needs them."""
    on_images, on_tensors = {"nearest", "nearest-exact", "bilinear", "bicubic"}, {"nearest", "bilinear"}
    known, needed_by = set(options.INTERPOLATIONS), ""
    if args.backend == "tensor":
        known, needed_by = on_images, "--backend tensor"
    if args.auto_augment in POLICIES:
        # A policy rotates and shears; AugMix works on tensors with either backend.
        known = on_tensors if args.backend == "tensor" or args.auto_augment == "augmix" else on_images
        needed_by = f"--auto-augment {args.auto_augment}"
    if args.interpolation not in known:
        raise UserError(f"--interpolation {args.interpolation}: {needed_by} supports {', '.join(sorted(known))}")
