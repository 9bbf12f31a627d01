"""Early check that the images of a source can be decoded at all."""

from ..errors import DataError, ImageError
from .image_decoder import Mode
from .keyed_rng import permutation
from .sources import Source

_MAX_TRIES = 20


def require_readable(source: Source, what: str = "The data", *, mode: Mode = "RGB") -> None:
    """Raise `DataError` if none of a few random samples can be decoded: then the problem is not a single bad file."""
    reasons = []
    for index in permutation(0, 0, len(source))[:_MAX_TRIES]:
        try:
            source.read(int(index), mode=mode)
            return
        except ImageError as error:
            reasons.append(str(error))
    tried = f"{len(reasons)} randomly chosen images" if len(source) > _MAX_TRIES else f"{len(source)} images"
    first = f"The first error: {reasons[0]}" if reasons else "The dataset is empty."
    raise DataError(f"{what} cannot be read: none of the {tried} can be decoded. {first}")
