"""models/build.py: what is built, averages, classifiers, and weights with other heads."""

from contextlib import nullcontext

import pytest
import timm
import torch
import torchvision
from timm import loss as timms
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import metrics
from checkpointing.published import resolve_weights
from checkpointing.weights import Weights
from errors import UserError
from models import optim
from models.build import (
    AUXILIARY_WEIGHTS,
    FlipAverage,
    build_model,
    build_without_memory,
    classifier_layers,
    load_matching,
    set_training_mode,
)
from models.ema import ExponentialMovingAverage
from models.freezing import freeze_batchnorm
from models.losses import BinaryCrossEntropy, build_criterion
from settings import config


def test_the_average_is_torchs_averaged_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.PReLU())  # whose weight is one element
    ours = ExponentialMovingAverage(model, decay=0.9)
    theirs = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9), use_buffers=True)
    for _ in range(5):
        model(torch.randn(8, 4))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        ours.update_parameters(model)
        theirs.update_parameters(model)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        if name != "module.1.num_batches_tracked":  # theirs averages the count and cuts it to an integer
            # lerp and a weighted sum round differently, by a unit or two in the last place.
            torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-6, atol=1e-6)
    assert ours.module[1].num_batches_tracked == 5
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("reset", [lambda average: average.reset(), lambda average: average.n_averaged.fill_(0)])
def test_a_reset_average_starts_as_a_copy(reset):
    """Also as torchvision's loop resets it."""
    model = nn.Linear(2, 2)
    average = ExponentialMovingAverage(model, decay=0.9)
    average.update_parameters(model)
    reset(average)
    with torch.no_grad():
        model.weight.add_(1)
    average.update_parameters(model)
    assert torch.equal(average.module.weight, model.weight)


def load(name, weights, num_classes):
    def build(number):
        return torchvision.models.get_model(name, num_classes=number)

    model = build(num_classes)
    load_matching(model, weights, "w.pth", build, num_classes)
    return model


def test_weights_of_another_model_are_refused_in_one_line():
    weights = torchvision.models.squeezenet1_1(num_classes=5).state_dict()
    more = {**weights, "one.more": torch.zeros(1)}
    for name, given in (("squeezenet1_0", weights), ("resnet18", weights), ("squeezenet1_1", more)):
        with pytest.raises(UserError, match="another model") as refusal:
            load(name, given, 5)
        assert "\n" not in str(refusal.value)
    assert "one.more" in str(refusal.value)


@pytest.mark.parametrize(("options", "kwargs", "refusal"), [
    ({}, [], "does not say"),
    ({"model": "googlenet", "weights": None, "model_kwargs": [3]}, [], ""),
    ({"weights": "DEFAULT"}, [], "transform_input=True"),
    ({"weights": "GoogLeNet_Weights.IMAGENET1K_V1"}, ["transform_input=True"], ""),
    ({"weights": "start.pth", "model_kwargs": ["transform_input=True"]}, [], "transform_input=True"),
    ({"pretrained": True}, [], "transform_input=True"),
    ({"pretrained": False}, ["transform_input=True"], "transform_input=False"),
    ({}, ["transform_input=False"], ""),
])  # fmt: skip
def test_weights_whose_inputs_are_of_another_range_are_refused(options, kwargs, refusal):
    """torchvision rescales the inputs of GoogLeNet and Inception v3 for its published weights, and only then."""
    args = config.parse_args(["--synthetic", "--model", "googlenet"]).replaced(model_kwargs=kwargs, distributed=False)
    weights = Weights(torchvision.models.googlenet(aux_logits=True, init_weights=False).state_dict())
    weights.options, weights.kind = options, "a state dict"
    with pytest.raises(UserError, match=refusal) if refusal else nullcontext():
        build_model(args, 1000, weights)


def test_a_head_of_another_size_is_left_out_and_the_rest_loaded(capsys):
    weights = torchvision.models.squeezenet1_1(num_classes=5).state_dict()
    model = load("squeezenet1_1", weights, 7)
    assert torch.equal(model.state_dict()["features.0.weight"], weights["features.0.weight"])
    assert model.state_dict()["classifier.1.weight"].shape[0] == 7
    assert "classifier of 5 classes left out" in capsys.readouterr().out


def test_what_older_versions_of_modules_saved_is_translated():
    weights = torchvision.models.resnet18(num_classes=5).state_dict()
    old = {name: tensor for name, tensor in weights.items() if "num_batches_tracked" not in name}
    assert torch.equal(load("resnet18", old, 5).conv1.weight, weights["conv1.weight"])
    assert torch.equal(load("resnet18", old, 6).conv1.weight, weights["conv1.weight"])


def test_unknown_weights_are_named_with_those_that_exist():
    args = config.parse_args(["--synthetic", "--model", "resnet50", "--weights", "IMAGENET1K_V3"])
    with pytest.raises(UserError, match=r"did you mean resnet50\.IMAGENET1K_V"):
        resolve_weights(args)
    for name in ("ResNet50_Weights.IMAGENET1K_V2", "IMAGENET1K_V2"):
        assert resolve_weights(args.replaced(weights=name)) is torchvision.models.ResNet50_Weights.IMAGENET1K_V2
    with pytest.raises(UserError, match="is of resnet18"):
        resolve_weights(args.replaced(weights="ResNet18_Weights.IMAGENET1K_V1"))


def test_auxiliary_classifiers_count_in_training():
    for name, weight in [("googlenet", 0.3), ("inception_v3", 0.4)]:
        size = 299 if name == "inception_v3" else 64
        args = config.parse_args(
            ["--synthetic", "--model", name, "--label-smoothing", "0.1", "--train-crop-size", str(size)]
        )
        model, criterion = build_model(args, 4), build_criterion(args)
        image, target = torch.randn(2, 3, size, size), torch.tensor([1, 3])
        torch.manual_seed(0)
        output = model(image)
        expected = nn.functional.cross_entropy(output[0], target, label_smoothing=0.1)
        for scores in output[1:]:
            expected = expected + weight * nn.functional.cross_entropy(scores, target, label_smoothing=0.1)
        torch.testing.assert_close(criterion(output, target), expected)  # the same terms, added in another order
        criterion(output, target).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert torch.equal(metrics.count_correct(output, target)[0], metrics.count_correct(output[0], target)[0])
        assert isinstance(model.eval()(image), torch.Tensor)


def changed_by_a_step(model, args, image):
    """Return the names of the parameters and buffers that a step changes."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = optim.build_optimizer(args, optim.build_parameter_groups(args, model))
    set_training_mode(model)
    build_criterion(args)(model(image), torch.arange(len(image))).backward()
    optimizer.step()
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


def test_a_frozen_model_trains_its_classifier_alone_and_keeps_its_statistics():
    args = config.parse_args(["--synthetic", "--freeze", "--model", "resnet18", "--wd", "0.1"])
    model = build_model(args, 4)
    assert changed_by_a_step(model, args, torch.randn(4, 3, 32, 32)) == {"fc.weight", "fc.bias"}


def test_below_a_layer_nothing_changes_and_from_it_on_everything_does():
    args = config.parse_args(["--synthetic", "--freeze-below", "layer3.1", "--model", "resnet18", "--lr", "1"])
    model = build_model(args, 4)
    above = {name for name in model.state_dict() if name.startswith(("layer3.1", "layer4", "fc"))}
    assert changed_by_a_step(model, args, torch.randn(4, 3, 64, 64)) == above


@pytest.mark.parametrize("name", ["resnet18", "timm/test_efficientnet"])
def test_frozen_batchnorm_keeps_factors_and_statistics_and_all_else_trains(name, tmp_path):
    plain = config.parse_args(["--synthetic", "--model", name])
    torch.save(build_model(plain, 4).state_dict(), tmp_path / "first.pth")
    more = ["--weights", str(tmp_path / "first.pth"), "--freeze-batchnorm", "--lr", "1", "--wd", "0.1"]
    args = config.parse_args(["--synthetic", "--model", name, *more])
    model = build_model(args, 4)
    kinds = (torch.nn.BatchNorm2d,)
    norms = {each for each, module in model.named_modules() if isinstance(module, kinds)}
    others = {each for each in model.state_dict() if each.rpartition(".")[0] not in norms}
    assert norms
    assert changed_by_a_step(model, args, torch.randn(4, 3, 64, 64)) == others


def test_frozen_batchnorm_without_factors_keeps_its_statistics_and_dropout_beside_it_goes_on():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4, affine=False),
        torch.nn.Sequential(torch.nn.BatchNorm2d(4), torch.nn.Dropout()),
    )  # fmt: skip
    freeze_batchnorm(model)
    set_training_mode(model)
    assert [module.training for module in model.modules()] == [True, True, False, True, False, True]
    model(torch.randn(8, 3, 4, 4))
    assert all(not module.running_mean.any() for module in (model[1], model[2][0]))


def test_a_model_without_batchnorm_cannot_freeze_it():
    args = config.parse_args(["--synthetic", "--model", "vit_b_16"]).replaced(freeze_batchnorm=True)
    with pytest.raises(UserError, match="--freeze-batchnorm: the model has no BatchNorm; remove it"):
        build_without_memory(args, 4)


@pytest.mark.parametrize(("model", "layer", "first", "words"), [
    ("vit_b_16", "encoder.layers.encoder_layer_6", "encoder.layers.encoder_layer_6.ln_1.weight", ""),
    ("timm/deit_tiny_patch16_224", "blocks.5", "blocks.5.norm1.weight", ""),
    ("resnet18", "fc", "fc.weight", ""),
    ("resnet18", "layer5", "", "there are conv1, bn1, layer1, layer2, layer3, layer4, fc, and their sublayers"),
    ("resnet18", "layer", "", "--freeze-below layer: expected a layer"),
    ("resnet18", "conv1", "", "others before it"),
    ("vit_b_16", "6", "", "conv_proj, encoder, encoder.layers.encoder_layer_0, encoder.layers.encoder_layer_1,"),
])  # fmt: skip
def test_layers_before_the_named_one_are_frozen_in_the_order_of_the_model(model, layer, first, words):
    args = config.parse_args(["--synthetic", "--model", model, "--freeze-below", layer])
    if words:
        with pytest.raises(UserError, match=words):
            build_without_memory(args, 4)
        return
    trained = {name: each.requires_grad for name, each in build_without_memory(args, 4).named_parameters()}
    names = list(trained)
    assert [name for name in names if trained[name]] == names[names.index(first) :]


@pytest.mark.parametrize(("model", "ends"), [
    ("vgg11", ["classifier.6"]), ("squeezenet1_1", ["classifier.1"]), ("vit_b_32", ["heads.head"]),
    ("maxvit_t", ["classifier.5"]), ("googlenet", ["aux1.fc2", "aux2.fc2", "fc"]),
    ("inception_v3", ["AuxLogits.fc", "fc"]),
])  # fmt: skip
def test_the_classifier_is_found_and_no_inner_layer_of_as_many_outputs(model, ends):
    for num_classes in (37, 768, 1024):
        options = {"init_weights": False} if model in AUXILIARY_WEIGHTS else {}
        with torch.device("meta"):
            built = torchvision.models.get_model(model, num_classes=num_classes, **options)
        assert classifier_layers(built, num_classes) == ends


def test_stochastic_depth_and_dropout_are_overridden():
    argv = ["--synthetic", "--model", "convnext_tiny", "--stochastic-depth", "0.3"]
    with torch.device("meta"):
        model = build_model(config.parse_args(argv), 10)
        default = torchvision.models.convnext_tiny()
        mobile = build_model(config.parse_args(["--synthetic", "--model", "mobilenet_v2", "--dropout", "0.7"]), 10)
    odds = [[m.p for m in net.modules() if isinstance(m, torchvision.ops.StochasticDepth)] for net in (model, default)]
    assert max(odds[0]) == pytest.approx(0.3)
    assert odds[0] == pytest.approx([p * 3 for p in odds[1]])  # 0.1 by default
    assert [m.p for m in mobile.modules() if isinstance(m, nn.Dropout)] == [0.7]


def test_flip_averages_an_image_and_its_mirror_image():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    image = torch.randn(2, 3, 2, 2)
    mirrored = image[..., [1, 0]]
    assert torch.equal(FlipAverage(model)(image), (model(image) + model(mirrored)) / 2)


def test_timms_models_come_from_timm():
    argv = ["--synthetic", "--model", "timm/resnet10t", "--stochastic-depth", "0.2", "--norm-weight-decay", "0"]
    args = config.parse_args(argv)
    with torch.device("meta"):
        model = build_model(args, 7)
        expected = timm.create_model("resnet10t", num_classes=7, drop_path_rate=0.2)
    assert str(model) == str(expected)
    assert len(optim.build_parameter_groups(args, model)) == 2


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "levit_128s", "efficientformer_l1", "test_vit"])
def test_timms_heads_are_those_whose_shapes_depend_on_the_classes(name):
    with torch.device("meta"):
        one, other = (timm.create_model(name, num_classes=number) for number in (37, 41))
    shapes = {key: value.shape for key, value in other.state_dict().items()}
    expected = {key.rpartition(".")[0] for key, value in one.state_dict().items() if value.shape != shapes[key]}
    assert set(classifier_layers(one, 37)) == expected


def test_a_model_without_a_classifier_is_refused():
    with pytest.raises(UserError, match="has no final layer"):
        classifier_layers(nn.Sequential(nn.Linear(4, 4)), 3)


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "timm/vit_tiny_patch16_224"])
@pytest.mark.parametrize("fill", ["zero", "model"])
@pytest.mark.parametrize("number", [5, None])
def test_a_new_classifier_starts_at_zero_or_as_the_library_draws_it(name, fill, number, capsys):
    argv = ["--synthetic", "--model", name, "--weights", "w.pth", "--classifier-init", fill, "--seed", "7"]
    args = config.parse_args(argv)
    get = timm.create_model if name.startswith("timm/") else torchvision.models.get_model
    weights = get(name.removeprefix("timm/"), num_classes=number or 3).state_dict()
    torch.manual_seed(7)
    drawn = get(name.removeprefix("timm/"), num_classes=3)
    ends = classifier_layers(drawn, 3)
    if number is None:  # a backbone alone
        weights = {key: value for key, value in weights.items() if key.rpartition(".")[0] not in ends}
    is_zero = fill == "zero" and name != "squeezenet1_1"
    for key, value in build_model(args, 3, weights).state_dict().items():
        is_new = key.rpartition(".")[0] in ends
        expected = drawn.state_dict()[key] if is_new else weights[key]
        assert torch.equal(value, torch.zeros_like(value) if is_new and is_zero else expected)
    assert f"{'of zeros' if is_zero else 'as the model draws it'} (" in capsys.readouterr().out


def test_both_heads_of_a_distilled_model_are_replaced_and_trained(capsys):
    weights = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=5, depth=1).state_dict()
    argv = ["--model", "timm/deit_tiny_distilled_patch16_224", "--model-kwargs", "depth=1", "--weights", "w.pth"]
    args = config.parse_args(["--synthetic", *argv, "--freeze", "--lr", "0.1"])
    model = build_model(args, 3, weights)
    assert "left out, starting a new one of 3 of zeros (head, head_dist)" in capsys.readouterr().out
    assert torch.equal(model.state_dict()["blocks.0.mlp.fc1.weight"], weights["blocks.0.mlp.fc1.weight"])
    changed = changed_by_a_step(model, args, torch.randn(2, 3, 224, 224))
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
    ours, theirs = BinaryCrossEntropy(0.1, threshold), timms.BinaryCrossEntropy(0.1, threshold)
    torch.testing.assert_close(ours(logits, classes), theirs(logits.float(), classes))
    smoothed = soft * 0.9 + 0.01  # timm's mixing does it
    torch.testing.assert_close(ours(logits, soft), theirs(logits.float(), smoothed))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ours(logits, soft), theirs(logits.float(), smoothed))


def test_a_target_just_above_the_threshold_counts_in_bfloat16():
    loss = BinaryCrossEntropy(0.0, 0.2)(torch.zeros(1, 1, dtype=torch.bfloat16) + 3, torch.tensor([[0.2005]]))
    assert loss.item() == pytest.approx(0.04858735)  # log(1 + exp(-3)): the class is there
