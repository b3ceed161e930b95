"""A learning rate of its own for each layer: `--layer-decay`."""

import importlib
import re

from torch import nn

# A part of a parameter's name that numbers a layer among layers of one kind: 3, encoder_layer_3, denseblock2 ...
_LAYER = re.compile(r"\d+|.*(layer|block|stage)_?\d+")


def layers_of(model: nn.Module) -> dict[str, int]:
    """Return each parameter's layer, from the input: 0 for the stem, then each block, then all layers after the blocks.

    timm's models group their parameters themselves.
    """
    names = [name for name, _ in model.named_parameters()]
    match = getattr(model, "group_matcher", None)
    if match is not None:
        timm = importlib.import_module("timm.models")
        numbers = timm.group_parameters(model, match(coarse=False), reverse=True)
        return {name: numbers.get(name, max(numbers.values())) for name in names}
    blocks = {name: _block_of(name) for name in names}
    blocks = {name: block for name, block in blocks.items() if block}
    order = {block: number for number, block in enumerate(dict.fromkeys(blocks.values()), 1)}
    # Parameters outside all blocks, before the last block's end, are the stem's: patches, positions, class tokens.
    last = max((index for index, name in enumerate(names) if name in blocks), default=-1)
    ends = {name: 0 if index < last else len(order) + 1 for index, name in enumerate(names)}
    return {name: order.get(blocks.get(name), ends[name]) for name in names}


def _block_of(name: str) -> str:
    """Return the part of a parameter's name that tells its block, up to the last number in a row; "" if none does."""
    parts = name.split(".")[:-1]
    is_number = [bool(_LAYER.fullmatch(part)) for part in parts]
    if not any(is_number):
        return ""
    begin = is_number.index(True)
    length = [*is_number[begin:], False].index(False)
    return ".".join(parts[: begin + length])


def split_by_layer(model: nn.Module, groups: list[dict], decay: float, lr: float) -> list[dict]:
    """Give each layer of every group a learning rate of its own, `decay` times that of the layer above it.

    As in BEiT (Bao et al., arXiv 2106.08254) and ConvNeXt's fine-tuning. A group's `lr_scale` multiplies the schedule.
    """
    numbers = layers_of(model)
    layers = {parameter: numbers[name] for name, parameter in model.named_parameters()}
    top = max(numbers.values())
    width = len(str(top))
    split = []
    for group in groups:
        for layer in sorted({layers[parameter] for parameter in group["params"]}):
            params = [parameter for parameter in group["params"] if layers[parameter] == layer]
            scale = decay ** (top - layer)
            rate = {"lr": lr * scale, "lr_scale": scale, "name": f"layer{layer:0{width}}"}
            split.append({**group, "params": params, **rate})
    return split
