"""Files that engines load, stored in the user's cache directory.

Building such a file takes up to a minute for a large model; reading it takes less than a second. The name of a file is
a digest of everything it depends on: weights, calibration images, library versions, and the code that builds it.
"""

import contextlib
import hashlib
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from torch import Tensor

from ..checkpoints import Checkpoint
from ..core.io import atomic_file, cache_dir, digest, weights_digest, write_file
from ..errors import DataError
from .capabilities import installed_versions

MAX_CACHE_BYTES = 2**32  # of all files together; the least recently used ones are deleted first
LIBRARIES = ("torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "onnxruntime-gpu", "openvino", "nncf")
CODE = ("core", "engines", "models", "config", "checkpoints/checkpoint.py", "data/preprocess.py")
DIGEST_BYTES = 32  # a file starts with the SHA-256 of the rest


def cache_key(builder: str, checkpoint: Checkpoint, calibration: Tensor, merge_counts: Sequence[int]) -> str:
    """Return the file name for what `builder` builds. Labels are left out: no engine uses them."""
    model = (checkpoint.config.to_json(), checkpoint.preprocess, checkpoint.temperature, checkpoint.multi_label)
    tensors = (weights_digest(checkpoint.tensors), weights_digest({"calibration": calibration}))
    return digest(builder, *model, list(merge_counts), toolchain_version(), *tensors)[:32]


@cache
def toolchain_version() -> str:
    """Return a digest of the code involved, followed by the versions of the libraries."""
    code, package = hashlib.sha256(), Path(__file__).parents[1]
    for source in (package / name for name in CODE):
        for path in sorted(source.glob("*.py")) if source.is_dir() else [source]:
            code.update(path.read_bytes())
    return " ".join([code.hexdigest(), *installed_versions(LIBRARIES)])


def load_file(name: str) -> bytes | None:
    """Read a file; None if it does not exist or is damaged."""
    with contextlib.suppress(OSError, DataError):
        path = engine_files_dir() / name
        content = path.read_bytes()
        if hashlib.sha256(memoryview(content)[DIGEST_BYTES:]).digest() == content[:DIGEST_BYTES]:
            with contextlib.suppress(OSError):  # a read-only cache
                os.utime(path)
            return content[DIGEST_BYTES:]
    return None


def store_file(name: str, content: bytes) -> None:
    """Write a file. A cache that cannot be written is ignored: the file is built again next time."""
    with contextlib.suppress(OSError, DataError):
        engine_files_dir().mkdir(parents=True, exist_ok=True)
        with atomic_file(engine_files_dir() / name) as temporary:
            write_file(temporary, [hashlib.sha256(content).digest(), content])
        evict_least_recently_used()


def evict_least_recently_used() -> None:
    """Delete files until at most `MAX_CACHE_BYTES` are left; the newest file always stays."""
    files = []
    for path in engine_files_dir().iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process deleted it
            files.append((path.stat(), path))
    files.sort(key=lambda file: file[0].st_mtime_ns)
    total = sum(stat.st_size for stat, _ in files)
    for stat, path in files[:-1]:
        if total <= MAX_CACHE_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= stat.st_size


def engine_files_dir() -> Path:
    """Return the directory that holds the files."""
    return cache_dir() / "engines" / "files"
