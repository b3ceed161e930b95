"""Load, average and store weights, in files of this script, torchvision, pytorch/examples and timm."""

import copy
import hashlib
import io
import os
import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision.transforms._presets import ImageClassification

from checkpointing.archive import first_bytes, load_checkpoint
from errors import StorageError, UserError, in_one_line, require_package
from files import open_to_read, write_atomically

# Keys of a checkpoint's weights and of their average: torchvision's and ours, others', that of PyTorch's tutorial.
_RAW_KEYS, _AVERAGE_KEYS = ("model", "state_dict", "model_state_dict"), ("model_ema", "state_dict_ema")

# The kind of weights in a file that holds nothing else.
BARE = "a bare state dict"

# Prefix of names on the Hugging Face hub, and the default file there.
HUB, SAFETENSORS = "hf-hub:", "model.safetensors"

# The preprocessing of torchvision's script, in whose checkpoints mean and standard deviation are not among the options.
_TORCHVISIONS = ImageClassification(crop_size=224)

# Prefixes by DistributedDataParallel and AveragedModel, and those that pytorch/examples puts into AlexNet's and VGG's.
_WRAPPERS = re.compile(r"^(module\.)+|(?<=^features\.)module\.")


class Weights(OrderedDict):
    """A state dict that was read from a file, under the model's own names and with its modules' version notes."""

    kind: str  # words for a message, such as `the raw weights of resnet18`
    script: str = ""  # the script that wrote the file: see `find_script`
    disorder: Sequence[str] = ()  # of `guard.find_disorder`, for the classes of the images to come
    classes: list[str] | None = None  # names of the classes, if the file has them
    options: dict[str, Any]  # the checkpoint's, with its `arch` as the model; empty for a bare state dict
    images: Any = None  # of a checkpoint of ours, `data`: the set that it was trained on
    file: str = ""  # the name of the file
    origin: str = "as in the checkpoint"  # words about where the options come from


def load_weights(path: Path, *, is_average: bool = False, name: str | None = None) -> Weights:
    """Return the state dict in a file, or in a checkpoint: its raw weights or their average.

    Messages call the file `name`, by default an argument of `--weights`. UserError if there is no such state dict.
    """
    weights = extract_weights(read_content(path), name or f"--weights {path}", is_average=is_average)
    weights.file = path.name
    return weights


def read_content(path: Path) -> dict:
    """Return the content of a checkpoint of any script, or a state dict.

    Raises:
        UserError: the file is neither.
        StorageError: memory is short.
    """
    try:
        if path.suffix != ".safetensors":
            return load_checkpoint(path, str(path), takes_namespace=True)
        reader = require_package("safetensors.torch", str(path))
        with open_to_read(path) as file:
            what = first_bytes(file.read(24))
        with in_one_line(f"{path} is damaged or no safetensors file; {what}"):
            return reader.load_file(path)
    except MemoryError as error:
        raise StorageError(f"{path} does not fit into the memory that is free now") from error


def extract_weights(content: dict, name: str, *, is_average: bool = False) -> Weights:
    """Return the state dict in the content of a file; arguments and errors as of `load_weights`."""
    raw, average = (next((key for key in keys if key in content), None) for keys in (_RAW_KEYS, _AVERAGE_KEYS))
    if is_average and average is None:
        raise UserError(f"{name} holds no average ({' or '.join(_AVERAGE_KEYS)}); remove --ema to use its raw weights")
    key = average if is_average else raw
    weights = _extract(content, key, name)
    weights.options, weights.script = options_of(content), find_script(content)
    if key is None:
        weights.kind = BARE
        return weights
    if weights.script == "torchvision":
        weights.origin = "as in the checkpoint of torchvision's script"
    model = weights.options.get("model")
    weights.kind = ("the average" if is_average else "the raw weights") + (f" of {model}" if model else "")
    if not is_average and average is not None:
        weights.kind += ", not their average, which --ema selects"
    weights.classes, weights.images = _classes(content), content.get("data")
    return weights


def fetch_from_hub(name: str, source: str | None = None) -> Path:
    """Return the path of a file of the Hugging Face hub in its local cache; messages call it `source`.

    The name is hf-hub:ORG/NAME, which means model.safetensors there, or hf-hub:ORG/NAME/FILE.

    Raises:
        UserError: the file cannot be fetched, or the hub's package is not installed.
    """
    source = source or f"--weights {name}"
    owner, _, rest = name.removeprefix(HUB).partition("/")
    repository, _, file = rest.partition("/")
    if not owner or not repository:
        raise UserError(f"{source}: expected {HUB}ORG/NAME or {HUB}ORG/NAME/FILE")
    hub = require_package("huggingface_hub", source)
    with in_one_line(f"{source}: cannot fetch {file or SAFETENSORS}"):
        return Path(hub.hf_hub_download(f"{owner}/{repository}", file or SAFETENSORS))


def _extract(content: dict, key: str | None, source: str) -> Weights:
    """Return the state dict under a key, or the content itself; UserError if that is no sound state dict."""
    found = content if key is None else content.get(key)
    is_state_dict = isinstance(found, dict) and found and all(isinstance(name, str) for name in found)
    if not is_state_dict or not all(isinstance(tensor, torch.Tensor) for tensor in found.values()):
        where = "" if key is None else f" as `{key}`"
        raise UserError(f"{source} holds no weights{where}: expected a state dict, or a checkpoint with one as "
                        f"{' or '.join(_RAW_KEYS)}")  # fmt: skip
    for name, tensor in found.items():
        # Otherwise a model of the claimed size would be built.
        if tensor.layout != torch.strided or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise UserError(f"{source}: {name} claims to be larger than its stored bytes")
    # A Lightning module has its model under a name of its own. n_averaged is a counter of torch's AveragedModel.
    own = "model." if "pytorch-lightning_version" in content else ""
    weights = Weights((_unwrap(name.removeprefix(own)), each) for name, each in found.items() if name != "n_averaged")
    if len(weights) < len(found.keys() - {"n_averaged"}):
        raise UserError(f"{source} holds the same weights twice, with and without a prefix")
    notes = getattr(found, "_metadata", None)
    if isinstance(notes, dict) and all(isinstance(each, dict) for each in notes.values()):
        # Modules need these to load weights that their older versions saved.
        weights._metadata = {_unwrap(f"{name}.".removeprefix(own))[:-1]: each for name, each in notes.items()}
    return weights


def _unwrap(name: str) -> str:
    """Return a name without the prefixes of torch.compile and of wrappers of a model."""
    return _WRAPPERS.sub("", name.replace("_orig_mod.", ""))


def find_script(content: dict) -> str:
    """Return the script that wrote a checkpoint, by its keys."""
    if "state_dict" in content:
        is_timms = "best_acc1" not in content and not content.keys().isdisjoint({"version", "state_dict_ema", "args"})
        return "timm" if is_timms else "pytorch-examples" if "arch" in content else "another"
    if "model" in content:
        return "touchstone" if isinstance(content.get("args"), dict) else "torchvision"
    return BARE


def options_of(content: dict) -> dict[str, Any]:
    """Return a checkpoint's `args`, with the model's name as `model` if it is printable.

    pytorch/examples call the model `arch`; timm's script writes the names of its models without timm/.
    """
    args = content.get("args")
    options = dict(vars(args) if isinstance(args, Namespace) else args if isinstance(args, dict) else {})
    if isinstance(args, Namespace) and {"val_resize_size", "val_crop_size", "interpolation"} <= options.keys():
        options |= {"mean": list(_TORCHVISIONS.mean), "std": list(_TORCHVISIONS.std)}
    is_timms = find_script(content) == "timm"
    names = [None if is_timms else content.get("arch"), options.pop("model", None)]  # timm's arch may be a class
    model = next((name for name in names if isinstance(name, str) and name.isprintable() and len(name) <= 200), None)
    if is_timms and model is not None:
        model = None if ":" in model else f"timm/{model.removeprefix('timm/')}"  # hf-hub:ORG/NAME is no name of timm's
    return options | ({"model": model} if model else {})


def _classes(content: dict) -> list[str] | None:
    """Return the names of the classes, or None if the checkpoint lacks them."""
    described = content.get("data")
    classes = described.get("classes") if isinstance(described, dict) else None
    is_known = isinstance(classes, list) and all(isinstance(name, str) and len(name) <= 255 for name in classes)
    return classes if is_known else None


def average_checkpoints(inputs: Iterable[str | Path]) -> dict[str, Any]:
    """Return the first of several checkpoints with the mean of all their weights as its `model`.

    Raises:
        KeyError: a checkpoint has other names or shapes of weights than the first.
        UserError: a checkpoint cannot be read, or holds no weights.
    """
    paths = list(map(Path, inputs))
    if not paths:
        raise ValueError("no checkpoints to average")
    first = read_content(paths[0])
    contents = (first if path is paths[0] else read_content(path) for path in paths)  # each file is read once
    return {**first, "model": average_weights(paths, lambda path: _extract(next(contents), "model", str(path)))}


def average_weights(sources: Sequence[Any], read: Callable[[Any], Weights]) -> Weights:
    """Return the first of the weights that `read` returns for each source, with the mean of all in their place.

    As in torchvision, means of integers are rounded down, and those of float16 are float32. KeyError if names or shapes
    differ, UserError for numbers that are not finite, or integers or complex ones where others are real.
    """
    first, sums = None, {}
    for source in sources:
        weights = read(source)
        first = first or weights
        shapes, expected = ({(name, each.shape) for name, each in part.items()} for part in (weights, first))
        if differing := sorted(name for name, _ in shapes ^ expected):
            raise KeyError(f"{source} has different weights than {sources[0]}: {', '.join(differing[:3])}")
        for name, tensor in weights.items():
            is_odd = tensor.is_complex() or tensor.is_quantized or tensor.is_meta
            if is_odd or tensor.is_floating_point() != first[name].is_floating_point() or not tensor.isfinite().all():
                raise UserError(
                    f"{source}: {name} is {tensor.dtype}, or not finite, and cannot be averaged; remove this file"
                )
            sums[name] = sums.get(name, 0) + (tensor.double() if tensor.is_floating_point() else tensor.long())
    for name, tensor in first.items():
        mean = torch.div(sums[name], len(sources), rounding_mode=None if tensor.is_floating_point() else "floor")
        first[name] = mean.to(torch.float32 if tensor.dtype == torch.float16 else tensor.dtype)
    return first


def as_checkpoint(weights: Weights, **more: Any) -> dict[str, Any]:
    """Return weights and their options and classes as a checkpoint of plain data.

    `--weights` and the tools accept it; it lacks the position that `--resume` needs.
    """
    classes = weights.classes
    known = {} if classes is None else {"data": {"num_classes": len(classes), "classes": classes}}
    args = {name: value for name, value in weights.options.items() if _is_plain(value)}
    plain = OrderedDict(weights)
    if hasattr(weights, "_metadata"):  # the modules' version notes
        plain._metadata = OrderedDict(weights._metadata)
    return {"model": plain, "args": args, **known, **more}


def _is_plain(value: Any) -> bool:
    items = value if type(value) is list else [value]
    return all(item is None or type(item) in (bool, int, float, str) for item in items)


def store_model_weights(
    model: nn.Module, checkpoint_path: str | Path, checkpoint_key: str = "model", strict: bool = True
) -> str:
    """Write the weights that a model takes from a checkpoint into a file of their own beside it; return its path.

    Its name ends in the first eight digits of its SHA-256, which torch's hub checks.

    Args:
        model: the model whose weights are taken; a copy of it loads them.
        checkpoint_path: path of the checkpoint.
        checkpoint_key: key of the weights in it.
        strict: whether the checkpoint must hold these weights and no others.

    Raises:
        UserError: the checkpoint cannot be read, or holds no weights there.
        RuntimeError: the weights are of another model.
    """
    path, model, stream = Path(os.path.abspath(checkpoint_path)), copy.deepcopy(model), io.BytesIO()
    model.load_state_dict(_extract(read_content(path), checkpoint_key, str(path)), strict=strict)
    torch.save(model.state_dict(), stream)
    output = path.with_name(f"weights-{hashlib.sha256(stream.getbuffer()).hexdigest()[:8]}.pth")
    write_atomically(output, stream.getbuffer())
    return str(output)
