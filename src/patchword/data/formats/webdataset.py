"""WebDataset tar shards: KEY.jpg beside KEY.cls or KEY.json.

Each tar is indexed once: the offset and size of every image. Images are then read in any order, without unpacking, so
that names in a tar are never used as paths. Of a damaged or truncated tar, the samples before the damage are used.
"""

import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from ...errors import DataError, ImageError, Note, PatchwordError, StorageError
from ..class_labels import encode_labels, format_names, parse_labels
from ..image_decoder import IMAGE_SUFFIXES, Mode
from ..sources import ResolvedDataset, Source, decode_image

_MAX_LABEL_BYTES = 2**20  # of a .cls or .json file


@dataclass
class ShardSample:
    """What was found of a sample so far.

    Attributes:
        offset: Where the image begins in the tar; -1: not found yet.
        size: The size of the image in bytes.
        member: The name of the image in the tar.
        labels: The class names; None: not found yet.
    """

    offset: int = -1
    size: int = 0
    member: str = ""
    labels: tuple[str, ...] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether there are an image and labels."""
        return self.offset >= 0 and self.labels is not None


class ShardSource(Source):
    """Images at known offsets in the tar files below `root`."""

    def __init__(
        self,
        root: Path,
        files: list[str],
        samples: list[tuple[int, ShardSample]],  # each with the index of its shard
        labels: Sequence[str],
        targets: np.ndarray,
    ) -> None:
        super().__init__(labels, targets)
        self.root, self.files = root, files
        self.shards = np.array([shard for shard, _ in samples], dtype=np.int32)
        self.offsets = np.array([sample.offset for _, sample in samples], dtype=np.int64)
        self.sizes = np.array([sample.size for _, sample in samples], dtype=np.int64)
        self.members = [sample.member for _, sample in samples]

    def key(self, index: int) -> str:
        row = self.rows[index]
        return f"{self.files[self.shards[row]]}:{self.members[row]}"

    def name(self, index: int) -> str:
        return os.path.join(self.root, self.key(index))

    def read(self, index: int, *, mode: Mode, min_size: tuple[int, int] | None = None) -> Image.Image:
        row = self.rows[index]
        try:
            with open(
                self.root / self.files[self.shards[row]], "rb"
            ) as file:  # opened per call: threads share no file position
                file.seek(self.offsets[row])
                data = file.read(self.sizes[row])
        except OSError as error:
            raise ImageError(f"{error.strerror}.", name=self.name(index)) from error
        return decode_image(data, self.name(index), mode, min_size)


def open_shards(files_by_split: dict[str, list[Path]], multi_label: bool) -> ResolvedDataset:
    """Open the tar files of each split."""
    absolute = {name: [file.absolute() for file in files] for name, files in files_by_split.items()}
    root = Path(os.path.commonpath([file.parent for files in absolute.values() for file in files]))
    notes: list[Note] = []
    splits = {name: _open_split(root, files, multi_label, notes) for name, files in absolute.items()}
    return ResolvedDataset(splits, tuple(notes))


def _open_split(root: Path, files: list[Path], multi_label: bool, notes: list[Note]) -> ShardSource:
    samples: list[tuple[int, ShardSample]] = []
    for shard, file in enumerate(files):
        complete, problems = select_complete(_index_shard(file), str(file))
        samples += [(shard, sample) for sample in complete]
        notes += problems
    if not samples:
        detail = f" {notes[-1]}" if notes else ""
        shards = format_names(map(str, files))
        raise DataError(f"There are no labeled images in {shards}: each sample needs KEY.jpg and KEY.cls.{detail}")
    names = [file.relative_to(root).as_posix() for file in files]
    sample_labels = [sample.labels or () for _, sample in samples]
    labels, targets = encode_labels(
        sample_labels, multi_label, lambda i: f"{files[samples[i][0]]}:{samples[i][1].member}"
    )
    return ShardSource(root, names, samples, labels, targets)


class ScannedShard(NamedTuple):
    """The samples of a tar by key, complete or not, and a sentence on its damage, or ""."""

    samples: dict[str, ShardSample]
    problem: str


def select_complete(scanned: ScannedShard, name: str) -> tuple[list[ShardSample], list[Note]]:
    """Return the samples that have image and label, and notes on the others and on damage."""
    samples, problem = scanned
    complete = [sample for sample in samples.values() if sample.is_complete]
    notes = []
    if problem:
        text = f"{name}: {problem} The {len(complete)} samples before the damage are used."
        notes.append(Note(text, "shard_damaged"))
    if partial := [key for key, sample in samples.items() if not sample.is_complete]:
        text = f"{name}: left out, because image or label is missing or unreadable: {format_names(partial)}."
        notes.append(Note(text, "samples_left_out"))
    return complete, notes


def _index_shard(path: Path) -> ScannedShard:
    try:
        with open(path, "rb") as file:
            return scan_shard(file)
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from error


def scan_shard(file: BinaryIO) -> ScannedShard:
    """Find the samples of a tar, a seekable file.

    Raises:
        OSError, StorageError: It cannot be read at all.
    """
    samples: dict[str, ShardSample] = {}
    try:
        for member in iter_members(file):
            _add_member(samples, member, file)
    except (OSError, PatchwordError):
        raise
    except Exception as error:  # a damaged tar can raise nearly anything, even RecursionError
        return ScannedShard(samples, f"it is damaged or truncated ({error}).")
    return ScannedShard(samples, "")


def iter_members(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files; raises `tarfile.ReadError` at the first damage."""
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    if file.read(2) == b"\x1f\x8b":
        raise tarfile.ReadError("it is compressed, which prevents random access; decompress it with gunzip")
    file.seek(0)
    end = 0
    with tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # tarfile would keep every member in memory
            if member.size < 0 or member.offset_data < end:
                raise tarfile.ReadError("its member sizes are inconsistent")  # a negative size can loop forever
            end = member.offset_data + member.size
            if end > length:
                raise tarfile.ReadError(f"{member.name!r} extends beyond the end of the file")
            if member.isreg():
                yield member
        file.seek(tar.offset)
        # tarfile treats an invalid header as the end. The real end is a block of zeros.
        if any(file.read(tarfile.BLOCKSIZE)):
            raise tarfile.ReadError(f"byte {tar.offset:,} is not a valid header")


def image_members(file: BinaryIO) -> tuple[list[tarfile.TarInfo], str]:
    """Return the images in a tar, labeled or not, and a sentence on its damage or ""."""
    images = []
    try:
        for member in iter_members(file):
            name = member.name.rpartition("/")[2]
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES:
                images.append(member)
    except StorageError:
        raise
    except Exception as error:  # a damaged tar can raise nearly anything, even RecursionError
        return images, f"it is damaged or truncated ({error})."
    return images, ""


def _add_member(samples: dict[str, ShardSample], member: tarfile.TarInfo, file: BinaryIO) -> None:
    folder, _, name = member.name.rpartition("/")
    stem, _, suffix = name.partition(".")  # WebDataset: a key ends at the first dot
    suffix = suffix.lower()
    if not stem:
        return  # hidden files, such as ._0001.jpg from macOS
    sample = samples.setdefault(f"{folder}/{stem}" if folder else stem, ShardSample())
    if f".{suffix}" in IMAGE_SUFFIXES and sample.offset < 0:
        sample.offset, sample.size, sample.member = member.offset_data, member.size, member.name
    elif suffix in ("cls", "json") and member.size <= _MAX_LABEL_BYTES and sample.labels is None:
        file.seek(member.offset_data)
        sample.labels = _read_label(file.read(member.size), suffix)


def _read_label(data: bytes, suffix: str) -> tuple[str, ...] | None:
    try:
        text = data.decode("utf-8-sig")
        if suffix == "cls":
            return parse_labels(text) or None
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    value = content.get("label", content.get("labels")) if isinstance(content, dict) else None
    return () if value == [] else parse_labels(value) or None
