"""The estimate of memory against the allocator's record of real steps and the memory of a real process."""

import contextlib
import gc
import io

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import config
import metrics
import models
import optim
import train
from monitoring import estimate

SMALL = ["--model", "resnet18", "--train-crop-size", "64", "--val-crop-size", "64", "--batch-size", "8"]
CLASSES, CPU = 1000, torch.device("cpu")


def resolve(*argv):
    """Return the options of one process on the CPU."""
    args = config.parse_args(["--synthetic", "--dry-run", *argv])
    args = args.replaced(world_size=1, distributed=False, device="cpu")
    return config.with_shards(args, state=None)


def measure(args, num_steps=2):
    """Return the bytes at the peak of some steps, from the allocator's own record of every allocation."""
    gc.collect()  # older tensors that are freed meanwhile would count below zero
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


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--opt", "adamw", "--model-ema", "--lr", "0.001", "--batch-size", "16"],
        ["--amp", "--amp-dtype", "bfloat16", "--channels-last", "--batch-size", "32"],
        ["--model", "timm/vit_tiny_patch16_224", "--grad-checkpointing", "--batch-size", "32"],
        ["--freeze"],
        ["--model", "googlenet", "--batch-size", "4"],
    ],
)
def test_the_estimate_is_the_allocators_peak(more):
    args = resolve(*SMALL, *more)
    assert sum(estimate.trace(args, CLASSES, CPU).values()) == pytest.approx(measure(args), rel=0.1)


def test_memory_is_split_into_what_holds_it():
    parts = estimate.trace(resolve(*SMALL, "--opt", "adamw", "--model-ema"), CLASSES, CPU)
    parameters, statistics, layers = 11_689_512, 9_600, 20  # of ResNet-18 and its BatchNorm layers
    assert parts["weights"] == 4 * (parameters + statistics) + 8 * layers
    assert parts["optimizer state"] == 2 * 4 * parameters + 4 * 62  # two moments, and a count for each parameter
    assert parts["average of the weights"] == parts["weights"] + 8  # and the count of updates


@pytest.mark.parametrize(("more", "copies"), [([], 1), (["--use-deterministic-algorithms"], 2)])
def test_accumulation_holds_sums_of_gradients(more, copies):
    """Under the flag, sums of one and of two micro-batches."""
    plain = resolve(*SMALL, "--batch-size", "32")
    summed = resolve(*SMALL, "--batch-size", "32", "--global-batch-size", "128", *more)
    plain, summed = (sum(estimate.trace(args, CLASSES, CPU).values()) for args in (plain, summed))
    # Without sums, the gradients of the first layers are made when the activations of the last ones are free.
    assert (copies - 1) * 4 * 11_689_512 < summed - plain < copies * 4 * 11_689_512 + (1 << 20)
