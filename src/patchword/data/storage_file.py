"""An object of a storage as a seekable file, for readers of tar and Parquet: only the bytes that they need are read."""

import io
from typing import BinaryIO, cast

from .storage import Storage, StoredObject

BLOCK_BYTES = 64 * 2**10  # of one read: the headers of small members, or the footer of a Parquet file


class StorageFile(io.RawIOBase):
    """A raw, read-only file over `read_range`; the object must stay the version that was listed."""

    def __init__(self, storage: Storage, found: StoredObject) -> None:
        self.storage, self.found = storage, found
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.found.size}[whence]
        self.position = max(0, start + offset)
        return self.position

    def readinto(self, buffer: object) -> int:
        target = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        stop = min(self.position + len(target), self.found.size)
        data = self.storage.read_range(self.found.key, self.position, stop, self.found.etag)
        target[: len(data)] = data
        self.position += len(data)
        return len(data)

    def readall(self) -> bytes:
        data = self.storage.read_range(self.found.key, self.position, self.found.size, self.found.etag)
        self.position += len(data)
        return data


def open_file(storage: Storage, found: StoredObject, block_bytes: int = BLOCK_BYTES) -> BinaryIO:
    """Open an object as a buffered file."""
    return cast(BinaryIO, io.BufferedReader(StorageFile(storage, found), block_bytes))
