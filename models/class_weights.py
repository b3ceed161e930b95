"""Weights of classes in the loss: balanced ones, or those of a file."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from errors import UserError, as_user_error, counted, did_you_mean
from loading.source import count_classes
from settings.options import OptimizationOptions


def class_weights(optimization: OptimizationOptions, device: str, dataset: Any) -> Tensor:
    """Return (num_classes,) float32 on the device: the weights of `--class-weights` for a training set.

    Balanced ones are images / (classes x images of the class), as scikit-learn's; with `--bce-loss` negatives /
    positives, as torch's page on `BCEWithLogitsLoss` has it.

    Raises:
        UserError: the file cannot be read, or does not give one weight above 0 to each class.
    """
    if optimization.class_weights == "balanced":
        # A class without images, in a trial on few of them, would have an infinite weight.
        counts = count_classes(dataset.index).clip(min=1)
        weights = len(dataset) / len(counts) / counts
        if optimization.bce_loss:
            weights = (len(dataset) - counts).clip(min=1) / counts
        return torch.tensor(weights, dtype=torch.float32, device=device)
    from loading.lists import read_table

    found = {}
    with as_user_error(f"--class-weights {optimization.class_weights}"):
        for line, row in read_table(Path(optimization.class_weights), ("class", "weight")):
            name = str(row["class"])
            weight = float(row["weight"])
            if name in found:
                raise UserError(f"line {line}: {name} is listed twice")
            if name not in dataset.classes:
                raise UserError(f"line {line}: {name} is no class{did_you_mean(name, dataset.classes)}")
            if not 1e-6 <= weight <= 1e6:
                raise UserError(f"line {line}: the weight is {weight:g}; expected 0.000001 to 1,000,000")
            found[name] = weight
        missing = [name for name in dataset.classes if name not in found]
        if missing:
            raise UserError(f"{counted(len(missing), 'class')} missing, such as {missing[0]}; give each class a weight")
    return torch.tensor([found[name] for name in dataset.classes], dtype=torch.float32, device=device)
