"""Fetch published weights: torchvision's by name, and those that `--weights` names."""

import sys
from pathlib import Path
from typing import Any

import torchvision
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.models import WeightsEnum

import collectives
from checkpointing.guard import check_classes
from checkpointing.weights import HUB, Weights, fetch_from_hub, load_weights
from errors import UserError, did_you_mean
from options import split_custom


def start_weights(args: Any, val: Dataset) -> dict[str, Tensor] | None:
    """Return the state dict that `--weights` names, or None without the option.

    Args:
        args: the options.
        val: the validation set, for the names of its classes.

    Raises:
        UserError: it names no weights, or weights that cannot be evaluated on these classes.
    """
    if args.weights is None:
        return None
    path = fetch_from_hub(args.weights) if args.weights.startswith(HUB) else Path(args.weights)
    if path.is_file():
        weights = load_weights(path, is_average=args.ema, name=f"--weights {args.weights}")
        print(f"--weights {args.weights}: {weights.kind}")
        check_classes(weights.classes, args, val)
        return weights
    return fetch_published(resolve_weights(args), f"--weights {args.weights}")


def fetch_by_name(source: str) -> tuple[str, Weights]:
    """Return the model and the weights for a name of torchvision's published weights.

    Args:
        source: `resnet50` for its default weights, `resnet50.IMAGENET1K_V1` or
            `ResNet50_Weights.IMAGENET1K_V1`.

    Raises:
        UserError: there are no such weights, or they cannot be fetched.
    """
    names = torchvision.models.list_models(module=torchvision.models)
    enums = {name: torchvision.models.get_model_weights(name) for name in names}
    owner, _, member = source.rpartition(".")
    found = [
        (name, enum[member])
        for name, enum in enums.items()
        if owner in (name, enum.__name__) and member in enum.__members__
    ]
    if source in enums:
        found = [(source, enums[source].DEFAULT)]
    if not found:
        raise UserError(
            f"{source}: no such file, and no weights of torchvision's{did_you_mean(source, enums)}; give a checkpoint, "
            "or a name such as resnet50.IMAGENET1K_V2"
        )
    name, published = found[0]
    weights = Weights(fetch_published(published, source))
    weights.kind, weights.classes = f"the published weights {published}", published.meta["categories"]
    weights.options = {**options_of_weights(published), "weights": str(published)}
    return name, weights


def options_of_weights(weights: Any) -> dict[str, Any]:
    """Return the options that published weights are evaluated with."""
    preset = weights.transforms()
    return {
        "mean": list(preset.mean),
        "std": list(preset.std),
        "val_resize_size": preset.resize_size[0],
        "val_crop_size": preset.crop_size[0],
        "interpolation": preset.interpolation.value,
    }


def resolve_weights(args: Any) -> Any:
    """Return the member of torchvision's weights enumeration that `args.weights` names.

    Raises:
        UserError: the model has no weights of that name.
    """
    if args.model.startswith("timm/") or split_custom(args.model) is not None:
        raise UserError(f"--weights {args.weights} is not a file; for {args.model}, give a file with a state dict")
    enum = torchvision.models.get_model_weights(args.model)
    owner, _, name = args.weights.rpartition(".")
    if owner not in ("", enum.__name__) or name not in enum.__members__:
        known = ", ".join(enum.__members__)
        hint = did_you_mean(name, enum.__members__)
        raise UserError(
            f"--weights {args.weights}: neither a file nor weights of {args.model}{hint} (there are {known})"
        )
    return enum[name]


def fetch_published(weights: WeightsEnum, source: str) -> dict[str, Tensor]:
    """Return the state dict of torchvision's weights, from torch's cache or the network.

    Args:
        weights: a member of a weights enumeration.
        source: the weights' name in messages.

    Raises:
        UserError: they cannot be fetched, or the copy in the cache is damaged.
    """
    is_shown = collectives.is_main_process() and sys.stderr.isatty()  # a bar would fill a log
    try:
        # Torch's hub would unpickle any file in its cache: its default is weights_only=False.
        return weights.get_state_dict(progress=is_shown, check_hash=True, weights_only=True)
    except OSError as error:
        raise UserError(f"{source}: cannot download {weights.url} ({error})") from error
    except Exception as error:  # as of any bad file: see load_checkpoint
        raise UserError(
            f"{source}: the copy of {weights.url} in torch's cache is damaged or contains code and was refused; remove "
            "it, so that it is fetched anew"
        ) from error
