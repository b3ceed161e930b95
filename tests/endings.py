"""How a run has ended: all that its output folder promises, and in which of it two folders differ."""

import functools
import hashlib
import json
import logging
import tomllib
from collections.abc import Iterable, Set
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from checkpointing import guard
from checkpointing.archive import load_checkpoint
from checkpointing.checkpoint import BEST_NAMES
from checkpointing.folder import NUMBERED, PICTURES
from errors import UserError
from settings.options import BY_NAME
from settings.rules import SILENT

# Fields of metrics.jsonl that depend on the machine, the moment and the number of processes.
MACHINE_FIELDS = {
    "time", "hours", "images_per_s", "data_wait", "memory_gib", "world_size", "starting_s", "waiting_s", "saving_s",
    "computing_s",
}  # fmt: skip
# In a checkpoint: the command and the machine that ran it; the results so far. In run.json: which start this was, and
# of which code; among its options what may differ from one start of a run to the next.
_OF_THE_START = {"args", "environment"}
_OF_THE_EVALUATION = {"position", *BEST_NAMES.values()}
_OF_THE_PROCESS = {"command", "host", "pid", "started", "launch", "environment"}
_OF_THE_COMMAND = {name for name, option in BY_NAME.items() if option.resume == SILENT}
_OF_THE_COMMAND |= guard._DERIVED | {"output_dir"}


class Ending:
    """Everything that the folder of a run promises, read once.

    Unless it `has_same_saves` as the other run, each numbered checkpoint has to be good and of the step in its name,
    and a best one to hold the same weights: it may have been saved before its evaluation.
    """

    def __init__(self, folder: Path, *, has_same_saves: bool = True) -> None:
        self.values = {}
        # log.txt has the lines of all starts.
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith(("log.txt", "events.")))
        if not has_same_saves:
            numbered = [name for name in names if NUMBERED.fullmatch(name)]
            self.values["wrong numbers"] = [name for name in numbered if _step_of(folder / name) != int(name[11:19])]
            names = [name for name in names if name not in numbered]
        self.values["files"] = " ".join(names)
        for name in names:
            if name.endswith(".pth"):
                is_partial = not has_same_saves and name.startswith("best")
                self.values.update(_read_checkpoint(folder / name, _OF_THE_EVALUATION if is_partial else frozenset()))
            if PICTURES.fullmatch(name):
                self.values[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name, read in _READERS.items():
            try:
                self.values[name] = read(folder / name)
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                self.values[name] = f"cannot be read: {error!r}"

    def differences(self, expected: "Ending") -> list[str]:
        ours, theirs = flatten(self.values), flatten(expected.values)
        return [f"{name}: {ours.get(name)!r:.200} for {theirs.get(name)!r:.200}" for name in unequal(ours, theirs)][:10]


def differing_results(ours: Path, theirs: Path) -> list[str]:
    """Name what differs in the last states and the records of two runs, whatever else their folders hold."""
    return unequal(*(
        _read_checkpoint(folder / "checkpoint.pth", frozenset()) | {"metrics": _read_records(folder / "metrics.jsonl")}
        for folder in (ours, theirs)
    ))  # fmt: skip


@functools.lru_cache(32)  # the names of a checkpoint are links of one file
def _load(content: bytes) -> dict:
    return load_checkpoint(content, "checkpoint")


def load_whole(path: Path) -> dict:
    return _load(path.read_bytes())


def _step_of(path: Path) -> int | None:
    try:
        return load_whole(path)["step"]
    except UserError:
        return None


def _read_checkpoint(path: Path, left_out: Set[str]) -> dict:
    try:
        state = load_whole(path)
    except UserError as error:  # damaged ones are set aside under their own names
        return {path.name: f"no checkpoint: {type(error).__name__}"}
    return flatten({key: value for key, value in state.items() if key not in _OF_THE_START | left_out}, path.name)


def read_metrics(path: Path) -> list[dict]:
    return [record for record in _read_records(path) if record["kind"] != "epoch"]


def _read_records(path: Path) -> list[dict]:
    return exact(map(json.loads, path.read_text().splitlines()))


def exact(records: Iterable[dict]) -> list[dict]:
    return [{key: value for key, value in record.items() if key not in MACHINE_FIELDS} for record in records]


def _read_status(path: Path) -> dict:
    passing = {"time", "heartbeat", "progress", "images_per_s", "left_s", "pid", "host"}
    return {key: value for key, value in json.loads(path.read_text()).items() if key not in passing}


def _read_run(path: Path) -> dict:
    record = {key: value for key, value in json.loads(path.read_text()).items() if key not in _OF_THE_PROCESS}
    record["args"] = {key: value for key, value in record["args"].items() if key not in _OF_THE_COMMAND}
    return record


def read_points(folder: Path) -> dict[str, list[tuple]]:
    """Return the points that TensorBoard shows, [(step, value)] by tag; of what the machine decides the step alone."""
    if not folder.is_dir():
        return {}
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it says each restart that it sees
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    points = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    of_machine = [tag for tag in points if tag.split("/")[-1] in MACHINE_FIELDS]
    return points | {tag: [(step, None) for step, _ in points[tag]] for tag in of_machine}


_READERS = {
    "metrics.jsonl": _read_records,
    "status.json": _read_status,
    "run.json": _read_run,
    "recipe.toml": lambda path: tomllib.loads(path.read_text()),
    ".": read_points,  # of the events in the folder itself
}


def flatten(value, name: str = "") -> dict:
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flatten(item, f"{name}/{key}").items()}
    return {name: value}


def equal(ours, theirs) -> bool:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    return type(ours) is type(theirs) and ours == theirs


def unequal(ours: dict, theirs: dict) -> list[str]:
    names = sorted(ours.keys() | theirs.keys())
    return [name for name in names if not equal(ours.get(name, "nothing"), theirs.get(name, "nothing"))]


def differing(ours: dict, theirs: dict) -> list[str]:
    assert ours.keys() == theirs.keys()
    return unequal(ours, theirs)
