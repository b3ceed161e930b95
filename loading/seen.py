"""Note which files a run has read, and notice when they change."""

import io
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset

import collectives
from errors import ImageError, PreemptedError, counted
from files import explain_failure, open_to_read, write_atomically
from loading.source import Source
from options import parse_allowed


class SeenFiles:
    """The size and time of each file of a split when the run last read it, in memory that forked loaders share.

    At 8 bytes per image it is too large for a checkpoint. With `is_strict` a file whose size changes ends the run.
    """

    def __init__(self, num_images: int, *, is_strict: bool) -> None:
        self.is_strict = is_strict
        memory = mmap.mmap(-1, max(8 * num_images, 1))
        # (images, 2): each file's size plus one, and its mtime in seconds; zeros before it is read.
        self.states = numpy.frombuffer(memory, dtype=numpy.uint32, count=2 * num_images).reshape(-1, 2)

    def note(self, number: int, path: str, status: os.stat_result) -> None:
        """Record the state of a file that is being read.

        Raises:
            ImageError: with `is_strict`, the file had another size when it was read before.
        """
        state = [(status.st_size + 1) % (1 << 32), int(status.st_mtime) % (1 << 32)]
        known = self.states[number].tolist()
        if known == state:
            return
        if self.is_strict and known[0] not in (0, state[0]):
            raise ImageError(
                f"{path} has {status.st_size} bytes, and had {known[0] - 1} when this run read it before; put back the "
                "images that the run began with, or resume with --allow-change data to go on with these"
            )
        self.states[number] = state


class SeenRecord:
    """Remembers, from one start of a run to the next, the size and time of each file of its class folders.

    `SeenFiles` notes them whenever a process opens a file, and compares them with the notes before; so no start has to
    look at a million files before its first step. This class merges the notes of all processes, and writes them to a
    file in the output folder. The next start does not know files that were read after the last merge; if the file is
    lost or damaged, it knows none.

    As a context manager, it merges the notes once more at an end that all ranks agree on.

    Args:
        args: the options.
        state: the checkpoint that the run goes on from, or None. Without one, or with `--allow-change data`, no file
            counts as known.
        datasets: the training and validation set, by their names.
    """

    FILE = "images.npz"

    def __init__(self, args: Any, state: dict | None, **datasets: Dataset | None) -> None:
        self.folder = None if args.test_only else Path(args.output_dir)
        # Where a set is a part of a source, the notes are of the whole source's files.
        indexes = {name: dataset.index.whole for name, dataset in datasets.items() if hasattr(dataset, "index")}
        self.watched = {name: index for name, index in indexes.items() if index.seen is not None}
        # The fingerprint keeps notes of other images from being used.
        self.keys = {name: f"{name}-{index.fingerprint()}" for name, index in self.watched.items()}
        # The states that all processes know; a row of `seen` that differs is news.
        self.known = {name: numpy.zeros_like(index.seen.states) for name, index in self.watched.items()}
        self.is_new = state is None or "data" in parse_allowed(args.allow_change)
        self.is_elsewhere = not self.is_new and args.resume != "auto"
        if self.is_new or not self.watched:
            return
        folder = Path(args.resume).parent if self.is_elsewhere else Path(args.output_dir)
        payload = collectives.call_on_master(self._read, folder / self.FILE)
        paths = {"train": state["data"]["path"], "val": state["data"]["val"]["path"]}
        for name, states in self._parse(payload or b"").items():
            if paths[name] != self.watched[name].identity()["path"]:
                states[:, 1] = 0  # in another place files may have other times
            self.known[name][:] = self.watched[name].seen.states[:] = states

    def __enter__(self) -> "SeenRecord":
        # A file that is there may be another run's.
        if self.is_new and self.folder is not None and collectives.is_main_process():
            with suppress(OSError):  # no such file; or the disk fails, which the next checkpoint reports
                (self.folder / self.FILE).unlink()
        elif self.is_elsewhere:
            self._write()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        if error is None or isinstance(error, PreemptedError):
            self.keep()

    def keep(self) -> None:
        """Merge the notes of all processes, report changed files, and write new notes.

        Collective: every rank must call it.
        """
        has_news = [self._gather(name, index) for name, index in self.watched.items()]
        if any(has_news):
            self._write()

    def _write(self) -> None:
        if self.folder is None or not self.watched or not collectives.is_main_process():
            return
        arrays = {self.keys[name]: states for name, states in self.known.items()}
        try:
            write_atomically(self.folder / self.FILE, lambda file: numpy.savez(file, **arrays))
        except OSError as error:
            num_bytes = sum(states.nbytes for states in arrays.values())
            print(f"{self.folder / self.FILE} is not written: {explain_failure(error, self.folder, num_bytes)}")

    def _gather(self, name: str, index: Source) -> bool:
        """Merge all processes' notes since the last call, and report changed files; return whether there were notes."""
        states, known = index.seen.states, self.known[name]
        numbers = numpy.flatnonzero((states != known).any(axis=1))
        rows = numpy.column_stack([numbers, states[numbers]]).astype(numpy.int64)
        rows = torch.cat(collectives.all_gather(torch.from_numpy(rows))).numpy()
        numbers, news = rows[:, 0], rows[:, 1:]
        before = known[numbers]
        has_other_size, has_other_time = ((before != news) & (before != 0)).T
        changed = numbers[has_other_size | has_other_time]
        if len(changed):
            what = "sizes" if has_other_size.any() else "times"
            first = index.path(int(changed.min()))
            print(
                f"{counted(len(changed), 'image')} of {index.root} with other {what} than when the run read them, "
                f"such as {first}"
            )
        known[numbers] = states[numbers] = news
        return len(numbers) > 0

    def _read(self, path: Path) -> bytes | None:
        """Return the file's content, or None if it cannot be read or is larger than it may be."""
        most = 65536 + sum(states.nbytes for states in self.known.values())
        try:
            with open_to_read(path, follows_links=False) as file:
                content = file.read(most + 1)
                return content if len(content) <= most else None
        except OSError:  # no such file; or the disk fails, which the next checkpoint reports
            return None

    def _parse(self, payload: bytes) -> dict[str, numpy.ndarray]:
        """Return the states in a file for those of this run's sets that it holds; none if it is damaged."""
        try:
            with numpy.load(io.BytesIO(payload), allow_pickle=False) as file:
                arrays = {name: file[key] for name, key in self.keys.items() if key in file.files}
        except Exception:  # zip and numpy raise a dozen kinds for damaged files
            arrays = {}
        shapes = {name: (states.shape, states.dtype) for name, states in self.known.items()}
        return {name: states for name, states in arrays.items() if (states.shape, states.dtype) == shapes[name]}
