"""Weights that torchvision publishes, and how torchvision's and timm's images are prepared."""

import importlib
import math
import sys
from collections.abc import Mapping
from typing import Any

import torchvision
from torch import Tensor
from torchvision.models import WeightsEnum

from checkpointing.weights import Weights
from distributed import collectives
from errors import UserError, as_user_error, did_you_mean
from settings.options import BY_NAME, STATISTICS, ModelOptions, fit_statistics
from settings.packages import find_timm_config
from settings.rules import split_custom


def published_preprocessing(model: str, crop: int | None = None) -> tuple[dict[str, Any], str]:
    """Return the options that torchvision or timm publish with a model, and words about them; {} where none are.

    Of torchvision's weights the first ones count, mostly IMAGENET1K_V1. Another `crop` scales timm's resize.
    """
    if split_custom(model) is not None:
        return {}, ""
    if not model.startswith("timm/"):
        return describe_published(next(iter(torchvision.models.get_model_weights(model))))
    if find_timm_config(model) is None:
        return {}, ""
    return options_of_timm(model, {"img_size": crop}), f"as timm configures {model}"


def options_of_timm(name: str, trained: Mapping[str, Any]) -> dict[str, Any]:
    """Return our options for timm/NAME with timm's options `trained`; UserError if sizes of images cannot be used."""
    known = find_timm_config(name)
    names = ("img_size", "input_size", "crop_pct", "crop_mode", "interpolation", "mean", "std")
    with as_user_error(f"{name}: the sizes of its images cannot be used"):
        resolve = importlib.import_module("timm.data").resolve_data_config
        found = resolve({each: trained.get(each) for each in names}, known.to_dict() if known else {})
        channels, height, crop = map(int, found["input_size"])
        channels = trained.get("in_chans") or channels
        if not (BY_NAME["in_chans"].is_value(channels) and height == crop):
            raise ValueError(f"it takes {channels} channels of {height} x {crop} px, expected 1, 3 or 4 of a square")
        # Rounded down, as timm's own evaluation does.
        options: dict[str, Any] = {
            "val_crop_size": crop,
            "val_resize_size": math.floor(crop / float(found["crop_pct"])),
        }
        options |= {each: fit_statistics([*map(float, found[each])], channels) for each in STATISTICS}
        options["in_chans"] = channels
    for each in ("interpolation", "crop_mode"):
        if BY_NAME[each].is_value(found[each]):
            options[each] = found[each]
    kwargs = trained.get("model_kwargs")
    if not isinstance(kwargs, list):  # a list is in our form already
        flags = {"global_pool": trained.get("gp"), **{each: trained.get(each) for each in ("bn_eps", "bn_momentum")}}
        kwargs = (kwargs or {}) | {key: value for key, value in flags.items() if value is not None}
        # None, as where the option is not given: an empty list would be another value.
        options["model_kwargs"] = sorted(f"{key}={value!r}" for key, value in kwargs.items()) or None
    return options


def describe_published(weights: WeightsEnum) -> tuple[dict[str, Any], str]:
    """Return the options that torchvision's weights are evaluated with, and words about them."""
    preset = weights.transforms()
    options: dict[str, Any] = {
        "mean": list(preset.mean),
        "std": list(preset.std),
        "interpolation": preset.interpolation.value,
    }
    options |= {"val_resize_size": preset.resize_size[0], "val_crop_size": preset.crop_size[0]}
    return {**options, "weights": str(weights)}, f"as torchvision publishes {weights}"


def find_published(name: str, source: str) -> tuple[str, WeightsEnum]:
    """Return the model and the weights of torchvision's that a name means; UserError, about `source`, if none are.

    Names are `resnet50`, for its default weights, `resnet50.IMAGENET1K_V1` and `ResNet50_Weights.IMAGENET1K_V1`.
    """
    names = torchvision.models.list_models(module=torchvision.models)
    enums = {name: torchvision.models.get_model_weights(name) for name in names}
    owner, _, member = name.partition(".")
    # torchvision's alias of a model's best weights.
    wanted = member or "DEFAULT"
    for model, enum in enums.items():
        if owner in (model, enum.__name__) and wanted in enum.__members__:
            return model, enum[wanted]
    known = [*enums]
    if member:
        known = [f"{model}.{each}" for model, enum in enums.items() for each in enum.__members__]
    hint = did_you_mean(name, known) or ";"
    advice = "give a checkpoint, or a name such as resnet50.IMAGENET1K_V2"
    raise UserError(f"{source}: no such file, and no weights of torchvision's{hint} {advice}")


def resolve_weights(model_options: ModelOptions) -> WeightsEnum:
    """Return the torchvision weights that `args.weights` names; UserError if the model has none of that name."""
    source = f"--weights {model_options.weights}"
    if model_options.model.startswith("timm/") or split_custom(model_options.model) is not None:
        raise UserError(f"{source} is not a file; for {model_options.model}, give a file with a state dict")
    name = model_options.weights if "." in model_options.weights else f"{model_options.model}.{model_options.weights}"
    model, published = find_published(name, source)
    if model != model_options.model:
        raise UserError(f"{source} is of {model}, and --model is {model_options.model}")
    return published


def fetch_by_name(source: str) -> Weights:
    """Return published weights by a name as of `find_published`; their options hold the model's name."""
    name, published = find_published(source, source)
    weights = Weights(fetch_published(published, source))
    weights.kind, weights.classes = f"the published weights {published}", published.meta["categories"]
    weights.options, weights.origin = describe_published(published)
    weights.options["model"] = name
    return weights


def fetch_published(weights: WeightsEnum, source: str) -> dict[str, Tensor]:
    """Return torchvision's weights, from torch's cache or the network; UserError if they are damaged or not there."""
    is_shown = collectives.is_main_process() and sys.stderr.isatty()  # a bar would fill a log
    try:
        # Torch's hub would unpickle any file in its cache: its default is weights_only=False.
        return weights.get_state_dict(progress=is_shown, check_hash=True, weights_only=True)
    except OSError as error:
        raise UserError(f"{source}: cannot download {weights.url} ({error})") from error
    except Exception as error:  # as of any bad file: see load_checkpoint
        raise UserError(
            f"{source}: the copy of {weights.url} in torch's cache is damaged or contains code and was refused; remove "
            "it, so that it is downloaded again"
        ) from error
