"""Blocks of shards on the local disk, shared by the processes of a machine, up to a number of bytes.

A shard in an object store is read in blocks: one request each, however many images a block has. A block is written
under a temporary name and renamed, so a kill at any time leaves either a complete block or none. A block belongs to one
version of a shard (its ETag), so that a changed shard is never mixed with the old one.
"""

import contextlib
import functools
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import filelock

from ..core.io import cache_dir, digest, wrap_cache_errors
from ..core.text import print_stderr
from .background import BackgroundTasks
from .storage import Storage

BLOCK_BYTES = 8 * 2**20  # one request of `data.object_storage`
READAHEAD = 16  # blocks of a shard that are downloaded ahead: more than a window of 1,024 images of 110 kB
_READAHEAD_FRACTION = 1 / 128  # of the capacity, at most, for the blocks ahead of one position
_READAHEAD_THREADS = 4
NUM_LOCKS = 64  # blocks that can be downloaded at the same time by all processes of a machine
LOCK_SECONDS = 30.0  # to wait for another process that downloads a block; it may have been stopped
RETRY_SECONDS = 60.0  # after a failed write, such as on a full disk, until the next attempt
_LEFTOVER_SECONDS = 3600.0  # after which a temporary file belongs to a process that was killed
_TOUCH_SECONDS = 60.0  # how exact the time of the last use is
# Blocks are removed once they take more than the first fraction of the capacity, until the second is left. Each process
# looks after it wrote the third, so up to 16 processes together stay below the capacity.
_HIGH, _LOW, _CHECK = 7 / 8, 3 / 4, 1 / 128


class ShardCache:
    """An LRU cache of blocks on disk. Thread-safe; the processes of a machine share it.

    Args:
        storage: Where the shards are.
        max_bytes: The capacity, of all datasets and processes of this machine together.
        folder: The directory of the blocks; by default in patchword's cache directory.
        block_bytes: The size of a block.

    Raises:
        DataError: The directory cannot be created.
    """

    def __init__(
        self, storage: Storage, max_bytes: float, folder: Path | None = None, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self.storage, self.max_bytes, self.block_bytes = storage, max_bytes, block_bytes
        self.folder = cache_dir() / "shards" if folder is None else folder
        with wrap_cache_errors(self.folder):
            (self.folder / "locks").mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._tasks = BackgroundTasks(_READAHEAD_THREADS)
        self._readahead = min(READAHEAD, int(max_bytes * _READAHEAD_FRACTION / block_bytes))
        self._last_ahead: dict[Path, int] = {}  # the last block of each shard that is or will be downloaded ahead
        self._unchecked = max_bytes  # bytes written since the last check; none was made yet
        self._queued: set[Path] = set()  # blocks that wait for the background
        self._warned = False
        self._retry_at: float | None = None  # when to write again after a failure; None if the last write succeeded

    def read(self, key: str, etag: str, size: int, start: int, stop: int) -> bytes:
        """Return the bytes `start` to `stop` of a shard.

        Args:
            key: The shard.
            etag: Its version.
            size: Its size in bytes.
            start: The first byte.
            stop: The end, exclusive.

        Raises:
            StorageError: It cannot be read, or is another version (code "object_changed").
        """
        folder = self.folder / digest(self.storage.url, key, etag, size, self.block_bytes)[:32]
        shard = _Shard(folder, key, etag, size)
        blocks = range(start // self.block_bytes, -(-stop // self.block_bytes))
        pieces = []
        for block in blocks:
            first, last = self._range_of(shard, block)
            wanted = slice(max(start, first) - first, min(stop, last) - first)
            data = read_block(shard.path(block), last - first, wanted.start, wanted.stop)
            if data is None and not self._may_write():  # not a whole block that will be thrown away
                return self.storage.read_range(key, start, stop, etag)
            self._schedule(shard, block, is_missing=data is None)
            pieces.append(self._download(shard, block)[wanted] if data is None else data)
        return b"".join(pieces)

    def _may_write(self) -> bool:
        """Whether to try to write a block: after a failure, only one in `RETRY_SECONDS`."""
        with self._lock:
            if self._retry_at is None:
                return True
            if time.monotonic() < self._retry_at:
                return False
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return True

    def _range_of(self, shard: "_Shard", block: int) -> tuple[int, int]:
        return block * self.block_bytes, min(shard.size, (block + 1) * self.block_bytes)

    def _schedule(self, shard: "_Shard", block: int, *, is_missing: bool) -> None:
        """Download the blocks after this one in the background, if the shard is being read from front to back."""
        with self._lock:
            if self._retry_at is not None:
                return
            ahead = self._last_ahead.setdefault(shard.folder, -1)
            if ahead < 0:  # a single image, as in the check that images can be read, is not the start of a sequence
                self._last_ahead[shard.folder] = block
                return
            first = block + 1 if is_missing else max(block, ahead) + 1
            last = min(-(-shard.size // self.block_bytes), block + 1 + self._readahead)
            if first >= last:
                return
            self._last_ahead[shard.folder] = last - 1
        for number in range(first, last):
            path = shard.path(number)
            with self._lock:
                is_needed = path not in self._queued and not path.exists()
                if is_needed and self._tasks.submit(functools.partial(self._download_ahead, shard, number)):
                    self._queued.add(path)

    def _download_ahead(self, shard: "_Shard", block: int) -> None:
        with self._lock:
            self._queued.discard(shard.path(block))
            if self._retry_at is not None:
                return
        self._download(shard, block)

    def _download(self, shard: "_Shard", block: int) -> bytes:
        """Download a block, and return it; other threads and processes that need it wait for it."""
        path, (start, stop) = shard.path(block), self._range_of(shard, block)
        number = int(digest(path.parent.name, path.name)[:8], 16) % NUM_LOCKS
        with self._locked(str(number)):
            if (data := read_block(path, stop - start, 0, stop - start)) is not None:
                return data
            data = self.storage.read_range(shard.key, start, stop, shard.etag)
            self._write(path, data)
        with self._lock:
            self._unchecked += len(data)
            is_due = self._unchecked >= self.max_bytes * _CHECK
            self._unchecked = 0 if is_due else self._unchecked
        if is_due:
            with self._locked("removal"):
                remove_oldest(self.folder, self.max_bytes)
        return data

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Exclude other threads and processes; where files cannot be locked, they do the same work twice."""
        lock = filelock.FileLock(self.folder / "locks" / name, thread_local=False)
        with contextlib.suppress(OSError, NotImplementedError):
            lock.acquire(timeout=LOCK_SECONDS)  # its error is an OSError
        try:
            yield
        finally:
            lock.release()

    def _write(self, path: Path, data: bytes) -> None:
        """Write a block. It is not flushed to disk: after a power failure a block has the wrong size, or is gone."""
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            temporary.replace(path)
            self._retry_at = None
        except FileNotFoundError:
            pass  # `remove_oldest` has just removed the directory, because it was empty
        except OSError as error:  # such as a full disk: no reason to stop a run
            self._retry_at = time.monotonic() + RETRY_SECONDS
            with contextlib.suppress(OSError):
                temporary.unlink()
            if not self._warned:
                self._warned = True
                reason = error.strerror or error
                print_stderr(f"note: {self.folder} cannot be written ({reason}): shards are read without a cache.")


class _Shard(NamedTuple):
    """One version of a shard, and the directory of its blocks."""

    folder: Path
    key: str
    etag: str
    size: int

    def path(self, block: int) -> Path:
        return self.folder / f"{block:06d}"


def read_block(path: Path, length: int, start: int, stop: int) -> bytes | None:
    """Return some bytes of a block and mark it as used; None if it is missing or incomplete."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size != length:
                return None
            file.seek(start)
            data = file.read(stop - start)
        if time.time() - status.st_mtime > _TOUCH_SECONDS:
            os.utime(path)
    except OSError:  # removed by another process, for one
        return None
    return data if len(data) == stop - start else None


def remove_oldest(folder: Path, max_bytes: float) -> None:
    """Remove the least recently used blocks if all blocks together are close to `max_bytes`."""
    blocks = []
    for path in folder.glob("*/*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            if path.name.startswith(".") and time.time() - status.st_mtime > _LEFTOVER_SECONDS:
                path.unlink()
            elif path.parent.name != "locks":
                blocks.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in blocks)
    if total <= _HIGH * max_bytes:
        return
    for _, size, path in sorted(blocks):
        with contextlib.suppress(OSError):  # another process removed it, or reads it on Windows
            path.unlink()
        total -= size
        if total <= _LOW * max_bytes:
            break
    for parent in {path.parent for _, _, path in blocks}:
        with contextlib.suppress(OSError):  # not empty
            parent.rmdir()
