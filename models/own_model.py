"""A model of the user's own, FILE.py:FUNCTION."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from errors import UserError, as_user_error, counted
from settings.custom_code import load_function, parse_kwargs
from settings.options import ModelOptions
from settings.rules import split_custom


def call_own(model_options: ModelOptions, in_chans: int, num_classes: int) -> nn.Module:
    """Call the user's own function; an error in it keeps its traceback, for the user to read."""
    function = load_function("model", model_options.model)
    given = parse_kwargs(model_options.model_kwargs)
    if in_chans != 3:
        given["in_chans"] = in_chans
    signature = inspect.signature(function)
    names = ", ".join(["num_classes", *given])
    # A wrong argument is told in a line; an error inside the function keeps its traceback.
    with as_user_error(f"--model {model_options.model} takes {signature}, but is called with {names}"):
        signature.bind(num_classes=num_classes, **given)
    model = function(num_classes=num_classes, **given)
    if not isinstance(model, nn.Module):
        raise UserError(f"--model {model_options.model} returned a {type(model).__name__}, expected a torch.nn.Module")
    return model


def check_scores(output: Any, shape: tuple[int, int], criterion: str | None, test_only: bool) -> None:
    """Raise UserError if a model's output is neither float32 scores of a shape nor a tuple that begins with them."""
    if isinstance(output, tuple | list) and output:
        if not test_only and not split_custom(criterion or ""):
            kind = f"a {type(output).__name__} of {len(output)}"
            raise UserError(f"its output is {kind}, which needs a loss of your own: give --criterion FILE.py:FUNCTION")
        output = output[0]
    found = f"a {type(output).__name__}"
    if isinstance(output, Tensor):
        if output.dtype == torch.float32 and output.shape == shape:
            return
        found = f"{output.dtype} of shape {tuple(output.shape)}"
    raise UserError(
        f"its output for {counted(shape[0], 'image')}, built with num_classes={shape[1]} to try it, is {found}; "
        f"expected float32 scores of {shape}, or a tuple that begins with them"
    )
