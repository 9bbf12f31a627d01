"""Tell images that cannot be read from a storage that cannot, before errors become final rows of a part.

A disk that is not mounted and credentials that have expired look like missing and denied images. A part is never
changed, so such errors must end a job, which can be continued, instead of becoming rows.
"""

import os
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from ..data.storage import Storage, is_remote, storage_error
from ..errors import OBJECT_CODES, StorageError

NUM_PROBE_THREADS = 16


class Location(NamedTuple):
    """Where an image is.

    Attributes:
        scope: What shares permissions: a root, or the bucket of a URL.
        storage: Its storage.
        key: Its key.
        was_listed: Whether it existed when the job started.
    """

    scope: Hashable
    storage: Storage
    key: str
    was_listed: bool


class EntryErrors:
    """What happened to the images of a chunk so far; thread-safe."""

    def __init__(self) -> None:
        self._readable: dict[Hashable, Location] = {}
        self._denied: dict[Hashable, dict[tuple[str, str], tuple[Location, StorageError]]] = {}
        self._missing: StorageError | None = None
        self._any_found = False

    def add_readable(self, location: Location) -> None:
        """Remember an image that could be read."""
        self._any_found = True
        self._readable.setdefault(location.scope, location)

    def add(self, location: Location, error: StorageError) -> None:
        """Remember an error.

        Raises:
            StorageError: It is not about this image alone.
        """
        if error.code == "access_denied":
            self._any_found = True
            denied = self._denied.setdefault(location.scope, {})
            denied.setdefault((location.storage.url, location.key), (location, error))
        elif error.code not in OBJECT_CODES:
            raise error
        elif error.code != "object_not_found":
            self._any_found = True
        elif location.was_listed:
            _require_folder(location.storage)
            self._missing = self._missing or error

    def check(self) -> None:
        """Check that the errors so far are about single images, once all images of a chunk were read.

        Raises:
            StorageError: Access is denied to everything, or was for a while; or all images are missing.
        """
        if self._missing is not None and not self._any_found:
            raise StorageError(
                f"All images of a part have disappeared since they were listed, such as this one: {self._missing} If "
                f"they are on a disk that is not mounted, mount it, then type the same command again.",
                code="object_not_found",
            )
        for scope, denied in self._denied.items():
            self._check_denied(scope, [location for location, _ in denied.values()], next(iter(denied.values()))[1])

    def _check_denied(self, scope: Hashable, denied: list[Location], error: StorageError) -> None:
        readable = self._readable.get(scope)
        if readable is None or _is_denied(readable):
            raise error
        with ThreadPoolExecutor(NUM_PROBE_THREADS) as pool:
            if all(pool.map(_is_denied, denied)):
                return
        raise StorageError(
            f"Access was denied for a while, and is not any more ({error}). Type the same command again.",
            code="access_denied",
        )


def _is_denied(location: Location) -> bool:
    try:
        location.storage.read_range(location.key, 0, 1)
    except StorageError as error:
        if error.code == "access_denied":
            return True
        if error.code not in OBJECT_CODES:
            raise
    return False


def _require_folder(storage: Storage) -> None:
    """Check that the folder of missing images exists, and is not the empty directory of a disk that is not mounted."""
    if is_remote(storage.url):
        return
    try:
        with os.scandir(storage.url) as entries:
            if next(entries, None) is not None:
                return
    except (FileNotFoundError, NotADirectoryError):
        pass
    except PermissionError:
        return  # it exists
    except OSError as error:  # such as a stale handle of a network disk
        raise storage_error(error, "listed", storage.url) from None
    raise StorageError(
        f"{storage.url} had images when they were listed, and is missing or empty now. Is its disk mounted on this "
        f"machine? Then type the same command again.",
        code="object_not_found",
    )
