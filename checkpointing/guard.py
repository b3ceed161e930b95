"""Compare options, data and versions with those of the checkpoint that a run resumes."""

import hashlib
import os
import platform
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
from settings.machine import fast_decoder
from settings.options import BY_NAME, DataOptions, DistributedOptions, is_filled_in, is_same_model, parse_allowed
from settings.rules import FREE, SILENT
from settings.stages import Resolved

# Set by the script, not by the user; `is_launched` is saved as "distributed".
_DERIVED = {"distributed", "given", "gpu", "is_launched", "num_shards", "rank", "reference_global_batch", "typed"}


def describe_data(train: Any | None, val: Any) -> dict:
    """Return the facts by which a checkpoint identifies the training and the validation set."""
    classes = list(val.classes)
    facts = {} if train is None else describe_set(train)
    return {**facts, "num_classes": len(classes), "classes": classes, "val": describe_set(val)}


def describe_set(dataset: Any) -> dict:
    """Return the facts by which one set of images is known."""
    return {"num_images": len(dataset), "fingerprint": dataset.index.fingerprint(), **dataset.index.identity()}


def describe_environment(data_options: DataOptions, distributed: DistributedOptions) -> dict[str, Any]:
    """Return all that a run's numbers may depend on: versions, processor, code revision, threads and processes."""
    decoder = f"pillow {PIL.__version__} {features.version('libjpeg_turbo') or features.version('jpg')}"
    torchcodec = fast_decoder(data_options)
    if torchcodec:
        decoder = f"torchcodec {torchcodec}, {decoder}"
    found = {
        "touchstone": __version__,
        "torch": str(torch.__version__),  # a TorchVersion would be code to unpickle
        "torchvision": str(torchvision.__version__),
        "decoder": decoder,
        "python": platform.python_version(),
        "revision": describe_revision(Path(__file__).parent.parent),
        "source": hash_project(Path(__file__).parent.parent),
        "threads": torch.get_num_threads(),
        "world_size": distributed.world_size,
    }
    # Of PNG, BMP and PPM, which lose nothing, every decoder makes the same pixels.
    found |= {name: features.version(name) for name in ("avif", "libtiff", "webp") if features.check(name)}
    with suppress(ImportError):  # without it no HEIC is read
        import pillow_heif

        found["heif"] = f"pillow-heif {pillow_heif.__version__} libheif {pillow_heif.libheif_version()}"
    with suppress(PackageNotFoundError):
        # Not timm.__version__: the import takes seconds.
        found["timm"] = version("timm")
    kind = torch.device(distributed.device or "cpu").type
    if kind == "cpu":
        # Kernels of another instruction set may add in another order; torch's draws need AVX2 to be equal.
        found["cpu"] = torch.backends.cpu.get_cpu_capability()
    if kind == "cuda" and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(distributed.device)
        libraries = {"cuda": torch.version.cuda, "rocm": torch.version.hip, "cudnn": torch.backends.cudnn.version()}
        found |= {name: str(value) for name, value in libraries.items() if value is not None}
    return found


def describe_processor() -> str:
    """Return the processor's name and the number of its cores that this process may use."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):  # which ARM's kernels do not write
                return f"{collectives.count_cores()} cores of {line.partition(':')[2].strip()}"
    except OSError:  # macOS has no /proc
        pass
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
    return f"{commit}-dirty" if commit and any(not line.startswith("# ") for line in lines) else commit


def hash_project(folder: Path) -> str:
    """Return a hash of the project's own files, without tests and tools: an image has no git to tell its revision."""
    apart = ("bench", "scripts", "tests", "touchstone")
    packages = [each.parent for each in folder.glob("*/__init__.py") if each.parent.name not in apart]
    # At the top may lie files of the user's own: of these only what is imported counts, and what a run may import.
    names = {"train", "transforms", *sys.modules}.difference(apart)
    files = [path for path in folder.glob("*.py") if path.stem in names]
    files += [path for package in packages for path in package.glob("*.py")]
    contents = [f"{path.relative_to(folder)} ".encode() + path.read_bytes() for path in sorted(files)]
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


def run_facts(args: Resolved, train: Any, val: Any, more: dict[str, Any] | None = None) -> dict:
    """Return the plain values that describe a run in its checkpoints and in run.json."""
    return {
        # A dict: torchvision's script saves the parser's Namespace, which its own --resume cannot load any more.
        "args": args.as_saved(),
        "shards": {"global_batch_size": args.optimization.global_batch_size, "num_shards": args.distributed.num_shards},
        "data": describe_data(train, val),
        "eval_data": {name: describe_set(each) for name, each in (more or {}).items()},
        "environment": describe_environment(args.data, args.distributed),
    }


def find_hashes(args: Resolved, data: dict, model: torch.nn.Module, resumed: dict | None = None) -> dict[str, str]:
    """Return hashes by which two machines are compared: of data, of options that change numbers, of first weights.

    They are the same for every form and path of the images, on any number of processes, and in a resumed run.
    """
    facts = ("num_images", "fingerprint", "sample")
    sets = [[each.get(fact) for fact in facts] for each in (data, data["val"])]
    # The options by the table that refuses a changed one: whoever adds an option need not think of this hash.
    names = [name for name, option in BY_NAME.items() if option.resume not in (FREE, SILENT)]
    all_values = args.flat()
    values = [all_values[name] for name in names]
    values += [_code_of_numbers(args.origin.code), args.optimization.reference_global_batch]
    # The same code of one's own may lie in another folder of another machine; its content is in `args.code`.
    options = [os.path.basename(text) if ".py:" in text else text for text in map(str, values)]
    # BatchNorm's count of batches has no dimension: torch refuses to slice such a tensor, or to view it as bytes.
    state = {name: torch.atleast_1d(each) for name, each in model.state_dict().items() if torch.is_tensor(each)}
    # Of rows from all over a tensor: all of ResNet-50 take 20 ms, and as long to come from a device.
    rows = [each[:: max(len(each) // 16, 1)].cpu().contiguous().flatten() for each in state.values()]
    sums = [zlib.crc32(each.view(torch.uint8).numpy()) for each in rows]
    parts = {"data": [data["classes"], *sets], "options": options, "weights": [*state, *sums]}
    # Eight digits, since people compare them by eye on two machines.
    digests = {name: hashlib.sha256(repr(part).encode(errors="replace")) for name, part in parts.items()}
    hashes = {name: digest.hexdigest()[:8] for name, digest in digests.items()}
    if resumed is not None:
        # The first weights are gone by now: the checkpoint carries their hash along.
        hashes["weights"] = resumed.get("hashes", {}).get("weights", "unknown")
    return hashes


def check_options(state: dict, args: Resolved) -> None:
    """Check that the options compute the same numbers as the checkpoint's run; print harmless and allowed differences.

    The caller has neither read data nor set the micro-batches yet.

    Raises:
        UserError: a difference changes numbers, and `--allow-change` does not name it.
    """
    saved = state["environment"]
    current = describe_environment(args.data, args.distributed)
    is_deterministic = args.precision.use_deterministic_algorithms
    differing = _differing_options(state["args"], args)
    # Sums over one and two CPU threads differed in bits after two steps of a ResNet-18; each repeats itself.
    for name in ("world_size", "threads") if is_deterministic else ("world_size",):
        if saved[name] != current[name]:
            differing[name] = (saved[name], current[name])
    allowed = parse_allowed(args.checkpoint.allow_change)
    free = [name for name in differing if _is_free(name, args)]
    refused = {name: values for name, values in differing.items() if name not in allowed and name not in free}
    if refused:
        raise _refusal(args.checkpoint.resume, refused)

    shown = {name: _difference(name, *values) for name, values in differing.items()}
    _print_joined("changed as --allow-change says: ", [text for name, text in shown.items() if name in allowed])
    printed = [name for name in free if name == "world_size" or BY_NAME[name].resume != SILENT]
    _print_joined("options that changed: ", [shown[name] for name in printed])
    # Only what both know: an older checkpoint lacks what is recorded by now.
    names = [name for name in current if name in saved and name not in ("threads", "world_size")]
    versions = [_difference(name, saved[name], current[name]) for name in names if saved[name] != current[name]]
    versions += [shown[name] for name in differing if name == "device"]
    # Versions are printed and never refused: the run cannot have the old ones back, but its bits may now be others.
    consequence = "; bit-identical results are not guaranteed" if is_deterministic else ""
    _print_joined("versions that changed: ", versions, consequence)


def check_data(
    state: dict | None, args: Resolved, train: Any | None, val: Any, more: dict[str, Any] | None = None
) -> None:
    """Raise UserError if there is a checkpoint, and its model, classes or images are not those of this run.

    Without a training set the checkpoint is to be evaluated, and the images may differ.
    """
    if state is None:
        return
    saved, num_classes = state["data"], len(val.classes)
    resume = f"--resume {args.checkpoint.resume}"
    # Before a model is built: what torch says of weights that do not fit is a page of names and shapes.
    model = state["args"]["model"]
    if not is_same_model(model, args.model.model):
        misfit = f"a {model}, but --model is {args.model.model}; give that model, or another file"
        raise UserError(f"the checkpoint of {resume} holds {misfit}")
    if saved["num_classes"] != num_classes:
        images = args.data.data_path if args.data.synthetic is None else f"--synthetic {args.data.synthetic}"
        advice = "pass it to --weights to fine-tune instead" if train else "give images of the checkpoint's classes"
        misfit = f"{saved['num_classes']} classes but {images} has {num_classes}; {advice}"
        raise UserError(f"the checkpoint of {resume} holds {misfit}")
    refusal = f"cannot {'evaluate' if train is None else 'resume'} ({resume})"
    refused = compare_classes(saved["classes"], val.classes, refusal)
    notes: list[str] = []
    if train is not None:
        if saved["num_images"] != len(train):
            numbers = _difference("num_images", saved["num_images"], len(train))
            why = "the saved position counts steps over all images, so this cannot be changed"
            raise UserError(f"{refusal}: {numbers}; {why}")
        refused += _compare_sets("train", saved, describe_set(train), notes)
    if args.data.minival:
        from checkpointing.held_out import warn_trained_on

        warn_trained_on(resume, state["args"], saved, args.data, val)
    sets = dict(more or {})
    # Two folds or fractions of the training images are different sets by intention, and not compared.
    held_out = (state["args"].get("minival"), state["args"].get("minival_fold", 0))
    if held_out == (args.data.minival, args.data.minival_fold):
        sets = {"val": val, **sets}
    known = {"val": saved["val"], **state.get("eval_data", {})}
    # An evaluation of other images is asked for; in a resumed run the results before and after could not be compared.
    differences = notes if train is None else refused
    for name in [name for name in sets if name in known]:  # sets of --eval-data may come and go
        differences += _compare_sets(name, known[name], describe_set(sets[name]), notes)
    if refused:
        refuse_data(args.checkpoint.allow_change, refusal, refused)
    _print_joined("", notes)


def refuse_data(allow_change: str | None, refusal: str, differences: list[str]) -> None:
    """Refuse other data, unless `--allow-change data` is given."""
    if "data" not in parse_allowed(allow_change):
        raise UserError(f"{refusal}: {'; '.join(differences)}; to continue with them, give --allow-change data")
    _print_joined("changed as --allow-change says: ", differences)


def compare_classes(saved: list[str], current: list[str], refusal: str = "") -> list[str]:
    """Return a line about classes whose names differ from the checkpoint's, if any do; both must have as many.

    With the words of a refusal UserError for the same names in another order, which nothing permits.
    """
    labels = [label for label, names in enumerate(zip(saved, current, strict=True)) if names[0] != names[1]]
    if not labels:
        return []
    first = _difference(f"class {labels[0]} is", one_line(saved[labels[0]]), one_line(current[labels[0]]))
    # Other names may be permitted, as better words for the same images; in another order every label is wrong.
    if refusal and {*saved} == {*current}:
        advice = "a list with classes.txt can keep the order (docs/data.md#changed-data)"
        raise UserError(f"{refusal}: the same classes are in another order: {first}; {advice}")
    return [f"{len(labels)} of {len(current)} classes have different names: {first}"]


def _compare_sets(name: str, saved: dict, current: dict, notes: list[str]) -> list[str]:
    """Return the differences of two sets that matter; add those that may be harmless to the notes.

    Names, labels and a sample of sizes can be compared across forms and paths, all sizes and checksums within a form,
    times within a path.
    """
    meanings = {"num_images": "the number of images differs", "fingerprint": "files have different names or labels"}
    is_same_form = saved["form"] == current["form"]
    if is_same_form:
        meanings |= {"sizes": "images have different sizes", "checksums": "it is a different pack"}
    # Sizes and checksums are not always known.
    differing = [key for key in meanings if saved[key] != current[key] and None not in (saved[key], current[key])]
    if differing:
        words = {key: _difference(f"data of {name}: {key}", saved[key], current[key]) for key in differing}
        return [f"{text}: {meanings[key]}" for key, text in words.items()]
    # Images that were made smaller keep names and labels. A few sizes may differ: damaged files are replaced.
    known, found = _sampled_sizes(saved), _sampled_sizes(current)
    if 2 * len(known & found) < min(len(known), len(found)):
        return [f"data of {name}: most of {len(found)} compared images have different sizes (scripts.pack?)"]
    # A copied file has a new time too, and no image is read to find out: a line, not a refusal.
    if is_same_form and saved["path"] == current["path"] and saved["times"] != current["times"]:
        notes.append(f"data of {name}: {current['path']} has changed since the checkpoint, but no file name in it")
    return []


def _sampled_sizes(facts: dict) -> set[str]:
    """Return the sizes of some images, each with its number; none where they are not known, as in old checkpoints."""
    sample = facts.get("sample")
    return {*sample.split()} if isinstance(sample, str) else set()


def _differing_options(saved: dict, args: Resolved) -> dict[str, tuple[Any, Any]]:
    """Return (the checkpoint's value, the present one) of each option that differs."""
    differing = {}
    for name, value in args.flat().items():
        if name in (*_DERIVED, "world_size") or is_filled_in(name, args.model.model, args.origin.given):
            continue
        # The first weights are of no more use, and an option that is newer than the checkpoint was off in its run.
        if name not in args.origin.given and (name == "weights" or name not in saved):
            continue
        if name == "global_batch_size" and value is None:  # the checkpoint's is taken
            continue
        known = saved.get(name, "unknown")
        if name == "device" and known is not None and value is not None:
            # The number of a GPU is the machine's affair.
            known = str(known).split(":")[0]
            value = str(value).split(":")[0]
        if not _is_same_value(name, known, value):
            differing[name] = (known, value)
    # Rates are scaled by global batch / reference, so that another reference alone is another learning rate.
    before, now = saved["reference_global_batch"], args.optimization.reference_global_batch
    scaling = args.optimization.lr_scaling
    if scaling != "none" and before != now:
        differing["lr_scaling"] = (f"{saved['lr_scaling']} from {before}", f"{scaling} from {now}")
    return differing


def _is_same_value(name: str, saved: Any, current: Any) -> bool:
    """Tell whether two values of an option mean the same: code may have moved, and a model has several spellings."""
    if name == "code" and isinstance(saved, str):
        return not _changed_files(saved, current)
    if name in TABLES and isinstance(saved, str) and isinstance(current, str):
        return is_same_model(saved, current)
    return saved == current


def _code_of_numbers(code: str) -> str:
    """Return a result of `hash_code` without the loggers, which change no number."""
    return ", ".join(each for each in code.split(", ") if not each.startswith("logger "))


def _changed_files(saved: str, current: str) -> list[str]:
    """Return in what two results of `hash_code` differ; metrics may come and go."""
    saved_files, current_files = _hashes_by_file(saved), _hashes_by_file(current)
    changed = [name for name in saved_files | current_files if saved_files.get(name) != current_files.get(name)]
    both = saved_files.keys() & current_files.keys()
    return [name for name in changed if name in both or not name.startswith("metrics")]


def _hashes_by_file(code: str) -> dict[str, list[str]]:
    """Return the parts of a result of `hash_code` that change numbers by the names of their files."""
    files = {}
    for part in filter(None, _code_of_numbers(code).split(", ")):
        files.setdefault(part.rpartition(" ")[0], []).append(part)
    return files


def _is_free(name: str, args: Resolved) -> bool:
    """Tell whether an option may change without permission; one without a rule may not."""
    if name == "epochs":  # a schedule spreads its rates over all epochs; the decay of an average follows from them
        return not (getattr(SCHEDULES.get(args.schedule.lr_scheduler), "uses_epochs", True) or args.model.model_ema)
    if name == "world_size":
        # BatchNorm sees the images of all processes; kernels are compiled for this number of processes.
        is_compiled = args.precision.compile is not None and args.precision.use_deterministic_algorithms
        return not (args.model.sync_bn or is_compiled)
    if name == "grad_checkpointing":
        return args.precision.compile is None  # the compiler fuses other kernels then
    if name == "weights":
        return args.model.model not in ("googlenet", "inception_v3")  # these rescale inputs for published weights
    return name in BY_NAME and BY_NAME[name].resume in (FREE, SILENT)


def _refusal(resume: str, differing: dict[str, tuple[Any, Any]]) -> UserError:
    """Return the error with all refused differences and the remedies: a line, or a line each if they are many."""
    fixed = [name for name in differing if name in BY_NAME and BY_NAME[name].why_fixed]
    changeable = [name for name in differing if name not in fixed]
    parts = [_difference(name, *differing[name]) for name in fixed + changeable]
    if fixed:
        parts.insert(len(fixed), f"{_dashed(fixed).replace(',', ', ')} cannot be changed: give the checkpoint's")
    if changeable:
        parts.append(f"these change the run's results; to continue anyway, give --allow-change {_dashed(changeable)}")
    begin = f"cannot resume (--resume {resume}):"
    # More than three would be a line that nobody can read.
    if len(differing) > 3:
        return UserError("\n  ".join([begin, *parts]), has_lines=True)
    return UserError(f"{begin} {'; '.join(parts)}")


def _difference(name: str, saved: Any, current: Any) -> str:
    if name == "code":
        files = []
        for file in _changed_files(saved, current):
            option, _, module = file.partition(" ")
            words = f"--{_dashed([option])}"
            if module:
                words += f" ({module})"
            files.append(words)
        return f"the file of {', '.join(files)} has changed since the checkpoint"
    notes = {
        "threads": " (CPU threads: OMP_NUM_THREADS)",
        "weights": " (ignored: the checkpoint has the run's own weights)",
        "world_size": " (the same samples and augmentation; without --use-deterministic-algorithms sums may round "
        "differently)",
    }
    return f"{_dashed([name])} {saved} in the checkpoint, {current} now{notes.get(name, '')}"


def _print_joined(begin: str, texts: list[str], end: str = "") -> None:
    if texts:
        print(one_line(begin + "; ".join(texts) + end))


def _dashed(names: list[str]) -> str:
    return ",".join(names).replace("_", "-")
