"""The most memory that the tensors of real training steps take on the CPU, beside the estimate of a traced step.

`python -m tests.peaks` measures five models.
"""

import contextlib
import gc
import io
import time
from collections.abc import Sequence

import torch
from torch.profiler import ProfilerActivity, profile

import config
import metrics
import models
import optim
import train
from monitoring import estimate

CASES = {"resnet50": 16, "vit_b_16": 8, "convnext_tiny": 8, "efficientnet_v2_s": 8, "swin_t": 8}
CLASSES, CPU = 1000, torch.device("cpu")


def resolve(argv: Sequence[str]) -> config.Record:
    """Return the options of one process on the CPU."""
    args = config.parse_args(["--synthetic", "--dry-run", *argv])
    args = config.Record(**{**vars(args), "world_size": 1, "distributed": False, "device": "cpu"})
    return config.with_shards(args, state=None)


def measure(args: config.Record, num_steps: int = 2) -> int:
    """Return the bytes at the peak of some steps, from the allocator's own record of every allocation."""
    gc.collect()  # what is older and freed meanwhile would count below nothing
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = models.place_model(models.build_model(args, CLASSES), args, CPU)
        model_ema = models.build_ema(args, model)
        optimizer = optim.build_optimizer(args, optim.build_parameter_groups(args, model))
        images = torch.zeros(args.batch_size, 3, args.train_crop_size, args.train_crop_size)
        loader = [(images, torch.zeros(args.batch_size, dtype=torch.int64))] * num_steps
        with contextlib.redirect_stdout(io.StringIO()):
            train.train_one_epoch(model, metrics.build_criterion(args), optimizer, loader, CPU, 0, args, model_ema)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def main() -> None:
    """Print a row for each model."""
    print("model, images of 224 px in float32: estimate, measured, their ratio; seconds of each")
    for model, batch_size in CASES.items():
        args = resolve(["--model", model, "--batch-size", str(batch_size)])
        start = time.perf_counter()
        estimated = estimate.trace(args, CLASSES, CPU, batch_size).total
        middle = time.perf_counter()
        measured = measure(args)
        seconds = f"{middle - start:.1f} s, {time.perf_counter() - middle:.1f} s"
        ratio = estimated / measured
        print(f"{model}, {batch_size}: {estimated / 2**30:.3f} GiB, {measured / 2**30:.3f} GiB, {ratio:.3f}; {seconds}")


if __name__ == "__main__":
    main()
