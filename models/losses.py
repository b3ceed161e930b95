"""Losses: by name, weighted by class, of auxiliary classifiers, and of the user's own."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loading.on_device import one_hot
from models.build import AUXILIARY_WEIGHTS
from settings.choices import LOSSES
from settings.custom_code import load_function
from settings.rules import split_custom
from settings.stages import Parsed


def soften(output: Tensor, target: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Return scores and their soft targets, smoothed, in float32 at least.

    Not in the dtype of autocast, which rounds 0.2005 to 0.2, no longer above a threshold of 0.2.
    """
    output = output.to(torch.promote_types(output.dtype, torch.float32))
    if target.ndim == 1:
        target = one_hot(target, output.size(1))
    return output, target.to(output.dtype) * (1.0 - label_smoothing) + label_smoothing / output.size(1)


class CrossEntropy(nn.Module):
    """Cross-entropy, whose terms may be weighted by their classes in training.

    A weighted one is the mean over images, as torch's for targets that are probabilities, whose sum over a set does not
    depend on how the set is cut into batches; torch's for class indices divides by the sum of a batch's weights.
    """

    def __init__(self, label_smoothing: float = 0.0, weight: Tensor | None = None) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.weight = weight

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over images of (B, num_classes) scores and (B,) classes or (B, num_classes) soft targets."""
        # Unweighted in evaluation, so that losses of runs with other weights can be compared.
        weight = self.weight if torch.is_grad_enabled() else None
        # Classes as soft targets, by which torch takes the mean over images instead of over weights.
        if target.ndim == 1 and weight is not None:
            output, target = soften(output, target, 0.0)
        return F.cross_entropy(output, target, weight, label_smoothing=self.label_smoothing)


def build_loss(args: Parsed, student: nn.Module, train: Any, val: Any) -> nn.Module:
    """Return the loss of `build_criterion`, in a `Distillation` for training with `--teacher`; UserError for a misfit.

    `student` is the bare model on its device; the classes' names are those of the validation set `val`.
    """
    criterion = build_criterion(args, train, student)
    if args.optimization.teacher is None or args.checkpoint.test_only:
        return criterion
    from models.teacher import distil

    return distil(args, student, criterion, list(val.classes))


def build_criterion(args: Parsed, train: Any = None, model: nn.Module | None = None) -> nn.Module:
    """Return the loss of the options; `--class-weights` weighs the classes of `train`. UserError if it is none.

    A loss of the user's own is tried on outputs of the `model`, which may be tuples that begin with the scores.
    """
    name = args.optimization.criterion or ("bce" if args.optimization.bce_loss else "cross_entropy")
    build = load_function("criterion", name)
    # One's own has no options of ours, and weighs classes by itself.
    if split_custom(name):
        from models.own_loss import build_own

        criterion = build_own(args, build, 0 if train is None else len(train.classes), model)
    else:
        weight = None
        if args.optimization.class_weights and train is not None:
            from models.class_weights import class_weights

            weight = class_weights(args.optimization, args.distributed.device, train)
        options = {option: getattr(args.optimization, option) for option in LOSSES[name].options}
        criterion = build(**options, weight=weight)
    if args.model.model not in AUXILIARY_WEIGHTS:
        return criterion
    from models.auxiliary_loss import AuxiliaryLoss

    return AuxiliaryLoss(criterion, AUXILIARY_WEIGHTS[args.model.model])
