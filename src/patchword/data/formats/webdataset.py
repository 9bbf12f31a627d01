"""Tar files of pictures and labels as WebDataset writes them: KEY.jpg beside KEY.cls or KEY.json.

Each tar is gone through once, to note where every picture begins and ends; pictures are then read from there, in any
order. Nothing is ever unpacked, so names in a tar are only names. A tar that is damaged or cut short gives what can be
read before that.
"""

import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from ...errors import DataError, ImageError, Note
from ..class_labels import parse_labels, encode_labels, format_names
from ..images import IMAGE_SUFFIXES, Mode
from ..sources import ResolvedDataset, Source, decode_image

_LONGEST_LABEL = 2**20  # bytes of a .cls or .json file


@dataclass
class _Sample:
    offset: int = -1  # of the picture in the tar; -1: none has been found
    size: int = 0
    file: str = ""
    words: tuple[str, ...] | None = None  # None: no label has been found


class ShardSource(Source):
    """Pictures at known places in tar files, which lie below `root`."""

    def __init__(
        self,
        root: Path,
        files: list[str],
        samples: list[tuple[int, _Sample]],  # each with the index of its file
        labels: Sequence[str],
        targets: np.ndarray,
    ) -> None:
        super().__init__(labels, targets)
        self.root, self.files = root, files
        self.shards = np.array([shard for shard, _ in samples], dtype=np.int32)
        self.offsets = np.array([sample.offset for _, sample in samples], dtype=np.int64)
        self.sizes = np.array([sample.size for _, sample in samples], dtype=np.int64)
        self.members = [sample.file for _, sample in samples]

    def key(self, index: int) -> str:
        row = self.rows[index]
        return f"{self.files[self.shards[row]]}:{self.members[row]}"

    def name(self, index: int) -> str:
        return os.path.join(self.root, self.key(index))

    def read(self, index: int, *, mode: Mode, min_size: tuple[int, int] | None = None) -> Image.Image:
        row = self.rows[index]
        try:
            with open(self.root / self.files[self.shards[row]], "rb") as file:  # one for each call: no shared position
                file.seek(self.offsets[row])
                data = file.read(self.sizes[row])
        except OSError as error:
            raise ImageError(f"{error.strerror}.", name=self.name(index)) from error
        return decode_image(data, self.name(index), mode, min_size)


def open_shards(parts: dict[str, list[Path]], multi_label: bool) -> ResolvedDataset:
    """The samples of tar files, which are already sorted into parts."""
    every = [file.absolute() for files in parts.values() for file in files]
    root = Path(os.path.commonpath([file.parent for file in every]))
    notes: list[Note] = []
    found = {name: _part(root, [f.absolute() for f in files], multi_label, notes) for name, files in parts.items()}
    return ResolvedDataset(found, tuple(notes))


def _part(root: Path, files: list[Path], multi_label: bool, notes: list[Note]) -> ShardSource:
    samples: list[tuple[int, _Sample]] = []
    for shard, file in enumerate(files):
        index, problem = _index(file)
        complete = [sample for sample in index.values() if sample.offset >= 0 and sample.words is not None]
        samples += [(shard, sample) for sample in complete]
        if problem:
            text = f"{file}: {problem} The {len(complete)} samples before that are used."
            notes.append(Note(text, "shard_damaged"))
        if partial := [key for key, sample in index.items() if sample.offset < 0 or sample.words is None]:
            text = f"{file}: left out, as the image or label is missing or cannot be read: {format_names(partial)}."
            notes.append(Note(text, "samples_left_out"))
    if not samples:
        said = f" {notes[-1]}" if notes else ""
        raise DataError(f"No pictures with labels are in {format_names(map(str, files))}: KEY.jpg and KEY.cls each.{said}")
    names = [file.relative_to(root).as_posix() for file in files]
    words = [sample.words or () for _, sample in samples]
    labels, targets = encode_labels(words, multi_label, lambda i: f"{files[samples[i][0]]}:{samples[i][1].file}")
    return ShardSource(root, names, samples, labels, targets)


def _index(path: Path) -> tuple[dict[str, _Sample], str]:
    """The samples of a tar by key, and a sentence on what is wrong with it."""
    samples: dict[str, _Sample] = {}
    try:
        with open(path, "rb") as file:
            for member in _members(file):
                _note(samples, member, file)
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from error
    except Exception as error:  # tarfile answers damage with nearly everything, RecursionError included
        return samples, f"it is damaged or cut short ({error})."
    return samples, ""


def _members(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Ordinary files, as long as everything is in order; else the exception says what is not."""
    length = os.fstat(file.fileno()).st_size
    if file.read(2) == b"\x1f\x8b":
        raise tarfile.ReadError("it is compressed, so nothing in it can be found quickly; unpack it with gunzip")
    file.seek(0)
    end = 0
    with tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # it would keep them all
            if member.size < 0 or member.offset_data < end:
                raise tarfile.ReadError("its sizes contradict each other")  # a negative one can lead in a circle
            end = member.offset_data + member.size
            if end > length:
                raise tarfile.ReadError(f"{member.name!r} ends after the file does")
            if member.isreg():
                yield member
        file.seek(tar.offset)
        # tarfile takes a header it does not understand for the end. The true end is a block of zeros.
        if any(file.read(tarfile.BLOCKSIZE)):
            raise tarfile.ReadError(f"what stands at byte {tar.offset:,} is no header")


def _note(samples: dict[str, _Sample], member: tarfile.TarInfo, file: BinaryIO) -> None:
    folder, _, name = member.name.rpartition("/")
    stem, _, suffix = name.partition(".")  # WebDataset's rule: a key ends at the first dot
    suffix = suffix.lower()
    if not stem:
        return  # hidden, such as the ._0001.jpg that macOS adds
    sample = samples.setdefault(f"{folder}/{stem}" if folder else stem, _Sample())
    if f".{suffix}" in IMAGE_SUFFIXES and sample.offset < 0:
        sample.offset, sample.size, sample.file = member.offset_data, member.size, member.name
    elif suffix in ("cls", "json") and member.size <= _LONGEST_LABEL and sample.words is None:
        file.seek(member.offset_data)
        sample.words = _label(file.read(member.size), suffix)


def _label(data: bytes, suffix: str) -> tuple[str, ...] | None:
    try:
        text = data.decode("utf-8-sig")
        if suffix == "cls":
            return parse_labels(text) or None
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    value = content.get("label", content.get("labels")) if isinstance(content, dict) else None
    return () if value == [] else parse_labels(value) or None
