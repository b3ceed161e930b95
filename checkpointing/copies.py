"""The ranks that write checkpoints: rank 0 or, with `--save-per-node`, one rank for each folder that the nodes see."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import distributed as dist

import collectives
from checkpointing.folder import explained
from launch import read_launch


class Writers:
    """The ranks that write checkpoints; rank 0 alone until `find` is called."""

    def __init__(self) -> None:
        self.ranks, self._group = [0], None

    @property
    def have_me(self) -> bool:
        """Whether this process writes."""
        return collectives.get_rank() in self.ranks

    def find(self, folder: Path) -> None:
        """Choose each node's first rank, and one of them for a shared folder. Collective: every rank must call it."""
        rank, is_first = collectives.get_rank(), read_launch().local_rank == 0
        firsts = [number for number, is_one in enumerate(collectives.gather_plain(is_first)) if is_one]
        token = collectives.gather_plain(secrets.token_hex(8))[0]
        marks = {number: folder / f".node-{number}-{token}" for number in firsts}
        self.ranks = firsts
        self.call(_touch, marks.get(rank))
        # Look for each mark by its name: a network file system may answer a listing from its cache.
        lowest = collectives.gather_plain(min([number for number in firsts if marks[number].exists()] + [rank]))
        if is_first:
            marks[rank].unlink(missing_ok=True)
        self.ranks = [number for number in firsts if lowest[number] == number]
        if len(self.ranks) < len(firsts):
            print(f"--save-per-node: {len(firsts)} nodes see {len(self.ranks)} folders; one writer in each")
        if len(self.ranks) > 1:
            self._group = dist.new_group(self.ranks, backend="gloo")

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function on the writers; all ranks raise an error of one. Collective: every rank must call it."""
        _, refusal = collectives.attempt(function, *args) if self.have_me else (None, None)
        collectives.raise_first(collectives.gather_plain(refusal))

    def share(self, payload: bytes | None, source: int = 0) -> bytes:
        """Return one writer's bytes on all writers, which must all call it; b"" where there is only one writer."""
        return b"" if self._group is None else collectives.broadcast_bytes(payload, source, self._group)


def _touch(path: Path) -> None:
    with explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
