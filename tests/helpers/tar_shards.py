"""WebDataset shards of tiny images."""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from patchword.data.sources import Source


def write_tar(path: Path, members: dict[str, bytes | str]) -> Path:
    """Write a tar with these members, in this order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            data = data.encode() if isinstance(data, str) else data
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def encode_image(number: int, side: int = 16) -> bytes:
    """Return a PNG file of noise, which depends on the number."""
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def samples(first: int, last: int, classes: int = 3, side: int = 16) -> dict[str, bytes | str]:
    """Return the members of samples with these numbers, in `classes` classes."""
    members: dict[str, bytes | str] = {}
    for number in range(first, last):
        members |= {f"{number:05d}.png": encode_image(number, side), f"{number:05d}.cls": f"class {number % classes}"}
    return members


def write_shards(folder: Path, sizes: dict[str, int], side: int = 16) -> Path:
    """Write tars with these numbers of samples, by their names without suffix; returns the folder."""
    first = 0
    for name, size in sizes.items():
        write_tar(folder / f"{name}.tar", samples(first, first + size, side=side))
        first += size
    return folder


def contents(source: Source) -> list[tuple[str, str, bytes]]:
    """Return key, label and pixels of every image."""
    return [
        (source.key(i), source.labels[source.targets[i]], source.read(i, mode="RGB").tobytes())
        for i in range(len(source))
    ]
