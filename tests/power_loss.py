"""The disks that a power failure may leave: `python -m tests.rounds power_loss`.

A run's file-system calls are recorded with all that they write. What was not synced when the power fails may be on the
disk or not, in any order, in part or as a whole (Pillai et al., All File Systems Are Not Created Equal, OSDI 2014); so
each such disk is built, and the same command is given. What a file system may do here is the least that POSIX promises:

- fsync of a file makes its content durable, and not its name;
- fsync of a folder makes the names in it durable, and not the folder's own;
- a rename happens as a whole or not at all.
"""

import functools
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.calls import Call
from tests.crash import Trial
from tests.miniature import Outcome

# Of so many names that are not durable, all subsets are tried; of more, each omission and each swap of neighbours.
ALL_SUBSETS_OF = 6

FOLDER = -1


class NameChange(NamedTuple):
    """What one call does to the names in a folder."""

    call: Call
    removed: tuple[str, ...]
    added: tuple[tuple[str, int], ...]  # path and node

    @property
    def folders(self) -> set[str]:
        """Return the folders that must be synced for it to be durable."""
        return {os.path.dirname(path) or "." for path in (*self.removed, *(path for path, _ in self.added))}


class File:
    """The content of a file: what is durable, and as it is now."""

    def __init__(self, content: bytes = b"") -> None:
        self.durable = self.now = content

    def write(self, offset: int, content: bytes) -> None:
        """Write in the middle or at the end."""
        grown = self.now.ljust(offset, b"\0")
        self.now = grown[:offset] + content + grown[offset + len(content) :]

    def truncate(self, length: int) -> None:
        """Cut, or grow by zeros."""
        self.now = self.now[:length].ljust(length, b"\0")

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
    """What the calls of a run do to a disk, and which part of it would outlast a power failure at each moment.

    Args:
        folder: how it is in the beginning, all durable.
    """

    def __init__(self, folder: Path) -> None:
        self.files, self.durable, self.pending = {}, {}, []
        inodes = {}
        for path in sorted(folder.rglob("*")):
            name = str(path.relative_to(folder))
            if path.is_dir():
                self.durable[name] = FOLDER
                continue
            node = inodes.setdefault(path.stat().st_ino, len(inodes))
            self.files.setdefault(node, File(path.read_bytes()))
            self.durable[name] = node
        self.now = dict(self.durable)

    def apply(self, call: Call) -> None:
        """Follow one call of the run."""
        getattr(self, f"_{call.name}", lambda call: None)(call)

    def _change(self, call: Call, removed: tuple = (), added: tuple = ()) -> None:
        self.pending.append(NameChange(call, removed, added))
        _apply(self.now, self.pending[-1])

    def _open(self, call: Call) -> None:
        path = call.paths[0]
        if path not in self.now:
            node = len(self.files)
            self.files[node] = File()
            self._change(call, added=((path, node),))
        elif call.is_truncating:
            self.files[self.now[path]].truncate(0)

    def _write(self, call: Call) -> None:
        if call.paths[0] in self.now:
            self.files[self.now[call.paths[0]]].write(call.offset, call.content)

    def _truncate(self, call: Call) -> None:
        self.files[self.now[call.paths[0]]].truncate(call.offset)

    def _rename(self, call: Call) -> None:
        source, target = call.paths
        if self.now[source] == FOLDER:
            raise NotImplementedError("renaming folders")
        if self.now[source] != self.now.get(target):  # otherwise POSIX leaves both
            self._change(call, removed=(source,), added=((target, self.now[source]),))

    def _link(self, call: Call) -> None:
        self._change(call, added=((call.paths[1], self.now[call.paths[0]]),))

    def _mkdir(self, call: Call) -> None:
        self._change(call, added=((call.paths[0], FOLDER),))

    def _unlink(self, call: Call) -> None:
        self._change(call, removed=call.paths)

    def _fsync(self, call: Call) -> None:
        path = call.paths[0]
        node = FOLDER if path == "." else self.now.get(path)
        if node == FOLDER:
            done = [change for change in self.pending if change.folders == {path}]
            for change in done:
                _apply(self.durable, change)
            self.pending = [change for change in self.pending if change not in done]
        elif node is not None:
            self.files[node].durable = self.files[node].now

    def images(self) -> Iterator[dict]:
        """Yield what a power failure now may leave: {path: content, or (content, node), or None for a folder}."""
        variants = {node: file.variants() for node, file in self.files.items()}
        for changes in _selections(self.pending):
            names = dict(self.durable)
            for change in changes:
                _apply(names, change)
            names = {path: node for path, node in names.items() if _is_reachable(path, names)}
            torn = sorted({node for node in names.values() if node != FOLDER and len(variants[node]) > 1})
            for choice in _choices(tuple(len(variants[node]) for node in torn)):
                contents = {node: variants[node][index] for node, index in zip(torn, choice, strict=True)}
                yield {
                    path: None if node == FOLDER else (contents.get(node, self.files[node].now), node)
                    for path, node in names.items()
                }


def _apply(names: dict[str, int], change: NameChange) -> None:
    for path in change.removed:
        names.pop(path, None)
    names.update(change.added)


def _is_reachable(path: str, names: dict[str, int]) -> bool:
    parent = os.path.dirname(path)
    return not parent or (names.get(parent) == FOLDER and _is_reachable(parent, names))


def _selections(pending: list[NameChange]) -> Iterator[list[NameChange]]:
    """Yield which of the changes have reached the disk, and in which order."""
    if len(pending) <= ALL_SUBSETS_OF:
        for number in range(len(pending) + 1):
            yield from map(list, itertools.combinations(pending, number))
        return
    yield pending
    for index in range(len(pending)):
        yield pending[:index]
        yield pending[:index] + pending[index + 1 :]
        yield [*pending[:index], *reversed(pending[index : index + 2]), *pending[index + 2 :]]


@functools.cache
def _choices(counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return which variant of each torn file is taken: of all the same kind, and each other one alone."""
    most = max(counts, default=1)
    found = {tuple(min(kind, count - 1) for count in counts) for kind in range(most)}
    for index, count in enumerate(counts):
        for kind in range(count):
            for others in (0, 1):
                found.add(tuple(kind if at == index else min(others, counts[at] - 1) for at in range(len(counts))))
    return sorted(found)


class State(NamedTuple):
    """One disk after a power failure."""

    image: dict
    saved: list[tuple]  # what had been announced by then
    after: str


def possible_states(template: Path, log: list) -> list[State]:
    """Return the different disks that a power failure may leave, each with the most that had been announced by then."""
    disk, saved, found = Disk(template), [], {}
    last = "nothing"
    for entry in [*log, None]:
        for image in disk.images():
            found[_identity(image)] = State(image, list(saved), last)  # a later one has more announced
        if isinstance(entry, Call):
            disk.apply(entry)
            last = str(entry)
        elif entry is not None and entry[1] == "saved":
            saved.append(tuple(entry[2:]))
    return list(found.values())


def _identity(image: dict) -> frozenset:
    """Return what two equal disks have in common; which names are links of one file is part of a disk."""
    first = {}
    return frozenset(
        (path, content and (first.setdefault(content[1], path), content[0])) for path, content in sorted(image.items())
    )


def write_image(image: dict, folder: Path) -> None:
    """Make a disk what an image says."""
    shutil.rmtree(folder)
    folder.mkdir()
    made = {}
    for path, content in sorted(image.items()):
        if content is None:
            (folder / path).mkdir()
        elif content[1] in made:
            os.link(made[content[1]], folder / path)
        else:
            (folder / path).write_bytes(content[0])
            made[content[1]] = folder / path


def describe_image(image: dict) -> str:
    """Say what is on a disk: names and lengths."""
    return ", ".join(f"{path} {'/' if content is None else len(content[0])}" for path, content in sorted(image.items()))


def power_losses(trial: Trial) -> list[State]:
    """Return each disk that a power failure may leave in a scenario."""
    return possible_states(trial.template, trial.recorded.log)


def lose_power(trial: Trial, state: State) -> None:
    """Give the command on a disk that a power failure has left, and compare."""
    trial.place.reset(None)
    write_image(state.image, trial.place.disk)
    trial.counts["power_loss"] += 1
    before = Outcome(0, "", [("note", "saved", *position) for position in state.saved])
    trial.recover(f"power lost after {state.after}, leaving {describe_image(state.image)}", before)
