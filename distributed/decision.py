"""One decision of all ranks after each step: stop, or save."""

import signal
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distributed import collectives
from distributed.signals import Signals
from distributed.watch import watchdog


class Decision(NamedTuple):
    """The decision of a step, the same on every rank."""

    stop: str = ""  # such as "SIGTERM on rank 5"; empty to continue
    is_save_due: bool = False
    is_written: bool = False  # whether the save in progress has been written, or has failed


CONTINUE = Decision()


class StepDecisions:
    """Combine the votes of all ranks into one decision a step, during the next step's computation.

    A vote is `Decision.is_save_due` and `is_written` of this process; the signal that it has received counts too.
    """

    def __init__(self, signals: Signals) -> None:
        self.signals, self._begun = signals, None

    def begin(self, *vote: bool) -> None:
        """Begin to combine the votes of all ranks. Collective: every rank must call it."""
        if self._begun is not None:
            with watchdog.waiting():
                self._begun[0].wait()  # of the step before, whose result was not needed
        if collectives.get_world_size() > 1:
            integers = torch.tensor(self._as_integers(*vote))  # on the host: no device is waited for
            group = collectives.world_group()
            self._begun = dist.all_reduce(integers, dist.ReduceOp.MAX, group, async_op=True), integers

    def result(self, *vote: bool) -> Decision:
        """Return the decision begun last, or `CONTINUE`; a single process decides by its present vote. Collective."""
        begun, self._begun = self._begun, None
        if collectives.get_world_size() == 1:
            stop, *rest = self._as_integers(*vote)
        elif begun is None:
            return CONTINUE
        else:
            with watchdog.waiting():
                begun[0].wait()
            stop, *rest = begun[1].tolist()
        name = signal.Signals(stop >> 32).name if stop else ""
        if stop and collectives.get_world_size() > 1:
            name += f" on rank {stop & 0xFFFFFFFF}"
        return Decision(name, *map(bool, rest))

    def decide(self, *vote: bool) -> Decision:
        """Combine the votes of all ranks, and wait for the decision. Collective: every rank must call it."""
        self.begin(*vote)
        return self.result(*vote)

    def _as_integers(self, is_save_due: bool = False, is_written: bool = False) -> list[int]:
        """Return this process's vote as integers, whose maxima over all ranks are the decision."""
        number = self.signals.number
        return [number << 32 | collectives.get_rank() if number else 0, int(is_save_due), int(is_written)]


class WatchedLoader:
    """A loader that stops on every rank before the same batch once a rank has been told to stop.

    Ranks may have different numbers of batches; a rank without batches keeps deciding until all have finished. `stop`
    is called with the cause, on all ranks, and raises. Other attributes are the loader's.
    """

    def __init__(self, loader: Any, decisions: StepDecisions, stop: Callable[[str], None]) -> None:
        self.loader, self.decisions, self.stop = loader, decisions, stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator:
        """Yield the batches. Collective: every rank must iterate to the end."""
        rounds = max(collectives.gather_plain(len(self.loader)))
        batches = iter(self.loader)
        for number in range(rounds):
            if cause := self.decisions.decide().stop:
                self.stop(cause)
            if number < len(self.loader):
                yield next(batches)
