"""Find the bottleneck of a run from the times of each step on all processes, and the setting to change first."""

import time
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distributed import collectives

# Steps at the start of an epoch that do not count, since loaders start and kernels are chosen; the fewest steps and
# seconds for an answer; and how many of the last steps are kept.
NUM_FIRST, LEAST_STEPS, LEAST_S, MOST_STEPS = 3, 20, 1.0, 5000

# Smallest shares of the time that make a part the limit. Only computing ought to have a large share.
LIMITS = {"data": 0.25, "communication": 0.25, "slowest": 0.2, "compute": 0.75}

# The names of the first fields of `Shares` in metrics.jsonl.
RECORDED = ("data_share", "compute_share", "communication_share", "slowest_share", "slowest_rank")


class StepClock:
    """Counts steps, and times the parts of each on this process without reading the device.

    The wait for other processes is the communication that the backward pass does not hide: the time from the gradient
    of the first parameter, which is computed last, to the end of the backward pass. On a GPU two events per step mark
    this time; they are read when a line is due.
    """

    def __init__(self, model: nn.Module, device: torch.device, world_size: int) -> None:
        self.is_cuda = device.type == "cuda"
        self._computed = None
        self._totals = [0, 0.0, 0.0]  # steps, seconds of training, of these waiting for data
        self._seen = {}  # the totals that each reader has seen
        self.start_epoch()
        if world_size > 1:
            first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
            first.register_post_accumulate_grad_hook(self._note_gradient)

    def start_epoch(self) -> None:
        """Forget the earlier steps; the time between two epochs does not count."""
        self.steps = deque(maxlen=MOST_STEPS)  # seconds of each: in all, waiting for data, waiting for other processes
        self._unread = []  # (step, two events)
        self._mark_s, self._waited_s = time.perf_counter(), 0.0

    def begin(self) -> None:
        """Begin a step."""
        self._begin_s, self._pair, self._wait_s = time.perf_counter(), None, 0.0

    def _note_gradient(self, _: Tensor) -> None:
        self._computed = self._mark()

    def _mark(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end_backward(self) -> None:
        """End the backward pass of a micro-batch; only the last one of a step waits for other processes."""
        if self._computed is not None:
            self._pair = self._computed, self._mark()

    def agreed(self, since_s: float) -> None:
        """Count the time since `since_s`, in which the hosts waited for each other; a GPU computes meanwhile."""
        if not self.is_cuda:
            self._wait_s += time.perf_counter() - since_s

    def count(self, waited_s: float) -> None:
        """Count a step; `waited_s` is the time that the epoch has waited for data so far."""
        self._data_s, self._waited_s = waited_s - self._waited_s, waited_s
        self._totals[0] += 1
        self._totals[2] += self._data_s

    def since(self, reader: str) -> tuple[int, float, float]:
        """Return the steps, their seconds, and those of waiting for data since the reader's last call."""
        now_s = time.perf_counter()  # the host may have waited for the device since the last step
        self._totals[1] += now_s - self._mark_s
        self._mark_s = now_s
        before, self._seen[reader] = self._seen.get(reader, (0, 0.0, 0.0)), tuple(self._totals)
        return tuple(now - then for now, then in zip(self._totals, before, strict=True))

    def end(self, *, is_read: bool) -> None:
        """End a step; `is_read` tells that the host has just read from the device: all its events have occurred."""
        step = [time.perf_counter() - self._begin_s, self._data_s, self._wait_s]
        self.steps.append(step)
        if self._pair is not None:
            self._unread.append((step, *self._pair))
        if is_read or not self.is_cuda:
            for step, start, end in self._unread:
                step[2] += start.elapsed_time(end) / 1000 if self.is_cuda else end - start
            self._unread.clear()

    def gather(self) -> Tensor:
        """Return (processes, steps, 3): seconds of each, as in `steps`, without the first ones. Collective."""
        rows = torch.tensor(list(self.steps)[NUM_FIRST:], dtype=torch.float64).reshape(-1, 3)
        return torch.stack(collectives.all_gather(rows))


class Shares(NamedTuple):
    """Shares of the time of some steps, with a sum of 1, and the slowest process."""

    data: float
    compute: float
    communication: float
    slowest: float
    rank: int
    step_s: float

    def limit(self) -> str | None:
        """Return the name of the share that limits the run, or None where nothing stands out."""
        excess = {name: getattr(self, name) / limit for name, limit in LIMITS.items() if name != "compute"}
        name = max(excess, key=excess.get)
        if excess[name] >= 1:
            return name
        return "compute" if self.compute >= LIMITS["compute"] else None


def find_shares(steps: Tensor) -> Shares | None:
    """Return the shares of the time of steps, as of `StepClock.gather`; None if they are too few or too short to tell.

    All processes wait for the last one of each step, which itself waits for its data and the communication alone. Any
    further wait of the others is that process's lateness. The slowest process's share is its lateness beyond the mean
    of the others; lateness that goes round counts as computing.
    """
    world_size, num_steps = steps.shape[:2]
    total_s, data, wait = steps.unbind(dim=2)
    step_s = float(total_s.mean())
    if num_steps < LEAST_STEPS or step_s * num_steps < LEAST_S:
        return None
    last = wait.argmin(dim=0)
    data_s, wait_s = (values.gather(0, last[None])[0] for values in (data, wait))
    slowest_s, rank = 0.0, 0
    if world_size > 1:
        is_other = torch.arange(world_size) != last[:, None]
        others_data, others_wait = (
            values.T[is_other].view(num_steps, -1).median(dim=1).values for values in (data, wait)
        )
        late = (others_wait - wait_s - (data_s - others_data).clamp(min=0)).clamp(min=0)
        sums = torch.bincount(last, late, world_size)
        rank = int(sums.argmax())
        slowest_s = float(sums[rank] - (sums.sum() - sums[rank]) / (world_size - 1))
    all_s = step_s * num_steps
    communication_s = float(wait_s.sum()) if world_size > 1 else 0.0
    data_share, communication, slowest = float(data_s.sum()) / all_s, communication_s / all_s, slowest_s / all_s
    compute = max(1 - data_share - communication - slowest, 0.0)
    return Shares(data_share, compute, communication, slowest, rank, step_s)


# The first thing to change, by the limit.
_ADVICE = {
    "data": "more --workers, a faster disk or smaller files",
    "communication": "a larger --batch-size",
    "slowest": "another machine for that rank, or look for other jobs on it",
    "compute": "--amp, --channels-last, --compile, or more processes",
}


def describe_bottleneck(shares: Shares, args: Any) -> str:
    """Return the text about an epoch: its bottleneck, the shares of its time, its rate, and what to change first."""
    names = ["data", "compute"] + (["communication", "slowest"] if args.world_size > 1 else [])
    limit = shares.limit()
    labels = {"data": "waiting for data", "slowest": f"waiting for rank {shares.rank}"}
    parts = ", ".join(f"{labels.get(name, name)} {getattr(shares, name):.0%}" for name in names)
    parts += f"; {args.global_batch_size / shares.step_s:,.4g} images/s"
    if limit is None:
        return f"balanced: {parts}"
    whose = f"the slowest rank, {shares.rank}" if limit == "slowest" else limit
    return f"bound by {whose}: {parts}; try {_ADVICE[limit]}"
