"""The disks that a power failure may leave, built from the recorded calls of a run.

What was not synced may be on the disk or not, in any order, in part or as a whole (Pillai et al., All File Systems Are
Not Created Equal, OSDI 2014). What a file system does here is the least that POSIX promises: fsync of a file makes its
content durable, and not its name; of a folder the names in it, and not its own; a rename happens whole or not at all.
"""

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.crash import Call, Start, Trial

# Of so many names that are not durable, all subsets are tried; of more, each omission and each swap of neighbours.
ALL_SUBSETS_OF = 6

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
    for entry in [*(log or trial.recorded.log), None]:
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
