"""`--save-per-node`: one writer for each folder that the nodes see, and a copy of each checkpoint in every one."""

import secrets
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from torch import distributed as dist

from checkpointing.archive import Found
from checkpointing.finder import BEST_FILES
from checkpointing.folder import CheckpointFolder, explained
from distributed import collectives
from distributed.launch import read_launch
from errors import StorageError, UserError
from files import read_bytes


class NodeCopies:
    """The ranks that write checkpoints: rank 0 alone, until `find_writers` chooses one for each folder.

    Args:
        files: this process's folder.
    """

    def __init__(self, files: CheckpointFolder) -> None:
        self.files, self.ranks, self._group = files, [0], None
        self._thread, self._writing = ThreadPoolExecutor(1, "copy writer"), None

    def find_writers(self) -> None:
        """Choose each node's first rank, and one of them for a shared folder. Collective: every rank must call it."""
        rank, is_first = collectives.get_rank(), read_launch().local_rank == 0
        firsts = [number for number, is_one in enumerate(collectives.gather_plain(is_first)) if is_one]
        token = collectives.gather_plain(secrets.token_hex(8))[0]
        marks = {number: self.files.folder / f".node-{number}-{token}" for number in firsts}
        collectives.call_on(firsts, _touch, marks.get(rank))
        # Look for each mark by its name: a network file system may answer a listing from its cache.
        lowest = collectives.gather_plain(min([number for number in firsts if marks[number].exists()] + [rank]))
        if is_first:
            marks[rank].unlink(missing_ok=True)
        self.ranks = [number for number in firsts if lowest[number] == number]
        if len(self.ranks) < len(firsts):
            print(f"--save-per-node: {len(firsts)} nodes see {len(self.ranks)} folders; one writer in each")
        if len(self.ranks) > 1:
            self._group = dist.new_group(self.ranks, backend="gloo")

    def level(self) -> None:
        """Put the newest checkpoint of all folders, and the best ones that it names, into each. Collective."""
        if self._group is None:
            return
        found = collectives.call_on(self.ranks, self._find_newest)
        steps = collectives.gather_plain(found and found.state["step"])
        newest = max((step for step in steps if step is not None), default=None)
        if newest is None:
            return
        source = steps.index(newest)
        bests = found and {name: found.state[name.removesuffix(".pth")] for name in BEST_FILES}
        bests = collectives.gather_plain(bests)[source]
        wanted = {self.files.path_of(newest): newest}
        wanted |= {self.files.folder / name: best["step"] for name, best in bests.items() if best}
        for path, step in wanted.items():
            have = collectives.gather_plain(self.files.find_step(path, step) is not None)
            collectives.call_on(self.ranks, self._fetch, path, step, [rank for rank in self.ranks if have[rank]])
        if source != 0:
            print(f"the newest checkpoint is the copy of rank {source}")

    def _find_newest(self) -> Found | None:
        try:
            return self.files.read("auto")
        except UserError as error:
            if error.exit_code != 4:  # none is usable here, and another node may have a good one
                raise
        return None

    def _fetch(self, path: Path, step: int, sources: list[int]) -> None:
        """Write a file that another writer has, if this one lacks it. All writers must call it."""
        if not sources or len(sources) == len(self.ranks):
            return
        has_it = collectives.get_rank() in sources
        payload = read_bytes(self.files.find_step(path, step)) if collectives.get_rank() == sources[0] else None
        payload = collectives.broadcast_bytes(payload, sources[0], self._group)
        if not has_it:
            self.files.put(path, payload)

    def send(self, step: int, best_now: list[str]) -> None:
        """Send rank 0's newest checkpoint to the other writers, each of which writes it in a thread. Collective."""
        rank = collectives.get_rank()
        if self._group is None or rank not in self.ranks:
            return
        payload = b""
        if rank == 0:
            with suppress(StorageError):  # then the other writers get no copy of this save
                payload = read_bytes(self.files.path_of(step))
        payload = collectives.broadcast_bytes(payload, 0, self._group)
        if payload and rank != 0:
            self.finish()
            self._writing = self._thread.submit(self.files.save_copy, payload, step, best_now)

    def finish(self) -> None:
        """Wait for this node's copy; a failure is a warning. Not collective."""
        writing, self._writing = self._writing, None
        failure = writing.result() if isinstance(writing, Future) else None
        if failure is not None:
            self.files.say(f"warning: the copy on this node: {failure}")


def _touch(path: Path) -> None:
    with explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
