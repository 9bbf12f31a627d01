"""One pass over all images of a dataset, on threads, keeping about 250 bytes of each: the input of all checks."""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from PIL import Image

from ..data.image_decoder import FORMATS
from ..data.sources import FileSource, Source
from ..errors import ImageError

ROWS, COLUMNS = 8, 9  # of a thumbnail; the 8 x 8 differences of horizontal neighbors make a hash of 64 bits
CHUNK = 1024  # images queued at a time
MIN_DECODED = (64, 64)  # the decoder shrinks large JPEGs to about 2.5 times this, which is much faster
MAX_GRAY_DIFFERENCE = 2  # levels between the channels of a grayscale image, which JPEG rounds

_ORIENTATION_TAG = 0x0112
_SIDEWAYS = (5, 6, 7, 8)  # orientations that swap height and width


@dataclass(frozen=True)
class ImageSummary:
    """What is kept of one image.

    Attributes:
        size: (height, width), after the EXIF orientation is applied.
        kinds: Unusual properties: "gray", "CMYK", "deep", "transparent", "animated".
        digest: A hash of the pixels.
        thumbnail: uint8 (ROWS, COLUMNS, 3).
    """

    size: tuple[int, int]
    kinds: tuple[str, ...]
    digest: int
    thumbnail: np.ndarray


class Survey:
    """The summaries of all images, numbered through all splits. Rows of unreadable images are zero.

    Attributes:
        splits: (N,), the index in `names` of each sample's split.
        unreadable: The reason for each sample that cannot be read.
        kinds: The samples of each unusual kind.
    """

    def __init__(self, sources: dict[str, Source]) -> None:
        self.sources = sources
        self.names = list(sources)
        self.counts = [len(source) for source in sources.values()]
        self.starts = np.cumsum([0, *self.counts])
        self.splits = np.repeat(np.arange(len(self.names)), self.counts)
        total = sum(self.counts)
        self.sizes = np.zeros((total, 2), np.int32)
        self.digests = np.zeros(total, np.uint64)
        self.thumbnails = np.zeros((total, ROWS, COLUMNS, 3), np.uint8)
        self.unreadable: dict[int, str] = {}
        self.kinds: dict[str, list[int]] = {}

    def add(self, sample: int, summary: ImageSummary | str) -> None:
        """Record a summary, or why the image cannot be read."""
        if isinstance(summary, str):
            self.unreadable[sample] = summary
            return
        self.sizes[sample], self.digests[sample], self.thumbnails[sample] = (
            summary.size,
            summary.digest,
            summary.thumbnail,
        )
        for kind in summary.kinds:
            self.kinds.setdefault(kind, []).append(sample)

    @property
    def readable(self) -> np.ndarray:
        """The samples that can be read, int64."""
        return np.flatnonzero(self.sizes[:, 0])

    def locate(self, sample: int) -> tuple[Source, int]:
        """Return the source of a sample, and its index there."""
        split = int(self.splits[sample])
        return self.sources[self.names[split]], int(sample - self.starts[split])

    def name(self, sample: int) -> str:
        """Return the name of a sample."""
        source, index = self.locate(sample)
        return source.name(index)

    def label(self, sample: int) -> str:
        """Return the label of a sample, or its labels."""
        source, index = self.locate(sample)
        target = source.targets[index]
        if source.multi_label:
            return ", ".join(source.labels[k] for k in np.flatnonzero(target)) or "no label"
        return source.labels[int(target)]


def survey_images(sources: dict[str, Source], num_workers: int, on_progress: Callable[[], object]) -> Survey:
    """Read every image once."""
    result = Survey(sources)
    total = len(result.splits)
    with ThreadPoolExecutor(max(1, num_workers)) as pool:
        for start in range(0, total, CHUNK):
            chunk = range(start, min(start + CHUNK, total))
            summaries = pool.map(lambda sample: summarize_image(*result.locate(sample)), chunk)
            for sample, summary in zip(chunk, summaries, strict=True):
                result.add(sample, summary)
                on_progress()
    return result


def summarize_image(source: Source, index: int) -> ImageSummary | str:
    """Return the summary of an image, or why it cannot be read."""
    from_file = isinstance(source, FileSource)
    try:
        # The header of a file has the true size of an image that is decoded smaller.
        image = source.read(index, mode="RGB", min_size=MIN_DECODED if from_file else None)
    except ImageError as error:
        return str(error)
    size, kinds = read_header(source.name(index)) if from_file else (None, ())
    digest = hashlib.blake2b(repr(image.size).encode(), digest_size=8)
    digest.update(image.tobytes())
    thumbnail = np.asarray(image.resize((COLUMNS, ROWS), Image.Resampling.BOX))
    if np.ptp(thumbnail, axis=2).max() <= MAX_GRAY_DIFFERENCE:
        kinds = ("gray", *kinds)
    height_width = size or (image.height, image.width)
    return ImageSummary(height_width, kinds, int.from_bytes(digest.digest(), "little"), thumbnail)


def read_header(path: str) -> tuple[tuple[int, int] | None, tuple[str, ...]]:
    """Return (height, width) of an image file, with its orientation applied, and its unusual properties."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            width, height = image.size
            kinds = ["CMYK"] if image.mode == "CMYK" else []
            kinds += ["deep"] if image.mode.startswith(("I", "F")) else []
            kinds += ["transparent"] if image.has_transparency_data else []
            # MPO is a JPEG with a second view of the same scene, from some cameras.
            kinds += ["animated"] if image.format != "MPO" and getattr(image, "is_animated", False) else []
            sideways = image.getexif().get(_ORIENTATION_TAG) in _SIDEWAYS
    except Exception:  # Pillow raises many kinds of errors for damaged metadata, which is not essential here
        return None, ()
    return (width, height) if sideways else (height, width), tuple(kinds)
