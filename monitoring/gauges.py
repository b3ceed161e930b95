"""Measure the training beside its metrics: time, norms, rates and memory."""

import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


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
        """Return learning rates and norms after a step; tensors on the device are not read."""
        rates = {f"lr/{group['name']}": group["lr"] for group in self.groups if "name" in group}
        with torch.no_grad():
            norms = {"grad_norm": grad_norm, "weight_norm": nn.utils.get_total_norm(self.parameters)}
            # `get_scale` would wait for the device; a scaled one stays on it.
            scale = {} if self.scaler is None else {"loss_scale": self.scaler.scale(self.one)}
        return {"lr": max(group["lr"] for group in self.groups), **rates, **norms, **scale}

    def rates(self, steps: int, train_s: float, wait_s: float) -> dict[str, float]:
        """Return the speed of `steps` steps and their use of the machine."""
        speed, waiting = steps * self.global_batch_size / train_s, wait_s / train_s
        memory_gib = peak_memory_gib(self.one.device)
        return {"images_per_s": speed, "data_wait": waiting, "memory_gib": memory_gib, "world_size": self.world_size}
