"""Every point at which a run can be killed, and every call that can fail.

The file-system calls of a command line are counted. Then it is killed before each of them, in the middle of each write
and after the last, or a call fails; given again, it has to end like an undisturbed run (tests/endings.py).
"""

import errno
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore
from typing import Any, NamedTuple

import files
import run
from checkpointing import store
from checkpointing.checkpoint import RunState
from checkpointing.store import CheckpointManager
from monitoring import loggers
from tests.calls import CHANGING, Call, Trouble, Watch, read_log
from tests.endings import Ending
from tests.ranks import run_ranks, train_rank

# Three epochs of two steps, each saved.
OPTIONS = """
    --model timm/tiny_test --synthetic 8 --train-crop-size 16 --val-resize-size 16 --val-crop-size 16 --device cpu
    --workers 0 --epochs 3 --batch-size 4 --lr 0.01 --checkpoint-steps 1 --print-freq 1 --use-deterministic-algorithms
    --output-dir runs/a
""".split()
AVERAGE = ["--model-ema", "--model-ema-steps", "1", "--model-ema-decay", "0.5"]

# What the evaluations after each epoch's last step give: the first is best, the second not, and the last is or is not.
ACCURACY = {"val": {2: 50.0, 4: 40.0, 6: 60.0}, "val_ema": {2: 30.0, 4: 40.0, 6: 35.0}}

NO_TROUBLE = Trouble()
COUNTED_WHEN_FAILING = CHANGING | {"read", "list", "lock"}
ANY_ERROR = (errno.EIO, errno.ENOSPC, errno.ENOSYS, errno.ESTALE)
ERRORS = {
    "link": (*ANY_ERROR, errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP),
    "fsync": (*ANY_ERROR, errno.EINVAL, errno.EOPNOTSUPP),
    "read": (errno.EIO, errno.ESTALE),
    "list": (errno.EIO, errno.ESTALE),
    "lock": (errno.EIO, errno.ENOSYS, errno.ESTALE, errno.ENOLCK),
}


class Writer:
    """In place of the thread that writes saves, so that the calls have one order: at once, or when the run waits."""

    def __init__(self, is_late: bool, *options: Any) -> None:
        self.is_late = is_late

    def submit(self, function: Callable, *arguments: Any) -> Future:
        future = Future()
        if self.is_late:
            future.result = partial(function, *arguments)
        else:
            future.set_result(function(*arguments))
        return future


class Handshake:
    """In place of the queue to a logger's thread, for the same: `put` returns once an item has been worked on."""

    def __init__(self) -> None:
        self.items, self.idle = SimpleQueue(), Semaphore(0)

    def put(self, item: Any) -> None:
        self.idle.acquire()
        self.items.put(item)
        if item is not None:  # after which the thread ends
            self.idle.acquire()
            self.idle.release()

    def get(self) -> Any:
        self.idle.release()
        return self.items.get()


def watch_run(folder: Path, trouble: Trouble, counted: set, stop_at: tuple | None, is_late: bool, spoil: tuple) -> None:
    """Prepare the process of a run: watch its calls, note what it saves and resumes, and plan its results.

    `spoil`, functions, break the code under test. A kill ends it once the position `stop_at` (step, is_evaluated) is
    saved.
    """
    for each in spoil:
        each()
    os.chdir(folder / "disk")
    files.RETRY_S = 0.01  # no disk here needs a second
    store.ThreadPoolExecutor, loggers.SimpleQueue = partial(Writer, is_late), Handshake
    watch = Watch(folder / "disk", folder / "log", trouble, counted)
    save, wait_for_save, resume = CheckpointManager.save, CheckpointManager.wait_for_save, RunState.resume
    record_results, position = run.Run.record_results, None

    def noted_save(manager, run, **options):
        nonlocal position
        manager.wait_for_save()
        position = run.step, run.is_evaluated
        return save(manager, run, **options)

    def noted_settle(manager, **options):
        is_saved = wait_for_save(manager, **options)
        if is_saved:
            watch.note("saved", *position)
            if position == stop_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return is_saved

    def noted_resume(run, *args):
        resume(run, *args)
        watch.note("resumed", run.step, run.is_evaluated)

    def planned(self, results):
        for kind, result in results.items():
            result["acc1"] = ACCURACY[kind][self.state.step]
        record_results(self, results)

    CheckpointManager.save, CheckpointManager.wait_for_save, RunState.resume = noted_save, noted_settle, noted_resume
    run.Run.record_results = planned


class Start(NamedTuple):
    code: int  # negative: the signal that ended it
    output: str
    log: list

    def calls(self, *, up_to_save: bool = False) -> list[Call]:
        ends = [index for index, entry in enumerate(self.log) if entry[0] == "saved"] if up_to_save else []
        return [entry for entry in self.log[: ends[0] if ends else None] if isinstance(entry, Call)]

    def notes(self, kind: str) -> list[tuple]:
        return [tuple(entry[1:]) for entry in self.log if entry[0] == kind]


class Scenario(NamedTuple):
    name: str
    command: list[str]  # beside `OPTIONS`
    prepare: tuple[Callable[["Trial"], None], ...] = ()  # bring the disk into the state that the command is given in
    is_whole: bool = False  # whether to look beyond the first save: later ones are as in other scenarios
    is_late: bool = False  # as of `Writer`

    @property
    def is_afresh(self) -> bool:
        return "--overwrite" in self.command and "--resume" not in self.command


def started(*options: str, stop_at: tuple | None = None) -> Callable[["Trial"], None]:
    def prepare(trial: "Trial") -> None:
        outcome = trial.start(options, stop_at=stop_at)
        assert outcome.code == (-signal.SIGKILL if stop_at else 0), outcome.output

    return prepare


def damaged(*names: str) -> Callable[["Trial"], None]:
    """Return what cuts files in half, though not what else is linked to them."""

    def prepare(trial: "Trial") -> None:
        for path in (trial.out / name for name in names):
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content[: len(content) // 2])

    return prepare


AUTO = ["--resume", "auto"]
ELSEWHERE = ["--resume", "runs/b/checkpoint.pth"]
THERE = ["--output-dir", "runs/b"]
OLDER = started("--seed", "1")
SCENARIOS = [
    # A first start in a new folder, a first save, saves, evaluations that are best and not, a last save that is best.
    Scenario("new", [*AUTO, "--keep-last", "2"], is_whole=True),
    # The same with an average, of which the last evaluation is not the best.
    Scenario("new with average", [*AUTO, *AVERAGE], is_whole=True),
    # The same, as far as a run can get before a save that it has begun is on the disk.
    Scenario("new, saving late", [*AUTO, "--keep-last", "2"], is_whole=True, is_late=True),
    Scenario("new with average, saving late", [*AUTO, *AVERAGE], is_whole=True, is_late=True),
    Scenario("new without resume", []),
    Scenario("finished", AUTO, (started(),)),
    Scenario("interrupted", AUTO, (started(stop_at=(3, False)),)),
    Scenario("overwrite", ["--overwrite"], (started("--seed", "1", *AVERAGE),)),
    Scenario("from elsewhere", [*ELSEWHERE, *AVERAGE], (started(*THERE, *AVERAGE, stop_at=(4, True)),)),
    Scenario("from elsewhere, best elsewhere", ELSEWHERE, (started(*THERE, stop_at=(4, True)),)),
    Scenario("from elsewhere, overwriting", [*ELSEWHERE, "--overwrite"], (started(*THERE, stop_at=(4, True)), OLDER)),
    Scenario("damaged newest", AUTO, (started(), damaged("checkpoint-00000006.pth", "checkpoint.pth"))),
    Scenario(
        "damaged newest and best", AUTO,
        (started(stop_at=(4, True)), damaged("checkpoint-00000004.pth", "best.pth")),
    ),
    Scenario("an older one", ["--resume", "runs/a/checkpoint-00000004.pth"], (started(),)),
]  # fmt: skip


class LostError(AssertionError):
    """What was announced as saved is gone."""


class Trial:
    """One scenario in a new folder, its undisturbed ending, and what was found."""

    def __init__(self, scenario: Scenario, folder: Path, spoil: tuple = ()) -> None:
        self.scenario, self.folder, self.spoil = scenario, folder, spoil
        self.disk, self.out, self.template = folder / "disk", folder / "disk" / "runs" / "a", folder / "template"
        self.disk.mkdir(parents=True)
        for prepare in scenario.prepare:
            prepare(self)
        subprocess.run(["cp", "-a", self.disk, self.template], check=True)  # with its hard links
        self.recorded = self.start(scenario.command)
        assert self.recorded.code == 0, self.recorded.output
        self.expected = {same: Ending(self.out, has_same_saves=same) for same in (True, False)}
        self.counts, self.problems = Counter(), []

    def start(
        self, command: list[str], trouble: Trouble = NO_TROUBLE, counted: set = CHANGING, stop_at: tuple | None = None
    ) -> Start:
        (self.folder / "log").unlink(missing_ok=True)
        watched = watch_run, self.folder, trouble, counted, stop_at, self.scenario.is_late, self.spoil
        argv = [*OPTIONS, *command]
        outcome = run_ranks(train_rank, 1, argv, (), watched, log_folder=self.folder)
        return Start(outcome.codes[0], outcome.output, read_log(self.folder / "log"))

    def attempt(self, kind: str, strike: Callable[["Trial", Any], None], point: Any) -> None:
        self.counts[kind] += 1
        try:
            strike(self, point)
        except AssertionError as error:
            self.counts["lost" if isinstance(error, LostError) else "different"] += 1
            self.problems.append(f"{self.scenario.name}: {kind}: {point}: {str(error)[-1000:]}")

    def start_from_template(self, *args: Any) -> Start:
        shutil.rmtree(self.disk)
        subprocess.run(["cp", "-a", self.template, self.disk], check=True)
        return self.start(self.scenario.command, *args)

    def kill_points(self) -> list[Trouble]:
        """Return a kill before each changing call, in the middle of each write, and after the last call."""
        calls = self.recorded.calls(up_to_save=not self.scenario.is_whole)
        halves = [call.number for call in calls if call.name == "write" and len(call.content) > 1]
        return [Trouble(number) for number in range(1, len(calls) + 2)] + [
            Trouble(each, is_half=True) for each in halves
        ]

    def kill(self, point: Trouble) -> None:
        killed = self.start_from_template(point)
        is_beyond = point.number > len(self.recorded.calls())
        assert is_beyond or killed.code == -signal.SIGKILL, f"exit code {killed.code}, not killed: {killed.output}"
        self.recover(killed)

    def failures(self) -> list[Trouble]:
        """Return each call failing in each way, once and from then on; a full disk takes half of a write."""
        calls = self.start_from_template(NO_TROUBLE, COUNTED_WHEN_FAILING).calls(up_to_save=not self.scenario.is_whole)
        return [
            Trouble(call.number, code, code == errno.ENOSPC and call.name == "write", call.name, lasts)
            for call in calls
            for code in ERRORS.get(call.name, ANY_ERROR)
            for lasts in (False, True)
        ]

    def fail(self, point: Trouble) -> None:
        """Have a call fail: the run continues, or ends in one line. Give the command again and compare."""
        failed = self.start_from_template(point, COUNTED_WHEN_FAILING)
        lines = re.findall(r"^train\.py: error", failed.output, flags=re.MULTILINE)
        assert "Traceback" not in failed.output, failed.output
        assert (failed.code, len(lines)) in ((0, 0), (1, 1), (2, 1)), f"exit code {failed.code}: {failed.output}"
        self.recover(failed)

    def recover(self, before: Start) -> None:
        """Give the command again after trouble; check that nothing is lost, and that the folder ends as expected."""
        command = self.scenario.command
        is_repeatable = "auto" in command or self.scenario.is_afresh
        if not is_repeatable and any(map(self.is_own_save, self.out.glob("checkpoint-*.pth"))):
            command = [*(word for word in command if word != "--overwrite"), *AUTO]  # so as not to undo its own saves
        again = self.start(command)
        assert again.code == 0, f"then exit code {again.code}: {again.output}"
        saved, resumed = before.notes("saved"), again.notes("resumed")
        if saved and not self.scenario.is_afresh and (not resumed or resumed[-1] < saved[-1]):
            raise LostError(f"{saved[-1]} was announced as saved, and then resumed {resumed}")
        same = "was not saved" not in before.output  # a save that failed, and was said to, leaves a gap
        differences = Ending(self.out, has_same_saves=same).differences(self.expected[same])
        assert not differences, differences

    def is_own_save(self, path: Path) -> bool:
        before = self.template / path.relative_to(self.disk)
        is_beyond = int(path.name[11:19]) > self.recorded.notes("resumed")[0][0]
        return is_beyond and not (before.exists() and before.read_bytes() == path.read_bytes())
