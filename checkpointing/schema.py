"""Rules for the fields of a checkpoint by which a run finds its place, and contradictions between them."""

import functools
import math
import operator
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from errors import StorageError, UserError, is_printable
from settings.rules import MOST_COUNT

FORMAT = 2

# Limits of a checkpoint. A hostile one of some kilobytes could otherwise fill the memory, or the stack.
MOST_PICKLE_BYTES, MOST_VALUES, MOST_DEPTH = 1 << 24, 1_000_000, 32
MOST_CHARACTERS = 1 << 16  # of a text


# `type(x) is`, not isinstance: a bool is an int, and subclasses may override what is compared below.


def _are_tensors(value: Any) -> bool:
    return all(type(name) is str and isinstance(tensor, torch.Tensor) for name, tensor in value.items())


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(type(name) is str for name in value) and len(set(value)) == len(value) > 0


def _are_options(value: Any) -> bool:
    """Tell whether a value is options by their names, each with a plain value or a list of them."""
    items = [*value.keys()]
    for each in value.values():
        items += each if type(each) is list else [each]
    # Their texts are printed by a refusal, and a terminal obeys control characters.
    return all(item is None or type(item) in (bool, int, float) or is_printable(item) for item in items)


def _is_scaler(value: Any) -> bool:
    names = ("scale", "growth_factor", "backoff_factor", "growth_interval")
    # Counts of steps: with a float instead torch's scaler would end in a traceback.
    are_counts = type(value["_growth_tracker"]) is type(value["growth_interval"]) is int
    return are_counts and value["_growth_tracker"] >= 0 and all(0 < value[name] < 1e38 for name in names)


def _is_best(value: Any) -> bool:
    if value is None:
        return True
    return type(value["metric"]) is str and type(value["value"]) is type(value["loss"]) is float and value["step"] >= 0


def _is_text(value: Any) -> bool:
    return value is None or type(value) is str


# Numbers by which a run finds its place, and the least value of each.
_COUNTS = {
    "step": 0, "epoch": -1, "position.epoch": 0, "position.steps": 0, "args.start_epoch": 0, "args.epochs": 1,
    "args.batch_size": 1, "shards.global_batch_size": 1, "shards.num_shards": 1, "data.num_images": 1,
    "data.val.num_images": 1, "data.num_classes": 1, "environment.world_size": 1, "environment.threads": 1,
}  # fmt: skip

# Other fields that a run reads, and checks of their values.
_FIELDS = {
    "model": _are_tensors,
    "optimizer.state": lambda value: isinstance(value, dict),
    "optimizer.param_groups": lambda value: isinstance(value, list),
    "position.is_evaluated": lambda value: type(value) is bool,
    "args": _are_options,
    "args.model": lambda value: type(value) is str,
    "args.lr_scaling": _is_text,
    "args.weights": _is_text,
    "args.reference_global_batch": lambda value: True,
    "data.classes": _are_names,
    "environment": _are_options,
    "best": _is_best,
    "best_ema": _is_best,
}
_OF_A_SET = ("fingerprint", "form", "path", "sizes", "times", "checksums")
_FIELDS |= {f"{split}.{name}": _is_text for split in ("data", "data.val") for name in _OF_A_SET}
_OPTIONAL_FIELDS = {
    "model_ema": _are_tensors,
    "scaler": _is_scaler,
    "eval_data": lambda value: all({"num_images", *_OF_A_SET} <= each.keys() for each in value.values()),
    "hashes": lambda value: all(map(is_printable, value.values())),
    "log_window": lambda value: all(map(math.isfinite, value["sums"])),
}


def check_schema(state: dict, name: str) -> dict:
    """Return the state if it is a sound checkpoint of this script, though perhaps of another model or other data.

    Raises:
        UserError: it is not sound, or not of this script.
        StorageError: another version of this script wrote it.
    """
    # By the outermost names first: any other dict of tensors is told apart from a checkpoint that has suffered.
    fields = {field.split(".")[0] for field in [*_COUNTS, *_FIELDS]} | {"format"}
    missing = sorted(fields - state.keys())
    if missing:
        names = ", ".join(missing[:4])
        if len(missing) > 4:
            names += ", ..."
        advice = "to start from its weights, pass it to --weights"
        raise UserError(f"{name} is no checkpoint of this script: it lacks {names}; {advice}")
    foreign = next((value for value in unfold(state, name) if not _is_plain(value)), None)
    if foreign is not None:
        raise UserError(
            f"{name} is not a valid checkpoint: it holds a {type(foreign).__name__}, which this script never saves"
        )
    if type(state["format"]) is int and state["format"] != FORMAT:
        # A StorageError stops `auto`, which would else pass over a good file and go on from an older one.
        misfit = f"has format {state['format']}, but this version reads {FORMAT}"
        raise StorageError(f"{name} {misfit}; use the version that wrote it", exit_code=2)
    try:
        reason = _find_misfit(state) or _find_contradiction(state)
    except Exception as error:  # of a field that holds anything
        reason = f"a field is missing or has the wrong type ({type(error).__name__}: {error})"
    if reason is not None:
        raise UserError(f"{name} is not a valid checkpoint: {reason}")
    return state


def unfold(content: Any, name: str) -> Iterator[Any]:
    """Yield all values in the content of a file, however deep.

    An object counts each time it occurs: nested lists that each hold the next one ten times are small only in memory.

    Raises:
        UserError: there are more or deeper ones than a checkpoint has.
    """
    # Not by recursion: a file nested a thousand times would end Python's stack.
    todo, count = [(content, 0)], 0
    while todo:
        value, depth = todo.pop()
        yield value
        parts = []
        if isinstance(value, dict):
            parts += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            parts += value
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
        return abs(value) < 1 << 63  # Python's own may be as long as the pickle, and torch takes 64 bits
    if type(value) is str:
        return len(value) <= MOST_CHARACTERS
    return value is None or type(value) in (dict, list, tuple, bool, float)


def _find_misfit(state: dict) -> str | None:
    """Name the first field of a state whose value is wrong, with a KeyError if it is missing; None if all are right."""
    for field, least in _COUNTS.items():
        value = _field(state, field)
        if not (type(value) is int and least <= value < MOST_COUNT):
            return f"{field} is not an integer of {least} or more"
    checks = _FIELDS | {field: is_right for field, is_right in _OPTIONAL_FIELDS.items() if field in state}
    for field, is_right in checks.items():
        if not is_right(_field(state, field)):
            return f"{field} is wrong"
    return None


def _field(state: dict, field: str) -> Any:
    """Return the value of a field whose name is dotted."""
    return functools.reduce(operator.getitem, field.split("."), state)


def _find_contradiction(state: dict) -> str | None:
    """Name fields of a state that are each valid but contradict each other; None if there are none."""
    position, shards, data = state["position"], state["shards"], state["data"]
    batch, num_shards = shards["global_batch_size"], shards["num_shards"]
    # What is left after an epoch's last whole global batch is dropped.
    steps_per_epoch = data["num_images"] // batch
    is_complete = position["steps"] == steps_per_epoch
    bests = [best for best in (state["best"], state["best_ema"]) if best is not None]
    numbers = {number for group in state["optimizer"]["param_groups"] for number in group["params"]}
    state_of = state["optimizer"]["state"].keys()
    # A step that does not follow from the position would train on other images, or with another learning rate.
    for is_right, words in [
        (batch == num_shards * state["args"]["batch_size"], f"{num_shards} micro-batches of a global batch of {batch}"),
        (steps_per_epoch > 0, f"a global batch of {batch} of {data['num_images']} images"),
        (position["steps"] <= steps_per_epoch, f"{position['steps']} steps of an epoch of {steps_per_epoch}"),
        (position["epoch"] < state["args"]["epochs"], f"epoch {position['epoch']} of {state['args']['epochs']}"),
        (is_complete or not position["is_evaluated"], "the evaluation of an unfinished epoch"),
        (state["step"] == position["epoch"] * steps_per_epoch + position["steps"], f"step {state['step']}"),
        (state["epoch"] == position["epoch"] - (not is_complete), f"{state['epoch']} as the last epoch"),
        (all(best["step"] <= state["step"] for best in bests), "a best evaluation in the future"),
        (len(data["classes"]) == data["num_classes"], f"{data['num_classes']} classes, {len(data['classes'])} names"),
        (all(type(number) is int for number in numbers), "parameters without numbers"),
        (all(type(key) is str or key in numbers for key in state_of), "optimizer state of parameters in no group"),
    ]:
        if not is_right:
            return f"it claims {words}, at {position}"
    return None
