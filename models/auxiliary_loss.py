"""The loss of models with auxiliary classifiers: GoogLeNet and Inception v3."""

import torch
from torch import Tensor, nn


class AuxiliaryLoss(nn.Module):
    """Add the losses of auxiliary classifiers, whose scores GoogLeNet and Inception v3 return after the main ones.

    `criterion` is the loss of one classifier, and `weight` that of each auxiliary one's loss.
    """

    def __init__(self, criterion: nn.Module, weight: float) -> None:
        super().__init__()
        self.criterion = criterion
        self.weight = weight

    def forward(self, output: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
        """Return the loss of (B, num_classes) scores, or of a tuple of main and auxiliary scores."""
        if isinstance(output, Tensor):  # in evaluation
            return self.criterion(output, target)
        main, *auxiliary = output
        losses = [self.criterion(scores, target) for scores in auxiliary if scores is not None]
        return self.criterion(main, target) + self.weight * torch.stack(losses).sum()
