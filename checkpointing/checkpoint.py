"""The state of a run, as checkpoints hold it."""

import copy
import math
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from checkpointing.schema import FORMAT
from errors import UserError, as_user_error, counted, duration
from settings.choices import CURVES

# Names of the best checkpoints, by the evaluation that they are best in: of the raw weights, or of their average.
BEST_NAMES = {"val": "best", "val_ema": "best_ema", "minival": "best", "minival_ema": "best_ema"}


class RunState:
    """The position of a run, and all state that does not follow from it.

    The position is (epoch, steps done in it, whether the epoch has been evaluated), at the end of a step. The loop
    moves it, never an iterator: loader processes work ahead. All random draws and the learning rate are functions of
    it, so no generator, sampler or schedule is saved.

    Args:
        facts: plain values that describe the run, saved beside the state.
        parts: objects with `state_dict` and `load_state_dict`, by the names to save them under; None for a part that
            this run lacks.
    """

    def __init__(self, steps_per_epoch: int, facts: dict, parts: dict[str, Any]) -> None:
        self.steps_per_epoch = steps_per_epoch
        self.facts = facts
        self.parts = {name: part for name, part in parts.items() if part is not None}
        self.epoch, self.steps, self.is_evaluated = 0, 0, False
        self.bests = dict.fromkeys(BEST_NAMES.values())  # {"metric", "value", "loss", "step"}, or None
        self.is_resumed = False

    @property
    def step(self) -> int:
        """Steps done since the run began."""
        return self.epoch * self.steps_per_epoch + self.steps

    def start_epoch(self, epoch: int) -> int:
        """Move to an epoch, unless it is the present one; return its next step."""
        if epoch != self.epoch:
            self.epoch, self.steps, self.is_evaluated = epoch, 0, False
        return self.steps

    def note_results(self, results: dict[str, dict[str, float]], metric: str) -> None:
        """Record that the epoch has been evaluated, and whether it is the best so far in each kind of `BEST_NAMES`.

        The highest value is best, or the lowest where the metric's `Curve` says so; of equal values the one with the
        lower loss, then the earlier one.
        """
        self.is_evaluated = True
        sign = -1 if CURVES[metric].is_lower_better else 1
        for kind in BEST_NAMES.keys() & results.keys():
            name = f"{kind}/{metric}"
            # Of a numpy number or a tensor the checkpoint could not be loaded without code.
            value = float(results[kind][metric])
            loss = float(results[kind].get("loss", math.inf))
            if math.isnan(loss):  # which is neither lower nor higher than any
                loss = math.inf
            best = self.bests[BEST_NAMES[kind]]
            # Another --best-metric makes another record: the values cannot be compared.
            is_first = best is None or best["metric"] != name or not math.isfinite(best["value"])
            if is_first or (sign * value, -loss) > (sign * best["value"], -best["loss"]):
                self.bests[BEST_NAMES[kind]] = {"metric": name, "value": value, "loss": loss, "step": self.step}

    @property
    def best_now(self) -> list[str]:
        """The names under which the present state is best."""
        return [name for name, best in self.bests.items() if best is not None and best["step"] == self.step]

    def resume(self, state: dict | None, start_epoch: int | None, epochs: int) -> None:
        """Restore a checkpoint, if there is one, or move to `--start-epoch`; UserError for a contradiction."""
        if state is None:
            self.start_epoch(start_epoch or 0)
            return
        self.load_state_dict(state)
        next_epoch = self.epoch + self.is_evaluated
        # A requeued job repeats its command, which is no contradiction.
        is_complete = self.steps == self.steps_per_epoch  # and perhaps not to be evaluated
        if start_epoch not in (None, next_epoch, self.epoch + is_complete, state["args"]["start_epoch"]):
            raise UserError(f"--start-epoch {start_epoch}, but the checkpoint is at {next_epoch}; remove --start-epoch")
        if self.epoch >= epochs:
            place = f"epoch {self.epoch} (from 0)"
            raise UserError(f"--epochs {epochs}, but the checkpoint is in {place}; give more epochs")
        print(f"resumed step {self.step} (epoch {self.epoch}, step {self.steps} of {self.steps_per_epoch} in it)")

    def state_dict(self) -> dict:
        """Return plain data, which loads without code: dicts, lists, strings, numbers and tensors."""
        return {
            "format": FORMAT,
            # Under torchvision's names, so that any script can load `model` into torchvision's plain model.
            **{name: part.state_dict() for name, part in self.parts.items()},
            # As torchvision's scripts mean it: the last epoch that is complete, after which a resume begins the next.
            "epoch": self.epoch - (self.steps != self.steps_per_epoch),
            "step": self.step,
            "position": {"epoch": self.epoch, "steps": self.steps, "is_evaluated": self.is_evaluated},
            **self.bests,
            **self.facts,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore every part and the position; print which parts the checkpoint or this run lacks.

        Raises:
            UserError: a part is of another model or optimizer.
        """
        for name, part in self.parts.items():
            if name in state:
                with as_user_error(f"the checkpoint's {name} does not fit this run's"):
                    part.load_state_dict(state[name])
            else:
                # --allow-change may have added an average or a scaler: torchvision's script raises a KeyError there.
                print(f"the checkpoint has no {name}, which starts from its initial state")
                # An average that begins now must not begin at the random weights of the first step.
                if name == "model_ema":
                    part.restart(self.parts["model"])
        for name in {"model_ema", "scaler"} & state.keys() - self.parts.keys():
            print(f"the checkpoint's {name} is ignored: this run has none")
        position = state["position"]
        self.epoch, self.steps, self.is_evaluated = position["epoch"], position["steps"], position["is_evaluated"]
        # timm's script restores no best, so that its first evaluation after a resume is the best, even if worse.
        self.bests = {name: state[name] for name in self.bests}
        self.is_resumed = True

    def result(self, folder: str, hours: float | None) -> str:
        """Return the last lines of a finished run, which took so many hours in all, if that is known."""
        took = f" in {duration(3600 * hours)}" if isinstance(hours, float) else ""
        done = f"finished {counted(self.epoch + 1, 'epoch')}, {counted(self.step, 'step')}{took}; all in {folder}"
        lines = [done]
        for name, best in self.bests.items():
            if best is not None:
                value = f"{best['metric']} {best['value']:.3f}, after step {best['step']}"
                lines.append(f"best {value}: {folder}/{name}.pth")
        return "\n".join(lines)


def copy_to_host(state: dict) -> dict:
    """Return a copy of a state whose tensors are in host memory."""
    # Into new memory: buffers that are kept would save a ResNet-50 with momentum 38 of 51 ms at each save.
    # deepcopy takes these as done, and copies no tensor on the device first.
    copies = {id(value): value.to("cpu", copy=True) for value in tree_iter(state) if torch.is_tensor(value)}
    return copy.deepcopy(state, copies)
