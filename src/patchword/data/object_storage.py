"""Objects in S3, Google Cloud Storage and Azure, by obstore: bounded timeouts, and all retries in one place.

obstore's own retries are off: they do not repeat a create-only write or a listing that broke off, and would multiply
with ours. Every operation here ends within `operation_timeout`, with a result or with a sentence.
"""

import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

from ..core.text import one_line, print_stderr
from ..errors import ConfigError, StorageError, how_to_install
from .storage import Storage, StoredObject, object_changed

# Seconds that one operation may take with all its retries: longer than the restart or failover of a server, short
# enough for a job to end with a sentence before its scheduler kills it. Slow links and tests change it.
TIMEOUT_VARIABLE = "PATCHWORD_STORAGE_TIMEOUT"
OPERATION_TIMEOUT = 180.0
REQUESTS_PER_OPERATION = 6  # that may all run into their timeout: 30 s each by default
CONNECT_TIMEOUT = 5.0  # seconds; a host that is up accepts within one
FIRST_WAIT, LONGEST_WAIT = 0.1, 10.0  # seconds between retries: doubled each time, with jitter
NOTE_AFTER = 10.0  # seconds of failures after which a note is printed
# A request reads at most this much, so its timeout bounds a stall, not the size of an object: 0.3 MB/s are enough.
MAX_REQUEST_BYTES = 8 * 2**20

S3_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")  # the first that is set
AZURE_ENDPOINT_VARIABLES = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
# Codes of S3 in a response 400; a response to HEAD has none.
EXPIRED_CODES = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")
RETRIED_STATUS = {408, 409, 425, 429}  # besides 5xx: timeouts, conflicts of writers, too many requests

Result = TypeVar("Result")


class ObjectStorage(Storage):
    """Objects below a URL such as "s3://bucket/photos"."""

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.rstrip("/").partition("://")
        self.url = f"{scheme.lower()}://{rest}"
        self.timeout = operation_timeout()
        self._store = self._open()
        self._noted, self._lock = 0.0, threading.Lock()

    def __reduce__(self) -> tuple[type["ObjectStorage"], tuple[str]]:
        return ObjectStorage, (self.url,)  # other processes open it with their own environment

    def _open(self) -> Any:
        obstore = import_obstore(self.url)
        request_timeout = self.timeout / REQUESTS_PER_OPERATION
        variables = S3_ENDPOINT_VARIABLES if self.url.startswith("s3") else AZURE_ENDPOINT_VARIABLES
        endpoint = next((os.environ[name] for name in variables if os.environ.get(name)), "")
        if endpoint and not endpoint.startswith(("http://", "https://")):  # the library would crash
            raise StorageError(
                f"The endpoint {endpoint} in the environment must begin with http:// or https://.",
                code="invalid_reference",
            )
        options: dict[str, Any] = {
            "timeout": timedelta(seconds=request_timeout),
            "connect_timeout": timedelta(seconds=min(CONNECT_TIMEOUT, request_timeout)),
            "allow_http": endpoint.startswith("http://"),  # a local server; TLS everywhere else
        }
        config = {"endpoint": endpoint} if endpoint and self.url.startswith("s3") else None
        try:
            return obstore.store.from_url(
                self.url, config=config, client_options=options, retry_config={"max_retries": 0}
            )
        except (obstore.exceptions.BaseError, ValueError) as error:
            raise StorageError(
                f"{self.url} cannot be opened ({first_line(error)}). Check the URL and the variables of the object "
                f"store in the environment.",
                code="invalid_reference",
            ) from None

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        obstore = import_obstore(self.url)
        last: str | None = None
        folder = prefix.strip("/") or None

        def start() -> "Iterator[Any]":
            # A listing that broke off continues behind the last key that arrived.
            return iter(obstore.list(self._store, prefix=folder, offset=last, chunk_size=1000))

        pages = start()

        def next_page() -> Any:
            nonlocal pages
            try:
                return next(pages, None)
            except Exception:
                pages = start()
                raise

        while (page := self._retry(next_page, "listed", folder or "")) is not None:
            for meta in page:
                last = meta["path"]
                yield _describe(meta)

    def head(self, key: str) -> StoredObject | None:
        obstore = import_obstore(self.url)
        try:
            return _describe(self._retry(lambda: obstore.head(self._store, key), "read", key))
        except StorageError as error:
            if error.code == "object_not_found":
                return None
            raise

    def read(self, key: str, etag: str | None = None) -> bytes:
        whole = self._get(key, 0, None, etag)
        if isinstance(whole, bytes):
            return whole
        size, etag = whole
        return self.read_range(key, 0, size, etag)

    def read_range(self, key: str, start: int, stop: int, etag: str | None = None) -> bytes:
        pieces = []
        while start < stop:
            end = min(stop, start + MAX_REQUEST_BYTES)
            piece = self._get(key, start, end, etag)
            assert isinstance(piece, bytes)
            pieces.append(piece)
            if len(piece) < end - start:
                break  # the object ends here
            start = end
        return b"".join(pieces)

    def _get(self, key: str, start: int, stop: int | None, etag: str | None) -> "bytes | tuple[int, str]":
        """Request a range, or a whole object; size and ETag instead of the content of a large one."""
        obstore = import_obstore(self.url)
        options: dict[str, Any] = {} if stop is None else {"range": (start, stop)}
        if etag:
            options["if_match"] = etag

        def request() -> "bytes | tuple[int, str]":
            response = obstore.get(self._store, key, options=options)
            size, version = response.meta["size"], response.meta["e_tag"] or ""
            if etag and version != etag:  # a server that ignores If-Match
                raise object_changed(self.join(key))
            if stop is None and size > MAX_REQUEST_BYTES:
                return size, version
            data = bytes(response.bytes())
            expected = (size if stop is None else min(stop, size)) - start
            if len(data) != expected:
                raise _IncompleteError(f"{len(data):,} of {expected:,} bytes arrived")
            return data

        try:
            return self._retry(request, "read", key)
        except StorageError as error:
            if error.code == "out_of_range":
                return b""
            raise

    def create(self, key: str, data: bytes) -> bool:
        obstore = import_obstore(self.url)

        def request() -> bool:
            try:
                obstore.put(self._store, key, data, mode="create", use_multipart=False)
                return True
            except obstore.exceptions.AlreadyExistsError:
                # Also the response to a retry if the write had succeeded and only its response was lost. A conflict of
                # two writers (409) looks the same and may leave nothing: then write again.
                try:
                    obstore.head(self._store, key)
                except FileNotFoundError:
                    raise _IncompleteError("two writers were in conflict, and neither succeeded") from None
                return False

        return self._retry(request, "written", key)

    def replace(self, key: str, data: bytes) -> None:
        obstore = import_obstore(self.url)
        self._retry(lambda: obstore.put(self._store, key, data), "written", key)

    def _retry(self, request: Callable[[], Result], verb: str, key: str) -> Result:
        """Repeat a request until it succeeds, cannot succeed, or takes too long."""
        obstore = import_obstore(self.url)
        started = time.monotonic()
        wait = FIRST_WAIT
        while True:
            try:
                return request()
            except (obstore.exceptions.BaseError, OSError, ValueError, _IncompleteError) as error:
                if (permanent := self._permanent(error, verb, key)) is not None:
                    raise permanent from None
                pause = wait * random.uniform(0.5, 1.5)  # jitter: many workers must not come back all at once
                elapsed = time.monotonic() - started
                if elapsed + pause > self.timeout:
                    raise self._unreachable(error, verb, key) from None
                if elapsed > NOTE_AFTER:
                    self._print_note(error)
            time.sleep(pause)
            wait = min(2 * wait, LONGEST_WAIT)

    def _permanent(self, error: Exception, verb: str, key: str) -> StorageError | None:
        """Return the error of a request that would fail again; None if it should be repeated."""
        exceptions = import_obstore(self.url).exceptions
        name, status = self.join(key), _status(error)
        if isinstance(error, exceptions.PreconditionError) or status == 412:
            return object_changed(name)
        if isinstance(error, FileNotFoundError) or status == 404:
            return StorageError(f"{name} does not exist. Check the bucket and the path.", code="object_not_found")
        denied = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError)
        has_expired = status == 400 and any(f"<Code>{code}</Code>" in str(error) for code in EXPIRED_CODES)
        if isinstance(error, denied) or status in (401, 403) or has_expired:
            hint = "Check the credentials in the environment and the permissions of the bucket."
            return StorageError(f"{name} cannot be {verb}: access denied. {hint}", code="access_denied")
        if status == 416:
            return StorageError(f"{name} is shorter than the range that was requested.", code="out_of_range")
        if isinstance(error, exceptions.InvalidPathError | ValueError):
            text = f"{name}: the keys contain a name that cannot be read ({first_line(error)}). Rename the object."
            return StorageError(text, code="invalid_key")
        if 300 <= status < 500 and status not in RETRIED_STATUS:
            return StorageError(
                f"{name} cannot be {verb}: {first_line(error)}. Check credentials, region and endpoint."
            )
        return None

    def _unreachable(self, error: Exception, verb: str, key: str) -> StorageError:
        return StorageError(
            f"{self.join(key)} cannot be {verb}: the object store did not respond properly for {self.timeout:.0f} s "
            f"({first_line(error)}). Check network, endpoint and credentials, then type the same command again.",
            code="storage_unreachable",
        )

    def _print_note(self, error: Exception) -> None:
        """Print why nothing happens, at most once in `NOTE_AFTER` seconds, whatever the number of threads."""
        with self._lock:
            if time.monotonic() - self._noted < NOTE_AFTER:
                return
            self._noted = time.monotonic()
        print_stderr(f"note: {self.url} fails ({first_line(error)}); trying for up to {self.timeout:.0f} s.")


class _IncompleteError(Exception):
    """A response that is not an error, but cannot be complete: repeat the request."""


def import_obstore(url: str) -> Any:
    """Import obstore. Raises `ConfigError` with the install line without it."""
    try:
        import obstore
        import obstore.store
    except ImportError:
        raise ConfigError(f"{url} needs the package obstore: {how_to_install('remote')}.") from None
    return obstore


def operation_timeout() -> float:
    """Return how many seconds one operation may take, with all its retries."""
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    try:
        seconds = float(text) if text else OPERATION_TIMEOUT
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86_400:
        raise ConfigError(f"{TIMEOUT_VARIABLE} must be a number of seconds, such as 180, not {text!r}.")
    return seconds


def first_line(error: Exception) -> str:
    """Return what an error of obstore says, without the dump of its internals below."""
    return one_line(Exception(str(error).partition("\n")[0]), 300)


def _status(error: Exception) -> int:
    """Return the HTTP status of a failed request; 0 if there was no response.

    obstore has no attribute for it. Should its text change, requests are repeated that need not be; nothing else.
    """
    found = re.search(r"status code: (\d{3})\b", str(error))
    return int(found[1]) if found else 0


def _describe(meta: Any) -> StoredObject:
    return StoredObject(meta["path"], meta["size"], meta["e_tag"] or "")
