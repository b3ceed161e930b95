"""Describe exported models, in their files or beside them, and open the files."""

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode

from checkpointing.weights import Weights
from errors import UserError, in_one_line, is_printable, require_package
from files import read_json
from options import BY_NAME, PREPROCESSING
from presets import ClassificationPresetEval

# Format of the descriptions; its number changes when older readers would misread new descriptions.
FORMAT = "touchstone-export-1"

# The fields of a description's `preprocessing` and the options that they hold.
OPTIONS = {
    "resize_size": "val_resize_size", "crop_size": "val_crop_size", "interpolation": "interpolation",
    "backend": "backend", "mean": "mean", "std": "std",
}  # fmt: skip

# Largest difference of logits, as a share of the largest logit (of 1 if all are smaller): kernels sum in other orders.
TOLERANCE = 1e-4

# The fields that are text already; files that can hold only text have the others as JSON.
_TEXTS = ("schema", "model", "weights", "sha256")
_FIELDS = (*_TEXTS, "initial_weights", "num_classes", "classes", "preprocessing")

# The file in a program's archive that holds its description.
EXTRA_FILE = "touchstone.json"

_HASHED = re.compile(r"-[0-9a-f]{8}$")


class Graph(NamedTuple):
    """An exported graph, used like a `Trained`."""

    model: Callable[[Tensor], Tensor]  # from (B, 3, S, S) normalised floats on the CPU to (B, num_classes) logits
    description: dict[str, Any]  # as `checked` returns it

    @property
    def preset(self) -> ClassificationPresetEval:
        """The transform of a PIL image into (3, S, S) normalised floats."""
        named = self.description["preprocessing"]
        sizes = {name: named[name] for name in ("crop_size", "resize_size", "mean", "std", "backend")}
        return ClassificationPresetEval(**sizes, interpolation=InterpolationMode(named["interpolation"]))

    @property
    def preprocessing(self) -> dict[str, Any]:
        """The preprocessing of images and its origin, as plain values."""
        named = self.description["preprocessing"]
        options = {option: named[key] for key, option in OPTIONS.items()}
        return {**{name: options[name] for name in PREPROCESSING}, "origin": "as in the exported file"}

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes, or None."""
        return self.description["classes"]

    @property
    def kind(self) -> str:
        """Words for a message, such as `the raw weights of resnet18`."""
        return self.description["weights"]


def packed(description: dict[str, Any]) -> dict[str, str]:
    """Return a description as strings, which the metadata of safetensors, ONNX and .pt2 files can hold."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in description.items()}


def unpacked(texts: dict[str, str], source: str) -> dict[str, Any]:
    """Return the description in a file's texts; UserError if there is none, or a damaged one."""
    if texts.get("schema") != FORMAT:
        raise UserError(
            f"{source} does not say how its images are prepared and what its classes are; give a file that "
            "`python -m scripts.export` wrote"
        )
    with in_one_line(f"{source}: its description is damaged"):
        texts = {key: text for key, text in texts.items() if key in _FIELDS}
        content = {key: text if key in _TEXTS else json.loads(text) for key, text in texts.items()}
    return checked(content, source)


def checked(content: dict[str, Any], source: str) -> dict[str, Any]:
    """Return a description; UserError names a field that is missing, of another type or impossible."""
    with in_one_line(f"{source}: its description is damaged"):
        description = {name: content[name] for name in _FIELDS}
        for key, option in OPTIONS.items():
            value = description["preprocessing"][key]
            if value is None or not BY_NAME[option].is_value(value):
                raise UserError(f"{key} is {str(value)[:80]!r}")
            BY_NAME[option].check(value)
        for text in (*(description[name] for name in _TEXTS), description["initial_weights"] or ""):
            if not isinstance(text, str) or not is_printable(text):
                raise UserError(f"expected a line of text, and it is {str(text)[:80]!r}")
        classes, num_classes = description["classes"], description["num_classes"]
        if type(num_classes) is not int or num_classes < 1:
            raise UserError(f"num_classes is {str(num_classes)[:80]!r}")
        if classes is not None and (not isinstance(classes, list) or len(classes) != num_classes):
            raise UserError(f"classes are not {num_classes} names")
        if not all(isinstance(name, str) for name in classes or []):
            raise UserError("a class is no text")
        return description


def find_description(path: Path) -> dict[str, Any] | None:
    """Return the description of weights that `scripts.export` wrote: in safetensors, else in the JSON beside them.

    Returns None where there is none.
    """
    if path.suffix == ".safetensors":
        with require_package("safetensors", str(path)).safe_open(str(path), framework="pt") as file:
            texts = file.metadata() or {}
        return unpacked(texts, str(path)) if texts.get("schema") == FORMAT else None
    content = read_json(path.with_name(f"{_HASHED.sub('', path.stem)}.json"))
    files = content.get("files")
    if content.get("schema") != FORMAT or not isinstance(files, dict) or path.name not in files:
        return None
    return checked(content, str(path))


def describe_weights(weights: Weights, path: Path) -> None:
    """Give a bare state dict the options and classes of its description, if it has one."""
    description = None if "model" in weights.options else find_description(path)
    if description is None:
        return
    named = description["preprocessing"]
    weights.kind, weights.classes = description["weights"], description["classes"]
    weights.options = {option: named[key] for key, option in OPTIONS.items()} | {"model": description["model"]}
    weights.origin = "as in the exported file"
    if description["initial_weights"] is not None:
        weights.options["weights"] = description["initial_weights"]


def open_graph(path: Path, source: str) -> Graph:
    """Open an exported graph to compute with on the CPU. A .pt2 is a program: opening it may run any code in it.

    Messages call the file `source`, whose ending tells its form: `path` is a temporary name while it is written.
    """
    return _open_onnx(path, source) if source.endswith(".onnx") else _open_program(path, source)


def _open_onnx(path: Path, source: str) -> Graph:
    runtime = require_package("onnxruntime", source)
    with in_one_line(f"{source} cannot be opened"):
        settings = runtime.SessionOptions()
        settings.log_severity_level = 4
        settings.intra_op_num_threads = torch.get_num_threads()
        session = runtime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        texts = session.get_modelmeta().custom_metadata_map

    def run(image: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["logits"], {"input": image.contiguous().numpy()})[0])

    return Graph(run, unpacked(texts, source))


def _open_program(path: Path, source: str) -> Graph:
    # Registers the operations of quantized graphs.
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    files = {EXTRA_FILE: ""}
    with in_one_line(f"{source} cannot be opened"), open(path, "rb") as file:
        model = torch.export.load(file, extra_files=files).module()
        texts = json.loads(files[EXTRA_FILE] or "{}")
    return Graph(model, unpacked(texts, source))


@contextmanager
def own_stdout() -> Iterator[TextIO]:
    """Yield a stream to standard output, and send all other output, C++'s too, to standard error meanwhile."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(kept, "w", encoding="utf-8", errors="backslashreplace", closefd=False) as stream:
            yield stream
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
