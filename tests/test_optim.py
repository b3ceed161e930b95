"""Learning rates, parameter groups and optimizers: torch's and torchvision's numbers."""

import itertools

import pytest
import torch
import torchvision
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, ExponentialLR, LinearLR, SequentialLR, StepLR

import config
import optim
from errors import UserError

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
    lr_scheduler = optim.build_lr_scheduler(args, optimizer)
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
    walk = optim.build_lr_scheduler(args, walking)
    for epoch in range(8):
        walk.set_position(epoch, 0, 100)
    optim.build_lr_scheduler(args, jumping).set_position(7, 0, 100)
    assert jumping.param_groups[0]["lr"] == walking.param_groups[0]["lr"]
    walk.set_position(2, 0, 100)
    assert walking.param_groups[0]["lr"] == 0.5


def test_linear_warmup_and_cosine_are_continuous_between_epochs():
    options = {"peak": 1.0, "epochs": 10, "scheduler": "cosineannealinglr", "warmup_epochs": 2}
    rate = optim.lr_at(1.5, warmup_method="linear", warmup_decay=0.1, **options)
    assert rate == pytest.approx(0.1 + 0.9 * 0.75, abs=1e-12)
    assert optim.lr_at(6.0, **options) == pytest.approx(0.5, abs=1e-12)  # half of the cosine's way
    assert optim.lr_at(10.0, lr_min=0.25, **options) == pytest.approx(0.25, abs=1e-12)


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
    lr_scheduler = optim.build_lr_scheduler(args, optimizer)
    rates = []
    for epoch in range(EPOCHS):
        for step in range(50):
            lr_scheduler.set_position(epoch, step, 50)
            rates.append(optimizer.param_groups[0]["lr"])
        assert rates[epoch * 50] == optim.lr_at(epoch, peak=0.5, **lr_scheduler.options)
    assert rates[100] == 0.5
    assert max(abs(a - b) for a, b in itertools.pairwise(rates)) < 0.5 / 90  # the warm-up climbs 0.49 in 100


def test_the_line_is_torchs_linear_lr():
    optimizer = sgd(0.5)
    theirs = LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=EPOCHS)
    for epoch in range(EPOCHS):
        ours = optim.lr_at(epoch, peak=0.5, epochs=EPOCHS, scheduler="linearlr", lr_min=0.05)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
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
