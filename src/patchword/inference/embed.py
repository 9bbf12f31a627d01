"""Image embeddings: the features before the head, of many images, in chunks.

`embed_images` takes any iterable of images and holds one chunk at a time, so a caller decides where images come from
and where features go.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..checkpoints import Checkpoint
from ..config import ModelConfig, ViTConfig
from ..errors import ConfigError, ImageError
from .classifier import Encoder, batches, open_encoder
from .inputs import InputImage, resolve_images
from .open_image import ImageInput

CHUNK_SIZE = 1024  # images: 3 MiB of features of width 768


@dataclass(frozen=True)
class EmbeddingChunk:
    """The features of consecutive images.

    Attributes:
        names: The path of each image that could be read, or its name in a dataset.
        features: Its features, float32 (n, D).
        unreadable: The images between them that could not be read: name and error of each.
    """

    names: tuple[str, ...]
    features: np.ndarray
    unreadable: tuple[tuple[str, ImageError], ...] = ()


def embed(
    model: str | Path | Checkpoint | Encoder,
    images: ImageInput | Iterable[ImageInput],
    *,
    chunk_size: int = CHUNK_SIZE,
) -> Iterator[EmbeddingChunk]:
    """Compute image embeddings, the features that the head of a model reads; the model needs no head.

    Args:
        model: A model reference, a `Checkpoint` or a `Classifier`.
        images: An image, a folder (searched recursively), a pattern such as "photos/*.jpg", a dataset such as "cifar10"
            or "photos.csv", or several of them.
        chunk_size: The number of images in a chunk.

    Yields:
        The features of the images, in order. Images that cannot be read have no row; the chunk lists them.

    Raises:
        DataError: There are no images.

    Examples:
        ```python
        import numpy as np
        import patchword as pw

        chunks = list(pw.embed("patchword:cifar10", ["cat.jpg", "new.jpg"]))
        features = np.concatenate([chunk.features for chunk in chunks])  # (2, 192), a row for each image
        ```
    """
    if chunk_size < 1:
        raise ConfigError(f"chunk_size must be at least 1, not {chunk_size}.")
    is_single = isinstance(images, str | Path | bytes | np.ndarray | Image.Image) or callable(images)
    inputs = resolve_images([images] if is_single else images)  # type: ignore[arg-type, list-item]
    return embed_images(open_encoder(model), inputs, chunk_size)


def embed_images(
    encoder: Encoder,
    images: Iterable[InputImage],
    chunk_size: int = CHUNK_SIZE,
    on_image: Callable[[], object] = lambda: None,
) -> Iterator[EmbeddingChunk]:
    """Compute the features of images, on all cores; `on_image` is called after each."""

    def compute(pixels: Tensor) -> Tensor:
        return encoder.model.embed_images(encoder.preprocess.normalize(pixels))

    def count(rows: Iterable[Tensor | ImageError]) -> Iterator[Tensor | ImageError]:
        for row in rows:
            on_image()
            yield row

    images, again = itertools.tee(images)
    rows = encoder.map_images((image.image for image in images), compute)
    for group in batches(zip(again, count(rows), strict=True), chunk_size):
        yield make_chunk(group, feature_dim(encoder.checkpoint.config))


def make_chunk(rows: Sequence[tuple[InputImage, Tensor | ImageError]], width: int) -> EmbeddingChunk:
    """Stack the rows of one chunk; `width` is that of an empty one."""
    readable = [(image.name, row) for image, row in rows if isinstance(row, Tensor)]
    unreadable = tuple((image.name, row) for image, row in rows if isinstance(row, ImageError))
    features = torch.stack([row for _, row in readable]).float() if readable else torch.zeros(0, width)
    return EmbeddingChunk(tuple(name for name, _ in readable), features.numpy(), unreadable)


def feature_dim(config: ModelConfig) -> int:
    """Return the width of the features."""
    return config.feature_dim if isinstance(config, ViTConfig) else config.pooled_dim
