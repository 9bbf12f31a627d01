"""Download a file over HTTP, completely and verified, or not at all.

Owns transfer, resuming, retries and checksums. It does not know the content of the file. Bytes go to TARGET.part, which
survives a broken connection or a killed process; only a verified file is renamed to TARGET. Proxies are taken from the
environment.
"""

import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.io import file_digest, locked, move_into_place, wrap_cache_errors
from ..errors import DataError

Progress = Callable[[int, int | None], object]  # bytes so far, total bytes if known

TIMEOUT = 20.0  # seconds without any byte
MAX_TRIES = 4  # consecutive tries with less than MIN_PROGRESS bytes
MIN_PROGRESS = 1 << 20
_BLOCK = 1 << 17
_BACKOFF = 0.25  # seconds; doubled after each try


class DownloadError(DataError):
    """Raised when a download failed at every URL; the data may still be available from another origin."""

    code = "unreachable"


class _PermanentError(Exception):
    """This URL does not have the file; a retry is useless."""


class _TransientError(Exception):
    """The transfer was interrupted; a retry may succeed."""


@dataclass(frozen=True)
class Remote:
    """A file available at any of several URLs, with its checksum and size."""

    name: str
    urls: tuple[str, ...]
    md5: str | None = None
    sha256: str | None = None
    size: int | None = None  # bytes

    def fetch(self, folder: Path, on_progress: Progress | None = None) -> Path:
        """Download the file into the folder, unless it is already there."""
        return download(
            self.urls,
            folder / self.name,
            md5=self.md5,
            sha256=self.sha256,
            size=self.size,
            on_progress=on_progress,
        )


@dataclass(frozen=True)
class _Job:
    target: Path
    checksums: dict[str, str]  # algorithm: hexadecimal digest
    size: int | None
    on_progress: Progress | None
    timeout: float

    @property
    def part(self) -> Path:
        return self.target.with_name(f"{self.target.name}.part")

    @property
    def metadata(self) -> Path:
        """Metadata of the partial file: its origin, so that the rest comes from the same version of the same file."""
        return self.target.with_name(f"{self.target.name}.part.json")

    def bytes_done(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def discard(self) -> None:
        self.part.unlink(missing_ok=True)
        self.metadata.unlink(missing_ok=True)


def download(
    urls: str | Sequence[str],
    target: str | Path,
    *,
    sha256: str | None = None,
    md5: str | None = None,
    size: int | None = None,
    on_progress: Progress | None = None,
    timeout: float = TIMEOUT,
) -> Path:
    """Download a file from the first URL that has it, unless `target` already exists.

    A file that the user placed there is accepted if it is the right one. Raises `DownloadError` if all URLs fail, and
    `DataError` if the file cannot be written or a wrong file is in its place.

    Args:
        sha256, md5, size: expected properties; each that is given is checked.
        on_progress: called with the number of bytes so far, and the total if known.
        timeout: seconds to wait for a response, and for each further byte.
    """
    checksums = {name: value for name, value in (("sha256", sha256), ("md5", md5)) if value}
    job = _Job(Path(target), checksums, size, on_progress, timeout)
    with wrap_cache_errors(job.target):
        if not job.target.exists():
            with locked(job.target):
                if not job.target.exists():  # another process may have been faster
                    _download_any(job, [urls] if isinstance(urls, str) else urls)
                    return job.target
        if mismatch := _find_mismatch(job, job.target):
            raise DataError(f"{job.target} is not the expected file: {mismatch}. Delete it and run again.")
    return job.target


def _download_any(job: _Job, urls: Sequence[str]) -> None:
    failures = []
    for url in urls:
        try:
            _download_with_retries(job, url)
            return
        except (_PermanentError, _TransientError) as error:
            failures.append(f"\n  {url}: {error}")
    checksums = ", ".join(f"{name} {value}" for name, value in job.checksums.items())
    by_hand = f"{job.target} ({checksums})" if checksums else f"{job.target}"
    raise DownloadError(
        f"Cannot download {job.target.name}.{''.join(failures)}\n"
        f"Check the connection and run again (the download resumes), or download the file manually to {by_hand}."
    )


def _download_with_retries(job: _Job, url: str) -> None:
    """Retry until the file is complete or the tries make no progress."""
    tries, best = 0, job.bytes_done()
    while True:
        try:
            resumed = _transfer(job, url)
            _accept(job, resumed)
            return
        except _TransientError:
            done = job.bytes_done()
            tries = 1 if done >= best + MIN_PROGRESS else tries + 1
            best = max(best, done)
            if tries == MAX_TRIES:
                raise
            time.sleep(_BACKOFF * 2**tries)


def _transfer(job: _Job, url: str) -> bool:
    """Complete the partial file; returns whether the transfer was resumed."""
    offset, validator = _resumable(job, url)
    if offset and offset == job.size:
        return True
    _require_disk_space(job, offset)
    with _open_url(job, url, offset, validator) as response:
        if not _is_resumed(response, offset):
            offset = 0  # the server sends the whole file: it cannot resume, or has a new version
        length = response.headers.get("Content-Length", "")
        total = offset + int(length) if length.isdigit() else None
        if job.size is not None and total not in (None, job.size):
            raise _PermanentError(f"it offers {total:,} bytes instead of {job.size:,}")
        _save_metadata(job, url, response)
        _receive(job, response, offset, total)
    if total is not None and job.bytes_done() < total:
        raise _TransientError(f"the connection ended after {job.bytes_done():,} of {total:,} bytes")
    return offset > 0


def _resumable(job: _Job, url: str) -> tuple[int, str | None]:
    """Return the number of bytes to keep, and the ETag or date by which the server knows its file is unchanged."""
    try:
        metadata = json.loads(job.metadata.read_text())
        known, validator = metadata["url"] == url, metadata["validator"]
    except (OSError, ValueError, KeyError, TypeError):
        known, validator = False, None
    # Without a validator, only a checksum can detect pieces of different versions.
    if known and (validator or job.checksums):
        return job.bytes_done(), validator
    return 0, None


def _require_disk_space(job: _Job, offset: int) -> None:
    free = shutil.disk_usage(job.target.parent).free
    if job.size is not None and free < job.size - offset:
        raise DataError(
            f"{job.target.name} needs {job.size - offset:,} more bytes, but the disk of {job.target.parent} has only "
            f"{free:,} free. Free some space, or set PATCHWORD_CACHE to a folder on another disk, and run again."
        )


def _open_url(job: _Job, url: str, offset: int, validator: str | None) -> http.client.HTTPResponse:
    headers = {"User-Agent": "patchword", "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
        if validator:
            headers["If-Range"] = validator
    try:
        # A new opener: the shared one keeps the proxies of its first use.
        opener = urllib.request.build_opener()
        request = urllib.request.Request(url, headers=headers)
        response: http.client.HTTPResponse = opener.open(request, timeout=job.timeout)
        return response
    except urllib.error.HTTPError as error:
        error.close()
        reason = f"the server returned {error.code} {error.reason}"
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            job.discard()  # the partial file does not match the current version
            raise _TransientError(reason) from error
        if error.code >= 500 or error.code in (http.HTTPStatus.REQUEST_TIMEOUT, http.HTTPStatus.TOO_MANY_REQUESTS):
            raise _TransientError(reason) from error
        raise _PermanentError(reason) from error
    except urllib.error.URLError as error:  # no such host, no route, connection refused, certificate not trusted
        raise _PermanentError(getattr(error.reason, "strerror", None) or str(error.reason)) from error
    except TimeoutError as error:
        raise _TransientError(f"no response within {job.timeout:g} seconds") from error
    except (OSError, http.client.HTTPException) as error:
        raise _TransientError(str(error) or type(error).__name__) from error


def _is_resumed(response: http.client.HTTPResponse, offset: int) -> bool:
    """Whether the response continues at `offset`."""
    if not offset or response.status != http.HTTPStatus.PARTIAL_CONTENT:
        return False
    start = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    if start is None or int(start[1]) != offset:
        raise _PermanentError(f"it ignored the requested start at byte {offset}")
    return True


def _save_metadata(job: _Job, url: str, response: http.client.HTTPResponse) -> None:
    etag = response.headers.get("ETag", "")
    # A weak ETag ("W/...") guarantees equivalent content, not identical bytes.
    validator = etag if etag.startswith('"') else response.headers.get("Last-Modified")
    job.metadata.write_text(json.dumps({"url": url, "validator": validator}))


def _receive(job: _Job, response: http.client.HTTPResponse, offset: int, total: int | None) -> None:
    with open(job.part, "ab" if offset else "wb") as file:
        done = offset
        while block := _read(job, response):
            file.write(block)
            done += len(block)
            if job.size is not None and done > job.size:
                break  # `_accept` refuses it
            if job.on_progress is not None:
                job.on_progress(done, total)
        file.flush()
        os.fsync(file.fileno())


def _read(job: _Job, response: http.client.HTTPResponse) -> bytes:
    """Read what has arrived, at most one block: waiting for whole blocks would lose more if the process is killed."""
    try:
        return response.read1(_BLOCK)
    except TimeoutError as error:
        raise _TransientError(f"no data for {job.timeout:g} seconds") from error
    except (OSError, http.client.HTTPException) as error:
        raise _TransientError(f"the connection broke: {error}") from error


def _accept(job: _Job, resumed: bool) -> None:
    mismatch = _find_mismatch(job, job.part)
    if mismatch is None:
        move_into_place(job.part, job.target)
    job.discard()
    if mismatch is None:
        return
    message = f"the downloaded file is wrong and was deleted: {mismatch}"
    # Pieces of two versions may have been joined: a download in one piece may still be right.
    raise _TransientError(message) if resumed else _PermanentError(message)


def _find_mismatch(job: _Job, path: Path) -> str | None:
    """Describe how a file differs from the expected size and checksums; None if it does not."""
    if job.size is not None and path.stat().st_size != job.size:
        return f"it has {path.stat().st_size:,} bytes instead of {job.size:,}"
    for name, expected in job.checksums.items():
        if (actual := file_digest(path, name)) != expected:
            return f"its {name} is {actual} instead of {expected}"
    return None
