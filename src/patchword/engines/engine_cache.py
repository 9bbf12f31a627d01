"""What engines are started from, kept in the user's cache: making it takes a minute for a large model, reading it less
than a second.

A file's name is a digest of all that it depends on: weights, pictures, versions, and the code that makes it.
"""

import contextlib
import hashlib
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from torch import Tensor

from ..checkpoints import Checkpoint
from ..core.io import atomic_file, cache_folder, weights_digest, write_file
from ..core.io import digest as digest_of
from ..errors import DataError
from .capabilities import versions

MOST_KEPT = 2**32  # bytes of all files; those that were not used for longest go first
LIBRARIES = ("torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "onnxruntime-gpu", "openvino", "nncf")
CODE = ("core", "engines", "models", "config", "checkpoints/checkpoint.py", "data/preprocess.py")


def digest(purpose: str, checkpoint: Checkpoint, calibration: Tensor, merged: Sequence[int]) -> str:
    """Not of the labels: no engine knows them."""
    model = (checkpoint.config.to_json(), checkpoint.preprocess, checkpoint.temperature, checkpoint.multi_label)
    tensors = (weights_digest(checkpoint.tensors), weights_digest({"calibration": calibration}))
    return digest_of(purpose, *model, list(merged), made_by(), *tensors)[:32]


@cache
def made_by() -> str:
    """Versions of the libraries, and the code of patchword that has a part in it."""
    code, package = hashlib.sha256(), Path(__file__).parents[1]
    for place in (package / name for name in CODE):
        for path in sorted(place.glob("*.py")) if place.is_dir() else [place]:
            code.update(path.read_bytes())
    return " ".join([code.hexdigest(), *versions(LIBRARIES)])


def read_file(name: str) -> bytes | None:
    """None if there is none, or one that is not what was written."""
    with contextlib.suppress(OSError, DataError):
        path = folder() / name
        content = path.read_bytes()
        if hashlib.sha256(memoryview(content)[32:]).digest() == content[:32]:
            with contextlib.suppress(OSError):  # a folder that can only be read
                os.utime(path)
            return content[32:]
    return None


def keep_file(name: str, content: bytes) -> None:
    """A disk that does not take it costs time, not the answer."""
    with contextlib.suppress(OSError, DataError):
        folder().mkdir(parents=True, exist_ok=True)
        with atomic_file(folder() / name) as made:
            write_file(made, [hashlib.sha256(content).digest(), content])
        make_room()


def make_room() -> None:
    files = []
    for path in folder().iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            files.append((path.stat(), path))
    files.sort(key=lambda each: each[0].st_mtime_ns)
    total = sum(state.st_size for state, _ in files)
    for state, path in files[:-1]:
        if total <= MOST_KEPT:
            return
        path.unlink(missing_ok=True)
        total -= state.st_size


def folder() -> Path:
    return cache_folder() / "engines" / "files"
