"""Models for one or four channels, and weights for another number of channels."""

import copy

from torch import Tensor, nn

from errors import UserError, counted
from settings.options import BY_NAME


def widen(model: nn.Module, name: str, in_chans: int) -> None:
    """Let a model of torchvision's take `--in-chans`: its first weights are those for three channels, adapted."""
    if getattr(model, "transform_input", False):
        advice = "remove --in-chans, or the weights and transform_input"
        raise UserError(f"--in-chans {in_chans}: {name} rescales the three channels of its published weights; {advice}")
    first = next(each for each in model.modules() if isinstance(each, nn.Conv2d) and each.in_channels == 3)
    first.in_channels = in_chans
    first.weight = nn.Parameter(adapt_channels(first.weight.detach(), in_chans))


def adapt_channels(weight: Tensor, in_chans: int) -> Tensor:
    """Return weights (O, I, h, w) of a first layer for another number of channels, in timm's way.

    They are summed for one channel, else repeated, cut and scaled, so that the sum over the channels stays about equal.
    """
    if in_chans == 1:
        return weight.float().sum(dim=1, keepdim=True).to(weight.dtype)
    repeated = weight.float().repeat(1, -(-in_chans // weight.shape[1]), 1, 1)[:, :in_chans]
    return (repeated * (weight.shape[1] / in_chans)).to(weight.dtype)


def fit_channels(
    model: nn.Module, weights: dict[str, Tensor], in_chans: int, test_only: bool, source: str
) -> dict[str, Tensor]:
    """Return weights for `--in-chans`, and print a line if they change; UserError if they may not (`--test-only`)."""
    fitted = copy.copy(weights)  # with its notes
    for layer, module in model.named_modules():
        if not isinstance(module, nn.Conv2d) or module.in_channels != in_chans:
            continue
        name = f"{layer}.weight"
        weight = weights.get(name)
        if weight is None or weight.ndim != 4:
            continue
        theirs = weight.shape[1]
        if theirs not in BY_NAME["in_chans"].choices or theirs == module.weight.shape[1]:
            continue
        # Adapted weights give other scores, which training mends.
        if test_only:
            raise UserError(
                f"{source} is for {counted(theirs, 'channel')}, but --in-chans is {in_chans}; evaluation does "
                f"not adapt weights: give --in-chans {theirs}, or to a tool --mean and --std with as many values"
            )
        fitted[name] = adapt_channels(weight, in_chans)
        words = "summed" if in_chans == 1 else f"repeated and scaled by {theirs} / {in_chans}"
        print(f"{source}: {name} of {counted(theirs, 'channel')} is {words} for --in-chans {in_chans}, as in timm")
    return fitted
