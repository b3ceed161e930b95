"""`--save-per-node`: the checkpoints of a run on nodes without a shared disk."""

import secrets
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import distributed as dist

from checkpointing.archive import Found
from checkpointing.folder import BEST_FILES, CheckpointFolder, explained
from distributed import collectives
from distributed.launch import read_launch
from distributed.watch import watchdog
from errors import StorageError, UserError
from files import read_bytes


class NodeCopies:
    """One writer for each folder that the nodes see, and a copy of each checkpoint in every one.

    Args:
        files: the checkpoints in this node's folder.
        thread: writes the copies, one after another.
    """

    def __init__(self, files: CheckpointFolder, thread: ThreadPoolExecutor) -> None:
        self.files, self.folder, self.thread = files, files.folder, thread
        self.writers: list[int] = []  # ranks that write checkpoints
        self.group: dist.ProcessGroup | int | None = None  # theirs, if there are several; a number on other ranks
        self.copying: Future | None = None

    def find_writers(self) -> list[int]:
        """Choose and return each node's first rank, and one of them for a shared folder. Collective."""
        rank, is_first = collectives.get_rank(), read_launch().local_rank == 0
        firsts = [number for number, is_one in enumerate(collectives.gather_plain(is_first)) if is_one]
        # A mark of an earlier start, which a kill has left, must not count as this one's.
        token = collectives.gather_plain(secrets.token_hex(8))[0]
        marks = {number: self.folder / f".node-{number}-{token}" for number in firsts}
        collectives.call_on(firsts, _touch, marks.get(rank))
        # Look for each mark by its name: a network file system may answer a listing from its cache.
        seen = [number for number in firsts if marks[number].exists()]
        lowest = collectives.gather_plain(min([*seen, rank]))
        if is_first:
            marks[rank].unlink(missing_ok=True)
        self.writers = [number for number in firsts if lowest[number] == number]
        if len(self.writers) < len(firsts):
            print(f"--save-per-node: {len(firsts)} nodes use {len(self.writers)} folders, with one writer each")
        if len(self.writers) > 1:
            # gloo, since the bytes of files lie in host memory.
            with watchdog.waiting():
                self.group = dist.new_group(self.writers, backend="gloo")
        return self.writers

    def share_newest(self) -> None:
        """Put the newest checkpoint of all folders, and the best ones that it names, into each. Collective."""
        # A node that was replaced begins with an empty folder, and one that was killed in a copy lacks the last step.
        if self.group is None:
            return
        found = collectives.call_on(self.writers, self._find_newest)
        step = bests = None
        if found is not None:
            step = found.state["step"]
            bests = {name: found.state[name.removesuffix(".pth")] for name in BEST_FILES}
        steps = collectives.gather_plain(step)
        newest = max((step for step in steps if step is not None), default=None)
        if newest is None:
            return
        source = steps.index(newest)
        bests = collectives.gather_plain(bests)[source]
        wanted = {self.files.path_of(newest): newest}
        wanted |= {self.folder / name: best["step"] for name, best in bests.items() if best}
        for path, step in wanted.items():
            have = collectives.gather_plain(self.files.find_step(path, step) is not None)
            collectives.call_on(self.writers, self._fetch, path, step, [rank for rank in self.writers if have[rank]])
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
        if len(sources) in (0, len(self.writers)):
            return
        rank = collectives.get_rank()
        payload = read_bytes(self.files.find_step(path, step)) if rank == sources[0] else None
        payload = collectives.broadcast_bytes(payload, sources[0], self.group)
        if rank not in sources:
            self.files.add_copy(path, payload)

    def send(self, step: int, best_now: Iterable[str]) -> None:
        """Send rank 0's checkpoint of a step to the other writers, which write it in a thread. Collective."""
        if self.group is None or collectives.get_rank() not in self.writers:
            return
        payload = b""  # sent as well if rank 0 cannot read its file: the others wait for something
        if collectives.is_main_process():
            try:
                payload = read_bytes(self.files.path_of(step))
            except StorageError as error:
                print(f"warning: the other nodes get no copy of this checkpoint: {error}")
        payload = collectives.broadcast_bytes(payload, 0, self.group)
        if payload and not collectives.is_main_process():
            self.finish()
            self.copying = self.thread.submit(self.files.commit, step, payload, len(payload), best_now)

    def finish(self) -> None:
        """Wait for this node's copy; a failure is a warning. Not collective."""
        copying, self.copying = self.copying, None
        failure = None if copying is None else copying.result()
        if failure is not None:
            # The run goes on: rank 0's own checkpoint is good, and the next copy may be.
            self.files.print_line(f"warning: the copy on this node: {failure}")


def _touch(path: Path) -> None:
    with explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
