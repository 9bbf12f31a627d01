"""Safe reading of untrusted archives: tar (gz, bz2, xz), zip and Debian packages.

Owns what is refused: paths outside the target folder, links and devices, more bytes or files than expected. It does
not know the content of the files.
"""

import lzma
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from ..errors import DataError

MAX_BYTES = 4 << 30  # unpacked; the largest named dataset has 0.8 GB
MAX_FILES = 100_000

Entry = tuple[str, int, IO[bytes]]  # path in the archive, size, content (to be read before the next entry)

_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, RuntimeError, ValueError)


def extract(archive: Path, folder: Path, *, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> None:
    """Unpack into an existing folder, without overwriting files."""
    with _wrap_errors(archive):
        for name, content in _safe_entries(archive, max_bytes, max_files):
            target = folder / name
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                with open(target, "xb") as file:
                    shutil.copyfileobj(content, file)
            except (FileExistsError, NotADirectoryError) as error:
                raise _UnsafeArchiveError(f"{name!r} twice, or as a file and as a folder") from error


def read_files(archive: Path, wanted: Container[str], *, max_bytes: int = MAX_BYTES) -> dict[str, bytes]:
    """Read the files with the given base names, in any folder of the archive."""
    contents = {}
    with _wrap_errors(archive):
        for name, content in _safe_entries(archive, max_bytes, MAX_FILES):
            if (base := PurePosixPath(name).name) in wanted:
                contents[base] = content.read()
    return contents


@contextmanager
def _wrap_errors(archive: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGED as error:
        raise DataError(f"{archive} is damaged ({error}): delete it and run again.") from error
    except _UnsafeArchiveError as error:
        raise DataError(f"{archive} contains {error}, so it is not used.") from error


def _safe_entries(archive: Path, max_bytes: int, max_files: int) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield (path, content) of each file; raises `_UnsafeArchiveError` for a forbidden one."""
    total = 0
    with open(archive, "rb") as file:
        for count, (name, size, content) in enumerate(_entries(file), start=1):
            total += size
            if total > max_bytes or count > max_files:
                raise _UnsafeArchiveError(f"more than {max_bytes:,} bytes or {max_files:,} files")
            yield _safe_name(name), content


class _UnsafeArchiveError(Exception):
    """The archive contains something that no dataset needs; the message completes "contains ..."."""


def _entries(file: IO[bytes]) -> Iterator[Entry]:
    if zipfile.is_zipfile(file):
        yield from _zip_entries(file)
        return
    file.seek(0)
    _skip_to_data(file)
    yield from _tar_entries(file)


def _tar_entries(file: IO[bytes]) -> Iterator[Entry]:
    with tarfile.open(fileobj=file, mode="r|*") as tar:
        for member in tar:
            if member.isdir():
                continue
            content = tar.extractfile(member) if member.isreg() else None
            if content is None:
                raise _UnsafeArchiveError(f"{member.name!r}, which is a link or a device")
            yield member.name, member.size, content


def _zip_entries(file: IO[bytes]) -> Iterator[Entry]:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            if stat.S_ISLNK(info.external_attr >> 16):
                raise _UnsafeArchiveError(f"{info.filename!r}, which is a link")
            with archive.open(info) as content:
                yield info.filename, info.file_size, content  # zipfile reads at most the declared size


def _skip_to_data(file: IO[bytes]) -> None:
    """Seek to the data.tar member of a Debian package, which is an `ar` archive; leave other files at the start."""
    if file.read(8) != b"!<arch>\n":
        file.seek(0)
        return
    while len(header := file.read(60)) == 60:
        name, size = header[:16].decode("ascii", "replace").strip(), int(header[48:58])
        if name.startswith("data.tar"):
            return
        file.seek(size + size % 2, 1)
    raise tarfile.ReadError("Debian package without data.tar")


def _safe_name(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or any(c in name for c in "\\:\0"):
        raise _UnsafeArchiveError(f"{name!r}, which is outside the target folder")
    return str(path)
