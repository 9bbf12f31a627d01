"""What a layer of a frozen model makes of pictures, computed once and kept in the cache folder."""

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
from ..errors import ConfigError, DataError, ImageError
from ..inference.classifier import Encoder
from ..models import Model, ViT
from ..models.layers import layer_indices


def features(
    encoder: Encoder, source: Source, layer: int | None = None, on_progress: Callable[[], object] = lambda: None
) -> Tensor:
    """float32 (N, D): what the head reads of each picture; or, of the tokens behind block `layer`, the class token, the
    mean of the patches, or both, as the model pools (the mean where it pools by attention).
    """
    look = partial(reading, encoder.model, layer)
    place = kept_at(encoder, source, layer)
    if place is not None and (found := read_kept(place, len(source))) is not None:
        return found
    pictures = (partial(source.read, index) for index in range(len(source)))
    rows: list[Tensor] = []
    for result in encoder.each(pictures, lambda pixels: look(encoder.preprocess.normalize(pixels))):
        if isinstance(result, ImageError):
            raise DataError(f"A probe needs every picture, but one cannot be read (doctor lists all). {result}")
        rows.append(result.clone())
        on_progress()
    whole = torch.stack(rows)
    if place is not None:
        try:
            keep(place, whole)
        except DataError as error:  # it costs time when they are wanted again, not the answer
            print_stderr(f"note: the features are not kept. {error}")
    return whole


def reading(model: Model, layer: int | None, images: Tensor) -> Tensor:
    """(B, D)."""
    if layer is None:
        return model.embed_images(images)
    if not isinstance(model, ViT):
        raise ConfigError("Only a ViT has blocks to choose a layer from; leave out --layer.")
    (last,) = layer_indices(len(model.blocks), [layer])
    tokens = model.embed_patches(images)
    for block in model.blocks[: last + 1]:
        tokens = block(tokens)
    mean = tokens[:, model.config.num_prefix :].mean(dim=1)
    if model.config.pooling == "class+average":
        return torch.cat([tokens[:, 0], mean], dim=1)
    return tokens[:, 0] if model.config.pooling == "class" else mean


def kept_at(encoder: Encoder, source: Source, layer: int | None) -> Path | None:
    """Where these features are kept; None where nothing cheap tells whether the pictures have changed."""
    stamp = stamped(source)
    if stamp is None:
        return None
    model = (encoder.checkpoint.config, encoder.preprocess, weights_digest(encoder.model.state_dict()))
    return cache_dir() / "features" / f"{digest(__version__, layer, *model, stamp)[:32]}.npy"


def stamped(source: Source) -> str | None:
    """Changes when a picture does: its file's size and time, or its pixels."""
    found = hashlib.sha256(fingerprint(source).encode())
    if isinstance(source, ArraySource):
        found.update(np.ascontiguousarray(source.images).data)
        return found.hexdigest()
    if not isinstance(source, FileSource):
        return None
    for index in range(len(source)):
        try:
            state = os.stat(source.name(index))
        except OSError:
            return None
        found.update(f"{state.st_size} {state.st_mtime_ns} {state.st_ctime_ns} {state.st_ino};".encode())
    return found.hexdigest()


def read_kept(place: Path, count: int) -> Tensor | None:
    """None if there are none, or a file that is not what was written."""
    try:
        found = np.load(place, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    whole = found.ndim == 2 and len(found) == count and found.dtype == np.float32
    return torch.from_numpy(found) if whole else None


def keep(place: Path, rows: Tensor) -> None:
    with wrap_cache_errors(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(place) as made, made.open("wb") as file:
            np.save(file, rows.numpy())
