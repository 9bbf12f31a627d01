"""Early check that the images of a source can be decoded at all."""

import numpy as np

from ..errors import DataError, ImageError
from .image_decoder import Mode
from .keyed_rng import keys, permutation, uniform
from .sources import Source

_MAX_TRIES = 20
_LARGE = 1_000_000  # images, of which a permutation would take seconds


def require_readable(source: Source, what: str = "The data", *, mode: Mode = "RGB") -> None:
    """Raise `DataError` if none of a few random samples can be decoded: then the problem is not a single bad file."""
    reasons = []
    for index in _choose(len(source)):
        try:
            source.read(int(index), mode=mode)
            return
        except ImageError as error:
            reasons.append(str(error))
    tried = f"{len(reasons)} randomly chosen images" if len(source) > _MAX_TRIES else f"{len(source)} images"
    first = f"The first error: {reasons[0]}" if reasons else "The dataset is empty."
    raise DataError(f"{what} cannot be read: none of the {tried} can be decoded. {first}")


def _choose(count: int) -> np.ndarray:
    if count <= _LARGE:
        return permutation(0, 0, count)[:_MAX_TRIES]
    drawn: np.ndarray = (uniform(keys(0, 0, np.arange(_MAX_TRIES)), "readable")[:, 0] * count).astype(np.int64)
    return drawn
