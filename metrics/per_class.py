"""Metrics that count for each class: F1, and the accuracy in which each class counts as much."""

from typing import ClassVar

import numpy
from torch import Tensor

from loading.on_device import one_hot
from metrics import Metric
from settings.choices import curves_of


class _PerClass(Metric):
    """A metric of each class's numbers of true predictions, of predictions, and of labels.

    Predicted is the class of the highest score; with several labels an image each class whose score is above 0, that
    is, whose probability is above a half.
    """

    def __init__(self, num_classes: int, *, is_multi_label: bool = False) -> None:
        self.num_classes = num_classes
        self.num_sums = 3 * num_classes
        self.is_multi_label = is_multi_label

    def batch_sums(self, output: Tensor | tuple[Tensor, ...], target: Tensor, index: Tensor | None) -> list[Tensor]:
        """Return the three numbers of each class."""
        if not isinstance(output, Tensor):
            output = output[0]
        if self.is_multi_label:
            predicted = output > 0
            of_class = target > 0.5
        else:
            if target.ndim == 2:
                target = target.argmax(dim=1)
            predicted = one_hot(output.argmax(dim=1), self.num_classes)
            of_class = one_hot(target, self.num_classes)
        # Numbers of images and no shares of a batch: numbers alone add up over batches and processes.
        return [each.sum(dim=0) for each in (predicted & of_class, predicted, of_class)]


class BalancedAccuracy(_PerClass):
    """The mean over classes of the percentage of their images that are hit: `balanced_acc`; each class counts as much.

    `never_right` is the number of classes with images of which none is hit.
    """

    curves: ClassVar = curves_of("metrics.per_class:BalancedAccuracy")

    def compute(self, sums: list[float], count: int) -> dict[str, float]:
        """Return the mean over the classes that have images."""
        hits, _, labels = numpy.reshape(sums, (3, -1))
        shares = hits[labels > 0] / labels[labels > 0]
        # Where no class has an image the mean is 0, and not a division by 0.
        return {"balanced_acc": 100 * float(shares.sum()) / max(len(shares), 1), "never_right": int(sum(shares == 0))}


class F1(_PerClass):
    """F1, in percent: `f1`, the mean over the classes that occur in truth or predictions; `f1_micro`, of all sums."""

    curves: ClassVar = curves_of("metrics.per_class:F1")

    def compute(self, sums: list[float], count: int) -> dict[str, float]:
        """Return both means."""
        hits, predicted, labels = numpy.reshape(sums, (3, -1))
        # As 2 TP / (2 TP + FP + FN): precision itself would divide by zero for a class that is never predicted.
        both = predicted + labels
        each = 200 * hits[both > 0] / both[both > 0]
        return {"f1": float(each.sum()) / max(len(each), 1), "f1_micro": 200 * float(hits.sum()) / max(both.sum(), 1)}
