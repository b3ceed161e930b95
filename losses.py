"""Losses: from (output, target) to the mean loss of a batch."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Weight of an auxiliary classifier's loss, beside the main one's 1: GoogLeNet (Szegedy et al., arXiv 1409.4842,
# section 5) and Inception v3 (the weight in PyTorch's own fine-tuning tutorial).
AUXILIARY_WEIGHTS = {"googlenet": 0.3, "inception_v3": 0.4}


def one_hot(target: Tensor, num_classes: int) -> Tensor:
    """Return (B, num_classes) bool of (B,) class indices. Torch's own reads the classes on a CPU, to check them."""
    return target[:, None] == torch.arange(num_classes, device=target.device)


class BinaryCrossEntropy(nn.Module):
    """One binary decision for each class (Wightman et al., ResNet strikes back, arXiv 2110.00476).

    Args:
        label_smoothing: taken off the target and spread over all classes.
        target_threshold: a class whose target is above it counts as fully there; None leaves targets as they are.
    """

    def __init__(self, label_smoothing: float = 0.0, target_threshold: float | None = None) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.target_threshold = target_threshold

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over images and classes.

        Args:
            output: (B, num_classes) logits.
            target: (B,) class indices or (B, num_classes) soft targets.
        """
        num_classes = output.size(1)
        if target.ndim == 1:
            target = one_hot(target, num_classes)
        target = target.to(output.dtype) * (1.0 - self.label_smoothing) + self.label_smoothing / num_classes
        if self.target_threshold is not None:
            target = target.gt(self.target_threshold).to(output.dtype)
        return F.binary_cross_entropy_with_logits(output, target)


class AuxiliaryLoss(nn.Module):
    """Add the losses of auxiliary classifiers, which GoogLeNet and Inception v3 return beside the main one's output.

    Args:
        criterion: of one classifier.
        weight: of each auxiliary one.
    """

    def __init__(self, criterion: nn.Module, weight: float) -> None:
        super().__init__()
        self.criterion = criterion
        self.weight = weight

    def forward(self, output: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
        """Return the loss of an output, or of a tuple that begins with the main one."""
        if isinstance(output, Tensor):  # in evaluation
            return self.criterion(output, target)
        main, *auxiliary = output
        losses = [self.criterion(scores, target) for scores in auxiliary if scores is not None]
        return self.criterion(main, target) + self.weight * torch.stack(losses).sum()


def build_criterion(args: Any) -> nn.Module:
    """Return the loss that the options ask for."""
    if args.bce_loss:
        criterion = BinaryCrossEntropy(args.label_smoothing, args.bce_target_thresh)
    else:
        criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    weight = AUXILIARY_WEIGHTS.get(args.model)
    return criterion if weight is None else AuxiliaryLoss(criterion, weight)
