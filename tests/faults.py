"""Faults of a run and their required outcomes: the table of tests/test_chaos.py, from which `make chaos` samples.

The run ends with the exit code and the state in status.json that the table says, and resumed on another number of
processes it ends with the weights and records of an undisturbed run.
"""

import errno
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distributed import watch
from tests.endings import differing_results
from tests.ranks import strike_at
from tests.runs import Runs

# 29 images in 4 shards of 2: 3 steps an epoch, 6 in all; nothing is saved but at the ends of epochs.
OPTIONS = """
    --model timm/tiny_test --train-crop-size 32 --val-resize-size 32 --val-crop-size 32 --device cpu --workers 0
    --model-ema --model-ema-steps 1 --epochs 2 --print-freq 2 --lr 0.05 --mixup-alpha 0.2
    --use-deterministic-algorithms --resume auto
""".split()
EACH_STEP, EACH_SECOND = ["--checkpoint-steps", "1"], ["--checkpoint-steps", "2"]

STEP, ZERO_GRAD = "torch.optim.SGD.step", "torch.optim.SGD.zero_grad"
TERM, USR1, INT, HUP = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


def at_step(act: Callable[[], Any], number: int | None = None, name: str = "step") -> None:
    original, numbers = getattr(torch.optim.SGD, name), itertools.count(1)

    def wrapped(*args, **options):
        if next(numbers) == number or number is None:
            act()
        return original(*args, **options)

    setattr(torch.optim.SGD, name, wrapped)


def fail() -> None:
    raise RuntimeError("a surprise")


def spoil_a_loss(rank: int, number: int) -> None:
    import train

    build, numbers = train.build_loss, itertools.count(1)

    def build_spoiling(*args):
        criterion = build(*args)
        of_rank = number if os.environ.get("RANK", "0") == str(rank) else None
        return lambda *scores: criterion(*scores) * (float("nan") if next(numbers) == of_rank else 1.0)

    train.build_loss = build_spoiling


def hang_loaders() -> None:
    from loading.source import Source

    read = Source.read

    def hang_in_read(*args):
        return time.sleep(600) if torch.utils.data.get_worker_info() else read(*args)

    Source.read = hang_in_read
    linger_briefly()


def linger_briefly() -> None:
    watch.Watchdog.LINGER_S = 1.5


def kill_a_loader() -> None:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    os.kill(int(children[0]), KILL)
    time.sleep(0.5)


def lose_the_terminal() -> None:
    """Have each write to the terminal fail from now on, and hang up two steps later."""
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    os.dup2(full, 2)
    strike_at(ZERO_GRAD, 2, "after", HUP)


def trouble_saves(numbers: list[int], code: int = 0, steps: int = 0) -> None:
    """Have the n-th saves become durable, or fail, only when some more steps have begun."""
    fsync, saves, begun = os.fsync, itertools.count(1), []

    def slow(descriptor):
        if "checkpoint-" in os.readlink(f"/proc/self/fd/{descriptor}") and next(saves) in numbers:
            end, deadline = len(begun) + steps, time.monotonic() + 20
            while len(begun) < end and time.monotonic() < deadline:
                time.sleep(0.01)
            if code:
                raise OSError(code, os.strerror(code))
        fsync(descriptor)

    os.fsync = slow
    at_step(lambda: begun.append(1))


def raise_beside_a_save() -> None:
    trouble_saves([4], steps=1)
    at_step(fail, 6)


class Fault(NamedTuple):
    faults: tuple[tuple, ...] | list[tuple] = ()  # signals, as of `train_rank`
    prepare: tuple = ()  # another fault: (function, arguments...), called in each rank
    world_size: int = 1  # processes of the run that it strikes
    argv: tuple | list[str] = ()  # further options
    code: int = 0  # exit code of rank 0
    state: str = "preempted"  # of status.json
    steps: tuple[int, ...] = ()  # positions at which the run may have stopped; any if empty
    says: tuple[str, ...] = ()  # words that the output holds, such as the option to change
    saved: tuple[int, ...] = ()  # the numbered checkpoints that must be there, by step


def stop_in(name: str, call: int, when: str, number: int, *steps: int) -> Fault:
    """Return a signal on rank 1 of 2, and the steps that are done when all have stopped.

    These are one more than at the signal where no line is due, or where they wait for a save in progress.
    """
    cause = f"{signal.Signals(number).name} on rank 1"
    return Fault([(1, name, call, when, number)], world_size=2, steps=steps, says=(cause,))


FAULTS = {
    "a signal while the data are read": stop_in("data.build_datasets", 1, "after", TERM, 0),
    "a signal before the first step": stop_in(STEP, 1, "before", TERM, 2),
    "a signal in an epoch": stop_in(STEP, 5, "after", USR1, 5, 6),
    "two signals": stop_in(STEP, 2, "before", TERM, 3)._replace(
        faults=[(1, STEP, 2, "before", TERM), (1, ZERO_GRAD, 2, "after", TERM)]
    ),
    "a signal during a save": Fault([(0, "torch.save", 1, "before", TERM)], argv=EACH_SECOND),
    "Ctrl-C twice": Fault(
        [(0, STEP, 2, "before", INT), (0, STEP, 2, "after", INT)], code=1, state="running", says=("interrupted",)
    ),
    "a terminal that is gone": Fault(prepare=(at_step, lose_the_terminal, 2)),
    "SIGKILL beside a save": Fault(
        [(0, STEP, 5, "after")], (trouble_saves, [4], 0, 2), argv=EACH_SECOND, code=-KILL, state="running", saved=(2, 3)
    ),
    "a signal beside a save": Fault(
        [(0, STEP, 5, "after", TERM)], (trouble_saves, [4], 0, 1), argv=EACH_SECOND, steps=(5,), saved=(4, 5)
    ),
    "an error beside a save": Fault(
        prepare=(raise_beside_a_save,), argv=EACH_SECOND, code=1, state="failed", says=("RuntimeError",), saved=(4,)
    ),
    "a slow disk": Fault(prepare=(trouble_saves, [4], 0, 2), argv=EACH_SECOND, state="finished", saved=(4, 6)),
    "a first save that fails": Fault(
        prepare=(trouble_saves, [1], errno.ENOSPC), argv=EACH_STEP, state="finished",
        says=("disk full (", "still available"), saved=(6,),
    ),
    "a last save that fails": Fault(
        prepare=(trouble_saves, [8], errno.EDQUOT), world_size=2, argv=EACH_STEP, code=1, state="failed",
        says=("the last checkpoint", "quota"), saved=(5, 6),
    ),
    "an unexpected error": Fault(
        prepare=(at_step, fail, 2), argv=["--workers", "2"], code=1, state="failed",
        says=("RuntimeError: a surprise", "train_one_epoch"),
    ),
    "a loss that is not finite on one rank": Fault(
        prepare=(spoil_a_loss, 1, 4), world_size=2, argv=[*EACH_STEP, "--print-freq", "100"], code=5, state="failed",
        says=("the loss of step 1 is not finite; the last checkpoint is kept", "--lr"), saved=(1,),
    ),
    "a loader process that is killed": Fault(
        prepare=(at_step, kill_a_loader, 2), argv=["--workers", "2"], code=1, state="failed", says=("--workers",)
    ),
    "a loader process that hangs": Fault(
        prepare=(hang_loaders,), argv=["--workers", "2", "--stall-timeout", "0.05"], code=1, state="failed",
        says=("--stall-timeout", "in hang_in_read"),
    ),
    "a rank that hangs": Fault(
        [(1, STEP, 2, "before", STOP)], (linger_briefly,), 2, ["--stall-timeout", "0.05"], code=1, state="failed",
        says=("--stall-timeout", "images of the next step: [", "no sign of life from rank 1"),
    ),
}  # fmt: skip


class FaultyRuns(Runs):
    def check_same(self, name: str, reference: str = "undisturbed") -> None:
        if not (self.folder / reference).exists():
            self.run(reference, 1).check()
        assert differing_results(self.folder / name, self.folder / reference) == []

    def strike(self, what: str, name: str, resumed_on: int) -> None:
        fault = FAULTS[what]
        outcome = self.run(name, fault.world_size, *fault.argv, faults=fault.faults, prepare=fault.prepare)
        status = self.status(name)
        assert (outcome.codes[0], status["state"]) == (fault.code, fault.state), outcome.output
        assert status["requeue"] == (fault.state == "preempted")
        for words in fault.says:
            assert words in outcome.output, outcome.output
        is_expected = any("RuntimeError" in words for words in fault.says)
        assert ("Traceback" in outcome.output) == is_expected, outcome.output
        saved = self.saved(name)
        assert {*fault.saved} <= {*saved}, saved
        if fault.state == "preempted":
            assert not fault.steps or status["step"] in fault.steps, outcome.output
            assert (status["step"] in saved) == (status["step"] > 0)
        if fault.code >= 0:
            assert not list((self.folder / name).glob("*.tmp.*"))
        self.run(name, resumed_on).check()
        self.check_same(name)
