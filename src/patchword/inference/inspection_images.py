"""The pictures that an inspection looks at: files, folders, or a part of any data set."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..data.images import SUFFIXES, list_images, load_image
from ..data.resolve import resolve_dataset
from ..data.sources import Source
from ..errors import DataError, ImageError
from .classifier import Classifier

SHOWN = 6  # pictures that are kept whole, to be drawn; of the others only what the model sees
LARGEST = 1024  # pixels of their longer side
ORDER = ("test", "val", "train")


@dataclass(frozen=True)
class Pictures:
    """Pictures in the order they were given; `whole` are the first few, uncropped."""

    names: tuple[str, ...]
    whole: tuple[Image.Image, ...]
    pixels: Tensor  # uint8 (n, H, W, C): what the model sees
    unread: tuple[tuple[str, str], ...]  # name and reason


def gather(classifier: Classifier, references: Sequence[str], most: int) -> Pictures:
    """At most `most` pictures, evenly spaced where there are more."""
    names: list[str] = []
    whole: list[Image.Image] = []
    seen: list[Tensor] = []
    unread: list[tuple[str, str]] = []
    for name, source in evenly(listed(references), most):
        try:
            picture = opened(source, classifier)
        except ImageError as error:
            unread.append((name, str(error)))
            continue
        names.append(name)
        seen.append(classifier.pixels(picture))
        whole += [small(picture)] if len(whole) < SHOWN else []
    shape = (0, *classifier.preprocess.size, classifier.preprocess.channels)
    pixels = torch.stack(seen) if seen else torch.zeros(shape, dtype=torch.uint8)
    return Pictures(tuple(names), tuple(whole), pixels, tuple(unread))


def small(picture: Image.Image) -> Image.Image:
    """Large enough for every figure."""
    picture = picture.copy()
    picture.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    return picture


Place = Path | tuple[Source, int]


def listed(references: Sequence[str]) -> list[tuple[str, Place]]:
    """Every picture there is, by name, without opening any."""
    found: list[tuple[str, Place]] = []
    for reference in references:
        path = Path(reference).expanduser()
        if path.is_dir():
            found += [(str(file), file) for file in list_images(path)]
        elif path.suffix.lower() in SUFFIXES:
            found.append((reference, path))
        else:
            found += of_data(reference)
    return found


def of_data(reference: str) -> list[tuple[str, Place]]:
    """The pictures of a data set: its test part, or else validation, or else training."""
    parts = resolve_dataset(reference).parts
    part = next((parts[name] for name in ORDER if name in parts), None)
    if part is None:
        raise DataError(f"{reference} has no pictures.")
    return [(part.name(i), (part, i)) for i in range(len(part))]


def evenly(found: list[tuple[str, Place]], most: int) -> list[tuple[str, Place]]:
    if len(found) <= most:
        return found
    return [found[i] for i in np.linspace(0, len(found) - 1, most).round().astype(int)]


def opened(place: Place, classifier: Classifier) -> Image.Image:
    mode = classifier.preprocess.mode
    if isinstance(place, Path):
        return load_image(place, mode=mode)
    source, index = place
    return source.read(index, mode=mode)
