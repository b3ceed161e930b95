"""The state of a run, as checkpoints hold it, and the weights that can be taken out of one."""

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any, Protocol

import torch

from checkpointing.archive import load_checkpoint
from checkpointing.schema import FORMAT
from errors import StorageError, UserError, in_one_line

# The best checkpoints of a run, by the results that they are best in: those of the raw weights, and of their average.
BEST_NAMES = {"val": "best", "val_ema": "best_ema"}


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
            results: by kind, of which val and val_ema have a best of their own.
            metric: the result that counts: of a loss the lowest is best, of anything else the highest.
        """
        self.is_evaluated = True
        sign = -1 if metric == "loss" else 1
        for kind in BEST_NAMES.keys() & results.keys():
            name, value = f"{kind}/{metric}", float(results[kind][metric])
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
