"""A trained model, from a checkpoint or by the name of published weights: how all tools open one."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

import config
import models
from checkpointing.weights import Weights, load_weights
from errors import UserError
from loading.loader import check_memory, check_workers
from options import WHY_TYPED, is_same_model, split_custom
from presets import ClassificationPresetEval, build_presets
from run import build_evaluated, fetch_by_name
from scripts.exported import describe_weights
from scripts.tool import positive


class Trained(NamedTuple):
    """A model with what is needed to use it.

    Attributes:
        model: on the CPU, in evaluation mode; from (B, 3, S, S) normalised floats to (B, num_classes) logits.
        args: the options that it is evaluated with: `model`, `val_crop_size`, `interpolation` ...
        classes: the names of the classes; None where the file does not have them.
        kind: which weights these are, as words for a message.
        trained_with: all options that the file has from its training or publication.
    """

    model: nn.Module
    args: config.Record
    classes: list[str] | None
    kind: str
    trained_with: dict[str, Any]

    @property
    def preset(self) -> ClassificationPresetEval:
        """From a PIL image to (3, S, S) normalised floats."""
        return build_presets(self.args)[1]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which weights of a file are meant, and of which model a bare state dict is."""
    parser.add_argument("--ema", action="store_true", help="take the averaged weights, not the raw ones")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="the model, where the file does not say it: a torchvision name, timm/NAME, or "
        "FILE.py:FUNCTION, which is needed where the file says it too",
    )


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how images are loaded and where the model is computed."""
    parser.add_argument("--batch-size", metavar="N", type=positive, default=128, help="(default: 128)")
    parser.add_argument(
        "--workers", metavar="N", type=int, choices=range(1025), help="loader processes (default: as train.py)"
    )
    parser.add_argument("--device", help="cuda, cpu ... (default: the accelerator of this machine, else cpu)")


# Options of the tools that take the place of the checkpoint's own.
_OWN_OPTIONS = (
    "batch_size", "data_path", "device", "interpolation", "val_crop_size", "val_resize_size", "workers",
)  # fmt: skip


def settle(trained: Trained, options: argparse.Namespace) -> config.Record:
    """Return the options that a model is computed with on this machine.

    Args:
        trained: the model and the options of its training.
        options: of the tool; those that take the place of the checkpoint's have our names.

    Raises:
        UserError: the model cannot take them, or the machine has no such device, or not the memory.
    """
    given = {name: value for name in _OWN_OPTIONS if (value := getattr(options, name, None)) is not None}
    given |= {"synthetic": None} if "data_path" in given else {}
    args = trained.args.replaced(**given, test_only=True, compile=None, decode_device="cpu")
    config.validate(args)
    if "val_crop_size" in given:
        models.check_sizes(trained.model, args)
        trained.model.eval()
    args, _ = config.on_machine(args)
    check_workers(args.workers)
    check_memory(args)
    return args


def open_trained(source: str, *, model: str | None = None, is_average: bool = False) -> Trained:
    """Open a checkpoint of this script, torchvision, timm or pytorch/examples, a bare state dict, or published weights.

    A bare state dict may be a safetensors file, and have been written by `scripts.export` with a description.

    Args:
        source: a path; or `resnet50`, `resnet50.IMAGENET1K_V1` or `ResNet50_Weights.IMAGENET1K_V1`.
        model: its name, where the file does not say it.
        is_average: take the average of a checkpoint, not its raw weights.

    Raises:
        UserError: there are no such weights, or they belong to another model.
    """
    if not Path(source).is_file():
        return build_trained(source, *fetch_by_name(source))
    weights = load_weights(Path(source), is_average=is_average, name=source)
    describe_weights(weights, Path(source))
    name = weights.options.get("model")
    if model is not None and name is not None and not is_same_model(name, model):
        raise UserError(f"{source} holds {weights.kind}, and --model is {model}; leave --model out")
    if model is None and name is None:
        raise UserError(f"{source} does not say of which model it is; give --model NAME")
    if model is None and split_custom(name):
        raise UserError(f"{source} is of {name}, {WHY_TYPED}")
    return build_trained(source, model or name, weights, is_typed=model is not None)


def build_trained(source: str, name: str, weights: Weights, *, is_typed: bool = False) -> Trained:
    """Return the model with its weights, and the options that it is evaluated with.

    Args:
        source: what to call the weights in a message.
        name: of the model.
        weights: its weights.
        is_typed: whether the command line names the model, so that its own file may be run.
    """
    model, args = build_evaluated(source, name, weights, is_typed=is_typed)
    return Trained(model, args, weights.classes, weights.kind, weights.options)
