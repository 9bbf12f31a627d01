"""What a layer of a frozen model makes of pictures, computed once and kept in the cache folder."""

import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..classifier import Encoder
from ..data.cache import cache_folder, writing
from ..data.sources import ArraySource, FileSource, Source, fingerprint
from ..errors import ConfigError, DataError, ImageError
from ..models import Model, ViT

VERSION = 1  # of what is computed: raise it when the same model and pictures would give other features


def features(
    encoder: Encoder, source: Source, layer: int | None = None, on_progress: Callable[[], object] = lambda: None
) -> Tensor:
    """float32 (N, D): what the head reads of each picture, or the same reading of the tokens behind block `layer`."""
    look = partial(reading, encoder.model, layer)
    place = kept_at(encoder, source, layer)
    if place is not None and (found := read_kept(place, len(source))) is not None:
        return found
    pictures = (partial(source.read, index) for index in range(len(source)))
    rows: list[Tensor] = []
    for result in encoder.each(pictures, lambda pixels: look(encoder.preprocess.normalise(pixels))):
        if isinstance(result, ImageError):
            raise DataError(f"A probe needs every picture, but one cannot be read. {result}")
        rows.append(result.clone())
        on_progress()
    whole = torch.stack(rows)
    if place is not None:
        keep(place, whole)
    return whole


def reading(model: Model, layer: int | None, images: Tensor) -> Tensor:
    """(B, D)."""
    if layer is None:
        return model.pooled(images)
    if not isinstance(model, ViT):
        raise ConfigError("Only a ViT has blocks to choose a layer from; leave out --layer.")
    (last,) = model.layer_indices([layer])
    tokens = model.embed(images)
    for block in model.blocks[: last + 1]:
        tokens = block(tokens)
    if model.config.pooling == "class":
        return tokens[:, 0]
    return tokens[:, model.config.num_prefix :].mean(dim=1)


def kept_at(encoder: Encoder, source: Source, layer: int | None) -> Path | None:
    """Where these features are kept; None where nothing cheap tells whether the pictures have changed."""
    stamp = stamped(source)
    if stamp is None:
        return None
    digest = hashlib.sha256(f"{VERSION} {layer} {encoder.checkpoint.config} {encoder.preprocess} {stamp}".encode())
    for name, tensor in sorted(encoder.model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return cache_folder() / "features" / f"{digest.hexdigest()[:32]}.npy"


def stamped(source: Source) -> str | None:
    """Changes when a picture does: its file's size and time, or its pixels."""
    digest = hashlib.sha256(fingerprint(source).encode())
    if isinstance(source, ArraySource):
        digest.update(np.ascontiguousarray(source.images).data)
        return digest.hexdigest()
    if not isinstance(source, FileSource):
        return None
    for index in range(len(source)):
        try:
            state = os.stat(source.name(index))
        except OSError:
            return None
        digest.update(f"{state.st_size} {state.st_mtime_ns};".encode())
    return digest.hexdigest()


def read_kept(place: Path, count: int) -> Tensor | None:
    """None if there are none, or a file that is not what was written."""
    try:
        found = np.load(place, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    whole = found.ndim == 2 and len(found) == count and found.dtype == np.float32
    return torch.from_numpy(found) if whole else None


def keep(place: Path, rows: Tensor) -> None:
    with writing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        partly = place.with_name(f"{place.name}.{os.getpid()}.partial")
        try:
            with partly.open("wb") as file:
                np.save(file, rows.numpy())
            os.replace(partly, place)
        finally:
            partly.unlink(missing_ok=True)
