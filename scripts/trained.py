"""A trained model, from a checkpoint or by the name of published weights: how all tools open one."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torchvision
from torch import nn

import config
from checkpointing.weights import Weights, load_weights
from data import options_of_weights
from errors import UserError, did_you_mean
from models import build_model, count_classes, take_statistics
from options import BY_NAME, WHY_TYPED, is_same_model, split_custom
from presets import ClassificationPresetEval, build_presets
from run import fetch_published
from scripts.exported import describe_weights


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
        return _open_published(source)
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


def find_published(source: str) -> tuple[str, Any] | None:
    """Return the model and the weights that a name means: a model's default ones without `.WEIGHTS`; None if none."""
    owner, _, member = source.rpartition(".")
    names = torchvision.models.list_models(module=torchvision.models)
    if source in names:
        return source, torchvision.models.get_model_weights(source).DEFAULT
    for name in names:
        known = torchvision.models.get_model_weights(name)
        if owner in (name, known.__name__) and member in known.__members__:
            return name, known[member]
    return None


def _open_published(source: str) -> Trained:
    found = find_published(source)
    if found is None:
        hint = did_you_mean(source, torchvision.models.list_models(module=torchvision.models))
        raise UserError(
            f"{source}: no such file, and no weights of torchvision's{hint}; give a checkpoint, or a name such as "
            "resnet50.IMAGENET1K_V2"
        )
    name, member = found
    weights = Weights(fetch_published(member, source))
    weights.kind, weights.classes = f"the published weights {member}", member.meta["categories"]
    weights.options = {**options_of_weights(member), "weights": str(member)}
    return build_trained(source, name, weights)


def build_trained(source: str, name: str, weights: Weights, *, is_typed: bool = False) -> Trained:
    """Return the model with its weights, and the options that it is evaluated with.

    Args:
        source: what to call the weights in a message.
        name: of the model.
        weights: its weights.
        is_typed: whether the command line names the model, so that its own file may be run.
    """
    given = argparse.Namespace(model=name, test_only=True, resume=source, synthetic=1)
    options = {key: value for key, value in weights.options.items() if _is_value(key, value)}
    if "val_crop_size" in options:  # ViTs are of one size, and published ones do not say that of training
        given.train_crop_size = given.val_crop_size = options["val_crop_size"]
    args, _ = take_statistics(config.Record(**vars(config.complete(given, typed=["model"] * is_typed))))
    args, _ = config.as_trained(args, options)
    if isinstance(options.get("weights"), str):  # GoogLeNet and Inception rescale inputs for published ones
        args = args.replaced(weights=options["weights"])
    args = args.replaced(distributed=False)
    num_classes = len(weights.classes or ()) or count_classes(build_model(args, 1000), weights, 1000)
    built = build_model(args, num_classes, weights, source).eval().requires_grad_(False)
    return Trained(built, args, weights.classes, weights.kind, weights.options)


def _is_value(name: str, value: Any) -> bool:
    """Tell whether an option of a checkpoint, perhaps of another script's, is one of ours."""
    return name in BY_NAME and name != "decode_device" and (value is None or BY_NAME[name].is_value(value))
