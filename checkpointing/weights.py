"""Load weights from files of this script, torchvision, pytorch/examples and timm."""

import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torchvision.transforms._presets import ImageClassification

from checkpointing.archive import load_checkpoint
from checkpointing.damaged import first_bytes
from errors import StorageError, UserError, as_user_error
from files import open_to_read
from settings.packages import require_package

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
    disorder: Sequence[str] = ()  # of `class_order.find_disorder`, for the classes of the images to come
    classes: list[str] | None = None  # names of the classes, if the file has them
    options: dict[str, Any]  # the checkpoint's, with its `arch` as the model; empty for a bare state dict
    images: Any = None  # of a checkpoint of ours, `data`: the set that it was trained on
    file: str = ""  # the name of the file
    origin: str = "as in the checkpoint"  # words about where the options come from
    _metadata: dict[str, Any]  # the modules' version notes, by torch's name, where there are any


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
        with as_user_error(f"{path} is damaged or no safetensors file; {what}"):
            return reader.load_file(path)
    except MemoryError as error:
        raise StorageError(f"{path} does not fit into the memory that is free now") from error


def extract_weights(content: dict, name: str, *, is_average: bool = False) -> Weights:
    """Return the state dict in the content of a file; arguments and errors as of `load_weights`."""
    raw_key = next((key for key in _RAW_KEYS if key in content), None)
    average_key = next((key for key in _AVERAGE_KEYS if key in content), None)
    if is_average and average_key is None:
        raise UserError(f"{name} holds no average ({' or '.join(_AVERAGE_KEYS)}); remove --ema to use its raw weights")
    key = average_key if is_average else raw_key
    weights = extract_state_dict(content, key, name)
    weights.options, weights.script = options_of(content), find_script(content)
    if key is None:
        weights.kind = BARE
        return weights
    if weights.script == "torchvision":
        weights.origin = "as in the checkpoint of torchvision's script"
    weights.kind = "the average" if is_average else "the raw weights"
    model = weights.options.get("model")
    if model:
        weights.kind += f" of {model}"
    if not is_average and average_key is not None:
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
    if not (owner and repository):
        raise UserError(f"{source}: expected {HUB}ORG/NAME or {HUB}ORG/NAME/FILE")
    # Of the files that a repository usually has, the one that nobody can put code into.
    file = file or SAFETENSORS
    hub = require_package("huggingface_hub", source)
    with as_user_error(f"{source}: cannot fetch {file}"):
        return Path(hub.hf_hub_download(f"{owner}/{repository}", file))


def extract_state_dict(content: dict, key: str | None, source: str) -> Weights:
    """Return the state dict under a key, or the content itself; UserError if that is no sound state dict."""
    found = content if key is None else content.get(key)
    is_state_dict = isinstance(found, dict) and found and all(isinstance(name, str) for name in found)
    if not (is_state_dict and all(isinstance(tensor, torch.Tensor) for tensor in found.values())):
        where = "" if key is None else f" as `{key}`"
        raise UserError(f"{source} holds no weights{where}: expected a state dict, or a checkpoint with one as "
                        f"{' or '.join(_RAW_KEYS)}")  # fmt: skip
    for name, tensor in found.items():
        # A file of a few bytes may describe a tensor of terabytes, and a model of that size would be built.
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
        vars(weights)["_metadata"] = {_unwrap(f"{name}.".removeprefix(own))[:-1]: each for name, each in notes.items()}
    return weights


def _unwrap(name: str) -> str:
    """Return a name without the prefixes of torch.compile and of wrappers of a model."""
    return _WRAPPERS.sub("", name.replace("_orig_mod.", ""))


def find_script(content: dict) -> str:
    """Return the script that wrote a checkpoint, by its keys."""
    if "state_dict" in content:
        # pytorch/examples write `best_acc1`; timm's script writes none, and at least one of the others.
        if "best_acc1" not in content and not content.keys().isdisjoint({"version", "state_dict_ema", "args"}):
            return "timm"
        return "pytorch-examples" if "arch" in content else "another"
    if "model" in content:
        # Ours are plain data; torchvision's script writes the Namespace of its parser.
        return "touchstone" if isinstance(content.get("args"), dict) else "torchvision"
    return BARE


def options_of(content: dict) -> dict[str, Any]:
    """Return a checkpoint's `args`, with the model's name as `model` if it is printable.

    pytorch/examples call the model `arch`; timm's script writes the names of its models without timm/.
    """
    args = content.get("args")
    options = {}
    if isinstance(args, dict):
        options = dict(args)
    elif isinstance(args, Namespace):
        options = dict(vars(args))
        if {"val_resize_size", "val_crop_size", "interpolation"} <= options.keys():
            options |= {"mean": list(_TORCHVISIONS.mean), "std": list(_TORCHVISIONS.std)}
    names = [options.pop("model", None)]
    is_timms = find_script(content) == "timm"
    if not is_timms:  # whose `arch` may be a class
        names.insert(0, content.get("arch"))
    # Anybody may have written the file, and the name is printed.
    model = next((name for name in names if isinstance(name, str) and name.isprintable() and len(name) <= 200), None)
    if is_timms and model is not None:
        if ":" in model:  # hf-hub:ORG/NAME is no name of timm's
            return options
        model = f"timm/{model.removeprefix('timm/')}"
    if model:
        options["model"] = model
    return options


def _classes(content: dict) -> list[str] | None:
    """Return the names of the classes, or None if the checkpoint lacks them."""
    data = content.get("data")
    if not (isinstance(data, dict) and isinstance(data.get("classes"), list)):
        return None
    return data["classes"] if all(isinstance(name, str) and len(name) <= 255 for name in data["classes"]) else None
