"""The example of a model of one's own, examples/vit5.py: against timm's ViT and a plain computation."""

import numpy
import pytest
import timm
import torch
from torch import nn

from examples import vit5
from models import optim
from models.build import build_model
from settings import config
from tests.ranks import REPOSITORY
from tests.started import refused, run_train

EXAMPLE = f"{REPOSITORY / 'examples' / 'vit5.py'}"
SMALL = {"dim": 16, "depth": 2, "num_heads": 2, "image_size": 64, "drop_path": 0.0, "in_chans": 3}


def turned(vector, weight, place, theta):
    """Return pairs of normalised channels as complex numbers, turned by their row and their column."""
    vector = vector / numpy.sqrt((vector**2).mean() + 1e-6) * weight
    angles = [theta ** (-i / 2) * place[axis] for axis in (0, 1) for i in range(2)]
    return (vector[0::2] + 1j * vector[1::2]) * numpy.exp(1j * numpy.array(angles))


@pytest.mark.parametrize(("letter", "name"), [("s", "small"), ("b", "base")])
def test_parameters_are_timms_vit_and_the_papers_changes(letter, name):
    with torch.device("meta"):
        plain = timm.create_model(f"vit_{name}_patch16_224")
        count = sum(parameter.numel() for parameter in getattr(vit5, f"vit5_{letter}")(1000).parameters())
    dim, depth, head = plain.embed_dim, 12, 64
    fewer = dim + (2 * depth + 1) * dim + depth * 3 * dim  # class token's position; biases of norms and of QKV
    more = 4 * dim + depth * 2 * head + depth * 2 * dim  # registers, norms of Q and K, layer scales
    assert count == sum(parameter.numel() for parameter in plain.parameters()) - fewer + more
    assert round(count / 1e6, 1) == {"s": 22.0, "b": 86.5}[letter]  # 22 of S, by NVIDIA's pull request 57


def test_attention_is_that_of_complex_numbers():
    model, tokens = vit5.ViT5(5, **SMALL).eval(), torch.randn(1, 21, 16)
    attention = model.blocks[0].attn
    with torch.no_grad():
        for parameter in attention.parameters():  # so that no part is near nothing or the same as another
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 1.0))
    grid = [(0, 0)] + [(row, column) for row in range(4) for column in range(4)]
    places = [(place, 1e4) for place in grid] + [((row, column), 100.0) for row in (0, 1) for column in (0, 1)]
    weights = {name: parameter.detach().numpy() for name, parameter in attention.named_parameters()}
    qkv = (tokens[0].numpy() @ weights["qkv.weight"].T).reshape(21, 3, 2, 8)
    outputs = numpy.zeros((21, 16))
    for head in range(2):
        q, k = ([turned(qkv[n, part, head], weights[f"{letter}_norm.weight"], *places[n]) for n in range(21)]
                for part, letter in enumerate("qk"))  # fmt: skip
        for n in range(21):
            shares = numpy.exp(numpy.array([(q[n] * key.conj()).real.sum() for key in k]) / 8**0.5)
            outputs[n, head * 8 : head * 8 + 8] = shares / shares.sum() @ qkv[:, 2, head]
    expected = outputs @ weights["proj.weight"].T + weights["proj.bias"]
    assert attention(tokens, model.cos, model.sin)[0].detach().numpy() == pytest.approx(expected, abs=1e-4)


def test_everything_is_trained_blocks_begin_as_nearly_nothing_and_the_class_token_is_scored():
    model, tokens = vit5.ViT5(5, **SMALL), torch.randn(2, 21, 16)
    assert torch.allclose(model.norm(1000 * tokens), model.norm(tokens), rtol=1e-4, atol=1e-5)
    assert (model.blocks[0](tokens, model.cos, model.sin) - tokens).abs().max() < 1e-3
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    assert all(parameter.grad.any() for parameter in model.parameters())  # registers too, by attention alone
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(2, 3, 64, 64)).isfinite().all()
    model.blocks = nn.ModuleList()
    assert torch.equal(model(torch.randn(1, 3, 64, 64)), model.head(model.norm(model.cls_token[:, 0])))


def test_the_recipes_options_reach_it(image_folder, tmp_path):
    sizes = "--train-crop-size 32 --val-resize-size 32 --val-crop-size 32 --model-kwargs image_size=32".split()
    recipe, own = ["--recipe", "vit5-s", *sizes], ["--model", f"{EXAMPLE}:vit5_s"]
    args = config.parse_args([*recipe, *own, "--dry-run", "--stochastic-depth", "0.3"])
    model = build_model(args, 3)
    assert {block.drop_path.p for block in model.blocks} == {0.3}
    groups = optim.build_parameter_groups(args, model)
    decayed = {id(parameter) for group in groups if group["weight_decay"] for parameter in group["params"]}
    matrices = {part.weight for part in model.modules() if isinstance(part, nn.Linear | nn.Conv2d)}
    assert decayed == set(map(id, matrices))
    # One of few weights, which are saved.
    sizes = "dim=16, depth=2, num_heads=2, image_size=image_size, drop_path=0.05, in_chans=3"
    source = f"def few(num_classes, image_size):\n    return vit5.ViT5(num_classes, {sizes})\n"
    (tmp_path / "few.py").write_text(f"from examples import vit5\n\n{source}")
    argv = [*recipe, *"--device cpu --workers 0 --batch-size 4 --global-batch-size 12 --stop-epoch 1".split()]
    argv += ["--data-path", image_folder, "--output-dir", tmp_path / "out"]
    refused(run_train(tmp_path, *argv), "--recipe vit5-s names no model; give --model examples/vit5.py:vit5_s")
    assert "stopped after step 2" in run_train(tmp_path, *argv, f"--model={tmp_path}/few.py:few").check().output
