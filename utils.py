"""torchvision's names for processes and meters, for people's own scripts and train.py."""

import datetime
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed import collectives
from distributed.collectives import (
    get_rank,
    get_world_size,
    is_dist_avail_and_initialized,
    is_main_process,
    setup_for_distributed,
)
from metrics import count_correct
from models.optim import set_weight_decay
from settings.options import DistributedOptions

__all__ = [
    "ExponentialMovingAverage", "MetricLogger", "SmoothedValue", "accuracy", "average_checkpoints", "get_rank",  # noqa: F822
    "get_world_size", "init_distributed_mode", "is_dist_avail_and_initialized", "is_main_process", "mkdir",
    "reduce_across_processes", "save_on_master", "set_weight_decay", "setup_for_distributed", "store_model_weights",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # A run without --model-ema imports no average.
    if name == "ExponentialMovingAverage":
        from models.ema import ExponentialMovingAverage

        return ExponentialMovingAverage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class SmoothedValue:
    """Track a series of values: the last few of them, and the mean over all.

    A device tensor is kept as it is and read on demand, because reading it makes the host wait for the device.

    Args:
        window_size: number of last values for `value`, `median`, `avg` and `max`.
        fmt: format of `str()`; may name median, avg, global_avg, max and value.
    """

    def __init__(self, window_size: int = 20, fmt: str | None = None) -> None:
        self.fmt = fmt or "{median:.4f} ({global_avg:.4f})"
        self._window = deque(maxlen=window_size)
        self._unread = []  # (value, n, so_far) each
        self._total = 0.0
        self._count = 0

    def update(self, value: float | Tensor, n: int = 1, *, so_far: float | None = None) -> None:
        """Add the mean of `n` samples; `so_far` is the value over all samples, if it is no mean of theirs."""
        if isinstance(value, Tensor):
            # Of its graph, which would keep the activations of the step in memory until the value is read.
            value = value.detach()
        self._unread.append((value, n, so_far))

    def _read(self) -> None:
        for value, n, so_far in self._unread:
            number = float(value)
            self._window.append(number)
            self._count += n
            if so_far is None:
                self._total += number * n
            else:
                self._total = so_far * self._count
        self._unread.clear()

    def synchronize_between_processes(self) -> None:
        """Make `total`, `count` and `global_avg` those of all processes. Collective: every rank must call it."""
        # The window stays this process's own, of which torchvision's docstring warns too.
        self._total, count = reduce_across_processes([self.total, self.count]).tolist()
        self._count = int(count)

    @property
    def deque(self) -> deque:
        """The last `window_size` values."""
        self._read()
        return self._window

    @property
    def total(self) -> float:
        """The sum over all samples, in float64."""
        self._read()
        return self._total

    @property
    def count(self) -> int:
        """The number of samples."""
        self._read()
        return self._count

    @property
    def median(self) -> float:
        """The (lower) median of the window."""
        return torch.tensor(list(self.deque), dtype=torch.float64).median().item() if self.deque else 0.0

    @property
    def avg(self) -> float:
        """The mean of the window."""
        return sum(self.deque) / len(self.deque) if self.deque else 0.0

    @property
    def global_avg(self) -> float:
        """The mean over all samples."""
        return self.total / self.count if self.count else 0.0

    @property
    def max(self) -> float:
        """The largest value of the window."""
        return max(self.deque, default=0.0)

    @property
    def value(self) -> float:
        """The last value."""
        return self.deque[-1] if self.deque else 0.0

    def __str__(self) -> str:
        names = ("median", "avg", "global_avg", "max", "value")
        # Only those that the format names: a window may hold thousands of values, whose median takes long.
        return self.fmt.format(**{name: getattr(self, name) for name in names if "{" + name in self.fmt})


class SizedIterable(Sized, Iterable, Protocol):
    """What a loop can go over, and knows the length of, such as a loader or a range."""


class MetricLogger:
    """A set of named meters, and a loop that prints them.

    Args:
        delimiter: the text between two meters.
        formats: `fmt` of a `SmoothedValue`, by the meter's name.
        is_share: whether the meters cover this process's share alone; another line gives the result of all.
    """

    def __init__(
        self, delimiter: str = "\t", formats: Mapping[str, str] | None = None, *, is_share: bool = False
    ) -> None:
        self.meters = defaultdict(SmoothedValue)
        self.delimiter = delimiter
        self.formats = formats or {}
        self.is_share = is_share
        self.wait_s = 0.0  # total time that the loop has waited for data
        self.is_line_due = False  # a line will be printed after the present item
        self.is_line_held = False  # or rather by `print_line`, since its values are still on their way
        # To be printed: the fields before those of the meters, and those after them.
        self._line: tuple[list[str], list[str]] | None = None

    def update(self, **values: float | Tensor) -> None:
        """Add one value to each of the named meters."""
        self.show(values)

    def show(self, values: Mapping[str, Any], n: int = 1, so_far: Mapping[str, Any] | None = None) -> None:
        """Add values of `n` samples to the meters of their names; leave out lists, which need too much room.

        `so_far` holds the values over all samples of those that are no means of samples.
        """
        so_far = so_far or {}
        for name, value in values.items():
            if isinstance(value, float | int | Tensor):
                if name not in self.meters:
                    self.add_meter(name, SmoothedValue(fmt=self.formats.get(name)))
                self.meters[name].update(value, n, so_far=so_far.get(name))

    def __getattr__(self, name: str) -> SmoothedValue:
        # By `__dict__`: a copy or an unpickled logger asks before it has `meters`, and would ask for ever.
        if name in self.__dict__.get("meters", {}):
            return self.meters[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __str__(self) -> str:
        return self.delimiter.join(f"{name}: {meter}" for name, meter in self.meters.items())

    def synchronize_between_processes(self) -> None:
        """Make every meter's totals those of all processes. Collective: every rank must call it."""
        for meter in self.meters.values():
            meter.synchronize_between_processes()

    def add_meter(self, name: str, meter: SmoothedValue) -> None:
        """Show `meter` under `name`."""
        self.meters[name] = meter

    def timed(self, iterable: Iterable) -> Iterator:
        """Yield from `iterable`, and count the time spent waiting for it."""
        iterator = iter(iterable)
        end = object()  # which no iterable yields
        while True:
            start = time.perf_counter()
            item = next(iterator, end)
            self.wait_s += time.perf_counter() - start
            if item is end:
                return
            yield item

    def print_line(self) -> None:
        """Print the line that was held, whose values the meters have now; hold none."""
        self.is_line_held = False
        if self._line is not None:  # or the item whose values these are is still worked on
            (before, after), self._line = self._line, None
            print(self.delimiter.join([*before, *([str(self)] if self.meters else []), *after]))

    def log_every(
        self, iterable: SizedIterable, print_freq: int, header: str | None = None, start: int = 0
    ) -> Iterator:
        """Yield from a sized `iterable` and print the meters after every `print_freq`-th item and the last.

        Args:
            iterable: any iterable with a length.
            print_freq: items between two lines.
            header: begins each line.
            start: number of the first item, in a resumed epoch.
        """
        header = label = header or ""
        if self.is_share and get_world_size() > 1:
            label = f"{header} (rank {get_rank()} of {get_world_size()})"
        num_items = start + len(iterable)
        width = len(str(num_items))
        iter_time, data_time = SmoothedValue(fmt="{avg:.4f}"), SmoothedValue(fmt="{avg:.4f}")
        begin = end = time.perf_counter()
        # Not the time of `iterable` alone: train.py goes over steps here, and takes its batches from another `timed`.
        waited = self.wait_s
        for index, item in enumerate(self.timed(iterable), start):
            # Known before the item is worked on, so that the loop reads the device only for a line.
            self.is_line_due = index % print_freq == 0 or index == num_items - 1
            yield item
            data_time.update(self.wait_s - waited)
            iter_time.update(time.perf_counter() - end)
            if self.is_line_due:
                eta = datetime.timedelta(seconds=int(iter_time.global_avg * (num_items - 1 - index)))
                before = [label, f"[{index:{width}d}/{num_items}]", f"eta: {eta}"]
                after = [f"time: {iter_time}", f"data: {data_time}"]
                if torch.cuda.is_available():
                    after.append(f"max mem: {torch.cuda.max_memory_allocated() / 2**20:.0f}")
                self._line = before, after
                if not self.is_line_held:
                    self.print_line()
            end, waited = time.perf_counter(), self.wait_s
        print(f"{header} Total time: {datetime.timedelta(seconds=int(time.perf_counter() - begin))}")


def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...] = (1,)) -> list[Tensor]:
    """Return the percentage of images whose target is among the k highest scores, for each k; see `count_correct`."""
    return [hits * (100.0 / target.size(0)) for hits in count_correct(output, target, topk)]


def save_on_master(*args: Any, **kwargs: Any) -> None:
    """Call `torch.save` on rank 0. A kill may tear the file; the run's own checkpoints are written atomically."""
    if is_main_process():
        torch.save(*args, **kwargs)


def reduce_across_processes(value: Any) -> Tensor:
    """Sum a number, a list of numbers or a tensor over all processes; the sum is on the device of the value.

    Integers are summed as int64 and floats as float64, where torchvision rounds both to float32.
    Collective: every rank must call it.
    """
    dtype = torch.float64 if torch.as_tensor(value).is_floating_point() else torch.int64
    # A copy, because the sum is written into it.
    total = torch.as_tensor(value, dtype=dtype).detach().clone()
    if is_dist_avail_and_initialized():
        dist.barrier(collectives.world_group())
        dist.all_reduce(total, group=collectives.world_group())
    return total


def init_distributed_mode(args: Any) -> None:
    """Join the processes that a launcher started; set `args.rank`, `world_size`, `gpu`, `distributed`, `dist_backend`.

    It is for people's own scripts, whose `args` may hold world_size, dist_url, device and dist_timeout; `main` resolves
    its options first. Collective: every rank must call it.
    """
    args.device = getattr(args, "device", None) or collectives.find_accelerator() or "cpu"
    args.dist_url = getattr(args, "dist_url", "env://")
    launch = collectives.read_rank(getattr(args, "world_size", 1), args.dist_url)
    args.rank = launch.rank
    args.world_size = launch.world_size
    args.distributed = launch.is_launched
    args.gpu = collectives.choose_gpu(launch, args.device)
    args.dist_backend = collectives.choose_backend(args.device)
    setup_for_distributed(args.rank == 0)
    # 30 minutes, as --dist-timeout has them: torch's own limits are 30 for gloo, and 10 for NCCL.
    place = DistributedOptions(
        device=args.device, world_size=args.world_size, dist_url=args.dist_url, rank=args.rank, gpu=args.gpu,
        is_launched=args.distributed, dist_timeout=getattr(args, "dist_timeout", 30),
    )  # fmt: skip
    collectives.join_processes(place, getattr(args, "stall_timeout", 0.0))


def mkdir(path: str | os.PathLike) -> None:
    """Make a folder and its parents if they are missing."""
    os.makedirs(path, exist_ok=True)


def average_checkpoints(inputs: Iterable[str | Path]) -> dict[str, Any]:
    """Return what `checkpointing.averaging.average_checkpoints` does."""
    from checkpointing import averaging

    return averaging.average_checkpoints(inputs)


def store_model_weights(
    model: nn.Module, checkpoint_path: str | Path, checkpoint_key: str = "model", strict: bool = True
) -> str:
    """Do what `checkpointing.averaging.store_model_weights` does."""
    from checkpointing import averaging

    return averaging.store_model_weights(model, checkpoint_path, checkpoint_key, strict)
