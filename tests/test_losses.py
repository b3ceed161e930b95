"""The losses of short runs are those that this commit's predecessors had, and binary cross-entropy is timm's.

Whoever changes numbers says so in CHANGELOG under Numerics, and puts the losses that a failure prints into losses.json.
"""

import json
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from timm import loss as timms
from torch import nn

from models.other_losses import BinaryCrossEntropy
from scripts.make_digits import write_digits
from tests.started import run_train

EXPECTED = json.loads(Path(__file__).with_name("losses.json").read_text())
# In float32 a ResNet's second losses with AVX2 and with AVX-512 are 1.5e-4 apart. In float64 all instruction sets agree
# within 2e-7 (see `_doubled`), and a learning rate 1.001 times as large changes the losses by 1.9e-5 and 6e-3.
TOLERANCE = 1e-6
RUNS = {
    "vit": """
        --backend pil --auto-augment ta_wide --mixup-alpha 0.2 --cutmix-alpha 1 --random-erase 0.1
        --label-smoothing 0.1 --model-ema --model-ema-steps 1
    """,
    "resnet18": "--hflip-prob 0.5 --train-crop-size 16 --val-resize-size 16 --val-crop-size 16",
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


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder / "digits")
    return folder / "digits"


@pytest.mark.parametrize("model", RUNS)
def test_the_losses_are_those_of_the_commits_before(model, digits, tmp_path):
    argv = "--recipe digits --epochs 1 --lr-warmup-epochs 0 --device cpu --workers 0 --print-freq 1 --batch-size 64"
    argv += f" --limit-train-images 384 --limit-val-images 20 {RUNS[model]}"
    argv = [*argv.split(), "--model", f"{__file__}:{model}", "--data-path", digits, "--output-dir", tmp_path / "out"]
    run_train(tmp_path, *argv).check()
    records = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if record["kind"] != "epoch"]
    # Without AVX torch's linspace rounds otherwise, and so some grey levels of the policy.
    expected = EXPECTED[model].get(torch.backends.cpu.get_cpu_capability(), EXPECTED[model]["AVX2"])
    assert losses == pytest.approx(expected, rel=TOLERANCE), json.dumps(losses)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threshold", [None, 0.2])
def test_binary_cross_entropy_is_timms_in_any_type(dtype, threshold):
    torch.manual_seed(0)
    logits, classes = torch.randn(6, 10).to(dtype), torch.arange(6)
    shares = torch.tensor([0.2005, 0.2, 0.1995, 0.5, 0.999, 0.3])[:, None]
    one_hot = nn.functional.one_hot
    soft = one_hot(classes, 10) * shares + one_hot(classes + 1, 10) * (1 - shares)
    # timm's of float32 logits and targets of that type: nothing is rounded but the logits themselves.
    ours, theirs = BinaryCrossEntropy(0.1, threshold), timms.BinaryCrossEntropy(0.1, threshold)
    torch.testing.assert_close(ours(logits, classes), theirs(logits.float(), classes))
    smoothed = soft * 0.9 + 0.01  # timm's mixing does it
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        torch.testing.assert_close(ours(logits, soft), theirs(logits.float(), smoothed))


def test_a_target_just_above_the_threshold_counts_in_bfloat16():
    loss = BinaryCrossEntropy(0.0, 0.2)(torch.zeros(1, 1, dtype=torch.bfloat16) + 3, torch.tensor([[0.2005]]))
    assert loss.item() == pytest.approx(0.04858735)  # log(1 + exp(-3)): the class is there
