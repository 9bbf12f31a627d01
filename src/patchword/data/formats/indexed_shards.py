"""Tar shards with an index, in a folder or an object store: they open at once, however many images they have.

Owns `IndexedSource` and how an index becomes splits. It does not know how the index is stored (`data.shard_index`) or
how blocks of shards are cached (`data.shard_cache`).
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

from ...core.io import atomic_file, cache_dir, digest, locked, wrap_cache_errors, write_file
from ...errors import DataError, Note, StorageError
from ..class_labels import encode_labels, format_names, sort_labels
from ..image_decoder import Mode
from ..name_patterns import expand_numbers
from ..shard_cache import ShardCache
from ..shard_index import INDEX_FILE, ShardIndex, compare_shards
from ..sources import ResolvedDataset, Source, decode_image, split_from_path
from ..storage import Storage, StoredObject, is_remote, open_storage

DEFAULT_CACHE_GIB = 20.0
_DOWNLOAD_BYTES = 8 * 2**20  # per request


class ShardFiles:
    """The shards of an index, read by ranges: from disk, or from an object store through a cache.

    Args:
        storage: Where the shards are.
        index: The index.
        cache_gib: GiB of blocks of an object store on the local disk; 0 requests every image by itself.
    """

    def __init__(self, storage: Storage, index: ShardIndex, cache_gib: float) -> None:
        self.storage, self.index = storage, index
        self.cache = ShardCache(storage, cache_gib * 2**30) if cache_gib and is_remote(storage.url) else None

    def key(self, row: int) -> str:
        """Return the shard and the name of an image in it, by its row in the index."""
        return f"{self.index.shards[self.index.shard_of(row)].name}:{self.index.key(row)}"

    def read(self, row: int) -> bytes:
        """Return the image file of a row of the index.

        Raises:
            StorageError: The shard cannot be read, has changed (code "object_changed") or is gone.
        """
        shard = self.index.shards[self.index.shard_of(row)]
        start = int(self.index.offsets[row])
        stop = start + int(self.index.sizes[row])
        try:
            if self.cache is not None:
                return self.cache.read(shard.name, shard.etag, shard.size, start, stop)
            return self.storage.read_range(shard.name, start, stop, shard.etag)
        except StorageError as error:
            if error.code == "object_changed":
                raise changed_shard(self.storage, shard.name) from None
            raise


class IndexedSource(Source):
    """Images in shards, by an index.

    Args:
        files: The shards and their index.
        rows: The rows of the index that are in this split, int64 (N,).
        labels: The class names, in the order of the class indices.
        targets: The target of each row.
    """

    def __init__(self, files: ShardFiles, rows: np.ndarray, labels: Sequence[str], targets: np.ndarray) -> None:
        super().__init__(labels, targets)
        self.files, self.index, self.rows = files, files.index, rows

    def key(self, index: int) -> str:
        return self.files.key(int(self.rows[index]))

    def name(self, index: int) -> str:
        return self.files.storage.join(self.key(index))

    def read(self, index: int, *, mode: Mode, min_size: tuple[int, int] | None = None) -> Image.Image:
        return decode_image(self.files.read(int(self.rows[index])), self.name(index), mode, min_size)

    def identity(self) -> Iterator[bytes]:
        """Yield the digests of the shards and the positions of the images in them."""
        sizes, order = self.shard_sizes()
        used = [shard for shard, size in zip(self.index.shards, sizes, strict=True) if size]
        for shard in used:
            yield f"{shard.name}\0{shard.digest}\0".encode("utf-8", "surrogatepass")
        is_whole = order is None and len(self) == sum(shard.num_samples for shard in used)
        if is_whole and (np.diff(self.rows) > 0).all():
            return
        # Numbered over the shards in use, so that shards of other splits do not matter.
        counts = np.where(sizes > 0, np.diff(self.index.shard_starts), 0)
        shifts = np.cumsum(counts) - counts - self.index.shard_starts[:-1]
        shards = np.searchsorted(self.index.shard_starts, self.rows, side="right") - 1
        yield (self.rows + shifts[shards]).tobytes()

    def shard_sizes(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the number of images in each shard, and their order by shard if it is not their own order."""
        is_sorted = (self.rows[1:] >= self.rows[:-1]).all()
        order = None if is_sorted else np.argsort(self.rows, kind="stable")
        rows = self.rows if order is None else self.rows[order]
        return np.diff(np.searchsorted(rows, self.index.shard_starts)), order

    def shard_numbers(self) -> dict[str, int]:
        """Return the absolute names of the shards that have images of this source, and their numbers in the index."""
        sizes, _ = self.shard_sizes()
        names = [os.path.abspath(self.files.storage.join(shard.name)) for shard in self.index.shards]
        return {names[number]: int(number) for number in np.flatnonzero(sizes)}

    def shared_names(self, other: Source) -> list[str]:
        """Return the names of the images of `other` that this source has, too, without a list of all names here."""
        mine = self.shard_numbers()
        if isinstance(other, IndexedSource):
            theirs = set(other.shard_numbers())
        else:
            theirs = {os.path.abspath(other.name(index)).rpartition(":")[0] for index in range(len(other))}
        common = [number for name, number in mine.items() if name in theirs]
        if not common:
            return []
        shards = np.searchsorted(self.index.shard_starts, self.rows, side="right") - 1
        names = {os.path.abspath(self.name(index)) for index in np.flatnonzero(np.isin(shards, common)).tolist()}
        return [name for name in map(other.name, range(len(other))) if os.path.abspath(name) in names]


def open_indexed(
    reference: str, multi_label: bool, cache_gib: float = DEFAULT_CACHE_GIB, pattern: str = ""
) -> ResolvedDataset:
    """Open shards by the index beside them.

    Args:
        reference: A folder, or a URL such as "s3://bucket/photos".
        multi_label: Whether an image can have more than one label.
        cache_gib: As in `ShardFiles`.
        pattern: The names of the shards to use: * and ? as in a shell, or {000..012}; by default all of the index.

    Raises:
        DataError: There is no index, or a shard has changed since it was written.
    """
    storage = open_storage(reference)
    found = list(storage.list())
    stored = next((each for each in found if each.key == INDEX_FILE), None)
    if stored is None:
        raise DataError(f"There is no {INDEX_FILE} in {storage.url}. Write it once: patchword index {storage.url}")
    index = open_index_file(storage, stored)
    changed, new = compare_shards(index, found)
    if changed:
        raise changed_shard(storage, *changed)
    notes = list(index.notes)
    if new:
        text = f"Left out, because they are not in {storage.join(INDEX_FILE)}: {format_names(new)}."
        notes.append(Note(text, "shards_not_indexed"))
    numbers = range(len(index.shards)) if not pattern else _match(index, pattern, storage)
    by_split: dict[str, list[int]] = {}
    for number in numbers:
        by_split.setdefault(split_from_path(index.shards[number].name), []).append(number)
    unnamed = by_split.pop("", [])
    if not by_split:
        by_split["train"] = unnamed
    elif unnamed:
        names = format_names(index.shards[number].name for number in unnamed)
        notes.append(Note(f"Left out, because their names do not contain a split: {names}.", "files_left_out"))
    files = ShardFiles(storage, index, cache_gib)
    splits = {name: _open_split(files, chosen, multi_label) for name, chosen in by_split.items()}
    return ResolvedDataset(splits, tuple(notes))


def open_index_file(storage: Storage, stored: StoredObject) -> ShardIndex:
    """Open the index of a storage; that of an object store is downloaded once to the cache directory."""
    if not is_remote(storage.url):
        return ShardIndex(Path(storage.join(INDEX_FILE)))
    folder = cache_dir() / "indexes" / digest(storage.url)[:32]
    path = folder / f"{digest(stored.etag, stored.size)[:32]}.arrow"
    if not path.is_file():
        starts = range(0, stored.size, _DOWNLOAD_BYTES)
        with locked(path), wrap_cache_errors(path):
            if not path.is_file():
                blocks = (storage.read_range(INDEX_FILE, i, i + _DOWNLOAD_BYTES, stored.etag) for i in starts)
                with atomic_file(path) as temporary:
                    write_file(temporary, blocks)
                for old in set(folder.glob("*.arrow")) - {path}:
                    old.unlink(missing_ok=True)  # of an earlier version of the index
    return ShardIndex(path)


def changed_shard(storage: Storage, *names: str) -> StorageError:
    """Make the error for shards that are not those of the index."""
    text = f"{format_names(map(storage.join, names))} changed or disappeared since the index was written."
    advice = f"Restore the shards, or index them again: patchword index {storage.url} --overwrite"
    return StorageError(f"{text} {advice}", code="object_changed")


def _match(index: ShardIndex, pattern: str, storage: Storage) -> list[int]:
    """Return the numbers of the shards whose names match; every number of {000..012} must match."""
    number_of = {shard.name: number for number, shard in enumerate(index.shards)}
    numbers: set[int] = set()
    for each in expand_numbers(pattern):
        matches = (
            {number_of[each]}
            if each in number_of
            else {
                number
                for name, number in number_of.items()
                if name.count("/") == each.count("/") and PurePosixPath(name).match(each)
            }
        )
        if not matches:
            raise DataError(f"{storage.join(pattern)}: the index has no shard {each}.")
        numbers |= matches
    return sorted(numbers)


def _open_split(files: ShardFiles, numbers: list[int], multi_label: bool) -> IndexedSource:
    index = files.index
    rows, is_range = _rows_of(index, numbers)
    if not len(rows):
        names = format_names(files.storage.join(index.shards[number].name) for number in numbers)
        raise DataError(f"There are no labeled images in {names}: each sample needs KEY.jpg and KEY.cls.")
    if index.codes is None:
        sample_labels = [index.labels_of(row) for row in rows.tolist()]
        labels, targets = encode_labels(
            sample_labels, multi_label, lambda i: files.storage.join(files.key(int(rows[i])))
        )
        return IndexedSource(files, rows, labels, targets)
    codes = index.codes[rows[0] : rows[-1] + 1] if is_range else index.codes[rows]  # a view, without a copy
    used = np.flatnonzero(np.bincount(codes, minlength=len(index.labels))).tolist()
    labels = sort_labels(index.labels[code] for code in used)
    if labels != index.labels:
        new_code = {label: code for code, label in enumerate(labels)}
        lookup = np.zeros(len(index.labels), np.int64)
        lookup[used] = [new_code[index.labels[code]] for code in used]
        codes = lookup[codes]
    return IndexedSource(files, rows, labels, codes)


def _rows_of(index: ShardIndex, numbers: list[int]) -> tuple[np.ndarray, bool]:
    """Return the rows of some shards, and whether they follow one another."""
    starts, stops = index.shard_starts[numbers], index.shard_starts[np.add(numbers, 1)]
    if (starts[1:] == stops[:-1]).all():
        return np.arange(starts[0], stops[-1]), True
    return np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)]), False
