"""Mean and spread of a data set's pixels, which pictures are normalised with."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image

from ..errors import DataError, ImageError
from .images import Mode
from .keyed_rng import permutation
from .sources import Source

_THREADS = 4
_LEAST = 1 / 255  # pixels are divided by the deviation, which is 0 where all pictures are blank


def channel_statistics(
    source: Source, mode: Mode, size: tuple[int, int], limit: int = 2000
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel on the scale 0..1.

    Args:
        size: (height, width) that pictures are scaled to, each then counting the same.
        limit: this many pictures, always the same ones, stand for all. What cannot be read is skipped.
    """

    def sums(index: np.int64) -> np.ndarray | None:
        try:
            image = source.read(int(index), mode=mode, at_least=size)
        except ImageError:
            return None
        if image.size != size[::-1]:
            image = image.resize(size[::-1], Image.Resampling.BILINEAR)
        pixels = np.asarray(image, dtype=np.int64).reshape(size[0] * size[1], -1)
        return np.stack([pixels.sum(axis=0), (pixels**2).sum(axis=0)])  # (2, C), exact

    chosen = np.sort(permutation(0, 0, len(source))[:limit])
    with ThreadPoolExecutor(_THREADS) as pool:
        parts = [part for part in pool.map(sums, chosen) if part is not None]
    if not parts:
        raise DataError(f"None of the {len(chosen)} pictures that were tried can be read, so their mean is unknown.")
    first, second = np.sum(parts, axis=0) / (len(parts) * size[0] * size[1])
    deviation = np.sqrt(np.maximum(second - first**2, 0)) / 255
    return tuple(map(float, first / 255)), tuple(map(float, np.maximum(deviation, _LEAST)))
