"""Options in three stages: `Parsed` from command line and recipe, `Resolved` for this machine, `Assigned` for this run.

`parse_args` (by `resolve`), `on_machine` and `assign` make them, in this order; `write_recipe` writes the last one.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Collection, Sequence
from contextlib import redirect_stdout, suppress
from types import ModuleType
from typing import Any

from distributed.ending import end_process, end_with_error
from distributed.launch import Launch, read_launch
from errors import UserError, counted, one_line
from settings import options
from settings.checks import remarks, validate
from settings.custom_code import own_code
from settings.machine import default_folder, find_device, slow_type
from settings.options import BY_NAME, GROUPS, OPTIONS, STATISTICS, DataOptions, fit_statistics
from settings.parser import build_parser, expand_home
from settings.rules import ALWAYS, IF_GIVEN, OwnCode, split_custom
from settings.stages import Assigned, Options, Parsed, Resolved

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# Endings of archives that no form of data is.
ARCHIVES = (".zip", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".7z", ".rar")


def read_command_line() -> Parsed:
    """Return the script's options; print help, a list or a mistake at once and end, without torch."""
    launch = Launch()
    try:
        launch = read_launch()
        # Eight processes answer --help once: only rank 0 prints to standard output.
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere if launch.rank else sys.stdout):
            args = parse_args()
            if args.start.list_recipes is not None:
                _print_recipes(args.start.list_recipes)
                end_process(0)
        os.getcwd()  # fails if the current folder was removed, in which MKL cannot start
        if args.data.synthetic is None and not args.start.dry_run:
            _check_data_path(args.data.data_path)
    except BaseException as error:
        end_with_error(error, launch)
    return args


def parse_args(argv: Sequence[str] | None = None) -> Parsed:
    """Parse and validate a command line, with its recipe ahead of it; UserError if either cannot be used."""
    parser = build_parser()
    parser.import_others = _import_others
    parser.resolve = resolve
    typed = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if "recipe" not in typed:
        return resolve(typed)
    from settings.recipes import find_recipe, read_recipe, recipe_values

    path = find_recipe(typed.recipe)
    recipe = read_recipe(path)
    given = argparse.Namespace(**{**recipe_values(path, recipe), **vars(typed)})
    # A recipe of own code cannot name its model; without one the default would be trained.
    named = re.search(r"--model \S+\.py:\S+", str(recipe.get("command")))
    if named and "model" not in given:
        raise UserError(f"--recipe {typed.recipe} names no model; give {named[0]}, or another one")
    return resolve(given, recipe.get("reference-global-batch"), typed=vars(typed).keys())


def _import_others() -> ModuleType:
    """Return the module about other scripts, which few command lines need."""
    from settings import other_scripts

    return other_scripts


def _print_recipes(word: str) -> None:
    """Print the list of `--list-recipes`."""
    from settings.recipes import list_recipes

    text = list_recipes(word)
    with suppress(OSError):  # the reader has left, as `head` does
        print(text)


def _check_data_path(path: str) -> None:
    """Refuse a folder that is not there; `loading.forms` looks into it, with torch."""
    if os.path.isdir(path) or split_custom(path) or "://" in path:
        return
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
        # A second run of `main` with the same options: only a file of one's own may have changed since.
        return given.replaced(code=_hash_own(given.flat()))
    preset = options.defaults()
    values = _choose_loss(vars(given), vars(given) if typed is None else typed)
    values = {name: expand_home(name, value) for name, value in values.items()}
    # `get_args_parser` returns all options, as torchvision's does: only their values tell which of them were given.
    is_sparse = not preset.keys() <= values.keys()
    if values.get("recipe") and reference_global_batch is None and not is_sparse:
        raise UserError(f"--recipe {given.recipe}: the parser alone reads no recipe; call config.parse_args instead")
    names = sorted(name for name in values.keys() & preset if is_sparse or values[name] != preset[name])
    if typed is None:
        typed = names
    values = preset | values
    values |= {
        "given": names,
        "reference_global_batch": values["lr_scaling_batch"] or reference_global_batch,
        # For models of timm, `first_weights.choose_published_options` replaces these.
        "mean": list(values["mean"] or fit_statistics(IMAGENET_MEAN, values["in_chans"])),
        "std": list(values["std"] or fit_statistics(IMAGENET_STD, values["in_chans"])),
        "model_kwargs": sorted(values["model_kwargs"] or ()) or None,
        "typed": sorted(typed),
        "code": _hash_own(values),
    }
    # Acc@1, the default, is not computed for several labels: no one class of an image could be right.
    if values["multi_label"] and "best_metric" not in names:
        values["best_metric"] = "map"
    trusted = {text for name, text in own_code(values) if name in typed}
    args = Parsed.of({name: _trust(value, trusted) for name, value in values.items()})
    # A list is printed whatever else is given.
    if args.start.list_recipes is None:
        checked = args.replaced(**{name: preset[name] for name in foreign})
        validate(checked)
        _refuse_idle(checked, typed)
    return args


def _refuse_idle(args: Parsed, typed: Collection[str]) -> None:
    """Refuse strict options of the command line that lack the option without which they have no effect."""
    values = args.flat()
    for name in sorted(typed):
        option = BY_NAME[name]
        # torchvision's commands may hold idle options, so those are only remarked upon.
        if option.is_strict:
            why = option.why_idle(values)
            if why.startswith("without"):
                raise UserError(f"{option.flag} has no effect {why}; give that too, or remove {option.flag}")


def _trust(value: Any, trusted: Collection[str]) -> Any:
    """Return a value in which names of one's own code are marked if the command line itself gives them."""
    if isinstance(value, list):
        return [_trust(each, trusted) for each in value]
    return OwnCode(value) if isinstance(value, str) and value in trusted else value


def _hash_own(values: dict[str, Any]) -> str:
    """Return the hashes of the files that options name and that change numbers."""
    # As own code, these files may be edited under the same name, and a resumed run would train by others.
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
    # Checkpoints and recipes of before --criterion hold bce_loss, and a resumed run compares options by value.
    criterion = values.get("criterion")
    if criterion is None:
        return values
    if values.get("bce_loss") and criterion != "bce":
        is_typed = "criterion" in typed
        if is_typed == ("bce_loss" in typed):
            raise UserError(f"--criterion {criterion} and --bce-loss are different losses; give only one of them")
        if not is_typed:
            criterion = "bce"
    is_bce = criterion == "bce"
    is_plain = is_bce or criterion == "cross_entropy"
    return {**values, "criterion": None if is_plain else criterion, "bce_loss": is_bce}


def split_dirs(data_path: str | None) -> tuple[str, str]:
    """Return the folders of the training and of the validation images."""
    path = data_path or ""
    return os.path.join(path, "train"), os.path.join(path, "val")


def evaluated_set(data_options: DataOptions) -> str:
    """Return the name of the evaluation set in logs and records."""
    return "minival" if data_options.minival and data_options.synthetic is None else "val"


def on_machine(args: Parsed) -> tuple[Resolved, list[str]]:
    """Return the options completed for this machine and its launcher, a line about each derived one, and remarks.

    UserError if the device is not there, or the launcher's variables are incomplete.
    """
    # Not above: importing torch takes 1.5 s, and --help or a mistyped option is answered in 0.04 s without it.
    from distributed import collectives

    launch = collectives.read_rank(args.distributed.world_size, args.distributed.dist_url)
    device = find_device(args.distributed.device)
    cores = collectives.count_cores()
    if args.model.sync_bn and launch.is_launched and device.startswith("cpu"):  # alone there is nothing to synchronise
        raise UserError("--sync-bn needs a GPU; torch has no synchronised BatchNorm on the CPU")
    device_origin = "no accelerator found" if device == "cpu" else "the accelerator found"
    # A task of srun with --cpus-per-task has those cores to itself: to divide them among the tasks would count twice.
    if launch.cores:
        share = launch.cores
        place = f"of this process's {counted(share, 'core')} (srun --cpus-per-task), at most 16"
    else:
        share = max(cores // launch.num_local, 1)
        place = f"{counted(cores, 'core')}, {counted(launch.num_local, 'process')} on this node, at most 16"
    derived = [
        ("device", device, device_origin),
        ("workers", min(16, cores, share), place),  # 16 are torchvision's default
        ("output_dir", default_folder(args.model.model), "from the model's name"),
    ]
    lines = []
    changes: dict[str, Any] = {"rank": launch.rank, "world_size": launch.world_size, "is_launched": launch.is_launched}
    changes["gpu"] = collectives.choose_gpu(launch, device)
    values = args.flat()
    for name, value, origin in derived:
        if values[name] is None:
            changes[name] = value
            lines.append(f"{BY_NAME[name].flag} {value}: {origin}")
    lines += remarks(args)
    args = Resolved.of({**values, **changes})
    if slow := slow_type(args):
        is_typed = "amp" in args.origin.typed or "amp_dtype" in args.origin.typed
        # Done as asked if the command line itself asks; bfloat16 of a recipe was meant for a GPU.
        if args.precision.amp and (is_typed or "amp" not in args.origin.given):
            lines.append(f"--amp: {slow}")
        else:
            lines.append(f"--amp-dtype float32: {slow}; to use bfloat16 anyway, give --amp --amp-dtype bfloat16")
            args = args.replaced(amp_dtype="float32")
    if args.precision.amp and device == "cpu" and args.precision.amp_dtype in (None, "float16"):
        lines.append("--amp uses float16, which is slow on a CPU; see --amp-dtype")
    return args, lines


def agree_on_type(args: Resolved, trained: dict | None) -> Resolved:
    """Return options with rank 0's `--amp-dtype`, or the checkpoint's where a processor chose it or ours, and say so.

    Collective: every rank must call it.
    """
    from distributed import collectives

    # Nodes may have unlike processors, of which each would choose a type of its own for the same gradients.
    ours = collectives.call_on_master(lambda: args.precision.amp_dtype)
    args = args.replaced(amp_dtype=ours)
    if trained is None:
        return args
    theirs = trained.get("amp_dtype")
    # A machine's choice is float32, beside a recipe's bfloat16: a run keeps its bits where it moves to another one.
    is_chosen = "float32" in (ours, theirs) and ours != theirs and "amp_dtype" not in args.origin.typed
    if is_chosen and BY_NAME["amp_dtype"].is_value(theirs):
        args = args.replaced(amp_dtype=theirs)
        lines = [f"--amp-dtype {theirs or 'bfloat16'}: as in the checkpoint", slow_type(args)]
        print("; ".join(filter(None, lines)))
    return args


def as_trained(args: Options, trained: dict) -> tuple[Options, list[str]]:
    """Use the checkpoint's evaluation options where none were given; errors and result as of `_with_options_of`."""
    own_loss = trained.get("criterion")
    if not split_custom(str(own_loss)):
        own_loss = None
    names = [name for name, option in BY_NAME.items() if option.is_of_checkpoint]
    # A file that only a checkpoint names is not run.
    if own_loss and "criterion" in names:
        names.remove("criterion")
    args, lines = _with_options_of(args, trained, names)
    if "model" not in args.origin.given and split_custom(args.model.model):
        raise UserError(f"the checkpoint's model is {args.model.model}, {options.WHY_TYPED}")
    if own_loss and args.optimization.criterion is None:
        lines.append(f"evaluating with cross-entropy; give --criterion {own_loss} for the checkpoint's own loss")
    # Runs of before version 1.0 had --decoder; TorchCodec's pixels of that day were not Pillow's (docs/LOG.md).
    if trained.get("decoder") == "torchcodec":
        lines.append("the checkpoint's run decoded with TorchCodec; Pillow's pixels may differ by a grey level")
    if slow := slow_type(args):
        lines.append(slow)
    return args, lines


def _with_options_of(args: Options, trained: dict, names: Sequence[str]) -> tuple[Options, list[str]]:
    """Take the checkpoint's values of the named options that were not given; return all options, and a line for each.

    UserError if the checkpoint holds an impossible value.
    """
    changes, lines = {}, []
    values = args.flat()
    for name in names:
        option = BY_NAME[name]
        value = trained.get(name, values[name])
        is_unknown = name in (*STATISTICS, "in_chans") and value is None  # as in timm's own checkpoints
        if name in args.origin.given or is_unknown or value == values[name]:
            continue
        # A checkpoint is a file from anywhere: its values are not of our parser.
        if not option.is_value(value):
            raise UserError(f"{option.flag} {value!r} in the checkpoint: not a valid value of this option")
        changes[name] = value
        words = " ".join(map(str, value)) if isinstance(value, list) else value
        lines.append(one_line(f"{option.flag} {words}: as in the checkpoint"))
    args = args.replaced(**changes)
    # Checked once more as a whole: each value may be valid, and contradict one of the command line.
    validate(args)
    return args, lines


def assign(args: Resolved, state: dict | None) -> Assigned:
    """Add the global batch and its micro-batches: the resumed run's, else by --batch-size and number of processes."""
    if state is None:
        each = args.optimization.batch_size
        total = args.optimization.global_batch_size or each * args.distributed.world_size
        return Assigned.of({**args.flat(), "global_batch_size": total, "num_shards": total // each})
    # Checkpoints of before an option had its default.
    known = options.with_defaults(state["args"])
    given = args.origin.given
    names = [name for name in BY_NAME if options.is_filled_in(name, args.model.model, given)]
    args, lines = _with_options_of(args, known, names)
    for line in lines:
        print(line)
    # Not this start's: the micro-batches of a run stay the same on any number of processes, and so do its numbers.
    shards = {name: state["shards"][name] for name in ("global_batch_size", "num_shards")}
    # GoogLeNet and Inception rescale inputs only for published weights.
    weights = args.model.weights if "weights" in given else state["args"]["weights"]
    return Assigned.of({**args.flat(), **shards, "weights": weights})


def write_recipe(args: Parsed) -> str:
    """Return the TOML text of a recipe that repeats this run on any machine.

    It holds defaults too, so that a later change of a default cannot change the run. It leaves out where and how this
    run was started, and options derived from this machine.
    """
    lines = [f"title = {json.dumps(f'{args.model.model}, as resolved by train.py')}"]
    if args.origin.code:  # for readers: code is run where a command line names it
        lines.append(f"notes = {json.dumps(f'SHA-256 of own code: {args.origin.code}')}")
    if args.optimization.reference_global_batch is not None:
        lines.append(f"reference-global-batch = {args.optimization.reference_global_batch}")
    values = args.flat()
    for group in GROUPS:
        table = []
        for option in OPTIONS[group]:
            value = values[option.dest]
            is_kept = option.recipe == ALWAYS or (option.recipe == IF_GIVEN and option.dest in args.origin.given)
            # TOML has no null: what is left out has its default.
            if not is_kept or value is None or value == "":
                continue
            # JSON, but for floats, characters beyond the first 65,536 and DEL.
            text = repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
            table.append(f"{option.name} = {text}".replace("\x7f", "\\u007f"))
        if table:
            lines += ["", f"[{group}]", *table]
    return "\n".join(lines) + "\n"
