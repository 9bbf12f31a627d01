"""Fetching one file over HTTP so that it arrives whole and right, or not at all.

Owns transfer, resumption, retries and checksums. It does not know what is in the file. Bytes are collected in
TARGET.part, which outlives a broken connection and a killed process; only a checked file gets the name TARGET.
Proxies are taken from the environment.
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

Progress = Callable[[int, int | None], object]  # bytes so far, bytes in all where that is known

TIMEOUT = 20.0  # seconds without a single byte
TRIES = 4  # in a row that bring less than PROGRESS bytes
PROGRESS = 1 << 20
_BLOCK = 1 << 17
_PAUSE = 0.25  # seconds; doubled for each try


class DownloadError(DataError):
    """A download that failed at every address. The data may still be available from another source."""

    code = "unreachable"


class _Refused(Exception):
    """This address does not have the file."""


class _Broken(Exception):
    """The transfer broke off; another try may get further."""


@dataclass(frozen=True)
class Remote:
    """A file that is to be had from any of several addresses, and how to know it."""

    name: str
    urls: tuple[str, ...]
    md5: str | None = None
    sha256: str | None = None
    size: int | None = None  # bytes

    def fetch(self, folder: Path, on_progress: Progress | None = None) -> Path:
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
    checksums: dict[str, str]  # name of the algorithm: hexadecimal digest
    size: int | None
    on_progress: Progress | None
    timeout: float

    @property
    def part(self) -> Path:
        return self.target.with_name(f"{self.target.name}.part")

    @property
    def note(self) -> Path:
        """Beside the part: where it came from, so that the rest is taken from the same version of the same file."""
        return self.target.with_name(f"{self.target.name}.part.json")

    def have(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def discard(self) -> None:
        self.part.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)


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
    """The file `target`, fetched from the first address that gives it, unless it is there already.

    A file that the user has put there is taken, if it is the right one. Raises `Unreachable` if no address gave it, and
    `DataError` if it cannot be written or a wrong file is in its place.

    Args:
        sha256, md5, size: what the file must have; each that is given is checked.
        on_progress: called with the bytes that are there and those that there will be, if that is known.
        timeout: seconds to wait for an answer, and for each further byte.
    """
    checksums = {name: value for name, value in (("sha256", sha256), ("md5", md5)) if value}
    job = _Job(Path(target), checksums, size, on_progress, timeout)
    with wrap_cache_errors(job.target):
        if not job.target.exists():
            with locked(job.target):
                if not job.target.exists():  # another process may have been faster
                    _fetch_any(job, [urls] if isinstance(urls, str) else urls)
                    return job.target
        if fault := _fault(job, job.target):
            raise DataError(f"{job.target} is not the file that belongs there: {fault}. Delete it, and run again.")
    return job.target


def _fetch_any(job: _Job, urls: Sequence[str]) -> None:
    failures = []
    for url in urls:
        try:
            _fetch(job, url)
            return
        except (_Refused, _Broken) as error:
            failures.append(f"\n  {url}: {error}")
    proof = ", ".join(f"{name} {value}" for name, value in job.checksums.items())
    by_hand = f"{job.target}, with {proof}" if proof else f"{job.target}"
    raise DownloadError(
        f"Could not fetch {job.target.name}.{''.join(failures)}\n"
        f"Check the connection and run again (what has arrived is kept), or put the file there by hand: {by_hand}."
    )


def _fetch(job: _Job, url: str) -> None:
    """Try until the file is there or the tries bring nothing more."""
    tries, best = 0, job.have()
    while True:
        try:
            resumed = _transfer(job, url)
            _accept(job, resumed)
            return
        except _Broken:
            have = job.have()
            tries = 1 if have >= best + PROGRESS else tries + 1
            best = max(best, have)
            if tries == TRIES:
                raise
            time.sleep(_PAUSE * 2**tries)


def _transfer(job: _Job, url: str) -> bool:
    """Bring the part to its full length; say whether that went on from bytes that were there before."""
    offset, validator = _resumable(job, url)
    if offset and offset == job.size:
        return True
    _require_room(job, offset)
    with _opened(job, url, offset, validator) as response:
        if not _continues(response, offset):
            offset = 0  # the server sends everything, since it cannot do otherwise or has another version by now
        length = response.headers.get("Content-Length", "")
        total = offset + int(length) if length.isdigit() else None
        if job.size is not None and total not in (None, job.size):
            raise _Refused(f"it offers {total:,} bytes where {job.size:,} are expected")
        _note(job, url, response)
        _collect(job, response, offset, total)
    if total is not None and job.have() < total:
        raise _Broken(f"the connection ended after {job.have():,} of {total:,} bytes")
    return offset > 0


def _resumable(job: _Job, url: str) -> tuple[int, str | None]:
    """(how many bytes of the part may be kept, what the server should compare to know its file unchanged)."""
    try:
        note = json.loads(job.note.read_text())
        known, validator = note["url"] == url, note["validator"]
    except (OSError, ValueError, KeyError, TypeError):
        known, validator = False, None
    # Without a validator only a checksum can tell whether two pieces belong together.
    if known and (validator or job.checksums):
        return job.have(), validator
    return 0, None


def _require_room(job: _Job, offset: int) -> None:
    free = shutil.disk_usage(job.target.parent).free
    if job.size is not None and free < job.size - offset:
        raise DataError(
            f"{job.target.name} needs {job.size - offset:,} more bytes, and the disk of {job.target.parent} has "
            f"{free:,} free. Make room, or set PATCHWORD_CACHE to a folder on another disk, and run again."
        )


def _opened(job: _Job, url: str, offset: int, validator: str | None) -> http.client.HTTPResponse:
    headers = {"User-Agent": "patchword", "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
        if validator:
            headers["If-Range"] = validator
    try:
        # An opener of our own: the shared one remembers the proxies of its first use.
        opener = urllib.request.build_opener()
        return opener.open(urllib.request.Request(url, headers=headers), timeout=job.timeout)
    except urllib.error.HTTPError as error:
        error.close()
        answer = f"the server answered {error.code} {error.reason}"
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            job.discard()  # the part is no beginning of the file that is there now
            raise _Broken(answer) from error
        if error.code >= 500 or error.code in (http.HTTPStatus.REQUEST_TIMEOUT, http.HTTPStatus.TOO_MANY_REQUESTS):
            raise _Broken(answer) from error
        raise _Refused(answer) from error
    except urllib.error.URLError as error:  # no such host, no route, connection refused, certificate not trusted
        raise _Refused(getattr(error.reason, "strerror", None) or str(error.reason)) from error
    except TimeoutError as error:
        raise _Broken(f"no answer for {job.timeout:g} seconds") from error
    except (OSError, http.client.HTTPException) as error:
        raise _Broken(str(error) or type(error).__name__) from error


def _continues(response: http.client.HTTPResponse, offset: int) -> bool:
    """Is this the rest, from `offset` on?"""
    if not offset or response.status != http.HTTPStatus.PARTIAL_CONTENT:
        return False
    start = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    if start is None or int(start[1]) != offset:
        raise _Refused(f"asked for bytes from {offset} on, it sends others")
    return True


def _note(job: _Job, url: str, response: http.client.HTTPResponse) -> None:
    etag = response.headers.get("ETag", "")
    # A weak ETag ("W/...") promises like content, not like bytes.
    validator = etag if etag.startswith('"') else response.headers.get("Last-Modified")
    job.note.write_text(json.dumps({"url": url, "validator": validator}))


def _collect(job: _Job, response: http.client.HTTPResponse, offset: int, total: int | None) -> None:
    with open(job.part, "ab" if offset else "wb") as file:
        done = offset
        while block := _read(job, response):
            file.write(block)
            done += len(block)
            if job.size is not None and done > job.size:
                break  # `_accept` will refuse it
            if job.on_progress is not None:
                job.on_progress(done, total)
        file.flush()
        os.fsync(file.fileno())


def _read(job: _Job, response: http.client.HTTPResponse) -> bytes:
    """What has arrived, at most a block: waiting for whole blocks would keep less when we are killed."""
    try:
        return response.read1(_BLOCK)
    except TimeoutError as error:
        raise _Broken(f"nothing came for {job.timeout:g} seconds") from error
    except (OSError, http.client.HTTPException) as error:
        raise _Broken(f"the connection broke: {error}") from error


def _accept(job: _Job, resumed: bool) -> None:
    fault = _fault(job, job.part)
    if fault is None:
        move_into_place(job.part, job.target)
    job.discard()
    if fault is None:
        return
    message = f"what came is not the file, and was deleted: {fault}"
    # Pieces of two versions may have been put together: a transfer in one go may still be right.
    raise _Broken(message) if resumed else _Refused(message)


def _fault(job: _Job, path: Path) -> str | None:
    """What tells the file from the one that is wanted."""
    if job.size is not None and path.stat().st_size != job.size:
        return f"it has {path.stat().st_size:,} bytes where {job.size:,} are expected"
    for name, expected in job.checksums.items():
        if (found := file_digest(path, name)) != expected:
            return f"its {name} is {found} where {expected} is expected"
    return None
