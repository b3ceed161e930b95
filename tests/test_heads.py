"""Models with several heads: which layers are their classifiers, fine-tuned and frozen; and losses of their scores."""

import pytest
import timm
import torch
import torchvision
from timm.loss import BinaryCrossEntropy
from torch import nn

import config
import metrics
import models
import optim
from errors import UserError

DISTILLED = "timm/deit_tiny_distilled_patch16_224"


@pytest.mark.parametrize("num_classes", [7, 128, 512, 768, 1024])
@pytest.mark.parametrize(
    ("name", "ends"), [("googlenet", ["aux1.fc2", "aux2.fc2", "fc"]), ("inception_v3", ["AuxLogits.fc", "fc"])]
)
def test_inner_layers_of_as_many_outputs_are_no_classifiers(name, ends, num_classes):
    with torch.device("meta"):
        model = torchvision.models.get_model(name, num_classes=num_classes, init_weights=False)
    assert models.classifier_layers(model, num_classes) == ends


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "levit_128s", "efficientformer_l1", "test_vit"])
def test_timms_heads_are_those_whose_shapes_depend_on_the_classes(name):
    with torch.device("meta"):
        one, other = (timm.create_model(name, num_classes=number) for number in (37, 41))
    shapes = {key: value.shape for key, value in other.state_dict().items()}
    expected = {key.rpartition(".")[0] for key, value in one.state_dict().items() if value.shape != shapes[key]}
    assert set(models.classifier_layers(one, 37)) == expected


def test_a_model_without_a_classifier_is_refused():
    with pytest.raises(UserError, match="no layer at its end"):
        models.classifier_layers(nn.Sequential(nn.Linear(4, 4)), 3)


def build(num_classes, *argv, weights=None):
    args = config.parse_args(["--synthetic", "--model", DISTILLED, "--weights", "w.pth", *argv])
    return args, models.build_model(args, num_classes, weights)


def test_both_heads_of_a_distilled_model_are_replaced_and_trained(capsys):
    weights = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=5).state_dict()
    args, model = build(3, "--freeze", "--lr", "0.1", weights=weights)
    assert "classifier of 5 classes left out, starting a new one of 3 (head, head_dist)" in capsys.readouterr().out
    assert torch.equal(model.state_dict()["blocks.3.mlp.fc1.weight"], weights["blocks.3.mlp.fc1.weight"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = optim.build_optimizer(args, optim.build_parameter_groups(args, model))
    models.set_training_mode(model)
    metrics.build_criterion(args)(model(torch.randn(2, 3, 224, 224)), torch.tensor([0, 2])).backward()
    optimizer.step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threshold", [None, 0.2])
def test_binary_cross_entropy_is_timms_in_any_type(dtype, threshold):
    torch.manual_seed(0)
    logits, classes = torch.randn(6, 10).to(dtype), torch.arange(6)
    shares = torch.tensor([0.2005, 0.2, 0.1995, 0.5, 0.999, 0.3])[:, None]
    one_hot = nn.functional.one_hot
    soft = one_hot(classes, 10) * shares + one_hot(classes + 1, 10) * (1 - shares)
    # timm's of float32 logits and targets of that type: nothing is rounded but the logits themselves.
    ours, theirs = metrics.BinaryCrossEntropy(0.1, threshold), BinaryCrossEntropy(0.1, threshold)
    torch.testing.assert_close(ours(logits, classes), theirs(logits.float(), classes))
    smoothed = soft * 0.9 + 0.01  # timm's mixing does it
    torch.testing.assert_close(ours(logits, soft), theirs(logits.float(), smoothed))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ours(logits, soft), theirs(logits.float(), smoothed))


def test_a_target_just_above_the_threshold_counts_in_bfloat16():
    loss = metrics.BinaryCrossEntropy(0.0, 0.2)(torch.zeros(1, 1, dtype=torch.bfloat16) + 3, torch.tensor([[0.2005]]))
    assert loss.item() == pytest.approx(0.04858735)  # log(1 + exp(-3)): the class is there
