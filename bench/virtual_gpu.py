"""Forecast what a GPU loses beside a bare loop: the real training loop, whose work queues on a virtual GPU.

The host's time is the launches' and what the loop does between them; the device's is given. One constant was fitted,
the wait for an epoch's first batches; the others are of an H200. It stands in for a GPU, not for a measurement on one.

Example:
  python -m bench.virtual_gpu
"""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import metrics
from bench import benchmark
from scripts import tool

PROG = "python -m bench.virtual_gpu"
BATCH = 4  # images that the host really has
LAUNCHES = 150  # kernels of a forward and a backward pass
FIRST_BATCHES_S = 0.06  # fitted
LINE_S = 0.002
NEXT_BATCH_S = 0.0008  # to take a batch from the loader's processes, and the loop's own Python
PIN_S = 0.0028  # 38.5 MB into pinned memory
METRICS_S = 0.0002  # eight small operations of the device
PREPARE_S = 0.0011  # the device's copy and transform of a batch, beside the step
# Title, seconds of a step on the device, and of its launches on the host.
STEPS = [
    ("ResNet-50, bfloat16, NHWC", 0.0541, 0.018),
    ("the same, compiled", 0.0379, 0.006),
    ("a small step", 0.008, 0.006),
]
# Title, whether a line waits for its own step, and seconds of pinning.
LOOPS = [
    ("a line is read at once", True, PIN_S),
    ("a line is read a step later", False, PIN_S),
    ("and batches lie in pinned memory", False, 0.0),
]


class Machine:
    """Until when the host, the device's queue and its copying stream are busy, in seconds."""

    def __init__(self) -> None:
        self.host_s = self.queue_s = self.copied_s = 0.0
        self.reads_at_once = False
        self.pin_s = PIN_S

    def launch(self, host_s: float, device_s: float) -> None:
        """Spend time on the host to queue work of the device."""
        self.host_s += host_s
        self.queue_s = max(self.queue_s, self.host_s) + device_s

    def wait(self, until_s: float) -> None:
        """Have the host wait for a point of the queue."""
        self.host_s = max(self.host_s, until_s)


machine = Machine()


class Passes(torch.autograd.Function):
    """The kernels of a step, a third of them forward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, num_images: int, host_s: float, device_s: float) -> Tensor:  # noqa: D102
        ctx.times_s = host_s / LAUNCHES, device_s / LAUNCHES
        for _ in range(LAUNCHES // 3):
            machine.launch(*ctx.times_s)
        return weight.expand(num_images, benchmark.NUM_CLASSES)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: D102
        for _ in range(LAUNCHES * 2 // 3):
            machine.launch(*ctx.times_s)
        return torch.zeros(1), None, None, None


class Model(nn.Module):
    """A model of one weight whose passes take as long as told."""

    def __init__(self, host_s: float, device_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.times_s = host_s, device_s

    def forward(self, image: Tensor) -> Tensor:
        """Return scores of no meaning."""
        return Passes.apply(self.weight, len(image), *self.times_s)


class Mark:
    """`metrics.CopyMark` on the virtual GPU."""

    def __init__(self, _: torch.device) -> None:
        self.queue_s = machine.queue_s
        if machine.reads_at_once:
            machine.wait(self.queue_s)

    def wait(self) -> None:
        """Wait for the point, and print a line."""
        machine.wait(self.queue_s)
        machine.host_s += LINE_S


class Batches:
    """A loader, whose processes keep up once the first batches are there."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        machine.host_s += FIRST_BATCHES_S
        for _ in range(self.num_batches):
            prepared_s = machine.copied_s
            machine.host_s += NEXT_BATCH_S + machine.pin_s
            machine.copied_s = max(prepared_s, machine.host_s) + PREPARE_S
            machine.queue_s = max(machine.queue_s, prepared_s)  # of the batch before, which is ahead
            machine.launch(0.0, METRICS_S)
            yield torch.zeros(BATCH, 1), torch.zeros(BATCH, dtype=torch.int64)


def time_turn(kind: type[benchmark.BareStep], num_steps: int) -> tuple[float, float]:
    """Return the virtual seconds of a turn of so many steps, and of a steady step."""
    args = benchmark.training_args(["--device", "cpu", "--batch-size", str(BATCH), "--train-crop-size", "32"])
    with contextlib.redirect_stdout(io.StringIO()):
        way = kind(args, num_steps)
    way.image = torch.zeros(BATCH, 1)
    if isinstance(way, benchmark.OurLoop):
        way.loader = Batches(num_steps)
    machine.wait(machine.queue_s)
    begin_s = machine.host_s
    way()
    machine.wait(machine.queue_s)
    return machine.host_s - begin_s, BATCH / way.steady_rates[0]


def main() -> None:
    """Print the forecasts."""
    tool.build_parser(PROG, "", __doc__).parse_args()
    metrics.CopyMark = Mark  # type: ignore[assignment, misc]
    benchmark.moment = lambda *_: machine.queue_s
    print("bare / ours: the steady step of 1,000, and a turn of 40")
    for title, device_s, host_s in STEPS:
        # The host is never behind in a bare loop.
        benchmark.build_model = lambda *_, times_s=(host_s, device_s): Model(*times_s)
        _, bare_s = time_turn(benchmark.BareStep, 1000)
        bare_turn_s, _ = time_turn(benchmark.BareStep, 40)
        for loop, machine.reads_at_once, machine.pin_s in LOOPS:
            _, step_s = time_turn(benchmark.OurLoop, 1000)
            turn_s, _ = time_turn(benchmark.OurLoop, 40)
            print(f"  {title}: {loop}: {bare_s / step_s:.3f}, {bare_turn_s / turn_s:.3f}", flush=True)


if __name__ == "__main__":
    main()
