"""Every point at which a run can be killed, and every call that can fail.

The file-system calls of a process below a folder are seen from inside and counted: Python announces most by audit
events; writes, which count when they leave Python's buffer, and fsync are wrapped. Then a command is killed before each
of them, in the middle of each write and after the last, or a call fails; given again, it has to end like an undisturbed
run (tests/endings.py). The disks that a power failure may leave are built from the recorded calls: what was not synced
may be there or not, in any order, in part or as a whole (Pillai et al., All File Systems Are Not Created Equal, OSDI
2014). POSIX promises no more than this: fsync of a file makes its content durable, and not its name; of a folder the
names in it, and not its own; a rename happens whole or not at all.
"""

import builtins
import errno
import fcntl
import io
import itertools
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
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
from tests.endings import Ending
from tests.ranks import run_ranks, train_rank

# Which calls change something on the disk, or make a change durable; a kill between two of them is a kill at the first.
CHANGING = {"open", "write", "truncate", "fsync", "sync", "rename", "link", "unlink", "mkdir"}
EVENTS = {
    "os.rename": "rename", "os.link": "link", "os.remove": "unlink", "os.mkdir": "mkdir", "os.truncate": "truncate",
    "os.listdir": "list", "os.scandir": "list", "fcntl.lockf": "lock",
}  # fmt: skip


class Call(NamedTuple):
    number: int  # from 1
    name: str  # `read` is the opening of a file to read, `list` of a folder, `lock` is a record lock
    paths: tuple[str, ...]  # below the watched folder, one or two
    offset: int = 0  # where a write begins, or the length that a file is cut to
    content: bytes = b""
    is_truncating: bool = False  # whether an `open` empties what is there


class Trouble(NamedTuple):
    number: int = 0  # of the call; 0 for no trouble
    code: int = 0  # the error that the call fails with; 0 for SIGKILL before it
    is_half: bool = False  # a write first writes half of its content, and the trouble meets the write of the rest
    name: str = ""  # of the call, for trouble that lasts
    lasts: bool = False  # each call from then on fails that would fail for the same reason

    def meet(self, call: Call) -> bool:
        """Kill the process, raise the error, or return whether the call writes only half."""
        if call.number == self.number and self.is_half:
            return True
        is_struck = call.number == self.number + self.is_half
        if is_struck and not self.code:
            os.kill(os.getpid(), signal.SIGKILL)
        is_alike = self.code in (errno.EIO, errno.ESTALE) or call.name == self.name
        if self.code == errno.ENOSPC:
            is_alike = call.name in {"open", "write", "link", "mkdir", "rename"}
        if is_struck or (self.lasts and call.number > self.number and is_alike):
            raise OSError(self.code, os.strerror(self.code), call.paths[0])
        return False


class Watch:
    """Watches a folder in this process from now on, for a child that ends soon; the log lies outside of it."""

    def __init__(self, folder: Path, log: Path, trouble: Trouble) -> None:
        self.folder, self.trouble = os.path.realpath(folder), trouble
        self.number, self.lock = 0, threading.RLock()  # TensorBoard's writer is a thread
        self.log = open(log, "ab", buffering=0)  # noqa: SIM115
        shutil._USE_CP_SENDFILE = False  # a copy is made of reads and writes
        self._wrap_descriptor_calls()
        self._wrap_open()
        sys.addaudithook(self._hear)

    def note(self, *words: Any) -> None:
        self.log.write(pickle.dumps(words))

    def below(self, path: Any) -> str | None:
        """Return a path or the path of a descriptor relative to the watched folder; None for one elsewhere."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}").removesuffix(" (deleted)")
            if not path.startswith(os.sep):  # a pipe or a socket
                return None
        path = os.path.abspath(os.fsdecode(path or "."))
        is_log = os.path.basename(path).startswith("log.txt")  # of which nothing is promised
        is_inside = path == self.folder or path.startswith(self.folder + os.sep)
        return os.path.relpath(path, self.folder) if is_inside and not is_log else None

    def meet(self, name: str, *paths: str | None, **details: Any) -> bool:
        """Count a call, let the trouble act and record the call; return whether it writes only half."""
        if None in paths:
            return False
        with self.lock:
            self.number += 1
            call = Call(self.number, name, paths, **details)
            is_half = self.trouble.meet(call)
            content = call.content[: len(call.content) // 2] if is_half else call.content
            self.note(*call._replace(content=content))
        return is_half

    def _hear(self, event: str, arguments: tuple) -> None:
        if event == "open" and not isinstance(arguments[0], int):
            self._hear_open(arguments[0], arguments[2])
        elif event in EVENTS:
            name, paths = EVENTS[event], [self.below(arguments[0])]
            if name in ("rename", "link"):
                paths.append(self.below(arguments[1]))
            elif name == "list" and isinstance(arguments[0], int):
                return  # of a folder that was found
            elif name in ("unlink", "mkdir", "list") and os.path.lexists(arguments[0]) == (name == "mkdir"):
                return  # it fails anyway
            self.meet(name, *paths, **({"offset": arguments[1]} if name == "truncate" else {}))

    def _hear_open(self, path: Any, flags: int) -> None:
        below = self.below(path)
        if below is not None:
            is_new, is_truncating = bool(flags & os.O_CREAT and not os.path.lexists(path)), bool(flags & os.O_TRUNC)
            self.meet("open" if is_new or is_truncating else "read", below, is_truncating=is_truncating)

    def _wrap_descriptor_calls(self) -> None:
        fsync, pwrite, sync = os.fsync, os.pwrite, os.sync

        def heard_fsync(descriptor: int) -> None:
            self.meet("fsync", self.below(descriptor))
            fsync(descriptor)

        def heard_pwrite(descriptor: int, content: bytes, offset: int) -> int:
            is_half = self.meet("write", self.below(descriptor), offset=offset, content=bytes(content))
            return pwrite(descriptor, content[: len(content) // 2] if is_half else content, offset)

        def heard_sync() -> None:
            self.meet("sync", "")
            sync()

        os.fsync, os.pwrite, os.sync = heard_fsync, heard_pwrite, heard_sync

    def _wrap_open(self) -> None:
        real, watch = builtins.open, self

        class Raw(io.FileIO):
            def write(self, content):
                content = bytes(content)
                is_appending = fcntl.fcntl(self.fileno(), fcntl.F_GETFL) & os.O_APPEND
                offset = os.fstat(self.fileno()).st_size if is_appending else self.tell()
                is_half = watch.meet("write", watch.below(self.fileno()), offset=offset, content=content)
                return super().write(content[: len(content) // 2] if is_half else content)

            def truncate(self, size=None):
                size = self.tell() if size is None else size
                os.ftruncate(self.fileno(), size)
                return size

        def opened(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
            if not set(mode) & set("wax+") or watch.below(file) is None:
                return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
            raw = Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
            if buffering == 0:
                return raw
            buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

        builtins.open = io.open = opened


def read_log(path: Path) -> list[tuple]:
    found = []
    with open(path, "rb") as file:
        while file.peek(1):
            words = pickle.load(file)
            found.append(Call(*words) if isinstance(words[0], int) else words)
    return found


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


def watch_run(folder: Path, trouble: Trouble, stop_at: tuple | None, is_late: bool) -> None:
    """Prepare the process of a run: watch its calls, note what it saves and resumes, and plan its results.

    A kill ends it once the position `stop_at` (step, is_evaluated) is saved.
    """
    os.chdir(folder / "disk")
    files.RETRY_S = 0.01  # no disk here needs a second
    store.ThreadPoolExecutor, loggers.SimpleQueue = partial(Writer, is_late), Handshake
    watch = Watch(folder / "disk", folder / "log", trouble)
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
    Scenario("new", [*AUTO, "--keep-last", "2"], is_whole=True),
    Scenario("new with average", [*AUTO, *AVERAGE], is_whole=True),
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

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario, self.folder = scenario, folder
        self.disk, self.out, self.template = folder / "disk", folder / "disk" / "runs" / "a", folder / "template"
        self.disk.mkdir(parents=True)
        for prepare in scenario.prepare:
            prepare(self)
        subprocess.run(["cp", "-a", self.disk, self.template], check=True)  # with its hard links
        self.recorded = self.start(scenario.command)
        assert self.recorded.code == 0, self.recorded.output
        self.expected = {same: Ending(self.out, has_same_saves=same) for same in (True, False)}
        self.counts, self.problems = Counter(), []

    def start(self, command: list[str], trouble=NO_TROUBLE, stop_at: tuple | None = None) -> Start:
        (self.folder / "log").unlink(missing_ok=True)
        watched = watch_run, self.folder, trouble, stop_at, self.scenario.is_late
        outcome = run_ranks(train_rank, 1, [*OPTIONS, *command], (), watched, log_folder=self.folder)
        return Start(outcome.codes[0], outcome.output, read_log(self.folder / "log"))

    def attempt(self, kind: str, strike: Callable[["Trial", Any], None], point: Any) -> None:
        self.counts[kind] += 1
        try:
            strike(self, point)
        except AssertionError as error:
            self.counts["lost" if isinstance(error, LostError) else "different"] += 1
            self.problems.append(f"{self.scenario.name}: {kind}: {point}: {str(error)[-1000:]}")

    def start_from_template(self, point: Trouble) -> Start:
        shutil.rmtree(self.disk)
        subprocess.run(["cp", "-a", self.template, self.disk], check=True)
        return self.start(self.scenario.command, point)

    def kill_points(self) -> list[Trouble]:
        calls = self.recorded.calls(up_to_save=not self.scenario.is_whole)
        whole = [Trouble(call.number) for call in calls if call.name in CHANGING]
        writes = [call for call in calls if call.name == "write" and len(call.content) > 1]
        return [*whole, Trouble(len(calls) + 1), *(Trouble(call.number, is_half=True) for call in writes)]

    def kill(self, point: Trouble) -> None:
        killed = self.start_from_template(point)
        is_beyond = point.number > len(self.recorded.calls())
        assert is_beyond or killed.code == -signal.SIGKILL, f"exit code {killed.code}, not killed: {killed.output}"
        self.recover(killed)

    def failures(self) -> list[Trouble]:
        calls = self.recorded.calls(up_to_save=not self.scenario.is_whole)
        return [
            Trouble(call.number, code, code == errno.ENOSPC and call.name == "write", call.name, lasts)
            for call in calls
            for code in ERRORS.get(call.name, ANY_ERROR)
            for lasts in (False, True)
        ]

    def fail(self, point: Trouble) -> None:
        """Have a call fail: the run continues, or ends in one line. Give the command again and compare."""
        failed = self.start_from_template(point)
        assert point.number + point.is_half not in [call.number for call in failed.calls()]  # it was not made
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


FOLDER = -1


class NameChange(NamedTuple):
    removed: tuple[str, ...] = ()
    added: tuple[tuple[str, int], ...] = ()  # path and node, then those in a folder that is renamed

    @property
    def folders(self) -> set[str]:
        return {os.path.dirname(path) or "." for path in (*self.removed, *(path for path, _ in self.added[:1]))}

    def apply(self, names: dict[str, int]) -> None:
        for path in self.removed:
            names.pop(path, None)
        names.update(self.added)


class File:
    def __init__(self, content: bytes = b"") -> None:
        self.durable = self.now = content

    def write(self, offset: int, content: bytes) -> None:
        grown = self.now.ljust(offset, b"\0")
        self.now = grown[:offset] + content + grown[offset + len(content) :]

    def variants(self) -> list[bytes]:
        """Return what may be on the disk: nothing that is new, half of it, all of it, or only its length."""
        old, new = self.durable, self.now
        if old == new:
            return [new]
        if not new.startswith(old):  # written anew
            old = b""
        half = new[: (len(old) + len(new)) // 2]
        return [new, self.durable, old, half, old.ljust(len(new), b"\0")]


class Disk:
    def __init__(self, folder: Path) -> None:
        self.files, self.durable, self.pending = {}, {}, []
        inodes = {}
        for path in sorted(folder.rglob("*")):
            node = FOLDER
            if path.is_file():
                node = inodes.setdefault(path.stat().st_ino, len(inodes))
                self.files.setdefault(node, File(path.read_bytes()))
            self.durable[str(path.relative_to(folder))] = node
        self.now = dict(self.durable)

    def apply(self, call: Call) -> None:
        path, last = call.paths[0], call.paths[-1]
        node = FOLDER if path == "." else self.now.get(path)
        file = self.files.get(node)
        if call.name == "mkdir":
            self._change(NameChange(added=((path, FOLDER),)))
        elif call.name == "open" and node is None:
            node = len(self.files)
            self.files[node] = File()
            self._change(NameChange(added=((path, node),)))
        elif call.name == "open" and call.is_truncating:
            file.now = b""
        elif call.name == "write" and file is not None:
            file.write(call.offset, call.content)
        elif call.name == "truncate":
            file.now = file.now[: call.offset].ljust(call.offset, b"\0")
        elif call.name == "unlink":
            self._change(NameChange(removed=(path,)))
        elif call.name == "link":
            self._change(NameChange(added=((last, node),)))
        elif call.name == "rename" and node != self.now.get(last):  # otherwise POSIX leaves both
            moved = [
                (last + name[len(path) :], inner) for name, inner in self.now.items() if name.startswith(f"{path}/")
            ]
            self._change(NameChange(removed=(path,), added=((last, node), *moved)))
        elif call.name in ("fsync", "sync"):
            self._sync(path, node)

    def _change(self, change: NameChange) -> None:
        self.pending.append(change)
        change.apply(self.now)

    def _sync(self, path: str, node: int | None) -> None:
        if not path:  # all disks
            self.durable, self.pending = dict(self.now), []
            for file in self.files.values():
                file.durable = file.now
        elif node == FOLDER:
            for change in self.pending:
                if change.folders == {path}:
                    change.apply(self.durable)
            self.pending = [change for change in self.pending if change.folders != {path}]
        elif node is not None:
            self.files[node].durable = self.files[node].now

    def images(self) -> Iterator[dict]:
        """Yield what a power failure now may leave: {path: (content, node)}, or None for a folder."""
        variants = {node: file.variants() for node, file in self.files.items()}
        for changes in selections(self.pending):
            names = dict(self.durable)
            for change in changes:
                change.apply(names)
            names = {path: node for path, node in names.items() if is_reachable(path, names)}
            open_nodes = sorted({node for node in names.values() if len(variants.get(node, ())) > 1})
            for choice in choices([len(variants[node]) for node in open_nodes]):
                chosen = dict(zip(open_nodes, choice, strict=True))
                yield {
                    path: None if node == FOLDER else (variants[node][chosen.get(node, 0)], node)
                    for path, node in names.items()
                }


def is_reachable(path: str, names: dict[str, int]) -> bool:
    parent = os.path.dirname(path)
    return not parent or (names.get(parent) == FOLDER and is_reachable(parent, names))


def selections(pending: list[NameChange]) -> Iterator[list[NameChange]]:
    """Yield which changes have reached the disk, in which order: all subsets of a few; else each omission and swap."""
    if len(pending) <= 6:
        for number in range(len(pending) + 1):
            yield from map(list, itertools.combinations(pending, number))
        return
    yield pending
    for index in range(len(pending)):
        yield pending[:index]
        yield pending[:index] + pending[index + 1 :]
        yield [*pending[:index], *reversed(pending[index : index + 2]), *pending[index + 2 :]]


def choices(counts: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield which variant of each file is taken: one kind of all, or each kind of one beside new or old ones."""
    for kind in range(max(counts, default=1)):
        yield tuple(min(kind, count - 1) for count in counts)
    for index, count in enumerate(counts):
        for kind, others in itertools.product(range(count), (0, 1)):
            yield tuple(kind if at == index else others for at in range(len(counts)))


class State(NamedTuple):
    image: dict
    saved: list[tuple]  # what had been announced by then
    after: tuple  # the last call: its number, name and paths

    def __str__(self) -> str:
        sizes = {path: content and len(content[0]) for path, content in self.image.items()}
        return f"after {self.after}, leaving {sizes}"


def possible_states(trial: Trial, log: list | None = None) -> list[State]:
    """Return the different disks that a power failure may leave, each with the most that had been announced by then."""
    disk, saved, found, last = Disk(trial.template), [], {}, ()
    entries = [entry for entry in log or trial.recorded.log if entry[1] in CHANGING or not isinstance(entry, Call)]
    for entry in [*entries, None]:
        for image in disk.images():
            found[identity(image)] = State(image, list(saved), last)  # a later one has more announced
        if isinstance(entry, Call):
            disk.apply(entry)
            last = entry[:3]
        elif entry is not None and entry[0] == "saved":
            saved.append(entry)
    return list(found.values())


def identity(image: dict) -> frozenset:
    first = {}
    return frozenset(
        (path, content and (first.setdefault(content[1], path), content[0])) for path, content in sorted(image.items())
    )


def write_image(image: dict, folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    made = {}
    for path, content in sorted(image.items()):
        if content is None:
            (folder / path).mkdir()
        elif content[1] in made:
            os.link(made[content[1]], folder / path)
        else:
            made[content[1]] = folder / path
            made[content[1]].write_bytes(content[0])


def lose_power(trial: Trial, state: State) -> None:
    write_image(state.image, trial.disk)
    trial.recover(Start(0, "", state.saved))
