"""The metrics that training lines and evaluations show."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from distributed.collectives import all_gather, has_streams, interleave
from errors import UserError, as_user_error
from settings.choices import CURVES, METRICS, Curve, curves_of
from settings.custom_code import load_function
from settings.rules import split_custom
from settings.stages import Parsed


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
        if not isinstance(output, Tensor):
            output = output[0]
        if target.ndim == 2:
            target = target.argmax(dim=1)
        num_classes = output.size(1)
        # As torchvision's `accuracy`, but that raises for a k above the number of classes.
        ranked = output.topk(min(max(topk), num_classes), dim=1).indices
        hits = ranked.eq(target[:, None])
        return [hits[:, : min(k, num_classes)].sum() for k in topk]


def copy_to_host(tensor: Tensor) -> Tensor:
    """Begin to copy a tensor to the host, and return the copy, which may be read after a later `CopyMark.wait`.

    Where nothing runs beside the host, the tensor itself is returned.
    """
    # torch puts such a copy into pinned memory where the device has it; into other memory it would wait.
    return tensor.to("cpu", non_blocking=True) if has_streams(tensor.device) else tensor


class CopyMark:
    """The point that a device's present stream has been told to reach: all copies begun before are there by then."""

    def __init__(self, device: torch.device) -> None:
        self._event = None
        if has_streams(device):
            self._event = torch.get_device_module(device).current_stream(device).record_event()

    def wait(self) -> None:
        """Wait for the device to reach the point; what it was given later, it still has to do."""
        if self._event is not None:
            self._event.synchronize()


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

    def compute(self, sums: list[float], count: int) -> Mapping[str, float | list[float]]:
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

    curves: ClassVar = curves_of("metrics:Loss")

    def compute(self, sums: list[float], count: int) -> dict[str, float]:
        """Return the mean over all images."""
        return {"loss": sums[0] / count}


class Accuracy(Metric):
    """The percentage of images whose target is among the k highest scores, for each k: `acc1`, `acc5`."""

    curves: ClassVar = curves_of("metrics:Accuracy")

    def __init__(self, topk: tuple[int, ...] = (1, 5)) -> None:
        self.topk = topk
        self.num_sums = len(topk)

    def batch_sums(self, output: Tensor | tuple[Tensor, ...], target: Tensor, index: Tensor | None) -> list[Tensor]:
        """Return the number of hits for each k."""
        return count_correct(output, target, self.topk)

    def compute(self, sums: list[float], count: int) -> dict[str, float]:
        """Return the percentage for each k."""
        return {f"acc{k}": 100 * hits / count for k, hits in zip(self.topk, sums, strict=True)}


def build_metrics(args: Parsed, num_classes: int) -> list[Metric]:
    """Return the metrics other than the loss, for training lines and evaluations, of a model with that many classes.

    UserError if a function of the user's own returns none, or `--best-metric` names none of them.
    """
    names = args.monitoring.metrics or []
    if args.data.multi_label:  # an image has no one class that could be right
        metrics = [METRICS["f1"].load()(num_classes, is_multi_label=True), METRICS["map"].load()(num_classes)]
    else:
        metrics = [Accuracy((1, 5) if num_classes > 5 else (1,))]
        # f1 and f1_micro are of one class, which is built once.
        builders = dict.fromkeys(METRICS[name].load() for name in names if not split_custom(name))
        metrics += [build(num_classes) for build in builders]
    for name in names:
        if not split_custom(name):
            continue
        from metrics.own import check_metric, example_targets

        with as_user_error(f"--metrics {name}"):
            metric = load_function("metrics", name)(num_classes)
            taken = {"loss"}.union(*(each.curves for each in metrics))
            targets = example_targets(args.augmentation, args.data.multi_label, num_classes)
            check_metric(metric, num_classes, targets, taken)
            metric.key = split_custom(name)[1]
            # By this table pages and charts find titles, and `--best-metric` the direction in which a value is better.
            CURVES.update(metric.curves)
            metrics.append(metric)
    known = ["loss", *(name for metric in metrics for name in metric.curves)]
    # Before training: that no evaluation gives the value would show after the first epoch, perhaps hours later.
    if args.checkpoint.best_metric not in known and not args.checkpoint.test_only:
        raise UserError(
            f"--best-metric {args.checkpoint.best_metric} is not among --metrics; there are {', '.join(known)}"
        )
    return metrics


class Tally:
    """Sums of a loss and of metrics, exact, and in one order however many processes there are.

    Each batch's numbers stay on the device until a value is read. The processes then gather and add them in float64, in
    the order of (step, micro-batch), or of the batches in an evaluation. So the values have the same bits at any world
    size and, since a checkpoint holds the sums, after any restart.

    `update` takes a batch, and `begin_read` begins to copy those so far to the host. `read_local` gives this process's
    values between two gatherings, without the others. `synchronize_between_processes` gathers the batches, or `add`
    takes them from a tally that has. `means` gives the values over all that is gathered, and `compute_and_reset` too,
    and begins anew.

    Args:
        metrics: the metrics other than the loss.
        num_local_shards: number of batches that this process adds per step; 1 in an evaluation.
    """

    def __init__(self, metrics: Iterable[Metric], num_local_shards: int = 1) -> None:
        self.metrics = [Loss(), *metrics]
        self.num_local_shards = num_local_shards
        self._width = sum(metric.num_sums for metric in self.metrics) + 1  # the last column is the number of images
        self.unread = []  # of each batch: number of images, mean loss, and the sums of the metrics on the device
        self._begun = []  # on their way to the host: images of each batch, the other columns, and a mark behind these
        self._local = []  # read but not gathered yet: (batches, width) each
        # Hits are whole numbers, exact in float64 up to 2**53; losses are rounded in it, so their order is fixed.
        self._sums = torch.zeros(self._width, dtype=torch.float64)

    def update(self, loss: Tensor, output: Tensor | tuple[Tensor, ...], target: Tensor, index: Tensor | None) -> None:
        """Add a batch without waiting for the device: its mean loss, and the arguments of `Metric.batch_sums`."""
        with torch.inference_mode():
            sums = [each for metric in self.metrics[1:] for each in metric.batch_sums(output, target, index)]
        # A value that is read (.item()) makes the host wait for the step, and the device then waits for the host.
        self.unread.append((len(target), loss.detach(), *sums))

    def begin_read(self) -> None:
        """Begin to copy the batches since the last call to the host, and wait for nothing."""
        if self.unread:
            numbers, *columns = zip(*self.unread, strict=True)
            device = columns[0][0].device
            # One copy from the device for each column, and not for each batch.
            copies = [copy_to_host(torch.stack(column)) for column in columns]
            self._begun.append((numbers, copies, CopyMark(device)))
            self.unread = []

    def _read(self) -> Tensor:
        """Return (batches, width) float64: the sums of the batches whose copies have begun; wait for these."""
        rows = [torch.zeros(0, self._width, dtype=torch.float64)]
        for numbers, copies, mark in self._begun:
            mark.wait()
            counts = torch.tensor(numbers, dtype=torch.float64)[:, None]
            # float64 on the CPU, which some devices lack.
            losses, *sums = (column.cpu().double().view(len(counts), -1) for column in copies)
            # Batches may differ in size, so the mean of their mean losses would be no mean over images.
            rows.append(torch.cat([losses * counts, *sums, counts], dim=1))
        self._begun = []
        return torch.cat(rows)

    def _compute(self, sums: Tensor) -> tuple[dict[str, Any], int]:
        """Return the values by name of (width,) sums, and the number of images."""
        *numbers, count = sums.tolist()
        rest = iter(numbers)
        values = {}
        for metric in self.metrics:
            # A rank may have no batch of a small set, and its own line must not divide by zero.
            values |= metric.compute(list(itertools.islice(rest, metric.num_sums)), max(int(count), 1))
        return values, int(count)

    def read_local(self) -> tuple[dict[str, Any], int, dict[str, Any]]:
        """Return the values of this process's batches since the last call, the number of images, and all values so far.

        Those are of all batches since the processes last gathered theirs.
        """
        # Rows are kept, not their sum: the processes still have to add all batches in one order.
        self.begin_read()
        rows = self._read()
        self._local.append(rows)
        values, count = self._compute(rows.sum(dim=0))
        return values, count, self._compute(torch.cat(self._local).sum(dim=0))[0]

    def synchronize_between_processes(self, *, is_begun: bool = False) -> Tensor:
        """Add up the batches since the last call. Collective: every rank must call it.

        Args:
            is_begun: only those whose copies have begun, beside the steps that follow.

        Returns:
            (batches, width) float64: the sums of each batch of all processes in order; loss first, image count last.
        """
        if not is_begun:
            self.begin_read()
        rows = torch.cat([*self._local, self._read()])
        self._local = []
        # Rows and not each process's sum: which batches a process has depends on the number of processes.
        # Beside steps no decision has said that all ranks are there: patience would wait a day for one that hangs.
        rows = interleave(all_gather(rows, is_patient=not is_begun), self.num_local_shards)
        self.add(rows)
        return rows

    def add(self, rows: Tensor) -> None:
        """Add the rows of batches that this tally, or another one with the same metrics, has gathered."""
        for row in rows:  # one after the other: torch would sum in another order, and so to other bits
            self._sums += row

    def means(self) -> dict[str, Any]:
        """Return the values that `compute_and_reset` would return now, or none if there are no images."""
        if not self._sums[-1]:
            return {}
        return self._compute(self._sums)[0]

    def compute_and_reset(self) -> tuple[dict[str, Any], int]:
        """Return the values by name over the batches gathered since the last call, and the number of images."""
        result = self._compute(self._sums)
        self._sums = torch.zeros(self._width, dtype=torch.float64)
        return result

    def state_dict(self) -> dict:
        """Return the sums, and which metrics they are of; all batches must have been gathered."""
        return {"sums": self._sums.tolist(), "metrics": self._keys()}

    def _keys(self) -> list[str]:
        return [f"{metric.key or type(metric).__name__} {metric.num_sums}" for metric in self.metrics]

    def load_state_dict(self, state: dict) -> None:
        """Restore the sums, or begin anew if those of the checkpoint are of other metrics."""
        # Checkpoints of the first versions do not say which metrics their sums are of.
        are_ours = state.get("metrics") in (None, self._keys())
        if len(state["sums"]) == self._width and are_ours:
            self._sums = torch.tensor(state["sums"], dtype=torch.float64)
        else:
            print("the checkpoint's record is of other metrics; the next one counts from here on")


def result_line(values: dict[str, Any], n: int) -> str:
    """Return the line of an evaluation's result: all scalar values, and the number of images."""
    # In the order of torchvision's line: Acc@1, Acc@5, and what else there is after them.
    titles = {"acc1": "Acc@1", "acc5": "Acc@5"}
    ordered = {name: values[name] for name in (*titles, "loss") if name in values} | values
    words = []
    for name, value in ordered.items():
        title = titles.get(name, name)
        if isinstance(value, float):
            words.append(f"{title} {value:.3f}")
        elif isinstance(value, int):
            words.append(f"{title} {value}")
    return " ".join([*words, f"n={n}"])


def check_count(n: int, data_loader: Any) -> list[str]:
    """Return a line if a plain loader has not given each image once, as in torchvision; RuntimeError for ours."""
    dataset = getattr(data_loader, "dataset", None)
    # A plain loader may read from a stream, of which nobody knows the length.
    if not hasattr(dataset, "__len__") or n == len(dataset):
        return []
    # torchvision warns of it. Our own sampler gives each image once, so there it can only be a bug, and a wrong result.
    line = f"evaluated {n} images of a set of {len(dataset)}: the sampler leaves out or repeats some"
    if hasattr(data_loader, "numbers"):
        raise RuntimeError(line)
    return [line]


def image_numbers(data_loader: Any) -> Iterator[Tensor | None]:
    """Return an iterator over the (B,) image numbers of each batch, or over None if the loader has no numbers."""
    numbers = getattr(data_loader, "numbers", None)
    if numbers is None:
        return itertools.repeat(None)
    return numbers()
