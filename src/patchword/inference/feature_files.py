"""Files of image embeddings: .npz, .parquet or .csv, by the suffix.

Chunks are appended as they come, so memory does not grow with the number of features. The file gets its name when it is
complete.
"""

import contextlib
import csv
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from ..core.io import atomic_file
from ..data.formats.arrow_rows import missing_package
from ..errors import ConfigError, OutputError
from .embed import EmbeddingChunk
from .prediction_csv import open_csv

Append = Callable[[Sequence[str], np.ndarray], None]  # takes paths, and a row of features for each


@contextlib.contextmanager
def append_to_npz(path: Path, width: int) -> Iterator[Append]:
    """Write the arrays `features`, float32 (N, D), and `paths`, for `np.load`.

    An array starts with its length, which is known only at the end: features wait in an unnamed file until then.
    """
    names: list[str] = []
    with tempfile.TemporaryFile(dir=path.parent) as waiting:

        def append(paths: Sequence[str], features: np.ndarray) -> None:
            names.extend(paths)
            waiting.write(np.ascontiguousarray(features, dtype="<f4").data)

        yield append
        waiting.seek(0)
        header = {"descr": "<f4", "fortran_order": False, "shape": (len(names), width)}
        with zipfile.ZipFile(path, "w") as archive:
            with archive.open("features.npy", "w", force_zip64=True) as array:
                np.lib.format.write_array_header_1_0(array, header)
                shutil.copyfileobj(waiting, array)
            with archive.open("paths.npy", "w", force_zip64=True) as array:
                np.lib.format.write_array(array, np.array(names, dtype=str), allow_pickle=False)


@contextlib.contextmanager
def append_to_parquet(path: Path, width: int) -> Iterator[Append]:
    """Write the columns `path` and `features`, a list of D float32, with a row group for each chunk."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("path", pa.string()), ("features", pa.list_(pa.float32(), width))])
    with pq.ParquetWriter(path, schema) as writer:

        def append(paths: Sequence[str], features: np.ndarray) -> None:
            # Parquet stores UTF-8: bytes of a file name that are not become escapes such as \udcff.
            names = [name.encode("utf-8", "backslashreplace").decode() for name in paths]
            values = pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), width)
            writer.write_table(pa.table([pa.array(names, pa.string()), values], schema=schema))

        yield append


@contextlib.contextmanager
def append_to_csv(path: Path, width: int) -> Iterator[Append]:
    """Write the columns path, feature_0, feature_1, ..., with the nine digits that determine a float32."""
    with open_csv(path, "w") as file:
        writer = csv.writer(file)
        writer.writerow(["path", *(f"feature_{i}" for i in range(width))])

        def append(paths: Sequence[str], features: np.ndarray) -> None:
            for name, row in zip(paths, features, strict=True):
                writer.writerow([name, *(f"{value:.9g}" for value in row)])

        yield append


WRITERS: dict[str, Callable[[Path, int], AbstractContextManager[Append]]] = {
    ".npz": append_to_npz,
    ".parquet": append_to_parquet,
    ".csv": append_to_csv,
}


def check_feature_file(path: Path) -> None:
    """Check, before any work is done, that features can be written to a file of this name.

    Raises:
        ConfigError: The suffix is unknown, or its package is not installed.
    """
    if path.suffix not in WRITERS:
        formats = ", ".join(WRITERS)
        raise ConfigError(f"{path}: features are written to {formats}, or to a directory. Example: features.npz")
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise missing_package("pyarrow", f"Writing {path}") from None


@contextlib.contextmanager
def open_feature_file(path: Path, width: int) -> Iterator[Callable[[EmbeddingChunk], None]]:
    """Yield a function that appends a chunk of features of this width to a file, which replaces an older one.

    Raises:
        OutputError: The file cannot be written; an older one is unchanged.
    """
    check_feature_file(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary, WRITERS[path.suffix](temporary, width) as append:
            yield lambda chunk: append(chunk.names, chunk.features)
    except OSError as error:
        raise OutputError(f"{path} could not be written ({error.strerror or error}).") from None
