"""Learning rates, parameter groups, optimizers: torch's, torchvision's and timm's numbers; the order of sums."""

import itertools
import math
import random
import re
from functools import partial

import pytest
import timm.optim
import timm.utils
import torch
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from errors import UserError
from models import optim
from models.gradients import ShardedStep
from models.layer_decay import layers_of
from models.pairwise import PairwiseGradientSum
from sampler import VirtualShards
from settings import choices, config
from tests.endings import differing, flatten
from tests.ranks import run_check
from tests.started import SMALL, run_train

EPOCHS = 14


def options_of(**changes):
    return config.parse_args(["--synthetic"]).replaced(**changes)


def schedule_options(scheduler, warmup=0, **changes):
    lr = {
        "scheduler": scheduler, "warmup_epochs": warmup, "warmup_method": "linear", "warmup_decay": 0.02,
        "step_size": 3, "gamma": 0.3, "min": 0.001, "milestones": [3, 7, 7], "cooldown_epochs": 4,
    }  # fmt: skip
    return options_of(**{"epochs": EPOCHS, **{f"lr_{name}": value for name, value in lr.items()}, **changes})


@pytest.mark.parametrize("scheduler", ["cosineannealinglr", "linearlr", "polylr"])
def test_rates_per_step_pass_through_the_rates_per_epoch_and_never_jump(scheduler):
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": peak} for peak in (0.5, 0.05)]
    optimizer, rates = torch.optim.SGD(groups, lr=1.0), []
    args = schedule_options(scheduler, 2, lr_per_step=True)
    schedule = optim.LRScheduler(args.schedule, optimizer)
    for epoch, step in itertools.product(range(EPOCHS), range(50)):
        schedule.set_position(epoch, step, 50)
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert rates[::50] == [[optim.lr_at(args.schedule, epoch, peak) for peak in (0.5, 0.05)] for epoch in range(EPOCHS)]
    assert rates[100] == [0.5, 0.05]
    assert max(abs(a - b) for (a, _), (b, _) in itertools.pairwise(rates)) < 0.5 / 90  # the warm-up climbs 0.49 in 100


@pytest.mark.parametrize("name", choices.SCHEDULES)
def test_a_schedule_that_depends_on_the_epochs_says_so(name):
    """Else a resumed run could change --epochs without --allow-change."""
    one, other = (schedule_options(name, epochs=epochs).schedule for epochs in (EPOCHS, EPOCHS + 1))
    is_same = all(optim.lr_at(one, epoch, 0.5) == optim.lr_at(other, epoch, 0.5) for epoch in range(EPOCHS))
    assert choices.SCHEDULES[name].uses_epochs is not is_same


def test_a_schedule_of_ones_own_may_depend_on_the_epochs(tmp_path):
    (tmp_path / "mine.py").write_text("def constant(epoch, epochs):\n    return 1.0\n")
    args = config.parse_args(["--synthetic", "--lr-scheduler", f"{tmp_path}/mine.py:constant"])
    assert optim.find_schedule(args.schedule.lr_scheduler)[1].uses_epochs


@pytest.mark.parametrize(("changes", "option"), [
    ({"lr_scheduler": "multisteplr"}, "--lr-milestones"), ({"lr_scheduler": "wsd"}, "--lr-cooldown-epochs"),
    ({"lr_scheduler": "wsd", "lr_cooldown_epochs": 91}, "--epochs 90"),
    ({"lr_scheduler": "wsd", "lr_cooldown_epochs": 88, "lr_warmup_epochs": 3}, "--lr-warmup-epochs 3"),
    ({"lr_scheduler": "cosineannealinglr", "lr_warmup_epochs": 90}, "--epochs 90"),
    ({"lr_scheduler": "exponentiallr", "lr_gamma": 1e6}, "--lr-gamma"),
])  # fmt: skip
def test_a_schedule_without_its_options_or_epochs_is_refused(changes, option):
    args = options_of(**changes)
    with pytest.raises(UserError, match=option):
        optim.check_schedule(args.schedule, args.optimization.lr)


def test_the_reference_batch_is_the_options_or_the_recipes(tmp_path):
    given = "--synthetic --lr 0.5 --lr-scaling linear --global-batch-size 512 --lr-scaling-batch"
    args = config.parse_args([*given.split(), "1024"])
    assert optim.scaled_lr(args.optimization) == 0.25
    written = tmp_path / "recipe.toml"
    written.write_text(config.write_recipe(args))
    for more, expected in {"": 0.25, "-batch=256": 1.0, "=sqrt": 0.5 / 2**0.5, "=none": 0.5}.items():
        args = config.parse_args(["--recipe", str(written), *[f"--lr-scaling{more}"] * bool(more)])
        assert optim.scaled_lr(args.optimization) == pytest.approx(expected, abs=1e-15)


def model_of(name):
    """Return a model without memory, torchvision's or timm's; the oracles need names and types only."""
    if name.startswith("timm/"):
        # Swin computes with its tensors as it is built.
        with torch.device("cpu" if "swin" in name else "meta"):
            return timm.create_model(name[5:])
    with torch.device("meta"):
        return torchvision.models.get_model(name)


@pytest.mark.parametrize("norm", [
    nn.BatchNorm3d(4), nn.SyncBatchNorm(4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True),
])  # fmt: skip
def test_norms_of_all_kinds_beside_frozen_and_shared_parameters(norm):
    model = nn.Sequential(nn.Linear(2, 2), norm, nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)
    model[2].weight, model[2].bias = model[0].weight, model[0].bias
    other, norms = optim.set_weight_decay(model, 0.3, 0.1)
    assert (other["weight_decay"], norms["weight_decay"]) == (0.3, 0.1)
    assert [id(parameter) for parameter in other["params"]] == [id(model[0].bias)]
    assert [id(parameter) for parameter in norms["params"]] == [id(norm.weight), id(norm.bias)]


@pytest.mark.parametrize(("model", "expected"), [
    # 16 blocks: the stem is 0 and the classifier 17
    ("resnet50", {"conv1.weight": 0, "bn1.bias": 0, "layer1.0.conv3.weight": 1, "layer2.0.conv1.weight": 4,
                  "layer4.2.bn3.weight": 16, "fc.bias": 17}),
    ("vit_b_16", {"class_token": 0, "encoder.pos_embedding": 0, "encoder.layers.encoder_layer_0.mlp.0.weight": 1,
                  "encoder.layers.encoder_layer_11.ln_2.bias": 12, "encoder.ln.weight": 13, "heads.head.weight": 13}),
])  # fmt: skip
def test_layers_are_numbered_from_the_input(model, expected):
    numbers = layers_of(model_of(model))
    assert {name: numbers[name] for name in expected} == expected
    assert list(numbers.values()) == sorted(numbers.values())


def test_layer_decay_lowers_the_schedule_and_its_floor_from_each_layer_to_the_one_below():
    model = model_of("vit_b_16")
    args = schedule_options("cosineannealinglr", epochs=10, opt="adamw", layer_decay=0.65, lr=5e-4, lr_min=1e-5)
    args = args.replaced(norm_weight_decay=0.0)
    groups = optim.build_parameter_groups(args.optimization, model)
    decays = {parameter: group["weight_decay"] for group in groups for parameter in group["params"]}
    assert len(decays) == len(list(model.parameters()))
    assert [decays[part.weight] for part in (model.encoder.ln, model.conv_proj)] == [0.0, 1e-4]
    optimizer = optim.build_optimizer(args.optimization, args.precision, args.model.model, groups)
    schedule = optim.LRScheduler(args.schedule, optimizer)
    for epoch in random.Random(0).sample(range(10), 10):
        schedule.set_position(epoch, 3, 10)  # not --lr-per-step
        full = 1e-5 + (5e-4 - 1e-5) * (1 + math.cos(math.pi * epoch / 10)) / 2
        rates = sorted({group["lr"] for group in optimizer.param_groups})
        assert rates == pytest.approx([full * 0.65 ** (13 - layer) for layer in range(14)], rel=1e-12)
        assert optim.current_lr(optimizer) == pytest.approx(full, rel=1e-12)


@pytest.mark.parametrize("decay", [None, 0.7])
@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "convnext_atto", "swin_tiny_patch4_window7_224"])
def test_no_decay_1d_and_layers_group_as_timm_does(name, decay):
    model = model_of(f"timm/{name}")
    names = {parameter: name for name, parameter in model.named_parameters()}
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    found = []
    for groups in (
        optim.build_parameter_groups(
            options_of(decay_1d=False, weight_decay=0.3, layer_decay=decay, lr=0.5).optimization, model
        ),
        timm.optim.param_groups_layer_decay(model, 0.3, no_weight_decay_list=exempt, layer_decay=decay)
        if decay
        else timm.optim.param_groups_weight_decay(model, 0.3, no_weight_decay_list=exempt),
    ):
        parts = [(each, group) for group in groups for each in group["params"]]
        found.append({names[p]: (g["weight_decay"], pytest.approx(g.get("lr_scale", 1.0))) for p, g in parts})
    assert found[0] == found[1]
    assert len(found[0]) == len(names)


@pytest.mark.parametrize(("name", "exempt"), [
    ("convnext_tiny", {"layer_scale"}), ("vit_b_16", {"class_token", "pos_embedding"}),
    ("swin_t", {"relative_position_bias_table"}),
])  # fmt: skip
def test_no_decay_1d_exempts_in_torchvisions_models_what_their_sources_do(name, exempt):
    model = model_of(name)
    decayed, rest = optim.build_parameter_groups(options_of(decay_1d=False, weight_decay=0.3).optimization, model)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert all(names[parameter].endswith("weight") and parameter.ndim > 1 for parameter in decayed["params"])
    assert {names[parameter].rpartition(".")[2] for parameter in rest["params"] if parameter.ndim > 1} == exempt
    assert {p for p in names if p.ndim <= 1} <= set(rest["params"])


OPTIONS = {"lr": 0.2, "weight_decay": 0.01}
REFERENCE_OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, momentum=0.8, **OPTIONS),
    "sgd_nesterov": partial(torch.optim.SGD, momentum=0.8, nesterov=True, **OPTIONS),
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.8, eps=0.0316, alpha=0.9, **OPTIONS),
    "adamw": partial(torch.optim.AdamW, **OPTIONS),
}


@pytest.mark.parametrize("opt", choices.OPTIMIZERS)
def test_optimizers_have_torchvisions_constants_and_the_bits_of_a_loop_over_parameters(opt):
    changes = {"momentum": 0.8, **OPTIONS}
    (model, optimizer), (other, _) = classifier(opt, **changes), classifier(opt, **changes)
    groups = optim.build_parameter_groups(options_of(norm_weight_decay=0.0, **changes).optimization, other)
    reference = REFERENCE_OPTIMIZERS[opt](groups, foreach=False)
    train_steps(model, optimizer, range(5))
    train_steps(other, reference, range(5))
    assert differing(model.state_dict(), other.state_dict()) == []
    assert type(optimizer) is type(reference)
    assert {**optimizer.defaults, "foreach": False} == reference.defaults
    # Else a damaged state would fail only in the middle of a step.
    assert all(state.keys() == set(choices.OPTIMIZERS[opt].moments) for state in optimizer.state.values())


@pytest.mark.parametrize(("changes", "words"), [
    ({"opt": "sgd", "opt_betas": [0.9, 0.99]}, "--opt-betas: --opt sgd"),
    ({"opt": "adamw", "opt_betas": [0.9, 1]}, "--opt adamw"),
    ({"opt": "sgd_nesterov", "momentum": 0.0}, "momentum"),
    ({"opt": "timm/lamp"}, "did you mean timm/lamb"),
    ({"opt": "timm/adahessian"}, "--opt timm/adahessian needs second derivatives"),
    ({"opt": "timm/adan", "opt_betas": [0.9, 0.99]}, "--opt timm/adan"),
    ({"opt": "timm/lion", "opt_eps": 1e-3}, "--opt-eps: --opt timm/lion"),  # timm itself leaves it out
])  # fmt: skip
def test_an_optimizer_that_cannot_be_built_or_used_is_refused_in_one_line(changes, words):
    args = options_of(**changes)
    with pytest.raises(UserError, match=words) as refusal:
        optim.build_optimizer(args.optimization, args.precision, "m", [{"params": [nn.Parameter(torch.zeros(1))]}])
    assert "\n" not in str(refusal.value)


def with_gradients(scale):
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in [(5, 3), (7,), (2, 2, 2), (4,)]]
    for parameter in parameters[:3]:  # the last has no gradient
        parameter.grad = torch.arange(parameter.numel()).cos().view_as(parameter) * scale
    return parameters


@pytest.mark.parametrize("scale", [0.01, 1000.0])
@pytest.mark.parametrize(("max_norm", "value"), [(1.0, None), (None, None), (None, 0.5)])
@pytest.mark.parametrize("is_read", [True, False])
def test_clipping_and_cutting_off_are_torchs_and_the_norm_is_that_before(scale, max_norm, value, is_read):
    ours, theirs = with_gradients(scale), with_gradients(scale)
    norm = optim.clip_gradients(iter(ours), max_norm, is_read, value=value)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm or float("inf"))
    assert torch.equal(norm, expected) if is_read or max_norm else norm is None
    if value:
        nn.utils.clip_grad_value_(theirs, value)
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(ours[:3], theirs[:3], strict=True))
    assert ours[3].grad is None


def test_adaptive_clipping_is_timms_but_for_the_classifier():
    models = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours, theirs = (list(model.parameters()) for model in models)
    for one, other in zip(ours, theirs, strict=True):
        one.grad = torch.randn_like(one) * 10
        one.grad[2] *= 1e-6
        other.grad = one.grad.clone()
    assert optim.clip_gradients(iter(ours), None, False, agc=0.01) is None
    timm.utils.agc.adaptive_clip_grad(theirs[:-2], clip_factor=0.01)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=0)


def classifier(opt, seed=0, channels_last=False, **changes):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    if channels_last:
        model.to(memory_format=torch.channels_last)
    args = options_of(**{"opt": opt, "lr": 0.01, "weight_decay": 0.05, "norm_weight_decay": 0.0, **changes})
    return model, optim.build_optimizer(
        args.optimization, args.precision, args.model.model, optim.build_parameter_groups(args.optimization, model)
    )


def train_steps(model, optimizer, steps):
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


def resume_and_compare(path, opt, **changes):
    """Return what of weights and state 5 steps, a file and 2 steps leave other than 7 undisturbed ones."""
    model, optimizer = classifier(opt, **changes)
    train_steps(model, optimizer, range(5))
    weights, state = through_a_file(path, model, optim.OptimizerState(optimizer))
    train_steps(model, optimizer, range(5, 7))
    assert optim.find_non_finite(model, None, optimizer) is None
    assert {type(leaf) for leaf in flatten(state).values()} <= {bool, int, float, str, type(None), torch.Tensor}
    second, second_optimizer = classifier(opt, seed=9, **changes)
    second.load_state_dict(weights)
    optim.OptimizerState(second_optimizer).load_state_dict(state)
    train_steps(second, second_optimizer, range(5, 7))
    ours, theirs = (optim.OptimizerState(each).state_dict() for each in (second_optimizer, optimizer))
    assert len(optimizer.param_groups) == 2
    return differing(second.state_dict(), model.state_dict()) + differing(flatten(ours), flatten(theirs))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("opt", choices.OPTIMIZERS)
def test_torchs_optimizers_resume_in_the_same_bits(tmp_path, opt, channels_last):
    assert resume_and_compare(tmp_path / "file", opt, channels_last=channels_last) == []


@pytest.mark.slow
def test_every_optimizer_of_timm_resumes_in_the_same_bits_or_is_refused(tmp_path):
    names = timm.optim.list_optimizers()
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


def test_a_restored_optimizer_keeps_the_hyper_parameters_of_its_own_run_and_torch_loads_its_state_too(tmp_path):
    model, optimizer = classifier("timm/lamb")
    train_steps(model, optimizer, range(5))
    (state,) = through_a_file(tmp_path / "file", optim.OptimizerState(optimizer))
    theirs = classifier("timm/lamb")[1]
    theirs.load_state_dict(state)
    assert differing(flatten(theirs.state_dict()), flatten(optimizer.state_dict())) == []
    changes = {"lr": 0.2, "weight_decay": 0.3, "opt_betas": [0.8, 0.95], "opt_eps": 1e-3}
    _, changed = classifier("timm/lamb", **changes)
    optim.OptimizerState(changed).load_state_dict(state)
    found = [(group["lr"], group["betas"], group["eps"], group["step"]) for group in changed.param_groups]
    assert found == [(0.2, (0.8, 0.95), 1e-3, 5)] * 2
    assert {group["weight_decay"] for group in changed.param_groups} == {0.3, 0.0}


@pytest.mark.parametrize(("opt", "key", "change"), [
    ("sgd", "momentum_buffer", lambda tensor: tensor[:1]), ("adamw", "exp_avg", lambda tensor: tensor.long()),
    ("adamw", "exp_avg_sq", lambda tensor: tensor.double()), ("adamw", "step", lambda tensor: -tensor),
    ("rmsprop", "square_avg", None), ("rmsprop", "step", lambda tensor: 3),
])  # fmt: skip
def test_damaged_state_is_refused_before_a_step_fails(opt, key, change):
    model, optimizer = classifier(opt)
    train_steps(model, optimizer, range(1))
    state = optim.OptimizerState(optimizer).state_dict()
    value = state["state"][1].pop(key)
    if change is not None:
        state["state"][1][key] = change(value)
    with pytest.raises(UserError, match="parameter 1"):
        optim.OptimizerState(classifier(opt)[1]).load_state_dict(state)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_found_by_name(bad):
    model, optimizer = classifier("adamw")
    average = nn.Sequential(nn.BatchNorm2d(2))
    train_steps(model, optimizer, range(1))
    assert optim.find_non_finite(model, average, optimizer) is None
    for name, tensor in [
        ("optimizer's numbers", optimizer.state[model[4].bias]["exp_avg_sq"]),
        ("averaged weights", average[0].running_mean), ("running statistics", model[1].running_var),
        ("weights", model[0].weight.data),
    ]:  # fmt: skip
        tensor.view(-1)[1] = bad
        assert optim.find_non_finite(model, average, optimizer) == name


def test_large_numbers_integers_and_empty_tensors_are_finite():
    assert optim.all_finite([torch.full((10,), 1e30)])  # whose squares are not, in float32
    assert optim.all_finite([torch.tensor([3]), torch.zeros(0), torch.ones(2, dtype=torch.bfloat16), torch.ones(())])
    assert not optim.all_finite([torch.ones(2, dtype=torch.float64) / 0, torch.ones(2, dtype=torch.bfloat16)])
    assert optim.all_finite([])


def test_running_statistics_that_are_not_finite_are_not_saved(image_folder, tmp_path):
    argv = ["--data-path", image_folder, *SMALL, "--batch-size", 4, "--lr", 1e3, "--checkpoint-steps", 1]
    outcome = run_train(tmp_path, *argv, "--epochs", 2, "--output-dir", tmp_path / "out")
    assert outcome.codes == [5], outcome.output
    step = re.search(r"the running statistics after step (\d+) are not finite", outcome.output)
    state = torch.load(tmp_path / "out" / "checkpoint.pth", weights_only=True)
    assert state["step"] == int(step[1]) - 1 > 0
    assert all(bool(tensor.isfinite().all()) for tensor in state["model"].values())


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_momentum_of_a_fused_kernel_has_a_value_when_the_first_step_overflows(nesterov):
    """Against a loop over the parameters; on a GPU what has no value is anything."""
    weights = {}
    for kernel in ("fused", "foreach"):
        parameter = nn.Parameter(torch.linspace(-1, 1, 64))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, nesterov=nesterov, **{kernel: True})
        if kernel == "fused":
            optim.zero_momentum(optimizer)
            assert not optimizer.state[parameter]["momentum_buffer"].any()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale((parameter**3).sum() * 4).backward()
            scaler.step(optimizer)
            scaler.update()
        weights[kernel] = parameter.detach()
    assert not torch.equal(weights["fused"], torch.linspace(-1, 1, 64))
    torch.testing.assert_close(weights["fused"], weights["foreach"], rtol=1e-6, atol=0)


# models/gradients.py: the pairwise order of sums, and what surrounds a shard.


def pairwise_by_recursion(values, num_processes):
    """Sum each process's run of values in halves, then the processes' sums likewise: an oracle of another shape."""

    def halves(run):
        if len(run) == 1:
            return run[0]
        # The largest power of two below the length first, as a binary counter has it.
        cut = 1 << (len(run) - 1).bit_length() - 1
        return halves(run[:cut]) + halves(run[cut:])

    size = len(values) // num_processes
    return halves([halves(values[r * size : (r + 1) * size]) for r in range(num_processes)])


@pytest.mark.parametrize("num_shards", [1, 2, 4, 6, 8, 12, 16])
def test_the_order_of_sums_is_that_of_halves_and_the_same_on_any_allowed_number_of_processes(num_shards):
    generator = torch.Generator().manual_seed(num_shards)
    gradients = [torch.randn(1000, generator=generator) * 10**shard for shard in range(num_shards)]
    parameter = nn.Parameter(torch.zeros(1000))
    gradient_sum = PairwiseGradientSum(nn.ParameterList([parameter]), VirtualShards(num_shards, num_shards))
    for gradient in gradients:
        parameter.grad = gradient.clone()
        gradient_sum.add_shard()
    gradient_sum.finish()
    for num_processes in range(1, num_shards + 1):
        if num_shards % num_processes == 0 and (num_shards // num_processes).bit_count() == 1:
            expected = pairwise_by_recursion(gradients, num_processes) / num_shards
            assert torch.equal(parameter.grad, expected), num_processes


def test_a_parameter_without_a_gradient_keeps_none():
    used, unused, sometimes = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    gradient_sum = PairwiseGradientSum(nn.ParameterList([used, unused, sometimes]), VirtualShards(4, 2))
    for gradients in ((torch.ones(2), None), (torch.ones(2), torch.ones(2))):
        used.grad, sometimes.grad = gradients
        gradient_sum.add_shard()
    gradient_sum.finish()
    assert unused.grad is None
    assert (used.grad.tolist(), sometimes.grad.tolist()) == ([1, 1], [0.5, 0.5])


class WeightedSums(nn.Module):
    """Its parameters' gradients are the factors that it is called with."""

    def __init__(self, sizes):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
        self.weights.append(torch.zeros(5, 3, 2, 2).contiguous(memory_format=torch.channels_last))

    def forward(self, factors):
        return sum((parameter * factor).sum() for parameter, factor in zip(self.weights, factors, strict=True))


def sum_over_ranks(rank, world_size, num_shards):
    shards = VirtualShards(num_shards, num_shards, rank, world_size)
    model = WeightedSums((1_000_003, 5, 300_001))
    step = ShardedStep(DistributedDataParallel(model), shards, device=torch.device("cpu"), is_deterministic=True)
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        factors = [
            [torch.randn(parameter.shape, generator=generator) * 10**shard for parameter in model.weights]
            for shard in range(num_shards)
        ]
        model.zero_grad()
        for shard in shards.local:
            with step.shard(number, shard):
                step.model(factors[shard]).backward()
        step.finish_gradients(number)
        for parameter, gradients in zip(model.weights, zip(*factors, strict=True), strict=True):
            assert torch.equal(parameter.grad, pairwise_by_recursion(gradients, world_size) / num_shards), number


@pytest.mark.dist
@pytest.mark.parametrize(("world_size", "num_shards"), [(2, 8), (3, 3), (4, 8)])
def test_buckets_are_summed_beside_the_backward_pass_in_the_order_of_halves(world_size, num_shards, tmp_path):
    run_check(world_size, sum_over_ranks, tmp_path, num_shards)


def test_a_model_without_buffers_takes_several_shards():
    model = nn.Linear(3, 3)
    step = ShardedStep(model, VirtualShards(4, 2), device=torch.device("cpu"))
    for shard in range(2):
        with step.shard(0, shard):
            model(torch.randn(2, 3)).sum().backward()
