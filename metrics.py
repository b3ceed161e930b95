"""The metrics that training lines and evaluations show."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor

from distributed.collectives import all_gather, interleave
from errors import UserError, in_one_line
from settings.choices import CURVES, METRICS, Curve, curves_of
from settings.custom_code import load_function
from settings.options import split_custom
from transforms import one_hot


def example_targets(args: Any, num_classes: int) -> list[Tensor]:
    """Return the targets of some images, in each form that losses and metrics are given in this run."""
    size = 3 if num_classes == 2 else 2  # no shape fits by chance
    classes, shares = torch.zeros(size, dtype=torch.int64), torch.zeros(size, num_classes)
    if args.multi_label:
        return [shares]
    return [classes, shares] if args.mixup_alpha or args.cutmix_alpha else [classes]


def count_correct(output: Tensor | tuple[Tensor, ...], target: Tensor, topk: tuple[int, ...] = (1,)) -> list[Tensor]:
    """Count the images whose target is among the k highest scores, for each k.

    Args:
        output: (B, num_classes) scores, or a tuple that begins with them, as models with auxiliary classifiers return.
        target: (B,) class indices, or (B, num_classes) soft targets, of which the highest counts.
        topk: each k; one above the number of classes counts as that number.

    Returns:
        A list of 0-d int64 tensors on the device, none of which is waited for.
    """
    with torch.inference_mode():
        output = output if isinstance(output, Tensor) else output[0]
        if target.ndim == 2:
            target = target.argmax(dim=1)
        num_classes = output.size(1)
        ranked = output.topk(min(max(topk), num_classes), dim=1).indices
        hits = ranked.eq(target[:, None])
        return [hits[:, : min(k, num_classes)].sum() for k in topk]


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
    output = output if isinstance(output, Tensor) else output[0]
    if not output.is_cuda:  # other accelerators may have no float64
        output, target = output.cpu(), target.cpu()
    output = output.double()
    order = output.argsort(dim=1, descending=True, stable=True)
    log_probability = output.log_softmax(dim=1)
    place = order.eq(target[:, None]).int().argmax(dim=1, keepdim=True)
    best = order[:, :k]
    probability = log_probability.gather(1, best).exp()
    return torch.cat([place, -log_probability.gather(1, target[:, None]), best, probability], dim=1)


# Names of fields of records that no metric may have.
RESERVED = {"kind", "step", "epoch", "images", "n", "lr", "hours", "time", "grad_norm", "weight_norm", "world_size"}


class Metric:
    """A metric computed from sums over images; or from all images of an evaluation, which `observe` then keeps."""

    curves: ClassVar[dict[str, Curve]]  # by name; other values of `compute` are logged too
    num_sums = 1
    key = ""  # the function that made one of the user's own

    def batch_sums(self, output: Tensor | tuple[Tensor, ...], target: Tensor, index: Tensor | None) -> list[Tensor]:
        """Return the sums over a batch without waiting for the device: () tensors for one each, (n,) for n of them.

        Args:
            output: (B, num_classes) scores, or a tuple that begins with them.
            target: (B,) class indices or (B, num_classes) soft targets.
            index: (B,) the images' numbers in the set, on the CPU; None with a plain loader, which has none.
        """
        return []

    def compute(self, sums: list[float], count: int) -> dict[str, float | list[float]]:
        """Return values by name. Logs take any name.

        Args:
            sums: the `num_sums` sums over all images.
            count: the number of these images, or 1 if there are none.
        """
        return {}

    def observe(self, output: Tensor | tuple[Tensor, ...], target: Tensor, index: Tensor | None) -> None:
        """Take a batch of an evaluation; arguments as `batch_sums`. By default nothing is kept."""

    def gather(self) -> dict[str, float]:
        """Return values by name of all batches since the last call. Collective: every rank must call it."""
        return {}


class Loss(Metric):
    """The mean loss per image: `loss`. `Tally` forms its sum from the mean losses of batches."""

    curves: ClassVar = curves_of("Loss")

    def compute(self, sums: list[float], count: int) -> dict[str, float]:
        """Return the mean over all images."""
        return {"loss": sums[0] / count}


class Accuracy(Metric):
    """The percentage of images whose target is among the k highest scores, for each k: `acc1`, `acc5`."""

    curves: ClassVar = curves_of("Accuracy")

    def __init__(self, topk: tuple[int, ...] = (1, 5)) -> None:
        self.topk, self.num_sums = topk, len(topk)

    def batch_sums(self, output: Tensor | tuple[Tensor, ...], target: Tensor, index: Tensor | None) -> list[Tensor]:
        """Return the number of hits for each k."""
        return count_correct(output, target, self.topk)

    def compute(self, sums: list[float], count: int) -> dict[str, float]:
        """Return the percentage for each k."""
        return {f"acc{k}": 100 * hits / count for k, hits in zip(self.topk, sums, strict=True)}


class _PerClass(Metric):
    """A metric of each class's numbers of true predictions, of predictions, and of labels.

    Predicted is the class of the highest score; with several labels an image each class whose score is above 0, that
    is, whose probability is above a half.
    """

    def __init__(self, num_classes: int, *, is_multi_label: bool = False) -> None:
        self.num_classes, self.num_sums, self.is_multi_label = num_classes, 3 * num_classes, is_multi_label

    def batch_sums(self, output: Tensor | tuple[Tensor, ...], target: Tensor, index: Tensor | None) -> list[Tensor]:
        """Return the three numbers of each class."""
        output = output if isinstance(output, Tensor) else output[0]
        if self.is_multi_label:
            predicted, of_class = output > 0, target > 0.5
        else:
            target = target.argmax(dim=1) if target.ndim == 2 else target
            predicted, of_class = (one_hot(each, self.num_classes) for each in (output.argmax(dim=1), target))
        return [each.sum(dim=0) for each in (predicted & of_class, predicted, of_class)]


class BalancedAccuracy(_PerClass):
    """The mean over classes of the percentage of their images that are hit: `balanced_acc`; each class counts as much.

    `never_right` is the number of classes with images of which none is hit.
    """

    curves: ClassVar = curves_of("BalancedAccuracy")

    def compute(self, sums: list[float], count: int) -> dict[str, float]:
        """Return the mean over the classes that have images."""
        hits, _, labels = numpy.reshape(sums, (3, -1))
        shares = hits[labels > 0] / labels[labels > 0]
        return {"balanced_acc": 100 * float(shares.sum()) / max(len(shares), 1), "never_right": int(sum(shares == 0))}


class F1(_PerClass):
    """F1, in percent: `f1`, the mean over the classes that occur in truth or predictions; `f1_micro`, of all sums."""

    curves: ClassVar = curves_of("F1")

    def compute(self, sums: list[float], count: int) -> dict[str, float]:
        """Return both means."""
        hits, predicted, labels = numpy.reshape(sums, (3, -1))
        both = predicted + labels
        each = 200 * hits[both > 0] / both[both > 0]
        return {"f1": float(each.sum()) / max(len(each), 1), "f1_micro": 200 * float(hits.sum()) / max(both.sum(), 1)}


def average_precision(scores: numpy.ndarray, is_positive: numpy.ndarray) -> float:
    """Return the area under precision over recall, as steps: the mean precision at each positive; ties count as one.

    Args:
        scores: (N,) of one class.
        is_positive: (N,) bool, with at least one True.
    """
    order = numpy.argsort(-scores, kind="stable")
    ends = numpy.flatnonzero(numpy.append(scores[order][1:] != scores[order][:-1], True))  # the last of each score
    hits = numpy.cumsum(is_positive[order])[ends]
    gains = numpy.diff(hits, prepend=0)
    return float((gains * hits / (ends + 1)).sum() / hits[-1])


class MeanAveragePrecision(Metric):
    """The mean of `average_precision` over the classes that have images, in percent: `map`, in evaluations alone."""

    curves: ClassVar = curves_of("MeanAveragePrecision")
    num_sums = 0

    def __init__(self, num_classes: int) -> None:
        self.num_classes, self._rows = num_classes, []

    def observe(self, output: Tensor | tuple[Tensor, ...], target: Tensor, index: Tensor | None) -> None:
        """Keep the scores and the (B, num_classes) targets of a batch."""
        output = output if isinstance(output, Tensor) else output[0]
        self._rows.append(torch.cat([output.float(), target.float()], dim=1))

    def gather(self) -> dict[str, float]:
        """Return the mean over all images since the last call. Collective."""
        rows = torch.cat(self._rows).cpu() if self._rows else torch.zeros(0, 2 * self.num_classes)
        scores, targets = torch.cat(all_gather(rows)).numpy().T.reshape(2, self.num_classes, -1)
        self._rows = []
        if numpy.isnan(scores).any():  # which have no order
            return {"map": math.nan}
        pairs = zip(scores, targets > 0.5, strict=True)
        each = [average_precision(row, is_positive) for row, is_positive in pairs if is_positive.any()]
        return {"map": 100 * sum(each) / max(len(each), 1)}


def build_metrics(args: Any, num_classes: int) -> list[Metric]:
    """Return the metrics other than the loss, for training lines and evaluations, of a model with that many classes.

    UserError if a function of the user's own returns none, or `--best-metric` names none of them.
    """
    builders = dict.fromkeys(METRICS[name].load() for name in args.metrics or () if not split_custom(name))
    metrics = [Accuracy((1, 5) if num_classes > 5 else (1,)), *(build(num_classes) for build in builders)]
    if args.multi_label:
        metrics = [F1(num_classes, is_multi_label=True), MeanAveragePrecision(num_classes)]
    for name in filter(split_custom, args.metrics or ()):
        with in_one_line(f"--metrics {name}"):
            metric = load_function("metrics", args, name)(num_classes)
            taken = {"loss"}.union(*(each.curves for each in metrics))
            _check_metric(metric, num_classes, example_targets(args, num_classes), taken)
            metric.key = split_custom(name)[1]
            CURVES.update(metric.curves)
            metrics.append(metric)
    known = ["loss", *(name for metric in metrics for name in metric.curves)]
    if args.best_metric not in known and not args.test_only:
        raise UserError(f"--best-metric {args.best_metric} is not among --metrics; there are {', '.join(known)}")
    return metrics


def _check_metric(metric: Any, num_classes: int, targets: list[Tensor], taken: set[str]) -> None:
    """Refuse a metric of the user's own whose sums of some images are not as it says, or whose names others have."""
    if not isinstance(metric, Metric):
        raise UserError(f"returned {metric!r:.80}; expected a metrics.Metric")
    if both := metric.curves.keys() & (taken | RESERVED):
        raise UserError(f"its curve {min(both)} has a name that is taken; give it another")
    for target in targets:
        numbers = torch.arange(len(target))
        batch = 20.0 * one_hot(numbers % num_classes, num_classes), target, numbers  # sure of a class
        with in_one_line(f"targets of shape {tuple(target.shape)}"):
            sums, twice = (metric.batch_sums(*(torch.cat([each] * copies) for each in batch)) for copies in (1, 2))
        if not all(isinstance(each, Tensor) for each in sums):
            raise UserError("batch_sums returns no list of tensors; leave .item() out, which waits for the device")
        if (number := sum(each.numel() for each in sums)) != metric.num_sums:
            raise UserError(f"batch_sums returns {number} sums, and its num_sums is {metric.num_sums}; give num_sums")
        if not all(torch.allclose(2.0 * one, 1.0 * two) for one, two in zip(sums, twice, strict=True)):
            raise UserError("batch_sums of a batch twice over are not twice its own: return sums, and keep no state")
    values = metric.compute([float(each) for part in sums for each in part.flatten()], len(target))
    metric.observe(*batch)
    values |= metric.gather()
    pairs = [(each, name) for name, value in values.items() for each in (value if type(value) is list else [value])]
    if bad := [f"{type(each).__name__} as {name}" for each, name in pairs if type(each) not in (int, float)]:
        raise UserError(f"compute returns a {bad[0]}; expected a float")
    if lacking := metric.curves.keys() - values.keys():
        raise UserError(f"compute returns no {min(lacking)}, which curves names")


class Tally:
    """Sums of a loss and of metrics, exact, and in one order however many processes there are.

    Each batch's numbers stay on the device until a value is read. The processes then gather and add them in float64, in
    the order of (step, micro-batch), or of the batches in an evaluation. So the values have the same bits at any world
    size and, since a checkpoint holds the sums, after any restart.

    Args:
        metrics: the metrics other than the loss.
        num_local_shards: number of batches that this process adds per step; 1 in an evaluation.
    """

    def __init__(self, metrics: Iterable[Metric], num_local_shards: int = 1) -> None:
        self.metrics = [Loss(), *metrics]
        self.num_local_shards = num_local_shards
        self._width = sum(metric.num_sums for metric in self.metrics) + 1  # the last column is the number of images
        self.unread = []  # of each batch: number of images, mean loss, and the sums of the metrics on the device
        self._local = []  # read but not gathered yet: (batches, width) each
        self._sums = torch.zeros(self._width, dtype=torch.float64)

    def update(self, loss: Tensor, output: Tensor | tuple[Tensor, ...], target: Tensor, index: Tensor | None) -> None:
        """Add a batch without waiting for the device: its mean loss, and the arguments of `Metric.batch_sums`."""
        with torch.inference_mode():
            sums = [each for metric in self.metrics[1:] for each in metric.batch_sums(output, target, index)]
        self.unread.append((len(target), loss.detach(), *sums))

    def _read(self) -> Tensor:
        """Return (batches, width) float64: the sums of each batch since the last call; wait for the device."""
        if not self.unread:
            return torch.zeros(0, self._width, dtype=torch.float64)
        counts, *columns = zip(*self.unread, strict=True)
        counts = torch.tensor(counts, dtype=torch.float64)[:, None]
        losses, *sums = (torch.stack(column).cpu().double().view(len(counts), -1) for column in columns)
        self.unread = []
        return torch.cat([losses * counts, *sums, counts], dim=1)

    def _compute(self, sums: Tensor) -> tuple[dict[str, Any], int]:
        *sums, count = sums.tolist()
        values, rest = {}, iter(sums)
        for metric in self.metrics:
            values |= metric.compute(list(itertools.islice(rest, metric.num_sums)), max(int(count), 1))
        return values, int(count)

    def read_local(self) -> tuple[dict[str, Any], int, dict[str, Any]]:
        """Return the values of this process's batches since the last call, the number of images, and all values so far.

        Those are of all batches since the processes last gathered theirs.
        """
        self._local.append(self._read())
        return *self._compute(self._local[-1].sum(dim=0)), self._compute(torch.cat(self._local).sum(dim=0))[0]

    def synchronize_between_processes(self) -> Tensor:
        """Add up the batches since the last call. Collective: every rank must call it.

        Returns:
            (batches, width) float64: the sums of each batch of all processes in order; loss first, image count last.
        """
        rows = torch.cat([*self._local, self._read()])
        self._local = []
        rows = interleave(all_gather(rows), self.num_local_shards)
        self.add(rows)
        return rows

    def add(self, rows: Tensor) -> None:
        """Add the rows of batches that this tally, or another one with the same metrics, has gathered."""
        for row in rows:  # one after the other: torch would sum in another order
            self._sums += row

    def peek(self) -> tuple[dict[str, Any], int]:
        """Return what `compute_and_reset` would return now; no values if there are no images."""
        return self._compute(self._sums) if self._sums[-1] else ({}, 0)

    def compute_and_reset(self) -> tuple[dict[str, Any], int]:
        """Return the values by name over the batches gathered since the last call, and the number of images."""
        values = self._compute(self._sums)
        self._sums = torch.zeros(self._width, dtype=torch.float64)
        return values

    def state_dict(self) -> dict:
        """Return the sums, and which metrics they are of; all batches must have been gathered."""
        return {"sums": self._sums.tolist(), "metrics": self._keys()}

    def _keys(self) -> list[str]:
        return [f"{metric.key or type(metric).__name__} {metric.num_sums}" for metric in self.metrics]

    def load_state_dict(self, state: dict) -> None:
        """Restore the sums, or begin anew if those of the checkpoint are of other metrics."""
        if len(state["sums"]) == self._width and state.get("metrics") in (None, self._keys()):
            self._sums = torch.tensor(state["sums"], dtype=torch.float64)
        else:
            print("the checkpoint's record is of other metrics; the next one counts from here on")


def result_line(values: dict[str, Any], n: int) -> str:
    """Return the line of an evaluation's result: all scalar values, and the number of images."""
    titles = {"acc1": "Acc@1", "acc5": "Acc@5"}
    ordered = {name: values[name] for name in (*titles, "loss") if name in values} | values
    shown = {titles.get(name, name): value for name, value in ordered.items() if isinstance(value, float | int)}
    words = [f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in shown.items()]
    return " ".join([*words, f"n={n}"])


def check_count(n: int, data_loader: Any) -> list[str]:
    """Return a line if a plain loader has not given each image once, as in torchvision; RuntimeError for ours."""
    dataset = getattr(data_loader, "dataset", None)
    if not hasattr(dataset, "__len__") or n == len(dataset):
        return []
    line = f"evaluated {n} images of a set of {len(dataset)}: the sampler leaves out or repeats some"
    if hasattr(data_loader, "numbers"):
        raise RuntimeError(line)
    return [line]


def image_numbers(data_loader: Any) -> Iterator[Tensor | None]:
    """Return an iterator over the (B,) image numbers of each batch, or over None if the loader has no numbers."""
    numbers = getattr(data_loader, "numbers", None)
    return itertools.repeat(None) if numbers is None else numbers()
