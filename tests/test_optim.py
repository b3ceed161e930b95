"""Learning rates, parameter groups and optimizers: torch's and torchvision's numbers."""

import enum
import itertools
import re

import numpy as np
import pytest
import torch
import torchvision
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, ExponentialLR, LinearLR, SequentialLR, StepLR

import config
import metrics
import models
import optim
import options
import presets
import utils
from distributed import collectives
from errors import NonFiniteError, UserError
from sampler import TrainSampler, VirtualShards
from tests.endings import read_metrics
from tests.ranks import run_ranks, train_rank
from tests.runs import run_of

EPOCHS, STEP_SIZE, GAMMA, LR_MIN, DECAY = 14, 3, 0.3, 0.001, 0.02
SCHEDULERS = ["steplr", "cosineannealinglr", "exponentiallr"]


def options_of(**changes):
    """Return the default options with changes."""
    args = config.parse_args(["--synthetic"])
    vars(args).update(changes)
    return args


def schedule_options(**changes):
    options = {
        "epochs": EPOCHS, "lr_scheduler": "steplr", "lr_warmup_epochs": 0, "lr_warmup_method": "constant",
        "lr_warmup_decay": DECAY, "lr_step_size": STEP_SIZE, "lr_gamma": GAMMA, "lr_min": LR_MIN,
    }  # fmt: skip
    return options_of(**{**options, **changes})


def sgd(*rates):
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates], lr=1.0)


def reference_rates(scheduler, method, warmup, optimizer):
    """The rates of each epoch, by torch's schedulers put together as in torchvision's script."""
    if scheduler == "steplr":
        main = StepLR(optimizer, step_size=STEP_SIZE, gamma=GAMMA)
    elif scheduler == "cosineannealinglr":
        main = CosineAnnealingLR(optimizer, T_max=EPOCHS - warmup, eta_min=LR_MIN)
    else:
        main = ExponentialLR(optimizer, gamma=GAMMA)
    if warmup:
        if method == "linear":
            first = LinearLR(optimizer, start_factor=DECAY, total_iters=warmup)
        else:
            first = ConstantLR(optimizer, factor=DECAY, total_iters=warmup)
        main = SequentialLR(optimizer, schedulers=[first, main], milestones=[warmup])
    rates = []
    for _ in range(EPOCHS):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        main.step()
    return rates


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("method", ["constant", "linear"])
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_rates_are_torchs(scheduler, method, warmup):
    expected = reference_rates(scheduler, method, warmup, sgd(0.5, 0.05))
    optimizer = sgd(0.5, 0.05)
    args = schedule_options(lr_scheduler=scheduler, lr_warmup_epochs=warmup, lr_warmup_method=method)
    lr_scheduler = optim.LRScheduler(args, optimizer)
    for epoch in range(EPOCHS):
        lr_scheduler.set_position(epoch, 0, 100)
        rates = [group["lr"] for group in optimizer.param_groups]
        # torch multiplies its way from epoch to epoch; this is a closed form: a few roundings of float64
        assert rates == pytest.approx(expected[epoch], rel=0, abs=1e-12)
    assert len({tuple(rates) for rates in expected}) > 1


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_rates_need_no_history(scheduler):
    args = schedule_options(lr_scheduler=scheduler, lr_warmup_epochs=2, lr_warmup_method="linear")
    jumping, walking = sgd(0.5), sgd(0.5)
    walk = optim.LRScheduler(args, walking)
    for epoch in range(8):
        walk.set_position(epoch, 0, 100)
    optim.LRScheduler(args, jumping).set_position(7, 0, 100)
    assert jumping.param_groups[0]["lr"] == walking.param_groups[0]["lr"]
    walk.set_position(2, 0, 100)
    assert walking.param_groups[0]["lr"] == 0.5


def test_linear_warmup_and_cosine_are_continuous_between_epochs():
    options = {"lr_scheduler": "cosineannealinglr", "epochs": 10, "lr_warmup_epochs": 2, "lr_min": 0.0}
    args = schedule_options(**options, lr_warmup_method="linear", lr_warmup_decay=0.1)
    assert optim.lr_at(args, 1.5, 1.0) == pytest.approx(0.1 + 0.9 * 0.75, abs=1e-12)
    assert optim.lr_at(args, 6.0, 1.0) == pytest.approx(0.5, abs=1e-12)  # half of the cosine's way
    args.lr_min = 0.25
    assert optim.lr_at(args, 10.0, 1.0) == pytest.approx(0.25, abs=1e-12)


NORMS = {"BatchNorm2d", "LayerNorm", "LayerNorm2d"}
EMBEDDINGS = ["class_token", "position_embedding", "relative_position_bias_table"]


@pytest.fixture(scope="module", params=["resnet50", "vit_b_16", "swin_t", "convnext_tiny", "maxvit_t"])
def model(request):
    with torch.device("meta"):  # names and types only
        extra = {"input_size": (224, 224)} if request.param == "maxvit_t" else {}
        return torchvision.models.get_model(request.param, weights=None, **extra)


def expected_groups(model, decays):
    """{group: names of its parameters}, by the name of each parameter and the name of its module's type."""
    groups = {}
    for name, _ in model.named_parameters():
        module_name, _, last = name.rpartition(".")
        if last in decays:
            group = last
        elif "norm" in decays and type(model.get_submodule(module_name)).__name__ in NORMS:
            group = "norm"
        else:
            group = "other"
        groups.setdefault(group, []).append(name)
    return {group: groups[group] for group in ["other", "norm", "bias", *EMBEDDINGS] if group in groups}


def assert_groups(model, groups, decays):
    names = {parameter: name for name, parameter in model.named_parameters()}
    expected = expected_groups(model, decays)
    assert [[names[parameter] for parameter in group["params"]] for group in groups] == list(expected.values())
    assert [group["weight_decay"] for group in groups] == [decays[group] for group in expected]
    assert sum(len(group["params"]) for group in groups) == len(names)
    return expected


def decay_options(norm=None, bias=None, embedding=None):
    return options_of(
        weight_decay=0.3, norm_weight_decay=norm, bias_weight_decay=bias, transformer_embedding_decay=embedding
    )


def test_one_group_without_further_options(model):
    assert list(assert_groups(model, optim.set_weight_decay(model, 0.3), {"other": 0.3})) == ["other"]
    assert_groups(model, optim.build_parameter_groups(decay_options(), model), {"other": 0.3})


def test_norms_apart(model):
    groups = assert_groups(model, optim.set_weight_decay(model, 0.3, 0.0), {"other": 0.3, "norm": 0.0})
    assert list(groups) == ["other", "norm"]
    assert_groups(model, optim.build_parameter_groups(decay_options(norm=0.0), model), {"other": 0.3, "norm": 0.0})


def test_biases_before_norms_and_embeddings_apart(model):
    args = decay_options(norm=0.1, bias=0.0, embedding=0.2)
    decays = {"other": 0.3, "norm": 0.1, "bias": 0.0, **dict.fromkeys(EMBEDDINGS, 0.2)}
    groups = assert_groups(model, optim.build_parameter_groups(args, model), decays)
    norm_biases = [name for name in groups["bias"] if type(model.get_submodule(name[:-5])).__name__ in NORMS]
    assert norm_biases


def test_a_key_with_a_dot_is_a_full_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = optim.set_weight_decay(model, 0.3, custom_keys_weight_decay=[("1.weight", 0.1)])
    assert [group["weight_decay"] for group in groups] == [0.3, 0.1]
    assert [len(group["params"]) for group in groups] == [3, 1]
    assert groups[1]["params"][0] is model[1].weight


def test_frozen_and_shared_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)
    model[2].weight = model[0].weight
    model[2].bias = model[0].bias
    (group,) = optim.set_weight_decay(model, 0.3)
    assert [id(p) for p in group["params"]] == [id(model[0].bias), id(model[1].weight), id(model[1].bias)]


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm1d(4), nn.BatchNorm3d(4), nn.SyncBatchNorm(4), nn.LayerNorm(4), nn.GroupNorm(2, 4),
     nn.InstanceNorm2d(4, affine=True)],
    ids=lambda norm: type(norm).__name__,
)  # fmt: skip
def test_norms_of_torchvision(norm):
    groups = optim.set_weight_decay(nn.Sequential(nn.Linear(2, 2), norm), 0.3, 0.1)
    assert [group["weight_decay"] for group in groups] == [0.3, 0.1]
    assert [id(p) for p in groups[1]["params"]] == [id(norm.weight), id(norm.bias)]


def test_other_classes_of_norms():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    groups = optim.set_weight_decay(model, 0.3, 0.0, norm_classes=[nn.Linear])
    assert [[id(p) for p in group["params"]] for group in groups] == [
        list(map(id, model[1].parameters())),
        list(map(id, model[0].parameters())),
    ]


REFERENCE_OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.2, momentum=0.8, weight_decay=0.01),
    "sgd_nesterov": lambda groups: torch.optim.SGD(groups, lr=0.2, momentum=0.8, weight_decay=0.01, nesterov=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(
        groups, lr=0.2, momentum=0.8, weight_decay=0.01, eps=0.0316, alpha=0.9
    ),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.2, weight_decay=0.01),
}


@pytest.mark.parametrize("opt", REFERENCE_OPTIMIZERS)
def test_optimizers_have_torchvisions_constants(opt):
    def groups():
        return [{"params": [nn.Parameter(torch.ones(3))], "weight_decay": decay} for decay in (0.5, 0.0)]

    optimizer = optim.build_optimizer(options_of(opt=opt, lr=0.2, momentum=0.8, weight_decay=0.01), groups())
    expected = REFERENCE_OPTIMIZERS[opt](groups())
    assert type(optimizer) is type(expected)
    kernels = {"foreach": True, "fused": expected.defaults.get("fused")}
    assert optimizer.defaults == {
        **expected.defaults,
        **{name: kernels[name] for name in kernels.keys() & expected.defaults},
    }
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]


@pytest.mark.parametrize("opt", REFERENCE_OPTIMIZERS)
def test_all_parameters_at_once_have_the_bits_of_one_after_the_other(opt):
    def train(build):
        generator = torch.Generator().manual_seed(0)
        parameters = [
            nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(64, 3, 7, 7), (1000,), (17,)]
        ]
        optimizer = build([{"params": parameters, "weight_decay": 0.01}])
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        return parameters

    def one_after_the_other(groups):
        optimizer = REFERENCE_OPTIMIZERS[opt](groups)
        for group in optimizer.param_groups:
            group["foreach"] = False
        return optimizer

    ours = train(lambda groups: optim.build_optimizer(options_of(opt=opt, lr=0.2, momentum=0.8), groups))
    theirs = train(one_after_the_other)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def with_gradients(scale):
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in [(5, 3), (7,), (2, 2, 2)]]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale
    return [*parameters, nn.Parameter(torch.zeros(4))]  # the last has no gradient


@pytest.mark.parametrize("scale", [0.01, 1.0, 1000.0])
@pytest.mark.parametrize("is_read", [False, True])
def test_clipping_is_torchs(scale, is_read):
    ours, theirs = with_gradients(scale), with_gradients(scale)
    norm = optim.clip_gradients(iter(ours), 1.0, is_read)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs, 1.0))
    for one, other in zip(ours[:3], theirs[:3], strict=True):
        assert torch.equal(one.grad, other.grad)
    assert ours[3].grad is None


def test_without_a_limit_the_norm_is_only_read():
    parameters, untouched = with_gradients(1000.0), with_gradients(1000.0)
    assert optim.clip_gradients(parameters, None, False) is None
    norm = optim.clip_gradients(parameters, None, True)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(with_gradients(1000.0), float("inf")))
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(parameters[:3], untouched[:3], strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 1])
def test_one_bad_number_is_found(bad, place):
    tensors = [torch.ones(50), nn.Parameter(torch.ones(3, 4))]
    assert optim.all_finite(tensors) is True
    tensors[place].data.view(-1)[2] = bad
    assert optim.all_finite(iter(tensors)) is False


def test_large_numbers_are_finite():
    assert optim.all_finite([torch.full((10,), 1e30)])  # whose squares are not, in float32


@pytest.mark.parametrize("scheduler", ["cosineannealinglr", "linearlr"])
def test_rates_per_step_pass_through_the_rates_per_epoch_and_never_jump(scheduler):
    optimizer = sgd(0.5)
    args = schedule_options(lr_scheduler=scheduler, lr_warmup_epochs=2, lr_warmup_method="linear", lr_per_step=True)
    lr_scheduler = optim.LRScheduler(args, optimizer)
    rates = []
    for epoch in range(EPOCHS):
        for step in range(50):
            lr_scheduler.set_position(epoch, step, 50)
            rates.append(optimizer.param_groups[0]["lr"])
        assert rates[epoch * 50] == optim.lr_at(args, epoch, 0.5)
    assert rates[100] == 0.5
    assert max(abs(a - b) for a, b in itertools.pairwise(rates)) < 0.5 / 90  # the warm-up climbs 0.49 in 100


def test_the_line_is_torchs_linear_lr():
    optimizer = sgd(0.5)
    theirs = LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=EPOCHS)
    args = schedule_options(lr_scheduler="linearlr", lr_min=0.05)
    for epoch in range(EPOCHS):
        assert optim.lr_at(args, epoch, 0.5) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize(("scaling", "expected"), [("none", 0.5), ("linear", 0.25), ("sqrt", 0.5 / 2**0.5)])
def test_the_rate_follows_the_global_batch_as_asked(scaling, expected):
    args = options_of(lr=0.5, lr_scaling=scaling, global_batch_size=512, reference_global_batch=1024)
    assert optim.scaled_lr(args) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        # 16 blocks; the stem is 0 and the classifier 17
        ("resnet50", {"conv1.weight": 0, "bn1.bias": 0, "layer1.0.conv3.weight": 1, "layer2.0.conv1.weight": 4,
                      "layer4.2.bn3.weight": 16, "fc.bias": 17}),
        # 12 blocks
        ("vit_b_16", {"class_token": 0, "conv_proj.weight": 0, "encoder.pos_embedding": 0,
                      "encoder.layers.encoder_layer_0.mlp.0.weight": 1,
                      "encoder.layers.encoder_layer_11.ln_2.bias": 12, "encoder.ln.weight": 13,
                      "heads.head.weight": 13}),
    ],
)  # fmt: skip
def test_layers_are_numbered_from_the_input(model, expected):
    with torch.device("meta"):
        names = [name for name, _ in torchvision.models.get_model(model).named_parameters()]
    numbers = optim.layer_numbers(names)
    assert {name: numbers[name] for name in expected} == expected
    assert [numbers[name] for name in names] == sorted(numbers[name] for name in names)


def test_layer_decay_lowers_the_rate_from_each_layer_to_the_one_below():
    with torch.device("meta"):
        model = torchvision.models.resnet18()
    args = options_of(layer_decay=0.5, lr=1.0, norm_weight_decay=0.0)
    groups = optim.build_parameter_groups(args, model)
    by_parameter = {parameter: group for group in groups for parameter in group["params"]}
    assert len(by_parameter) == sum(1 for _ in model.parameters())
    assert by_parameter[model.fc.weight]["lr"] == 1.0
    assert by_parameter[model.layer4[1].conv2.weight]["lr"] == 0.5
    assert by_parameter[model.conv1.weight]["lr"] == 0.5**9  # eight blocks and the classifier are above
    assert by_parameter[model.bn1.weight]["weight_decay"] == 0.0
    assert by_parameter[model.conv1.weight]["weight_decay"] == 1e-4


def test_the_floor_follows_the_layer_and_the_logged_rate_is_the_schedules():
    with torch.device("meta"):
        model = torchvision.models.vit_b_16()
    args = schedule_options(
        layer_decay=0.65, lr=5e-4, lr_min=1e-5, lr_scheduler="cosineannealinglr", epochs=10, opt="adamw"
    )
    optimizer = optim.build_optimizer(args, optim.build_parameter_groups(args, model))
    lr_scheduler = optim.LRScheduler(args, optimizer)
    cosine = CosineAnnealingLR(sgd(5e-4), T_max=10, eta_min=1e-5)
    for epoch in range(10):
        lr_scheduler.set_position(epoch, 0, 10)
        full = cosine.get_last_lr()[0]
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([full * 0.65 ** (13 - layer) for layer in range(14)], rel=1e-12)
        assert optim.current_lr(optimizer) == pytest.approx(full, rel=1e-12)
        cosine.optimizer.step()
        cosine.step()


TIMM_MODELS = ["deit_tiny_patch16_224", "convnext_atto", "swin_tiny_patch4_window7_224", "resnet18", "efficientnet_b0",
               "mobilenetv4_conv_small", "beit_base_patch16_224", "convmixer_768_32"]  # fmt: skip


@pytest.mark.parametrize("name", TIMM_MODELS)
@pytest.mark.parametrize("decay", [None, 0.7])
def test_no_decay_1d_groups_as_timm_does(name, decay):
    timm, factory = pytest.importorskip("timm"), pytest.importorskip("timm.optim._param_groups")
    with torch.device("meta" if name != "swin_tiny_patch4_window7_224" else "cpu"):
        model = timm.create_model(name)
    args = options_of(decay_1d=False, weight_decay=0.3, layer_decay=decay, lr=0.5)
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    if decay is None:
        theirs = factory.param_groups_weight_decay(model, 0.3, no_weight_decay_list=exempt)
    else:
        theirs = factory.param_groups_layer_decay(model, 0.3, no_weight_decay_list=exempt, layer_decay=decay)
    names = {parameter: name for name, parameter in model.named_parameters()}

    def by_name(groups):
        return {
            names[parameter]: (group["weight_decay"], pytest.approx(group.get("lr_scale", 1.0)))
            for group in groups for parameter in group["params"]
        }  # fmt: skip

    groups = optim.build_parameter_groups(args, model)
    assert by_name(groups) == by_name(theirs)
    assert len(by_name(groups)) == len(names)


@pytest.mark.parametrize(("name", "exempt"), [
    ("convnext_tiny", {"layer_scale"}), ("vit_b_16", {"class_token", "pos_embedding"}),
    ("swin_t", {"relative_position_bias_table"}),
])  # fmt: skip
def test_no_decay_1d_exempts_in_torchvisions_models_what_their_sources_do(name, exempt):
    with torch.device("meta"):
        model = torchvision.models.get_model(name)
    decayed, rest = optim.build_parameter_groups(options_of(decay_1d=False, weight_decay=0.3), model)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert all(names[parameter].endswith("weight") and parameter.ndim > 1 for parameter in decayed["params"])
    wide = {names[parameter].rpartition(".")[2] for parameter in rest["params"] if parameter.ndim > 1}
    assert wide == exempt
    assert {p for p in names if p.ndim <= 1} <= set(rest["params"])


@pytest.mark.parametrize(("model", "changes", "flags"), [
    ("alexnet", {"norm_weight_decay": 0.0}, ["--norm-weight-decay"]),
    ("resnet18", {"norm_weight_decay": 0.0, "bias_weight_decay": 0.0}, []),
    ("resnet18", {"transformer_embedding_decay": 0.0}, ["--transformer-embedding-decay"]),
    ("vit_b_16", {"transformer_embedding_decay": 0.0, "sync_bn": True}, ["--sync-bn"]),
    ("timm/deit_tiny_patch16_224", {"transformer_embedding_decay": 0.0}, ["--transformer-embedding-decay"]),
    ("resnet18", {"sync_bn": True, "layer_decay": 0.5, "decay_1d": False}, []),
    ("linear", {"freeze": True, "layer_decay": 0.5, "clip_agc": 0.1}, ["--layer-decay", "--freeze", "--clip-agc"]),
    ("resnet18", {"freeze": True, "clip_agc": 0.1}, ["--clip-agc"]),
    ("resnet18", {"clip_agc": 0.1}, []),
    ("resnet18", {"opt": "timm/lamb", "given": ["momentum"]}, ["--momentum"]),
    ("resnet18", {"opt": "adamw", "given": ["momentum"]}, ["--momentum"]),
    ("resnet18", {"opt": "timm/muon", "given": ["momentum"]}, []),
    ("resnet18", {"opt": "timm/lamb"}, []),
])  # fmt: skip
def test_an_option_that_matches_nothing_says_so(model, changes, flags):
    args = options_of(model=model, **changes)
    with torch.device("meta"):
        if model.startswith("timm/"):
            built = pytest.importorskip("timm").create_model(model[5:])
        else:
            built = nn.Linear(3, 1000) if model == "linear" else torchvision.models.get_model(model)
    if args.freeze:
        models.freeze_all_but_classifier(built, 1000)
    lines = []
    optim.build_parameter_groups(args, built, lines.append)
    assert [line.split()[0] for line in lines] == flags
    assert all(" has no effect: " in line and "\n" not in line for line in lines)


def test_adaptive_clipping_bounds_each_output_but_the_classifiers():
    pytest.importorskip("timm")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 10
    model[0].weight.grad[2] *= 1e-6
    before = [parameter.grad.clone() for parameter in model.parameters()]
    assert optim.clip_gradients(model.parameters(), None, False, agc=0.01) is None
    weight, kept = model[0].weight, [0.01 * model[0].weight[i].norm() for i in range(4)]
    for output in range(4):
        expected = before[0][output]
        if output != 2:
            expected = expected / expected.norm() * kept[output]
        assert torch.allclose(weight.grad[output], expected, rtol=1e-5)
    limit = 0.01 * max(float(model[0].bias.detach().norm()), 1e-3)
    assert float(model[0].bias.grad.norm()) == pytest.approx(limit, rel=1e-5)
    assert torch.equal(model[2].weight.grad, before[2])
    assert torch.equal(model[2].bias.grad, before[3])


def test_milestones_are_torchs_and_a_cool_down_can_be_moved():
    optimizer = sgd(0.5)
    theirs = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 7, 7], gamma=0.2)
    args = schedule_options(lr_scheduler="multisteplr", lr_milestones=[3, 7, 7], lr_gamma=0.2)
    for epoch in range(12):
        assert optim.lr_at(args, epoch, 0.5) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        theirs.step()
    wsd = {"lr_scheduler": "wsd", "lr_cooldown_epochs": 4, "lr_warmup_epochs": 2, "lr_warmup_method": "linear"}
    short, long = (
        [optim.lr_at(schedule_options(**wsd, epochs=epochs, lr_min=0.1), epoch, 0.5) for epoch in range(13)]
        for epochs in (10, 20)
    )
    assert short[:7] == long[:7]  # a checkpoint from before epoch 6 belongs to both
    assert short[6:11] == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1])
    assert set(long[2:]) == {0.5}


@pytest.mark.parametrize(("changes", "option"), [
    ({"lr_scheduler": "multisteplr"}, "--lr-milestones"), ({"lr_scheduler": "wsd"}, "--lr-cooldown-epochs"),
    ({"lr_scheduler": "wsd", "lr_cooldown_epochs": 91}, "--epochs 90"),
    ({"lr_scheduler": "wsd", "lr_cooldown_epochs": 88, "lr_warmup_epochs": 3}, "--lr-warmup-epochs 3"),
    ({"lr_scheduler": "cosineannealinglr", "lr_warmup_epochs": 90}, "--epochs 90"),
    ({"lr_scheduler": "exponentiallr", "lr_gamma": 1e6}, "--lr-gamma"),
])  # fmt: skip
def test_a_schedule_without_its_options_or_epochs_is_refused(changes, option):
    with pytest.raises(UserError, match=option):
        optim.check_schedule(options_of(**changes))


@pytest.mark.parametrize("changes", [
    {"clip_agc": 0.01, "clip_grad_norm": 1.0},
])  # fmt: skip
def test_options_that_exclude_each_other_are_refused(changes):
    with pytest.raises(UserError, match="give one of them"):
        config.validate(options_of(**changes))


@pytest.mark.parametrize("name", optim.SCHEDULES)
def test_a_schedule_that_depends_on_the_epochs_says_so(name):
    """Else a resumed run could change --epochs without --allow-change."""
    changes = {"lr_scheduler": name, "lr_milestones": [3], "lr_cooldown_epochs": 10}
    one, other = (schedule_options(epochs=epochs, **changes) for epochs in (EPOCHS, EPOCHS + 1))
    is_same = all(optim.lr_at(one, epoch, 0.5) == optim.lr_at(other, epoch, 0.5) for epoch in range(EPOCHS))
    assert optim.SCHEDULES[name].uses_epochs is not is_same


def test_options_know_every_entry_without_importing_torch():
    curves = {**metrics.Loss.curves, **metrics.Accuracy.curves}
    tables = {"SCHEDULES": optim.SCHEDULES, "OPTIMIZERS": optim.OPTIMIZERS, "CURVES": curves}
    tables["POLICIES"] = presets.POLICIES
    for table, entries in ((getattr(options, name), entries) for name, entries in tables.items()):
        assert list(table) == list(entries)
        for name, entry in entries.items():
            assert {**type(entry)._field_defaults, **table[name]}.items() <= entry._asdict().items()


@pytest.mark.parametrize("changes", [
    {"opt": "sgd", "opt_betas": [0.9, 0.99]}, {"opt": "sgd", "opt_eps": 1e-3}, {"opt": "adamw", "opt_betas": [0.9, 1]},
    {"opt": "sgd_nesterov", "momentum": 0.0},
])  # fmt: skip
def test_options_that_the_optimizer_does_not_take_are_refused(changes):
    with pytest.raises(UserError, match="--opt"):
        optim.build_optimizer(options_of(**changes), [{"params": [nn.Parameter(torch.zeros(1))]}])


def test_betas_and_eps_reach_the_optimizer():
    parameters = [{"params": [nn.Parameter(torch.zeros(1))]}]
    adamw = optim.build_optimizer(options_of(opt="adamw", opt_betas=[0.8, 0.95], opt_eps=1e-6), parameters)
    assert adamw.defaults["betas"] == (0.8, 0.95)
    assert adamw.defaults["eps"] == 1e-6
    assert optim.build_optimizer(options_of(opt="rmsprop", opt_eps=1e-3), parameters).defaults["eps"] == 1e-3


def test_timms_optimizers_come_from_timm():
    timm = pytest.importorskip("timm.optim")
    parameters = [{"params": [nn.Parameter(torch.zeros(1))]}]
    optimizer = optim.build_optimizer(options_of(opt="timm/lamb", lr=0.005, weight_decay=0.02), parameters)
    assert isinstance(optimizer, timm.Lamb)
    assert (optimizer.defaults["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.005, 0.02)
    with pytest.raises(UserError, match="did you mean timm/lamb"):
        optim.build_optimizer(options_of(opt="timm/lamp"), parameters)


def test_a_timm_optimizer_that_cannot_be_had_or_used_is_refused_in_one_line():
    pytest.importorskip("timm.optim")

    def build(**changes):
        parameters = [{"params": [nn.Parameter(torch.zeros(1))]}]
        with pytest.raises(UserError) as refusal:
            optim.build_optimizer(options_of(**changes), parameters)
        assert "\n" not in str(refusal.value)
        return str(refusal.value)

    assert "--opt timm/adahessian needs second derivatives" in build(opt="timm/adahessian")
    assert "--opt timm/adan cannot be built with these options" in build(opt="timm/adan", opt_betas=[0.9, 0.99])
    assert "Nesterov momentum requires a momentum" in build(opt="timm/sgdw", momentum=0.0)
    # timm itself leaves these out.
    assert "--opt-eps: --opt timm/lion has no such option" in build(opt="timm/lion", opt_eps=1e-3)
    assert "--opt-betas: --opt timm/lars has no such option" in build(opt="timm/lars", opt_betas=[0.9, 0.99])


@pytest.mark.parametrize(("opt", "most"), [("timm/muon", 0.01), ("timm/adopt", 1e-6)])  # Muon computes in bfloat16
def test_timms_optimizers_accumulate_clip_and_are_averaged(tmp_path, opt, most):
    """A step of two shards is one of the whole batch: its norm, weights and average, on a model without BatchNorm."""
    argv = (
        "--synthetic 24 --model timm/test_vit --train-crop-size 32 --val-crop-size 32 --device cpu --workers 0".split()
    )
    argv += f"--opt {opt} --lr 0.01 --epochs 1 --clip-grad-norm 0.5 --model-ema --model-ema-steps 1 --seed 1".split()
    argv += "--no-model-ema-adjust --model-ema-decay 0.5 --global-batch-size 8 --print-freq 1 --eval-every 0".split()
    found = []
    for batch_size in (8, 4):
        out = tmp_path / str(batch_size)
        run_ranks(
            train_rank, 1, [*argv, "--batch-size", str(batch_size), "--output-dir", str(out)], log_folder=tmp_path
        )
        state = torch.load(out / "checkpoint.pth", weights_only=True)
        norms = [record["grad_norm"] for record in read_metrics(out / "metrics.jsonl") if record["kind"] == "train"]
        found.append((norms, state["model"], state["model_ema"]))
    (norms, *whole), (others, *parts) = found
    assert len(norms) == 3
    assert min(norms) > 0.5
    assert others == pytest.approx(norms, rel=1e-3)
    for one, other in zip(whole, parts, strict=True):
        weights, others = (torch.cat([value.double().flatten() for value in each.values()]) for each in (one, other))
        assert (others - weights).norm() < most * weights.norm()
    assert not torch.equal(whole[1]["module.head.weight"], whole[0]["head.weight"])


def classifier(opt, seed=0, channels_last=False, **changes):
    """Return a small model and its optimizer, with two parameter groups."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    if channels_last:
        model.to(memory_format=torch.channels_last)
    args = options_of(**{"opt": opt, "lr": 0.01, "weight_decay": 0.05, "norm_weight_decay": 0.0, **changes})
    return model, optim.build_optimizer(args, optim.build_parameter_groups(args, model))


def train_steps(model, optimizer, steps):
    """Train with a rate and images that depend on the step alone."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        image = torch.randn(6, 3, 8, 8, generator=generator)
        target = torch.randint(0, 5, (6,), generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 - step / 20)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(image), target).backward()
        optimizer.step()


def through_a_file(path, *parts):
    torch.save([part.state_dict() for part in parts], path)
    return torch.load(path, map_location="cpu", weights_only=True)


def leaves(value, name=""):
    """Yield (name, leaf) of nested containers; of a container itself its type."""
    if isinstance(value, dict | list | tuple):
        yield name, type(value)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{name}/{key}")
    else:
        yield name, value


def unlike(one, other):
    """Return the names of what differs in type, dtype or any bit."""
    one, other = dict(leaves(one)), dict(leaves(other))

    def is_same(a, b):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        return type(a) is type(b) and a == b

    return sorted(one.keys() ^ other.keys()) + [
        key for key in one.keys() & other.keys() if not is_same(one[key], other[key])
    ]


def resume_and_compare(path, opt, **changes):
    """Return what of weights and state 5 steps, a file and 2 steps leave other than 7 undisturbed ones."""
    model, optimizer = classifier(opt, **changes)
    train_steps(model, optimizer, range(7))
    assert optim.find_non_finite(model, None, optimizer) is None
    first, first_optimizer = classifier(opt, **changes)
    train_steps(first, first_optimizer, range(5))
    weights, state = through_a_file(path, first, optim.OptimizerState(first_optimizer))
    assert {type(leaf) for _, leaf in leaves(state)} <= {
        dict, list, tuple, type, bool, int, float, str, type(None), torch.Tensor
    }  # fmt: skip
    second, second_optimizer = classifier(opt, seed=9, **changes)
    second.load_state_dict(weights)
    optim.OptimizerState(second_optimizer).load_state_dict(state)
    train_steps(second, second_optimizer, range(5, 7))
    ours, theirs = optim.OptimizerState(second_optimizer), optim.OptimizerState(optimizer)
    assert len(optimizer.param_groups) == 2
    return unlike(second.state_dict(), model.state_dict()) + unlike(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("opt", optim.OPTIMIZERS)
def test_an_entry_names_the_state_that_its_optimizer_keeps(opt):
    """Else a damaged state would fail only in the middle of a step."""
    model, optimizer = classifier(opt)
    train_steps(model, optimizer, range(1))
    moments = set(optim.OPTIMIZERS[opt].moments)
    assert moments
    assert all(state.keys() == moments for state in optimizer.state.values())


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("opt", REFERENCE_OPTIMIZERS)
def test_torchs_optimizers_resume_in_the_same_bits(tmp_path, opt, channels_last):
    assert resume_and_compare(tmp_path / "file", opt, channels_last=channels_last) == []


def test_every_optimizer_of_timm_resumes_in_the_same_bits_or_is_refused(tmp_path):
    timm = pytest.importorskip("timm.optim")
    names = timm.list_optimizers()
    different, refused = {}, set()
    with torch.compiler.set_stance("force_eager"):  # Kron's kernels take long to compile
        for name in names:
            try:
                if found := resume_and_compare(tmp_path / "file", f"timm/{name}", channels_last=len(name) % 2 == 0):
                    different[name] = found
            except UserError:
                refused.add(name)
    assert different == {}
    assert refused == {name for name in names if name.startswith(("bnb", "fused"))} | {"adahessian"}
    assert len(names) - len(refused) > 80


class Colour(enum.Enum):
    RED = 1


class Odd(torch.optim.Optimizer):
    """Keep state wherever an optimizer can: in groups, there from the start or not, beside both, of other dtypes."""

    def __init__(self, params, lr=0.1, weight_decay=0.0, beta=0.9):
        defaults = {"lr": lr, "weight_decay": weight_decay, "beta": beta, "scale": 1.0, "peak": lr, "seen": None}
        defaults |= {"colour": Colour.RED, "dtype": torch.bfloat16, "product": torch.ones((), dtype=torch.float64)}
        super().__init__(params, defaults)
        self.total = 0

    @torch.no_grad()
    def step(self):
        self.total += 1
        for group in self.param_groups:
            group["scale"] *= 0.9
            group["counter"] = np.float64(group.get("counter", 0.0) + 1)
            group["seen"] = (group["counter"] > 2, None, [torch.full((2,), group["counter"])])
            group["product"].mul_(0.99)
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("momentum", torch.zeros_like(parameter, dtype=torch.bfloat16)).add_(parameter.grad)
                state.setdefault("sums", [torch.zeros((), dtype=torch.float64)])[0].add_(parameter.grad.double().sum())
                change = state["momentum"] * group["product"] * group["scale"] + state["sums"][0] * self.total
                parameter.sub_((group["lr"] * group["counter"] * group["peak"] * change).float())

    def state_dict(self):
        return super().state_dict() | {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]
        super().load_state_dict(state)


def odd(seed=0, **options):
    torch.manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in [(3, 2), (4,)]]
    return parameters, Odd([{"params": [parameter]} for parameter in parameters], **options)


def odd_steps(parameters, optimizer, steps):
    for step in steps:
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()


def test_whatever_an_optimizer_keeps_and_wherever_comes_back(tmp_path):
    expected, undisturbed = odd()
    odd_steps(expected, undisturbed, range(7))
    parameters, optimizer = odd()
    odd_steps(parameters, optimizer, range(5))
    (state,) = through_a_file(tmp_path / "file", optim.OptimizerState(optimizer))
    again, restored = odd(seed=0)
    for ours, theirs in zip(again, parameters, strict=True):
        ours.data.copy_(theirs)
    optim.OptimizerState(restored).load_state_dict(state)
    odd_steps(again, restored, range(5, 7))
    assert unlike(again, expected) == []
    ours, theirs = optim.OptimizerState(restored), optim.OptimizerState(undisturbed)
    assert unlike(ours.state_dict(), theirs.state_dict()) == []
    assert restored.param_groups[0]["colour"] is Colour.RED
    assert restored.param_groups[0]["dtype"] is torch.bfloat16


def test_hyper_parameters_are_those_of_the_command_line(tmp_path):
    parameters, optimizer = odd(lr=0.1, beta=0.9)
    odd_steps(parameters, optimizer, range(5))
    (state,) = through_a_file(tmp_path / "file", optim.OptimizerState(optimizer))
    _, restored = odd(lr=0.2, weight_decay=0.3, beta=0.8)
    optim.OptimizerState(restored).load_state_dict(state)
    for group in restored.param_groups:
        assert (group["lr"], group["weight_decay"], group["beta"], group["peak"]) == (0.2, 0.3, 0.8, 0.2)
        assert (group["counter"], group["scale"]) == (5.0, pytest.approx(0.9**5))


def test_what_no_checkpoint_can_hold_is_refused_by_name():
    parameters, optimizer = odd()
    odd_steps(parameters, optimizer, range(1))
    optimizer.param_groups[0]["colour"] = object()
    with pytest.raises(UserError, match="keeps a object, which no checkpoint can hold"):
        optim.OptimizerState(optimizer).state_dict()


def test_a_state_that_torch_saved_is_loaded_and_ours_by_torch(tmp_path):
    pytest.importorskip("timm.optim")
    model, optimizer = classifier("timm/lamb")
    train_steps(model, optimizer, range(5))
    (plain,) = through_a_file(tmp_path / "file", optimizer)
    _, ours = classifier("timm/lamb")
    optim.OptimizerState(ours).load_state_dict(plain)
    assert [float(group["step"]) for group in ours.param_groups] == [5.0, 5.0]
    (saved,) = through_a_file(tmp_path / "file", optim.OptimizerState(optimizer))
    _, theirs = classifier("timm/lamb")
    theirs.load_state_dict(saved)
    assert unlike(theirs.state_dict(), optimizer.state_dict()) == []


def test_kron_draws_the_same_whatever_torchs_generator_has_drawn(tmp_path):
    """As on several processes, where each one's generator is that of its own shard."""
    pytest.importorskip("timm.optim")
    runs = []
    with torch.compiler.set_stance("force_eager"):
        for seed in (1, 2):
            model, optimizer = classifier("timm/kron")
            torch.manual_seed(seed)
            train_steps(model, optimizer, range(2))
            runs.append(model.state_dict())
    assert unlike(*runs) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_run_that_is_not_finite_anywhere_is_found_by_name(bad):
    model, optimizer = classifier("adamw")
    average = nn.Sequential(nn.BatchNorm2d(2))
    train_steps(model, optimizer, range(1))
    assert optim.find_non_finite(model, average, optimizer) is None
    bias = optimizer.state[model[4].bias]
    for name, tensor in [
        (b"optimizer's numbers", bias["exp_avg_sq"]),
        (b"averaged weights", average[0].running_mean),
        (b"running statistics", model[1].running_var),
        (b"weights", model[0].weight.data),
    ]:
        tensor.view(-1)[1] = bad
        assert optim.find_non_finite(model, average, optimizer) == name


def test_what_is_no_float_or_has_no_elements_is_finite():
    assert optim.all_finite([torch.tensor([3]), torch.zeros(0), torch.ones(2, dtype=torch.bfloat16), torch.ones(())])
    assert not optim.all_finite([torch.ones(2, dtype=torch.float64) / 0, torch.ones(2, dtype=torch.bfloat16)])
    assert optim.all_finite([])


def test_a_run_with_lamb_ends_in_the_same_bits_after_a_kill(started, tmp_path):
    pytest.importorskip("timm.optim")
    argv = ["--opt", "timm/lamb", "--epochs", 2, "--lr", 0.005]
    started.go_on(tmp_path, tmp_path / "whole", *argv).check()
    faults = [(0, "timm.optim.lamb.Lamb.step", 6, "before")]
    assert started.go_on(tmp_path, tmp_path / "killed", *argv, faults=faults).codes == [-9]
    outcome = started.go_on(tmp_path, tmp_path / "killed", *argv, "--resume", "auto").check()
    assert re.search(r"resumed step [45] ", outcome.output)  # the save of step 5 may not have been made yet
    ours, theirs = (torch.load(tmp_path / name / "checkpoint.pth", weights_only=True) for name in ("killed", "whole"))
    for part in ("model", "optimizer", "step", "best"):
        assert unlike(ours[part], theirs[part]) == []


def test_running_statistics_that_are_not_finite_are_not_saved(started, tmp_path):
    outcome = started.go_on(tmp_path, tmp_path / "out", "--lr", 1e3)
    assert outcome.codes == [5], outcome.output
    step = re.search(
        r"the running statistics after step (\d) are not finite; the last checkpoint is kept", outcome.output
    )
    state = torch.load(tmp_path / "out" / "checkpoint.pth", weights_only=True)
    assert state["step"] == int(step[1]) - 1 > 0
    assert all(bool(tensor.isfinite().all()) for tensor in state["model"].values())


def save_with_bad_statistics(folder, bad_rank):
    """Try to save a run whose running statistics are infinite on one rank, and say what came of it."""
    args = options_of(device="cpu", global_batch_size=2)
    utils.init_distributed_mode(args)
    model, optimizer = classifier("sgd")
    model[1].running_var[2] = float("inf") if args.rank == bad_rank else 1.0
    run = run_of(
        args, folder, model, optimizer, TrainSampler(6, VirtualShards(2, 2, args.rank, 2)), torch.device("cpu")
    )
    try:
        run.save()
        print("saved", force=True)
    except NonFiniteError as error:
        print(error, force=True)
    torch.distributed.barrier()
    collectives.shut_down()


@pytest.mark.dist
@pytest.mark.parametrize(("bad_rank", "words"), [(0, "the running statistics after step 0 are not fin"), (1, "saved")])
def test_every_rank_hears_of_statistics_that_are_not_finite_where_they_are_saved(tmp_path, bad_rank, words):
    outcome = run_ranks(save_with_bad_statistics, 2, tmp_path, bad_rank, log_folder=tmp_path, timeout_s=60).check()
    assert [output.count(words) for output in outcome.outputs] == [1, 1], outcome.output
    assert bool(list(tmp_path.glob("*.pth"))) is (bad_rank != 0)
