"""A model of the user's own, FILE.py:FUNCTION."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from errors import UserError, as_user_error, counted
from settings.custom_code import load_function, parse_kwargs
from settings.options import split_custom


def call_own(args: Any, num_classes: int) -> nn.Module:
    """Call the user's own function; an error in it keeps its traceback, for the user to read."""
    function = load_function("model", args)
    given = parse_kwargs(args.model_kwargs)
    if args.in_chans != 3:
        given["in_chans"] = args.in_chans
    signature = inspect.signature(function)
    names = ", ".join(["num_classes", *given])
    # A wrong argument is told in a line; an error inside the function keeps its traceback.
    with as_user_error(f"--model {args.model} takes {signature}, but is called with {names}"):
        signature.bind(num_classes=num_classes, **given)
    model = function(num_classes=num_classes, **given)
    if not isinstance(model, nn.Module):
        raise UserError(f"--model {args.model} returned a {type(model).__name__}, expected a torch.nn.Module")
    return model


def check_scores(output: Any, shape: tuple[int, int], args: Any) -> None:
    """Raise UserError if a model's output is neither float32 scores of a shape nor a tuple that begins with them."""
    if isinstance(output, tuple | list) and output:
        if not args.test_only and not split_custom(args.criterion or ""):
            raise UserError(
                f"its output is a {type(output).__name__} of {len(output)}, which needs a loss of your own: give "
                "--criterion FILE.py:FUNCTION"
            )
        output = output[0]
    if isinstance(output, Tensor):
        is_expected = output.dtype == torch.float32 and output.shape == shape
        found = f"{output.dtype} of shape {tuple(output.shape)}"
    else:
        is_expected = False
        found = f"a {type(output).__name__}"
    if not is_expected:
        raise UserError(
            f"its output for {counted(shape[0], 'image')}, built with num_classes={shape[1]} to try it, is {found}; "
            f"expected float32 scores of {shape}, or a tuple that begins with them"
        )
