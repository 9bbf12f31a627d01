"""Pictures to batches: decoded, cut, varied, normalised and mixed, ahead of the model that will want them.

Owns what is kept in memory and what is done on which thread. What a batch holds depends on positions and keys only
(`order.py`), never on the number of threads.
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
from .transforms.crop import crop_boxes, crop_resized
from .transforms.mixup import mix

Answer = TypeVar("Answer")

PLAIN = AugmentConfig()
# Pictures that random parts are cut from are kept at this multiple of the size that evaluation resizes to: more detail
# than that is seen only in the smallest parts, and takes memory and time.
DETAIL = 1.25


@dataclass(frozen=True)
class Batch:
    """What a step of training or evaluation reads."""

    images: Tensor  # float32 (B, C, H, W), normalised
    targets: Tensor  # int64 (B,), or float32 (B, K) where labels are several or mixed
    indices: np.ndarray  # the samples in their source, int64 (B,)


class Pictures:
    """The pictures of a source, ready to be cut to size; kept once decoded until `memory` GiB are full.

    Safe from many threads. Which pictures could not be read, and why, gathers in `unreadable`.
    """

    def __init__(self, source: Source, preprocess: Preprocess, *, whole: bool, memory: float) -> None:
        self.source, self.preprocess, self.whole = source, preprocess, whole
        self.unreadable: dict[int, str] = {}
        self.kept: dict[int, np.ndarray] = {}
        self.room = memory * 2**30
        self.lock = threading.Lock()
        self.ready = self._ready()

    def _ready(self) -> Tensor | None:
        """All pictures as one tensor, where they are in memory at the right size already."""
        size = (*self.preprocess.size, self.preprocess.channels)
        if self.whole or not isinstance(self.source, ArraySource) or self.source.images.shape[1:] != size:
            return None
        return torch.from_numpy(self.source.images)

    def __getitem__(self, index: int) -> np.ndarray:
        """uint8 (h, w, C): the whole picture, or what evaluation sees of it. Raises ImageError."""
        if (found := self.kept.get(index)) is not None:
            return found
        if index in self.unreadable:
            raise ImageError(self.unreadable[index])
        mode, wanted = self.preprocess.mode, self.preprocess.resized_to
        try:
            image = self.source.read(index, mode=mode, at_least=wanted)
        except ImageError as error:
            self.unreadable[index] = str(error)
            raise
        pixels = as_array(limited(image, wanted)) if self.whole else self.preprocess.pixels(image)
        with self.lock:
            if self.room >= pixels.nbytes and index not in self.kept:
                self.room -= pixels.nbytes
                self.kept[index] = pixels
        return pixels


def limited(image: Image.Image, wanted: tuple[int, int]) -> Image.Image:
    """The picture, shrunk if it has more detail than training can use."""
    scale = DETAIL * max(wanted[0] / image.height, wanted[1] / image.width)
    if scale >= 1:
        return image
    return image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)


def as_array(image: Image.Image) -> np.ndarray:
    pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[..., None]


class Loader:
    """Batches of a source. Training gives an `order` and an augmentation; evaluation goes through the source once."""

    def __init__(
        self,
        source: Source,
        preprocess: Preprocess,
        *,
        order: ShuffledSampler | None = None,
        augment: AugmentConfig = PLAIN,
        workers: int = 0,
        memory: float = 0.0,
    ) -> None:
        self.source, self.preprocess, self.order = source, preprocess, order
        self.augment, self.workers = augment, workers
        self.pictures = Pictures(source, preprocess, whole=augment.crop == "resized", memory=memory)
        self.targets = torch.from_numpy(source.targets)
        self.mixes = augment.mixup > 0 or augment.cutmix > 0

    @property
    def unreadable(self) -> dict[int, str]:
        """Samples that could not be read so far, and why."""
        return self.pictures.unreadable

    def training(self, stretches: Iterable[tuple[int, int]]) -> Generator[Batch, None, None]:
        """A batch for each stretch (start, stop) of positions, prepared ahead."""
        return prefetch(self.training_batch, stretches, self.workers)

    def evaluation(self, batch_size: int, indices: np.ndarray | None = None) -> Iterator[Batch]:
        """The readable samples, in order, as evaluation sees them."""
        batches = prefetch(self.evaluation_batch, self.batches(batch_size, indices), self.workers)
        return (batch for batch in batches if len(batch.indices))

    def answered(
        self, answer: Callable[[Batch], Answer], batch_size: int, indices: np.ndarray
    ) -> Generator[Answer, None, None]:
        """`answer` of each batch of `evaluation`, found on the thread that prepared it, one thread for each core."""

        def work(part: np.ndarray) -> Answer | None:
            batch = self.evaluation_batch(part)
            return answer(batch) if len(batch.indices) else None

        for found in prefetch(work, self.batches(batch_size, indices), torch.get_num_threads()):
            if found is not None:
                yield found

    def batches(self, batch_size: int, indices: np.ndarray | None) -> Iterator[np.ndarray]:
        """The samples of each batch of an evaluation."""
        indices = np.arange(len(self.source)) if indices is None else indices
        return (indices[i : i + batch_size] for i in range(0, len(indices), batch_size))

    def training_batch(self, stretch: tuple[int, int]) -> Batch:
        assert self.order is not None
        indices, keys = self.order(*stretch)
        indices, pixels = self.cut(indices, keys)
        images = self.preprocess.normalise(augment(pixels, self.augment, keys))
        targets = self.targets[indices]
        if self.mixes:
            if targets.ndim == 1:
                targets = F.one_hot(targets, len(self.source.labels)).float()
            images, targets = mix(images, targets, self.augment, keys)
        return Batch(images, targets, indices)

    def cut(self, indices: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Pixels (B, H, W, C) of the samples; one that cannot be read is replaced by the next that can."""
        if self.pictures.ready is not None:
            return indices, self.pictures.ready[indices]
        found = [self.readable(int(index)) for index in indices]
        pixels = [p for _, p in found]
        if self.augment.crop == "resized":
            heights, widths = (np.array([p.shape[axis] for p in pixels]) for axis in (0, 1))
            boxes = crop_boxes(self.augment, keys, heights, widths)
            size, filter = self.preprocess.size, self.preprocess.interpolation
            pixels = [crop_resized(as_image(p), box, size, filter) for p, box in zip(pixels, boxes, strict=True)]
        return np.array([i for i, _ in found]), torch.from_numpy(np.stack(pixels))

    def readable(self, index: int) -> tuple[int, np.ndarray]:
        for _ in range(len(self.source)):
            with contextlib.suppress(ImageError):
                return index, self.pictures[index]
            index = (index + 1) % len(self.source)
        reason = next(iter(self.unreadable.values()))
        raise DataError(f"None of the {len(self.source)} pictures can be read. The first: {reason}")

    def evaluation_batch(self, indices: np.ndarray) -> Batch:
        if self.pictures.ready is not None:
            pixels = self.pictures.ready[indices]
        else:
            good = []
            for index in indices.tolist():
                with contextlib.suppress(ImageError):
                    good.append((index, self.pictures[index]))
            indices = np.array([i for i, _ in good], np.int64)
            shape = (0, *self.preprocess.size, self.preprocess.channels)
            pixels = torch.from_numpy(np.stack([p for _, p in good]) if good else np.empty(shape, np.uint8))
        return Batch(self.preprocess.normalise(pixels), self.targets[indices], indices)


def as_image(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
