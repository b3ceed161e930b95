"""The losses of short runs are those that this commit's predecessors had: a change of numbers is somebody's decision.

Whoever makes one writes it into CHANGELOG under Numerics, and the new losses, which a failure prints, into losses.json.
"""

import json
from pathlib import Path

import pytest
import torch

from scripts.make_digits import write_digits
from tests.started import run_train

EXPECTED = json.loads(Path(__file__).with_name("losses.json").read_text())
# Measured with torch 2.14 on a Zen 4, by ATEN_CPU_CAPABILITY and on one and two threads: a model without BatchNorm has
# 24 losses within 1e-7 with AVX2 and AVX-512, and within 1e-4 without, where first weights and pixels round otherwise.
# A ResNet's are 4e-4 apart in the third step already, so that the first two count: within 1e-6 and, without, 3e-2.
HAS_AVX = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
RUNS = {
    "timm/test_vit": ("""
        --batch-size 64 --backend pil --auto-augment ta_wide --mixup-alpha 0.2 --cutmix-alpha 1 --random-erase 0.1
        --label-smoothing 0.1 --model-ema --model-ema-steps 1
    """, None, 1e-6 if HAS_AVX else 5e-4),
    "resnet18": ("--batch-size 256 --hflip-prob 0.5", 2, 1e-5 if HAS_AVX else 0.1),
}  # fmt: skip


@pytest.mark.parametrize("model", RUNS)
def test_the_losses_are_those_of_the_commits_before(model, tmp_path):
    pytest.importorskip("sklearn")
    options, count, tolerance = RUNS[model]
    write_digits(tmp_path / "digits")
    argv = f"--recipe digits --epochs 1 --lr-warmup-epochs 0 --device cpu --workers 0 --print-freq 1 --model {model}"
    argv = [*argv.split(), *options.split(), "--data-path", tmp_path / "digits", "--output-dir", tmp_path / "out"]
    run_train(tmp_path, *argv).check()
    records = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if record["kind"] != "epoch"][:count]
    assert losses == pytest.approx(EXPECTED[model], rel=tolerance), json.dumps(losses)
