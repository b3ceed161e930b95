"""The losses of short runs are those that this commit's predecessors had: a change of numbers is somebody's decision.

Whoever makes one writes it into CHANGELOG under Numerics, and the new losses, which a failure prints, into losses.json.
"""

import json
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
import torchvision

from scripts.make_digits import write_digits
from tests.started import run_train

EXPECTED = json.loads(Path(__file__).with_name("losses.json").read_text())
# In float32 a ResNet's second losses with AVX2 and with AVX-512 are 1.5e-4 apart. In float64 all instruction sets agree
# within 2e-7 (see `_doubled`), and a learning rate 1.001 times as large changes the losses by 1.9e-5 and 6e-3.
TOLERANCE = 1e-6
RUNS = {
    "vit": """
        --batch-size 64 --backend pil --auto-augment ta_wide --mixup-alpha 0.2 --cutmix-alpha 1 --random-erase 0.1
        --label-smoothing 0.1 --model-ema --model-ema-steps 1
    """,
    "resnet18": "--batch-size 256 --hflip-prob 0.5 --train-crop-size 16 --val-resize-size 16 --val-crop-size 16",
}


def _doubled(build):
    """Return a function that builds a model whose weights are drawn in float64, and which computes in it."""

    def build_doubled(num_classes):
        torch.set_default_dtype(torch.float64)
        try:
            model = build(num_classes=num_classes)
        finally:
            torch.set_default_dtype(torch.float32)
        model.register_forward_pre_hook(lambda model, images: images[0].double())
        model.register_forward_hook(lambda model, images, output: output.float())
        return model

    return build_doubled


vit, resnet18 = _doubled(partial(timm.create_model, "test_vit")), _doubled(torchvision.models.resnet18)


@pytest.mark.parametrize("model", RUNS)
def test_the_losses_are_those_of_the_commits_before(model, tmp_path):
    pytest.importorskip("sklearn")
    write_digits(tmp_path / "digits")
    argv = "--recipe digits --epochs 1 --lr-warmup-epochs 0 --device cpu --workers 0 --print-freq 1"
    argv = [*argv.split(), *RUNS[model].split(), "--model", f"{__file__}:{model}"]
    run_train(tmp_path, *argv, "--data-path", tmp_path / "digits", "--output-dir", tmp_path / "out").check()
    records = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if record["kind"] != "epoch"]
    # Without AVX torch's linspace rounds otherwise, and so some grey levels of the policy.
    rows = EXPECTED[model]
    assert losses == pytest.approx(rows.get(torch.backends.cpu.get_cpu_capability(), rows["AVX2"]), rel=TOLERANCE), (
        json.dumps(losses)
    )
