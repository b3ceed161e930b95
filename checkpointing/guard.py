"""Compare options, data and versions with those of the checkpoint that a run resumes."""

import hashlib
import os
import platform
import re
import subprocess
import sys
import zlib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import PIL
import torch
import torchvision
from PIL import features

from distributed import collectives
from errors import UserError, one_line
from settings import __version__
from settings.choices import SCHEDULES, TABLES
from settings.config import fast_decoder
from settings.options import BY_NAME, FREE, SILENT, is_filled_in, is_same_model, parse_allowed

# Set by the script, not by the user.
_DERIVED = {"distributed", "given", "gpu", "num_shards", "rank", "reference_global_batch", "trusted", "typed"}


def describe_data(train: Any | None, val: Any) -> dict:
    """Return the facts by which a checkpoint identifies the training and the validation set."""
    classes = list(val.classes)
    facts = {} if train is None else describe_set(train)
    return {**facts, "num_classes": len(classes), "classes": classes, "val": describe_set(val)}


def describe_set(dataset: Any) -> dict:
    """Return the facts by which one set of images is known."""
    return {"num_images": len(dataset), "fingerprint": dataset.index.fingerprint(), **dataset.index.identity()}


def describe_environment(args: Any) -> dict[str, Any]:
    """Return all that a run's numbers may depend on: versions, processor, code revision, threads and processes."""
    found = {
        "touchstone": __version__,
        "torch": str(torch.__version__),  # a TorchVersion would be code to unpickle
        "torchvision": str(torchvision.__version__),
        "decoder": f"pillow {PIL.__version__} {features.version('libjpeg_turbo') or features.version('jpg')}",
        "python": platform.python_version(),
        "revision": describe_revision(Path(__file__).parent.parent),
        "source": hash_project(Path(__file__).parent.parent),
        "threads": torch.get_num_threads(),
        "world_size": args.world_size,
    }
    # Of PNG, BMP and PPM, which lose nothing, every decoder makes the same pixels.
    found |= {name: features.version(name) for name in ("avif", "libtiff", "webp") if features.check(name)}
    with suppress(ImportError):
        import pillow_heif  # optional

        found["heif"] = f"pillow-heif {pillow_heif.__version__} libheif {pillow_heif.libheif_version()}"
    if codec := fast_decoder(args):
        found["decoder"] = f"torchcodec {codec}, {found['decoder']}"
    with suppress(PackageNotFoundError):
        found["timm"] = version("timm")  # without its import, which takes seconds
    kind = torch.device(args.device or "cpu").type
    if kind == "cpu":
        found["cpu"] = torch.backends.cpu.get_cpu_capability()
    if kind == "cuda" and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(args.device)
        libraries = {"cuda": torch.version.cuda, "rocm": torch.version.hip, "cudnn": torch.backends.cudnn.version()}
        found |= {name: str(value) for name, value in libraries.items() if value is not None}
    return found


def describe_processor() -> str:
    """Return the processor's name and the number of its cores that this process may use."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return f"{collectives.count_cores()} cores of {name}"
    return platform.processor() or platform.machine()


def describe_revision(folder: Path) -> str | None:
    """Return the commit of a repository, marked if files have changed since; None where there is no git.

    `git describe --dirty` would lock the index, and a kill would leave the lock behind.
    """
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        lines = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True).stdout.splitlines()
    except OSError:
        return None
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), None)
    is_dirty = any(not line.startswith("# ") for line in lines)
    return f"{commit}-dirty" if commit and is_dirty else commit


def hash_project(folder: Path) -> str:
    """Return a hash of the project's own files, without tests and tools: an image has no git to tell its revision."""
    apart = ("bench", "scripts", "tests")
    packages = [each.parent for each in folder.glob("*/__init__.py") if each.parent.name not in apart]
    # At the top may lie files of the user's own.
    files = [path for path in folder.glob("*.py") if path.stem in ("train", *sys.modules)]
    files += [path for package in packages for path in package.glob("*.py")]
    contents = [f"{path.relative_to(folder)} ".encode() + path.read_bytes() for path in sorted(files)]
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


def run_facts(args: Any, train: Any, val: Any, more: dict[str, Any] | None = None) -> dict:
    """Return the plain values that describe a run in its checkpoints and in run.json."""
    return {
        "args": dict(vars(args)),
        "shards": {"global_batch_size": args.global_batch_size, "num_shards": args.num_shards},
        "data": describe_data(train, val),
        "eval_data": {name: describe_set(each) for name, each in (more or {}).items()},
        "environment": describe_environment(args),
    }


def find_hashes(args: Any, data: dict, model: torch.nn.Module, resumed: dict | None = None) -> dict[str, str]:
    """Return hashes by which two machines are compared: of data, of options that change numbers, of first weights.

    They are the same for every form and path of the images, on any number of processes, and in a resumed run.
    """
    sets = [[each.get(key) for key in ("num_images", "fingerprint", "sample")] for each in (data, data["val"])]
    names = [name for name, option in BY_NAME.items() if option.resume not in (FREE, SILENT)]
    values = [getattr(args, name) for name in names] + [_code_of_numbers(args.code), args.reference_global_batch]
    options = [os.path.basename(text) if ".py:" in text else text for text in map(str, values)]  # own code moves
    state = {name: torch.atleast_1d(each) for name, each in model.state_dict().items() if torch.is_tensor(each)}
    # Of rows from all over a tensor: all of ResNet-50 take 20 ms, and as long to come from a device.
    rows = [each[:: len(each) // 16 or 1].cpu().contiguous().flatten() for each in state.values()]
    sums = [zlib.crc32(each.view(torch.uint8).numpy()) for each in rows]
    parts = {"data": [data["classes"], *sets], "options": options, "weights": [*state, *sums]}
    hashes = {name: hashlib.sha256(repr(part).encode(errors="replace")).hexdigest()[:8] for name, part in parts.items()}
    return hashes if resumed is None else {**hashes, "weights": resumed.get("hashes", {}).get("weights", "unknown")}


def check_options(state: dict, args: Any) -> None:
    """Check that the options compute the same numbers as the checkpoint's run; print harmless and allowed differences.

    The caller has neither read data nor set the micro-batches yet.

    Raises:
        UserError: a difference changes numbers, and `--allow-change` does not name it.
    """
    there, here = state["environment"], describe_environment(args)
    is_deterministic = args.use_deterministic_algorithms
    differing = _differing_options(state["args"], args)
    for name in ("world_size", "threads") if is_deterministic else ("world_size",):
        if there[name] != here[name]:
            differing[name] = (there[name], here[name])
    allowed = parse_allowed(args.allow_change)
    free = [name for name in differing if _is_free(name, args)]
    refused = {name: values for name, values in differing.items() if name not in allowed and name not in free}
    if refused:
        raise _refusal(args, refused)

    shown = {name: _difference(name, *values) for name, values in differing.items()}
    _print_joined("changed as --allow-change says: ", [text for name, text in shown.items() if name in allowed])
    loud = [name for name in free if name == "world_size" or BY_NAME[name].resume != SILENT]
    _print_joined("options that changed: ", [shown[name] for name in loud])
    names = [name for name in here if name in there and name not in ("threads", "world_size")]
    versions = [_difference(name, there[name], here[name]) for name in names if there[name] != here[name]]
    versions += [shown[name] for name in differing if name == "device"]
    consequence = "; bit-identical results are not guaranteed" if is_deterministic else ""
    _print_joined("versions that changed: ", versions, consequence)


def check_data(state: dict | None, args: Any, train: Any | None, val: Any, more: dict[str, Any] | None = None) -> None:
    """Raise UserError if there is a checkpoint, and its model, classes or images are not those of this run.

    Without a training set the checkpoint is to be evaluated, and the images may differ.
    """
    if state is None:
        return
    more = more or {}
    theirs, num_classes = state["data"], len(val.classes)
    source = f"the checkpoint of --resume {args.resume} holds"
    if not is_same_model(state["args"]["model"], args.model):
        raise UserError(
            f"{source} a {state['args']['model']}, but --model is {args.model}; give that model, or another file"
        )
    if theirs["num_classes"] != num_classes:
        place = args.data_path if args.synthetic is None else f"--synthetic {args.synthetic}"
        advice = "pass it to --weights to fine-tune instead" if train else "give images of the checkpoint's classes"
        raise UserError(f"{source} {theirs['num_classes']} classes but {place} has {num_classes}; {advice}")
    refusal = f"cannot {'evaluate' if train is None else 'resume'} (--resume {args.resume})"
    refused, notes = compare_classes(theirs["classes"], val.classes, refusal), []
    if train is not None:
        if theirs["num_images"] != len(train):
            raise UserError(
                f"cannot resume (--resume {args.resume}): "
                f"{_difference('num_images', theirs['num_images'], len(train))}; the saved position counts steps over "
                "all images, so this cannot be changed"
            )
        refused += _compare_sets("train", theirs, describe_set(train), notes)
    warn_trained_on(f"--resume {args.resume}", state["args"], theirs, args, val)
    part = state["args"].get("minival"), state["args"].get("minival_fold", 0)
    sets = {"val": val, **more} if part == (args.minival, args.minival_fold) else more
    known = {"val": theirs["val"], **state.get("eval_data", {})}
    for name in [name for name in sets if name in known]:  # sets of --eval-data may come and go
        differing = _compare_sets(name, known[name], describe_set(sets[name]), notes)
        (notes if train is None else refused).extend(differing)
    if refused:
        _refuse_data(args, refusal, refused)
    _print_joined("", notes)


def holds_out(options: dict[str, Any], fraction: float, fold: int) -> bool:
    """Tell whether a run with these options held out what this `--minival` and `--minival-fold` do, or more."""
    theirs, its_fold = options.get("minival"), options.get("minival_fold", 0)
    if not isinstance(theirs, float) or not isinstance(its_fold, int):
        return False
    return (theirs, its_fold) == (fraction, fold) or (fold == its_fold == 0 and fraction <= theirs)


def warn_trained_on(source: str, options: dict[str, Any], images: Any, args: Any, val: Any) -> None:
    """Print a line if weights were trained on images that `--minival` holds out here.

    Args:
        source: the name of the weights.
        options: those of the run that trained them.
        images: the `data` of its checkpoint, if it has any.
        args: the options of this run.
        val: the validation set.
    """
    if not args.minival or not isinstance(images, dict) or holds_out(options, args.minival, args.minival_fold):
        return
    whole = getattr(val.index, "whole", val.index)
    ours = {**whole.identity(), "fingerprint": whole.fingerprint()}  # the same in every form of the images
    known = {name: value for name, value in images.items() if isinstance(value, str)}
    if any(ours[name] is not None and known.get(name) == ours[name] for name in ("path", "sample", "fingerprint")):
        part = f"--minival {args.minival} --minival-fold {args.minival_fold}"
        print(f"{source} has trained on images that {part} holds out: its accuracy here will be too high")


def check_classes(weights: Any, args: Any, val: Any) -> None:
    """Refuse to evaluate weights that name other classes; training may start from them.

    Of `Weights` that name none `models.load_matching` counts the classes, and refuses those in an unknown order.
    """
    is_sure = weights.classes is not None or "data" in parse_allowed(args.allow_change)
    warn_trained_on(f"--weights {args.weights}", weights.options, weights.images, args, val)
    weights.disorder = [] if is_sure else find_disorder(weights.script, val.classes)
    if weights.classes is None or len(weights.classes) != len(val.classes):
        return
    refusal = f"--weights {args.weights} has different classes"
    differences = compare_classes(weights.classes, val.classes, refusal)
    if differences and args.test_only:
        _refuse_data(args, refusal, differences)
    elif differences:
        print(f"--weights {args.weights}: {differences[0]}; training starts from its classifier anyway")


def _refuse_data(args: Any, refusal: str, differences: list[str]) -> None:
    """Refuse other data, unless `--allow-change data` is given."""
    if "data" not in parse_allowed(args.allow_change):
        raise UserError(f"{refusal}: {'; '.join(differences)}; to continue with them, give --allow-change data")
    _print_joined("changed as --allow-change says: ", differences)


def compare_classes(theirs: list[str], ours: list[str], refusal: str = "") -> list[str]:
    """Return a line about classes whose names differ from the checkpoint's, if any do; both must have as many.

    With the words of a refusal UserError for the same names in another order, which nothing permits.
    """
    labels = [label for label, names in enumerate(zip(theirs, ours, strict=True)) if names[0] != names[1]]
    if not labels:
        return []
    first = _difference(f"class {labels[0]} is", one_line(theirs[labels[0]]), one_line(ours[labels[0]]))
    if refusal and {*theirs} == {*ours}:
        advice = "a list with classes.txt can keep the order (docs/data.md#changed-data)"
        raise UserError(f"{refusal}: the same classes are in another order: {first}; {advice}")
    return [f"{len(labels)} of {len(ours)} classes have different names: {first}"]


def find_disorder(script: str, classes: list[str]) -> list[str]:
    """Return a line about classes that weights of a script, without names of their own, may have in another order.

    timm sorts them naturally and without case; torchvision and pytorch/examples as here.
    """
    timms = sorted(classes, key=lambda name: [int(s) if s.isdecimal() else s for s in re.split(r"(\d+)", name.lower())])
    found = [] if script in ("", "torchvision", "pytorch-examples") else compare_classes(timms, classes)
    return [
        f"it names no classes; in timm's order {each}; rename the folders in that order: 0-NAME ..." for each in found
    ]


def _compare_sets(name: str, theirs: dict, ours: dict, notes: list[str]) -> list[str]:
    """Return the differences of two sets that matter; add those that may be harmless to the notes.

    Names, labels and a sample of sizes can be compared across forms and paths, all sizes and checksums within a form,
    times within a path.
    """
    meanings = {"num_images": "the number of images differs", "fingerprint": "files have different names or labels"}
    is_same_form = theirs["form"] == ours["form"]
    if is_same_form:
        meanings |= {"sizes": "images have different sizes", "checksums": "it is a different pack"}
    # Sizes and checksums are not always known.
    differing = [key for key in meanings if theirs[key] != ours[key] and None not in (theirs[key], ours[key])]
    samples = (each.get("sample") for each in (theirs, ours))  # None where it is not known, and in old checkpoints
    known, found = ({*text.split()} if isinstance(text, str) else set() for text in samples)
    # A few may differ: damaged files are replaced by good ones.
    if not differing and 2 * len(known & found) < min(len(known), len(found)):
        return [f"data of {name}: most of {len(found)} compared images have different sizes (scripts.pack?)"]
    if not differing and is_same_form and theirs["path"] == ours["path"] and theirs["times"] != ours["times"]:
        notes.append(f"data of {name}: {ours['path']} has changed since the checkpoint, but no file name in it")
    return [f"{_difference(f'data of {name}: {key}', theirs[key], ours[key])}: {meanings[key]}" for key in differing]


def _differing_options(theirs: dict, args: Any) -> dict[str, tuple[Any, Any]]:
    """Return (the checkpoint's value, ours) of each option that differs."""
    differing = {}
    for name, value in vars(args).items():
        is_theirs = is_filled_in(name, args) or (name == "weights" and name not in args.given)
        is_theirs = is_theirs or (name == "global_batch_size" and value is None)
        is_younger = name not in theirs and name not in args.given  # a newer option than the checkpoint, and unused
        if name in _DERIVED or name == "world_size" or is_theirs or is_younger:
            continue
        known = theirs.get(name, "unknown")
        if name == "device" and known is not None and value is not None:
            known, value = (str(device).split(":")[0] for device in (known, value))
        is_named = name in TABLES and isinstance(known, str) and isinstance(value, str)
        is_same = is_same_model(known, value) if is_named else known == value
        is_same = is_same or (name == "code" and isinstance(known, str) and not _changed_files(known, value))
        if not is_same:
            differing[name] = (known, value)
    batches = theirs["reference_global_batch"], args.reference_global_batch
    if args.lr_scaling != "none" and batches[0] != batches[1]:
        differing["lr_scaling"] = (f"{theirs['lr_scaling']} from {batches[0]}", f"{args.lr_scaling} from {batches[1]}")
    return differing


def _code_of_numbers(code: str) -> str:
    """Return a result of `hash_code` without the loggers, which change no number."""
    return ", ".join(each for each in code.split(", ") if not each.startswith("logger "))


def _changed_files(theirs: str, ours: str) -> list[str]:
    """Return in what two results of `hash_code` differ; metrics may come and go."""
    files = [text.split(", ") if text else [] for text in map(_code_of_numbers, (theirs, ours))]
    names = dict.fromkeys(each.rpartition(" ")[0] for each in files[0] + files[1])
    hashes = {name: [[each for each in some if each.rpartition(" ")[0] == name] for some in files] for name in names}
    return [name for name, (a, b) in hashes.items() if a != b and ((a and b) or not name.startswith("metrics"))]


def _is_free(name: str, args: Any) -> bool:
    """Tell whether an option may change without permission; one without a rule may not."""
    if name == "epochs":  # a schedule spreads its rates over all epochs; the decay of an average follows from them
        return not getattr(SCHEDULES.get(args.lr_scheduler), "uses_epochs", True) and not args.model_ema
    if name == "world_size":
        # BatchNorm sees the images of all processes; kernels are compiled for this number of processes.
        return not args.sync_bn and not (args.compile is not None and args.use_deterministic_algorithms)
    if name == "grad_checkpointing":
        return args.compile is None  # the compiler fuses other kernels then
    if name == "weights":
        return args.model not in ("googlenet", "inception_v3")  # these rescale inputs for published weights
    return name in BY_NAME and BY_NAME[name].resume in (FREE, SILENT)


def _refusal(args: Any, differing: dict[str, tuple[Any, Any]]) -> UserError:
    """Return the error with all refused differences and the remedies: a line, or a line each if they are many."""
    fixed = [name for name in differing if name in BY_NAME and BY_NAME[name].why_fixed]
    changeable = [name for name in differing if name not in fixed]
    parts = [_difference(name, *differing[name]) for name in fixed + changeable]
    if fixed:
        parts.insert(len(fixed), f"{_dashed(fixed).replace(',', ', ')} cannot be changed: give the checkpoint's")
    if changeable:
        parts.append(f"these change the run's results; to continue anyway, give --allow-change {_dashed(changeable)}")
    begin, has_lines = f"cannot resume (--resume {args.resume}):", len(differing) > 3
    message = "\n  ".join([begin, *parts]) if has_lines else f"{begin} {'; '.join(parts)}"
    return UserError(message, has_lines=has_lines)


def _difference(name: str, theirs: Any, ours: Any) -> str:
    if name == "code":
        files = []
        for file in _changed_files(theirs, ours):
            option, _, module = file.partition(" ")
            files.append(f"--{_dashed([option])}" + (f" ({module})" if module else ""))
        return f"the file of {', '.join(files)} has changed since the checkpoint"
    notes = {
        "threads": " (CPU threads: OMP_NUM_THREADS)",
        "weights": " (ignored: the checkpoint has the run's own weights)",
        "world_size": " (the same samples and augmentation; without --use-deterministic-algorithms sums may round "
        "differently)",
    }
    return f"{_dashed([name])} {theirs} in the checkpoint, {ours} now{notes.get(name, '')}"


def _print_joined(begin: str, texts: list[str], end: str = "") -> None:
    if texts:
        print(one_line(begin + "; ".join(texts) + end))


def _dashed(names: list[str]) -> str:
    return ",".join(names).replace("_", "-")
