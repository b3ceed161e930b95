"""Build a model without memory, and count the floating-point operations of a training step."""

from argparse import Namespace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

import models


class _WeightsOnMeta(TorchFunctionMode):
    """Puts weights and statistics that layers allocate on the meta device; other tensors are computed as usual."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {} if kwargs is None else kwargs
        if function in (torch.empty, torch.zeros, torch.ones) and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def build_without_memory(args: Any, num_classes: int) -> nn.Module:
    """Build the model on the meta device, also where a model computes while it is built (RegNet)."""
    try:
        with _WeightsOnMeta():
            return models.build_model(args, num_classes).to("meta")
    except RuntimeError:  # it computes with its weights
        return models.build_model(args, num_classes).to("meta")


def count_flops(args: Any, num_classes: int) -> int:
    """Return the floating-point operations of an image's forward and backward pass; a multiply-add counts as two."""
    # MFU counts the model's operations, without recomputation.
    args = Namespace(**{**vars(args), "compile": None, "grad_checkpointing": False})
    # A model in evaluation mode computes the same, and a batch of one is enough for it.
    model = build_without_memory(args, num_classes).eval()
    image = torch.empty(1, 3, args.train_crop_size, args.train_crop_size, device=next(model.parameters()).device)
    mapping = {torch.ops.aten.convolution_backward: _backward_flops}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        model(image).sum().backward()
    return counter.get_total_flops()


def _backward_flops(grad: Any, image: Any, weight: Any, *options: Any, out_shape: Any = None) -> int:
    """Return the operations of a convolution's two gradients; torch's own count ignores groups."""
    is_transposed, (needs_input, needs_weight, _) = options[4], options[-1]
    return (needs_input + needs_weight) * conv_flop_count(image, weight, grad, is_transposed)
