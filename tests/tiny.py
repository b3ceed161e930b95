"""The tests' model, with layers of each kind that a run can go wrong in: it costs half of timm's smallest.

tests/started.py registers it as `timm/tiny_test`; without timm it is `--model tests/tiny.py:Tiny`.
"""

import os

from torch import nn
from torchvision.ops import StochasticDepth


class Block(nn.Module):
    def __init__(self, drop_path_rate):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.drop_path = StochasticDepth(drop_path_rate, "row")

    def forward(self, image):
        return image + self.drop_path(self.bn(self.conv(image)).relu())


class Tiny(nn.Module):
    def __init__(self, num_classes=1000, in_chans=3, depth=1, drop_rate=0.0, drop_path_rate=0.0):
        super().__init__()
        self.num_classes = num_classes
        self.conv1 = nn.Conv2d(in_chans, 8, 4, stride=4, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(*(Block(drop_path_rate) for _ in range(depth)))
        self.dropout = nn.Dropout(drop_rate)
        self.fc = nn.Linear(8, num_classes)

    def get_classifier(self):
        return self.fc

    def forward(self, image):
        features = self.blocks(self.bn1(self.conv1(image)).relu())
        return self.fc(self.dropout(features.mean(dim=(2, 3))))


RISE = 0.0004


def rise_by_threads():
    """Return a loss that each further thread raises by `RISE`: on some processors threads alone move none."""
    factor = 1 + RISE * (int(os.environ["OMP_NUM_THREADS"]) - 1)
    return lambda output, target: factor * nn.functional.cross_entropy(output, target)
