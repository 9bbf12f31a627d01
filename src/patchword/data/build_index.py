"""Write the index of tar shards in a folder or an object store: every shard is read once, from front to back.

Owns which shards there are, how they are scanned, and when an index is out of date. It does not know the file format
(`data.shard_index`) or what is in a tar (`data.formats.webdataset`).
"""

import functools
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..core.progress import progress
from ..errors import DataError, Note, OutputError
from .class_labels import format_names
from .formats.indexed_shards import open_index_file
from .formats.webdataset import ShardSample, scan_shard, select_complete
from .name_patterns import split_pattern
from .shard_index import (
    INDEX_FILE,
    IndexedShard,
    ShardIndex,
    ShardRows,
    compare_shards,
    import_pyarrow,
    is_shard,
    write_index,
)
from .sources import split_from_path
from .storage import Storage, StoredObject, open_storage
from .storage_file import open_file

READ_BYTES = 8 * 2**20  # per request
NUM_THREADS = 8  # shards that are read at the same time: requests wait for the network most of the time
_SPLIT_ORDER = ("train", "val", "test", "")
_MAX_IMAGE_BYTES = 2**32 - 1
_MIN_SHARD = 16  # samples; in a smaller shard, a single class can be chance


@dataclass(frozen=True)
class IndexReport:
    """What `build_index` did.

    Attributes:
        location: The index, as messages name it.
        shards: The shards of the index.
        num_classes: The number of classes.
        written: Whether it was written; otherwise it was up to date.
        notes: What is damaged or incomplete in the shards.
    """

    location: str
    shards: tuple[IndexedShard, ...]
    num_classes: int
    written: bool
    notes: tuple[Note, ...]

    @property
    def num_samples(self) -> int:
        """The number of samples in all shards."""
        return sum(shard.num_samples for shard in self.shards)

    def samples_by_split(self) -> dict[str, int]:
        """Return the number of samples of each split; shards whose names have no split count as "train"."""
        counts: dict[str, int] = {}
        for shard in self.shards:
            counts[shard.split or "train"] = counts.get(shard.split or "train", 0) + shard.num_samples
        return counts


def build_index(reference: str, *, overwrite: bool = False) -> IndexReport:
    """Write `index.arrow` beside the shards, unless it is there and up to date.

    Args:
        reference: A folder, or a URL such as "s3://bucket/photos".
        overwrite: Whether to replace an index that is out of date; an index that is up to date is written again, too.

    Raises:
        DataError: There are no shards with labeled images.
        OutputError: An index that is out of date exists, and `overwrite` is not set (code "output_exists").
        StorageError: The folder or the store cannot be read or written.
    """
    import_pyarrow("Writing an index")  # before hours of reading
    folder, pattern = split_pattern(reference)
    if pattern and not Path(reference).is_dir():
        raise DataError(f"{reference} names single shards. Index all shards of the folder: patchword index {folder}")
    storage = open_storage(reference)
    found = list(storage.list())
    shards = sorted((each for each in found if is_shard(each.key)), key=_order_of)
    if not shards:
        raise DataError(f"There are no .tar shards in {reference}. Give the folder or the URL that contains them.")
    existing = next((each for each in found if each.key == INDEX_FILE), None)
    if existing is not None and not overwrite:
        return _check_existing(storage, existing, shards)
    columns, indexed, notes = _scan(storage, shards)
    if not sum(shard.num_samples for shard in indexed):
        detail = f" {notes[-1]}" if notes else ""
        names = format_names(shard.name for shard in indexed)
        raise DataError(f"There are no labeled images in {names}: each sample needs KEY.jpg and KEY.cls.{detail}")
    notes += _check_shuffled(columns)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, INDEX_FILE)
        write_index(path, indexed, columns, notes)
        num_classes = len(ShardIndex(path).labels)
        storage.replace(INDEX_FILE, path.read_bytes())
    return IndexReport(storage.join(INDEX_FILE), tuple(indexed), num_classes, True, tuple(notes))


def _check_existing(storage: Storage, existing: StoredObject, shards: list[StoredObject]) -> IndexReport:
    """Return the report of an index that is up to date; raise `OutputError` for another one."""
    index = open_index_file(storage, existing)
    changed, new = compare_shards(index, shards)
    if changed or new:
        parts = [f"{len(names)} {what}" for names, what in ((changed, "changed or gone"), (new, "new")) if names]
        raise OutputError(
            f"{storage.join(INDEX_FILE)} exists, but is out of date (shards: {', '.join(parts)}; for example "
            f"{(changed + new)[0]}). Add --overwrite to write it again.",
            code="output_exists",
        )
    return IndexReport(storage.join(INDEX_FILE), tuple(index.shards), len(index.labels), False, index.notes)


def _order_of(shard: StoredObject) -> tuple[int, str]:
    """Sort shards by split, so that the rows of a split follow one another, then by name."""
    return _SPLIT_ORDER.index(split_from_path(shard.key)), shard.key


def _scan(storage: Storage, shards: list[StoredObject]) -> tuple[list[ShardRows], list[IndexedShard], list[Note]]:
    columns: list[ShardRows] = []
    indexed: list[IndexedShard] = []
    notes: list[Note] = []
    pool = ThreadPoolExecutor(NUM_THREADS)
    try:
        with progress("indexing shards", len(shards)) as step:
            scanned = pool.map(functools.partial(_scan_one, storage), shards)
            for shard, (rows, problems) in zip(shards, scanned, strict=True):
                split = split_from_path(shard.key)
                version = (shard.key, shard.size, shard.etag)
                indexed.append(IndexedShard(*version, split, len(rows.offsets), rows.digest()))
                columns.append(rows)
                notes += problems
                step()
    finally:
        pool.shutdown(cancel_futures=True)
    return columns, indexed, notes


def _check_shuffled(columns: list[ShardRows]) -> list[Note]:
    """Return a note if the shards are sorted by class: the lanes of a batch would have one class each."""
    large = [rows for rows in columns if len(rows.offsets) >= _MIN_SHARD]
    sorted_shards = [rows for rows in large if len(rows.label_sets) == 1]
    if len({rows.label_sets[0] for rows in sorted_shards}) < 2 or 2 * len(sorted_shards) <= len(large):
        return []
    text = (
        f"{len(sorted_shards)} of {len(columns)} shards have images of one class only. Shards are read from front to "
        f"back, so batches would have few classes: write the shards with their images in random order."
    )
    return [Note(text, "shards_not_shuffled")]


def _scan_one(storage: Storage, shard: StoredObject) -> tuple[ShardRows, list[Note]]:
    with open_file(storage, shard, READ_BYTES) as file:
        scanned = scan_shard(file)
    for sample in scanned.samples.values():
        if sample.size > _MAX_IMAGE_BYTES:
            sample.offset = -1  # no image has 4 GiB
    complete, notes = select_complete(scanned, shard.key)
    return _to_columns(complete), notes


def _to_columns(samples: list[ShardSample]) -> ShardRows:
    names = [sample.member.encode("utf-8", "surrogateescape") for sample in samples]
    sets: dict[tuple[str, ...], int] = {}
    codes = [sets.setdefault(sample.labels or (), len(sets)) for sample in samples]
    return ShardRows(
        b"".join(names),
        np.array([len(name) for name in names], np.int64),
        np.array([sample.offset for sample in samples], np.int64),
        np.array([sample.size for sample in samples], np.uint32),
        list(sets),
        np.array(codes, np.int64),
    )
