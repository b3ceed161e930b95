"""What a resumed run may change: options, data and versions of the checkpoint, against those of today."""

import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import PIL
import torch
import torchvision

from errors import UserError
from options import BY_NAME, FREE, SILENT, parse_allowed

# Set by the script, not by the user.
_DERIVED = {"distributed", "given", "gpu", "mean", "num_shards", "rank", "reference_global_batch", "std"}


def describe_data(train: Any, val: Any) -> dict:
    """Return what identifies the training and the validation set in a checkpoint."""
    classes = list(val.classes)
    return {**_describe_set(train), "num_classes": len(classes), "classes": classes, "val": _describe_set(val)}


def _describe_set(dataset: Any) -> dict:
    return {"num_images": len(dataset), "fingerprint": dataset.fingerprint(), **dataset.identity()}


def describe_environment(args: Any, decoder: str) -> dict[str, Any]:
    """Return what a run's numbers may depend on beside its options: versions, code revision, threads, processes."""
    try:
        # Without a lock, which a kill would leave behind for whoever works in the repository.
        revision = subprocess.run(
            ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False,
        ).stdout.strip()  # fmt: skip
    except OSError:  # a machine without git
        revision = None
    return {
        "torch": str(torch.__version__),  # a TorchVersion would be code to unpickle
        "torchvision": str(torchvision.__version__),
        "decoder": decoder,
        "python": platform.python_version(),
        **_describe_machine(args),
        "revision": revision or None,
        "threads": torch.get_num_threads(),
        "world_size": args.world_size,
    }


def _describe_machine(args: Any) -> dict[str, str]:
    """Return which packages and which processor the numbers come from, of those that there are."""
    found = {"pillow": PIL.__version__}
    with suppress(PackageNotFoundError):
        found["timm"] = version("timm")  # without its import, which takes seconds
    kind = torch.device(args.device or "cpu").type
    if kind == "cpu":
        found["cpu"] = torch.backends.cpu.get_cpu_capability()
    if kind == "cuda" and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(args.device)
        found |= {"cuda": torch.version.cuda, "rocm": torch.version.hip, "cudnn": torch.backends.cudnn.version()}
    return {name: str(value) for name, value in found.items() if value is not None}


def run_facts(args: Any, decoder: str, train: Any, val: Any) -> dict:
    """Return the plain values that describe a run in its checkpoints and in run.json."""
    return {
        "args": dict(vars(args)),
        "shards": {"global_batch_size": args.global_batch_size, "num_shards": args.num_shards},
        "data": describe_data(train, val),
        "environment": describe_environment(args, decoder),
    }


def check_options(state: dict, args: Any, decoder: str) -> None:
    """Check that a run that goes on from a checkpoint computes what its first part did; say what else has changed.

    Before any data is looked at, and before the shards are set.

    Raises:
        UserError: something has changed that changes numbers, and `--allow-change` does not name it.
    """
    there, here = state["environment"], describe_environment(args, decoder)
    differing = _differing_options(state["args"], args)
    if there["world_size"] != here["world_size"]:
        differing["world_size"] = (there["world_size"], here["world_size"])
    if args.use_deterministic_algorithms and there["threads"] != here["threads"]:
        differing["threads"] = (there["threads"], here["threads"])
    allowed = parse_allowed(args.allow_change)
    refused = {name for name in differing if not _is_free(name, args) and name not in allowed}
    if refused:
        raise UserError(_refusal(args, {name: differing[name] for name in differing if name in refused}))

    _say_allowed(allowed, differing, args)
    free = [_difference(name, *differing[name]) for name in differing if _is_free(name, args) and not _is_silent(name)]
    if free:
        print(f"options that changed: {'; '.join(free)}")
    if "world_size" in differing:
        same = "same bits" if args.use_deterministic_algorithms else "rounding may differ"
        print(f"{there['world_size']} -> {here['world_size']} processes: same samples and augmentation; {same}")
    is_deterministic = args.use_deterministic_algorithms
    _say_versions(there, here, is_other_device="device" in differing, is_deterministic=is_deterministic)


def check_data(state: dict | None, args: Any, train: Any | None, val: Any) -> None:
    """Check that a checkpoint is of the same classes and, to train on, of the same images.

    Args:
        state: the checkpoint, if there is one.
        args: the options.
        train: None where the checkpoint is evaluated, which may be done on other images.
        val: the validation set.

    Raises:
        UserError: it is not.
    """
    if state is None:
        return
    theirs, num_classes = state["data"], len(val.classes)
    if state["args"]["model"] != args.model:
        raise UserError(
            f"the checkpoint of --resume {args.resume} holds a {state['args']['model']}, but --model is {args.model}; "
            "give that one, or another file"
        )
    if theirs["num_classes"] != num_classes:
        raise UserError(
            f"the checkpoint of --resume {args.resume} holds {theirs['num_classes']} classes but {args.data_path} has "
            f"{num_classes}; pass it to --weights to fine-tune instead"
        )
    differences, notes = _compare_classes(theirs["classes"], val.classes), []
    if train is not None:
        if theirs["num_images"] != len(train):
            raise UserError(
                f"cannot resume (--resume {args.resume}): data num_images {theirs['num_images']} in the checkpoint, "
                f"{len(train)} now; a position is counted in steps of all images, so this cannot be changed"
            )
        differences += _compare_sets("train", theirs, _describe_set(train), notes)
    # Other images may be scored with what they did not train.
    matters = notes if train is None else differences
    matters += _compare_sets("val", theirs["val"], _describe_set(val), notes)
    if differences:
        what = "evaluate" if train is None else "resume"
        _refuse_data(args, f"cannot {what} (--resume {args.resume})", differences)
    if notes:
        print("; ".join(notes))


def check_classes(classes: list[str] | None, args: Any, val: Any) -> None:
    """Check that the weights of `--weights` are of the same classes, if they say of which.

    Only an evaluation needs that; training may make other classes of these.

    Raises:
        UserError: they are not.
    """
    # Of another number, the classifier has something to say: `models.load_matching`.
    if classes is None or len(classes) != len(val.classes):
        return
    differences = _compare_classes(classes, val.classes)
    if differences and args.test_only:
        _refuse_data(args, f"--weights {args.weights} is of other classes", differences)
    elif differences:
        print(f"--weights {args.weights}: {differences[0]}; its classifier is trained on for these")


def _refuse_data(args: Any, what: str, differences: list[str]) -> None:
    """Refuse other data, unless `--allow-change data` is given."""
    if "data" not in parse_allowed(args.allow_change):
        raise UserError(f"{what}: {'; '.join(differences)}; to go on with them, give --allow-change data")
    print(f"changed as --allow-change says: {'; '.join(differences)}")


def _compare_classes(theirs: list[str], ours: list[str]) -> list[str]:
    labels = [label for label, names in enumerate(zip(theirs, ours, strict=True)) if names[0] != names[1]]
    if not labels:
        return []
    first = labels[0]
    return [
        f"{len(labels)} of {len(ours)} classes have other names: class {first} is {theirs[first]} in the checkpoint, "
        f"{ours[first]} now"
    ]


def _compare_sets(name: str, theirs: dict, ours: dict, notes: list[str]) -> list[str]:
    """Return in what two sets differ that must not; add to the notes what may.

    Names and labels are the same in any form and place; sizes and checksums within a form, times within a path.
    """
    meanings = {"num_images": "there are more or fewer images", "fingerprint": "files have other names or labels"}
    is_same_form = theirs["form"] == ours["form"]
    if is_same_form:
        meanings |= {"sizes": "images have other sizes", "checksums": "it is another pack"}
    # Of no sizes and no checksums nothing can be said.
    differing = [key for key in meanings if theirs[key] != ours[key] and None not in (theirs[key], ours[key])]
    is_same_place = is_same_form and theirs["path"] == ours["path"]
    if not differing and is_same_place and theirs["times"] != ours["times"]:
        what = "class folders" if ours["form"] == "folder" else ours["form"]
        notes.append(
            f"data of {name}: {ours['path']}: the {what} have changed since the checkpoint, but no name in them"
        )
    return [
        f"data of {name}: {key} {theirs[key]} in the checkpoint, {ours[key]} now: {meanings[key]}" for key in differing
    ]


def _differing_options(theirs: dict, args: Any) -> dict[str, tuple[Any, Any]]:
    """Return (the checkpoint's value, ours) of each option that differs."""
    differing = {}
    for name, value in vars(args).items():
        if name in _DERIVED or name == "world_size":
            continue
        if (name == "global_batch_size" and value is None) or (name == "weights" and name not in args.given):
            continue  # then it is the checkpoint's
        if name not in theirs and name not in args.given:
            continue  # an option that is younger than the checkpoint, and not used
        known = theirs.get(name, "unknown")
        if name == "device" and known is not None and value is not None:
            known, value = (str(device).split(":")[0] for device in (known, value))
        if known != value:
            differing[name] = (known, value)
    batches = theirs["reference_global_batch"], args.reference_global_batch
    if args.lr_scaling != "none" and batches[0] != batches[1]:
        differing["lr_scaling"] = (f"{theirs['lr_scaling']} from {batches[0]}", f"{args.lr_scaling} from {batches[1]}")
    return differing


def _is_free(name: str, args: Any) -> bool:
    """Tell whether an option may change without a word: what is not classified may not."""
    if name == "epochs":
        return _why_epochs_matter(args) is None
    if name == "world_size":
        # Statistics over all images that the processes compute at once; kernels for the shapes of this many.
        return not args.sync_bn and not (args.compile is not None and args.use_deterministic_algorithms)
    if name == "grad_checkpointing":
        return args.compile is None  # which fuses otherwise then
    if name == "weights":
        return args.model not in ("googlenet", "inception_v3")  # whose input is scaled as weights by name want it
    return name in BY_NAME and BY_NAME[name].resume in (FREE, SILENT)


def _is_silent(name: str) -> bool:
    return BY_NAME[name].resume == SILENT


def _why_fixed(name: str) -> str | None:
    return BY_NAME[name].why_fixed if name in BY_NAME else None


def _why_epochs_matter(args: Any) -> str | None:
    if args.lr_scheduler in ("cosineannealinglr", "linearlr"):
        return f"{args.lr_scheduler} spreads its learning rates over all epochs"
    return "the decay of --model-ema follows from the epochs" if args.model_ema else None


def _difference(name: str, theirs: Any, ours: Any) -> str:
    label = {"threads": "CPU threads (OMP_NUM_THREADS)", "world_size": "world-size"}.get(name, name.replace("_", "-"))
    note = " (from here on; of good images the numbers are the same)" if name == "bad_images" else ""
    return f"{label} {theirs} in the checkpoint, {ours} now{note}"


def _refusal(args: Any, differing: dict[str, tuple[Any, Any]]) -> str:
    """Name all that differs in one line, with what can be done about it."""
    parts = []
    for name, (theirs, ours) in differing.items():
        reason = _why_fixed(name) or (_why_epochs_matter(args) if name == "epochs" else None)
        parts.append(_difference(name, theirs, ours) + (f" ({reason})" if reason else ""))
    fixed = [name.replace("_", "-") for name in differing if _why_fixed(name)]
    changeable = [name.replace("_", "-") for name in differing if not _why_fixed(name)]
    advice = []
    if fixed:
        advice.append(f"{', '.join(fixed)} cannot be changed: give the checkpoint's")
    if changeable:
        advice.append(
            f"these change the numbers of the run; to go on all the same, give --allow-change {','.join(changeable)}"
        )
    return f"cannot resume (--resume {args.resume}): {'; '.join(parts + advice)}"


def _say_allowed(allowed: set[str], differing: dict[str, tuple[Any, Any]], args: Any) -> None:
    changed = [_difference(name, *differing[name]) for name in differing if name in allowed]
    if changed:
        print(f"changed as --allow-change says: {'; '.join(changed)}")
    idle = [name.replace("_", "-") for name in sorted(allowed - differing.keys() - {"data"})]
    if idle:
        print(f"--allow-change {','.join(idle)}: as in the checkpoint")


def _say_versions(there: dict, here: dict, *, is_other_device: bool, is_deterministic: bool) -> None:
    """Say which versions are others than those that wrote the checkpoint, and what that means."""
    changed = [
        f"{name} {there[name]} wrote this checkpoint, this is {here[name]}"
        for name in here
        if name in there and name not in ("threads", "world_size") and there[name] != here[name]
    ]
    changed += ["another kind of device"] if is_other_device else []
    if changed:
        print("; ".join(changed) + (": equal bits not promised" if is_deterministic else ""))
