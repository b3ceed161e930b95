"""Every point at which a run can be killed, and every call that can fail: `python -m tests.rounds crash_points`.

The real command line trains a model of a few numbers on made-up images, in a child of one warm process: a whole run
takes a tenth of a second. Its file-system calls are counted. Then it is killed before each of them, in the middle of
each write and after the last; the same command is given again, as a job script does, and the folder has to end like
that of a run to which nothing was done (tests/endings.py). So with every call failing in every way in turn.
"""

import errno
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.calls import CHANGING, Call, Failing, Killed
from tests.endings import Ending
from tests.miniature import AVERAGE, TIMEOUT_S, Outcome, Workplace, copy_tree

RESULT = re.compile(r"^train\.py: error", re.MULTILINE)


class Scenario(NamedTuple):
    """What is on the disk, the command, and what it goes on from.

    Args:
        name: in what is reported.
        command: beside `OPTIONS`; relative paths are below the disk.
        prepare: brings an empty disk into the state that the command is given in.
        from_step: the step that the command goes on from; saves beyond it are the run's own.
        is_repeatable: whether the same command goes on with what it has saved itself; if not, that is done by
            `--resume auto` once there is something.
        is_afresh: whether the command begins again each time, by what it says itself.
        num_saves: how many saves to look at; what comes after them is like in other scenarios. None for all.
        is_late: whether a save is written as late as it can be, and not as early.
    """

    name: str
    command: list[str]
    prepare: Callable[[Workplace], None] | None = None
    from_step: int = 0
    is_repeatable: bool = True
    is_afresh: bool = False
    num_saves: int | None = 1
    is_late: bool = False

    @property
    def out(self) -> str:
        return self.command[self.command.index("--output-dir") + 1]

    def go_on(self) -> list[str]:
        """Return the command that goes on with what this one has saved."""
        kept = [word for word in self.command if word != "--overwrite"]
        if "--resume" in kept:
            at = kept.index("--resume")
            del kept[at : at + 2]
        return [*kept, "--resume", "auto"]


def _interrupted(out: str, step: int, is_evaluated: bool, *options: str) -> Callable[[Workplace], None]:
    """Return what leaves a run that was killed right after a save."""

    def prepare(place: Workplace) -> None:
        outcome = place.start(["--output-dir", out, *options], stop_at=(step, is_evaluated))
        assert outcome.code == -signal.SIGKILL, outcome.output

    return prepare


def _finished(out: str, *options: str) -> Callable[[Workplace], None]:
    def prepare(place: Workplace) -> None:
        outcome = place.start(["--output-dir", out, *options])
        assert outcome.code == 0, outcome.output

    return prepare


def _damage(*names: str) -> Callable[[Workplace], None]:
    """Return what cuts files in half, though not what else is linked to them."""

    def prepare(place: Workplace) -> None:
        for name in names:
            path = place.disk / name
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content[: len(content) // 2])

    return prepare


def _all(*steps: Callable[[Workplace], None]) -> Callable[[Workplace], None]:
    def prepare(place: Workplace) -> None:
        for step in steps:
            step(place)

    return prepare


AUTO = ["--output-dir", "runs/a", "--resume", "auto"]
SCENARIOS = [
    # A first start in a new folder, a first save, saves, evaluations that are best and not, a last save that is best.
    Scenario("new", [*AUTO, "--keep-last", "2"], num_saves=None),
    # The same with an average, of which the last evaluation is not the best.
    Scenario("new with average", [*AUTO, *AVERAGE], num_saves=None),
    # The same, as far as a run can get before a save that it has begun is on the disk.
    Scenario("new, saving late", [*AUTO, "--keep-last", "2"], num_saves=None, is_late=True),
    Scenario("new with average, saving late", [*AUTO, *AVERAGE], num_saves=None, is_late=True),
    Scenario("new without resume", ["--output-dir", "runs/a"], is_repeatable=False),
    Scenario("finished", AUTO, _finished("runs/a"), from_step=6),
    Scenario("interrupted", AUTO, _interrupted("runs/a", 3, False), from_step=3),
    Scenario(
        "overwrite", ["--output-dir", "runs/a", "--overwrite"], _finished("runs/a", "--seed", "1", *AVERAGE),
        is_afresh=True,
    ),
    Scenario(
        "from elsewhere", ["--output-dir", "runs/a", "--resume", "runs/b/checkpoint.pth", *AVERAGE],
        _interrupted("runs/b", 4, True, *AVERAGE), from_step=4, is_repeatable=False,
    ),
    Scenario(
        "from elsewhere, best elsewhere", ["--output-dir", "runs/a", "--resume", "runs/b/checkpoint.pth"],
        _interrupted("runs/b", 4, True), from_step=4, is_repeatable=False,
    ),
    Scenario(
        "from elsewhere, overwriting",
        ["--output-dir", "runs/a", "--resume", "runs/b/checkpoint.pth", "--overwrite"],
        _all(_interrupted("runs/b", 4, True), _finished("runs/a", "--seed", "1")), from_step=4, is_repeatable=False,
    ),
    Scenario(
        "damaged newest", AUTO,
        _all(_finished("runs/a"), _damage("runs/a/checkpoint-00000006.pth", "runs/a/checkpoint.pth")), from_step=5,
    ),
    Scenario(
        "damaged newest and best", AUTO,
        _all(_interrupted("runs/a", 4, True), _damage("runs/a/checkpoint-00000004.pth", "runs/a/best.pth")),
        from_step=3,
    ),
    Scenario(
        "an older one", ["--output-dir", "runs/a", "--resume", "runs/a/checkpoint-00000004.pth"], _finished("runs/a"),
        from_step=4, is_repeatable=False,
    ),
]  # fmt: skip


class Problem(NamedTuple):
    """What was done in a scenario, and what came of it that should not."""

    scenario: str
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.scenario}: {self.what}: {self.text}"


def summarize(problems: list[Problem]) -> list[str]:
    """Say the same outcome once, with the first of the points that lead to it and how many there are."""
    points = {}
    for problem in problems:
        points.setdefault((problem.scenario, problem.text), []).append(problem.what)
    return [
        f"{scenario}: {what[0]}{f' and at {len(what) - 1} more' if what[1:] else ''}: {text}"
        for (scenario, text), what in points.items()
    ]


class Trial:
    """One scenario in one workplace, its undisturbed ending, and what was found.

    Args:
        scenario: the scenario.
        folder: an empty one to work in.
    """

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        folder.mkdir(parents=True)
        self.place = Workplace(folder)
        self.template = folder / "template"
        self.place.reset(None)
        if scenario.prepare is not None:
            scenario.prepare(self.place)
        copy_tree(self.place.disk, self.template)
        self.recorded = self.start(scenario.command, has_content=True)
        assert self.recorded.code == 0, self.recorded.output
        self.expected = {same: Ending(self.out, has_same_saves=same) for same in (True, False)}
        self.counts, self.problems = Counter(), []

    def start(self, *args: Any, **options: Any) -> Outcome:
        """Run a command as `Workplace.start` does, with the scenario's order of calls."""
        return self.place.start(*args, is_late=self.scenario.is_late, **options)

    @property
    def out(self) -> Path:
        return self.place.disk / self.scenario.out

    def kill_points(self) -> list[Killed]:
        """Return a kill before each changing call, in the middle of each write, and after the last call."""
        calls = self.calls_of_interest(self.recorded)
        halves = [Killed(call.number, is_half=True) for call in calls if call.name == "write" and len(call.content) > 1]
        return [*(Killed(number) for number in range(1, len(calls) + 2)), *halves]

    def calls_of_interest(self, outcome: Outcome) -> list[Call]:
        """Return the calls up to the last save to look at."""
        calls, left = [], self.scenario.num_saves
        for entry in outcome.log:
            if isinstance(entry, Call):
                calls.append(entry)
            elif entry[1] == "saved" and left is not None:
                left -= 1
                if not left:
                    break
        return calls

    def kill(self, point: Killed) -> None:
        """Kill the run at one point, give the command again, and compare."""
        self.place.reset(self.template)
        killed = self.start(self.scenario.command, point)
        calls = self.recorded.calls
        at = str(calls[point.number - 1]) if point.number <= len(calls) else "the end"
        what = f"killed {'half way in' if point.is_half else 'before'} {at}"
        if killed.code != -signal.SIGKILL and point.number <= len(calls):
            self.report(what, f"was not struck: exit code {killed.code}: {killed.output[-300:]}")
        self.counts["crash_points"] += 1
        self.recover(what, killed)

    def recover(self, what: str, before: Outcome) -> None:
        """Give the command again after trouble, and report what is lost or different."""
        again = self.start(self.command_again())
        if again.code != 0:
            self.report(what, f"then {' '.join(again.output.splitlines()[-1:])[:300]!r}, exit code {again.code}")
            return
        if not self.scenario.is_afresh:
            self.check_nothing_lost(what, before.notes("saved"), again.notes("resumed"))
        same = "was not saved" not in before.output  # a save that failed, and was said to, leaves a gap
        for text in Ending(self.out, has_same_saves=same).differences(self.expected[same]):
            self.report(what, text)

    def command_again(self) -> list[str]:
        """Return the command that a user gives after trouble: the same, but where it would undo its own saves."""
        if self.scenario.is_repeatable or not any(self.is_own_save(path) for path in self.out.glob("checkpoint-*.pth")):
            return self.scenario.command
        return self.scenario.go_on()

    def is_own_save(self, path: Path) -> bool:
        """Tell whether a numbered checkpoint was not there before the command."""
        before = self.template / path.relative_to(self.place.disk)
        is_beyond = int(path.name[11:19]) > self.scenario.from_step
        return is_beyond and not (before.exists() and before.read_bytes() == path.read_bytes())

    def check_nothing_lost(self, what: str, saved: list[tuple], resumed: list[tuple]) -> None:
        """Check that the run goes on from what was announced last, or from later."""
        if saved and (not resumed or resumed[-1] < saved[-1]):
            self.counts["lost"] += 1
            self.report(what, f"LOST: {saved[-1]} was announced as saved, and went on from {resumed}")

    def report(self, what: str, text: str) -> None:
        """Take down a problem."""
        self.problems.append(Problem(self.scenario.name, what, text))

    def failures(self) -> list[Failing]:
        """Return each call failing in each way, once and from then on."""
        self.place.reset(self.template)
        calls = self.calls_of_interest(self.start(self.scenario.command, counted=COUNTED_WHEN_FAILING))
        return [
            Failing(call.number, code, call.name, is_for_good)
            for call in calls
            for code in ERRORS.get(call.name, ANY_ERROR)
            for is_for_good in (False, True)
        ]

    def fail(self, point: Failing) -> None:
        """Have one call fail, then give the command again on a disk that works, and compare."""
        self.place.reset(self.template)
        failed = self.start(self.scenario.command, point, counted=COUNTED_WHEN_FAILING)
        until = " and from then on" if point.is_for_good else ""
        what = f"{errno.errorcode[point.code]} of call {point.number} ({self._name(failed, point)}){until}"
        self.counts["failing_calls"] += 1
        if not self._ends_well(what, failed):
            return
        self.recover(what, failed)

    def _name(self, failed: Outcome, point: Failing) -> str:
        last = next((call for call in reversed(failed.calls) if call.number < point.number), None)
        return f"{point.name}, after {last}"

    def _ends_well(self, what: str, failed: Outcome) -> bool:
        """Tell whether a failing run went on, or ended with one line and the right code."""
        lines = RESULT.findall(failed.output)
        if "Traceback" in failed.output:
            self.report(what, f"TRACEBACK: {' '.join(failed.output.splitlines()[-1:])[:300]}")
        elif failed.code == -signal.SIGALRM:
            self.report(what, f"HANGS for over {TIMEOUT_S:.0f} s")
        elif failed.code == 0 and lines:
            self.report(what, f"says an error and leaves with 0: {failed.output[-300:]}")
        elif failed.code != 0 and (failed.code not in (1, 2) or len(lines) != 1):
            self.report(what, f"ends with {failed.code} and {len(lines)} lines: {failed.output[-300:]}")
        return failed.code != 99


COUNTED_WHEN_FAILING = CHANGING | {"read", "list", "lock"}
ANY_ERROR = (errno.EIO, errno.ENOSPC, errno.ENOSYS, errno.ESTALE)
ERRORS = {
    "link": (*ANY_ERROR, errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP),
    "fsync": (*ANY_ERROR, errno.EINVAL, errno.EOPNOTSUPP),
    "read": (errno.EIO, errno.ESTALE),
    "list": (errno.EIO, errno.ESTALE),
    "lock": (errno.EIO, errno.ENOSYS, errno.ESTALE, errno.ENOLCK),
}
