"""Measure the training beside its metrics: norms, rates, and the use of the device."""

import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distributed import collectives
from monitoring.flops import count_flops

# Dense peaks, TFLOP/s, by the name that torch gives the device, from NVIDIA's data sheets and white papers of A100
# (2020), V100 (2017), L4 (2023), H100 SXM (2022) and H200 SXM (2024); figures "with sparsity" are halved here.
# "float32" is without tensor cores.
_A100 = {"float32": 19.5, "tf32": 156.0, "float16": 312.0, "bfloat16": 312.0}
_V100 = {"float32": 15.7, "float16": 125.0}
_HOPPER_SXM = {"float32": 66.9, "tf32": 494.7, "float16": 989.4, "bfloat16": 989.4}
PEAK_TFLOPS = {
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA H100 80GB HBM3": _HOPPER_SXM,
    "NVIDIA H200": _HOPPER_SXM,
    "NVIDIA L4": {"float32": 30.3, "tf32": 60.0, "float16": 121.0, "bfloat16": 121.0},
    "Tesla V100-SXM2-16GB": _V100,
    "Tesla V100-SXM2-32GB": _V100,
}


def peak_tflops(args: Any, device: torch.device) -> float | None:
    """Return the device's peak TFLOP/s in the precision of the options; None if unknown."""
    if device.type != "cuda":
        return None
    number_format = (args.amp_dtype or "float16") if args.amp else "float32" if args.tf32 is False else "tf32"
    return PEAK_TFLOPS.get(torch.cuda.get_device_name(device), {}).get(number_format)


def flops_share(args: Any, device: torch.device, num_classes: int) -> float | None:
    """Return the operations of an image as a share of the device's peak in a second; None if that is unknown."""
    peak = peak_tflops(args, device)
    try:
        return None if peak is None else count_flops(args, num_classes) / (1e12 * peak)
    except Exception as error:  # some models cannot be traced without memory, and a missing curve ends no run
        print(f"warning: the operations of {args.model} cannot be counted, so there is no mfu: {error}")
        return None


def peak_memory_gib() -> float:
    """Return the most memory that this process has used: the GPU's where there is one, else its own."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    with suppress(OSError):  # Linux, where getrusage also counts the memory of the process that started this one
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class Pace:
    """Counts steps, their seconds, and their seconds of waiting for data, since the last `read`."""

    def __init__(self) -> None:
        self._steps, self._train_s, self._wait_s = 0, 0.0, 0.0
        self.start()

    def start(self) -> None:
        """Start an epoch; the time since the last step, such as an evaluation's, does not count."""
        self._mark_s, self._waited_s = time.perf_counter(), 0.0

    def step(self, waited_s: float) -> None:
        """Count a step; `waited_s` is the time that the epoch has waited for data so far."""
        self._advance()
        self._steps += 1
        self._wait_s += waited_s - self._waited_s
        self._waited_s = waited_s

    def _advance(self) -> None:
        now = time.perf_counter()
        self._train_s += now - self._mark_s
        self._mark_s = now

    def read(self) -> tuple[int, float, float]:
        """Return steps, seconds and seconds of waiting, and start from zero."""
        self._advance()  # the host may have waited for the device since the last step
        found = self._steps, self._train_s, self._wait_s
        self._steps, self._train_s, self._wait_s = 0, 0.0, 0.0
        return found


class Gauges:
    """The fields of a training record beside the metrics; `parts` holds the run's model, optimizer and scaler."""

    def __init__(self, args: Any, parts: dict[str, Any], device: torch.device, num_classes: int) -> None:
        self.parameters, self.scaler = list(parts["model"].parameters()), parts.get("scaler")
        self.groups = parts["optimizer"].optimizer.param_groups
        self.world_size, self.global_batch_size = args.world_size, args.global_batch_size
        self.one = torch.ones((), device=device)
        self.flops_share = flops_share(args, device, num_classes) if collectives.is_main_process() else None

    def read(self, grad_norm: Tensor) -> dict[str, float | Tensor]:
        """Return learning rates and norms after a step; tensors on the device are not read."""
        rates = {f"lr/{group['name']}": group["lr"] for group in self.groups if "name" in group}
        with torch.no_grad():
            norms = {"grad_norm": grad_norm, "weight_norm": nn.utils.get_total_norm(self.parameters)}
            scale = {} if self.scaler is None else {"loss_scale": self.scaler.scale(self.one)}
        return {"lr": max(group["lr"] for group in self.groups), **rates, **norms, **scale}

    def rates(self, steps: int, train_s: float, wait_s: float) -> dict[str, float]:
        """Return the speed of `steps` steps and their use of the machine."""
        images_per_s = steps * self.global_batch_size / train_s
        each = images_per_s / self.world_size
        return {
            "images_per_s": images_per_s,
            "images_per_s_per_device": each,
            "data_wait": wait_s / train_s,
            "memory_gib": peak_memory_gib(),
            **({} if self.flops_share is None else {"mfu": each * self.flops_share}),
            "world_size": self.world_size,
        }
