"""Stream a remote pack into its cache, in one process on each machine, which ends with the training."""

import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from errors import ImageError, UserError, one_line
from files import open_regular
from loading.remote import RemotePack

# Most bytes of one request.
_CHUNK_BYTES = 16 << 20


def start_filling(options: dict) -> subprocess.Popen:
    """Start a process that fills the caches of packs; it ends when this process or the result's `stdin` does.

    Args:
        options: splits, a list of their names; and the other arguments of `RemotePack` by name.
    """
    command = [sys.executable, "-m", "loading.fill", json.dumps(options)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, cwd=Path(__file__).parent.parent, start_new_session=True)


def chunks(pack: RemotePack) -> Iterator[tuple[int, int]]:
    """Yield the first and last image of each piece of a shard whose images are all to be fetched, in order."""
    chunk: list[int] = []
    shards, offsets, sizes = (pack.columns[name] for name in ("shards", "offsets", "sizes"))
    for number in pack.cache.missing():
        if chunk:
            is_next = number == chunk[-1] + 1 and shards[number] == shards[chunk[0]]
            if not is_next or offsets[number] + sizes[number] - offsets[chunk[0]] > _CHUNK_BYTES:
                yield chunk[0], chunk[-1]
                chunk = []
        chunk.append(number)
    if chunk:
        yield chunk[0], chunk[-1]


def fill(pack: RemotePack) -> None:
    """Fetch what the cache lacks until it is full or nobody wants it, unless another process is at it already."""
    with open(open_regular(pack.cache.folder / "filling", os.O_RDWR | os.O_CREAT), "r+b") as lock:
        # Not `flock`, which a forked child of a dead holder goes on holding.
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        for first, last in chunks(pack):
            if pack.cache.is_full:
                return
            for number, content in enumerate(pack.fetch(first, last), first):
                pack.cache.write(number, content)


def main() -> None:
    """Fill the caches of the splits in the command line's JSON."""
    # Loader processes, which training waits for, come first.
    os.nice(5)
    # Standard input ends with the parent, however that ends.
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    options = json.loads(sys.argv[1])
    try:
        # All are opened first: once a client has threads, no process can be forked that reads an index.
        for pack in [RemotePack(split=split, **options) for split in options.pop("splits")]:
            fill(pack)
    except (ImageError, UserError, OSError) as error:
        print(one_line(f"filling the cache stopped: {error}"), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
