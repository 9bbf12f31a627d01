"""Whether the pictures of a source can be read at all."""

from ..errors import DataError, ImageError
from .images import Mode
from .keyed_rng import permutation
from .sources import Source

_TRIES = 20


def require_readable(source: Source, what: str = "The data", *, mode: Mode = "RGB") -> None:
    """Raises `DataError` if none of some samples, chosen at random, can be read: then it is not a single bad file."""
    reasons = []
    for index in permutation(0, 0, len(source))[:_TRIES]:
        try:
            source.read(int(index), mode=mode)
            return
        except ImageError as error:
            reasons.append(str(error))
    tried = f"{len(reasons)} that were tried at random" if len(source) > _TRIES else f"{len(source)} pictures"
    first = reasons[0] if reasons else "there is none."
    raise DataError(f"{what} cannot be read: none of the {tried}. The first: {first}")
