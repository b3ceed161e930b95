"""models/build.py: what is built, averages, classifiers, weights with other heads; a step of every classifier."""

import copy
from contextlib import nullcontext

import pytest
import timm
import torch
import torchvision
from torch import nn

import data
import metrics
import train
from checkpointing import guard
from checkpointing.archive import load_checkpoint
from checkpointing.checkpoint import RunState
from checkpointing.published import resolve_weights
from checkpointing.schema import check_schema
from checkpointing.weights import Weights
from errors import UserError
from models import build, optim
from models.build import AUXILIARY_WEIGHTS, begin_training, build_model, build_without_memory
from models.classifier import classifier_layers
from models.ema import ExponentialMovingAverage
from models.freezing import freeze_batchnorm
from models.losses import build_criterion
from models.matching import load_matching
from sampler import TrainSampler, VirtualShards
from settings import config
from tests.endings import differing, flatten
from tests.ranks import some_slow


def test_the_average_of_every_shape_and_type_is_that_of_its_formula_and_a_reset_one_a_copy():
    model = nn.Module()
    shapes = {"matrix": (3, 2), "one": (1,), "none": (0,), "scalar": (), "float16": (3,), "complex64": (2,)}
    for name, shape in shapes.items():
        model.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=getattr(torch, name, None))))
    for name in ("float64", "int64", "bool"):
        model.register_buffer(name, torch.zeros(4, dtype=getattr(torch, name)))
    model.tied = model.matrix
    average = ExponentialMovingAverage(model, decay=0.75)
    for step in (1, 2, 5, 11):
        with torch.no_grad():
            for value in model.state_dict().values():
                value.fill_(step)
        average.update_parameters(model)
    found = average.state_dict()
    torch.optim.swa_utils.AveragedModel(model, use_buffers=True).load_state_dict(found)
    assert found.pop("n_averaged") == 4
    for name, value in model.state_dict(prefix="module.").items():
        mean = 0.75**3 * 1 + 0.25 * (0.75**2 * 2 + 0.75 * 5 + 11)  # exact in float16 too
        assert torch.equal(found.pop(name), torch.full_like(value, mean) if value.is_floating_point() else value), name
    assert found == {}
    for reset in (average.reset, lambda: average.n_averaged.fill_(0)):  # the second as in torchvision's loop
        reset()
        model.one.data.add_(1)
        average.update_parameters(model)
        assert torch.equal(average.module.one, model.one)


def parse(words):
    return config.parse_args(["--synthetic", *words.split()])


def load(name, weights, num_classes):
    def build_one(number):
        return torchvision.models.get_model(name, num_classes=number)

    model = build_one(num_classes)
    load_matching(model, weights, "w.pth", build_one, num_classes)
    return model


def test_weights_of_another_model_are_refused_in_one_line_and_a_head_of_another_size_is_left_out(capsys):
    weights = torchvision.models.squeezenet1_1(num_classes=5).state_dict()
    more = {**weights, "one.more": torch.zeros(1)}
    for name, given in (("squeezenet1_0", weights), ("resnet18", weights), ("squeezenet1_1", more)):
        with pytest.raises(UserError, match="another model") as refusal:
            load(name, given, 5)
        assert "\n" not in str(refusal.value)
    assert "one.more" in str(refusal.value)
    found = load("squeezenet1_1", weights, 7).state_dict()
    assert torch.equal(found["features.0.weight"], weights["features.0.weight"])
    assert found["classifier.1.weight"].shape[0] == 7
    assert "classifier of 5 classes left out" in capsys.readouterr().out


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
    args = parse("--model googlenet").replaced(model_kwargs=kwargs, is_launched=False)
    weights = Weights(torchvision.models.googlenet(aux_logits=True, init_weights=False).state_dict())
    weights.options, weights.kind = options, "a state dict"
    with pytest.raises(UserError, match=refusal) if refusal else nullcontext():
        build_model(args, 1000, weights)


def test_what_older_versions_of_modules_saved_is_translated():
    weights = torchvision.models.shufflenet_v2_x0_5(num_classes=5).state_dict()
    old = {name: tensor for name, tensor in weights.items() if "num_batches_tracked" not in name}
    for num_classes in (5, 6):
        assert torch.equal(load("shufflenet_v2_x0_5", old, num_classes).conv1[0].weight, weights["conv1.0.weight"])


def test_unknown_weights_are_named_with_those_that_exist():
    args = parse("--model resnet50 --weights IMAGENET1K_V3")
    with pytest.raises(UserError, match=r"did you mean resnet50\.IMAGENET1K_V"):
        resolve_weights(args.model)
    for name in ("ResNet50_Weights.IMAGENET1K_V2", "IMAGENET1K_V2"):
        assert resolve_weights(args.replaced(weights=name).model) is torchvision.models.ResNet50_Weights.IMAGENET1K_V2
    with pytest.raises(UserError, match="is of resnet18"):
        resolve_weights(args.replaced(weights="ResNet18_Weights.IMAGENET1K_V1").model)


def test_auxiliary_classifiers_count_in_training():
    model = build_model(parse("--model googlenet --train-crop-size 64 --model-kwargs init_weights=False"), 4)
    output, target = model(torch.randn(2, 3, 64, 64)), torch.tensor([1, 3])
    for name, weight, scores in [("googlenet", 0.3, output), ("inception_v3", 0.4, output[:2])]:
        criterion = build_criterion(parse(f"--model {name} --label-smoothing 0.1"))
        losses = [nn.functional.cross_entropy(each, target, label_smoothing=0.1) for each in scores]
        expected = losses[0] + weight * sum(losses[1:])
        torch.testing.assert_close(criterion(scores, target), expected)  # the same terms, added in another order
        assert torch.equal(metrics.count_correct(scores, target)[0], metrics.count_correct(scores[0], target)[0])
    build_criterion(parse("--model googlenet"))(output, target).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert isinstance(model.eval()(torch.randn(2, 3, 64, 64)), torch.Tensor)


def changed_by_a_step(model, args, image):
    """Return the names of the parameters and buffers that a step changes."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = optim.build_optimizer(
        args.optimization, args.precision, args.model.model, optim.build_parameter_groups(args.optimization, model)
    )
    begin_training(model)
    build_criterion(args)(model(image), torch.arange(len(image))).backward()
    optimizer.step()
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize(("words", "size", "changed"), [
    ("--freeze --wd 0.1", 32, ("fc.",)), ("--freeze-below layer3.1 --lr 1", 64, ("layer3.1", "layer4", "fc")),
])  # fmt: skip
def test_only_what_is_not_frozen_changes_and_statistics_neither(words, size, changed):
    args = parse(f"--model resnet18 {words}")
    model = build_model(args, 4)
    expected = {name for name in model.state_dict() if name.startswith(changed)}
    assert changed_by_a_step(model, args, torch.randn(4, 3, size, size)) == expected


@pytest.mark.parametrize("name", ["resnet18", "timm/test_efficientnet"])
def test_frozen_batchnorm_keeps_factors_and_statistics_and_all_else_trains(name, tmp_path):
    torch.save(build_model(parse(f"--model {name}"), 4).state_dict(), tmp_path / "first.pth")
    args = parse(f"--model {name} --weights {tmp_path / 'first.pth'} --freeze-batchnorm --lr 1 --wd 0.1")
    model = build_model(args, 4)
    norms = {each for each, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    others = {each for each in model.state_dict() if each.rpartition(".")[0] not in norms}
    assert changed_by_a_step(model, args, torch.randn(4, 3, 64, 64)) == others


def test_frozen_batchnorm_without_factors_keeps_its_statistics_and_dropout_beside_it_goes_on():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False),
        nn.Sequential(nn.BatchNorm2d(4), nn.Dropout()),
    )  # fmt: skip
    freeze_batchnorm(model)
    begin_training(model)
    assert [module.training for module in model.modules()] == [True, True, False, True, False, True]
    model(torch.randn(8, 3, 4, 4))
    assert all(not module.running_mean.any() for module in (model[1], model[2][0]))


def test_a_model_without_batchnorm_or_a_classifier_cannot_freeze_or_replace_it():
    with pytest.raises(UserError, match="has no final layer"):
        classifier_layers(nn.Sequential(nn.Linear(4, 4)), 3)
    with pytest.raises(UserError, match="--freeze-batchnorm: the model has no BatchNorm; remove it"):
        build_without_memory(parse("--model vit_b_16").replaced(freeze_batchnorm=True), 4)


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
    args = parse(f"--model {model} --freeze-below {layer}")
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
    with torch.device("meta"):
        model = build_model(parse("--model convnext_tiny --stochastic-depth 0.3"), 10)
        default = torchvision.models.convnext_tiny()
        mobile = build_model(parse("--model mobilenet_v2 --dropout 0.7"), 10)
    odds = [[m.p for m in net.modules() if isinstance(m, torchvision.ops.StochasticDepth)] for net in (model, default)]
    assert max(odds[0]) == pytest.approx(0.3)
    assert odds[0] == pytest.approx([p * 3 for p in odds[1]])  # 0.1 by default
    assert [m.p for m in mobile.modules() if isinstance(m, nn.Dropout)] == [0.7]


def test_flip_averages_an_image_and_its_mirror_image():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    image = torch.randn(2, 3, 2, 2)
    assert torch.equal(build.FlipAverage(model)(image), (model(image) + model(image[..., [1, 0]])) / 2)


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "levit_128s", "efficientformer_l1", "test_vit"])
def test_timms_heads_are_those_whose_shapes_depend_on_the_classes(name):
    with torch.device("meta"):
        one, other = (timm.create_model(name, num_classes=number) for number in (37, 41))
    shapes = {key: value.shape for key, value in other.state_dict().items()}
    expected = {key.rpartition(".")[0] for key, value in one.state_dict().items() if value.shape != shapes[key]}
    assert set(classifier_layers(one, 37)) == expected


@pytest.mark.parametrize("name", ["shufflenet_v2_x0_5", "squeezenet1_1", "timm/test_efficientnet"])
@pytest.mark.parametrize("fill", ["zero", "model"])
@pytest.mark.parametrize("number", [5, None])
def test_a_new_classifier_starts_at_zero_or_as_the_library_draws_it(name, fill, number, capsys):
    args = parse(f"--model {name} --weights w.pth --classifier-init {fill} --seed 7")
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
    name = "--model timm/deit_tiny_distilled_patch16_224 --model-kwargs depth=1"
    args = parse(f"{name} --weights w.pth --freeze --lr 0.1")
    model = build_model(args, 3, weights)
    assert "left out, starting a new one of 3 of zeros (head, head_dist)" in capsys.readouterr().out
    assert torch.equal(model.state_dict()["blocks.0.mlp.fc1.weight"], weights["blocks.0.mlp.fc1.weight"])
    changed = changed_by_a_step(model, args, torch.randn(2, 3, 224, 224))
    assert changed == {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"}


def test_a_run_trains_at_the_sizes_of_its_epochs(image_folder):
    argv = "--train-crop-size 64 --train-crop-size-min 32 --crop-ramp-epochs 0 1 --workers 0 --device cpu".split()
    args = config.parse_args(["--data-path", str(image_folder), *argv])
    dataset, _ = data.build_datasets(str(image_folder / "train"), str(image_folder / "val"), args)
    sampler = TrainSampler(len(dataset), VirtualShards(8, 1))
    for epoch, size in [(0, 32), (1, 64), (5, 64)]:
        sampler.set_epoch(epoch)
        assert next(
            iter(
                data.build_loader(
                    dataset, sampler, args.data, args.augmentation, args.optimization, args.distributed.device
                )
            )
        )[0].shape == (8, 3, size, size)


# What is not happy with 64 px.
SIZES = {"inception_v3": 299, "maxvit_t": 224, "vit_h_14": 28}
REPRESENTATIVE = [
    "densenet121", "efficientnet_b0", "googlenet", "mnasnet0_5", "mobilenet_v3_small", "regnet_y_400mf",
    "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t",
]  # fmt: skip
OTHERS = sorted(set(torchvision.models.list_models(module=torchvision.models)) - set(REPRESENTATIVE))


@pytest.mark.parametrize("name", some_slow([*REPRESENTATIVE, *OTHERS], OTHERS))
def test_a_classifier_trains_a_step_and_resumes(name, tmp_path):
    size = SIZES.get(name, 64)
    argv = f"--synthetic 8 --model {name} --device cpu --workers 0 --lr 0.01 --batch-size 2".split()
    args = config.parse_args([*argv, "--train-crop-size", str(size), "--val-crop-size", str(size)])
    model = build_model(args, 5)
    optimizer = optim.build_optimizer(
        args.optimization, args.precision, args.model.model, optim.build_parameter_groups(args.optimization, model)
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    generator = torch.Generator().manual_seed(0)
    loader = [(torch.randn(2, 3, size, size, generator=generator), torch.tensor([1, 3]))]
    train.train_one_epoch(model, build_criterion(args), optimizer, loader, torch.device("cpu"), 0, args)
    moved = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    # A ViT's classifier begins at zero, and nothing below it moves yet.
    assert any(moved) if name.startswith("vit_") else sum(moved) > 0.9 * len(moved)
    del before  # some models have hundreds of megabytes of each
    optimizer.zero_grad()
    args = config.assign(args.replaced(world_size=1), None)
    facts = guard.run_facts(args, *data.build_datasets(None, None, args))
    state = RunState(1, facts, {"model": model, "optimizer": optim.OptimizerState(optimizer)}).state_dict()
    torch.save(state, tmp_path / "checkpoint.pth")
    restored = copy.deepcopy(model)
    for tensor in restored.state_dict().values():
        tensor.zero_()
    restored_optimizer = optim.build_optimizer(
        args.optimization, args.precision, args.model.model, optim.build_parameter_groups(args.optimization, restored)
    )
    run = RunState(1, facts, {"model": restored, "optimizer": optim.OptimizerState(restored_optimizer)})
    run.load_state_dict(check_schema(load_checkpoint(tmp_path / "checkpoint.pth", "it"), "it"))
    assert differing(model.state_dict(), restored.state_dict()) == []
    assert differing(*(flatten(each.state_dict()["state"]) for each in (optimizer, restored_optimizer))) == []
