"""The estimate of a traced step against the allocator's own record of real steps, and what is said of it."""

import json
import resource
import sys
from pathlib import Path

import pytest
import torch

import config
from monitoring import estimate, preview
from tests import peaks
from tests.ranks import run_ranks, train_rank

SMALL = ["--model", "resnet18", "--train-crop-size", "64", "--val-crop-size", "64", "--batch-size", "8"]


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--opt", "adamw", "--model-ema", "--lr", "0.001", "--batch-size", "16"],
        ["--amp", "--amp-dtype", "bfloat16", "--channels-last", "--batch-size", "32"],
        ["--grad-checkpointing", "--batch-size", "32"],
        ["--freeze"],
        ["--model", "googlenet", "--batch-size", "4"],
    ],
)
def test_the_estimate_is_the_allocators_peak(more):
    args = peaks.resolve([*SMALL, *more])
    needs = estimate.trace(args, peaks.CLASSES, peaks.CPU, args.batch_size)
    assert needs.total == pytest.approx(peaks.measure(args), rel=0.1)


def test_memory_is_split_into_what_holds_it():
    args = peaks.resolve([*SMALL, "--opt", "adamw", "--model-ema"])
    needs = estimate.trace(args, 1000, peaks.CPU, 8)
    parameters, statistics, layers = 11_689_512, 9_600, 20  # of ResNet-18 and its BatchNorm layers
    assert needs.weights == 4 * (parameters + statistics) + 8 * layers
    assert needs.optimizer == 2 * 4 * parameters + 4 * 62  # two moments, and a count for each parameter
    assert needs.average == needs.weights + 8  # and the count of updates
    assert 0 < needs.gradients <= 4 * parameters
    assert needs.activations > 0


@pytest.mark.parametrize(
    ("more", "copies"),
    [
        (["--global-batch-size", "128"], 1),
        (["--global-batch-size", "128", "--use-deterministic-algorithms"], 2),  # of one and of two shards
    ],
)
def test_accumulation_holds_sums_of_gradients(more, copies):
    plain, summed = (peaks.resolve([*SMALL, "--batch-size", "32", *options]) for options in ([], more))
    plain, summed = (estimate.trace(args, 1000, peaks.CPU, 32) for args in (plain, summed))
    assert summed.gradients == 4 * 11_689_512 * copies
    assert plain.gradients < summed.gradients < summed.total - plain.total + plain.gradients + (1 << 20)


@pytest.mark.parametrize(
    ("model", "gflop"),  # multiply-adds at 224 px that torchvision documents: 4.089, 17.564, 4.456, 1.814, 4.491
    [("resnet50", 24.5), ("vit_b_16", 105.4), ("convnext_tiny", 26.7), ("resnet18", 10.9), ("swin_t", 26.9)],
)
def test_operations_are_three_times_those_that_torchvision_documents(model, gflop):
    args = peaks.resolve(["--model", model, "--batch-size", "2"])
    assert estimate.count_flops(args, 1000) / 1e9 == pytest.approx(gflop, rel=0.03)  # without the images' own gradient


def test_the_largest_batch_fits_and_a_larger_one_does_not():
    args = peaks.resolve(SMALL)
    limit = 1 << 30
    here, largest = estimate.find_largest(args, 1000, peaks.CPU, limit)
    assert here.batch_size == 8
    assert largest > 50
    assert estimate.trace(args, 1000, peaks.CPU, int(largest * 0.97)).total < limit
    assert estimate.trace(args, 1000, peaks.CPU, int(largest * 1.03)).total > limit


def test_a_dry_run_says_what_a_run_will_need(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    argv = [*SMALL, "--synthetic", "64", "--epochs", "2", "--output-dir", str(out), "--dry-run"]
    args = {name: value for name, value in vars(config.parse_args(argv)).items() if name != "given"}
    (out / "run.json").write_text(json.dumps({"args": args | {"global_batch_size": 8}}))
    place = {"step": 1, "epoch": 0, "time": 1.0}
    lines = [{"kind": "train", **place, "world_size": 1, "images_per_s": rate} for rate in (1.0, 32.0, 32.0)]
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = run_ranks(train_rank, 1, argv, log_folder=tmp_path).check().output
    assert "# memory of a process at its peak, an estimate of a step traced for cpu: " in text
    assert "weights 44.6 MiB" in text
    assert "# that fits 90% of this machine's " in text
    assert "GFLOP an image, forward and backward" in text
    # 64 images at 32 a second are 2 seconds, 0.00056 hours
    assert f"# at the 32 images/s of {out}: 0.000556 hours an epoch, 0.00111 in all" in text
    assert "# disk, an estimate: 5 checkpoints at most of 89.2 MiB = 446.1 MiB" in text


def test_a_model_that_cannot_be_traced_is_said_and_ends_nothing(monkeypatch):
    def build(*_):
        return torch.nn.Sequential(torch.nn.Flatten(), Reader())

    monkeypatch.setattr(estimate, "build_without_memory", build)
    (line,) = estimate.describe(peaks.resolve(SMALL), 1000, 10)
    assert line.startswith("no estimate of memory and work: resnet18 cannot be traced (DataDependentOutputException")


class Reader(torch.nn.Linear):
    """A layer that reads its input."""

    def __init__(self):
        super().__init__(3 * 64 * 64, 10)

    def forward(self, image):
        return super().forward(image) * float(image.sum())


def test_a_preview_alone_takes_no_time_for_estimates():
    assert "estimate" not in preview.preview(config.parse_args(["--synthetic", "--dry-run"]))


def starved_rank(argv: list[str], num_bytes: int) -> None:
    """Run train.py, whose process gets no more than so much memory from its first step on."""
    import run

    begin = run.Run.begin_step

    def limited(self, *args):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + num_bytes,) * 2)
        run.Run.begin_step = begin
        begin(self, *args)

    run.Run.begin_step = limited
    train_rank(argv)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit a process's memory")
def test_a_run_without_memory_ends_in_one_line_with_the_batch_that_should_fit(tmp_path):
    out = tmp_path / "out"
    argv = [*SMALL, "--batch-size", "64", "--synthetic", "64", "--workers", "0", "--output-dir", str(out)]
    outcome = run_ranks(starved_rank, 1, [*argv, "--device", "cpu"], 150 << 20, log_folder=tmp_path)
    assert outcome.codes == [2]
    (line,) = [line for line in outcome.output.splitlines() if line.startswith("train.py: error")]
    assert "out of memory on cpu at --batch-size 64: a process needs about " in line
    assert "weights 44.6 MiB + " in line
    assert "Traceback" not in outcome.output
    status = json.loads((out / "status.json").read_text())
    assert status["state"] == "failed"
    assert "out of memory" in status["reason"]


def test_torchs_own_error_counts_as_out_of_memory():
    assert estimate.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert not estimate.is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not estimate.is_out_of_memory(None)
