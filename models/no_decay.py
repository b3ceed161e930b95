"""Parameters without weight decay, by timm's common rule: `--no-decay-1d`."""

from fnmatch import fnmatch

from torch import nn

# Parameters of torchvision's models that have one dimension in the papers' own code, or that `no_weight_decay()` of
# timm's models exempts.
_UNDECAYED = ("class_token", "layer_scale", "pos_embedding", "relative_position_bias_table")


def exempt_from_decay(model: nn.Module, weight_decay: float) -> list[dict]:
    """Divide a model's trainable parameters into those that decay and those that timm's common rule exempts.

    Exempt are biases, other parameters with at most one dimension, and those that the model's `no_weight_decay()`
    names, or `_UNDECAYED` for torchvision's models.
    """
    # timm's names may hold wildcards.
    patterns = set(getattr(model, "no_weight_decay", set)())
    decayed, exempt = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_named = name.rpartition(".")[2] in _UNDECAYED or any(fnmatch(name, pattern) for pattern in patterns)
        if parameter.ndim <= 1 or name.endswith("bias") or is_named:
            exempt.append(parameter)
        else:
            decayed.append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": exempt, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
