"""Files: atomic writes, JSON, digests, the cache directory, and locks between processes.

All writes call functions of `os`, looked up at the time of the call, so that tests can make each of them fail.
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import platformdirs

from ..errors import CheckpointError, DataError, OutputError, PatchwordError
from .text import one_line, print_stderr

if TYPE_CHECKING:
    from torch import Tensor

MAX_JSON_DEPTH = 32  # the JSON files of checkpoints have at most five levels

# Exceeding a quota or the maximum file size is treated like a full disk.
_DISK_FULL = {getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG") if hasattr(errno, name)}
# Errors of file systems without locks, such as some network disks.
_NO_LOCKS = {getattr(errno, name) for name in ("ENOLCK", "ENOTSUP", "EOPNOTSUPP", "ENOSYS") if hasattr(errno, name)}
_BINARY = getattr(os, "O_BINARY", 0)  # Windows otherwise opens descriptors in text mode and translates line endings


# Writing


@functools.cache
def _umask() -> int:
    """Return the file mode creation mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def apply_umask(path: Path) -> None:
    """Give a file the default permissions of a new file, where a library created it readable by its owner only."""
    path.chmod(0o666 & ~_umask())


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk.

    Windows cannot sync directories, and syncs only files that are open for writing.
    """
    windows = os.name == "nt"
    if windows and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR | _BINARY if windows else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, chunks: Iterable[Any]) -> str:
    """Write a new file and flush it to disk.

    Args:
        path: Must not exist.
        chunks: Bytes or contiguous buffers, written one after the other.

    Returns:
        The SHA-256 of the file.
    """
    digest = hashlib.sha256()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
    try:
        for chunk in chunks:
            digest.update(chunk)
            view = memoryview(chunk).cast("B")
            while view:
                view = view[os.write(handle, view) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    return digest.hexdigest()


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Yield a temporary path next to `target`; the file written there replaces `target` on success.

    After an error, a full disk or a kill, `target` is unchanged. Every process and thread gets its own path. A killed
    process leaves a file named `.NAME.*.part`. An `OSError` is not translated.
    """
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        yield temporary
        move_into_place(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def replace_file(path: Path, chunks: Iterable[Any]) -> str:
    """Write a file atomically, replacing an existing one.

    Returns:
        The SHA-256 of the file.

    Raises:
        OutputError: It cannot be written; an existing file is unchanged.
    """
    try:
        with atomic_file(path) as temporary:
            return write_file(temporary, chunks)
    except OSError as error:
        raise OutputError(f"{path} could not be written ({error.strerror or error}).") from None


def move_into_place(temporary: Path, target: Path, backup: Path | None = None) -> None:
    """Flush a file or directory to disk, then rename it, within one file system.

    Args:
        temporary: The file or directory that was written.
        target: Its final name. An existing file is replaced.
        backup: Where an existing directory is moved first, because a directory cannot be replaced in one step. Without
            it, a non-empty directory makes the rename fail.
    """
    for path in [temporary, *temporary.rglob("*")] if temporary.is_dir() else [temporary]:
        sync(path)
    try:
        if backup is not None and target.is_dir():
            os.replace(target, backup)
        os.replace(temporary, target)
    except BaseException:
        if backup is not None and backup.exists() and not target.exists():
            os.replace(backup, target)
        raise
    sync(target.parent)


@contextlib.contextmanager
def atomic_output(target: Path, *, overwrite: bool = False, replaceable: Collection[str] = ()) -> Iterator[Path]:
    """Yield a path in a temporary directory next to `target`; the file or directory written there becomes `target`.

    For outputs that a user named: every failure becomes an error message. After a crash or on a full disk `target` is
    unchanged. The same holds for a kill, except between the two renames that overwrite a directory: then the old
    directory is in the temporary one.

    Args:
        target: The file or directory to write.
        overwrite: Whether to replace an existing one; otherwise it is an error.
        replaceable: File names. A directory that contains anything else is never overwritten.

    Raises:
        OutputError: `target` cannot be written, or exists and must not be overwritten (code `output_exists`).
    """
    target, workspace = _prepare_output(target, overwrite, replaceable)
    try:
        temporary = workspace / target.name
        yield temporary
        if target.exists() and target.is_dir() != temporary.is_dir():
            kind = "a directory" if target.is_dir() else "a file"
            raise OutputError(
                f"{target} is {kind}, which this format does not write: it is not overwritten.", code="output_exists"
            )
        move_into_place(temporary, target, workspace / "old" if overwrite else None)
    except PatchwordError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # torch reports a full disk as RuntimeError
        raise OutputError(f"{target} could not be written ({one_line(error)}); nothing was changed.") from None
    finally:
        if target.exists() or not (workspace / "old").exists():  # never delete the only copy
            shutil.rmtree(workspace, ignore_errors=True)


def _prepare_output(target: Path, overwrite: bool, replaceable: Collection[str]) -> tuple[Path, Path]:
    """Check that `target` may be written; return its resolved path and a new temporary directory next to it."""
    try:
        target = target.resolve()
        if target.exists() and not overwrite:
            raise OutputError(
                f"{target} already exists. Choose another name, or add --overwrite (overwrite=True).",
                code="output_exists",
            )
        if target.is_dir() and (others := sorted(p.name for p in target.iterdir() if p.name not in replaceable)):
            raise OutputError(
                f"{target} contains other files ({', '.join(others[:3])}): it is not overwritten.",
                code="output_exists",
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        return target, Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except (OSError, ValueError) as error:
        raise OutputError(f"{target} cannot be written ({one_line(error)}).") from None


# JSON


def json_bytes(content: object, *, ascii_only: bool = False) -> bytes:
    """Encode as indented JSON.

    Args:
        content: JSON-compatible values.
        ascii_only: Escape all other characters, which preserves even file names that are not valid Unicode. Otherwise
            invalid characters are replaced by "?", and all others stay readable.
    """
    text = json.dumps(content, indent=2, ensure_ascii=ascii_only) + "\n"
    return text.encode("utf-8", errors="replace")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file in place. This is safe inside `atomic_output`; elsewhere use `replace_json`."""
    path.write_bytes(json_bytes(content))


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically, replacing an existing one; a missing parent directory is created.

    Raises:
        OutputError: It cannot be written; an existing file is unchanged.
    """
    with atomic_output(path, overwrite=True) as temporary:
        write_json(temporary, content)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from an untrusted file.

    Raises:
        CheckpointError: The file is unreadable, damaged, not an object, or nested too deeply.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(content, ensure_ascii=False).encode()  # rejects lone surrogates, which cannot be printed or written
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({one_line(error)}).") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    if json_depth(content) > MAX_JSON_DEPTH:
        raise CheckpointError(f"{path} is nested more than {MAX_JSON_DEPTH} levels deep.")
    return content


def json_depth(content: object) -> int:
    """Return the maximum nesting depth of objects and lists in a JSON value."""
    depth, level = 0, [content]
    while level := [value for value in level if isinstance(value, dict | list)]:
        level = [child for value in level for child in (value.values() if isinstance(value, dict) else value)]
        depth += 1
    return depth


# Digests


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    return file_digest(path, "sha256")


def file_digest(path: Path, algorithm: str) -> str:
    """Return the digest of a file in hexadecimal.

    Args:
        path: The file.
        algorithm: A name known to `hashlib`. Marked as not used for security: old datasets publish only an MD5, which
            some systems forbid otherwise.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def digest(*values: object) -> str:
    """Return the SHA-256 of values converted to text, in order; used as a cache key."""
    return hashlib.sha256("\0".join(map(str, values)).encode("utf-8", "surrogatepass")).hexdigest()


def weights_digest(tensors: Mapping[str, "Tensor"]) -> str:
    """Return the SHA-256 of named tensors: the only digest that identifies the weights of a checkpoint.

    It depends on the names, dtypes, shapes and every bit of the values, not on the order of the names.
    """
    result = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        result.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        result.update(tensor_bytes(tensor))
    return result.hexdigest()


def tensor_bytes(tensor: "Tensor") -> memoryview:
    """Return the bytes of a tensor of any dtype, without a copy if it is contiguous and on the CPU."""
    import torch  # imported here: the command line starts without it

    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


# Cache directory


def cache_dir() -> Path:
    """Return $PATCHWORD_CACHE, or else patchword's directory in the user's cache directory. It may not exist yet.

    Raises:
        DataError: PATCHWORD_CACHE is not set and the user has no home directory.
    """
    if path := os.environ.get("PATCHWORD_CACHE"):
        return Path(path).expanduser()
    try:
        folder = platformdirs.user_cache_path("patchword", appauthor=False)
    except RuntimeError:
        folder = Path()
    if not folder.is_absolute():
        raise DataError("There is no home directory for the cache. Set PATCHWORD_CACHE to a directory.")
    return folder


def dataset_dir(name: str) -> Path:
    """Return the directory of a dataset in the cache."""
    return cache_dir() / "data" / name


@contextlib.contextmanager
def wrap_cache_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` in the cache directory into an error message with advice.

    Raises:
        DataError: The disk is full, or `path` cannot be read or written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            advice = "Free some space, or set PATCHWORD_CACHE to a directory on another disk, and run again."
            raise DataError(f"No room on the disk to write {path} ({error.strerror}). {advice}") from error
        advice = "Set PATCHWORD_CACHE to a writable directory."
        raise DataError(
            f"Cannot read or write {error.filename or path}: {error.strerror or error}. {advice}"
        ) from error


def build_once(folder: Path, build: Callable[[Path], object]) -> Path:
    """Return a directory of the cache, filled by `build` if it does not exist.

    If several processes need it at once, one builds it and the others wait. What a killed process left incomplete is
    built again.
    """
    if folder.is_dir():
        return folder
    with locked(folder):
        if not folder.is_dir():  # another process may have built it meanwhile
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            try:
                with wrap_cache_errors(partial):
                    partial.mkdir()
                    build(partial)
                    partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder


# Locks


def try_lock(path: Path) -> filelock.BaseFileLock | None:
    """Lock a file, which is created if it is missing, without waiting.

    The operating system releases the lock when its process ends; a leftover file does not lock anything. A file system
    without locks excludes nobody.

    Returns:
        The lock, held until `unlock`; None if another process holds it.
    """
    lock = filelock.FileLock(path, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        return None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return lock


def unlock(lock: filelock.BaseFileLock) -> None:
    """Release a lock and remove its file.

    The file is removed first: a process that opened it meanwhile sees that it is gone, and starts over with a new one.
    """
    with contextlib.suppress(OSError):  # Windows removes it on release
        os.unlink(lock.lock_file)
    lock.release()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time write `path`; the others wait and print a message."""
    lock_file = path.with_name(f".{path.name}.lock")
    with wrap_cache_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = try_lock(lock_file)
        if lock is None:
            print_stderr(f"Waiting for another process that is writing {path}.")
            lock = filelock.FileLock(lock_file, thread_local=False)
            lock.acquire()
    try:
        yield
    finally:
        unlock(lock)
