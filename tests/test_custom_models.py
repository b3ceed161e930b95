"""A user's own model, and the example of one: run where the command line names it, and never because a file does."""

import numpy
import pytest
import timm
import torch
from torch import nn

from checkpointing.archive import load_checkpoint
from errors import UserError
from examples import vit5
from models import optim
from models.build import build_model
from scripts.trained import open_trained
from settings import config, custom_code
from tests.images import write_images
from tests.ranks import REPOSITORY
from tests.started import refused, run_train

SIZES = "--train-crop-size 32 --val-resize-size 32 --val-crop-size 32 --device cpu --workers 0 --batch-size 4".split()

# It leaves a mark each time that it is run.
SOURCE = """
from pathlib import Path
from torch import nn
import parts

with Path(__file__).with_name("ran").open("a") as file:
    file.write("x")

def tiny(num_classes, width=4, *, act="relu"):
    layers = [nn.Conv2d(3, width, 3, 4), parts.ACTS[act](), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.0), nn.Linear(width, num_classes))

class Twice(nn.Linear):
    def forward(self, image):
        return (super().forward(image.flatten(1)),) * 2

five = lambda num_classes: tiny(5)
a_tuple = lambda num_classes: Twice(3 * 32 * 32, num_classes)
half = lambda num_classes: tiny(num_classes).half()
lazy = lambda num_classes: nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))
frozen = lambda num_classes: tiny(num_classes).requires_grad_(False)
"""


@pytest.fixture
def net(tmp_path):
    home = tmp_path / "mine"
    home.mkdir()
    (home / "parts.py").write_text("from torch import nn\nACTS = {'relu': nn.ReLU, 'gelu': nn.GELU}\n")
    (home / "net.py").write_text(SOURCE)
    return home / "net.py"


def build(*argv, num_classes=3):
    args = config.parse_args(["--synthetic", *SIZES, *map(str, argv)]).replaced(is_launched=False)
    return build_model(args, num_classes)


def test_keyword_arguments_are_python_literals_or_text():
    texts = ["a=1", "b=1e-3", "c=(1, 2)", "d=None", "e=gelu", "f='None'", "g=", "h=x=y", "i=[True]"]
    assert custom_code.parse_kwargs(texts) == {
        "a": 1, "b": 1e-3, "c": (1, 2), "d": None, "e": "gelu", "f": "None", "g": "", "h": "x=y", "i": [True],
    }  # fmt: skip
    for wrong in (["a"], ["=1"], ["a b=1"], ["--lr=1"], ["a=1", "a=2"]):
        with pytest.raises(UserError, match=r"expected KEY=VALUE|given twice"):
            custom_code.parse_kwargs(wrong)


def test_they_reach_the_function_that_builds():
    wide = build("--model", "resnet18", "--model-kwargs", "norm_layer=None", "zero_init_residual=True")
    assert not any(block.bn2.weight.any() for block in wide.modules() if hasattr(block, "bn2"))
    sizes = ["--train-crop-size", "160", "--val-crop-size", "160"]
    drops = ["--stochastic-depth", "0.2", "--dropout", "0.3"]
    model = build("--model", "timm/test_vit", "--model-kwargs", "depth=2", "act_layer=relu", *sizes, *drops)
    same = timm.create_model("test_vit", num_classes=3, depth=2, act_layer="relu", drop_path_rate=0.2, drop_rate=0.3)
    assert str(model) == str(same)


@pytest.mark.parametrize(("argv", "words"), [
    ("resnet18 --model-kwargs foo=1", "--model-kwargs foo=1: "),
    ("regnet_y_400mf --model-kwargs foo=1", "unexpected keyword argument 'foo'"),
    ("resnet18 --model-kwargs weights=DEFAULT", "--model-kwargs weights: set by another option"),
    ("timm/test_resnet --model-kwargs checkpoint_path=x", "--model-kwargs checkpoint_path: "),
    ("none.py:tiny", "no such file; give FILE.py:FUNCTION"),
    ("NET:tinny", "has no function tinny; did you mean tiny?"),
    ("NET:five", "to try it, is torch.float32 of shape (2, 5); expected float32 scores"),
    ("NET:a_tuple", "its output is a tuple of 2, which needs a loss of your own: give --criterion"),
    ("NET:half", "Input type (float) and bias type (c10::Half) should be the same"),
    ("NET:lazy", "uninitialized parameter"),
    ("NET:tiny --model-kwargs wide=8", "(num_classes, width=4, *, act='relu'), but is called with"),
    ("NET:tiny --stochastic-depth 0.1", "does not support it"),
    ("HOME/missing.py:tiny", "line 2): ModuleNotFound"), ("HOME/broken.py:tiny", "line 2"),
])  # fmt: skip
def test_mistakes_are_one_line(net, argv, words):
    (net.parent / "missing.py").write_text("\nimport nothing_there\n")
    (net.parent / "broken.py").write_text("\ndef (\n")
    with pytest.raises(UserError) as refusal:
        build("--model", *argv.replace("NET", str(net)).replace("HOME", str(net.parent)).split())
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_model_is_its_functions_whatever_the_files_name_and_one_that_trains_nothing_is_refused(net, monkeypatch):
    monkeypatch.chdir(net.parent)
    net = net.rename("vit_mine.py")
    torch.manual_seed(0)
    model = build("--model", f"{net}:tiny", *"--model-kwargs width=6 --dropout 0.25".split(), num_classes=5)
    assert [type(layer).__name__ for layer in model][1] == "ReLU"
    assert (model[4].p, model[5].in_features, model[5].out_features) == (0.25, 6, 5)
    torch.manual_seed(0)  # the first weights are those of --seed
    assert torch.equal(model[0].weight, nn.Conv2d(3, 6, 3, 4).weight)
    args = config.parse_args(["--synthetic", "--model", f"{net}:frozen"])
    with pytest.raises(UserError, match=r"vit_mine.py:frozen has no trainable parameters"):
        optim.build_optimizer(
            args.optimization,
            args.precision,
            args.model.model,
            optim.build_parameter_groups(args.optimization, build("--model", args.model.model)),
        )


def test_no_file_has_code_run_and_what_the_command_line_names_trains_and_is_evaluated(net, tmp_path):
    out, last = tmp_path / "out", tmp_path / "out" / "checkpoint.pth"
    images = write_images(tmp_path / "images", {"train": [4, 4], "val": [2, 2]})
    argv = ["--data-path", images, "--output-dir", out, *SIZES]
    model = ["--model", f"{net}:tiny", "--model-kwargs", "width=8", "act=gelu"]
    run_train(tmp_path, *argv, *model, "--epochs", 1).check()
    state = load_checkpoint(last, "it")
    assert state["model"]["0.weight"].shape[0] == 8
    assert state["args"]["model_kwargs"] == ["act=gelu", "width=8"]
    (net.parent / "ran").unlink()
    words = "runs only if the command line names it"
    refused(run_train(tmp_path, *argv, "--test-only", "--resume", last), words)
    refused(run_train(tmp_path, *argv, "--recipe", out / "recipe.toml", "--overwrite"), words)
    for other in ("resnet18", f"{REPOSITORY}/models/build.py:tiny"):
        refused(run_train(tmp_path, *argv, "--model", other, "--test-only", "--resume", last), "--model is", "tiny")
    with pytest.raises(UserError, match=words):
        open_trained(str(last))
    with pytest.raises(UserError, match="and --model is resnet18"):
        open_trained(str(last), model="resnet18")
    assert not (net.parent / "ran").exists()
    # From a folder to which the file was moved, and its keyword arguments in another order.
    moved = f"{net.parent.rename(tmp_path / 'moved')}/net.py:tiny"
    again = ["--model", moved, "--resume", "auto", "--model-kwargs", "act=gelu", "width=8"]
    finished = run_train(tmp_path, *argv, *again, "--epochs", 2).check()
    assert "finished 2 epochs" in finished.output
    assert finished.output.splitlines()[-1].endswith(f"--model {moved}")  # of the command that evaluates
    evaluated = run_train(tmp_path, *argv, *again[:2], "--test-only", "--resume", last).check()
    assert "--model-kwargs act=gelu width=8: as in the checkpoint" in evaluated.output
    assert isinstance(open_trained(str(last), model=moved).model[1], nn.GELU)
    refused(run_train(tmp_path, *argv, *again[:4], "--epochs", 3), "model-kwargs", "give the checkpoint's")
    recipe = ["--recipe", out / "recipe.toml", *again[:2], "--overwrite", "--epochs", 1]
    assert "finished 1 epoch" in run_train(tmp_path, *argv, *recipe).check().output


# The example, examples/vit5.py, against timm's ViT and a plain computation.
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


def test_heads_are_rounded_before_and_after_the_norms_weight():
    norm, heads = vit5.HeadNorm(64, eps=1e-6), torch.randn(50, 64).bfloat16()
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    wide = heads.double()
    normed = (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()).float().bfloat16()
    expected = (normed.double() * norm.weight.double()).float().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(norm(heads), expected)
        once = nn.functional.rms_norm(heads.float(), (64,), norm.weight, 1e-6).bfloat16()
    assert not torch.equal(once, expected)


def test_positions_of_weights_for_another_size_are_resized_by_row_and_column():
    small, large = (vit5.ViT5(5, **SMALL | {"image_size": size}) for size in (128, 192))
    with torch.no_grad():  # one channel is the row, one the column, in patches of 1 from the edge
        small.pos_embed[0, :, 0] = torch.arange(8.0).repeat_interleave(8) + 0.5
        small.pos_embed[0, :, 1] = torch.arange(8.0).repeat(8) + 0.5
    large.load_state_dict(small.state_dict())
    grid = large.pos_embed.detach()[0].unflatten(0, (12, 12))[3:-3, 3:-3]  # cubic but for the edges
    places = (torch.arange(12.0)[3:-3] + 0.5) * 8 / 12
    # torch's cubic, of a = -0.75, leaves a straight line by 0.046.
    assert torch.allclose(grid[..., 0], places[:, None].expand(6, 6), atol=0.05)
    assert torch.allclose(grid[..., 1], places.expand(6, 6), atol=0.05)


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
    recipe, own = ["--recipe", "vit5-s", *sizes], ["--model", f"{REPOSITORY}/examples/vit5.py:vit5_s"]
    args = config.parse_args([*recipe, *own, "--dry-run", "--stochastic-depth", "0.3"])
    model = build_model(args, 3)
    assert {block.drop_path.p for block in model.blocks} == {0.3}
    groups = optim.build_parameter_groups(args.optimization, model)
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


def test_the_second_stage_follows_the_first_by_its_average(tmp_path):
    """As `command` of the two recipes has it, on made-up images, with fewer weights and larger images at the end."""
    (tmp_path / "few.py").write_text(
        "from examples import vit5\n\n\ndef few(num_classes, image_size=64):\n"
        "    sizes = {'dim': 16, 'depth': 2, 'num_heads': 2, 'drop_path': 0.05, 'in_chans': 3}\n"
        "    return vit5.ViT5(num_classes, **sizes, image_size=image_size)\n"
    )
    common = "--synthetic 24 --device cpu --workers 0 --batch-size 8 --global-batch-size 8 --stop-epoch 1".split()
    common += [f"--model={tmp_path}/few.py:few"]
    for name, size, more in (
        ("vit5-s-nvidia", 32, ["--model-kwargs", "image_size=32"]),
        ("vit5-s-nvidia-finetune", 64, ["--weights", tmp_path / "vit5-s-nvidia" / "checkpoint.pth", "--ema"]),
    ):
        sizes = [f"--{kind}-size={size}" for kind in ("train-crop", "val-resize", "val-crop")]
        argv = ["--recipe", name, *common, *sizes, *more, "--output-dir", tmp_path / name]
        output = run_train(tmp_path, *argv).check().output
        assert "stopped after step 3" in output
    assert "checkpoint.pth: the average of " in output
    assert "resized pos_embed from (1, 4, 16) to (1, 16, 16)" in output
