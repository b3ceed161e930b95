"""A pack behind an address: ranged reads that are retried, many at a time, behind a cache."""

import os
import threading
import zlib
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import numpy

from errors import ImageError, StorageError, UserError, as_user_error
from loading.child import PassingError
from loading.index import ArraySource
from loading.pack_cache import Cache
from loading.pack_format import decode_index, decode_label_sets, index_name
from loading.source import digest
from loading.stores import open_store, read_whole, retry_requests

# Images that a process fetches at once: at 50 ms each, 64 are 1,280 a second, more than it decodes. One after the
# other, a batch of 64 took 3.2 s.
_AT_ONCE = 64


class RemotePack(ArraySource):
    """The images of a split in a pack behind an address; names, classes, order and fingerprint are the local pack's.

    Args:
        url: the pack's address.
        split: train or val.
        cache: the folder of the cache; None for one of the user's.
        cache_gib: as of `Cache`.
        timeout_s: seconds for which a request is tried again.

    Raises:
        UserError: there is no index, or it is another version's.
    """

    form = "tars"

    def __init__(
        self, url: str, split: str, cache: str | None = None, cache_gib: float | None = None, timeout_s: float = 300.0
    ) -> None:
        super().__init__(Path(split))
        self.store = open_store(url)
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self.where = f"{self.url}/{split}"
        content = self._read_index(f"{self.url}/{index_name(split)}", split)
        self.classes = self.pack["classes"]
        self.labels, self.files = self.columns["labels"], self.pack["shards"]
        several = self.pack.get("labels")
        if several:
            with as_user_error(f"{self.url}/{index_name(split)} is damaged; pack again"):
                self.label_sets = decode_label_sets(**several)
                self.classes = several["classes"]
                if list(several["folders"]) != self.pack["classes"]:
                    raise ValueError("its folders are others")
        if not cache:
            home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
            cache = str(home / "touchstone")
        # By the index's hash: a pack that is written again at the same address has a cache of its own.
        folder = Path(cache) / f"{digest([content])}-{split}"
        begins = numpy.cumsum([0, *(each["bytes"] for each in self.files)], dtype=numpy.int64)[self.columns["shards"]]
        self.cache = Cache(folder, begins + self.columns["offsets"], self.columns["sizes"], cache_gib)
        self._begin_anew(None)

    def _read_index(self, where: str, split: str) -> bytes:
        """Take over the index of a split, and return its bytes."""
        for may_fail in (True, False):
            try:
                content = retry_requests(partial(read_whole, self.store, index_name(split)), where, self.timeout_s)
                self.pack, self.names, self.columns = decode_index(content, where)
                break
            except ImageError as error:
                # The server may answer another start, so it is no mistake of the user's.
                raise StorageError(str(error), exit_code=2) from error
            except UserError:
                # Once more: a proxy or the network may have spoilt the bytes, which no checksum of HTTP's would tell.
                if not may_fail:
                    raise
        return content

    def _begin_anew(self, pid: int | None) -> None:
        """Forget what an ancestor of this process has expected: threads and their queue survive no fork."""
        self._pid = pid
        self._work: SimpleQueue[tuple[int, Future]] = SimpleQueue()
        self._coming: dict[int, Future] = {}

    def path(self, number: int) -> str:
        """Return the name of an image in messages."""
        return f"{self.name(number)} in {self.url}/{self.files[self.columns['shards'][number]]['file']}"

    def size(self, number: int) -> int:
        """Return the bytes of an image's file."""
        return int(self.columns["sizes"][number])

    def identity(self) -> dict[str, str | None]:
        """Return the identity of the local pack, with this address."""
        sizes = digest([self.columns["sizes"].astype(numpy.int64).tobytes()])
        checksums = digest(["".join(each["sha256"] for each in self.files).encode()])
        return {**super().identity(), "path": self.url, "sizes": sizes, "checksums": checksums}

    def fetch(self, number: int, last: int | None = None) -> list[bytes]:
        """Return the bytes of an image, or of all images to `last` in the same shard, by one request that is retried.

        Raises:
            ImageError: it kept failing, or the bytes are not those of the index.
        """
        if last is None:
            last = number
        shard = self.files[self.columns["shards"][number]]
        start = int(self.columns["offsets"][number])
        end = int(self.columns["offsets"][last] + self.columns["sizes"][last])
        where = f"{self.url}/{shard['file']}"

        def read() -> bytes:
            content, whole = self.store.read(shard["file"], start, end - start)
            if whole not in (None, shard["bytes"]):
                found = f"has {whole:,} bytes, but had {shard['bytes']:,}"
                raise ImageError(f"{where} {found}: it has changed; start again")
            if len(content) != end - start:
                raise PassingError(f"only {len(content):,} of {end - start:,} bytes received")
            return content

        # Twice: bytes that a proxy or a bad link has changed may come right, those of another pack never do.
        for _ in range(2):
            try:
                content = retry_requests(read, where, self.timeout_s)
            except UserError as error:
                raise ImageError(str(error)) from error
            offsets = (self.columns["offsets"][number : last + 1] - start).tolist()
            sizes = self.columns["sizes"][number : last + 1].tolist()
            images = [content[begin : begin + size] for begin, size in zip(offsets, sizes, strict=True)]
            if list(map(zlib.crc32, images)) == self.columns["crcs"][number : last + 1].tolist():
                return images
        raise ImageError(f"{where}, bytes {start} to {end}: CRC-32 differs from the index; upload the pack again")

    def expect(self, numbers: Iterable[int]) -> None:
        """Begin to fetch, many at a time, what the cache lacks of the images that are read next."""
        lacking = [number for number in map(int, numbers) if not self.cache.has(number)]
        if lacking and self._pid != os.getpid():
            self._begin_anew(os.getpid())
            for _ in range(_AT_ONCE):
                threading.Thread(target=self._fetch_expected, daemon=True).start()
        coming = {}
        for number in lacking:
            coming[number] = self._coming.get(number)
            if coming[number] is None:
                coming[number] = Future()
                self._work.put((number, coming[number]))
        self._coming = coming

    def _fetch_expected(self) -> None:
        """Fetch images that are expected, in a thread."""
        while True:
            number, future = self._work.get()
            try:
                future.set_result(self.fetch(number))
            except BaseException as error:
                future.set_exception(error)

    def read(self, number: int) -> bytes:
        """Return the bytes of an image's file, from the cache or else from the address; raises as `fetch`."""
        coming = None
        if self._pid == os.getpid():
            coming = self._coming.pop(number, None)
        if coming is not None:
            (content,) = coming.result()
        else:
            content = self.cache.read(number)
            if content is not None:
                if zlib.crc32(content) == self.columns["crcs"][number]:
                    return content
                # It was changed on this disk; the address has it right.
                self.cache.forget(number)
            (content,) = self.fetch(number)
        self.cache.write(number, content)
        return content
