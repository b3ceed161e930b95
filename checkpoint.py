"""What a checkpoint holds, and whether a file that claims to be one can be trusted."""

import io
import math
import os
import pickletools
import re
import shlex
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from errors import StorageError, UserError, in_one_line, is_printable
from files import read_bytes, retry

FORMAT = 2

# The best checkpoints of a run, by the results that they are best in: those of the raw weights, and of their average.
BEST_NAMES = {"val": "best", "val_ema": "best_ema"}

# More than any checkpoint has: of the text that describes it, of values, of a counter.
MOST_PICKLE_BYTES, MOST_VALUES, MOST_COUNT = 1 << 24, 1_000_000, 1 << 53
_LARGEST = torch.finfo(torch.float32).max
MOST_DEPTH, MOST_CHARACTERS = 12, 1 << 16
# Of a file that is refused in any case: in which to look for code, so that it can be said.
_MOST_OLD_BYTES = 1 << 20

# Bytes of an element of each kind of storage that `torch.save` names; the rest of what it names for plain data.
_ITEM_BYTES = {
    "torch BFloat16Storage": 2, "torch BoolStorage": 1, "torch ByteStorage": 1, "torch CharStorage": 1,
    "torch DoubleStorage": 8, "torch FloatStorage": 4, "torch HalfStorage": 2, "torch IntStorage": 4,
    "torch LongStorage": 8, "torch ShortStorage": 2, "torch.storage UntypedStorage": 1,
}  # fmt: skip
_PLAIN_GLOBALS = {
    "collections OrderedDict", "torch Size", "torch._utils _rebuild_parameter", "torch._utils _rebuild_tensor",
    "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3", *_ITEM_BYTES,
    *(f"torch {name}" for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)),
}  # fmt: skip


class OtherFormatError(UserError):
    """A checkpoint is whole and of a version of this script that writes another format."""


class Stateful(Protocol):
    """Whatever can be saved and restored by `RunState`."""

    def state_dict(self) -> dict:
        """Return plain data."""

    def load_state_dict(self, state: dict) -> Any:
        """Restore what `state_dict` returned."""


class RunState:
    """Where a run is, and everything that cannot be computed from that.

    The position is (epoch, steps done in it, whether the epoch has been evaluated), at the end of a step. The loop
    moves it, never an iterator: loader processes work ahead. Order, augmentation, mixing, dropout and learning rate are
    functions of the position, so no generator, sampler or schedule is saved.

    Args:
        steps_per_epoch: steps of an epoch.
        facts: plain values that describe the run, saved beside the state.
        parts: what to save under which name; None for what this run does not have.
    """

    def __init__(self, steps_per_epoch: int, facts: dict, parts: dict[str, Stateful | None]) -> None:
        self.steps_per_epoch = steps_per_epoch
        self.facts = facts
        self.parts = {name: part for name, part in parts.items() if part is not None}
        self.epoch, self.steps, self.is_evaluated = 0, 0, False
        self.bests = dict.fromkeys(BEST_NAMES.values())  # {"metric", "value", "step"}, or None
        self.is_resumed = False

    @property
    def step(self) -> int:
        """Steps done since the run began."""
        return self.epoch * self.steps_per_epoch + self.steps

    def advance(self) -> None:
        """Count one more step."""
        self.steps += 1

    def start_epoch(self, epoch: int) -> int:
        """Move to an epoch, if not there yet; return the first step to do in it."""
        if epoch != self.epoch:
            self.epoch, self.steps, self.is_evaluated = epoch, 0, False
        return self.steps

    def note_results(self, results: dict[str, dict[str, float]], metric: str) -> None:
        """Record that the epoch has been evaluated, and of which kinds of results it is the best so far.

        Args:
            results: by kind (val, val_ema), of which each has a best of its own.
            metric: the result that counts: of a loss the lowest is best, of anything else the highest.
        """
        self.is_evaluated = True
        sign = -1 if metric == "loss" else 1
        for kind, result in results.items():
            name, value = f"{kind}/{metric}", float(result[metric])
            best = self.bests[BEST_NAMES[kind]]
            is_first = best is None or best["metric"] != name or not math.isfinite(best["value"])
            if is_first or sign * value > sign * best["value"]:
                self.bests[BEST_NAMES[kind]] = {"metric": name, "value": value, "step": self.step}

    @property
    def best_now(self) -> list[str]:
        """The names of the best checkpoints that the state as it is has to bear."""
        return [name for name, best in self.bests.items() if best is not None and best["step"] == self.step]

    def resume(self, state: dict | None, start_epoch: int | None, epochs: int) -> None:
        """Restore a checkpoint, if there is one, or move to `--start-epoch`.

        Raises:
            UserError: `--start-epoch` or `--epochs` contradicts the checkpoint.
        """
        if state is None:
            self.start_epoch(start_epoch or 0)
            return
        self.load_state_dict(state)
        next_epoch = self.epoch + self.is_evaluated
        # The same command again, as a requeued job gives it, is no contradiction.
        if start_epoch not in (None, next_epoch, state["args"]["start_epoch"]):
            raise UserError(f"--start-epoch {start_epoch}, but the checkpoint goes on with {next_epoch}; leave it out")
        if self.epoch >= epochs:
            raise UserError(
                f"--epochs {epochs}, but the checkpoint is in epoch {self.epoch} (from 0); give more epochs"
            )
        print(f"resumed step {self.step} (epoch {self.epoch}, step {self.steps} of {self.steps_per_epoch} in it)")

    def state_dict(self) -> dict:
        """Return plain data: dicts, lists, strings, numbers and tensors, which need no unpickled code to load."""
        is_complete = self.steps == self.steps_per_epoch
        return {
            "format": FORMAT,
            **{name: part.state_dict() for name, part in self.parts.items()},
            "epoch": self.epoch if is_complete else self.epoch - 1,
            "step": self.step,
            "position": {"epoch": self.epoch, "steps": self.steps, "is_evaluated": self.is_evaluated},
            **self.bests,
            **self.facts,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore every part and the position.

        A part that the checkpoint lacks starts anew, and one that this run lacks is left; both are said.

        Raises:
            UserError: a part is one of another model or optimizer.
        """
        for name, part in self.parts.items():
            if name in state:
                with in_one_line(f"the checkpoint's {name} does not fit this run's"):
                    part.load_state_dict(state[name])
            else:
                print(f"the checkpoint holds no {name}; it starts anew")
                if name == "model_ema":
                    part.restart(self.parts["model"])
        for name in {"model_ema", "scaler"} & state.keys() - self.parts.keys():
            print(f"the checkpoint's {name} is left out: this run has none")
        position = state["position"]
        self.epoch, self.steps, self.is_evaluated = position["epoch"], position["steps"], position["is_evaluated"]
        self.bests = {name: state[name] for name in self.bests}
        self.is_resumed = True

    def result(self, folder: str) -> str:
        """Return the last lines of a finished run."""
        lines = [f"finished {self.epoch + 1} epochs, {self.step} steps; all in {folder}"]
        lines += [
            f"best {best['metric']} {best['value']:.3f}, after step {best['step']}"
            for best in self.bests.values()
            if best is not None
        ]
        return "\n".join(lines)

    def is_finished(self, epochs: int) -> bool:
        """Tell whether nothing is left to do."""
        return self.epoch == epochs - 1 and self.is_evaluated


def read_checkpoint(path: Path, name: str) -> tuple[bytes, dict]:
    """Return a file's bytes and the state in it, checked; what it claims to hold is checked before it is read.

    Args:
        path: of the file.
        name: what to call it in an error.

    Raises:
        UserError: it is damaged, or no checkpoint of this script.
        StorageError: the disk does not answer, or there is no memory for it now.
    """

    def check() -> None:
        with open(path, "rb") as file:
            if not check_archive(file, name):
                file.seek(0)
                raise UserError(_explain(name, _find_code(file.read(_MOST_OLD_BYTES))))

    if path.is_file():  # of what is something else, `read_bytes` says so
        retry(check, path)
    try:
        payload = read_bytes(path)
        return payload, check_schema(load_checkpoint(payload, name), name)
    except MemoryError as error:
        raise StorageError(f"{name} does not fit into the memory that is free now") from error


def load_checkpoint(source: Path | bytes, name: str) -> dict:
    """Load a file of tensors and plain values; check every byte of it and run nothing that is in it.

    `torch.load` accepts flipped bits in a tensor; the archive's checksums do not (docs/research/RELIABILITY.md, 2.1).

    Args:
        source: a path, or a file's bytes.
        name: what to call it in an error.

    Raises:
        UserError: damaged, not a checkpoint, or one that needs code to load; says which.
        MemoryError: it is larger than the memory that is free.
    """
    stream = io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb")  # noqa: SIM115
    with stream:
        try:
            if check_archive(stream, name):
                bad = find_bad_record(stream)
                if bad is not None:
                    raise UserError(f"{name} is damaged (record {bad.split('/', 1)[-1]} fails its CRC)")
                check_pickle(stream, name)
            stream.seek(0)
            content = torch.load(stream, map_location="cpu", weights_only=True)
        except (UserError, MemoryError):
            raise
        except Exception as error:  # bad bytes raise anything from EOFError to AssertionError (same place)
            if "allocate" in str(error):
                raise MemoryError(f"{name} does not fit into memory") from error
            raise UserError(_explain(name, error)) from error
    if not isinstance(content, dict):
        raise UserError(f"{name} holds a {type(content).__name__}, not a checkpoint")
    return content


def memory_bytes() -> int:
    """Return how much memory this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_archive(file: Any, name: str) -> bool:
    """Check by its directory, which is read alone, that a file is as large as its records are; say if it is an archive.

    So nothing that is loaded is larger than the file: `torch.save` compresses nothing.

    Args:
        file: open for reading.
        name: what to call it in an error.

    Raises:
        UserError: it is none that `torch.save` writes, or larger than the memory of this machine.
    """
    size = file.seek(0, os.SEEK_END)
    if size > memory_bytes():
        raise UserError(f"{name} has {size / 1e9:,.1f} GB, and this machine {memory_bytes() / 1e9:,.1f} GB of memory")
    file.seek(0)
    if file.read(4) != b"PK\3\4":  # by which torch tells an archive from what it wrote before version 1.6
        return False
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError) as error:
        raise UserError(f"{name} is damaged or no checkpoint ({str(error)[:160]})") from error
    # Torch's reader is blind to case.
    names = {record.filename.lower() for record in records}
    roots = {record.filename.split("/")[0] for record in records}
    # Headers, and what torch.save leaves free so that records begin at whole pages, if it was told to.
    gaps = size - sum(record.compress_size for record in records)
    is_stored = all(record.compress_type == 0 and record.compress_size == record.file_size for record in records)
    if not is_stored or len(names) < len(records) or len(roots) != 1 or not 0 < gaps <= 8192 * (len(records) + 1):
        raise UserError(f"{name} is damaged or no checkpoint (its records are not laid out as torch.save does it)")
    return True


def check_pickle(file: Any, name: str) -> None:
    """Check, without unpickling, that a pickle names plain data only, and storages as large as their records.

    Torch believes the size that a pickle gives, and would read beyond the record.

    Args:
        file: the archive, open for reading.
        name: what to call it in an error.

    Raises:
        UserError: it does not.
    """
    with zipfile.ZipFile(file) as archive:
        root = archive.infolist()[0].filename.split("/")[0]
        sizes = {record.filename.removeprefix(f"{root}/data/"): record.file_size for record in archive.infolist()}
        if archive.getinfo(f"{root}/data.pkl").file_size > MOST_PICKLE_BYTES:
            raise UserError(f"{name} is no checkpoint: it describes more than a model has")
        pickled = archive.read(f"{root}/data.pkl")
    for kind, key, numel in _storages(pickled):
        if sizes.get(key) != _ITEM_BYTES[kind] * numel:
            raise UserError(f"{name} is damaged (record data/{key} is not as large as its tensors)")


def _storages(pickled: bytes) -> Iterator[tuple[str, str, int]]:
    """Yield the kind, the key and the number of elements of each storage that a pickle of `torch.save` asks for.

    Raises:
        ValueError: it is none of `torch.save`, or names more than plain data; says what.
    """
    literals, stack, named = {}, [], None
    for opcode, argument, _ in pickletools.genops(pickled):
        _check_opcode(opcode.name, argument)
        if opcode.name in ("BINPUT", "LONG_BINPUT"):
            literals[argument] = stack[-1] if stack else None
            continue
        if opcode.name == "MARK":
            stack = []
        elif opcode.name == "TUPLE":
            stack, named = [], stack
            continue
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            stack.append(literals.get(argument))
        elif opcode.name in ("GLOBAL", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"):
            stack.append(argument)
        elif opcode.name == "BINPERSID":
            is_storage = named is not None and len(named) == 5 and named[0] == "storage" and named[1] in _ITEM_BYTES
            if not is_storage or type(named[2]) is not str or type(named[4]) is not int:
                raise ValueError("Unsupported operand: not a storage of torch.save")
            yield named[1], named[2], named[4]
            stack = [None]
        else:
            stack = [None]
        named = None


def _check_opcode(name: str, argument: Any) -> None:
    if name == "GLOBAL" and argument not in _PLAIN_GLOBALS:
        raise ValueError(f"GLOBAL {argument.replace(' ', '.')}")
    if name in ("INST", "STACK_GLOBAL"):
        raise ValueError("Unsupported operand: not of torch.save")


def _find_code(content: bytes) -> Exception:
    """Return why a file that is no archive is refused, with the code that it names if it is a pickle, or several.

    Older versions of torch wrote several, one after the other, and the tensors behind them.
    """
    stream = io.BytesIO(content)
    try:
        while stream.tell() < len(content):
            for opcode, argument, _ in pickletools.genops(stream):
                _check_opcode(opcode.name, argument)
    except Exception as error:  # pickletools has a dozen kinds for what is no pickle
        if re.match("GLOBAL|Unsupported operand", str(error)):
            return error
    return ValueError("not the archive that torch.save writes; nothing in it was run")


def find_bad_record(file: Any) -> str | None:
    """Return the name of the first record of a zip archive that is not what was written, or None.

    Args:
        file: a path or a binary file.

    Raises:
        zipfile.BadZipFile: the archive as a whole is damaged.
    """
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            # One flipped bit of the index makes a folder of a record. Python reads it all the same and finds it good;
            # torch reads nothing, and gives a tensor of whatever was in memory.
            if record.external_attr & 0x10:
                return record.filename
        return archive.testzip()


def _explain(name: str, error: Exception) -> str:
    """Say in one line why a file could not be loaded."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    if found and found[1] == "argparse.Namespace":
        command = (
            "import argparse, torch; torch.serialization.add_safe_globals([argparse.Namespace]); "
            f"torch.save(torch.load({name!r}, weights_only=True)['model'], 'weights.pth')"
        )
        return (
            f"{name} is a checkpoint of torchvision's reference script: it holds an argparse.Namespace, which this "
            f"script does not unpickle; to start from its weights, run `python -c {shlex.quote(command)}` and pass "
            "--weights weights.pth"
        )
    if found:
        return f"{name} contains code ({found[1]}) and was refused; nothing in it was run"
    if "Unsupported operand" in str(error):
        return f"{name} is damaged or no checkpoint (a pickle that torch.save did not write; nothing in it was run)"
    reason = (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0]
    return f"{name} is damaged or no checkpoint ({reason[:160]})"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST_COUNT


def _is_positive(value: Any) -> bool:
    return _is_count(value) and value > 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    """Tell whether a value is text that can be printed on one line."""
    return type(value) is str and is_printable(value)


def _are_tensors(value: Any) -> bool:
    return isinstance(value, dict) and all(
        type(name) is str and type(tensor) is torch.Tensor for name, tensor in value.items()
    )


def _are_moments(value: Any) -> bool:
    return isinstance(value, dict) and all(
        type(number) is str  # what some of timm's keep beside the parameters
        or (_is_count(number) and isinstance(moments, dict) and all(type(name) is str for name in moments))
        for number, moments in value.items()
    )


def _are_named(value: Any) -> bool:
    return isinstance(value, dict) and all(type(name) is str for name in value)


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
        and 0 < value["scale"] < _LARGEST
        and _is_positive(value["growth_interval"])
        and _is_count(value["_growth_tracker"])
    )


def _are_sums(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(_is_number(total) and total >= 0 for total in value)


def _is_best(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and value.keys() == {"metric", "value", "step"}
        and _is_text(value["metric"])
        and type(value["value"]) is float
        and _is_count(value["step"])
    )


def _are_options(value: Any) -> bool:
    """Tell whether a value is what options can be, by their names."""
    return isinstance(value, dict) and all(
        _is_text(name) and all(_is_option(item) for item in (each if type(each) is list else [each]))
        for name, each in value.items()
    )


def _is_option(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float) or _is_text(value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(type(name) is str for name in value) and len(set(value)) == len(value) > 0


def _is_text_or_none(value: Any) -> bool:
    return value is None or _is_text(value)


_SPLIT = {
    "num_images": (_is_positive, "a number of images"),
    "fingerprint": (_is_text, "text"),
    "form": (_is_text, "text"),
    "path": (lambda value: type(value) is str, "a path"),
    "sizes": (_is_text_or_none, "text or None"),
    "times": (_is_text_or_none, "text or None"),
    "checksums": (_is_text_or_none, "text or None"),
}

# Each field of a checkpoint: whether a value can be one, and in words what is expected.
_FIELDS = {
    "format": (_is_count, "a number"),
    "model": (_are_tensors, "tensors by their names"),
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
# Those that a checkpoint need not have.
_OPTIONAL_FIELDS = {
    "model_ema": (_are_tensors, "tensors by their names"),
    "scaler": (_is_scaler, "the numbers of a GradScaler"),
    "optimizer.group_state": (
        lambda value: isinstance(value, list) and all(map(_are_named, value)),
        "a list of values by name",
    ),
    "log_window": (lambda value: isinstance(value, dict) and _are_sums(value.get("sums")), "four sums"),
}


def check_schema(state: dict, name: str) -> dict:
    """Return the state if it is a checkpoint of this script: types, ranges, shapes, and what they say of each other.

    What passes can be restored, or does not fit the run at hand; nothing else is to be feared of it.

    Raises:
        UserError: it is not.
        OtherFormatError: it is one of another version of this script.
    """
    missing = sorted({field.split(".")[0] for field in _FIELDS} - state.keys())
    if missing:
        raise UserError(
            f"{name} is no checkpoint of this script: it lacks {', '.join(missing)}; "
            "to start from the weights that it holds, pass it to --weights"
        )
    reason = _find_foreign(state)
    if reason is None and _is_count(state["format"]) and state["format"] != FORMAT:
        raise OtherFormatError(
            f"{name} has format {state['format']} and this script reads {FORMAT}; use the version that wrote it"
        )
    reason = reason or _find_misfit(state) or _find_contradiction(state)
    if reason is not None:
        raise UserError(f"{name} is no sound checkpoint: {reason}")
    return state


def _find_foreign(state: dict) -> str | None:
    """Say why a state is not plain data of a size that can be looked through, or return None.

    What is in it twice is looked at twice: a list may hold a list ten times, which holds another ten times, and so on.
    """
    todo, count = [(state, 0)], 0
    while todo:
        value, depth = todo.pop()
        children = _children(value)
        if children is None:
            return f"it holds {_shown(value)}, which is no plain data"
        count += len(children)
        if count > MOST_VALUES or depth > MOST_DEPTH:
            return "it holds more values, or deeper ones, than a checkpoint has"
        todo += [(child, depth + 1) for child in children]
    return None


def _children(value: Any) -> list | None:
    """Return what a plain value is made of; None for a value that is not plain."""
    if type(value) is dict or (type(value) is OrderedDict and vars(value).keys() <= {"_metadata"}):
        versions = list(vars(value).values()) if type(value) is OrderedDict else []
        return [*value.keys(), *value.values(), *versions]
    if type(value) in (list, tuple):
        return list(value)
    if type(value) is torch.Tensor:
        is_plain = value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized
        return [] if is_plain and not value.is_complex() else None
    is_short = abs(value) < 1 << 63 if type(value) is int else type(value) is not str or len(value) <= MOST_CHARACTERS
    return [] if is_short and (value is None or type(value) in (bool, int, float, str)) else None


def _find_misfit(state: dict) -> str | None:
    """Name the first field of a state that has not the type or the range that it must have, or return None."""
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
    """Name the first thing that two fields of a state, each right by itself, say otherwise, or return None."""
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
        (len(data["classes"]) == data["num_classes"], f"{data['num_classes']} classes and other names"),
        (
            all(type(key) is str or key in numbers for key in state["optimizer"]["state"]),
            "an optimizer's state for parameters that it has not",
        ),
    ]:
        if not is_right:
            return f"it claims {words}, at {position}"
    return None


def _shown(value: Any) -> str:
    """Return a value as it can be shown in a line, or its type."""
    if value is None or type(value) in (bool, int, float, str):
        return ascii(value)[:60] if type(value) is not int or abs(value) < 1 << 63 else "a very large number"
    return f"a {type(value).__name__}"


def load_weights(path: Path, *, is_average: bool = False) -> tuple[dict, str]:
    """Return the state dict in a file that holds one, or in a checkpoint, with its version notes; and which it is.

    Args:
        path: of the file.
        is_average: take the average of a checkpoint (`model_ema`), not its raw weights (`model`).

    The names of the checkpoint's classes are its attribute `classes`, None where there are none.

    Raises:
        UserError: there is none in it.
    """
    try:
        content = load_checkpoint(path, str(path))
    except MemoryError as error:
        raise StorageError(f"--weights {path} does not fit into the memory that is free now") from error
    if is_average and "model_ema" not in content:
        raise UserError(f"--weights {path} holds no average (model_ema); leave out --ema to take the weights it holds")
    key = "model_ema" if is_average else "model"
    weights = content.get(key, content)
    if not isinstance(weights, dict) or not weights or not all(isinstance(name, str) for name in weights):
        raise UserError(
            f"--weights {path} holds no weights: expected a state dict, or a checkpoint with one as `{key}`"
        )
    if not all(isinstance(tensor, torch.Tensor) for tensor in weights.values()):
        raise UserError(
            f"--weights {path} holds more than weights: expected a state dict, or a checkpoint with `{key}`"
        )
    for name, tensor in weights.items():
        # Of which a model as large as it claims to be would be built.
        if tensor.layout != torch.strided or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise UserError(f"--weights {path}: {name} claims to be larger than what is stored of it")
    plain = OrderedDict((name.removeprefix("module."), tensor) for name, tensor in weights.items())
    notes = getattr(weights, "_metadata", None)
    if isinstance(notes, dict) and all(isinstance(each, dict) for each in notes.values()):
        # By which modules load what older versions of them saved.
        plain._metadata = {f"{name}.".removeprefix("module.")[:-1]: each for name, each in notes.items()}
    described = content.get("data") if weights is not content else None
    classes = described.get("classes") if isinstance(described, dict) else None
    is_list = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    plain.classes = classes if is_list else None
    if is_average:
        plain.pop("n_averaged", None)  # of torch's AveragedModel, and no weight
    kind = "the average" if is_average else "the raw weights"
    has_both = weights is not content and not is_average and "model_ema" in content
    return plain, kind + (", not their average, which --ema takes" if has_both else "")
