"""Models of timm's."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from errors import UserError, did_you_mean
from settings.options import ModelOptions
from settings.packages import find_timm_config, require_timm


def find_timm(
    model_options: ModelOptions, in_chans: int, val_crop_size: int
) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
    """Return the function that builds a model of timm's, and its keyword arguments by our options."""
    timm = require_timm("--model", model_options.model)
    name = model_options.model.removeprefix("timm/")
    if "." in name or not timm.is_model(name):
        known = timm.list_models()
        if "." in name:
            # A name may end in the tag of its weights, whose config then gives mean and size.
            known += timm.list_pretrained(f"{name.partition('.')[0]}.*")
        if name not in known:
            hint = did_you_mean(name, known, prefix="timm/")
            raise UserError(f"--model {model_options.model}: timm has no such model{hint}")
    options = {"drop_path_rate": model_options.stochastic_depth, "drop_rate": model_options.dropout}
    # Not every model takes these arguments, so that only what differs from its default is given.
    if in_chans != 3:
        options["in_chans"] = in_chans
    config = find_timm_config(model_options.model)
    if config is not None and config.fixed_input_size and config.input_size[-1] != val_crop_size:
        options["img_size"] = val_crop_size
    given = {option: value for option, value in options.items() if value is not None}
    return partial(timm.create_model, name), given
