"""Local directories and object stores (s3://, gs://, az://) behind one small interface.

Owns keys, versions of objects (ETags) and create-only writes. It does not know what objects contain. A local directory
is `LocalStorage`; `data.object_storage` reads object stores, and imports obstore only when one is opened.
"""

import errno
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..core.io import atomic_file, sync
from ..errors import StorageError

REMOTE_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")
# File systems without hard links, such as FAT and some network disks.
_NO_LINKS = {
    getattr(errno, name)
    for name in ("EPERM", "ENOTSUP", "EOPNOTSUPP", "ENOSYS", "EMLINK", "EXDEV")
    if hasattr(errno, name)
}


@dataclass(frozen=True)
class StoredObject:
    """An object or a file.

    Attributes:
        key: Its name below the storage, with "/" between folders.
        size: Its size in bytes.
        etag: An identifier that changes when the content does.
    """

    key: str
    size: int
    etag: str


class Storage:
    """Objects below a directory or a URL; `open_storage` makes one. All methods are thread-safe.

    Attributes:
        url (str): The directory or the URL, without a slash at the end.
    """

    url: str

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Yield all objects in a folder and its subfolders, sorted by key, a page at a time.

        Args:
            prefix: The folder: "a" and "a/" stand for the keys that start with "a/". "" stands for all.

        Raises:
            StorageError: There is no such directory or bucket (code "object_not_found"), or it cannot be listed. A
                folder of a bucket that has no objects yields nothing.
        """
        raise NotImplementedError

    def head(self, key: str) -> StoredObject | None:
        """Return size and ETag of an object; None if it does not exist."""
        raise NotImplementedError

    def read(self, key: str, etag: str | None = None) -> bytes:
        """Return the content of an object.

        Args:
            key: Its key.
            etag: The version that is expected.

        Raises:
            StorageError: It does not exist (code "object_not_found"), is not the expected version ("object_changed"),
                or cannot be read ("access_denied", "storage_unreachable").
        """
        raise NotImplementedError

    def read_range(self, key: str, start: int, stop: int, etag: str | None = None) -> bytes:
        """Return bytes `start` to `stop` (exclusive) of an object; fewer if it ends before.

        The other arguments and the errors are those of `read`.
        """
        raise NotImplementedError

    def create(self, key: str, data: bytes) -> bool:
        """Create an object, completely or not at all; an existing one is never changed.

        Returns:
            False if it exists already: the first writer wins.

        Raises:
            StorageError: It cannot be written.
        """
        raise NotImplementedError

    def replace(self, key: str, data: bytes) -> None:
        """Write an object, or replace it at once by another version.

        Raises:
            StorageError: It cannot be written; an existing one is unchanged.
        """
        raise NotImplementedError

    def join(self, key: str) -> str:
        """Return the name of an object in messages, such as "s3://bucket/photos/1.jpg"."""
        return f"{self.url}/{key}" if key else self.url


def is_remote(reference: object) -> bool:
    """Whether a reference is the URL of an object store, such as "s3://bucket/photos"."""
    scheme, separator, _ = str(reference).partition("://")
    return bool(separator) and scheme.lower() in REMOTE_SCHEMES


def open_storage(reference: str | Path) -> Storage:
    """Open a local directory, which need not exist yet, or the URL of an object store.

    Credentials, region and endpoint of an object store come from the environment. Nothing is requested
    yet.

    Raises:
        ConfigError: obstore is not installed.
        StorageError: The URL is invalid.
    """
    if is_remote(reference):
        from .object_storage import ObjectStorage

        return ObjectStorage(str(reference))
    return LocalStorage(Path(reference))


def open_object(reference: str | Path) -> tuple[Storage, str]:
    """Return the storage and the key of a single file or object: "s3://bucket/a/b.tar" is "b.tar" in s3://bucket/a."""
    if not is_remote(reference):
        path = Path(reference).expanduser()
        return LocalStorage(path.parent), path.name
    parent, _, key = str(reference).rstrip("/").rpartition("/")
    if parent.endswith("/"):
        raise StorageError(f"{reference} is a bucket, not an object: add a key.", code="invalid_reference")
    return open_storage(parent), key


class StorageOpener:
    """Opens objects by their URLs or paths; those in one bucket share a client and its connections. Thread-safe."""

    def __init__(self) -> None:
        self._buckets: dict[str, Storage] = {}
        self._lock = threading.Lock()

    def open_object(self, reference: str) -> tuple[Storage, str]:
        """Return a storage and a key, as `open_object`, but with the whole bucket as the storage."""
        if not is_remote(reference):
            return open_object(reference)
        scheme, _, rest = reference.partition("://")
        bucket, _, key = rest.rstrip("/").partition("/")
        if not bucket or not key or key.startswith("/"):
            return open_object(reference)  # for its error
        url = f"{scheme.lower()}://{bucket}"
        with self._lock:
            if url not in self._buckets:
                self._buckets[url] = open_storage(url)
            return self._buckets[url], key


class LocalStorage(Storage):
    """Files below a directory.

    Hidden files and directories are not listed. Symbolic links are followed, but no directory is visited twice.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser()
        self.url = str(self.root)

    def join(self, key: str) -> str:
        return os.path.join(self.root, *key.split("/")) if key else self.url

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        folder = prefix.strip("/")
        try:
            yield from self._walk(f"{folder}/" if folder else "", set())
        except OSError as error:
            raise storage_error(error, "listed", error.filename or self.join(folder)) from None

    def _walk(self, folder: str, visited: set[tuple[int, int]]) -> Iterator[StoredObject]:
        """Yield the files below a folder, a directory at a time, in the order of their keys."""
        path = self.join(folder)
        status = os.stat(path)
        if (status.st_dev, status.st_ino) in visited:
            return
        visited.add((status.st_dev, status.st_ino))
        with os.scandir(path) as entries:
            shown = (entry for entry in entries if not entry.name.startswith("."))
            # "a-b" comes between "a" and "a/c" in an object store: a directory is sorted with its slash.
            names = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in shown)
        for name in names:
            if name.endswith("/"):
                yield from self._walk(folder + name, visited)
            elif (found := self.head(folder + name)) is not None:
                yield found

    def head(self, key: str) -> StoredObject | None:
        try:
            status = os.stat(self.join(key))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise storage_error(error, "read", self.join(key)) from None
        return _describe(key, status) if stat.S_ISREG(status.st_mode) else None

    def read(self, key: str, etag: str | None = None) -> bytes:
        return self._read(key, 0, None, etag)

    def read_range(self, key: str, start: int, stop: int, etag: str | None = None) -> bytes:
        return self._read(key, start, stop, etag)

    def _read(self, key: str, start: int, stop: int | None, etag: str | None) -> bytes:
        try:
            with open(self.join(key), "rb") as file:
                file.seek(start)
                data = file.read() if stop is None else file.read(max(0, stop - start))
                # Checked afterwards, so that a change during the read is found, too.
                if etag and _describe(key, os.fstat(file.fileno())).etag != etag:
                    raise object_changed(self.join(key))
                return data
        except OSError as error:
            raise storage_error(error, "read", self.join(key)) from None

    def create(self, key: str, data: bytes) -> bool:
        target = Path(self.join(key))
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                return False
            try:
                with open(temporary, "xb") as file:
                    file.write(data)
                sync(temporary)
                created = _move_new(temporary, target)
                sync(target.parent)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise storage_error(error, "written", str(target)) from None
        return created

    def replace(self, key: str, data: bytes) -> None:
        target = Path(self.join(key))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(target) as temporary:
                temporary.write_bytes(data)
        except OSError as error:
            raise storage_error(error, "written", str(target)) from None


def _move_new(source: Path, target: Path) -> bool:
    """Give a complete file its name, unless a file of that name exists."""
    try:
        os.link(source, target)  # atomic, and fails if the target exists
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Without hard links there is a gap between check and rename; a part is the same whoever writes it.
        if target.exists():
            return False
        os.replace(source, target)
    return True


def _describe(key: str, status: os.stat_result) -> StoredObject:
    return StoredObject(key, status.st_size, f"{status.st_size:x}-{status.st_mtime_ns:x}")


def object_changed(name: str) -> StorageError:
    """Make the error for an object that is not the expected version."""
    return StorageError(
        f"{name} has changed since it was listed. Start again with a new output.", code="object_changed"
    )


def storage_error(error: OSError, verb: str, name: str) -> StorageError:
    """Convert an error of the file system to a sentence with what to do."""
    if isinstance(error, FileNotFoundError):
        return StorageError(f"{name} does not exist. Check the path.", code="object_not_found")
    if isinstance(error, NotADirectoryError | IsADirectoryError) and verb == "read":  # as `head` says
        return StorageError(f"{name} cannot be read ({error.strerror}). Check the path.", code="object_not_found")
    if isinstance(error, PermissionError):
        return StorageError(f"{name} cannot be {verb}: permission denied. Check its permissions.", code="access_denied")
    return StorageError(f"{name} cannot be {verb} ({error.strerror or error}).")
