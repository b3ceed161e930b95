"""The state of a run, as checkpoints hold it."""

import copy
import math
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from checkpointing.schema import FORMAT
from errors import UserError, counted, duration, in_one_line
from options import CURVES

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

    def advance(self) -> None:
        """Count a step."""
        self.steps += 1

    def start_epoch(self, epoch: int) -> int:
        """Move to an epoch, unless it is the present one; return its next step."""
        if epoch != self.epoch:
            self.epoch, self.steps, self.is_evaluated = epoch, 0, False
        return self.steps

    def note_results(self, results: dict[str, dict[str, float]], metric: str) -> None:
        """Record that the epoch has been evaluated, and whether it is the best so far in each kind of `BEST_NAMES`.

        The highest value is best, or the lowest where the metric's `Curve` says so; of equal values the one with the
        lower loss, then the earlier one. Earlier versions saved no loss: their best stays in a tie.
        """
        self.is_evaluated = True
        sign = -1 if CURVES[metric].get("is_lower_better") else 1
        for kind in BEST_NAMES.keys() & results.keys():
            name, value = f"{kind}/{metric}", float(results[kind][metric])
            loss = float(results[kind].get("loss", math.inf))
            loss = math.inf if math.isnan(loss) else loss
            best = self.bests[BEST_NAMES[kind]]
            is_first = best is None or best["metric"] != name or not math.isfinite(best["value"])
            if is_first or (sign * value, -loss) > (sign * best["value"], -best.get("loss", -math.inf)):
                self.bests[BEST_NAMES[kind]] = {"metric": name, "value": value, "loss": loss, "step": self.step}

    @property
    def best_now(self) -> list[str]:
        """The names under which the present state is best."""
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
        # A requeued job repeats its command, which is no contradiction.
        is_complete = self.steps == self.steps_per_epoch  # and perhaps not to be evaluated
        if start_epoch not in (None, next_epoch, self.epoch + is_complete, state["args"]["start_epoch"]):
            raise UserError(f"--start-epoch {start_epoch}, but the checkpoint is at {next_epoch}; leave it out")
        if self.epoch >= epochs:
            raise UserError(
                f"--epochs {epochs}, but the checkpoint is in epoch {self.epoch} (from 0); give more epochs"
            )
        print(f"resumed step {self.step} (epoch {self.epoch}, step {self.steps} of {self.steps_per_epoch} in it)")

    def state_dict(self) -> dict:
        """Return plain data, which loads without code: dicts, lists, strings, numbers and tensors."""
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
        """Restore every part and the position; print which parts the checkpoint or this run lacks.

        Raises:
            UserError: a part is of another model or optimizer.
        """
        for name, part in self.parts.items():
            if name in state:
                with in_one_line(f"the checkpoint's {name} does not fit this run's"):
                    part.load_state_dict(state[name])
            else:
                print(f"the checkpoint holds no {name}, which starts from its initial state")
                if name == "model_ema":
                    part.restart(self.parts["model"])
        for name in {"model_ema", "scaler"} & state.keys() - self.parts.keys():
            print(f"the checkpoint's {name} is left out: this run has none")
        position = state["position"]
        self.epoch, self.steps, self.is_evaluated = position["epoch"], position["steps"], position["is_evaluated"]
        self.bests = {name: state[name] for name in self.bests}
        self.is_resumed = True

    def result(self, folder: str, ran_s: float | None) -> str:
        """Return the last lines of a finished run; `ran_s` is its time in seconds, or None if unknown."""
        lines = [
            f"best {best['metric']} {best['value']:.3f}, after step {best['step']}: {folder}/{name}.pth"
            for name, best in self.bests.items()
            if best is not None
        ]
        took = "" if ran_s is None else f" in {duration(ran_s)}"
        done = f"finished {counted(self.epoch + 1, 'epoch')}, {counted(self.step, 'step')}{took}; all in {folder}"
        return "\n".join([done, *lines])

    def is_finished(self, epochs: int) -> bool:
        """Tell whether nothing is left to do."""
        return self.epoch == epochs - 1 and self.is_evaluated


class HostCopy:
    """A copy of a state in host memory, which the next copy reuses: fresh pages cost more than to copy into them.

    A GPU's tensors go into pinned memory, without a wait.
    """

    def __init__(self) -> None:
        self._memories, self._copied = {}, None

    def take(self, state: dict) -> dict:
        """Return a copy, whole after `wait`, good until the next; its tensors share memory where the originals do."""
        before, self._memories, memories, copies = self._memories, {}, {}, {}
        for tensor in filter(torch.is_tensor, tree_iter(state)):
            source = tensor.untyped_storage()
            if source._cdata not in memories:  # by which torch.save tells them apart, too
                kind = source.nbytes(), source.device.type == "cuda"
                memory = before[kind].pop() if before.get(kind) else _allocate(*kind)
                self._memories.setdefault(kind, []).append(memory)
                memories[source._cdata] = memory.copy_(source, non_blocking=kind[1])
            there = tensor.storage_offset(), tensor.size(), tensor.stride()
            copies[id(tensor)] = torch.empty(0, dtype=tensor.dtype).set_(memories[source._cdata], *there)
        is_cuda = any(is_pinned for _, is_pinned in self._memories)
        self._copied = torch.cuda.current_stream().record_event() if is_cuda else None
        return copy.deepcopy(state, copies)

    def wait(self) -> None:
        """Wait, in any thread, until the copy is whole."""
        if self._copied is not None:
            self._copied.synchronize()


def _allocate(num_bytes: int, is_pinned: bool) -> torch.UntypedStorage:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned).untyped_storage()
