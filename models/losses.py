"""Losses: by name, weighted by class, of auxiliary classifiers, and of the user's own."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from models.classifier import AUXILIARY_WEIGHTS
from settings.choices import LOSSES
from settings.custom_code import load_function
from settings.options import split_custom
from transforms import one_hot


def soften(output: Tensor, target: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Return scores and their soft targets, smoothed, in float32 at least.

    Not in the dtype of autocast, which rounds 0.2005 to 0.2, no longer above a threshold of 0.2.
    """
    output = output.to(torch.promote_types(output.dtype, torch.float32))
    target = one_hot(target, output.size(1)) if target.ndim == 1 else target
    return output, target.to(output.dtype) * (1.0 - label_smoothing) + label_smoothing / output.size(1)


class BinaryCrossEntropy(nn.Module):
    """One binary decision for each class (Wightman et al., ResNet strikes back, arXiv 2110.00476).

    Args:
        label_smoothing: the share of the target that is spread over all classes.
        bce_target_thresh: targets above it become 1, others 0; None leaves targets as they are.
        weight: (num_classes,) factors of the terms of positive targets in training, torch's `pos_weight`, or None.
    """

    def __init__(
        self, label_smoothing: float = 0.0, bce_target_thresh: float | None = None, weight: Tensor | None = None
    ) -> None:
        super().__init__()
        self.label_smoothing, self.target_threshold, self.weight = label_smoothing, bce_target_thresh, weight

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over images and classes of (B, num_classes) logits, for (B,) classes or soft targets."""
        output, target = soften(output, target, self.label_smoothing)
        if self.target_threshold is not None:
            target = target.gt(self.target_threshold).to(output.dtype)
        weight = self.weight if torch.is_grad_enabled() else None  # losses of evaluations are comparable
        return F.binary_cross_entropy_with_logits(output, target, pos_weight=weight)


class CrossEntropy(nn.Module):
    """Cross-entropy, whose terms may be weighted by their classes in training.

    A weighted one is the mean over images, as torch's for targets that are probabilities, whose sum over a set does not
    depend on how the set is cut into batches; torch's for class indices divides by the sum of a batch's weights.
    """

    def __init__(self, label_smoothing: float = 0.0, weight: Tensor | None = None) -> None:
        super().__init__()
        self.label_smoothing, self.weight = label_smoothing, weight

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over images of (B, num_classes) scores and (B,) classes or (B, num_classes) soft targets."""
        weight = self.weight if torch.is_grad_enabled() else None  # losses of evaluations are comparable
        if target.ndim == 1 and weight is not None:
            output, target = soften(output, target, 0.0)
        return F.cross_entropy(output, target, weight, label_smoothing=self.label_smoothing)


class FocalLoss(nn.Module):
    """The focal loss of the softmax (Lin et al., arXiv 1708.02002): each term of the cross-entropy times (1 - p)^gamma.

    p is the probability of the term's class, so that images which are classified well count less. Targets may be soft,
    and are smoothed first. Terms may be weighted by their classes in training. The result is the mean over images.
    """

    def __init__(self, label_smoothing: float = 0.0, focal_gamma: float = 2.0, weight: Tensor | None = None) -> None:
        super().__init__()
        self.label_smoothing, self.focal_gamma, self.weight = label_smoothing, focal_gamma, weight

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over images of (B, num_classes) scores and (B,) classes or (B, num_classes) soft targets."""
        output, target = soften(output, target, self.label_smoothing)
        log_probability = output.log_softmax(dim=1)
        # A power below 1 has no slope at zero, where an image is certain.
        doubt = torch.expm1(log_probability).neg().clamp(min=torch.finfo(log_probability.dtype).tiny)
        terms = -target * doubt.pow(self.focal_gamma) * log_probability
        if self.weight is not None and torch.is_grad_enabled():  # losses of evaluations are comparable
            terms = terms * self.weight
        return terms.sum(dim=1).mean()


class AuxiliaryLoss(nn.Module):
    """Add the losses of auxiliary classifiers, whose scores GoogLeNet and Inception v3 return after the main ones.

    `criterion` is the loss of one classifier, and `weight` that of each auxiliary one's loss.
    """

    def __init__(self, criterion: nn.Module, weight: float) -> None:
        super().__init__()
        self.criterion, self.weight = criterion, weight

    def forward(self, output: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
        """Return the loss of (B, num_classes) scores, or of a tuple of main and auxiliary scores."""
        if isinstance(output, Tensor):  # in evaluation
            return self.criterion(output, target)
        main, *auxiliary = output
        losses = [self.criterion(scores, target) for scores in auxiliary if scores is not None]
        return self.criterion(main, target) + self.weight * torch.stack(losses).sum()


def build_loss(args: Any, student: nn.Module, train: Dataset | None, val: Dataset) -> nn.Module:
    """Return the loss of `build_criterion`, in a `Distillation` for training with `--teacher`; UserError for a misfit.

    `student` is the bare model on its device; the classes' names are those of the validation set `val`.
    """
    criterion = build_criterion(args, train, student)
    if args.teacher is None or args.test_only:
        return criterion
    from models.teacher import distil

    return distil(args, student, criterion, list(val.classes))


def build_criterion(args: Any, train: Dataset | None = None, model: nn.Module | None = None) -> nn.Module:
    """Return the loss of the options; `--class-weights` weighs the classes of `train`. UserError if it is none.

    A loss of the user's own is tried on outputs of the `model`, which may be tuples that begin with the scores.
    """
    name = args.criterion or ("bce" if args.bce_loss else "cross_entropy")
    build = load_function("criterion", args, name)
    if split_custom(name):
        from models.own_loss import build_own

        criterion = build_own(args, build, 0 if train is None else len(train.classes), model)
    else:
        weight = None
        if args.class_weights and train is not None:
            from models.class_weights import class_weights

            weight = class_weights(args, train)
        criterion = build(**{option: getattr(args, option) for option in LOSSES[name].options}, weight=weight)
    weight = AUXILIARY_WEIGHTS.get(args.model)
    return criterion if weight is None else AuxiliaryLoss(criterion, weight)
