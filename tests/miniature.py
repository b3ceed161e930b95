"""The real command line on a model of a few numbers, in children of one warm process: a run takes a tenth of a second.

What a child does to its disk is watched (tests/calls.py), and so is what it announces as saved.
"""

import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import NamedTuple

import timm
import torch
from torch import nn

import config
import files
import models
import run
import train
from checkpointing import store
from checkpointing.checkpoint import RunState
from checkpointing.store import CheckpointManager
from tests.calls import CHANGING, Call, Watch, read_log, undisturbed

# Three epochs of two steps, each saved.
OPTIONS = """
    --model timm/crash_test --synthetic 8 --train-crop-size 16 --val-resize-size 16 --val-crop-size 16 --device cpu
    --workers 0 --epochs 3 --batch-size 4 --lr 0.01 --checkpoint-steps 1 --print-freq 1 --use-deterministic-algorithms
""".split()
AVERAGE = ["--model-ema", "--model-ema-steps", "1", "--model-ema-decay", "0.5"]

# What the evaluations after each epoch's last step give: the first is best, the second not, and the last is or is not.
ACCURACY = {"val": {2: 50.0, 4: 40.0, 6: 60.0}, "val_ema": {2: 30.0, 4: 40.0, 6: 35.0}}

TIMEOUT_S = 30.0


class TinyModel(nn.Module):
    """Statistics and weights of a few numbers."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.fc = nn.Linear(3, num_classes)

    def forward(self, image):
        return self.fc(self.norm(image.mean(dim=(2, 3))))


def crash_test(pretrained: bool = False, num_classes: int = 1000, **options) -> nn.Module:
    return TinyModel(num_classes)


timm.models.register_model(crash_test)
# As tests/warm.py does for the other models of the suite.
with torch.random.fork_rng([]):
    models.check_model(config.parse_args([*OPTIONS]))


class Outcome(NamedTuple):
    """What became of one start."""

    code: int  # negative: the signal that ended it
    output: str
    log: list

    @property
    def calls(self) -> list[Call]:
        return [entry for entry in self.log if isinstance(entry, Call)]

    def notes(self, kind: str) -> list[tuple]:
        """Return what was noted of a kind: `saved` and `resumed` with (step, is_evaluated)."""
        return [tuple(entry[2:]) for entry in self.log if not isinstance(entry, Call) and entry[1] == kind]


class Workplace:
    """A folder in which commands run, each in a child of this process.

    Args:
        folder: an empty one; the output folders lie below `disk` in it.
    """

    def __init__(self, folder: Path) -> None:
        self.disk, self.log, self.said = folder / "disk", folder / "log", folder / "said"

    def reset(self, template: Path | None) -> None:
        """Bring the disk into a known state."""
        shutil.rmtree(self.disk, ignore_errors=True)
        if template is None:
            self.disk.mkdir(parents=True)
        else:
            copy_tree(template, self.disk)

    def start(
        self,
        command: list[str],
        trouble: Callable = undisturbed,
        *,
        counted=CHANGING,
        has_content=False,
        stop_at=None,
        is_late=False,
    ) -> Outcome:
        """Run the command line in a child.

        Args:
            command: beside `OPTIONS`.
            trouble: as of `Watch`.
            counted: as of `Watch`.
            has_content: as of `Watch`.
            stop_at: the position (step, is_evaluated) whose save, once made, ends the child by a kill.
            is_late: whether each save is written when the run waits for it, and else before the run goes on: so the
                calls have one order.
        """
        self.log.unlink(missing_ok=True)
        sys.stdout.flush()
        is_over, end = os.pipe()  # the other end of which only the child has, until it ends
        child = os.fork()
        if not child:
            try:
                _order_saves(is_late)
                self._run(command, trouble, counted, has_content, stop_at)
            finally:  # whatever happens, this process must not go on as the parent
                os._exit(99)
        os.close(end)
        code = _wait(child, is_over)
        os.close(is_over)
        return Outcome(code, self.said.read_text(errors="replace"), read_log(self.log))

    def _run(self, command: list[str], trouble: Callable, counted: set, has_content: bool, stop_at) -> None:
        descriptor = os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ["OMP_NUM_THREADS"] = "1"
        os.chdir(self.disk)
        files.RETRY_S = 0.01  # no disk here needs a second
        watch = Watch(self.disk, self.log, trouble, counted, has_content=has_content)
        _take_notes(watch, stop_at)
        _evaluate_as_planned()
        sys.argv = ["train.py", *OPTIONS, *command]
        train.cli()


def _wait(child: int, is_over: int) -> int:
    """Return what a child ended with; one that does not end is killed and counts as SIGALRM."""
    if not select.select([is_over], [], [], TIMEOUT_S)[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return -signal.SIGALRM
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _take_notes(watch: Watch, stop_at: tuple | None) -> None:
    """Note what the run goes on from, and what it announces as saved."""
    save, settle, resume = CheckpointManager.save, CheckpointManager.settle, RunState.resume
    position = None

    def noted_save(manager, run, **options):
        nonlocal position
        manager.settle()
        position = run.step, run.is_evaluated
        return save(manager, run, **options)

    def noted_settle(manager, **options):
        is_saved = settle(manager, **options)
        if is_saved:
            watch.note("saved", *position)
            if position == stop_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return is_saved

    def noted_resume(run, *args):
        resume(run, *args)
        watch.note("resumed", run.step, run.is_evaluated)

    CheckpointManager.save, CheckpointManager.settle, RunState.resume = noted_save, noted_settle, noted_resume


def _order_saves(is_late: bool) -> None:
    """Have the thread that writes a save do so at once, or only when it is waited for, while the run stands still."""
    store.ThreadPoolExecutor = LateThread if is_late else EagerThread


class EagerThread(futures.ThreadPoolExecutor):
    """A thread whose work is done before `submit` returns."""

    def submit(self, *work) -> futures.Future:
        future = super().submit(*work)
        futures.wait([future])
        return future


class LateThread(futures.ThreadPoolExecutor):
    """A thread that begins its work when the result is asked for."""

    def submit(self, function: Callable, *arguments) -> futures.Future:
        gate = threading.Event()

        def work():
            gate.wait()
            return function(*arguments)

        def result():
            gate.set()
            return wait()

        future = super().submit(work)
        wait, future.result = future.result, result
        return future


def _evaluate_as_planned() -> None:
    """Have the evaluations give what `ACCURACY` says."""
    take_results = run.Run.take_results

    def planned(self, results):
        for kind, result in results.items():
            result["acc1"] = ACCURACY[kind][self.state.step]
        take_results(self, results)

    run.Run.take_results = planned


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder with its hard links, which say which checkpoint is the newest and which the best."""
    copied = {}
    for folder, _, names in os.walk(source):
        there = target / Path(folder).relative_to(source)
        there.mkdir(parents=True, exist_ok=True)
        for name in names:
            path = Path(folder) / name
            inode = path.lstat().st_ino
            if inode in copied:
                os.link(copied[inode], there / name)
            else:
                copied[inode] = there / name
                shutil.copy2(path, there / name, follow_symlinks=False)
