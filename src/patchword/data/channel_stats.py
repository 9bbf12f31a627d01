"""Mean and standard deviation of a dataset's pixels, for normalization."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image

from ..errors import DataError, ImageError
from .image_decoder import Mode
from .keyed_rng import permutation
from .sources import Source

_NUM_THREADS = 4
_MIN_STD = 1 / 255  # pixels are divided by the standard deviation, which is 0 if all images are blank


def compute_channel_stats(
    source: Source, mode: Mode, size: tuple[int, int], max_images: int = 2000
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute the mean and standard deviation of each channel, on the scale 0..1.

    Args:
        size: (height, width) to which every image is resized, so that all have the same weight.
        max_images: number of images to use; always the same ones. Unreadable images are skipped.
    """

    def sum_pixels(index: np.int64) -> np.ndarray | None:
        try:
            image = source.read(int(index), mode=mode, min_size=size)
        except ImageError:
            return None
        if image.size != size[::-1]:
            image = image.resize(size[::-1], Image.Resampling.BILINEAR)
        pixels = np.asarray(image, dtype=np.int64).reshape(size[0] * size[1], -1)
        return np.stack([pixels.sum(axis=0), (pixels**2).sum(axis=0)])  # (2, C), exact integers

    chosen = np.sort(permutation(0, 0, len(source))[:max_images])
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        sums = [result for result in pool.map(sum_pixels, chosen) if result is not None]
    if not sums:
        raise DataError(f"None of {len(chosen)} images can be read, so the channel mean cannot be computed.")
    mean, mean_square = np.sum(sums, axis=0) / (len(sums) * size[0] * size[1])
    std = np.sqrt(np.maximum(mean_square - mean**2, 0)) / 255
    return tuple(map(float, mean / 255)), tuple(map(float, np.maximum(std, _MIN_STD)))
