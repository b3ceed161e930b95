"""Stores of files behind an address, HTTP(S) or object storage, and the one rule by which requests are retried."""

import http.client
import io
import os
import random
import re
import ssl
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from distributed import signals
from distributed.ending import explain_limit
from errors import ImageError, UserError, one_line
from loading.child import Client, PassingError, in_child
from loading.pack_format import MAX_HEAD_BYTES, MAX_INDEX_BYTES, MAX_UNPACKED_BYTES
from settings.packages import require_package

# Seconds without a byte after which a request counts as failed.
_SILENCE_S = 20.0

# Seconds before the first retry, the most before a later one, and those of failures after which a line says so.
_FIRST_WAIT_S, _LONGEST_WAIT_S, _QUIET_S = 0.1, 20.0, 10.0

# Bytes a second below which a request counts as failed, too, once it has taken so long.
_SLOWEST = 10_000

# Bytes of a part of an upload, and the seconds within which a request to object storage has to be done.
_CHUNK_BYTES, _TRANSFER_S = 8 << 20, 600.0

T = TypeVar("T")


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
        where = f"{self.url.geturl()}/{name}"
        most = size or MAX_INDEX_BYTES
        path = f"{urllib.parse.quote(self.url.path, safe='/%')}/{urllib.parse.quote(name)}"
        headers = {} if size is None else {"Range": f"bytes={start}-{start + size - 1}"}
        try:
            response = self._get(path, headers, partial(_Answer, where, most))
            if response.status != (200 if size is None else 206):
                # What follows on this connection is the body of a refusal, of any length: it is not read.
                self._local.pid = None
                raise _refused(where, response)
            # Before memory is allocated for it.
            if response.length is not None and response.length > most:
                raise _too_long(where, most)
            content = response.read()
        except ssl.SSLCertVerificationError as error:
            raise UserError(f"{where}: {error.verify_message}; set SSL_CERT_FILE=FILE to trust others") from error
        except (OSError, http.client.HTTPException) as error:  # a truncated body too
            self._local.pid = None
            raise explain_limit(error) or PassingError(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        whole = response.getheader("Content-Range", "").rpartition("/")[2]
        # No file's length has 20 digits, and Python refuses to convert some thousands.
        if not whole.isdecimal() or len(whole) >= 20:
            return content, None
        return content, int(whole)

    def _get(self, path: str, headers: dict[str, str], answer: Callable) -> http.client.HTTPResponse:
        """Return the answer to a GET; a kept connection that the server has closed meanwhile is opened again."""
        # A forked process must not share its parent's connection: each would read the other's answers.
        if getattr(self._local, "pid", None) != os.getpid():
            self._local.connection = self._connect()
            self._local.pid = os.getpid()
        connection = self._local.connection
        connection.response_class = answer
        is_kept = connection.sock is not None
        try:
            connection.request("GET", path, headers=headers)
            return connection.getresponse()
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            # Servers close a kept connection that was idle for a while: no failure, and so no retry with a wait.
            if not is_kept:
                raise
        connection.close()
        return self._get(path, headers, answer)

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPConnection if self.url.scheme == "http" else http.client.HTTPSConnection
        return kind(self.url.hostname, self.url.port, timeout=_SILENCE_S)


class _Answer(http.client.HTTPResponse):
    """An answer that comes in time and has an end, however many bytes or answers come before its headers.

    A bounded `read` of the body would not do: `HTTPResponse.begin` reads any number of "100 Continue" answers, and each
    byte of a header may take the whole timeout.
    """

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
        self.raw, self.where, self.most = raw, where, most
        self.num_bytes, self.begin_s = 0, time.monotonic()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        elapsed_s = time.monotonic() - self.begin_s
        if elapsed_s > _SILENCE_S + self.num_bytes / _SLOWEST:
            raise TimeoutError(f"only {self.num_bytes:,} bytes received in {elapsed_s:.0f} s")
        count = self.raw.readinto(buffer) or 0
        self.num_bytes += count
        # Headers and earlier answers count too, so there is room for them beside the body.
        if self.num_bytes > self.most + MAX_HEAD_BYTES:
            raise _too_long(self.where, self.most)
        return count

    def close(self) -> None:
        self.raw.close()
        super().close()


def _refused(where: str, response: http.client.HTTPResponse) -> Exception:
    """Return the error of an answer without the wanted bytes."""
    if response.status == 200:
        found = "the server sends whole files instead of ranges; use one that supports range requests"
        return UserError(f"{where}: {found}")
    reason = f"{response.status} {response.reason}"
    # A redirect could lead to another host or to plain HTTP. What follows "?" in its target may be a signature.
    target = response.getheader("Location", "").partition("?")[0]
    if target:
        reason += f" to {target}, which is not followed"
    return _refusal(where, response.status, reason, response.getheader("Retry-After", ""))


def _refusal(where: str, status: int, reason: str, retry_after: str = "") -> Exception:
    """Return the error of an HTTP status."""
    if status in (408, 425, 429) or status >= 500:
        # It may also be a date, which is not worth a parser.
        return PassingError(reason, float(retry_after) if retry_after.isdecimal() else 0.0)
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
        self.url = url
        self._store = None
        self._pid: int | None = None
        self.package = require_package("obstore", url)

    def read(self, name: str, start: int = 0, size: int | None = None) -> tuple[bytes, int | None]:
        """Return bytes of an object, as `HttpStore.read`."""
        with self._errors_of(name):
            if self._pid != os.getpid():
                self._store = self._connect(read_timeout=f"{_SILENCE_S:.0f}s")
                self._pid = os.getpid()
            if size is not None:
                return bytes(self.package.get_range(self._store, name, start=start, length=size)), None
            answer = self.package.get(self._store, name)
            if answer.meta["size"] > MAX_UNPACKED_BYTES:
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
        # obstore refuses plain HTTP unless it is told; SeaweedFS, MinIO and the like are often reached by it.
        if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
            options["allow_http"] = "true"
        options = {"connect_timeout": f"{_SILENCE_S:.0f}s", "timeout": f"{_TRANSFER_S:.0f}s", **options}
        stores = require_package("obstore.store", self.url)
        # No retries of its own: `retry_requests` is the one rule, says when it waits, and ends at a signal.
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
            status = re.search("40[0134] [A-Z][A-Za-z ]+", str(error))
            if status:
                raise _refusal(where, int(status[0][:3]), status[0]) from error
            raise explain_limit(RuntimeError(error)) or PassingError(str(error).splitlines()[0][:200]) from error


def open_store(url: str) -> HttpStore | ObjectStore:
    """Return the store of an address; UserError, without what may be a password, if it cannot be one."""
    shown = re.sub("://.*[@?#].*", "://...", url, flags=re.DOTALL)
    try:
        parts = urllib.parse.urlsplit(url)
        host = (parts.hostname or "").encode("idna").decode()
        _ = parts.port  # a ValueError if it is no port
    except ValueError as error:
        reason = f" ({error})" if shown == url else ""  # else it may repeat the password
        raise UserError(f"{shown}: not a valid URL{reason}") from error
    if any((parts.username, parts.password, parts.query, parts.fragment)):
        remedy = "remove user, password and everything after ?; credentials come from the environment"
        raise UserError(f"{parts.scheme}://{host}...: {remedy}")
    if not re.fullmatch(r"[^\0-\x20\x7f]+", host) or parts.scheme not in ("http", "https", "s3", "gs", "az"):
        raise UserError(f"{shown}: expected https://, http://, s3://, gs:// or az://, a host, and a path")
    kind = HttpStore if parts.scheme.startswith("http") else ObjectStore
    return kind(url.rstrip("/"))


def retry_requests(
    work: Callable[[], T], where: str, timeout_s: float, remedy: str = "--resume auto continues; or raise --io-timeout"
) -> T:
    """Return the result of `work`; after a failure that may pass try again, with growing waits, for `timeout_s`.

    Raises:
        ImageError: it kept failing.
    """
    begin_s, wait_s = time.monotonic(), _FIRST_WAIT_S
    # Processes that failed together must not all try again together. It is not the process's generator, whose draws
    # belong to the images.
    jitter = random.Random(os.urandom(8))
    is_said = False
    while True:
        try:
            return work()
        except PassingError as error:
            # Most failures pass at once, and are not worth a line.
            if time.monotonic() > begin_s + _QUIET_S and not is_said:
                print(one_line(f"{where}: {error}; retrying for {timeout_s:g} s"), file=sys.stderr, flush=True)
                is_said = True
            left_s = begin_s + timeout_s - time.monotonic()
            if left_s <= 0 or signals.is_stop_asked():
                why = f"tried for {timeout_s:g} s" if left_s <= 0 else "interrupted"
                raise ImageError(f"cannot reach {where}: {error} ({why}); {remedy}") from error
            end_s = time.monotonic() + min(max(error.wait_s, wait_s * jitter.uniform(0.5, 1.5)), left_s)
            # In short sleeps, so that a preempted run is not killed while it waits.
            while time.monotonic() < end_s and not signals.is_stop_asked():
                time.sleep(min(max(end_s - time.monotonic(), 0), 0.5))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def read_whole(store: HttpStore | ObjectStore, name: str) -> bytes:
    """Return a whole file; raises as `HttpStore.read`."""
    if isinstance(store, HttpStore):
        return store.read(name)[0]
    # In a child, so that this process has no client with threads before it forks its loader processes.
    return in_child(lambda: store.read(name)[0])
