"""The index of tar shards: shard, offset, size, key and label of every sample, in one memory-mapped Arrow file.

Owns the file `index.arrow`. Nothing is read when it is opened but its schema: the operating system loads the columns
when they are used, and the processes of a machine share them. It does not know how shards are scanned
(`data.build_index`) or images are read (`data.formats.indexed_shards`).
"""

import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..core.text import one_line
from ..errors import ConfigError, DataError, Note, PatchwordError, how_to_install
from .class_labels import sort_labels
from .storage import StoredObject

if TYPE_CHECKING:
    import pyarrow as pa

INDEX_FILE = "index.arrow"
_METADATA, _FORMAT = b"patchword.index", 1
_ARROW_MAGIC = b"ARROW1"  # at the start and at the end of every Arrow file


class ShardRows(NamedTuple):
    """The samples of a shard, without a Python object for each.

    Attributes:
        keys: The names of the images in the shard, one after the other, in UTF-8 if the tar has them in UTF-8.
        key_lengths: The length of each name in bytes, int64.
        offsets: Where each image begins in the shard, in bytes, int64.
        sizes: The size of each image in bytes, uint32.
        label_sets: The distinct labels of samples: one class name, or several.
        label_codes: The labels of each sample, as an index into `label_sets`, int64.
    """

    keys: bytes
    key_lengths: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    label_sets: list[tuple[str, ...]]
    label_codes: np.ndarray

    def digest(self) -> str:
        """Return the SHA-256 of everything in it."""
        digest = hashlib.sha256(json.dumps(self.label_sets).encode())
        digest.update(self.keys)
        for column in (self.key_lengths, self.offsets, self.sizes, self.label_codes):
            digest.update(np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class IndexedShard:
    """A shard of an index.

    Attributes:
        name: Its path below the folder of the index, with "/" between folders.
        size: Its size in bytes, when it was indexed.
        etag: Its version then, as `Storage` reports it.
        split: "train", "val", "test", or "" if its name does not tell.
        num_samples: Its number of samples.
        digest: SHA-256 of keys, offsets, sizes and labels of its samples.
    """

    name: str
    size: int
    etag: str
    split: str
    num_samples: int
    digest: str


class ShardIndex:
    """An open index. Its arrays are views of the file; do not write to them.

    Attributes:
        shards: The shards, in the order of their rows.
        shard_starts: The first row of each shard, and the number of rows at the end: int64 (number of shards + 1,).
        labels: All class names, sorted.
        notes: What the scan found damaged or incomplete.
        offsets: Where the image of each row begins in its shard, int64.
        sizes: The size of each image in bytes, uint32.
        codes: The class of each row, as an index into `labels`, int64; None if rows can have several.
        class_lists: For such data, the classes of all rows one after the other, and where each row's begin; else None.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                # Copy on write: torch warns about arrays that cannot be written.
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._read(path)
        except PatchwordError:
            raise
        except Exception as error:  # pyarrow's errors have no common base class
            raise DataError(
                f"The index {path} is damaged ({one_line(error)}). Write it again with `patchword index --overwrite`."
            ) from None

    def _read(self, path: Path) -> None:
        pa = import_pyarrow(f"Reading {path}")
        reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(self._mapping)))
        if _METADATA not in (reader.schema.metadata or {}):
            raise DataError(f"{path} is not an index of patchword, but that is the name of one. Rename it.")
        metadata = json.loads(reader.schema.metadata[_METADATA])
        if metadata["format"] != _FORMAT:
            advice = "Write it again with `patchword index --overwrite`."
            raise DataError(f"The index {path} was written by another version of patchword. {advice}")
        batch = reader.get_batch(0)
        batch.validate()
        self.shards = [IndexedShard(**shard) for shard in metadata["shards"]]
        self.shard_starts = np.cumsum([0, *(shard.num_samples for shard in self.shards)])
        self.labels: tuple[str, ...] = tuple(metadata["labels"])
        self.notes = tuple(Note.from_json(note) for note in metadata["notes"])
        if reader.num_record_batches != 1 or len(self) != batch.num_rows:
            raise ValueError("its number of rows is inconsistent")
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        self.offsets = self._view(columns["offset"].buffers()[1], np.int64, len(self))
        self.sizes = self._view(columns["size"].buffers()[1], np.uint32, len(self))
        _, key_starts, key_bytes = columns["key"].buffers()
        self._key_starts = self._view(key_starts, np.int64, len(self) + 1)
        self._key_bytes = self._view(key_bytes, np.uint8, key_bytes.size if key_bytes else 0)
        self.codes, self.class_lists = None, None
        if "label" in columns:
            self.codes = self._view(columns["label"].indices.buffers()[1], np.int64, len(self))
        else:
            lists = columns["labels"]
            starts = self._view(lists.buffers()[1], np.int64, len(self) + 1)
            self.class_lists = self._view(lists.values.indices.buffers()[1], np.int64, len(lists.values)), starts

    def _view(self, buffer: "pa.Buffer | None", dtype: type, count: int) -> np.ndarray:
        """Return the buffer of a column as an array, without a copy."""
        if buffer is None or count == 0:
            return np.empty(0, dtype)
        base = np.frombuffer(self._mapping, np.uint8)
        return np.frombuffer(self._mapping, dtype, count, offset=buffer.address - base.ctypes.data)

    def __len__(self) -> int:
        return int(self.shard_starts[-1])

    def key(self, row: int) -> str:
        """Return the name of an image in its shard."""
        start, stop = self._key_starts[row], self._key_starts[row + 1]
        return self._key_bytes[start:stop].tobytes().decode("utf-8", "surrogateescape")

    def labels_of(self, row: int) -> tuple[str, ...]:
        """Return the class names of a row."""
        if self.class_lists is None:
            assert self.codes is not None
            return (self.labels[self.codes[row]],)
        values, starts = self.class_lists
        return tuple(self.labels[code] for code in values[starts[row] : starts[row + 1]].tolist())

    def shard_of(self, row: int) -> int:
        """Return the number of the shard that holds a row."""
        return int(np.searchsorted(self.shard_starts, row, side="right")) - 1


def write_index(path: Path, shards: Sequence[IndexedShard], rows: Sequence[ShardRows], notes: Sequence[Note]) -> None:
    """Write an index file.

    Args:
        path: A new file.
        shards: The shards.
        rows: The samples of each shard.
        notes: What the user should know about the shards.
    """
    pa = import_pyarrow(f"Writing {path}")
    labels, label_column = _label_column(rows)
    shard_numbers = np.repeat(np.arange(len(rows), dtype=np.int32), [len(shard.offsets) for shard in rows])
    columns = {
        "shard": _dictionary(shard_numbers, [shard.name for shard in shards]),
        "offset": pa.array(np.concatenate([shard.offsets for shard in rows])),
        "size": pa.array(np.concatenate([shard.sizes for shard in rows])),
        "key": _key_column(rows),
        **label_column,
    }
    metadata = {
        "format": _FORMAT,
        "shards": [asdict(shard) for shard in shards],
        "labels": labels,
        "notes": [note.to_json() for note in notes],
    }
    # A single batch without compression: each column is then one array in the file, which is used where it lies.
    batch = pa.record_batch(list(columns.values()), names=list(columns))
    batch = batch.replace_schema_metadata({_METADATA: json.dumps(metadata)})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def _label_column(rows: Sequence[ShardRows]) -> tuple[tuple[str, ...], "dict[str, pa.Array]"]:
    """Return all class names, and the column `label`, or `labels` if samples can have several or none."""
    pa = import_pyarrow("Writing an index")
    labels = sort_labels(name for shard in rows for names in shard.label_sets for name in names)
    index_of = {label: index for index, label in enumerate(labels)}
    sets = [[index_of[name] for name in names] for shard in rows for names in shard.label_sets]
    first = np.cumsum([0, *(len(shard.label_sets) for shard in rows)])
    codes = np.concatenate([shard.label_codes + start for shard, start in zip(rows, first[:-1], strict=True)])
    if all(len(indices) == 1 for indices in sets):
        return labels, {"label": _dictionary(np.array(sets, np.int64)[:, 0][codes], labels)}
    lengths = np.array([len(indices) for indices in sets])[codes]
    values = np.array([index for code in codes for index in sets[code]], np.int64)
    starts = pa.array(np.concatenate([[0], np.cumsum(lengths)]))
    return labels, {"labels": pa.LargeListArray.from_arrays(starts, _dictionary(values, labels))}


def _dictionary(codes: np.ndarray, names: Sequence[str]) -> "pa.DictionaryArray":
    """Make a text column from indices into a list of names."""
    pa = import_pyarrow("Writing an index")
    shown = [name.encode("utf-8", "replace").decode() for name in names]  # the metadata hold them as they are
    return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(shown, pa.string()))


def _key_column(rows: Sequence[ShardRows]) -> "pa.Array":
    """Make the column of keys: text, or bytes if a name in a tar is not UTF-8."""
    pa = import_pyarrow("Writing an index")
    data = b"".join(shard.keys for shard in rows)
    starts = np.concatenate([[0], np.cumsum(np.concatenate([shard.key_lengths for shard in rows]))])
    try:
        data.decode()
        kind = pa.large_string()
    except UnicodeDecodeError:
        kind = pa.large_binary()
    return pa.Array.from_buffers(kind, len(starts) - 1, [None, pa.py_buffer(starts), pa.py_buffer(data)])


def is_shard(key: str) -> bool:
    """Whether a name is that of a tar; hidden files and those in hidden folders are ignored."""
    return key.lower().endswith(".tar") and not any(name.startswith(".") for name in key.split("/"))


def compare_shards(index: ShardIndex, found: Iterable[StoredObject]) -> tuple[list[str], list[str]]:
    """Return the shards of an index that changed or are gone, and those that are new."""
    versions = {each.key: (each.size, each.etag) for each in found if is_shard(each.key)}
    known = {shard.name: (shard.size, shard.etag) for shard in index.shards}
    changed = [name for name, version in known.items() if versions.get(name) != version]
    return changed, sorted(versions.keys() - known.keys())


def is_index(path: Path) -> bool:
    """Whether a file is an index, intact or not: other programs also write Arrow files."""
    try:
        with path.open("rb") as file:
            if file.read(len(_ARROW_MAGIC)) != _ARROW_MAGIC:
                return False
            if _METADATA in file.read(2**26):
                return True
            file.seek(-len(_ARROW_MAGIC), os.SEEK_END)
            return file.read() != _ARROW_MAGIC  # of an Arrow file that breaks off, nothing is known
    except OSError:
        return False


def import_pyarrow(purpose: str) -> Any:
    """Import pyarrow. Raises `ConfigError` with the install line without it."""
    try:
        import pyarrow as pa
        import pyarrow.ipc  # makes pa.ipc available
    except ImportError:
        raise ConfigError(f"{purpose} needs the package pyarrow: {how_to_install('remote')}.") from None
    return pa
