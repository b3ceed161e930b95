"""Rules for the fields of a checkpoint: their types and ranges, and contradictions between them."""

import math
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from errors import UserError, is_printable
from options import MOST_COUNT

FORMAT = 2

# Limits of a checkpoint: bytes of its pickle, values, levels of nesting, and characters of a text.
MOST_PICKLE_BYTES, MOST_VALUES, MOST_DEPTH, MOST_CHARACTERS = 1 << 24, 1_000_000, 32, 1 << 16


class OtherFormatError(UserError):
    """A checkpoint is whole, but a version of this script wrote it in another format."""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST_COUNT


def _is_positive(value: Any) -> bool:
    return _is_count(value) and value > 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return type(value) is str and is_printable(value)


def _are_named(value: Any, kind: type = object) -> bool:
    return isinstance(value, dict) and all(type(name) is str and isinstance(item, kind) for name, item in value.items())


def _are_moments(value: Any) -> bool:
    return isinstance(value, dict) and all(
        type(number) is str  # some of timm's optimizers keep values beside the parameters
        or (_is_count(number) and _are_named(moments))
        for number, moments in value.items()
    )


def _are_groups(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) and all(map(_is_count, group["params"]))
        for group in value
    )


def _is_scaler(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
        and all(_is_number(value[name]) and value[name] > 0 for name in ("scale", "growth_factor", "backoff_factor"))
        and value["scale"] < torch.finfo(torch.float32).max
        and _is_positive(value["growth_interval"])
        and _is_count(value["_growth_tracker"])
    )


def _is_window(value: Any) -> bool:
    sums = value.get("sums") if isinstance(value, dict) else None
    return isinstance(sums, list) and len(sums) >= 4 and all(map(_is_number, sums)) and sums[-1] >= 0


def _is_best(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and value.keys() - {"loss"} == {"metric", "value", "step"}
        and _is_text(value["metric"])
        and type(value["value"]) is float
        and type(value.get("loss", 0.0)) is float
        and _is_count(value["step"])
    )


def _are_options(value: Any) -> bool:
    """Tell whether a value is options by their names, each with a plain value or a list of them."""
    return isinstance(value, dict) and all(
        _is_text(name)
        and all(
            type(item) in (bool, int, float) or _is_text_or_none(item)
            for item in (each if type(each) is list else [each])
        )
        for name, each in value.items()
    )


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(type(name) is str for name in value) and len(set(value)) == len(value) > 0


def _is_text_or_none(value: Any) -> bool:
    return value is None or _is_text(value)


_SPLIT = {
    "num_images": (_is_positive, "a number of images"),
    "fingerprint": (_is_text, "text"),
    "form": (_is_text, "text"),
    "path": (lambda value: type(value) is str, "a path"),
    **dict.fromkeys(("sizes", "times", "checksums"), (_is_text_or_none, "text or None")),
}

# Each field of a checkpoint: a check of its value, and the expected value in words.
_FIELDS = {
    "format": (_is_count, "a number"),
    "model": (partial(_are_named, kind=torch.Tensor), "tensors by their names"),
    "optimizer.state": (_are_moments, "values by name for each parameter's number"),
    "optimizer.param_groups": (_are_groups, "a list of groups of parameters' numbers"),
    "epoch": (lambda value: type(value) is int and -1 <= value < MOST_COUNT, "an epoch, or -1"),
    "step": (_is_count, "a number of steps"),
    "position.epoch": (_is_count, "an epoch"),
    "position.steps": (_is_count, "a number of steps"),
    "position.is_evaluated": (lambda value: type(value) is bool, "True or False"),
    "best": (_is_best, "None, or a metric, its value and a step"),
    "best_ema": (_is_best, "None, or a metric, its value and a step"),
    "args": (_are_options, "values of options by their names"),
    "args.model": (_is_text, "a name"),
    "args.epochs": (_is_positive, "a number of epochs"),
    "args.start_epoch": (_is_count, "an epoch"),
    "args.batch_size": (_is_positive, "a number of images"),
    "args.lr_scaling": (_is_text, "a name"),
    "args.weights": (_is_text_or_none, "a name or None"),
    "args.reference_global_batch": (lambda value: value is None or _is_positive(value), "a number of images or None"),
    "shards.global_batch_size": (_is_positive, "a number of images"),
    "shards.num_shards": (_is_positive, "a number of shards"),
    **{f"{split}.{name}": rule for split in ("data", "data.val") for name, rule in _SPLIT.items()},
    "data.num_classes": (_is_positive, "a number of classes"),
    "data.classes": (_are_names, "different names"),
    "environment": (_are_options, "values by their names"),
    "environment.world_size": (_is_positive, "a number of processes"),
    "environment.threads": (_is_positive, "a number of threads"),
}
# Fields that a checkpoint need not have.
_OPTIONAL_FIELDS = {
    "model_ema": (partial(_are_named, kind=torch.Tensor), "tensors by their names"),
    "scaler": (_is_scaler, "the numbers of a GradScaler"),
    "optimizer.group_state": (
        lambda value: isinstance(value, list) and all(map(_are_named, value)),
        "a list of values by name",
    ),
    "log_window": (_is_window, "sums, and a number of images"),
    "log_epoch": (_is_window, "sums, and a number of images"),
}


def check_schema(state: dict, name: str) -> dict:
    """Return the state if it is a sound checkpoint of this script, though perhaps of another model or other data.

    Raises:
        UserError: it is not sound, or not of this script.
        OtherFormatError: another version of this script wrote it.
    """
    missing = sorted({field.split(".")[0] for field in _FIELDS} - state.keys())
    if missing:
        raise UserError(
            f"{name} is no checkpoint of this script: it lacks {', '.join(missing)}; "
            "to start from the weights that it holds, pass it to --weights"
        )
    foreign = next((value for value in unfold(state, name) if not _is_plain(value)), None)
    reason = None if foreign is None else f"it holds {_shown(foreign)}, which is no plain data"
    if reason is None and _is_count(state["format"]) and state["format"] != FORMAT:
        raise OtherFormatError(
            f"{name} has format {state['format']} and this script reads {FORMAT}; use the version that wrote it"
        )
    reason = reason or _find_misfit(state) or _find_contradiction(state)
    if reason is not None:
        raise UserError(f"{name} is no sound checkpoint: {reason}")
    return state


def unfold(content: Any, name: str) -> Iterator[Any]:
    """Yield all values in the content of a file, however deep.

    An object counts each time it occurs: nested lists that each hold the next one ten times are small only in memory.

    Raises:
        UserError: there are more or deeper ones than a checkpoint has.
    """
    todo, count = [(content, 0)], 0
    while todo:
        value, depth = todo.pop()
        yield value
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else []
        parts += value if isinstance(value, (list, tuple, set, frozenset)) else []
        parts += getattr(value, "__dict__", {}).values()  # of a Namespace, and notes of an OrderedDict
        count += len(parts)
        if count > MOST_VALUES or depth > MOST_DEPTH:
            raise UserError(f"{name} is no checkpoint: it holds more values, or deeper ones, than a checkpoint has")
        todo += [(part, depth + 1) for part in parts]


def _is_plain(value: Any) -> bool:
    """Tell whether a value is of a type that this script saves, and of a size that it may have."""
    if type(value) is OrderedDict:
        return vars(value).keys() <= {"_metadata"}
    if type(value) is torch.Tensor:
        is_on_cpu = value.layout == torch.strided and value.device.type == "cpu"
        return is_on_cpu and not value.is_quantized and not value.is_complex()
    if type(value) is int:
        return abs(value) < 1 << 63
    if type(value) is str:
        return len(value) <= MOST_CHARACTERS
    return value is None or type(value) in (dict, list, tuple, bool, float)


def _find_misfit(state: dict) -> str | None:
    """Name the first field of a state whose value is missing or wrong; None if there is none."""
    for field, (is_right, expected) in {**_FIELDS, **_OPTIONAL_FIELDS}.items():
        *parents, key = field.split(".")
        holder = state
        for parent in parents:
            holder = holder.get(parent, {}) if isinstance(holder, dict) else None
        if not isinstance(holder, dict):
            return f"{'.'.join(parents)} holds no {key}"
        if key in holder and not is_right(holder[key]):
            return f"{field} is {_shown(holder[key])}, expected {expected}"
        if key not in holder and field in _FIELDS:
            return f"{field} is missing, expected {expected}"
    return None


def _find_contradiction(state: dict) -> str | None:
    """Name fields of a state that are each valid but contradict each other; None if there are none."""
    position, shards, data = state["position"], state["shards"], state["data"]
    batch, num_shards = shards["global_batch_size"], shards["num_shards"]
    steps_per_epoch = data["num_images"] // batch
    is_complete = position["steps"] == steps_per_epoch
    bests = [best for best in (state["best"], state["best_ema"]) if best is not None]
    numbers = {number for group in state["optimizer"]["param_groups"] for number in group["params"]}
    for is_right, words in [
        (batch == num_shards * state["args"]["batch_size"], f"{num_shards} shards of a global batch of {batch}"),
        (steps_per_epoch > 0, f"a global batch of {batch} of {data['num_images']} images"),
        (position["steps"] <= steps_per_epoch, f"{position['steps']} steps of an epoch of {steps_per_epoch}"),
        (position["epoch"] < state["args"]["epochs"], f"epoch {position['epoch']} of {state['args']['epochs']}"),
        (is_complete or not position["is_evaluated"], "the evaluation of an epoch that is not done"),
        (state["step"] == position["epoch"] * steps_per_epoch + position["steps"], f"step {state['step']}"),
        (state["epoch"] == position["epoch"] - (not is_complete), f"{state['epoch']} as the last epoch"),
        (all(best["step"] <= state["step"] for best in bests), "a best evaluation that is still to come"),
        (len(data["classes"]) == data["num_classes"], f"{data['num_classes']} classes, {len(data['classes'])} names"),
        (
            all(type(key) is str or key in numbers for key in state["optimizer"]["state"]),
            "optimizer state of parameters that are in no group",
        ),
    ]:
        if not is_right:
            return f"it claims {words}, at {position}"
    return None


def _shown(value: Any) -> str:
    """Return a value as text for a line, or its type."""
    if value is None or type(value) in (bool, int, float, str):
        return ascii(value)[:60] if type(value) is not int or abs(value) < 1 << 63 else "a very large number"
    return f"a {type(value).__name__}"
