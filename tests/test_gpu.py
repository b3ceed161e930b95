"""What only CUDA has: its kernels, compilation, memory and own check for waiting. All else runs in test_far.py."""

import json

import pytest
import torch
import torchvision
from torch import nn

import data
import train
from models import optim
from models.build import build_ema, build_scaler, compile_model, move_to_device
from models.losses import build_criterion
from run import Run
from sampler import TrainSampler, VirtualShards
from settings import config
from tests.endings import differing_results
from tests.ranks import run_ranks, train_rank
from tests.runs import run_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use; none here"),
]

OPTIONS = """
    --model resnet18 --train-crop-size 64 --val-resize-size 64 --val-crop-size 64 --batch-size 4 --global-batch-size 8
    --epochs 2 --print-freq 1 --workers 0 --lr 0.02 --model-ema --random-erase 0.3 --mixup-alpha 0.2
    --use-deterministic-algorithms
""".split()


def run(image_folder, tmp_path, name, *argv, faults=()):
    arguments = ["--data-path", str(image_folder), "--output-dir", str(tmp_path / name), *OPTIONS, *argv]
    return run_ranks(train_rank, 1, arguments, list(faults), log_folder=tmp_path, timeout_s=300)


@pytest.mark.parametrize("argv", ["--tf32", "--amp", "--channels-last --compile"])
def test_killed_and_resumed_equals_undisturbed(image_folder, tmp_path, argv):
    argv = argv.split()
    run(image_folder, tmp_path, "whole", *argv).check()
    faults = [(0, "torch.optim.SGD.step", 5, "after")]
    killed = run(image_folder, tmp_path, "killed", *argv, "--checkpoint-steps", "2", faults=faults)
    assert killed.codes == [-9], killed.output
    run(image_folder, tmp_path, "killed", *argv, "--resume", "auto").check()
    assert differing_results(tmp_path / "killed", tmp_path / "whole") == []


# float32 adds some thousand terms in another order; TF32 and float16 have 11 bits of fraction, bfloat16 8.
@pytest.mark.parametrize(("argv", "tolerance"), [
    ("--no-tf32", 1e-4), ("--no-tf32 --channels-last --compile", 1e-4), ("--tf32", 5e-3), ("--amp", 5e-3),
    ("--amp --amp-dtype bfloat16", 4e-2),
])  # fmt: skip
def test_the_first_loss_is_the_cpus(image_folder, tmp_path, argv, tolerance):
    found = []
    for device, extra in (("cpu", []), ("cuda", argv.split())):
        run(image_folder, tmp_path, device, "--device", device, "--epochs", "1", *extra).check()
        found.append(json.loads((tmp_path / device / "metrics.jsonl").read_text().splitlines()[0])["loss"])
    assert found[0] == pytest.approx(found[1], rel=tolerance)


def build_loader(args, device, num_images):
    dataset = data.SyntheticImages(num_images, args.augmentation.train_crop_size, 10)
    sampler = TrainSampler(num_images, VirtualShards(args.optimization.global_batch_size, args.distributed.num_shards))
    groups = args.data, args.augmentation, args.optimization
    loader = data.build_loader(dataset, sampler, *groups, args.distributed.device)
    return data.build_device_loader(args, loader, sampler, device, 10)


def options(*argv, size_px=64):
    words = f"--synthetic --batch-size 8 --global-batch-size 16 --train-crop-size {size_px}".split()
    args = config.parse_args([*words, *argv])
    return args.replaced(device="cuda", workers=0, num_shards=2)


MIXED = "--random-erase 0.5 --random-erase-fill pixel --mixup-alpha 0.2 --cutmix-alpha 1".split()


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_prepared_on_a_stream_of_their_own_are_the_cpus(workers):
    """While the model's stream is kept busy: memory that is reused too early has no mark on the rehearsal device."""
    args = options(*MIXED, "--channels-last").replaced(workers=workers)
    loader = build_loader(args, torch.device("cuda"), 160)
    expected = list(build_loader(args.replaced(device="cpu"), torch.device("cpu"), 160))
    busy = torch.randn(2048, 2048, device="cuda")
    found = []
    for image, target in loader:
        for _ in range(20):
            busy = busy @ busy / 2048
        found.append((image * 1.0, target * 1))  # read on the model's stream, after that work
    torch.cuda.synchronize()
    assert len(found) == len(expected) == 20
    for (image, target), (their_image, their_target) in zip(found, expected, strict=True):
        # Division and rounding to the nearest are IEEE's on both; mixing may contract a multiplication and an addition.
        torch.testing.assert_close(image.cpu(), their_image, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(target.cpu(), their_target, rtol=1e-6, atol=1e-6)
        assert image.stride() == their_image.stride()


def test_memory_of_batches_does_not_grow_while_the_host_runs_ahead():
    """Of CUDA's caching allocator; on the rehearsal device no host runs ahead."""
    args = options(*MIXED, size_px=224)
    busy = torch.randn(4096, 4096, device="cuda")
    peaks = []
    for num_images in (16 * 4, 16 * 40):
        loader = build_loader(args, torch.device("cuda"), num_images)
        torch.cuda.reset_peak_memory_stats()
        for image, _ in loader:
            busy = busy @ busy / 4096
            image.sum()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= peaks[0] * 1.05


def train_watched(args, tmp_path, criterion=None, num_steps=21):
    device = torch.device(args.distributed.device)
    torch.manual_seed(0)
    model = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10)
    model = compile_model(move_to_device(model, args.precision, device), args.precision, args.augmentation)
    optimizer = optim.build_optimizer(
        args.optimization, args.precision, args.model.model, optim.build_parameter_groups(args.optimization, model)
    )
    loader = build_loader(args, device, num_steps * args.optimization.global_batch_size)

    class Watched(Run):
        def end_step(self, metric_logger, grad_norm):
            super().end_step(metric_logger, grad_norm)
            # The first steps compile, choose kernels and allocate.
            torch.cuda.set_sync_debug_mode("error" if 6 <= self.state.step < 20 else "default")

    run = run_of(args, tmp_path, model, optimizer, loader.loader.sampler, device, Watched)
    parts = build_ema(args, model), build_scaler(args.precision, device), run
    try:
        train.train_one_epoch(model, criterion or build_criterion(args), optimizer, loader, device, 0, args, *parts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return run.state.step


# With float16 only the fused optimizers need no look at the scaler's finding.
@pytest.mark.parametrize("argv", ["--amp --opt adamw", "--amp --amp-dtype bfloat16 --channels-last --compile"])
def test_no_step_waits_for_the_device_at_lines_neither(argv, tmp_path):
    common = "--print-freq 5 --model-ema --model-ema-steps 2 --clip-grad-norm 1 --lr-warmup-epochs 1"
    assert train_watched(options(*MIXED, *common.split(), *argv.split()), tmp_path) == 21


def test_negative_control_a_waiting_step_is_caught(tmp_path):
    class ReadingLoss(nn.CrossEntropyLoss):
        def forward(self, output, target):
            loss = super().forward(output, target)
            loss.item()
            return loss

    with pytest.raises(RuntimeError, match="synchroniz"):
        train_watched(options("--print-freq", "20"), tmp_path, ReadingLoss())
