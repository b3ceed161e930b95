"""Measure the training beside its metrics: time, norms, rates and memory."""

import resource
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distributed.collectives import has_streams
from metrics import copy_to_host


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory that this process has used: the accelerator's if it counts that, else its own."""
    module = torch.get_device_module(device)
    if hasattr(module, "max_memory_allocated"):
        return module.max_memory_allocated() / 2**30
    # On Linux `getrusage` also counts the process that started this one: 1.96 GB for 1.2 under a large parent.
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []  # macOS has no such file
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30  # macOS counts bytes


class Clock:
    """Counts the steps of a run, their seconds, and those of waiting for data; it does not read the device."""

    def __init__(self) -> None:
        self._totals = [0, 0.0, 0.0]  # steps, seconds of training, of these waiting for data
        self._seen = {}  # the totals at each reader's last call
        self.start_epoch()

    def start_epoch(self) -> None:
        """Leave out the time since the last step: that between two epochs does not count."""
        self._mark_s, self._waited_s = time.perf_counter(), 0.0

    def count(self, waited_s: float) -> None:
        """Count a step; `waited_s` is the time that the epoch has waited for data so far."""
        self._totals[0] += 1
        self._totals[2] += waited_s - self._waited_s
        self._waited_s = waited_s

    def since(self, reader: str) -> tuple[int, float, float]:
        """Return the steps, their seconds, and those of waiting for data since the reader's last call."""
        # Read now and not at the last step, since the host may have waited for the device in between.
        now_s = time.perf_counter()
        self._totals[1] += now_s - self._mark_s
        self._mark_s = now_s
        before = self._seen.get(reader, (0, 0.0, 0.0))
        # Each reader has a mark of its own: a line, a record and an epoch end at different steps.
        self._seen[reader] = tuple(self._totals)
        return tuple(now - then for now, then in zip(self._totals, before, strict=True))


def moment(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> Any:
    """Return this moment: an event in the queue of a device that has streams, else the time by the host's clock."""
    if not has_streams(device):
        return clock()
    module = torch.get_device_module(device)
    event = module.Event(enable_timing=True)
    event.record(module.current_stream(device))
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Return the seconds between two moments; the device must have reached the second."""
    if isinstance(begin, float):
        return end - begin
    return begin.elapsed_time(end) / 1000  # from ms


class Stopwatch:
    """Counts a rank's seconds of passes forward and backward, without those in which DDP waits for other ranks.

    By events of the device, if it has streams, and else by the host's clock. It never waits for the device.

    Args:
        device: where the passes are computed.
        waiter: the model of passes that may end with a wait for other ranks, or None.
    """

    def __init__(self, device: torch.device, waiter: nn.Module | None) -> None:
        self.device = device
        self._passes: deque[tuple] = deque()  # their beginnings and ends, those of the device not yet read
        self._end: Any = None
        self._total_s = 0.0
        trained = [] if waiter is None else [each for each in waiter.parameters() if each.requires_grad]
        # DDP waits at the end of the backward pass, in a callback that its last bucket puts into autograd's queue: what
        # a gradient's hook puts there is done before. One parameter's hook is enough, of the last layer, as the last
        # bucket is later or the same; each one's would cost the host a microsecond.
        for last in trained[-1:]:
            last.register_post_accumulate_grad_hook(self._queue_end)

    def _queue_end(self, _: Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._note_end)

    def _note_end(self) -> None:
        self._end = moment(self.device)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the passes forward and backward inside."""
        begin = moment(self.device)
        self._end = None
        yield
        self._passes.append((begin, self._end or moment(self.device)))

    def count(self) -> float:
        """Return the seconds so far, up to the last pass that the device is known to have done."""
        while self._passes:
            begin, end = self._passes[0]
            if not isinstance(end, float) and not end.query():
                break
            self._total_s += seconds_between(begin, end)
            self._passes.popleft()
        return self._total_s

    def restart(self) -> float:
        """Return the seconds since the last restart."""
        total_s = self.count()
        self._total_s = 0.0
        return total_s


def slow_rank(computing_s: Sequence[float]) -> str:
    """Tell which rank computes longest, if it takes 10 % and a second longer than the median; else return nothing."""
    # Below a second, an epoch of a trial, ten per cent are the noise of a busy machine.
    median_s, most_s = statistics.median(computing_s), max(computing_s)
    if most_s < max(1.1 * median_s, median_s + 1):
        return ""
    rank, more = list(computing_s).index(most_s), f"{most_s / median_s - 1:.0%}" if median_s else "much"
    return f"rank {rank} computes {more} longer than the median: {most_s:.1f} s for {median_s:.1f} s"


class Gauges:
    """The fields of a training record beside the metrics; `parts` holds the run's model, optimizer and scaler."""

    def __init__(self, global_batch_size: int, world_size: int, parts: dict[str, Any], device: torch.device) -> None:
        self.parameters = list(parts["model"].parameters())
        self.scaler = parts.get("scaler")
        self.groups = parts["optimizer"].optimizer.param_groups
        self.world_size = world_size
        self.global_batch_size = global_batch_size
        self.one = torch.ones((), device=device)

    def read(self, grad_norm: Tensor) -> dict[str, float | Tensor]:
        """Return learning rates and norms after a step; the latter are copies on their way: see `copy_to_host`."""
        rates = {f"lr/{group['name']}": group["lr"] for group in self.groups if "name" in group}
        with torch.no_grad():
            norms = {"grad_norm": grad_norm, "weight_norm": nn.utils.get_total_norm(self.parameters)}
            # `get_scale` would wait for the device; a scaled one stays on it.
            scale = {} if self.scaler is None else {"loss_scale": self.scaler.scale(self.one)}
        copies = {name: copy_to_host(value) for name, value in (norms | scale).items()}
        return {"lr": max(group["lr"] for group in self.groups), **rates, **copies}

    def rates(self, steps: int, train_s: float, wait_s: float) -> dict[str, float]:
        """Return the speed of `steps` steps and their use of the machine."""
        speed, waiting = steps * self.global_batch_size / train_s, wait_s / train_s
        memory_gib = peak_memory_gib(self.one.device)
        return {"images_per_s": speed, "data_wait": waiting, "memory_gib": memory_gib, "world_size": self.world_size}
