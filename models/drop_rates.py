"""The rates of dropout and stochastic depth in models that do not take them as arguments."""

from typing import Any

import torchvision
from torch import nn

from errors import UserError


def set_rates(model: nn.Module, args: Any) -> None:
    """Set `--dropout` in all dropout layers; scale stochastic depth so that the deepest layer has the given rate."""
    if args.stochastic_depth is not None:
        layers = [module for module in model.modules() if isinstance(module, torchvision.ops.StochasticDepth)]
        deepest = max((layer.p for layer in layers), default=0.0)
        if not deepest:
            raise UserError(f"--stochastic-depth {args.stochastic_depth}: {args.model} does not support it")
        # torchvision's models let the rate grow with the depth (Huang et al., arXiv 1603.09382): that shape stays.
        for layer in layers:
            layer.p *= args.stochastic_depth / deepest
    if args.dropout is not None:
        layers = [module for module in model.modules() if isinstance(module, nn.Dropout)]
        if not layers:
            raise UserError(f"--dropout {args.dropout}: {args.model} has no dropout layer")
        for layer in layers:
            layer.p = args.dropout
