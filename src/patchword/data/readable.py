"""Which pictures of a source cannot be read."""

from concurrent.futures import ThreadPoolExecutor

from ..errors import DataError, ImageError
from .images import Mode
from .randomness import shuffled
from .sources import Source

_TRIES = 20
_THREADS = 4
_CHUNK = 1024  # samples that are queued at a time: the queue of a million would itself be a burden


def find_unreadable(source: Source, *, mode: Mode) -> list[tuple[int, str]]:
    """(index, reason) for every picture that cannot be decoded, after decoding all of them."""

    def reason(index: int) -> str | None:
        try:
            source.read(index, mode=mode)
        except ImageError as error:
            return str(error)
        return None

    found: list[tuple[int, str]] = []
    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(source), _CHUNK):
            chunk = range(start, min(start + _CHUNK, len(source)))
            found += [(index, text) for index, text in zip(chunk, pool.map(reason, chunk), strict=True) if text]
    return found


def require_readable(source: Source, *, mode: Mode = "RGB") -> None:
    """Raises `DataError` if none of some samples, chosen at random, can be read: then it is not a single bad file."""
    reasons = []
    for index in shuffled(0, 0, len(source))[:_TRIES]:
        try:
            source.read(int(index), mode=mode)
            return
        except ImageError as error:
            reasons.append(str(error))
    tried = f"{len(reasons)} that were tried at random" if len(source) > _TRIES else f"{len(source)} pictures"
    raise DataError(f"None of the {tried} can be read. The first: {reasons[0] if reasons else 'there is none.'}")
