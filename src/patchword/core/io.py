"""Files: written whole or not at all, identified by digests, kept in one cache directory, guarded by locks.

All writing goes through functions of `os`, looked up at the time of the call, so that tests can make each of them fail.
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

from ..errors import CheckpointError, DataError, PatchwordError
from .text import one_line, tell

if TYPE_CHECKING:
    from torch import Tensor

MAX_JSON_DEPTH = 32  # no checkpoint's JSON has more than five levels

# A user's quota and the largest allowed file mean to them what a full disk means.
_FULL = {getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG") if hasattr(errno, name)}
# What file systems without locks, such as some network disks, say when asked for one.
_NO_LOCKS = {getattr(errno, name) for name in ("ENOLCK", "ENOTSUP", "EOPNOTSUPP", "ENOSYS") if hasattr(errno, name)}
_BINARY = getattr(os, "O_BINARY", 0)  # on Windows a descriptor is in text mode otherwise, and changes line ends


# Writing


@functools.cache
def umask() -> int:
    """Return the permission bits that the process removes from new files; they can only be read by setting them."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def share(path: Path) -> None:
    """Give a file the permissions of any new file, where a library has made it readable by its owner only."""
    path.chmod(0o666 & ~umask())


def sync(path: Path) -> None:
    """Bring a file, or the list of names in a directory, to disk.

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
    """Write a new file and bring it to disk.

    Args:
        path: Must not exist.
        chunks: Bytes, or contiguous buffers, one after the other.

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
    """Yield a temporary path beside `target`; the file written there replaces `target` when all went well.

    A failure, a full disk or a kill leaves `target` as it was. Every process and thread gets a path of its own. What
    kills leave behind is named `.NAME.*.part`. An `OSError` is not translated.
    """
    made = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        yield made
        move_into_place(made, target)
    finally:
        with contextlib.suppress(OSError):
            made.unlink(missing_ok=True)


def replace_file(path: Path, chunks: Iterable[Any]) -> str:
    """Write a file whole or not at all, in place of an older one.

    Returns:
        The SHA-256 of the file.

    Raises:
        CheckpointError: It could not be written; the older file is as it was.
    """
    try:
        with atomic_file(path) as made:
            return write_file(made, chunks)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written ({error.strerror or error}).") from None


def move_into_place(made: Path, target: Path, aside: Path | None = None) -> None:
    """Bring a file or directory to disk, then give it its name, on the same file system.

    Args:
        made: What was written under a temporary name.
        target: A file of that name is replaced.
        aside: Where a directory of that name moves first, since it cannot be replaced in one step. Without it a
            directory that is not empty makes the renaming fail.
    """
    for path in [made, *made.rglob("*")] if made.is_dir() else [made]:
        sync(path)
    try:
        if aside is not None and target.is_dir():
            os.replace(target, aside)
        os.replace(made, target)
    except BaseException:
        if aside is not None and aside.exists() and not target.exists():
            os.replace(aside, target)
        raise
    sync(target.parent)


@contextlib.contextmanager
def atomic_output(target: Path, *, overwrite: bool = False, replaceable: Collection[str] = ()) -> Iterator[Path]:
    """Yield a path in a temporary directory beside `target`; the file or directory made there becomes `target`.

    For what a user asked for by name: everything that goes wrong becomes a message. A crash or a full disk leaves
    `target` as it was. So does a kill, except between the two renamings that overwrite a directory: then the old one
    is found in the temporary directory.

    Args:
        target: The file or directory to make.
        overwrite: Whether an existing one is replaced; otherwise it is an error.
        replaceable: Names of files. A directory that holds anything else is never overwritten.

    Raises:
        CheckpointError: `target` exists and may not be overwritten, or cannot be written.
    """
    try:
        target = target.resolve()
        if target.exists() and not overwrite:
            raise CheckpointError(f"{target} exists already. Choose another name, or add --overwrite (overwrite=True).")
        if target.is_dir() and (others := sorted(p.name for p in target.iterdir() if p.name not in replaceable)):
            raise CheckpointError(f"{target} holds other things, too ({', '.join(others[:3])}): it is not overwritten.")
        target.parent.mkdir(parents=True, exist_ok=True)
        workplace = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{target} cannot be written ({one_line(error)}).") from None
    try:
        made = workplace / target.name
        yield made
        if target.exists() and target.is_dir() != made.is_dir():
            kind = "a folder" if target.is_dir() else "a file"
            raise CheckpointError(f"{target} is {kind}, which this format does not write: it is not overwritten.")
        move_into_place(made, target, workplace / "old" if overwrite else None)
    except PatchwordError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # torch reports a full disk as RuntimeError
        raise CheckpointError(f"{target} could not be written ({one_line(error)}); nothing was changed.") from None
    finally:
        if target.exists() or not (workplace / "old").exists():  # never the only copy
            shutil.rmtree(workplace, ignore_errors=True)


# JSON


def json_bytes(content: object, *, ascii_only: bool = False) -> bytes:
    """Encode as indented JSON.

    Args:
        content: Plain values.
        ascii_only: Escape every other character, which keeps even a file name that is no valid text. Otherwise such
            characters are replaced, and all others stay readable.
    """
    text = json.dumps(content, indent=2, ensure_ascii=ascii_only) + "\n"
    return text.encode("utf-8", errors="replace")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file in place; inside `atomic_output` that is safe, elsewhere use `replace_json`."""
    path.write_bytes(json_bytes(content))


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all, in place of an older one; its directory is made if it is missing.

    Raises:
        CheckpointError: It could not be written; the older file is as it was.
    """
    with atomic_output(path, overwrite=True) as made:
        write_json(made, content)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file that anyone may have written.

    Raises:
        CheckpointError: The file is unreadable, damaged, not an object, or nested too deeply.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(content, ensure_ascii=False).encode()  # half a surrogate pair could be neither printed nor written
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({one_line(error)}).") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    if json_depth(content) > MAX_JSON_DEPTH:
        raise CheckpointError(f"{path} is nested more than {MAX_JSON_DEPTH} levels deep.")
    return content


def json_depth(content: object) -> int:
    """Count how many objects and lists of a JSON value lie inside each other."""
    depth, level = 0, [content]
    while level := [each for each in level if isinstance(each, dict | list)]:
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
        depth += 1
    return depth


# Digests


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return file_digest(path, "sha256")


def file_digest(path: Path, algorithm: str) -> str:
    """Return the digest of a file, in hexadecimal.

    Args:
        path: The file.
        algorithm: A name that `hashlib` knows. Not for security: old data sets have nothing but an MD5, which some
            systems forbid otherwise.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def digest(*facts: object) -> str:
    """Return the SHA-256 of facts as text, in order: the name of whatever depends on them and nothing else."""
    return hashlib.sha256("\0".join(map(str, facts)).encode("utf-8", "surrogatepass")).hexdigest()


def weights_digest(tensors: Mapping[str, "Tensor"]) -> str:
    """Return the SHA-256 of named tensors: the one identity of a checkpoint's weights.

    It depends on names, types, shapes and every bit of the values, not on the order of the names.
    """
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        found.update(tensor_bytes(tensor))
    return found.hexdigest()


def tensor_bytes(tensor: "Tensor") -> memoryview:
    """Return the bytes of a tensor of any type, without a copy where it is contiguous and on the CPU."""
    import torch  # not above: the command line starts without it

    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


# The cache directory


def cache_folder() -> Path:
    """Return PATCHWORD_CACHE, or else patchword's directory in the user's cache directory. It need not exist yet.

    Raises:
        DataError: The user has no home directory, and PATCHWORD_CACHE is not set.
    """
    if own := os.environ.get("PATCHWORD_CACHE"):
        return Path(own).expanduser()
    try:
        folder = platformdirs.user_cache_path("patchword", appauthor=False)
    except RuntimeError:
        folder = Path()
    if not folder.is_absolute():
        raise DataError("This user has no home folder to keep data in: set PATCHWORD_CACHE to a folder for them.")
    return folder


def data_folder(name: str) -> Path:
    """Return where the cache keeps a data set."""
    return cache_folder() / "data" / name


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say what went wrong with the disk of the cache, and what to do, in place of an `OSError`.

    Raises:
        DataError: The disk is full, or does not let itself be read or written.
    """
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


def build_once(folder: Path, build: Callable[[Path], object]) -> Path:
    """Return a directory of the cache, filled by `build` if it is not there.

    Several processes may ask at once: one builds, the others wait. What a killed process left half filled is built
    again.
    """
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


# Locks


def try_lock(path: Path) -> filelock.BaseFileLock | None:
    """Lock a file, which is made if it is missing, unless another process has locked it.

    The operating system holds the lock: it dies with its process, and a file that is left behind locks nothing. On a
    file system without locks nobody is kept out.

    Returns:
        The lock, held until `unlock`; None if another process has it.
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
    """Give a lock back and remove its file.

    The file goes first: a process that has opened it meanwhile finds that it is gone, and starts over with a new one.
    """
    with contextlib.suppress(OSError):  # Windows removes it on release
        os.unlink(lock.lock_file)
    lock.release()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time write `path`; the others wait, and say so."""
    guard = path.with_name(f".{path.name}.lock")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = try_lock(guard)
        if lock is None:
            tell(f"Waiting for another process, which is fetching {path}.")
            lock = filelock.FileLock(guard, thread_local=False)
            lock.acquire()
    try:
        yield
    finally:
        unlock(lock)
