"""Open a trained model: a checkpoint, weights by their published name, or a file of `scripts.export`.

Exported files hold a description of the model, or have it beside them.
"""

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from checkpointing.preprocessing import preprocessing_line, preprocessing_of
from checkpointing.published import fetch_by_name
from checkpointing.weights import Weights, load_weights
from errors import UserError, as_user_error, is_printable, one_line
from files import read_json
from loading.loader import check_workers
from models.of_weights import build_evaluated
from presets import ClassificationPresetEval, build_presets
from scripts.tool import add_train_option, positive
from settings import checks, config
from settings.options import BY_NAME, PREPROCESSING, WHY_TYPED, WITH_DEFAULT, is_same_model, with_defaults
from settings.packages import require_package
from settings.rules import split_custom
from settings.stages import Parsed, Resolved

# Format of the descriptions; its number changes when older readers would misread new descriptions. The first lacked
# `WITH_DEFAULT`.
FORMAT, FORMATS = "touchstone-export-2", ("touchstone-export-1", "touchstone-export-2")

# The fields of a description's `preprocessing` and the options that they hold.
OPTIONS = {
    "resize_size": "val_resize_size", "crop_size": "val_crop_size", "interpolation": "interpolation",
    "backend": "backend", "mean": "mean", "std": "std", **{name: name for name in WITH_DEFAULT},
}  # fmt: skip

# The fields that are text already; files that can hold only text have the others as JSON.
_TEXTS = ("schema", "model", "weights", "sha256")
_JSON = ("initial_weights", "num_classes", "classes", "preprocessing", "has_several_labels")
_FIELDS = (*_TEXTS, *_JSON)

# The file in a program's archive that holds its description.
EXTRA_FILE = "touchstone.json"

_ORIGIN = "as in the exported file"
_HASHED = re.compile(r"-[0-9a-f]{8}$")


class Trained(NamedTuple):
    """A model and the facts that its users need."""

    # (B, C, S, S) normalised floats to (B, num_classes) logits, on the CPU; in evaluation mode, or an exported graph.
    model: nn.Module
    args: Parsed  # the options that it is evaluated with: `model`, not of a graph, `val_crop_size` ...
    classes: list[str] | None  # names of the classes; None where the file has none
    kind: str  # words for a message, such as `the raw weights of resnet18`
    trained_with: dict[str, Any]  # all options of its training or publication that the file holds
    origin: str  # words about where the preprocessing of its images comes from
    script: str  # as of `weights.find_script`; none of weights given by their name, whose classes have English names

    @property
    def preset(self) -> ClassificationPresetEval:
        """The transform of a PIL image into (C, S, S) normalised floats."""
        return build_presets(self.args.data, self.args.augmentation)[1]

    @property
    def preprocessing(self) -> dict[str, Any]:
        """The preprocessing of its images and its origin, as plain values."""
        return {**preprocessing_of(self.args), "origin": self.origin}

    def count_classes(self) -> int:
        """Return how many classes the model scores."""
        size = self.args.augmentation.val_crop_size
        with torch.inference_mode():
            return self.model(torch.zeros(1, self.args.data.in_chans, size, size)).size(1)


def add_options(
    parser: argparse.ArgumentParser,
    source: str = "a file, or published weights: resnet50.IMAGENET1K_V2",
    nargs: str | None = None,
) -> None:
    """Add the arguments that name the weights and, for a bare state dict, its model."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", nargs=nargs, help=source)
    parser.add_argument("--ema", action="store_true", help="take the averaged weights, not the raw ones")
    names = "a torchvision name, timm/NAME, or FILE.py:FUNCTION, which must be given even if the file says it"
    parser.add_argument("--model", metavar="NAME", help=f"the model, where the file does not say it: {names}")
    for name in PREPROCESSING:
        add_train_option(parser, name, "in place of the checkpoint's own or the published one")


def add_machine_options(parser: argparse.ArgumentParser, batch_size: int = 128) -> None:
    """Add the options for the number of images at once and for the device."""
    text = f"images at once (default: {batch_size})"
    parser.add_argument("--batch-size", metavar="N", type=positive, default=batch_size, help=text)
    add_train_option(parser, "device", "cuda, cpu ... (default: the accelerator of this machine, else cpu)")


def tool_options(trained: Trained, options: argparse.Namespace, *, is_alone: bool = True) -> Resolved:
    """Return the options with which a tool evaluates a model on this machine.

    The tool's own replace the checkpoint's where they have the names of train.py's. If `is_alone`, it is one process.
    """
    ours = ("batch_size", "data_path", "device", "workers")
    given = {name: value for name in ours if (value := getattr(options, name, None)) is not None}
    given |= {"synthetic": None} if "data_path" in given else {}
    args = trained.args.replaced(**given, test_only=True, compile=None)
    checks.validate(args)
    args, _ = config.on_machine(args)
    world_size = args.distributed.world_size
    if is_alone and world_size > 1:
        raise UserError(f"{world_size} processes were started, and this tool is one; start it without a launcher")
    check_workers(args.data.workers)
    return args.replaced(is_launched=world_size > 1)


def open_from_options(options: argparse.Namespace, *, is_predicting: bool = False) -> Trained:
    """Return the model that the arguments of `add_options` name, and print how its images are prepared.

    Exported graphs, which compute on the CPU, are opened only to predict: a .pt2 is a program.
    """
    path, given = Path(options.checkpoint), {name: getattr(options, name) for name in PREPROCESSING}
    given = {name: value for name, value in given.items() if value is not None}
    if is_predicting and path.suffix in (".onnx", ".pt2") and path.is_file():
        is_given = {"--ema": options.ema, "--model": options.model, "--device": options.device not in (None, "cpu")}
        if flags := [*filter(is_given.get, is_given), *(BY_NAME[name].flag for name in given)]:
            raise UserError(
                f"{path} is an exported graph, which has weights and preprocessing in it and runs on the CPU; leave "
                f"out {' and '.join(flags)}"
            )
        model, description = open_graph(path, str(path))
        known = _options_in(description)
        args = config.resolve(argparse.Namespace(test_only=True, resume=str(path), synthetic=1, device="cpu", **known))
        trained = Trained(model, args, description["classes"], description["weights"], known, _ORIGIN, "touchstone")
    else:
        trained = open_trained(options.checkpoint, model=options.model, is_average=options.ema, given=given)
    show_preprocessing(trained)
    return trained


def choose_extensions(trained: Trained, given: list[str] | None) -> list[str] | None:
    """Return `--extensions`, by default those of the training, and print these: they decide which images there are."""
    if given is None and trained.args.data.extensions:
        print(one_line(f"--extensions {' '.join(trained.args.data.extensions)}: as in the checkpoint"))
    return given or trained.args.data.extensions


def check_finite(logits: Tensor, source: str) -> None:
    """Raise UserError if a model's scores are not finite."""
    if not logits.isfinite().all():
        raise UserError(f"the scores of {source} are not finite: its weights are broken", exit_code=5)


def show_preprocessing(trained: Trained) -> None:
    """Print how a model's images are prepared."""
    print(preprocessing_line(trained.args, trained.origin))
    if trained.args.model.eval_flip:
        print("--eval-flip of the checkpoint: evaluations average the scores of an image and its mirror image; "
              "predictions and exported files score the image alone")  # fmt: skip


def open_trained(
    source: str, *, model: str | None = None, is_average: bool = False, given: Mapping[str, Any] | None = None
) -> Trained:
    """Open a checkpoint of this script, torchvision, timm or pytorch/examples, a bare state dict, or published weights.

    A bare state dict may be a safetensors file. If `scripts.export` wrote it, its description gives model and options.

    Args:
        source: a path; or `resnet50`, `resnet50.IMAGENET1K_V1` or `ResNet50_Weights.IMAGENET1K_V1`.
        model: the model's name, where the file does not say it.
        is_average: take the average of a checkpoint, not its raw weights.
        given: preprocessing in place of the weights' own: some of `options.PREPROCESSING`.

    Raises:
        UserError: `model` contradicts the weights' own options, or is needed and missing.
    """
    weights = read_weights(source, is_average=is_average)
    return build_trained(source, weights, model, given or {})


def read_weights(source: str, *, is_average: bool) -> Weights:
    """Return the weights that `open_trained` opens, with the options of their description, if they have one."""
    path = Path(source)
    if path.is_dir():
        raise UserError(f"{source} is a folder; give a file in it, such as {path / 'checkpoint.pth'}")
    if not path.is_file():
        return fetch_by_name(source)
    weights = load_weights(path, is_average=is_average, name=source)
    description = None if "model" in weights.options else _find_description(path)
    if description is not None:
        weights.kind, weights.classes, weights.origin = description["weights"], description["classes"], _ORIGIN
        weights.options = {**_options_in(description), "model": description["model"]}
        if description["initial_weights"] is not None:
            weights.options["weights"] = description["initial_weights"]
    return weights


def build_trained(source: str, weights: Weights, model: str | None, given: Mapping[str, Any]) -> Trained:
    """Return the model with these weights; arguments and errors as of `open_trained`."""
    name = weights.options.get("model")
    if None not in (name, model) and not is_same_model(name, model):
        raise UserError(f"{source} holds {weights.kind}, and --model is {model}; leave --model out")
    if name is None and model is None:
        raise UserError(f"{source} does not name its model; give --model NAME")
    if model is None and split_custom(name):
        raise UserError(f"{source} is a model of {name}, {WHY_TYPED}")
    built, args, origin = build_evaluated(source, model or name, weights, given, is_typed=model is not None)
    options = {**weights.options, **preprocessing_of(args)}
    return Trained(built, args, weights.classes, weights.kind, options, origin, weights.script)


def packed(description: dict[str, Any]) -> dict[str, str]:
    """Return a description as strings, which the metadata of safetensors, ONNX and .pt2 files can hold."""
    return {key: json.dumps(value) if key in _JSON or not isinstance(value, str) else value
            for key, value in description.items()}  # fmt: skip


def _unpacked(texts: dict[str, str], source: str) -> dict[str, Any]:
    """Return the description in a file's texts; UserError if there is none, or a damaged one."""
    if texts.get("schema") not in FORMATS:
        raise UserError(
            f"{source} does not say how its images are prepared and what its classes are; give a file that "
            "`python -m scripts.export` wrote"
        )
    with as_user_error(f"{source}: its description is damaged"):
        texts = {key: text for key, text in texts.items() if key in _FIELDS}
        content = {key: text if key in _TEXTS else json.loads(text) for key, text in texts.items()}
    return checked(content, source)


def checked(content: dict[str, Any], source: str) -> dict[str, Any]:
    """Return a description; UserError names a field that is missing, of another type or impossible."""
    with as_user_error(f"{source}: its description is damaged"):
        content = {"has_several_labels": False, **content}  # which the first format lacks
        description = {name: content[name] for name in _FIELDS}
        if type(description["has_several_labels"]) is not bool:
            raise UserError("has_several_labels is neither true nor false")
        preprocessing = description["preprocessing"] = with_defaults(description["preprocessing"])
        for key, option in OPTIONS.items():
            value = preprocessing[key]
            if (value is None and key not in WITH_DEFAULT) or not BY_NAME[option].is_value(value):
                raise UserError(f"{key} is {str(value)[:80]!r}")
            BY_NAME[option].check(value)
        if not len(preprocessing["mean"]) == len(preprocessing["std"]) in BY_NAME["in_chans"].choices:
            raise UserError("mean and std are not of 1, 3 or 4 channels")
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


def _options_in(description: dict[str, Any]) -> dict[str, Any]:
    """Return the options of train.py that a description holds."""
    known = {option: description["preprocessing"][key] for key, option in OPTIONS.items()}
    several = {"multi_label": ",", "bce_loss": True} if description["has_several_labels"] else {}
    return {**known, **several, "in_chans": len(known["mean"])}


def _find_description(path: Path) -> dict[str, Any] | None:
    """Return the description of weights that `scripts.export` wrote: in safetensors, else in the JSON beside them.

    Returns None where there is none.
    """
    if path.suffix == ".safetensors":
        with require_package("safetensors", str(path)).safe_open(str(path), framework="pt") as file:
            texts = file.metadata() or {}
        return _unpacked(texts, str(path)) if texts.get("schema") in FORMATS else None
    content = read_json(path.with_name(f"{_HASHED.sub('', path.stem)}.json"))
    files = content.get("files")
    if content.get("schema") not in FORMATS or not isinstance(files, dict) or path.name not in files:
        return None
    return checked(content, str(path))


def open_graph(path: Path, source: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return an exported graph, from images to logits on the CPU as of `Trained`, and its description.

    A .pt2 is a program: opening it may run any code in it. Messages call the file `source`, whose ending tells its
    form: `path` is a temporary name while it is written.
    """
    model, texts = (_open_onnx if source.endswith(".onnx") else _open_program)(path, source)
    return model, _unpacked(texts, source)


class _OnnxGraph(nn.Module):
    def __init__(self, session: Any) -> None:
        super().__init__()
        self.session = session

    def forward(self, image: Tensor) -> Tensor:
        return torch.from_numpy(self.session.run(["logits"], {"input": image.contiguous().numpy()})[0])


def _open_onnx(path: Path, source: str) -> tuple[nn.Module, dict[str, str]]:
    runtime = require_package("onnxruntime", source)
    with as_user_error(f"{source} cannot be opened"):
        settings = runtime.SessionOptions()
        settings.log_severity_level = 4
        settings.intra_op_num_threads = torch.get_num_threads()
        session = runtime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        return _OnnxGraph(session), session.get_modelmeta().custom_metadata_map


def _open_program(path: Path, source: str) -> tuple[nn.Module, dict[str, str]]:
    files = {EXTRA_FILE: ""}
    with as_user_error(f"{source} cannot be opened"), open(path, "rb") as file:
        model = torch.export.load(file, extra_files=files).module()
        return model, json.loads(files[EXTRA_FILE] or "{}")
