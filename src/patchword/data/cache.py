"""Where fetched data are kept, and how they get there whole or not at all.

Owns the cache folder, the lock that lets one process at a time fill a place in it, and the words for a disk that does
not take what is written. It does not know what is kept.
"""

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import DataError

try:
    import fcntl
except ImportError:  # Windows: without locks two processes may fetch the same file, and the checksum decides
    fcntl = None  # type: ignore[assignment]

# A user's quota and the largest allowed file mean to them what a full disk means.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def tell(message: str) -> None:
    """Messages go to standard error: standard output belongs to results."""
    print(message, file=sys.stderr)


def cache_folder() -> Path:
    """PATCHWORD_CACHE, or else patchword in the user's cache folder. It need not exist yet."""
    if own := os.environ.get("PATCHWORD_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The XDG rules say to ignore a relative path.
        return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "patchword"
    except RuntimeError as error:
        message = "This user has no home folder to keep data in: set PATCHWORD_CACHE to a folder for them."
        raise DataError(message) from error


def data_folder(name: str) -> Path:
    return cache_folder() / "data" / name


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say what went wrong with the disk, and what to do, in place of an `OSError`."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            advice = "Make room, or set PATCHWORD_CACHE to a folder on another disk, and run again."
            raise DataError(f"No room on the disk to write {path} ({error.strerror}). {advice}") from error
        advice = "Set PATCHWORD_CACHE to a folder that you may write to."
        raise DataError(
            f"Cannot read or write {error.filename or path}: {error.strerror or error}. {advice}"
        ) from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one process at a time gets to write `path`. A lock dies with its process, so none is ever left behind."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path.with_name(f".{path.name}.lock"), "ab")
    with file:  # closing it gives the lock back
        if not got_lock(file.fileno()):
            tell(f"Waiting for another process, which is fetching {path}.")
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        yield


def got_lock(descriptor: int) -> bool:
    """Locks an open file, unless another process has; it is the same as locked where there are no locks."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a network disk without locks: as on Windows
    return True


def build_once(folder: Path, build: Callable[[Path], object]) -> Path:
    """The folder, filled by `build` if it is not there. A half-filled one, left by a killed process, is done again."""
    if folder.is_dir():
        return folder
    with locked(folder):
        if not folder.is_dir():  # another process may have been faster
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            try:
                with writing(partial):
                    partial.mkdir()
                    build(partial)
                    partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder
