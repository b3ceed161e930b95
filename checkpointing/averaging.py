"""Average weights of several files, and write weights into files of their own: for tools and torchvision's helpers."""

import copy
import hashlib
import io
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkpointing.weights import Weights, extract_state_dict, read_content
from errors import UserError
from files import write_atomically


def average_checkpoints(inputs: Iterable[str | Path]) -> dict[str, Any]:
    """Return the first of several checkpoints with the mean of all their weights as its `model`.

    Raises:
        KeyError: a checkpoint has other names or shapes of weights than the first.
        UserError: a checkpoint cannot be read, or holds no weights.
    """
    paths = list(map(Path, inputs))
    if not paths:
        raise ValueError("no checkpoints to average")
    first = read_content(paths[0])
    contents = (first if path is paths[0] else read_content(path) for path in paths)  # each file is read once
    mean = average_weights(paths, lambda path: extract_state_dict(next(contents), "model", str(path)))
    return {**first, "model": mean}


def average_weights(sources: Sequence[Any], read: Callable[[Any], Weights]) -> Weights:
    """Return the first of the weights that `read` returns for each source, with the mean of all in their place.

    As in torchvision, means of integers are rounded down, and those of float16 are float32. KeyError if names or shapes
    differ, UserError for numbers that are not finite, or integers or complex ones where others are real.
    """
    first, sums = None, {}
    for source in sources:
        weights = read(source)
        first = first or weights
        # Before the sums: tensors of other shapes may be broadcast to a mean without meaning.
        shapes = {(name, each.shape) for name, each in weights.items()}
        expected = {(name, each.shape) for name, each in first.items()}
        if shapes != expected:
            differing = sorted(name for name, _ in shapes ^ expected)
            raise KeyError(f"{source} has different weights than {sources[0]}: {', '.join(differing[:3])}")
        for name, tensor in weights.items():
            if not _has_mean(tensor, first[name]):
                raise UserError(
                    f"{source}: {name} is {tensor.dtype}, or not finite, and cannot be averaged; remove this file"
                )
            # As wide as there is: a sum of float16 overflows beyond 65,504, and integers stay exact as such.
            sums[name] = sums.get(name, 0) + (tensor.double() if tensor.is_floating_point() else tensor.long())
    for name, tensor in first.items():
        rounding = None if tensor.is_floating_point() else "floor"
        mean = torch.div(sums[name], len(sources), rounding_mode=rounding)
        first[name] = mean.to(torch.float32 if tensor.dtype == torch.float16 else tensor.dtype)
    return first


def _has_mean(tensor: torch.Tensor, first: torch.Tensor) -> bool:
    """Tell whether a tensor can be averaged with the first one."""
    if tensor.is_complex() or tensor.is_quantized or tensor.is_meta:
        return False
    return tensor.is_floating_point() == first.is_floating_point() and bool(tensor.isfinite().all())


def as_checkpoint(weights: Weights, **more: Any) -> dict[str, Any]:
    """Return weights and their options and classes as a checkpoint of plain data.

    `--weights` and the tools accept it; it lacks the position that `--resume` needs.
    """
    classes = weights.classes
    known = {} if classes is None else {"data": {"num_classes": len(classes), "classes": classes}}
    args = {name: value for name, value in weights.options.items() if _is_plain(value)}
    plain = OrderedDict(weights)
    if hasattr(weights, "_metadata"):  # the modules' version notes
        vars(plain)["_metadata"] = OrderedDict(weights._metadata)
    return {"model": plain, "args": args, **known, **more}


def _is_plain(value: Any) -> bool:
    items = value if type(value) is list else [value]
    return all(item is None or type(item) in (bool, int, float, str) for item in items)


def store_model_weights(
    model: nn.Module, checkpoint_path: str | Path, checkpoint_key: str = "model", strict: bool = True
) -> str:
    """Write the weights that a model takes from a checkpoint into a file of their own beside it; return its path.

    Its name ends in the first eight digits of its SHA-256, which torch's hub checks.

    Args:
        model: the model whose weights are taken; a copy of it loads them.
        checkpoint_path: path of the checkpoint.
        checkpoint_key: key of the weights in it.
        strict: whether the checkpoint must hold these weights and no others.

    Raises:
        UserError: the checkpoint cannot be read, or holds no weights there.
        RuntimeError: the weights are of another model.
    """
    path, model, stream = Path(os.path.abspath(checkpoint_path)), copy.deepcopy(model), io.BytesIO()
    model.load_state_dict(extract_state_dict(read_content(path), checkpoint_key, str(path)), strict=strict)
    torch.save(model.state_dict(), stream)
    output = path.with_name(f"weights-{hashlib.sha256(stream.getvalue()).hexdigest()[:8]}.pth")
    write_atomically(output, stream.getvalue())
    return str(output)
