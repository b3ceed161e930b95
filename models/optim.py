"""Parameter groups, optimizers and learning-rate schedules, with torchvision's numbers."""

import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from errors import UserError, as_user_error
from settings import choices
from settings.choices import OPTIMIZERS, SCHEDULES
from settings.custom_code import load_function
from settings.options import BY_NAME, OptimizationOptions, PrecisionOptions, ScheduleOptions
from settings.rules import split_custom

# torch's and torchvision's normalisation layers, whose weights and biases `--norm-weight-decay` governs.
_NORM_CLASSES = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm,
                 nn.LocalResponseNorm)  # fmt: skip


def set_weight_decay(
    model: nn.Module, weight_decay: float, norm_weight_decay: float | None = None,
    norm_classes: Sequence[type] | None = None, custom_keys_weight_decay: Sequence[tuple[str, float]] | None = None,
) -> list[dict]:  # fmt: skip
    """Divide a model's trainable parameters into groups by their weight decay, as torchvision does.

    Args:
        model: the model; each of its trainable parameters is in exactly one group.
        weight_decay: the decay of all parameters that no argument below covers.
        norm_weight_decay: the decay of normalisation layers; None for `weight_decay`.
        norm_classes: the classes of normalisation layers; by default torch's and torchvision's.
        custom_keys_weight_decay: (name, decay) pairs; a name with a dot is matched against a parameter's full name,
            one without against its last part. They take precedence over `norm_weight_decay`.

    Returns:
        The groups for an optimizer, in the order: other, norm, then each name; empty groups are left out.
    """
    norm_classes = tuple(norm_classes or _NORM_CLASSES)
    custom_decays = dict(custom_keys_weight_decay or [])
    decays = {"other": weight_decay, "norm": norm_weight_decay, **custom_decays}
    groups = {name: [] for name in decays}
    # Modules may share a parameter, and torch's optimizers refuse one that is in two groups.
    seen = set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            full_name = f"{module_name}.{name}" if module_name else name
            is_norm = norm_weight_decay is not None and isinstance(module, norm_classes)
            meant = (key for key in custom_decays if key == (full_name if "." in key else name))
            groups[next(meant, "norm" if is_norm else "other")].append(parameter)
    return [{"params": groups[name], "weight_decay": decays[name]} for name in groups if groups[name]]


# The parameters of `--transformer-embedding-decay`: the names in torchvision's script.
_EMBEDDINGS = ("class_token", "position_embedding", "relative_position_bias_table")


def build_parameter_groups(optimization: OptimizationOptions, model: nn.Module) -> list[dict]:
    """Return the parameter groups that the weight-decay options and `--layer-decay` ask for."""
    if optimization.decay_1d:
        decays = dict.fromkeys(("bias", *_EMBEDDINGS), optimization.transformer_embedding_decay)
        decays["bias"] = optimization.bias_weight_decay
        keys = [(name, decay) for name, decay in decays.items() if decay is not None]
        groups = set_weight_decay(model, optimization.weight_decay, optimization.norm_weight_decay, None, keys)
    else:
        from models.no_decay import exempt_from_decay

        groups = exempt_from_decay(model, optimization.weight_decay)
    if optimization.layer_decay is None:
        return groups
    from models.layer_decay import split_by_layer

    return split_by_layer(model, groups, optimization.layer_decay, scaled_lr(optimization))


def current_lr(optimizer: torch.optim.Optimizer) -> float:
    """Return the schedule's learning rate: the largest of all groups, since `--layer-decay` only lowers rates."""
    return max(group["lr"] for group in optimizer.param_groups)


def scaled_lr(optimization: OptimizationOptions) -> float:
    """Return the peak learning rate, scaled from that of the reference batch if `--lr-scaling` says so."""
    if optimization.lr_scaling == "none":
        return optimization.lr
    ratio = optimization.global_batch_size / optimization.reference_global_batch
    # In proportion for SGD (Goyal et al., arXiv 1706.02677); by the root, gradients' noise keeps its variance
    # (Krizhevsky, arXiv 1404.5997).
    if optimization.lr_scaling != "linear":
        ratio = math.sqrt(ratio)
    return optimization.lr * ratio


# The options that only some optimizers take, and their names among an optimizer's arguments.
_TAKEN = {"momentum": "momentum", "opt_betas": "betas", "opt_eps": "eps"}


def find_optimizer(
    opt: str, precision: PrecisionOptions
) -> tuple[Callable[..., torch.optim.Optimizer], choices.Optimizer]:
    """Return the function of `--opt`, which may be timm's or the user's own, and its row; UserError for other names."""
    if opt in OPTIMIZERS:
        return OPTIMIZERS[opt].load(), OPTIMIZERS[opt]
    from models.other_optimizers import find_other

    build, taken = find_other(opt, precision, _TAKEN.values())
    return build, choices.Optimizer(opt, tuple(option for option in _TAKEN if _TAKEN[option] in taken))


def zero_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Start SGD's momentum at zero, which changes no number of its first step.

    torch's fused SGD allocates it without a value in the first step, even if that step overflows float16 and is
    skipped: the next one then adds whatever was in that memory (torch 2.11 to 2.14, seen on an H200).
    """
    for group in optimizer.param_groups:
        if not group.get("momentum"):
            continue
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _fast_kernel(build: Callable[..., torch.optim.Optimizer], device: torch.device) -> str:
    """Return the argument by which an optimizer of `build` is given its fastest kernel that keeps the bits."""
    # A fused kernel skips steps with overflows by itself, so the host need not wait to read them from the GPU.
    if device.type == "cuda" and "fused" in inspect.signature(build).parameters:
        return "fused"
    # On the CPU it would be slightly faster but round differently; foreach has the bits of a loop over parameters.
    return "foreach"


def build_optimizer(
    optimization: OptimizationOptions, precision: PrecisionOptions, model_name: str, parameters: list[dict]
) -> torch.optim.Optimizer:
    """Return the optimizer of `--opt`, with torchvision's constants; UserError if options or loop do not fit it."""
    if not parameters:
        raise UserError(f"--model {model_name} has no trainable parameters; see its requires_grad")
    opt = f"--opt {optimization.opt}"
    build, row = find_optimizer(optimization.opt, precision)
    options = {"lr": scaled_lr(optimization), "weight_decay": optimization.weight_decay, **row.constants}
    for option, argument in _TAKEN.items():
        value = getattr(optimization, option)
        if option in row.options and value is not None:
            options[argument] = tuple(value) if isinstance(value, list) else value
        # torchvision's commands may give --momentum in vain.
        elif option != "momentum" and value is not None:
            raise UserError(f"{BY_NAME[option].flag}: {opt} has no such option; remove it")
    if row.moments:
        options[_fast_kernel(build, parameters[0]["params"][0].device)] = True
    # Bad options, a missing package or a missing GPU:
    with as_user_error(f"{opt} cannot be built with these options on this machine"):
        optimizer = build(parameters, **options)
    if "fused" in options:
        zero_momentum(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"{opt} returned a {type(optimizer).__name__}, expected a torch.optim.Optimizer")
    if getattr(optimizer, "is_second_order", False):
        raise UserError(f"{opt} needs second derivatives, which are not supported; use another optimizer")
    if hasattr(optimizer, "deterministic"):
        # Otherwise timm's Kron draws other numbers on each rank, and the ranks' weights drift apart.
        optimizer.deterministic = True
    return optimizer


def has_two_weights(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer trains other weights than it evaluates, as schedule-free ones (arXiv 2405.15682)."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def check_moments(optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Check a state dict of one of `OPTIMIZERS`; UserError for one that would fail only in the middle of a step."""
    expected = next((choice.moments for choice in OPTIMIZERS.values() if choice.load() is type(optimizer)), ())
    # torch's SGD and RMSprop without momentum have no buffer of it.
    if not optimizer.defaults.get("momentum"):
        expected = tuple(name for name in expected if name != "momentum_buffer")
    if not expected:
        return
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        moments = {name: value for name, value in state["state"].get(number, {}).items() if value is not None}
        if moments and moments.keys() != set(expected):
            raise UserError(f"for parameter {number} it holds {', '.join(moments)}, not {', '.join(expected)}")
        for name, value in moments.items():
            like = torch.zeros(()) if name == "step" else parameter
            # Found by 10,000 mutated files: Adam fails in the middle of a step at a moment of another type.
            if not isinstance(value, Tensor) or (value.shape, value.dtype) != (like.shape, like.dtype):
                raise UserError(f"{name} of parameter {number} is not a tensor of {like.dtype} {tuple(like.shape)}")
            if name == "step" and not 0 <= value < 1 << 53:
                raise UserError(f"step of parameter {number} is {value.item()}, expected a number of steps")


# What a checkpoint may hold.
_PLAIN = dict | list | tuple | str | bool | int | float | None | Tensor

# Keys of a group that the model, options and the schedule set; they are never restored from a checkpoint.
_NO_STATE = {"betas", "eps", "lr", "lr_scale", "momentum", "name", "params", "weight_decay"}


class OptimizerState:
    """An optimizer that restores its state without old hyper-parameters, which the command line sets anew.

    Optimizers keep state for each parameter; some also in their groups (timm's LAMB counts its steps there) and outside
    both (timm's Kron has a generator). A group's state is all entries that the optimizer has added or changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict:
        """Return the state dict as plain data, with the groups' `group_state`; UserError if it holds other data."""
        state = self.optimizer.state_dict()
        groups = state.pop("param_groups")
        kept = [{name: value for name, value in group.items() if self._is_state(name, value)} for group in groups]
        # Options that are no plain values, such as a dtype, are left out: the next optimizer has its own.
        plain = [{name: value for name, value in group.items() if isinstance(value, _PLAIN)} for group in groups]
        return to_plain({**state, "param_groups": plain, "group_state": kept})

    def load_state_dict(self, state: dict) -> None:
        """Restore momenta, counters and the like; UserError if parameters are grouped otherwise, or it does not fit."""
        own = self.optimizer.state_dict()
        theirs = [len(group["params"]) for group in state["param_groups"]]
        ours = [len(group["params"]) for group in own["param_groups"]]
        if theirs != ours:
            groups = f"parameter groups of {theirs} tensors, this run's of {ours}"
            raise UserError(f"the checkpoint's optimizer has {groups}; resume with the same weight-decay options")
        check_moments(self.optimizer, state)
        restored = [group | kept for group, kept in zip(own["param_groups"], state["group_state"], strict=True)]
        rest = {name: value for name, value in state.items() if name != "group_state"}
        self.optimizer.load_state_dict({**own, **rest, "param_groups": restored})
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for index, saved in state["state"].items():
            # Other keys are names of the optimizer's own; torch loads their values as they are.
            if not isinstance(index, int):
                continue
            parameter = parameters[index]
            kept = self.optimizer.state[parameter]
            kept.update({name: _as_saved(kept[name], saved[name], parameter) for name in saved})

    def _is_state(self, name: str, value: Any) -> bool:
        """Tell whether the optimizer itself has added or changed an entry of a group."""
        if name in _NO_STATE:
            return False
        if name not in self.optimizer.defaults:
            return True
        # A tensor may have been changed in place, and the default, which may be the same one, with it.
        return isinstance(value, Tensor) or value != self.optimizer.defaults[name]


def to_plain(value: Any) -> Any:
    """Return a value as plain data, numpy's numbers as Python's; UserError if a checkpoint cannot hold it."""
    # Not `isinstance`: numpy's float64 is a float too, and `torch.load(weights_only=True)` refuses to open it.
    if isinstance(value, Tensor) or type(value) in (bool, int, float, str, type(None)):
        return value
    if isinstance(value, dict):
        return {to_plain(name): to_plain(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(to_plain, value))
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise UserError(
        f"--opt: this optimizer's state has a {type(value).__name__}, which cannot be saved; use another optimizer"
    )


def _as_saved(loaded: Any, saved: Any, parameter: Tensor) -> Any:
    """Return a loaded value in the dtype that it was saved in, which torch casts to the parameter's.

    It gets the memory order of the parameter, since fused kernels take no other: they differ if a run is resumed with
    another `--channels-last`.
    """
    if isinstance(saved, list | tuple):
        return type(saved)(_as_saved(*pair, parameter) for pair in zip(loaded, saved, strict=True))
    if not isinstance(saved, Tensor) or not isinstance(loaded, Tensor):
        return loaded
    if loaded.dtype != saved.dtype:
        loaded = saved.to(loaded.device)
    if loaded.shape == parameter.shape and loaded.stride() != parameter.stride():
        return torch.empty_like(parameter, dtype=loaded.dtype).copy_(loaded)
    return loaded


# A schedule is a formula of the position, of which nothing is saved: the state of torch's schedulers would bring back
# the old rate, and milestones, of a run that is resumed with new options. `settings.choices` names them; each takes the
# peak, the position, where the schedule begins and ends, in epochs, and its options.


def drop(peak: float, epoch: float, begin: int, end: int, *, lr_step_size: int, lr_gamma: float) -> float:
    """Fall by a factor every lr_step_size epochs."""
    return peak * lr_gamma ** ((epoch - begin) // lr_step_size)


def find_schedule(lr_scheduler: str) -> tuple[Callable[..., float], choices.Schedule]:
    """Return the function of `--lr-scheduler` and its row. The user's own returns a factor of the peak rate."""
    function = load_function("lr_scheduler", lr_scheduler)
    if not split_custom(lr_scheduler):
        return function, SCHEDULES[lr_scheduler]
    from models.own_schedule import scale_peak

    return scale_peak(function), choices.Schedule(lr_scheduler, uses_epochs=True)


def lr_at(schedule: ScheduleOptions, epoch: float, peak: float) -> float:
    """Return the learning rate at a position in epochs from 0; `peak` is the rate after the warm-up."""
    if epoch < schedule.lr_warmup_epochs:
        progress = epoch / schedule.lr_warmup_epochs if schedule.lr_warmup_method == "linear" else 0.0
        return peak * (schedule.lr_warmup_decay + (1.0 - schedule.lr_warmup_decay) * progress)
    begin = schedule.lr_warmup_epochs if schedule.lr_warmup_prefix else 0
    rate, row = find_schedule(schedule.lr_scheduler)
    return rate(peak, epoch, begin, schedule.epochs, **{name: getattr(schedule, name) for name in row.options})


class LRScheduler:
    """Sets the learning rate of every parameter group from the position in the run; see `check_schedule`."""

    def __init__(self, schedule: ScheduleOptions, optimizer: torch.optim.Optimizer) -> None:
        self.schedule = schedule
        self.optimizer = optimizer
        # A group with lr_scale takes that share of the whole schedule, `--lr-min` included.
        full = current_lr(optimizer)
        self.peaks = [full if "lr_scale" in group else group["lr"] for group in optimizer.param_groups]

    def set_position(self, epoch: int, step: int, steps_per_epoch: int) -> None:
        """Set each group's learning rate for a step, from 0, of an epoch: torchvision's changes once an epoch."""
        position = epoch + step / steps_per_epoch if self.schedule.lr_per_step else epoch
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = lr_at(self.schedule, position, peak) * group.get("lr_scale", 1.0)


def check_schedule(schedule: ScheduleOptions, lr: float) -> None:
    """Raise UserError if the schedule lacks an option or epochs, or leaves the bounds of `--lr`."""
    name = f"--lr-scheduler {schedule.lr_scheduler}"
    _, row = find_schedule(schedule.lr_scheduler)
    for option in row.options:
        if getattr(schedule, option) is None:
            raise UserError(f"{name} needs {BY_NAME[option].flag}: {BY_NAME[option].help}")
    needed = schedule.lr_cooldown_epochs if "lr_cooldown_epochs" in row.options else int(row.uses_epochs)
    if schedule.lr_warmup_epochs + needed > schedule.epochs:
        room = max(schedule.epochs - schedule.lr_warmup_epochs, 0) or "nothing"
        left = f"--lr-warmup-epochs {schedule.lr_warmup_epochs} leaves {room} of --epochs {schedule.epochs}"
        raise UserError(f"{left}, but {name} needs {needed}; give fewer warm-up epochs, or more --epochs")
    if split_custom(schedule.lr_scheduler):
        from models.own_schedule import check_factors

        parts = 16 if schedule.lr_per_step else 1
        positions = [step / parts for step in range(parts * schedule.epochs)]
        check_factors(name, positions, lambda position: lr_at(schedule, position, 1.0))
    # Every formula falls throughout or, with --lr-gamma above 1, rises throughout: then its end has the largest rate.
    try:
        rates = [lr_at(schedule, epoch, lr) for epoch in (schedule.epochs - 1, schedule.epochs - 1e-9)]
    except OverflowError:
        # Python raises this for a power of floats that is too large, where torch would return inf.
        rates = [math.inf]
    if max(rates) > BY_NAME["lr"].at_most:
        excess = f"exceeds {BY_NAME['lr'].at_most:g} in --epochs {schedule.epochs}"
        raise UserError(f"--lr-gamma {schedule.lr_gamma}: the learning rate {excess}")


def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float | None, is_read: bool, agc: float | None = None,
    value: float | None = None,
) -> Tensor | None:  # fmt: skip
    """Clip gradients in place, and return their total norm before clipping, a 0-d tensor, or None.

    Args:
        parameters: the parameters, with unscaled gradients; the last two are the classifier's, which `agc` leaves out.
        max_norm: the largest total norm; None for no limit.
        is_read: return the norm even without `max_norm`.
        agc: the largest norm of an output unit's gradient as a share of its weights' norm: adaptive gradient clipping
            (Brock et al., arXiv 2102.06171).
        value: the largest magnitude of a gradient's number.
    """
    if not is_read and (max_norm, agc, value) == (None, None, None):
        return None
    # `model.parameters()` is a generator, which the first of three ways of clipping would exhaust.
    parameters = list(parameters)
    norm = None
    if max_norm is not None or is_read:
        clipped = [parameter for parameter in parameters if parameter.grad is not None]
        # Neither this nor the clipping reads the norm, which would wait for the device: torch clamps the factor.
        norm = nn.utils.get_total_norm([parameter.grad for parameter in clipped])
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(clipped, max_norm, norm)
    if agc is not None:
        from settings.packages import require_timm

        utilities = importlib.import_module(f"{require_timm('--clip-agc', str(agc)).__name__}.utils")
        utilities.adaptive_clip_grad(parameters[:-2], agc)
    if value is not None:
        nn.utils.clip_grad_value_(parameters, value)
    return norm


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Tell whether all tensors are finite, by the norm of each and, if all norms are, one read of each device.

    The largest magnitudes take a CPU ten times as long; they decide where a 2-norm is infinite, perhaps by overflow.
    """
    by_device = {}
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor.detach())
    # The norms of all tensors in one call take a CPU 6 ms, a test of one tensor after another 105.
    return all(
        any(torch.stack(torch._foreach_norm(group, ord=order)).isfinite().all() for order in (2, math.inf))
        for group in by_device.values()
    )


def find_non_finite(
    model: nn.Module, average: nn.Module | None, optimizer: torch.optim.Optimizer | None = None
) -> str | None:
    """Return the name of the first part of a run's state that is not finite, or None."""
    parts: dict[str, Iterable[Tensor]] = {"weights": model.parameters(), "running statistics": model.buffers()}
    if average is not None:
        parts["averaged weights"] = [*average.parameters(), *average.buffers()]
    # With finite weights, too: a resume is exact, so bad momenta would spoil its first step at every start.
    if optimizer is not None:
        numbers = tree_iter([*optimizer.state.values(), *optimizer.param_groups])
        parts["optimizer's numbers"] = filter(torch.is_tensor, numbers)
    for name, tensors in parts.items():
        if not all_finite(tensors):
            return name
    return None


def check_finite(model: nn.Module, average: nn.Module | None) -> None:
    """Raise UserError if a model that is to be evaluated, or its average, has numbers that are not finite."""
    bad = find_non_finite(model, average)
    if bad is not None:
        raise UserError(f"the {bad} of the model are not finite; evaluate another checkpoint", exit_code=5)
