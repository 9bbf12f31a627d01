"""Read the images of a manifest: bytes by bytes ahead of the model, exactly the versions that were listed."""

import bisect
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from PIL import Image

from ..data.formats.arrow_rows import find_image_column, split_cell
from ..data.image_decoder import Mode
from ..data.sources import decode_image
from ..data.storage import Storage, StorageOpener, StoredObject, is_remote, open_storage
from ..data.storage_file import open_file
from ..errors import DataError, ImageError, StorageError
from .entry_errors import EntryErrors, Location
from .input_listing import NO_ROOT, ImageEntry, InputRoot, entry_name, open_parquet_table

# Requests in flight: enough to hide 20 ms of latency at a few hundred images per second.
NUM_READ_THREADS = 16
MAX_READ_AHEAD = 64  # images ...
MAX_READ_AHEAD_BYTES = 256 * 2**20  # ... and bytes that wait for the model
# Neighbors in a tar that one request reads: with images of 100 KB, a sixteenth of the requests.
MAX_GROUP, MAX_GROUP_BYTES, MAX_GAP_BYTES = 16, 4 * 2**20, 64 * 2**10
MAX_IMAGE_BYTES = 512 * 2**20  # a larger file is not an image; it would fill the memory


class EntryReader:
    """Reads entries of one manifest; thread-safe.

    Attributes:
        errors: What happened to the entries; `errors.check()` tells whether the errors may become final.
    """

    def __init__(self, roots: Sequence[InputRoot]) -> None:
        self.roots = roots
        self.errors = EntryErrors()
        self._storages: dict[int, Storage] = {}
        self._opener = StorageOpener()
        self._table: tuple[tuple[int, str], _ParquetImages] | None = None
        self._lock = threading.Lock()

    def name(self, entry: ImageEntry) -> str:
        """Return the name of an image, as in the column `path`."""
        return entry_name(self.roots, entry)

    def read(self, entry: ImageEntry) -> bytes:
        """Return the bytes of an image file.

        Raises:
            ImageError: This image cannot be read; others may.
            StorageError: It is not about this image alone: the object store does not respond, or a disk fails.
        """
        if entry.kind == "damaged":
            raise ImageError(entry.member, name=self.name(entry), code="image_damaged")
        if entry.size > MAX_IMAGE_BYTES:
            reason = f"it has {entry.size:,} bytes; at most {MAX_IMAGE_BYTES:,} are read."
            raise ImageError(reason, name=self.name(entry), code="image_too_large")
        location = self._locate(entry)
        try:
            data = self._read(entry, location)
        except StorageError as error:
            self.errors.add(location, error)
            raise ImageError(f"{error}", code=error.code) from error
        except ImageError:
            raise
        except DataError as error:
            raise ImageError(f"{error}", code="image_damaged") from error
        self.errors.add_readable(location)
        return data

    def read_group(self, entries: Sequence[ImageEntry]) -> list[bytes | ImageError]:
        """Return the bytes of entries, or why they cannot be read; neighbors in a tar are one request."""
        first, last = entries[0], entries[-1]
        if len(entries) > 1:
            try:
                location = self._locate(first)
                stop = last.start + last.size
                data = location.storage.read_range(location.key, first.start, stop, first.etag)
                self.errors.add_readable(location)
                return [data[entry.start - first.start :][: entry.size] for entry in entries]
            except StorageError as error:
                if error.code == "storage_unreachable":
                    raise  # others are raised again, or become the errors of single images
        results: list[bytes | ImageError] = []
        for entry in entries:
            try:
                results.append(self.read(entry))
            except ImageError as error:
                results.append(error)
        return results

    def decode(self, entry: ImageEntry, *, mode: Mode, min_size: tuple[int, int] | None = None) -> Image.Image:
        """Read and decode an image, as `Source.read` does."""
        return decode_image(self.read(entry), self.name(entry), mode, min_size)

    def _read(self, entry: ImageEntry, location: Location) -> bytes:
        storage, key = location.storage, location.key
        if entry.kind == "tar":
            return storage.read_range(key, entry.start, entry.start + entry.size, entry.etag)
        if entry.kind == "parquet":
            return self._read_row(storage, entry)
        return storage.read(key, entry.etag)

    def _locate(self, entry: ImageEntry) -> Location:
        was_listed = bool(entry.etag)
        if entry.root == NO_ROOT:
            storage, key = self._opener.open_object(entry.key)
            return Location(storage.url if is_remote(storage.url) else "", storage, key, was_listed)
        with self._lock:
            if entry.root not in self._storages:
                self._storages[entry.root] = open_storage(self.roots[entry.root].url)
            return Location(entry.root, self._storages[entry.root], entry.key, was_listed)

    def _read_row(self, storage: Storage, entry: ImageEntry) -> bytes:
        with self._lock:  # rows come in order, so one open file and one row group serve all threads
            if self._table is None or self._table[0] != (entry.root, entry.key):
                self._table = (entry.root, entry.key), _ParquetImages(storage, entry)
            value = self._table[1].cell(entry.start)
        data, path = split_cell(value)
        if data is None and path:
            # No version of that file is in the manifest, and it may be outside of the inputs.
            reason = f"the row has no image, only the path {path!r}. Give the folder of the images instead."
            raise ImageError(reason, name=self.name(entry), code="image_not_in_row")
        if data is None:
            raise ImageError("there is no image in this row.", name=self.name(entry), code="image_empty")
        return bytes(data)


class _ParquetImages:
    """The image column of one Parquet file; the row group that was read last stays in memory."""

    def __init__(self, storage: Storage, entry: ImageEntry) -> None:
        name = storage.join(entry.key)
        found = storage.head(entry.key)
        if found is None:
            raise StorageError(f"{name} does not exist any more.", code="object_not_found")
        # Reads ask for the version of the manifest, whatever the version is now.
        self.table = open_parquet_table(open_file(storage, StoredObject(entry.key, found.size, entry.etag)), name)
        self.column = find_image_column(self.table.schema_arrow, name)
        groups = (self.table.metadata.row_group(i).num_rows for i in range(self.table.metadata.num_row_groups))
        self.ends = [0]
        for rows in groups:
            self.ends.append(self.ends[-1] + rows)
        self.name, self.group, self.cells = name, -1, None

    def cell(self, row: int) -> Any:
        """Return the value of one row; raises `DataError` if it is damaged."""
        group = bisect.bisect_right(self.ends, row) - 1
        try:
            if group != self.group:
                self.cells, self.group = None, -1  # free the last one first
                self.cells = self.table.read_row_group(group, columns=[self.column]).column(0)
                self.group = group
            assert self.cells is not None
            return self.cells[row - self.ends[group]].as_py()
        except (StorageError, MemoryError):
            raise
        except Exception as error:  # pyarrow's errors have no common base class
            raise DataError(f"Cannot read {self.name} row {row}: the file is damaged ({error}).") from error


def read_ahead(reader: EntryReader, entries: Iterable[ImageEntry]) -> Iterator[tuple[ImageEntry, bytes | ImageError]]:
    """Yield each entry with its bytes, or why it cannot be read, in order; requests run ahead, in bounded memory."""
    pool = ThreadPoolExecutor(NUM_READ_THREADS)
    pending: deque[tuple[list[ImageEntry], Future[list[bytes | ImageError]]]] = deque()

    def is_full(group: list[ImageEntry]) -> bool:
        waiting = [*(each for each, _ in pending), group]
        num_bytes = sum(max(0, entry.size) for each in waiting for entry in each)
        return sum(map(len, waiting)) > MAX_READ_AHEAD or num_bytes > MAX_READ_AHEAD_BYTES

    try:
        for group in adjacent_entries(entries):
            while pending and is_full(group):
                first, future = pending.popleft()
                yield from zip(first, future.result(), strict=True)
            pending.append((group, pool.submit(reader.read_group, group)))
        while pending:
            first, future = pending.popleft()
            yield from zip(first, future.result(), strict=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def adjacent_entries(entries: Iterable[ImageEntry]) -> Iterator[list[ImageEntry]]:
    """Group neighbors in a tar, which one request reads: object stores charge for requests, and each takes time."""
    group: list[ImageEntry] = []
    for entry in entries:
        if group and not _is_next(group, entry):
            yield group
            group = []
        group.append(entry)
    if group:
        yield group


def _is_next(group: list[ImageEntry], entry: ImageEntry) -> bool:
    first, last = group[0], group[-1]
    same = entry.kind == first.kind == "tar" and (entry.root, entry.key, entry.etag) == first[:3]
    gap = entry.start - last.start - last.size
    fits = len(group) < MAX_GROUP and entry.start + entry.size - first.start <= MAX_GROUP_BYTES
    return same and 0 <= gap <= MAX_GAP_BYTES and fits
