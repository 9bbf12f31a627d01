"""Reading archives that come from elsewhere: tar (gz, bz2, xz), zip, and Debian's packages.

Owns what is refused: names that lead out of the folder, links and devices, more bytes or files than expected. It does
not know what the files mean.
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

MAX_BYTES = 4 << 30  # unpacked; the largest named set has 0.8 GB
MAX_FILES = 100_000

Entry = tuple[str, int, IO[bytes]]  # path inside the archive, size, content (to be read before the next entry)

_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, RuntimeError, ValueError)


def extract(archive: Path, folder: Path, *, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> None:
    """Unpack into a folder that is there already; no file in it is overwritten."""
    with _reading(archive):
        for name, content in _safe_entries(archive, max_bytes, max_files):
            target = folder / name
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                file = open(target, "xb")
            except (FileExistsError, NotADirectoryError) as error:
                raise _Forbidden(f"{name!r} twice, or as a file and as a folder") from error
            with file:
                shutil.copyfileobj(content, file)


def read_files(archive: Path, wanted: Container[str], *, max_bytes: int = MAX_BYTES) -> dict[str, bytes]:
    """The content of those files of an archive that bear one of the names, wherever in its folders they lie."""
    found = {}
    with _reading(archive):
        for name, content in _safe_entries(archive, max_bytes, MAX_FILES):
            if (short := PurePosixPath(name).name) in wanted:
                found[short] = content.read()
    return found


@contextmanager
def _reading(archive: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGED as error:
        raise DataError(f"{archive} is damaged ({error}): delete it, and run again.") from error
    except _Forbidden as error:
        raise DataError(f"{archive} holds {error}: it is not used.") from error


def _safe_entries(archive: Path, max_bytes: int, max_files: int) -> Iterator[tuple[str, IO[bytes]]]:
    """(path, content) of the files, one after the other, none of which is dangerous."""
    total = 0
    with open(archive, "rb") as file:
        for count, (name, size, content) in enumerate(_entries(file), start=1):
            total += size
            if total > max_bytes or count > max_files:
                raise _Forbidden(f"more than {max_bytes:,} bytes or {max_files:,} files")
            yield _safe_name(name), content


class _Forbidden(Exception):
    """What no archive of data needs."""


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
                raise _Forbidden(f"{member.name!r}, which is a link or a device")
            yield member.name, member.size, content


def _zip_entries(file: IO[bytes]) -> Iterator[Entry]:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            if stat.S_ISLNK(info.external_attr >> 16):
                raise _Forbidden(f"{info.filename!r}, which is a link")
            with archive.open(info) as content:
                yield info.filename, info.file_size, content  # zipfile reads no more than the size it announced


def _skip_to_data(file: IO[bytes]) -> None:
    """Debian's packages are `ar` archives, in which a tar has the data; other files are left at their beginning."""
    if file.read(8) != b"!<arch>\n":
        file.seek(0)
        return
    while len(header := file.read(60)) == 60:
        name, size = header[:16].decode("ascii", "replace").strip(), int(header[48:58])
        if name.startswith("data.tar"):
            return
        file.seek(size + size % 2, 1)
    raise tarfile.ReadError("a Debian package without data")


def _safe_name(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or any(c in name for c in "\\:\0"):
        raise _Forbidden(f"{name!r}, which leads out of the folder")
    return str(path)
