"""Batches for training and evaluation: decode, crop, augment, normalize and mix, on prefetching threads.

Owns the cache of decoded images and the work of each thread. The content of a batch depends only on positions and
random keys (`data.sampler`), never on the number of threads.
"""

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from ..config import AugmentConfig
from ..errors import DataError, ImageError
from .prefetch import prefetch
from .preprocess import Preprocess
from .sampler import ShuffledSampler
from .sources import ArraySource, Source
from .transforms.augment import augment
from .transforms.crop import crop_and_resize, sample_crop_boxes
from .transforms.mixup import mix_batch

Output = TypeVar("Output")

NO_AUGMENTATION = AugmentConfig()
# With random resized crops, images are cached at this multiple of the evaluation size. More detail is visible only in
# the smallest crops, and costs memory and time.
DETAIL = 1.25


@dataclass(frozen=True)
class Batch:
    """Input of one training or evaluation step.

    Attributes:
        images: normalized, float32 (B, C, H, W).
        targets: int64 (B,); float32 (B, K) for multi-label data and for mixed labels.
        indices: index of each sample in its source, int64 (B,).
    """

    images: Tensor
    targets: Tensor
    indices: np.ndarray


class ImageCache:
    """Decoded images of a source, cached until `max_bytes` are used. Thread-safe.

    Args:
        full_images: return the full image (for random resized crops) instead of the evaluation crop.
        max_bytes: capacity. Images beyond it are decoded at every access.

    Attributes:
        unreadable: samples that could not be decoded so far, with the reason.
        tensor: all images as one uint8 tensor (N, H, W, C), if the source already holds them at the right size.
    """

    def __init__(self, source: Source, preprocess: Preprocess, *, full_images: bool, max_bytes: float) -> None:
        self.source, self.preprocess, self.full_images = source, preprocess, full_images
        self.unreadable: dict[int, str] = {}
        self.tensor = self._as_tensor()
        self._images: dict[int, np.ndarray] = {}
        self._free_bytes = max_bytes
        self._lock = threading.Lock()

    def _as_tensor(self) -> Tensor | None:
        shape = (*self.preprocess.size, self.preprocess.channels)
        if self.full_images or not isinstance(self.source, ArraySource) or self.source.images.shape[1:] != shape:
            return None
        return torch.from_numpy(self.source.images)

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the image or its evaluation crop, uint8 (H, W, C). Raises `ImageError`."""
        if (cached := self._images.get(index)) is not None:
            return cached
        if index in self.unreadable:
            raise ImageError(self.unreadable[index])
        try:
            image = self.source.read(index, mode=self.preprocess.mode, min_size=self.preprocess.resize_size)
        except ImageError as error:
            self.unreadable[index] = str(error)
            raise
        if self.full_images:
            pixels = to_array(limit_detail(image, self.preprocess.resize_size))
        else:
            pixels = self.preprocess.resize_and_crop(image)
        with self._lock:
            if self._free_bytes >= pixels.nbytes and index not in self._images:
                self._free_bytes -= pixels.nbytes
                self._images[index] = pixels
        return pixels


def limit_detail(image: Image.Image, resize_size: tuple[int, int]) -> Image.Image:
    """Shrink an image that has more detail than training can use: `DETAIL` times the evaluation (height, width)."""
    scale = DETAIL * max(resize_size[0] / image.height, resize_size[1] / image.width)
    if scale >= 1:
        return image
    return image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)


def to_array(image: Image.Image) -> np.ndarray:
    """Convert a Pillow image to uint8 (H, W, C)."""
    pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[..., None]


def to_image(pixels: np.ndarray) -> Image.Image:
    """Convert uint8 (H, W, C) to a Pillow image."""
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


class Loader:
    """Batches of a source.

    Args:
        sampler: the order of the samples, for training only. Evaluation goes through the source once.
        augment: training augmentation. It also decides whether full images are cached, for random resized crops.
        num_workers: prefetching threads; 0 prepares each batch when it is requested.
        cache_gib: GiB of decoded images to cache.
    """

    def __init__(
        self,
        source: Source,
        preprocess: Preprocess,
        *,
        sampler: ShuffledSampler | None = None,
        augment: AugmentConfig = NO_AUGMENTATION,
        num_workers: int = 0,
        cache_gib: float = 0.0,
    ) -> None:
        self.source, self.preprocess, self.sampler = source, preprocess, sampler
        self.augment, self.num_workers = augment, num_workers
        full_images = augment.crop == "resized"
        self.cache = ImageCache(source, preprocess, full_images=full_images, max_bytes=cache_gib * 2**30)
        self.targets = torch.from_numpy(source.targets)

    @property
    def unreadable(self) -> dict[int, str]:
        """Samples that could not be decoded so far, with the reason."""
        return self.cache.unreadable

    def train_batches(self, batch_ranges: Iterable[tuple[int, int]]) -> Generator[Batch, None, None]:
        """Yield one training batch for each range (start, stop) of sampler positions, prefetched."""
        return prefetch(self.make_train_batch, batch_ranges, self.num_workers)

    def eval_batches(self, batch_size: int, indices: np.ndarray | None = None) -> Iterator[Batch]:
        """Yield the readable samples, in order, with the evaluation transform. Empty batches are skipped."""
        batches = prefetch(self.make_eval_batch, self.batch_indices(batch_size, indices), self.num_workers)
        return (batch for batch in batches if len(batch.indices))

    def map_batches(
        self, function: Callable[[Batch], Output], batch_size: int, indices: np.ndarray
    ) -> Generator[Output, None, None]:
        """Yield `function(batch)` for each evaluation batch, in order.

        The thread that prepared a batch also calls `function` on it; there is one thread per core.
        """

        def process(chunk: np.ndarray) -> Output | None:
            batch = self.make_eval_batch(chunk)
            return function(batch) if len(batch.indices) else None

        for output in prefetch(process, self.batch_indices(batch_size, indices), torch.get_num_threads()):
            if output is not None:
                yield output

    def batch_indices(self, batch_size: int, indices: np.ndarray | None) -> Iterator[np.ndarray]:
        """Split `indices` (default: all samples) into evaluation batches."""
        indices = np.arange(len(self.source)) if indices is None else indices
        return (indices[i : i + batch_size] for i in range(0, len(indices), batch_size))

    def make_train_batch(self, batch_range: tuple[int, int]) -> Batch:
        """Prepare the training batch at sampler positions (start, stop)."""
        assert self.sampler is not None
        indices, keys = self.sampler(*batch_range)
        indices, pixels = self._load_train_pixels(indices, keys)
        images = self.preprocess.normalize(augment(pixels, self.augment, keys))
        targets = self.targets[indices]
        if self.augment.mixup > 0 or self.augment.cutmix > 0:
            if targets.ndim == 1:
                targets = F.one_hot(targets, len(self.source.labels)).float()
            images, targets = mix_batch(images, targets, self.augment, keys)
        return Batch(images, targets, indices)

    def _load_train_pixels(self, indices: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Load uint8 (B, H, W, C); an unreadable sample is replaced by the next readable one."""
        if self.cache.tensor is not None:
            return indices, self.cache.tensor[indices]
        samples = [self._load_readable(int(index)) for index in indices]
        pixels = [p for _, p in samples]
        if self.augment.crop == "resized":
            heights, widths = (np.array([p.shape[axis] for p in pixels]) for axis in (0, 1))
            boxes = sample_crop_boxes(self.augment, keys, heights, widths)
            size, interpolation = self.preprocess.size, self.preprocess.interpolation
            pixels = [
                crop_and_resize(to_image(p), box, size, interpolation) for p, box in zip(pixels, boxes, strict=True)
            ]
        return np.array([index for index, _ in samples]), torch.from_numpy(np.stack(pixels))

    def _load_readable(self, index: int) -> tuple[int, np.ndarray]:
        """Return the first readable sample from `index` on: its index and its pixels."""
        for _ in range(len(self.source)):
            with contextlib.suppress(ImageError):
                return index, self.cache[index]
            index = (index + 1) % len(self.source)
        reason = next(iter(self.unreadable.values()))
        raise DataError(f"None of the {len(self.source)} images can be read. The first error: {reason}")

    def make_eval_batch(self, indices: np.ndarray) -> Batch:
        """Prepare an evaluation batch of the given samples, without those that cannot be read."""
        if self.cache.tensor is not None:
            pixels = self.cache.tensor[indices]
        else:
            samples = []
            for index in indices.tolist():
                with contextlib.suppress(ImageError):
                    samples.append((index, self.cache[index]))
            indices = np.array([index for index, _ in samples], np.int64)
            shape = (0, *self.preprocess.size, self.preprocess.channels)
            pixels = torch.from_numpy(np.stack([p for _, p in samples]) if samples else np.empty(shape, np.uint8))
        return Batch(self.preprocess.normalize(pixels), self.targets[indices], indices)
