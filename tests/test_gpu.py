"""On a GPU: killed and resumed equals undisturbed, and a step's loss is the CPU's."""

import json

import pytest
import torch

from checkpoint import load_checkpoint
from tests.ranks import run_ranks, train_rank

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


def test_killed_and_resumed_equals_undisturbed(image_folder, tmp_path):
    run(image_folder, tmp_path, "whole").check()
    faults = [(0, "torch.optim.SGD.step", 5, "after")]
    killed = run(image_folder, tmp_path, "killed", "--checkpoint-steps", "2", faults=faults)
    assert killed.codes == [-9], killed.output
    run(image_folder, tmp_path, "killed", "--resume", "auto").check()
    whole, resumed = (load_checkpoint(tmp_path / name / "checkpoint.pth", name) for name in ("whole", "killed"))
    for part in ("model", "model_ema"):
        for name, value in whole[part].items():
            assert torch.equal(resumed[part][name], value), name


def test_the_first_loss_is_the_cpus(image_folder, tmp_path):
    losses = []
    for device in ("cpu", "cuda"):
        run(image_folder, tmp_path, device, "--device", device, "--epochs", "1").check()
        losses.append(json.loads((tmp_path / device / "metrics.jsonl").read_text().splitlines()[0])["loss"])
    # float32 sums of some thousand terms in another order
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
