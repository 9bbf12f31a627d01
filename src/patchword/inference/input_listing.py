"""List the images of a large job, without reading them and without holding them all in memory.

An input is a folder, a tar or Parquet file, a CSV list, an image or a local pattern, on a disk or in an object store.
Each image becomes an `ImageEntry`, which says where its bytes are and which version of them is meant.
"""

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..core.text import pluralize
from ..data.datasets.registry import DATASET_NAMES
from ..data.formats.arrow_rows import find_image_column, import_parquet
from ..data.formats.csv_list import parse_paths
from ..data.formats.webdataset import image_members
from ..data.image_decoder import IMAGE_SUFFIXES
from ..data.prefetch import prefetch
from ..data.storage import Storage, StorageOpener, StoredObject, is_remote, open_object, open_storage
from ..data.storage_file import open_file
from ..errors import DataError, Note, StorageError

LIST_SUFFIXES = (".csv", ".tsv")
CONTAINER_SUFFIXES = (".tar", ".parquet")
# Threads that wait for an object store: the headers of shards and the versions of listed files.
NUM_SHARD_THREADS, NUM_FILE_THREADS = 8, 32
UNKNOWN_SIZE = -1
NO_ROOT = -1  # of an entry whose key is a whole reference, as in a CSV file that lists URLs


class InputRoot(NamedTuple):
    """A folder or prefix below which images are.

    Attributes:
        name: As the user wrote it: names of images start with it.
        url: Absolute, so that other processes find it.
    """

    name: str
    url: str


class ImageEntry(NamedTuple):
    """Where the bytes of one image are.

    Attributes:
        root: Index of the root, or `NO_ROOT`.
        key: Key of the object below the root.
        etag: Version of the object; "" if it did not exist.
        size: Bytes of the image; `UNKNOWN_SIZE` in a Parquet file.
        kind: "file", "tar", "parquet", or "damaged" for the end of a tar that cannot be read.
        start: Offset in a tar; row in a Parquet file.
        member: Name in a tar; for "damaged", what is wrong.
    """

    root: int
    key: str
    etag: str
    size: int
    kind: str = "file"
    start: int = 0
    member: str = ""


class InputListing:
    """The images of references, in order: iterate once, then read `roots` and `notes`.

    Args:
        references: What the user gave.
        exclude: The output of the job, which is not an input even if it is inside of one.
    """

    def __init__(self, references: Sequence[str], exclude: str = "") -> None:
        self.references, self.exclude = references, exclude
        self.roots: list[InputRoot] = []
        self.notes: list[Note] = []
        self._indices: dict[InputRoot, int] = {}
        self._opener = StorageOpener()

    def __iter__(self) -> Iterator[ImageEntry]:
        for reference in self.references:
            yield from self._list(reference)

    def _add_root(self, name: str, url: str) -> int:
        root = InputRoot(name, url)
        if root not in self._indices:
            self._indices[root] = len(self.roots)
            self.roots.append(root)
        return self._indices[root]

    def _list(self, reference: str) -> Iterator[ImageEntry]:
        """List one reference."""
        suffix = os.path.splitext(reference)[1].lower()
        is_file = suffix in (*IMAGE_SUFFIXES, *CONTAINER_SUFFIXES, *LIST_SUFFIXES) and not reference.endswith("/")
        if reference in DATASET_NAMES:
            text = f"{reference} is a named dataset; --out takes files. Use --csv, or ./{reference} for a folder."
            raise DataError(text)
        if is_remote(reference):
            yield from self._list_file(reference) if is_file else self._list_folder(reference, reference)
            return
        path = Path(reference).expanduser()
        if path.is_dir():
            yield from self._list_folder(reference, str(path.absolute()))
        elif not path.exists() and glob.has_magic(reference):
            yield from self._list_pattern(str(path))
        elif is_file or path.is_file():
            yield from self._list_file(str(path))
        else:
            raise DataError(
                f"There is no file or folder {reference}. Give images, folders, tar or Parquet files, CSV lists or "
                f"URLs such as s3://bucket/photos/."
            )

    def _list_folder(self, name: str, url: str) -> Iterator[ImageEntry]:
        """List the images below a folder or, if there are none, those in its tar and Parquet files."""
        storage = open_storage(url)
        root = self._add_root(name.rstrip("/") or name, storage.url)
        containers: list[StoredObject] = []
        num_images = 0
        for found in storage.list():
            if self._is_left_out(storage, found.key):
                continue
            suffix = os.path.splitext(found.key)[1].lower()
            if suffix in IMAGE_SUFFIXES:
                num_images += 1
                yield ImageEntry(root, found.key, found.etag, found.size)
            elif suffix in CONTAINER_SUFFIXES:
                containers.append(found)
        if not num_images:
            yield from self._list_containers(root, storage, containers)
        elif containers:
            text = f"{name} contains images, so {pluralize(len(containers), 'tar or Parquet file')} in it were left out"
            self.notes.append(Note(f"{text}: give them as inputs of their own.", "files_left_out"))

    def _is_left_out(self, storage: Storage, key: str) -> bool:
        hidden = key.startswith(".") or "/." in key
        return hidden or bool(self.exclude and storage.join(key).startswith(f"{self.exclude}/"))

    def _list_file(self, reference: str) -> Iterator[ImageEntry]:
        """List an image, a tar or Parquet file, or a CSV list."""
        storage, key = open_object(reference if is_remote(reference) else Path(reference).absolute())
        name = os.path.dirname(reference)
        root = self._add_root(name, storage.url)
        suffix = os.path.splitext(key)[1].lower()
        if suffix in LIST_SUFFIXES:
            paths = parse_paths(storage.read(key), reference)
            yield from prefetch(partial(self._listed, root, storage), paths, NUM_FILE_THREADS)
            return
        found = storage.head(key)
        if suffix not in CONTAINER_SUFFIXES:  # a missing image is reported when it is read
            yield ImageEntry(root, key, found.etag, found.size) if found else ImageEntry(root, key, "", UNKNOWN_SIZE)
        elif found is None:
            raise StorageError(f"{reference} does not exist. Check the path.", code="object_not_found")
        else:
            yield from self._list_containers(root, storage, [found])

    def _listed(self, root: int, storage: Storage, path: str) -> ImageEntry:
        """Return the entry of a path in a CSV file: relative to its folder, absolute, or a URL."""
        if is_remote(path) or os.path.isabs(path):
            elsewhere, key = self._opener.open_object(path)
            found = elsewhere.head(key)
            root, key = NO_ROOT, path
        else:
            key, found = path, storage.head(path)
        return ImageEntry(root, key, found.etag, found.size) if found else ImageEntry(root, key, "", UNKNOWN_SIZE)

    def _list_pattern(self, pattern: str) -> Iterator[ImageEntry]:
        """List the files that match a local pattern, sorted; folders are not entered."""
        parts = Path(pattern).parts
        fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
        folder = Path(*parts[:fixed])
        storage = open_storage(folder.absolute())
        root = self._add_root("" if folder == Path() else str(folder), storage.url)
        matches = sorted(match for match in glob.glob(pattern, recursive=True) if os.path.isfile(match))
        found = [storage.head(Path(match).relative_to(folder).as_posix()) for match in matches]
        kept = [each for each in found if each and not each.key.startswith(".")]
        suffixes = [os.path.splitext(each.key)[1].lower() for each in kept]
        for each, suffix in zip(kept, suffixes, strict=True):
            if suffix in IMAGE_SUFFIXES:
                yield ImageEntry(root, each.key, each.etag, each.size)
        shards = [each for each, suffix in zip(kept, suffixes, strict=True) if suffix in CONTAINER_SUFFIXES]
        yield from self._list_containers(root, storage, shards)

    def _list_containers(self, root: int, storage: Storage, found: Iterable[StoredObject]) -> Iterator[ImageEntry]:
        """List the images in tar and Parquet files; several are opened at once."""
        for entries in prefetch(partial(container_entries, root, storage), found, NUM_SHARD_THREADS):
            yield from entries


def container_entries(root: int, storage: Storage, found: StoredObject) -> Iterable[ImageEntry]:
    """Return the images in one tar or Parquet file."""
    if found.key.lower().endswith(".parquet"):
        count = count_rows(storage, found)
        return (ImageEntry(root, found.key, found.etag, UNKNOWN_SIZE, "parquet", row) for row in range(count))
    with open_file(storage, found) as file:
        members, damage = image_members(file)
    entries = [
        ImageEntry(root, found.key, found.etag, member.size, "tar", member.offset_data, member.name)
        for member in members
    ]
    if damage:
        text = f"{damage} The {pluralize(len(members), 'image')} before the damage are used."
        entries.append(ImageEntry(root, found.key, found.etag, 0, "damaged", 0, text))
    return entries


def count_rows(storage: Storage, found: StoredObject) -> int:
    """Return the number of rows of a Parquet file, after a check that it has an image column."""
    name = storage.join(found.key)
    with open_file(storage, found) as file:
        table = open_parquet_table(file, name)
        find_image_column(table.schema_arrow, name)
        return int(table.metadata.num_rows)


def open_parquet_table(file: object, name: str) -> "pq.ParquetFile":  # type: ignore[name-defined]  # noqa: F821
    """Open a Parquet file that is read from a storage."""
    pa, pq = import_parquet(f"Reading {name}")
    try:
        return pq.ParquetFile(pa.PythonFile(file, mode="r"), pre_buffer=True)
    except pa.ArrowInvalid as error:
        raise DataError(f"Cannot read {name}: it is damaged or not a Parquet file ({error}).") from None


def entry_name(roots: Sequence[InputRoot], entry: ImageEntry) -> str:
    """Return the name of an image, as in the column `path`."""
    name = entry.key
    if entry.root != NO_ROOT and (folder := roots[entry.root].name):
        name = f"{folder}/{entry.key}" if is_remote(folder) else os.path.join(folder, entry.key)
    if entry.kind == "parquet":
        return f"{name} row {entry.start}"
    return f"{name}:{entry.member}" if entry.kind == "tar" else name
