"""Parameter groups, optimizers and learning-rate schedules, with torchvision's numbers."""

import importlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from errors import UserError, did_you_mean, require_timm
from options import BY_NAME

# torch's and torchvision's normalisation layers, whose weights and biases `--norm-weight-decay` governs.
_NORM_CLASSES = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm,
                 nn.LocalResponseNorm)  # fmt: skip


def set_weight_decay(
    model: nn.Module,
    weight_decay: float,
    norm_weight_decay: float | None = None,
    norm_classes: Sequence[type] | None = None,
    custom_keys_weight_decay: Sequence[tuple[str, float]] | None = None,
) -> list[dict]:
    """Divide a model's trainable parameters into groups by their weight decay, as torchvision does.

    Args:
        model: whose parameters; each is in exactly one group.
        weight_decay: of all that nothing below names.
        norm_weight_decay: of the parameters of normalisation layers; None: as all others.
        norm_classes: classes of normalisation layers.
        custom_keys_weight_decay: (name, decay) pairs; a name with a dot is matched against a parameter's full name,
            one without against its last part. They go before the rule for normalisation layers.

    Returns:
        Groups for an optimizer, in the order: other, norm, then each key; empty ones left out.
    """
    norm_classes = tuple(norm_classes or _NORM_CLASSES)
    decays = {"other": weight_decay, "norm": norm_weight_decay}
    custom_keys = list(custom_keys_weight_decay or [])
    decays.update(custom_keys)
    groups = {name: [] for name in decays}
    seen = set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            full_name = f"{module_name}.{name}" if module_name else name
            key = next((key for key, _ in custom_keys if key == (full_name if "." in key else name)), None)
            is_norm = norm_weight_decay is not None and isinstance(module, norm_classes)
            groups[key or ("norm" if is_norm else "other")].append(parameter)
    return [{"params": groups[name], "weight_decay": decays[name]} for name in groups if groups[name]]


# Parameters of torchvision's models that their sources hold in one dimension, or exempt by name as `no_weight_decay()`
# of timm's models does.
_UNDECAYED = ("class_token", "layer_scale", "pos_embedding", "relative_position_bias_table")

# The parameters of `--transformer-embedding-decay`: the names in torchvision's script.
_EMBEDDINGS = ("class_token", "position_embedding", "relative_position_bias_table")


def build_parameter_groups(args: Any, model: nn.Module, say: Callable[[str], None] | None = None) -> list[dict]:
    """Return the parameter groups that the weight-decay options and `--layer-decay` ask for.

    Args:
        args: the options.
        model: whose parameters that are to be trained.
        say: is called with a line about each option that matches nothing in the model.
    """
    if args.decay_1d:
        decays = {"bias": args.bias_weight_decay, **dict.fromkeys(_EMBEDDINGS, args.transformer_embedding_decay)}
        keys = [(name, decay) for name, decay in decays.items() if decay is not None]
        groups = set_weight_decay(model, args.weight_decay, args.norm_weight_decay, custom_keys_weight_decay=keys)
    else:
        groups = exempt_from_decay(model, args.weight_decay)
    for line in [] if say is None else unmatched(args, model):
        say(line)
    return groups if args.layer_decay is None else split_by_layer(model, groups, args.layer_decay, scaled_lr(args))


def exempt_from_decay(model: nn.Module, weight_decay: float) -> list[dict]:
    """Divide a model's trainable parameters into those that decay and those that timm's common rule exempts.

    Exempt are biases, other parameters with one dimension, and those that the model names: by `no_weight_decay()`, or
    torchvision's that stand for them.
    """
    named = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
    groups = {False: [], True: []}
    for name, parameter in model.named_parameters():
        is_named = any(fnmatch(name, pattern) for pattern in named) or name.rpartition(".")[2] in _UNDECAYED
        if parameter.requires_grad:
            groups[parameter.ndim <= 1 or name.endswith("bias") or is_named].append(parameter)
    return [{"params": groups[key], "weight_decay": 0.0 if key else weight_decay} for key in groups if groups[key]]


def unmatched(args: Any, model: nn.Module) -> list[str]:
    """Return a line about each option that is about parameters or layers of which this model has none to train."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    last = [name.rpartition(".")[2] for name in names]
    norms = [
        module for module in model.modules()
        if isinstance(module, _NORM_CLASSES) and any(parameter.requires_grad for parameter in module.parameters())
    ]  # fmt: skip
    found = {
        "norm_weight_decay": (norms, "normalisation layers"),
        "bias_weight_decay": ("bias" in last, "biases"),
        "transformer_embedding_decay": (set(_EMBEDDINGS) & set(last), ", ".join(_EMBEDDINGS)),
        "sync_bn": ([norm for norm in norms if isinstance(norm, nn.modules.batchnorm._BatchNorm)], "BatchNorm"),
    }
    lines = [
        f"{BY_NAME[option].flag} has no effect: {args.model} has none to train of: {parts}"
        for option, (matches, parts) in found.items()
        if not matches and getattr(args, option) is not None and getattr(args, option) is not False  # 0.0 is a decay
    ]
    if not args.decay_1d and len(exempt_from_decay(model, args.weight_decay)) == 1:
        lines.append(f"--no-decay-1d has no effect: all parameters of {args.model} that train are of one kind")
    if args.layer_decay is not None and len(set(layers_of(model).values())) == 1:
        lines.append(f"--layer-decay has no effect: {args.model} has one layer")
    parameters = list(model.parameters())
    if args.freeze and len(names) == len(parameters):
        lines.append(f"--freeze has no effect: {args.model} is a classifier alone")
    if args.clip_agc is not None and not any(parameter.requires_grad for parameter in parameters[:-2]):
        lines.append(f"--clip-agc has no effect: the last layer of {args.model}, which alone trains, is not clipped")
    is_timms = args.opt.startswith("timm/")
    if is_timms and "momentum" in args.given and not find_timm_optimizer(args)[1].has_momentum:
        lines.append(f"--momentum has no effect: --opt {args.opt} has none of that name")
    return lines


# A part of a parameter's name that stands for one of a row of like layers: 3, encoder_layer_3, denseblock2 ...
_LAYER = re.compile(r"\d+|.*(layer|block|stage)_?\d+")


def layer_numbers(names: Iterable[str]) -> dict[str, int]:
    """Number the layers of a model from the input: 0 is the stem, then each block, then the layers after the blocks.

    Args:
        names: of the parameters, in the model's order.
    """
    names = list(names)
    blocks = {}
    for name in names:
        parts = name.split(".")[:-1]
        begin = next((index for index, part in enumerate(parts) if _LAYER.fullmatch(part)), None)
        if begin is not None:
            end = next((i for i, part in enumerate(parts[begin:], begin) if not _LAYER.fullmatch(part)), len(parts))
            blocks[name] = ".".join(parts[:end])
    order = {block: number for number, block in enumerate(dict.fromkeys(blocks.values()), 1)}
    last = max((index for index, name in enumerate(names) if name in blocks), default=-1)
    ends = {name: 0 if index < last else len(order) + 1 for index, name in enumerate(names)}
    return {name: order[blocks[name]] if name in blocks else ends[name] for name in names}


def layers_of(model: nn.Module) -> dict[str, int]:
    """Number the layers of a model's parameters by their names: a model of timm says itself which belong together."""
    names = [name for name, _ in model.named_parameters()]
    if not hasattr(model, "group_matcher"):
        return layer_numbers(names)
    grouped = importlib.import_module("timm.models").group_parameters
    numbers = grouped(model, model.group_matcher(coarse=False), reverse=True)
    return {name: numbers.get(name, max(numbers.values())) for name in names}


def split_by_layer(model: nn.Module, groups: list[dict], decay: float, lr: float) -> list[dict]:
    """Give each layer of every group a learning rate of its own, `decay` times that of the layer above it.

    As in BEiT (Bao et al., arXiv 2106.08254) and ConvNeXt's fine-tuning: `lr_scale` multiplies the scheduled rate.
    """
    numbers = layers_of(model)
    layers = {parameter: numbers[name] for name, parameter in model.named_parameters()}
    top = max(numbers.values())
    width = len(str(top))
    split = []
    for group in groups:
        for layer in sorted({layers[parameter] for parameter in group["params"]}):
            params = [parameter for parameter in group["params"] if layers[parameter] == layer]
            scale = decay ** (top - layer)
            rate = {"lr": lr * scale, "lr_scale": scale, "name": f"layer{layer:0{width}}"}
            split.append({**group, "params": params, **rate})
    return split


def current_lr(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate of the groups that `--layer-decay` leaves alone, which is the schedule's."""
    return max(group["lr"] for group in optimizer.param_groups)


def scaled_lr(args: Any) -> float:
    """Return the peak learning rate, scaled from the recipe's reference batch if `--lr-scaling` says so."""
    if args.lr_scaling == "none":
        return args.lr
    ratio = args.global_batch_size / args.reference_global_batch
    return args.lr * (ratio if args.lr_scaling == "linear" else math.sqrt(ratio))


def build_optimizer(args: Any, parameters: list[dict]) -> torch.optim.Optimizer:
    """Return the optimizer that `--opt` names, with torchvision's constants.

    Raises:
        UserError: timm's is asked for, and it cannot be had or does not work in our loop.
    """
    options = {"lr": scaled_lr(args), "weight_decay": args.weight_decay}
    if args.opt_eps is not None:
        options["eps"] = args.opt_eps
    if args.opt_betas is not None:
        options["betas"] = tuple(args.opt_betas)
    build = _build_timm_optimizer if args.opt.startswith("timm/") else _build_torch_optimizer
    return build(args, parameters, options)


def _build_torch_optimizer(args: Any, parameters: list[dict], options: dict) -> torch.optim.Optimizer:
    device = parameters[0]["params"][0].device.type
    if args.opt == "rmsprop":
        # eps and alpha of the MobileNetV3 recipe
        constants = {"eps": 0.0316, "alpha": 0.9, "foreach": True} | options
        return torch.optim.RMSprop(parameters, momentum=args.momentum, **constants)
    # A fused kernel reads the loss scaler's verdict by itself, where the host would have to. On the CPU, where it is
    # slightly faster and rounds differently, all parameters at once have the bits of one after the other.
    kernels = {"fused": True} if device == "cuda" else {"foreach": True}
    if args.opt == "adamw":
        return torch.optim.AdamW(parameters, **options, **kernels)
    nesterov = args.opt == "sgd_nesterov"
    return torch.optim.SGD(parameters, momentum=args.momentum, nesterov=nesterov, **options, **kernels)


def find_timm_optimizer(args: Any) -> tuple[Any, Any]:
    """Return timm's module of optimizers, and its facts on the one that `--opt` names; UserError if it has none."""
    optimizers = importlib.import_module(f"{require_timm('--opt', args.opt).__name__}.optim")
    name = args.opt.removeprefix("timm/")
    if name not in optimizers.list_optimizers():
        hint = did_you_mean(name, optimizers.list_optimizers(), prefix="timm/")
        raise UserError(f"--opt {args.opt}: timm has no such optimizer{hint}")
    return optimizers, optimizers.get_optimizer_info(name)


def _build_timm_optimizer(args: Any, parameters: list[dict], options: dict) -> torch.optim.Optimizer:
    optimizers, facts = find_timm_optimizer(args)
    # timm would leave them out without a word.
    for name, is_taken in (("betas", facts.has_betas), ("eps", facts.has_eps)):
        if name in options and not is_taken:
            raise UserError(f"--opt-{name}: --opt {args.opt} does not take that; leave it out")
    try:
        optimizer = optimizers.create_optimizer_v2(parameters, opt=facts.name, momentum=args.momentum, **options)
    except Exception as error:  # bad options, a missing package or a missing GPU
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"--opt {args.opt} cannot be had with these options on this machine: {reason}") from error
    if getattr(optimizer, "is_second_order", False):
        raise UserError(f"--opt {args.opt} needs second derivatives, which training here does not compute; use another")
    if hasattr(optimizer, "deterministic"):
        # Kron: else it draws from the device's generator, other numbers on each rank.
        optimizer.deterministic = True
    return optimizer


# Keys of a group that options and schedule set; they never come back from a checkpoint.
_SET_BY_OPTIONS = {"betas", "eps", "lr", "lr_scale", "momentum", "name", "weight_decay"}


# State of torch's optimizers for each parameter: keys that are always there, and optional ones.
_MOMENTS = {
    torch.optim.SGD: (set(), {"momentum_buffer"}),
    torch.optim.AdamW: ({"step", "exp_avg", "exp_avg_sq"}, set()),
    torch.optim.RMSprop: ({"step", "square_avg"}, {"momentum_buffer"}),
}


def check_moments(optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Check the state of each parameter for torch's optimizers: a misfit would show in the middle of a step.

    timm's keep more, such as means of a matrix's rows, of which nothing is known here.

    Raises:
        UserError: a name, a shape or a type is not this optimizer's.
    """
    if type(optimizer) not in _MOMENTS:
        return
    needed, possible = _MOMENTS[type(optimizer)]
    if optimizer.defaults.get("momentum") and needed:  # of RMSprop, which makes all of its state at once
        needed = needed | possible
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        moments = state["state"].get(number) or dict.fromkeys(needed, parameter)
        if not needed <= moments.keys() <= needed | possible:
            raise UserError(f"for parameter {number} it holds {', '.join(moments)}, not {', '.join(needed | possible)}")
        for name, value in moments.items():
            shape = () if name == "step" and value is not parameter else parameter.shape
            if not (value is None and name in possible - needed) and not _is_moment(value, shape):
                raise UserError(f"{name} of parameter {number} is not a tensor of shape {tuple(shape)}")
            if shape and value is not None and value.dtype != parameter.dtype:
                raise UserError(f"{name} of parameter {number} is {value.dtype}, expected {parameter.dtype}")
            if name == "step" and value is not parameter and not 0 <= value < 1 << 53:
                raise UserError(f"step of parameter {number} is {value.item()}, expected a number of steps")


def _is_moment(value: Any, shape: tuple[int, ...]) -> bool:
    """Tell whether a value is a tensor of numbers of a shape of which no two elements share memory."""
    if not isinstance(value, torch.Tensor) or value.shape != shape or not value.is_floating_point():
        return False
    reach = 0  # of the elements along the dimensions so far
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


class OptimizerState:
    """An optimizer that restores its state without old hyper-parameters: those are the command line's.

    Optimizers keep state for each parameter; some also in their groups (timm's LAMB counts its steps there) and beside
    both (timm's Kron has a generator). The state in a group is all that the optimizer has added or changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict:
        """Return the optimizer's own, which torch can load too, as plain data; and `group_state`, the groups' state.

        Raises:
            UserError: there is something in it that a checkpoint cannot hold.
        """
        state = self.optimizer.state_dict()
        groups = state.pop("param_groups")
        kept = [{name: value for name, value in group.items() if self._is_state(name, value)} for group in groups]
        return {
            **to_plain(state),
            # An option that is no plain value, such as a dtype, is left out: the next optimizer has its own.
            "param_groups": [
                {name: to_plain(group[name]) for name in group if is_plain(group[name])} for group in groups
            ],
            "group_state": to_plain(kept),
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore momenta, counters and the like, as they were saved by `state_dict` or by torch.

        Raises:
            UserError: the parameters are grouped otherwise.
        """
        own = self.optimizer.state_dict()
        groups = [state["param_groups"], own["param_groups"]]
        sizes = [[len(group["params"]) for group in side] for side in groups]
        if sizes[0] != sizes[1]:
            raise UserError(
                f"the checkpoint's optimizer has parameter groups of {sizes[0]} tensors and this run's of {sizes[1]}; "
                "resume with the same weight-decay options"
            )
        check_moments(self.optimizer, state)
        # Without group_state: the keys that a new group lacks.
        added = [
            {name: there[name] for name in there.keys() - here.keys()} for there, here in zip(*groups, strict=True)
        ]
        restored = [here | kept for here, kept in zip(groups[1], state.get("group_state", added), strict=True)]
        rest = {name: value for name, value in state.items() if name != "group_state"}
        self.optimizer.load_state_dict({**own, **rest, "param_groups": restored})
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for index, saved in state["state"].items():
            if isinstance(index, int):
                kept = self.optimizer.state[parameters[index]]
                kept.update({name: _as_saved(kept[name], saved[name]) for name in saved.keys() & kept.keys()})
        match_memory_order(self.optimizer)

    def _is_state(self, name: str, value: Any) -> bool:
        """Tell whether a group's entry is there, or has its value, because the optimizer put it there."""
        if name == "params" or name in _SET_BY_OPTIONS:
            return False
        defaults = self.optimizer.defaults
        # A tensor may have been changed in place, and the default, which may be the same one, with it.
        return name not in defaults or isinstance(value, Tensor) or value != defaults[name]


def to_plain(value: Any) -> Any:
    """Return a value as plain data, which a checkpoint may hold: dict, list, tuple, string, number, None, tensor.

    Raises:
        UserError: it is something else; numbers of numpy become Python's.
    """
    if isinstance(value, Tensor) or type(value) in (bool, int, float, str, type(None)):
        return value
    if isinstance(value, dict):
        return {to_plain(name): to_plain(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(to_plain, value))
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise UserError(f"--opt: this optimizer keeps a {type(value).__name__}, which no checkpoint can hold; use another")


def is_plain(value: Any) -> bool:
    """Tell whether a checkpoint may hold a value."""
    try:
        to_plain(value)
    except UserError:
        return False
    return True


def _as_saved(loaded: Any, saved: Any) -> Any:
    """Return a loaded value in the dtype that it was saved in; torch gives it its parameter's."""
    if isinstance(saved, list | tuple):
        return type(saved)(map(_as_saved, loaded, saved))
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != saved.dtype:
        return saved.to(loaded.device)
    return loaded


def match_memory_order(optimizer: torch.optim.Optimizer) -> None:
    """Bring restored momenta into the memory order of their parameters; fused kernels take no other.

    They differ where a run is resumed with another `--channels-last`.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def lr_at(
    epoch: float,
    *,
    peak: float,
    epochs: int,
    scheduler: str = "steplr",
    warmup_epochs: int = 0,
    warmup_method: str = "constant",
    warmup_decay: float = 0.01,
    warmup_prefix: bool = True,
    step_size: int = 30,
    gamma: float = 0.1,
    milestones: Sequence[int] | None = None,
    cooldown_epochs: int | None = None,
    lr_min: float = 0.0,
) -> float:
    """Return the learning rate in an epoch: torchvision's schedules in closed form, with nothing to save or restore.

    Args:
        epoch: the position, in epochs from 0.
        peak: the rate after the warm-up.
        epochs: the length of the run; the cosine, the line and the cool-down end there.
        scheduler: steplr, multisteplr, exponentiallr, cosineannealinglr, linearlr or wsd.
        warmup_epochs: the length of the warm-up.
        warmup_method: linear, or constant.
        warmup_decay: the share of `peak` that a warm-up begins with.
        warmup_prefix: the schedule is counted from the end of the warm-up; else from epoch 0, as timm's.
        step_size: epochs between two steps of steplr.
        gamma: factor of steplr, multisteplr and exponentiallr.
        milestones: epochs of multisteplr.
        cooldown_epochs: epochs of wsd, its last ones, in which the rate falls on a line.
        lr_min: where the cosine, the line and wsd end.
    """
    if epoch < warmup_epochs:
        progress = epoch / warmup_epochs if warmup_method == "linear" else 0.0
        return peak * (warmup_decay + (1.0 - warmup_decay) * progress)
    begin = warmup_epochs if warmup_prefix else 0
    since = epoch - begin
    if scheduler == "cosineannealinglr":
        return lr_min + (peak - lr_min) * (1.0 + math.cos(math.pi * since / (epochs - begin))) / 2.0
    if scheduler == "linearlr":
        return peak + (lr_min - peak) * since / (epochs - begin)
    if scheduler == "wsd":
        return peak + (lr_min - peak) * max(0.0, epoch - (epochs - cooldown_epochs)) / cooldown_epochs
    drops = {"steplr": since // step_size, "multisteplr": sum(milestone <= since for milestone in milestones or [])}
    return peak * gamma ** drops.get(scheduler, since)


class LRScheduler:
    """Sets the learning rate of every parameter group from the position in the run."""

    def __init__(self, args: Any, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.is_per_step = args.lr_per_step  # or at each epoch, as torchvision's
        self.options = schedule(args)
        # A group with a scale takes that share of the scheduled rate, its floor included.
        full = current_lr(optimizer)
        self.peaks = [full if "lr_scale" in group else group["lr"] for group in optimizer.param_groups]

    def set_position(self, epoch: int, step: int, steps_per_epoch: int) -> None:
        """Set the rates of a step of an epoch."""
        position = epoch + step / steps_per_epoch if self.is_per_step else epoch
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = lr_at(position, peak=peak, **self.options) * group.get("lr_scale", 1.0)


def build_lr_scheduler(args: Any, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Return the schedule that the options ask for, which `check_rates` has looked at."""
    return LRScheduler(args, optimizer)


def schedule(args: Any) -> dict[str, Any]:
    """Return the options of `lr_at` that `args` stands for, but for epoch and peak."""
    names = (
        "scheduler", "warmup_epochs", "warmup_method", "warmup_decay", "warmup_prefix", "step_size", "gamma",
        "milestones", "cooldown_epochs",
    )  # fmt: skip
    return {"epochs": args.epochs, "lr_min": args.lr_min, **{name: getattr(args, f"lr_{name}") for name in names}}


def check_rates(args: Any) -> None:
    """Raise UserError if the learning rate grows beyond float32."""
    try:
        rates = [lr_at(epoch, peak=args.lr, **schedule(args)) for epoch in (args.epochs - 1, args.epochs - 1e-9)]
    except OverflowError:
        rates = [math.inf]
    if max(rates) > BY_NAME["lr"].at_most:
        raise UserError(
            f"--lr-gamma {args.lr_gamma}: the learning rate grows beyond {BY_NAME['lr'].at_most:g} in "
            f"--epochs {args.epochs}"
        )


def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float | None, is_read: bool, agc: float | None = None
) -> Tensor | None:
    """Limit gradients, and return the norm that they had together.

    Args:
        parameters: whose gradients, unscaled; the last two are the classifier's, which `agc` leaves alone.
        max_norm: to scale them all down to; None for no limit.
        is_read: whether somebody wants the norm where there is no limit; None is returned if not.
        agc: the largest norm of an output's gradient as a share of its weights' norm: adaptive gradient clipping
            (Brock et al., arXiv 2102.06171).
    """
    if max_norm is None and agc is None and not is_read:
        return None
    parameters, norm = list(parameters), None
    if max_norm is not None or is_read:
        clipped = [parameter for parameter in parameters if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in clipped])
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(clipped, max_norm, norm)
    if agc is not None:
        utilities = importlib.import_module(f"{require_timm('--clip-agc', agc).__name__}.utils")
        utilities.adaptive_clip_grad(parameters[:-2], agc)
    return norm


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Tell whether all tensors are finite, by the norm of each and a single read of each device.

    The largest magnitude takes a CPU ten times as long; it decides where a sum of finite squares is infinite.
    """
    by_device = {}
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor.detach())
    orders = (2, math.inf)
    return all(
        any(bool(torch.stack(torch._foreach_norm(group, ord=order)).isfinite().all()) for order in orders)
        for group in by_device.values()
    )


def find_non_finite(model: nn.Module, average: nn.Module | None, optimizer: torch.optim.Optimizer) -> bytes | None:
    """Return the name of the first part of a run's numbers that is not finite, or None."""
    parts = {
        "weights": model.parameters(),
        "running statistics": model.buffers(),
        "averaged weights": [] if average is None else [*average.parameters(), *average.buffers()],
        "optimizer's numbers": filter(torch.is_tensor, tree_iter([*optimizer.state.values(), *optimizer.param_groups])),
    }
    return next((name.encode() for name, tensors in parts.items() if not all_finite(tensors)), None)
