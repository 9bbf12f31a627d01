"""Every picture of a data set looked at once, on threads, keeping some 250 bytes of each: what all checks work from."""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from PIL import Image

from ..data.images import FORMATS
from ..data.sources import FileSource, Source
from ..errors import ImageError

ROWS, COLUMNS = 8, 9  # of the thumbnail: 8 x 8 differences between neighbours make a hash of 64 bits
CHUNK = 1024  # pictures queued at a time
DECODED = (64, 64)  # to about 2.5 times this a large JPEG is shrunk by its decoder, which is much faster
GREY = 2  # levels by which the channels of a grey picture may differ, since JPEG rounds them

_ORIENTATION_TAG = 0x0112
_SIDEWAYS = (5, 6, 7, 8)  # orientations that swap height and width


@dataclass(frozen=True)
class Look:
    """What is kept of one picture."""

    size: tuple[int, int]  # height, width, upright
    kinds: tuple[str, ...]  # what is special about it
    digest: int
    thumbnail: np.ndarray  # uint8 (ROWS, COLUMNS, 3)


class Survey:
    """All parts, one after the other: samples are counted through. Rows of unreadable ones are zeros."""

    def __init__(self, sources: dict[str, Source]) -> None:
        self.sources = sources
        self.names = list(sources)
        self.counts = [len(source) for source in sources.values()]
        self.starts = np.cumsum([0, *self.counts])
        self.parts = np.repeat(np.arange(len(self.names)), self.counts)  # (N,), places in `names`
        total = sum(self.counts)
        self.sizes = np.zeros((total, 2), np.int32)
        self.digests = np.zeros(total, np.uint64)
        self.thumbnails = np.zeros((total, ROWS, COLUMNS, 3), np.uint8)
        self.unreadable: dict[int, str] = {}  # sample and reason
        self.kinds: dict[str, list[int]] = {}  # kind and samples

    def add(self, sample: int, look: Look | str) -> None:
        if isinstance(look, str):
            self.unreadable[sample] = look
            return
        self.sizes[sample], self.digests[sample], self.thumbnails[sample] = look.size, look.digest, look.thumbnail
        for kind in look.kinds:
            self.kinds.setdefault(kind, []).append(sample)

    @property
    def readable(self) -> np.ndarray:
        """int64: the samples that could be read."""
        return np.flatnonzero(self.sizes[:, 0])

    def place(self, sample: int) -> tuple[Source, int]:
        """The part that a sample is in, and its index there."""
        part = int(self.parts[sample])
        return self.sources[self.names[part]], int(sample - self.starts[part])

    def name(self, sample: int) -> str:
        source, index = self.place(sample)
        return source.name(index)

    def label(self, sample: int) -> str:
        source, index = self.place(sample)
        target = source.targets[index]
        if source.multi_label:
            return ", ".join(source.labels[k] for k in np.flatnonzero(target)) or "no label"
        return source.labels[int(target)]


def survey(sources: dict[str, Source], workers: int, on_progress: Callable[[], object]) -> Survey:
    result = Survey(sources)
    total = len(result.parts)
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for start in range(0, total, CHUNK):
            chunk = range(start, min(start + CHUNK, total))
            looks = pool.map(lambda sample: look_at(*result.place(sample)), chunk)
            for sample, look in zip(chunk, looks, strict=True):
                result.add(sample, look)
                on_progress()
    return result


def look_at(source: Source, index: int) -> Look | str:
    """The picture's facts, or why it cannot be read."""
    from_file = isinstance(source, FileSource)
    try:
        # Only a file's header can tell the true size of what was decoded smaller.
        image = source.read(index, mode="RGB", min_size=DECODED if from_file else None)
    except ImageError as error:
        return str(error)
    size, kinds = header(source.name(index)) if from_file else (None, ())
    digest = hashlib.blake2b(repr(image.size).encode(), digest_size=8)
    digest.update(image.tobytes())
    thumbnail = np.asarray(image.resize((COLUMNS, ROWS), Image.Resampling.BOX))
    if np.ptp(thumbnail, axis=2).max() <= GREY:
        kinds = ("grey", *kinds)
    height_width = size or (image.height, image.width)
    return Look(height_width, kinds, int.from_bytes(digest.digest(), "little"), thumbnail)


def header(path: str) -> tuple[tuple[int, int] | None, tuple[str, ...]]:
    """(height, width) of a file, upright, and what is special about it. It was decoded before, so it is a picture."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            width, height = image.size
            kinds = ["CMYK"] if image.mode == "CMYK" else []
            kinds += ["deep"] if image.mode.startswith(("I", "F")) else []
            kinds += ["transparent"] if image.has_transparency_data else []
            # MPO: a camera's JPEG with a second view of the same scene.
            kinds += ["animated"] if image.format != "MPO" and getattr(image, "is_animated", False) else []
            sideways = image.getexif().get(_ORIENTATION_TAG) in _SIDEWAYS
    except Exception:  # Pillow raises all sorts at damaged metadata, and these facts are only good to know
        return None, ()
    return (width, height) if sideways else (height, width), tuple(kinds)
