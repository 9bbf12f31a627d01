"""MNIST's file format, idx, and the four files of a set in it: alone, in an npm package, in a Debian package."""

import gzip
import io
import struct
import zlib
from pathlib import Path

import numpy as np

from ...errors import DataError
from ..archives import read_files
from ..formats.array_file import KEYS, Arrays

# In the order of KEYS; compressed ones end with .gz besides.
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_BYTES = 8  # the type code of unsigned bytes
_GZIP = b"\x1f\x8b"
_MAX_BYTES = 1 << 28  # unpacked; MNIST's largest file has 47 million


def parse_idx(content: bytes, what: str) -> np.ndarray:
    """The array in an idx file of unsigned bytes, compressed or not."""
    if content.startswith(_GZIP):
        content = _unzipped(content, what)
    if len(content) < 4 or content[:3] != bytes((0, 0, _BYTES)):
        raise DataError(f"{what} is no idx file of unsigned bytes.")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise DataError(f"{what} ends within its first lines.")
    shape = struct.unpack_from(f">{content[3]}I", content, 4)
    values = np.frombuffer(content, np.uint8, offset=start)
    if len(values) != np.prod(shape, dtype=object):
        raise DataError(f"{what} has {len(values):,} values where its shape {shape} has another number.")
    return values.reshape(shape)


def _unzipped(content: bytes, what: str) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            data = file.read(_MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{what} is damaged: {error}") from error
    if len(data) > _MAX_BYTES:
        raise DataError(f"{what} unpacks to more than {_MAX_BYTES:,} bytes: it is not used.")
    return data


def read_idx_files(*paths: Path) -> Arrays:
    """The four files, in the order of FILES."""
    return _arrays([path.read_bytes() for path in paths], [str(path) for path in paths])


def read_idx_package(package: Path) -> Arrays:
    """The four files out of an archive, or out of a folder."""
    names = {suffix: [f"{name}{suffix}" for name in FILES] for suffix in ("", ".gz")}
    wanted = [*names[""], *names[".gz"]]
    if package.is_dir():
        found = {name: (package / name).read_bytes() for name in wanted if (package / name).is_file()}
    else:
        found = read_files(package, wanted)
    for chosen in names.values():
        if all(name in found for name in chosen):
            return _arrays([found[name] for name in chosen], [f"{package}: {name}" for name in chosen])
    raise DataError(f"{package} lacks {', '.join(sorted(set(FILES) - {name.removesuffix('.gz') for name in found}))}.")


def _arrays(contents: list[bytes], names: list[str]) -> Arrays:
    arrays: Arrays = {}
    for key, content, name in zip(KEYS, contents, names, strict=True):
        values = parse_idx(content, name)
        arrays[key] = values[..., None] if key.endswith("images") else values.astype(np.int64)
    return arrays
