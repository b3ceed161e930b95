"""The rates of dropout and stochastic depth in models that do not take them as arguments."""

import torchvision
from torch import nn

from errors import UserError
from settings.options import ModelOptions


def set_rates(model: nn.Module, model_options: ModelOptions) -> None:
    """Set `--dropout` in all dropout layers; scale stochastic depth so that the deepest layer has the given rate."""
    if model_options.stochastic_depth is not None:
        layers = [module for module in model.modules() if isinstance(module, torchvision.ops.StochasticDepth)]
        deepest = max((layer.p for layer in layers), default=0.0)
        if not deepest:
            raise UserError(
                f"--stochastic-depth {model_options.stochastic_depth}: {model_options.model} does not support it"
            )
        # torchvision's models let the rate grow with the depth (Huang et al., arXiv 1603.09382): that shape stays.
        for layer in layers:
            layer.p *= model_options.stochastic_depth / deepest
    if model_options.dropout is not None:
        layers = [module for module in model.modules() if isinstance(module, nn.Dropout)]
        if not layers:
            raise UserError(f"--dropout {model_options.dropout}: {model_options.model} has no dropout layer")
        for layer in layers:
            layer.p = model_options.dropout
