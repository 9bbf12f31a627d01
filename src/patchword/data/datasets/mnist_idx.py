"""IDX, the file format of MNIST, and the four IDX files of a dataset: single, in an npm or in a Debian package."""

import gzip
import io
import struct
import zlib
from pathlib import Path

import numpy as np

from ...errors import DataError
from ..archives import read_files
from ..formats.array_file import KEYS, Arrays

# In the order of KEYS; compressed files have the suffix .gz.
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_UINT8 = 8  # IDX type code of unsigned bytes
_GZIP = b"\x1f\x8b"
_MAX_BYTES = 1 << 28  # decompressed; the largest file of MNIST has 47 million


def parse_idx(content: bytes, what: str) -> np.ndarray:
    """Parse an IDX file of unsigned bytes, which may be gzipped. `what` names it in error messages."""
    if content.startswith(_GZIP):
        content = _gunzip(content, what)
    if len(content) < 4 or content[:3] != bytes((0, 0, _UINT8)):
        raise DataError(f"{what} is not an IDX file of unsigned bytes.")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise DataError(f"{what} is truncated: its header is incomplete.")
    shape = struct.unpack_from(f">{content[3]}I", content, 4)
    values = np.frombuffer(content, np.uint8, offset=start)
    if len(values) != np.prod(shape, dtype=object):
        raise DataError(f"{what} has {len(values):,} values, which does not match its shape {shape}.")
    return values.reshape(shape)


def _gunzip(content: bytes, what: str) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            data = file.read(_MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{what} is damaged: {error}") from error
    if len(data) > _MAX_BYTES:
        raise DataError(f"{what} decompresses to more than {_MAX_BYTES:,} bytes, so it is not used.")
    return data


def read_idx_files(*paths: Path) -> Arrays:
    """Read the four files, in the order of FILES."""
    return _to_arrays([path.read_bytes() for path in paths], [str(path) for path in paths])


def read_idx_package(package: Path) -> Arrays:
    """Read the four files from an archive or a folder."""
    names = {suffix: [f"{name}{suffix}" for name in FILES] for suffix in ("", ".gz")}
    wanted = [*names[""], *names[".gz"]]
    if package.is_dir():
        contents = {name: (package / name).read_bytes() for name in wanted if (package / name).is_file()}
    else:
        contents = read_files(package, wanted)
    for chosen in names.values():
        if all(name in contents for name in chosen):
            return _to_arrays([contents[name] for name in chosen], [f"{package}: {name}" for name in chosen])
    missing = sorted(set(FILES) - {name.removesuffix(".gz") for name in contents})
    raise DataError(f"{package} lacks {', '.join(missing)}.")


def _to_arrays(contents: list[bytes], names: list[str]) -> Arrays:
    arrays: Arrays = {}
    for key, content, name in zip(KEYS, contents, names, strict=True):
        values = parse_idx(content, name)
        arrays[key] = values[..., None] if key.endswith("images") else values.astype(np.int64)
    return arrays
