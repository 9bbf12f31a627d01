"""The manifest of a large job: its images in numbered chunks, and everything that its predictions depend on.

It is written once, before the first prediction: OUT/manifest/rows-DIGEST.parquet hold the images, a row group for each
chunk, and OUT/manifest/manifest.json lists these files. Files are named by their content and only created, never
changed, so any number of processes may write them at once: whoever creates manifest.json first decides.
"""

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ..core.io import json_bytes
from ..core.text import one_line
from ..data.formats.arrow_rows import import_parquet
from ..data.storage import Storage
from ..data.storage_file import open_file
from ..errors import StorageError
from .input_listing import ImageEntry, InputListing, InputRoot

CHUNK_SIZE = 4096  # images: minutes of work, and a part of about 200 KB (predictions) or 12 MB (features)
MAX_CHUNK_SIZE = 65_536
CHUNKS_PER_FILE = 16  # 65,536 images: about 80 MB while the file is written; 15,000 files for a billion images
MANIFEST_KEY = "manifest/manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """The manifest of one job; the images stay in its files until their chunk is read.

    Attributes:
        storage: Where the output is.
        settings: What predictions depend on: task, model, engine, columns, ... as JSON.
        machine: Versions and CPU of the machine that started the job; for information.
        roots: What the keys of images are relative to.
        num_images: The number of images.
        chunk_size: Images in each chunk but the last.
        files: Keys of the files with the images.
        digest: SHA-256 of manifest.json.
    """

    storage: Storage
    settings: dict[str, Any]
    machine: dict[str, Any]
    roots: tuple[InputRoot, ...]
    num_images: int
    chunk_size: int
    files: tuple[str, ...]
    digest: str

    @property
    def num_chunks(self) -> int:
        """The number of chunks."""
        return -(-self.num_images // self.chunk_size)

    def chunk_length(self, number: int) -> int:
        """Return how many images a chunk has."""
        return min(self.chunk_size, self.num_images - number * self.chunk_size)

    @classmethod
    def read(cls, storage: Storage) -> Self | None:
        """Read the manifest of an output; None if there is none yet."""
        if storage.head(MANIFEST_KEY) is None:
            return None
        data = storage.read(MANIFEST_KEY)
        try:
            content = json.loads(data)
            roots = tuple(InputRoot(*map(os.fsdecode, map(_decode, root))) for root in content["roots"])
            files = tuple(content["files"])
            numbers = int(content["num_images"]), int(content["chunk_size"])
            settings, machine = dict(content["settings"]), dict(content["machine"])
            known = content["format"] == FORMAT and min(numbers) > 0
        except (ValueError, KeyError, TypeError, AttributeError):
            known = False
        if not known:
            name = storage.join(MANIFEST_KEY)
            raise StorageError(
                f"{name} is damaged, or not a manifest of this version of patchword. Choose another --out."
            )
        return cls(storage, settings, machine, roots, *numbers, files, hashlib.sha256(data).hexdigest())

    def entries(self, number: int) -> list[ImageEntry]:
        """Read the images of one chunk."""
        key = self.files[number // CHUNKS_PER_FILE]
        found = self.storage.head(key)
        if found is None:
            raise StorageError(f"{self.storage.join(key)} is missing: the manifest is incomplete. Restore the file.")
        pa, pq = import_parquet("A prediction job")
        try:
            with open_file(self.storage, found) as file:
                table = pq.ParquetFile(pa.PythonFile(file, mode="r")).read_row_group(number % CHUNKS_PER_FILE)
            columns = [table.column(name).to_pylist() for name in ImageEntry._fields]
        except (StorageError, MemoryError):
            raise
        except Exception as error:  # pyarrow's errors have no common base class
            raise StorageError(
                f"{self.storage.join(key)} is damaged ({one_line(error)}). Restore the file, or choose another --out."
            ) from None
        for i in (1, 6):  # key and member
            columns[i] = [os.fsdecode(value) for value in columns[i]]
        return [ImageEntry(*values) for values in zip(*columns, strict=True)]


def write_manifest(
    storage: Storage,
    listing: InputListing,
    settings: Mapping[str, Any],
    machine: Mapping[str, Any],
    chunk_size: int = CHUNK_SIZE,
) -> Manifest:
    """List the images once and write the manifest; if another process was faster, its manifest is returned.

    Raises:
        StorageError: The images cannot be listed, or the manifest cannot be written.
    """
    files, num_images = [], 0
    for entries in _groups(listing, chunk_size * CHUNKS_PER_FILE):
        num_images += len(entries)
        data = encode_entries(entries, chunk_size)
        files.append(f"manifest/rows-{hashlib.sha256(data).hexdigest()[:20]}.parquet")
        storage.create(files[-1], data)
    content = {
        "format": FORMAT,
        "settings": dict(settings),
        "num_images": num_images,
        "chunk_size": chunk_size,
        "roots": [list(map(_encode, root)) for root in listing.roots],
        "files": files,
        "machine": dict(machine),
    }
    if num_images:
        storage.create(MANIFEST_KEY, json_bytes(content, ascii_only=True))
    manifest = Manifest.read(storage)
    if manifest is None:
        from ..errors import DataError

        raise DataError("There are no images in the inputs. Give folders, shards or files.", code="no_image")
    return manifest


def encode_entries(entries: Sequence[ImageEntry], chunk_size: int) -> bytes:
    """Encode images as a Parquet file, with a row group for each chunk; the same images give the same bytes."""
    pa, pq = import_parquet("A prediction job")
    # Keys are bytes: names of local files need not be UTF-8.
    schema = pa.schema(
        [
            ("root", pa.int32()),
            ("key", pa.binary()),
            ("etag", pa.string()),
            ("size", pa.int64()),
            ("kind", pa.string()),
            ("start", pa.int64()),
            ("member", pa.binary()),
        ]
    )
    columns = [list(column) for column in zip(*entries, strict=True)]
    for i in (1, 6):
        columns[i] = [os.fsencode(value) for value in columns[i]]
    table = pa.table([pa.array(c, field.type) for c, field in zip(columns, schema, strict=True)], schema=schema)
    buffer = io.BytesIO()
    pq.write_table(table, buffer, row_group_size=chunk_size, compression="zstd", write_statistics=False)
    return buffer.getvalue()


def _groups(entries: Iterable[ImageEntry], size: int) -> Iterator[list[ImageEntry]]:
    group: list[ImageEntry] = []
    for entry in entries:
        group.append(entry)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _encode(text: str) -> str:
    return os.fsencode(text).decode("latin-1")


def _decode(text: str) -> bytes:
    return text.encode("latin-1")
