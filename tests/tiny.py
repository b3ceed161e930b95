"""A model with layers of each kind that a run can go wrong in: runs of it cost half of those of timm's smallest.

Registered with timm, it is `timm/tiny_test` in every process that has imported this module: those that run tests, and
the ranks that they fork.
"""

import timm
from timm.layers import DropPath
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn


class Block(nn.Module):
    """A residual branch, which may be left out."""

    def __init__(self, drop_path_rate: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.drop_path = DropPath(drop_path_rate)

    def forward(self, image: Tensor) -> Tensor:
        return image + self.drop_path(self.bn(self.conv(image)).relu())


class Tiny(nn.Module):
    """A stem, blocks, dropout and a classifier."""

    def __init__(
        self,
        num_classes: int = 1000,
        in_chans: int = 3,
        depth: int = 1,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.conv1 = nn.Conv2d(in_chans, 8, 4, stride=4, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(*(Block(drop_path_rate) for _ in range(depth)))
        self.dropout = nn.Dropout(drop_rate)
        self.fc = nn.Linear(8, num_classes)

    def get_classifier(self) -> nn.Module:
        return self.fc

    def forward(self, image: Tensor) -> Tensor:
        features = self.blocks(self.bn1(self.conv1(image)).relu())
        return self.fc(self.dropout(features.mean(dim=(2, 3))))


# As that of timm's test_resnet: the mean and deviation are not ImageNet's.
default_cfgs = generate_default_cfgs({
    "tiny_test.untrained": {
        "input_size": (3, 160, 160), "pool_size": (40, 40), "crop_pct": 0.95, "interpolation": "bicubic",
        "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "num_classes": 1000, "first_conv": "conv1",
        "classifier": "fc",
    },
})  # fmt: skip


@register_model
def tiny_test(pretrained: bool = False, **options) -> nn.Module:
    return build_model_with_cfg(Tiny, "tiny_test", pretrained, **options)


assert "tiny_test" in timm.list_models()
