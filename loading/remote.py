"""Read packs over HTTP and from object storage: ranged reads that are retried, behind a cache that is never evicted."""

import gzip
import http.client
import io
import json
import os
import random
import re
import ssl
import sys
import threading
import time
import urllib.parse
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy

from distributed import signals
from errors import ImageError, StorageError, UserError, explain_limit, in_one_line, one_line, require_package
from files import open_regular
from loading.child import Client, PassingError, in_child
from loading.index import ArraySource
from loading.source import decode_label_sets, digest

# The first line of an index is JSON with this format; the arrays of `COLUMNS` follow, in their order.
FORMAT = "touchstone pack index 1"
COLUMNS = {"labels": "<i4", "shards": "<i4", "offsets": "<i8", "sizes": "<i4", "crcs": "<u4"}

# Seconds without a byte after which a request counts as failed; a retry waits between the next two; failures for
# longer than the last are said in a line.
_SILENCE_S, _FIRST_WAIT_S, _LONGEST_WAIT_S, _QUIET_S = 20.0, 0.1, 20.0, 10.0

# Bytes a second below which a request counts as failed, too, once it has taken so long.
_SLOWEST = 10_000

# Bytes of a part of an upload, and the seconds within which a request to object storage has to be done.
_CHUNK_BYTES, _TRANSFER_S = 8 << 20, 600.0

# Images that a process fetches at once: at 50 ms each, 64 are 1,280 a second, more than it decodes.
_AT_ONCE = 64

# Bytes of an image in the columns.
_ROW_BYTES = sum(numpy.dtype(kind).itemsize for kind in COLUMNS.values())

# The default cache leaves this share of the disk free.
_FREE_SHARE = 0.1

# Most bytes of an index, of its first line, and unpacked (ImageNet-21k's would have 170, 0.5 and 770 MB).
_MAX_INDEX_BYTES, _MAX_HEAD_BYTES, _MAX_UNPACKED_BYTES = 1 << 28, 1 << 24, 1 << 30

T = TypeVar("T")


def index_name(split: str) -> str:
    """Return the name of a split's index in a pack."""
    return f"{split}.index.gz"


def encode_index(metadata: dict[str, Any], names: numpy.ndarray, columns: dict[str, numpy.ndarray]) -> bytes:
    """Return an index: metadata of the split, (images,) names as bytes, and the (images,) columns of `COLUMNS`."""
    head = {"format": FORMAT, "images": len(names), "width": names.dtype.itemsize, **metadata}
    parts = [columns[name].astype(kind).tobytes() for name, kind in COLUMNS.items()]
    content = b"".join([json.dumps(head).encode(), b"\n", names.tobytes(), *parts])
    return gzip.compress(content, compresslevel=6, mtime=0)


def decode_index(content: bytes, where: str) -> tuple[dict[str, Any], numpy.ndarray, dict[str, numpy.ndarray]]:
    """Return the arguments of `encode_index`; UserError if the content is no such index. `where` names it."""
    try:
        unpacker = zlib.decompressobj(31)  # its output has a limit, and that of `gzip.decompress` none
        head, _, body = unpacker.decompress(content, _MAX_HEAD_BYTES).partition(b"\n")
        metadata = json.loads(head)
        if metadata["format"] != FORMAT:
            raise ValueError(f"format {metadata['format']!r:.40}, expected {FORMAT!r}")
        number, width = metadata["images"], metadata["width"]
        if not (type(number) is type(width) is int and min(number, width) > 0):
            raise ValueError("it has no valid number of images")
        start, length = number * width, number * (width + _ROW_BYTES)
        body += unpacker.decompress(unpacker.unconsumed_tail, max(min(length, _MAX_UNPACKED_BYTES) - len(body), 0) + 1)
        if len(body) != length or not unpacker.eof or unpacker.unused_data:
            raise ValueError("its length is wrong")
        names, columns = numpy.frombuffer(body, f"S{width}", number), {}
        for name, kind in COLUMNS.items():
            columns[name] = numpy.frombuffer(body, kind, number, start)
            start += columns[name].nbytes
        if not metadata.get("labels") and metadata["classes"] != sorted(metadata["classes"]):
            raise ValueError("its classes are not in order")
        _check_columns(metadata["classes"], metadata["shards"], columns)
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, zlib.error) as error:
        raise UserError(f"{where} is no index of this version ({error}); pack again: python -m scripts.pack") from error
    return metadata, names, columns


def _check_columns(classes: list[str], files: list[dict], columns: dict[str, numpy.ndarray]) -> None:
    """Raise an error, such as ValueError, unless an index's classes and shards are some, and every image is of one."""
    texts, lengths = [*classes, *(each["sha256"] for each in files)], [each["bytes"] for each in files]
    if len(classes) != len({*classes}) or {*map(type, texts)} != {str} or {*map(type, lengths)} != {int}:
        raise ValueError("it has no valid classes or shards")
    has_names = all(re.fullmatch(r"[\w.-]+", each["file"]) for each in files)
    if not has_names or not 0 < min(lengths) <= sum(lengths) < 1 << 60:
        raise ValueError("its shards have no valid names or sizes")
    labels, shards, offsets, sizes, _ = columns.values()
    is_known = min(map(numpy.min, columns.values())) >= 0 and labels.max() < len(classes) and shards.max() < len(files)
    if not is_known or (offsets > numpy.array(lengths)[shards] - sizes).any():
        raise ValueError("an image has no valid class or shard")


class HttpStore:
    """Files below an address, read over HTTP or HTTPS; each process and thread keeps a connection of its own.

    Certificates are those of the system, or of SSL_CERT_FILE.
    """

    def __init__(self, url: str) -> None:
        self.url, self._local = urllib.parse.urlsplit(url), threading.local()

    def read(self, name: str, start: int = 0, size: int | None = None) -> tuple[bytes, int | None]:
        """Return `size` bytes of a file from `start`, or all of it, by one request.

        With them comes the length of the whole, where a server tells it beside a part; else None.

        Raises:
            UserError: it will never succeed: no such file, no right to read it, more bytes than were asked for or than
                an index has, too many open files, or a server without ranged reads.
            PassingError: it may succeed later.
        """
        where, most = f"{self.url.geturl()}/{name}", size or _MAX_INDEX_BYTES
        path = f"{urllib.parse.quote(self.url.path, safe='/%')}/{urllib.parse.quote(name)}"
        headers = {} if size is None else {"Range": f"bytes={start}-{start + size - 1}"}
        try:
            response = self._get(path, headers, partial(_Answer, where, most))
            if response.status != (200 if size is None else 206):
                self._local.pid = None  # what follows on this connection is the body of a refusal
                raise _refused(where, response)
            if (response.length or 0) > most:  # before memory is allocated for it
                raise _too_long(where, most)
            content = response.read()
        except ssl.SSLCertVerificationError as error:
            raise UserError(f"{where}: {error.verify_message}; set SSL_CERT_FILE=FILE to trust others") from error
        except (OSError, http.client.HTTPException) as error:  # a truncated body too
            self._local.pid = None
            raise explain_limit(error) or PassingError(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        whole = (response.getheader("Content-Range") or "").rpartition("/")[2]
        return content, int(whole) if whole.isdecimal() and len(whole) < 20 else None

    def _get(self, path: str, headers: dict[str, str], answer: Callable) -> http.client.HTTPResponse:
        """Return the answer to a GET; a kept connection that the server has closed meanwhile is opened again."""
        if getattr(self._local, "pid", None) != os.getpid():  # a forked process must not share its parent's
            self._local.connection, self._local.pid = self._connect(), os.getpid()
        connection = self._local.connection
        connection.response_class = answer
        is_kept = connection.sock is not None
        try:
            connection.request("GET", path, headers=headers)
            return connection.getresponse()
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            if not is_kept:
                raise
        connection.close()
        return self._get(path, headers, answer)

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPConnection if self.url.scheme == "http" else http.client.HTTPSConnection
        return kind(self.url.hostname, self.url.port, timeout=_SILENCE_S)


class _Answer(http.client.HTTPResponse):
    """An answer that comes in time and has an end, however many bytes or answers come before its headers."""

    def __init__(self, where: str, most: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fp = io.BufferedReader(_BoundedReader(self.fp.detach(), where, most))


def _too_long(where: str, most: int) -> UserError:
    return UserError(f"{where}: the server sends more than {most:,} bytes; is it a pack that scripts.pack wrote?")


class _BoundedReader(io.RawIOBase):
    """Reads an answer from a socket, whose own timeout is that of each read alone: not for ever, and not without end.

    Raises:
        TimeoutError: fewer than `_SLOWEST` bytes a second come.
        UserError: more than `most` bytes come.
    """

    def __init__(self, raw: io.RawIOBase, where: str, most: int) -> None:
        self.raw, self.where, self.most, self.num_bytes, self.begin_s = raw, where, most, 0, time.monotonic()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:
        elapsed_s = time.monotonic() - self.begin_s
        if elapsed_s > _SILENCE_S + self.num_bytes / _SLOWEST:
            raise TimeoutError(f"only {self.num_bytes:,} bytes received in {elapsed_s:.0f} s")
        self.num_bytes += (count := self.raw.readinto(buffer) or 0)
        if self.num_bytes > self.most + _MAX_HEAD_BYTES:
            raise _too_long(self.where, self.most)
        return count

    def close(self) -> None:
        self.raw.close()
        super().close()


def _refused(where: str, response: http.client.HTTPResponse) -> Exception:
    """Return the error of an answer without the wanted bytes."""
    if response.status == 200:
        return UserError(
            f"{where}: the server sends whole files instead of ranges; use one that supports range requests"
        )
    target = response.getheader("Location", "").partition("?")[0]
    reason = f"{response.status} {response.reason}" + (f" to {target}, which is not followed" if target else "")
    return _refusal(where, response.status, reason, response.getheader("Retry-After"))


def _refusal(where: str, status: int, reason: str, retry_after: str | None = None) -> Exception:
    """Return the error of an HTTP status."""
    if status in (408, 425, 429) or status >= 500:
        wait = float(retry_after) if (retry_after or "").isdecimal() else 0.0
        return PassingError(reason, wait)
    help_of = {
        401: "provide credentials, as for the cloud's own tools", 403: "the credentials do not allow it",
        404: "no such object or bucket; is it a pack that scripts.pack wrote, with its .index.gz files?",
    }  # fmt: skip
    return UserError(f"{where}: {reason}: {help_of.get(status, 'the server refused the request')}")


class ObjectStore:
    """Files below an address of S3, Google Cloud Storage or Azure, read by obstore, an optional package.

    Credentials, endpoint and region come from the environment, as by the clouds' own tools. Clients have threads,
    which no fork survives, so each process makes its own when it first reads.
    """

    def __init__(self, url: str) -> None:
        self.url, self._pid, self._store = url, None, None
        self.package = require_package("obstore", url)

    def read(self, name: str, start: int = 0, size: int | None = None) -> tuple[bytes, int | None]:
        """Return bytes of an object, as `HttpStore.read`."""
        with self._errors_of(name):
            if self._pid != os.getpid():
                self._store, self._pid = self._connect(read_timeout=f"{_SILENCE_S:.0f}s"), os.getpid()
            if size is not None:
                return bytes(self.package.get_range(self._store, name, start=start, length=size)), None
            answer = self.package.get(self._store, name)
            if answer.meta["size"] > _MAX_UNPACKED_BYTES:
                raise UserError(f"{self.url}/{name}: it has {answer.meta['size']:,} bytes, which is too large")
            return bytes(answer.bytes()), None

    def write(self, name: str, content: bytes) -> None:
        """Write an object, whole or not at all."""
        with self._errors_of(name):
            self.package.put(self._connect(), name, content, chunk_size=_CHUNK_BYTES, max_concurrency=4)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each object below the address, by its name."""
        with self._errors_of(""):
            objects = [each for some in self.package.list(self._connect()) for each in some]
        return {each["path"]: each["size"] for each in objects}

    def _connect(self, **options: str) -> Any:
        Client.pid = os.getpid()
        if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
            options["allow_http"] = "true"
        options = {"connect_timeout": f"{_SILENCE_S:.0f}s", "timeout": f"{_TRANSFER_S:.0f}s", **options}
        stores = require_package("obstore.store", self.url)
        return stores.from_url(self.url, client_options=options, retry_config={"max_retries": 0})

    @contextmanager
    def _errors_of(self, name: str) -> Iterator[None]:
        """Turn the package's errors about an object into those of `HttpStore.read`."""
        errors = require_package("obstore.exceptions", self.url)
        where = f"{self.url}/{name}"
        try:
            yield
        except (errors.NotFoundError, FileNotFoundError) as error:
            raise _refusal(where, 404, "not found") from error
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            raise _refusal(where, 403, "not allowed") from error
        except errors.BaseError as error:
            # Errors of lists have no classes of their own.
            if missing := re.search("40[0134] [A-Z][A-Za-z ]+", str(error)):
                raise _refusal(where, int(missing[0][:3]), missing[0]) from error
            raise explain_limit(RuntimeError(error)) or PassingError(str(error).splitlines()[0][:200]) from error


def open_store(url: str) -> HttpStore | ObjectStore:
    """Return the store of an address; UserError, without what may be a password, if it cannot be one."""
    shown = re.sub("://.*[@?#].*", "://...", url, flags=re.DOTALL)
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = (parts.hostname or "").encode("idna").decode(), parts.port
    except ValueError as error:
        reason = f" ({error})" if shown == url else ""
        raise UserError(f"{shown}: not a valid URL{reason}") from error
    if parts.username or parts.password or parts.query or parts.fragment:
        remedy = "remove user, password and everything after ?; credentials come from the environment"
        raise UserError(f"{parts.scheme}://{host}...: {remedy}")
    if not re.fullmatch(r"[^\0-\x20\x7f]+", host) or parts.scheme not in ("http", "https", "s3", "gs", "az"):
        raise UserError(f"{shown}: expected https://, http://, s3://, gs:// or az://, a host, and a path")
    return (HttpStore if parts.scheme.startswith("http") else ObjectStore)(url.rstrip("/"))


def retry_requests(
    work: Callable[[], T], where: str, timeout_s: float, remedy: str = "--resume auto continues; or raise --io-timeout"
) -> T:
    """Return the result of `work`; after a failure that may pass try again, with growing waits, for `timeout_s`.

    Raises:
        ImageError: it kept failing.
    """
    # Not the process's generator, whose draws belong to the images.
    begin, wait, jitter, is_said = time.monotonic(), _FIRST_WAIT_S, random.Random(os.urandom(8)), False
    while True:
        try:
            return work()
        except PassingError as error:
            if time.monotonic() > begin + _QUIET_S and not is_said:
                print(one_line(f"{where}: {error}; retrying for {timeout_s:g} s"), file=sys.stderr, flush=True)
                is_said = True
            left = begin + timeout_s - time.monotonic()
            if left <= 0 or signals.is_stop_asked():
                why = f"tried for {timeout_s:g} s" if left <= 0 else "interrupted"
                raise ImageError(f"cannot reach {where}: {error} ({why}); {remedy}") from error
            end = time.monotonic() + min(max(error.wait_s, wait * jitter.uniform(0.5, 1.5)), left)
            while time.monotonic() < end and not signals.is_stop_asked():
                time.sleep(min(max(end - time.monotonic(), 0), 0.5))
            wait = min(2 * wait, _LONGEST_WAIT_S)


def read_whole(store: HttpStore | ObjectStore, name: str) -> bytes:
    """Return a whole file; raises as `HttpStore.read`."""
    return store.read(name)[0] if isinstance(store, HttpStore) else in_child(lambda: store.read(name)[0])


class Cache:
    """Images of a split on this machine's disk: one sparse file of all shards, and a byte for each image that is there.

    Data are written before the image's byte, and every read is checked by the CRC-32 of the index: so a kill, a full
    disk or another process can leave nothing that is believed wrongly. Nothing is evicted: images are kept in the order
    of the shards as far as the limit goes. Any number of processes of one user share it without locks; others could put
    links and images there, and a CRC-32 is no proof against people.

    Args:
        folder: the folder of this split.
        offsets: (images,) where each image lies in the file.
        sizes: (images,) bytes of each image.
        gib: the most that is kept; None for what the disk has, less a tenth.

    Raises:
        UserError: the folder cannot be made, is another user's, or others may write to it.
    """

    def __init__(self, folder: Path, offsets: numpy.ndarray, sizes: numpy.ndarray, gib: float | None) -> None:
        self.folder, self.offsets, self.sizes = folder, offsets, sizes
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            status, flags = os.fstat(opened), os.O_RDWR | os.O_CREAT
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise UserError(f"--cache {folder}: another user owns it or may write to it; give a folder of your own")
            self._data, self._there = (open_regular(name, flags, dir_fd=opened) for name in ("data", "there"))
            os.close(opened)
        except OSError as error:
            raise UserError(f"--cache {folder} cannot be used: {error.strerror}; give another folder") from error
        limit = float("inf") if gib is None else gib * 2**30
        self.num_kept = int(numpy.searchsorted(offsets + sizes, limit, side="right"))
        self.is_full, self.leaves_free = False, _FREE_SHARE if gib is None else 0.0

    def has(self, number: int) -> bool:
        """Tell whether an image is there."""
        with suppress(OSError):
            return number < self.num_kept and os.pread(self._there, 1, number) == b"\1"
        return False

    def read(self, number: int) -> bytes | None:
        """Return an image's bytes, not checked yet, or None if they are not there."""
        with suppress(OSError):  # the address has it too
            if self.has(number):
                return os.pread(self._data, int(self.sizes[number]), int(self.offsets[number]))
        return None

    def write(self, number: int, content: bytes) -> None:
        """Keep an image's bytes, which must be checked; a disk that fails keeps no more, and says so once."""
        if number >= self.num_kept or self.is_full:
            return
        try:
            disk = os.fstatvfs(self._data)
            self.is_full = disk.f_bavail < self.leaves_free * disk.f_blocks
            if self.is_full:
                return
            view, offset = memoryview(content), int(self.offsets[number])
            while view:
                done = os.pwrite(self._data, view, offset)
                view, offset = view[done:], offset + done
            os.pwrite(self._there, b"\1", number)
        except OSError as error:
            self.is_full = True
            print(f"--cache {self.folder}: {error.strerror}; no more images are cached", file=sys.stderr, flush=True)

    def forget(self, number: int) -> None:
        """Forget an image whose bytes are wrong."""
        with suppress(OSError):
            os.pwrite(self._there, b"\0", number)

    def missing(self) -> Iterator[int]:
        """Yield the images that are to be kept and are not there."""
        for begin in range(0, self.num_kept, 1 << 16):
            num_looked_at = min(self.num_kept - begin, 1 << 16)
            flags = os.pread(self._there, num_looked_at, begin).ljust(num_looked_at, b"\0")
            yield from (begin + number for number, flag in enumerate(flags) if flag != 1)


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
        self.store, self.url, self.timeout_s = open_store(url), url.rstrip("/"), timeout_s
        self.where = f"{self.url}/{split}"
        where = f"{self.url}/{index_name(split)}"
        for attempt in (1, 2):  # once more where the network spoilt it
            try:
                content = retry_requests(partial(read_whole, self.store, index_name(split)), where, timeout_s)
                self.pack, self.names, self.columns = decode_index(content, where)
                break
            except ImageError as error:
                raise StorageError(str(error), exit_code=2) from error  # the server may answer another start
            except UserError:
                if attempt == 2:
                    raise
        self.classes, self.labels, self.files = self.pack["classes"], self.columns["labels"], self.pack["shards"]
        if several := self.pack.get("labels"):
            with in_one_line(f"{where} is damaged; pack again"):
                self.label_sets, self.classes = decode_label_sets(**several), several["classes"]
                if list(several["folders"]) != self.pack["classes"]:
                    raise ValueError("its folders are others")
        lengths = [0, *(each["bytes"] for each in self.files)]
        begins = numpy.cumsum(lengths, dtype=numpy.int64)[self.columns["shards"]]
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "touchstone"
        folder = Path(cache or home) / f"{digest([content])}-{split}"
        self.cache = Cache(folder, begins + self.columns["offsets"], self.columns["sizes"], cache_gib)
        self._pid, self._work, self._coming = None, SimpleQueue(), {}

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
        last = number if last is None else last
        shard, start = self.files[self.columns["shards"][number]], int(self.columns["offsets"][number])
        end = int(self.columns["offsets"][last] + self.columns["sizes"][last])
        where = f"{self.url}/{shard['file']}"

        def read() -> bytes:
            content, whole = self.store.read(shard["file"], start, end - start)
            if whole not in (None, shard["bytes"]):
                raise ImageError(
                    f"{where} has {whole:,} bytes, but had {shard['bytes']:,}: it has changed; start again"
                )
            if len(content) != end - start:
                raise PassingError(f"only {len(content):,} of {end - start:,} bytes received")
            return content

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
        if lacking and self._pid != os.getpid():  # threads survive no fork
            self._pid, self._work, self._coming = os.getpid(), SimpleQueue(), {}
            for _ in range(_AT_ONCE):
                threading.Thread(target=self._serve, daemon=True).start()
        self._coming = {number: self._coming.get(number) or self._begin(number) for number in lacking}

    def _begin(self, number: int) -> Future:
        future = Future()
        self._work.put((number, future))
        return future

    def _serve(self) -> None:
        """Fetch images that are expected, in a thread."""
        while True:
            number, future = self._work.get()
            try:
                future.set_result(self.fetch(number))
            except BaseException as error:
                future.set_exception(error)

    def read(self, number: int) -> bytes:
        """Return the bytes of an image's file, from the cache or else from the address; raises as `fetch`."""
        coming = self._coming.pop(number, None) if self._pid == os.getpid() else None
        content = self.cache.read(number) if coming is None else None
        if content is not None:
            if zlib.crc32(content) == self.columns["crcs"][number]:
                return content
            self.cache.forget(number)
        (content,) = self.fetch(number) if coming is None else coming.result()
        self.cache.write(number, content)
        return content
