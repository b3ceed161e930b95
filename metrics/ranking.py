"""Numbers from the order of scores: the places of the classes of an image, and average precision."""

import math
from typing import ClassVar

import numpy
import torch
from torch import Tensor

from distributed.collectives import all_gather
from metrics import Metric
from settings.choices import curves_of


def rank_classes(output: Tensor | tuple[Tensor, ...], target: Tensor, k: int) -> Tensor:
    """Return for each image the float64 numbers that a report of an evaluation needs; this does not wait for a GPU.

    Args:
        output: (B, num_classes) scores, or a tuple that begins with them.
        target: (B,) class indices on the same device.
        k: number of best classes.

    Returns:
        (B, 2 + 2k): the target's place among the classes, from 0; the negative logarithm of its probability; the k best
        classes; their probabilities. Classes with equal scores rank by their numbers.
    """
    if not isinstance(output, Tensor):
        output = output[0]
    if not output.is_cuda:  # other accelerators may have no float64
        output, target = output.cpu(), target.cpu()
    output = output.double()
    # `topk` says nothing about the order of equal scores; a stable sort gives the same places on every device.
    order = output.argsort(dim=1, descending=True, stable=True)
    log_probability = output.log_softmax(dim=1)
    place = order.eq(target[:, None]).int().argmax(dim=1, keepdim=True)
    best = order[:, :k]
    probability = log_probability.gather(1, best).exp()
    return torch.cat([place, -log_probability.gather(1, target[:, None]), best, probability], dim=1)


def average_precision(scores: numpy.ndarray, is_positive: numpy.ndarray) -> float:
    """Return the area under precision over recall, as steps: the mean precision at each positive; ties count as one.

    Args:
        scores: (N,) of one class.
        is_positive: (N,) bool, with at least one True.
    """
    order = numpy.argsort(-scores, kind="stable")
    # Equal scores are one step of the curve, or the result would depend on the order of the images.
    ends = numpy.flatnonzero(numpy.append(scores[order][1:] != scores[order][:-1], True))  # the last of each score
    hits = numpy.cumsum(is_positive[order])[ends]
    gains = numpy.diff(hits, prepend=0)
    return float((gains * hits / (ends + 1)).sum() / hits[-1])


class MeanAveragePrecision(Metric):
    """The mean of `average_precision` over the classes that have images, in percent: `map`, in evaluations alone."""

    curves: ClassVar = curves_of("metrics.ranking:MeanAveragePrecision")
    num_sums = 0  # of sums over batches it cannot be made: it needs the order of all scores of a class

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self._rows = []

    def observe(self, output: Tensor | tuple[Tensor, ...], target: Tensor, index: Tensor | None) -> None:
        """Keep the scores and the (B, num_classes) targets of a batch."""
        if not isinstance(output, Tensor):
            output = output[0]
        # Left on the device: a copy to the host in each batch would make the host wait for the batch.
        self._rows.append(torch.cat([output.float(), target.float()], dim=1))

    def gather(self) -> dict[str, float]:
        """Return the mean over all images since the last call. Collective."""
        # A process may have no batch of a small set, and still takes part.
        rows = torch.cat(self._rows).cpu() if self._rows else torch.zeros(0, 2 * self.num_classes)
        # Each process holds all of them: 50,000 images x 1,000 classes x 2 numbers x 4 bytes = 400 MB.
        scores, targets = torch.cat(all_gather(rows)).numpy().T.reshape(2, self.num_classes, -1)
        self._rows = []
        if numpy.isnan(scores).any():  # which have no order
            return {"map": math.nan}
        pairs = zip(scores, targets > 0.5, strict=True)
        each = [average_precision(row, is_positive) for row, is_positive in pairs if is_positive.any()]
        return {"map": 100 * sum(each) / max(len(each), 1)}
