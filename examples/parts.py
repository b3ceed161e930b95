"""A part of one's own for each option that takes FILE.py:FUNCTION; docs/extending.md says what each is given.

python train.py --model examples/parts.py:net --opt examples/parts.py:Signs --criterion examples/parts.py:focal \
    --auto-augment examples/parts.py:quarters --lr-scheduler examples/parts.py:sawtooth \
    --metrics examples/parts.py:Surest --best-metric surest --data-path examples/parts.py:Stripes \
    --logger tensorboard examples/parts.py:Lines --lr 0.01 --epochs 3 --batch-size 4
"""

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from loading.source import Source
from metrics import Curve, Metric


def net(num_classes: int, width: int = 16) -> nn.Module:
    """Return a model; `width` is of --model-kwargs width=8."""
    layers = [nn.Conv2d(3, width, 3, stride=2), nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


class Signs(torch.optim.Optimizer):
    """An optimizer that moves each weight by its rate against the sign of its gradient."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move the weights; each group has the rate of the schedule."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(p.grad.sign(), alpha=group["lr"])


def focal() -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss: (output, target) to the mean of a batch."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        each = F.cross_entropy(output, target, reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()

    return loss


def quarters() -> Callable[[Image.Image], Image.Image]:
    """Return an augmentation: quarter turns, drawn from a generator that is seeded for each image."""
    return lambda image: image.rotate(90 * random.randrange(4))


def sawtooth(epoch: float, epochs: float) -> float:
    """Return the factor of --lr."""
    return 1 - epoch % 10 / 10


class Surest(Metric):
    """A metric: the percentage of images that the model gets right and is sure of."""

    curves = {"surest": Curve(title="hits of which it is sure, %")}  # noqa: RUF012  # is_lower_better=True for an error
    num_sums = 1  # how many numbers batch_sums returns

    def __init__(self, num_classes: int) -> None:
        pass

    def batch_sums(self, output: Any, target: Tensor, index: Any) -> list[Tensor]:
        """Return the sums of a batch, which are added over batches and processes."""
        share, best = output.softmax(1).max(1)
        return [((best == target) & (share > 0.9)).sum()]

    def compute(self, sums: Any, count: int) -> dict[str, float]:
        """Return the value of each curve from the sums of `count` images."""
        return {"surest": 100 * sums[0] / count}


class Lines:
    """A logger that writes a line for each record into lines.txt."""

    def __init__(self, folder: Path, metadata: dict[str, Any]) -> None:
        self.file = (folder / "lines.txt").open("a")

    def write(self, record: dict[str, Any]) -> None:
        """Write a record of metrics.jsonl."""
        print(record["kind"], record["step"], record.get("loss"), file=self.file, flush=True)

    def close(self) -> None:
        """End, with the run."""
        self.file.close()


class Stripes(Source):
    """A data set of made-up images, 16 to train on and 8 to evaluate."""

    form, classes = "stripes", ["across", "along"]

    def __init__(self, split: str) -> None:
        super().__init__(Path(split))
        self.split = split

    def __len__(self) -> int:
        return 16 if self.split == "train" else 8

    def label(self, number: int) -> int:
        """Return the class of an image."""
        return number % 2

    def name(self, number: int) -> str:
        """Return the name of an image."""
        return f"{self.classes[number % 2]}/{number}.png"

    def read(self, number: int) -> bytes:
        """Return the bytes of an image's file."""
        file = io.BytesIO()
        Image.linear_gradient("L").resize((40, 40)).rotate(90 * (number % 2)).save(file, "PNG")
        return file.getvalue()
