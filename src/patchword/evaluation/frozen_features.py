"""Features of a frozen model, computed once and cached on disk."""

import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .. import __version__
from ..core.io import atomic_file, cache_dir, digest, weights_digest, wrap_cache_errors
from ..core.text import print_stderr
from ..data.sources import ArraySource, FileSource, Source, fingerprint
from ..errors import ConfigError, DataError, ImageError, PatchwordError
from ..inference.classifier import Encoder
from ..models import Model, ViT
from ..models.layers import layer_indices


def extract_features(
    encoder: Encoder, source: Source, layer: int | None = None, on_progress: Callable[[], object] = lambda: None
) -> Tensor:
    """Features of every image of a source, float32 (N, D).

    Args:
        encoder: the model.
        source: the images. `DataError` is raised if one of them cannot be read.
        layer: None: the input of the head. Otherwise the class token after this block, the mean of its patch tokens,
            or both, as the model pools (the mean for attention pooling).
        on_progress: called after each image.
    """
    path = cache_path(encoder, source, layer)
    if path is not None and (cached := read_cached(path, len(source))) is not None:
        return cached

    def compute(pixels: Tensor) -> Tensor:
        return read_layer(encoder.model, layer, encoder.preprocess.normalize(pixels))

    rows: list[Tensor] = []
    for row in encoder.map_images((partial(source.read, index) for index in range(len(source))), compute):
        if isinstance(row, ImageError):
            raise DataError(f"A probe needs every image, but one cannot be read (doctor lists all). {row}")
        rows.append(row.clone())
        on_progress()
    features = torch.stack(rows)
    if path is not None:
        try:
            write_cached(path, features)
        except PatchwordError as error:
            print_stderr(f"note: the features are not cached. {error}")
    return features


def read_layer(model: Model, layer: int | None, images: Tensor) -> Tensor:
    """Features (B, D) of normalized images."""
    if layer is None:
        return model.embed_images(images)
    if not isinstance(model, ViT):
        raise ConfigError("--layer needs a ViT: other models have no blocks. Omit it.")
    (last,) = layer_indices(len(model.blocks), [layer])
    tokens = model.embed_patches(images)
    for block in model.blocks[: last + 1]:
        tokens = block(tokens)
    mean = tokens[:, model.config.num_prefix :].mean(dim=1)
    if model.config.pooling == "class+average":
        return torch.cat([tokens[:, 0], mean], dim=1)
    return tokens[:, 0] if model.config.pooling == "class" else mean


def cache_path(encoder: Encoder, source: Source, layer: int | None) -> Path | None:
    """The file of these features; None if a change of the images cannot be detected cheaply."""
    stamp = source_stamp(source)
    if stamp is None:
        return None
    model = (encoder.checkpoint.config, encoder.preprocess, weights_digest(encoder.model.state_dict()))
    return cache_dir() / "features" / f"{digest(__version__, layer, *model, stamp)[:32]}.npy"


def source_stamp(source: Source) -> str | None:
    """A digest that changes with the images: with the size and time of their files, or with their pixels."""
    stamp = hashlib.sha256(fingerprint(source).encode())
    if isinstance(source, ArraySource):
        stamp.update(np.ascontiguousarray(source.images).data)
        return stamp.hexdigest()
    if not isinstance(source, FileSource):
        return None
    for index in range(len(source)):
        try:
            state = os.stat(source.name(index))
        except OSError:
            return None
        stamp.update(f"{state.st_size} {state.st_mtime_ns} {state.st_ctime_ns} {state.st_ino};".encode())
    return stamp.hexdigest()


def read_cached(path: Path, count: int) -> Tensor | None:
    """Cached features; None if there are none, or if the file is damaged."""
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    valid = array.ndim == 2 and len(array) == count and array.dtype == np.float32
    return torch.from_numpy(array) if valid else None


def write_cached(path: Path, rows: Tensor) -> None:
    """Write features atomically."""
    with wrap_cache_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as target, target.open("wb") as file:
            np.save(file, rows.numpy())
