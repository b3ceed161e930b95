"""Losses beside the cross-entropy: binary ones and the focal loss, which `settings.choices` names."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.losses import soften


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
        self.label_smoothing = label_smoothing
        self.target_threshold = bce_target_thresh
        self.weight = weight

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over images and classes of (B, num_classes) logits, for (B,) classes or soft targets."""
        output, target = soften(output, target, self.label_smoothing)
        if self.target_threshold is not None:
            target = target.gt(self.target_threshold).to(output.dtype)
        # Unweighted in evaluation, so that losses of runs with other weights can be compared.
        weight = self.weight if torch.is_grad_enabled() else None
        return F.binary_cross_entropy_with_logits(output, target, pos_weight=weight)


class FocalLoss(nn.Module):
    """The focal loss of the softmax (Lin et al., arXiv 1708.02002): each term of the cross-entropy times (1 - p)^gamma.

    p is the probability of the term's class, so that images which are classified well count less. Targets may be soft,
    and are smoothed first. Terms may be weighted by their classes in training. The result is the mean over images.
    """

    def __init__(self, label_smoothing: float = 0.0, focal_gamma: float = 2.0, weight: Tensor | None = None) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.focal_gamma = focal_gamma
        self.weight = weight

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over images of (B, num_classes) scores and (B,) classes or (B, num_classes) soft targets."""
        output, target = soften(output, target, self.label_smoothing)
        log_probability = output.log_softmax(dim=1)
        # 1 - p by expm1, which keeps its digits where p is nearly 1. A power below 1 has no slope at zero, where an
        # image is certain: hence the smallest normal number.
        doubt = torch.expm1(log_probability).neg().clamp(min=torch.finfo(log_probability.dtype).tiny)
        terms = -target * doubt.pow(self.focal_gamma) * log_probability
        if self.weight is not None and torch.is_grad_enabled():  # as in `BinaryCrossEntropy`
            terms = terms * self.weight
        return terms.sum(dim=1).mean()
