"""Measure the cost of monitoring a run: host time around the model in a step, and for an evaluation's pictures."""

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

import config
import data
import run
import train
from monitoring.pictures import Pictures
from scripts.tool import positive

# The length of the step that the costs are compared with, and the shape of an evaluation's outputs.
STEP_S = 0.05
NUM_CLASSES, BATCH_SIZE = 1000, 256

ARGV = (
    "--batch-size 2 --model squeezenet1_1 --epochs 1 --train-crop-size 32 --val-crop-size 32 --device cpu --workers 0 "
    "--lr 0.001"
)


class TimedRun(run.Run):
    """A run that measures the seconds that each step spends outside the model, and those in lines and records."""

    steps_s: ClassVar[list[float]] = []  # of the process's one run
    logs_s: ClassVar[list[float]] = []

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        for name in ("begin_step", "measure", "end_step"):
            setattr(self, name, timed(getattr(self, name), self.steps_s))
        for owner, name in ((self, "log"), (self.gauges, "read")):
            setattr(owner, name, timed(getattr(owner, name), self.logs_s))

    def begin_step(self, epoch: int, step: int) -> None:
        """Begin a step, with new sums for it."""
        self.steps_s.append(0.0)
        self.logs_s.append(0.0)
        super().begin_step(epoch, step)


def timed(work: Callable[..., Any], sums_s: list[float]) -> Callable[..., Any]:
    """Return the function, changed to add the seconds of each call to the last of the sums."""

    def work_and_count(*args: Any) -> Any:
        start_s = time.perf_counter()
        found = work(*args)
        sums_s[-1] += time.perf_counter() - start_s
        return found

    return work_and_count


def time_steps(num_steps: int) -> dict[str, float]:
    """Train a small model for an epoch with monitoring at its defaults; return a step's seconds outside the model."""
    train.Run = TimedRun  # for this process, which trains nothing else
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        train.main(config.parse_args([*ARGV.split(), "--synthetic", str(2 * num_steps), "--output-dir", folder]))
    steps_s, logs_s = (each[num_steps // 10 :] for each in (TimedRun.steps_s, TimedRun.logs_s))  # without cold caches
    mean_s, median_s, log_s = statistics.fmean(steps_s), statistics.median(steps_s), statistics.fmean(logs_s)
    return {"mean_s": mean_s, "median_s": median_s, "largest_s": max(steps_s), "log_s": log_s}


def time_evaluation(num_images: int) -> dict[str, float]:
    """Show an evaluation's outputs to the pictures of a run, and draw them; return the seconds of both."""
    images = data.SyntheticImages(num_images, 224, NUM_CLASSES)
    images.index.form = "folder"  # made-up images have no pictures
    images.classes = [f"class {number}" for number in range(NUM_CLASSES)]
    state = SimpleNamespace(parts={}, is_resumed=False, step=100, steps_per_epoch=100, bests={"best": None})
    args = SimpleNamespace(mean=config.IMAGENET_MEAN, std=config.IMAGENET_STD)
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(BATCH_SIZE, NUM_CLASSES, generator=generator)
    observe_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        pictures = Pictures(Path(folder), state, args, images)
        for first in range(0, num_images, BATCH_SIZE):
            index = torch.arange(first, min(first + BATCH_SIZE, num_images))
            start_s = time.perf_counter()
            pictures.observe("val", output[: len(index)], index % NUM_CLASSES, index)
            observe_s += time.perf_counter() - start_s
        start_s = time.perf_counter()
        pictures.draw()
        draw_s = time.perf_counter() - start_s
        num_pictures = len(list(Path(folder).glob("picture-*.png")))
    return {"observe_s": observe_s, "draw_s": draw_s, "pictures": num_pictures}


def benchmark_monitoring(options: argparse.Namespace) -> dict[str, Any]:
    """Measure steps and an evaluation; print the cost as a share of a step of 50 ms, and in seconds."""
    step, evaluation = time_steps(options.steps), time_evaluation(options.images)
    shares = {name: step[f"{name}_s"] / STEP_S for name in ("mean", "log")}
    print(
        f"a step: {1e3 * step['mean_s']:.3f} ms of host time around the model (median {1e3 * step['median_s']:.3f}, "
        f"largest {1e3 * step['largest_s']:.1f}), {shares['mean']:.2%} of a step of {1e3 * STEP_S:.0f} ms: metrics, "
        f"signals, finite losses, schedule, and {shares['log']:.2%} for lines, records, norms and TensorBoard\n"
        f"an evaluation of {options.images:,} images: {evaluation['observe_s']:.2f} s of looking at outputs and "
        f"{evaluation['draw_s']:.2f} s of drawing {evaluation['pictures']} pictures"
    )
    ratios = {"step_of_50_ms": shares["mean"], "log_of_50_ms": shares["log"]}
    total_s = evaluation["observe_s"] + evaluation["draw_s"]
    return {"step": step, "evaluation": evaluation, "ratios": ratios, "evaluation_s": total_s}


def add_commands(commands: Any) -> None:
    """Register `monitoring` with the subparsers of scripts/benchmark.py, which calls `options.run`."""
    command = commands.add_parser("monitoring", help="the cost of monitoring: in a step, and for pictures")
    command.add_argument("--steps", metavar="N", type=positive, default=1000, help="to train (default: 1000)")
    command.add_argument("--images", metavar="N", type=positive, default=50_000, help="to evaluate (default: 50000)")
    command.set_defaults(run=benchmark_monitoring)
