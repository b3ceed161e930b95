"""A model with BatchNorm for runs in a Python of their own, which then imports no timm: `--model FILE:plain`."""

from torch import nn


def plain(num_classes: int) -> nn.Module:
    """Build a model of five layers."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, stride=4, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, num_classes),
    )
