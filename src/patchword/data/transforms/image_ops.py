"""Changes of pictures, on whole groups: uint8 (n, H, W, C) in, a new array out. Knows no chance and no magnitudes.

What Pillow has, too, gives Pillow's pixels (its nearest neighbour differs in a few: it counts in 16 bits after the
point). Grey pictures (C = 1) are welcome everywhere.

NumPy, although batches are tensors: it starts no threads. These functions run in the loader's threads, beside a model
that already uses every core, and torch's own threads would get in its way.
"""

import numpy as np

GREY = 128  # fills what has no pixel: near zero once normalised


def autocontrast(pictures: np.ndarray) -> np.ndarray:
    """Stretches each channel until its darkest value is 0 and its brightest 255."""
    low = pictures.min(axis=1).min(axis=1).astype(np.float64)[..., None]  # (n, C, 1); both axes at once: 10 x slower
    high = pictures.max(axis=1).max(axis=1).astype(np.float64)[..., None]
    scale = 255 / np.maximum(high - low, 1)
    stretched = np.clip(np.arange(256) * scale - low * scale, 0, 255)
    return _looked_up(pictures, np.where(high > low, stretched, np.arange(256)).astype(np.uint8))


def equalize(pictures: np.ndarray) -> np.ndarray:
    """Makes all values of a channel about equally frequent."""
    tables = len(pictures) * pictures.shape[3]
    counts = np.bincount((pictures + _offsets(pictures)).reshape(-1), minlength=tables * 256).reshape(tables, 256)
    last = 255 - (counts[:, ::-1] != 0).argmax(axis=1)  # the brightest value that occurs
    step = ((counts.sum(axis=1) - counts[np.arange(tables), last]) // 255)[:, None]
    before = counts.cumsum(axis=1) - counts
    equal = np.minimum((before + step // 2) // np.maximum(step, 1), 255)
    return _looked_up(pictures, np.where(step > 0, equal, np.arange(256)).astype(np.uint8))


def invert(pictures: np.ndarray) -> np.ndarray:
    return ~pictures


def posterize(pictures: np.ndarray, bits: int) -> np.ndarray:
    """Keeps the highest `bits` of each value; 0 leaves a black picture, 8 and more change nothing."""
    return pictures & np.uint8(0xFF << max(8 - bits, 0) & 0xFF)


def solarize(pictures: np.ndarray, threshold: int) -> np.ndarray:
    """Inverts the values from the threshold on; above 255 nothing changes."""
    if threshold > 255:
        return pictures.copy()
    return pictures ^ np.negative((pictures >= threshold).view(np.uint8))  # 255 where it is bright, else 0


def solarize_add(pictures: np.ndarray, addition: int) -> np.ndarray:
    """Brightens the values below 128."""
    values = np.arange(256)
    return np.where(values < 128, np.minimum(values + addition, 255), values).astype(np.uint8).take(pictures)


def brightness(pictures: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """0 is black, 1 changes nothing; one factor for each picture, as in the next three."""
    return _extrapolated(np.zeros((1, 1, 1, 1)), pictures, factors)


def contrast(pictures: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """0 is the picture's mean grey everywhere."""
    mean = _grey(pictures).mean(axis=(1, 2), dtype=np.float64) + 0.5
    return _extrapolated(np.floor(mean)[:, None, None, None], pictures, factors)


def colour(pictures: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """0 is the picture in greys."""
    if pictures.shape[3] == 1:
        return pictures.copy()
    return _extrapolated(np.repeat(_grey(pictures)[..., None], 3, axis=3), pictures, factors)


def sharpness(pictures: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """0 is slightly blurred, and 2 as much sharper. The outermost pixels stay as they are."""
    wide = pictures.astype(np.uint16)
    columns = wide[:, :-2] + wide[:, 1:-1] + wide[:, 2:]
    weighted = columns[:, :, :-2] + columns[:, :, 1:-1] + columns[:, :, 2:] + 4 * wide[:, 1:-1, 1:-1]
    blurred = ((2 * weighted + 13) // 26).astype(np.uint8)  # weighted / 13, rounded
    result = pictures.copy()
    result[:, 1:-1, 1:-1] = _extrapolated(blurred, pictures[:, 1:-1, 1:-1], factors)
    return result


def rotate(pictures: np.ndarray, degrees: np.ndarray) -> np.ndarray:
    """About the centre, anticlockwise."""
    centre_x, centre_y = pictures.shape[2] / 2, pictures.shape[1] / 2
    cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    right = cos, -sin, centre_x - cos * centre_x + sin * centre_y
    down = sin, cos, centre_y - sin * centre_x - cos * centre_y
    return _affine(pictures, right, down)


def shear(pictures: np.ndarray, sideways: np.ndarray, downwards: np.ndarray) -> np.ndarray:
    """About the upper left corner: each row takes its pixels from `sideways` further right than the row above."""
    one, none = np.ones(len(pictures)), np.zeros(len(pictures))
    return _affine(pictures, (one, sideways, none), (downwards, one, none))


def translate(pictures: np.ndarray, sideways: np.ndarray, downwards: np.ndarray) -> np.ndarray:
    """Takes pixels from that far right and below; parts of the sides."""
    height, width = pictures.shape[1:3]
    one, none = np.ones(len(pictures)), np.zeros(len(pictures))
    return _affine(pictures, (one, none, sideways * width), (none, one, downwards * height))


def cutout(pictures: np.ndarray, side: float, centres: np.ndarray) -> np.ndarray:
    """Blanks a square, a part of the shorter side wide, around a centre (n, 2) in 0..1; it may jut out."""
    height, width = pictures.shape[1:3]
    pixels = round(side * min(height, width))
    corners = np.floor(centres * (height, width)).astype(int) - pixels // 2
    result = pictures.copy()
    for picture, (top, left) in zip(result, corners.tolist(), strict=True):
        picture[max(top, 0) : max(top + pixels, 0), max(left, 0) : max(left + pixels, 0)] = GREY
    return result


Axis = tuple[np.ndarray, np.ndarray, np.ndarray]  # coefficients (n,) of x, of y, and what is added


def _affine(pictures: np.ndarray, right: Axis, down: Axis) -> np.ndarray:
    """Each pixel is that at (x, y) -> (right, down) of the old picture, its nearest one, or grey outside."""
    count, height, width, channels = pictures.shape
    x, y = np.arange(width) + 0.5, np.arange(height)[:, None] + 0.5
    columns, rows = (a[:, None, None] * x + (b[:, None, None] * y + c[:, None, None]) for a, b, c in (right, down))
    inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
    first_rows = np.arange(0, count * height, height)[:, None, None]
    source = (rows.astype(np.intp) + first_rows) * width + columns.astype(np.intp)
    source[~inside] = count * height * width  # where the grey pixel is
    pixels = np.concatenate([pictures.reshape(-1, channels), np.full((1, channels), GREY, np.uint8)])
    return pixels.take(source.reshape(-1), axis=0).reshape(pictures.shape)


def _grey(pictures: np.ndarray) -> np.ndarray:
    """uint8 (n, H, W): the luma of ITU-R 601, in whole numbers as Pillow computes it."""
    if pictures.shape[3] == 1:
        return pictures[..., 0]
    red, green, blue = (pictures[..., channel].astype(np.uint32) for channel in range(3))
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).astype(np.uint8)


def _extrapolated(start: np.ndarray, pictures: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """From `start` (factor 0) through the picture (1) and beyond. Truncated, in single precision, as Pillow's blend."""
    values, start = pictures.astype(np.float32), start.astype(np.float32)
    values -= start
    values *= factors.astype(np.float32)[:, None, None, None]
    values += start
    return np.clip(values, 0, 255, out=values).astype(np.uint8)


def _offsets(pictures: np.ndarray) -> np.ndarray:
    """(n, 1, W, C): where the 256 entries of each picture's channel begin. W only makes the addition faster."""
    count, _, width, channels = pictures.shape
    starts = np.arange(0, count * channels * 256, 256).reshape(count, 1, 1, channels)
    return np.tile(starts, (1, 1, width, 1))


def _looked_up(pictures: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """Each value replaced by its entry in a table of its own picture and channel: uint8, n * C * 256 in all."""
    return tables.reshape(-1).take(pictures + _offsets(pictures))
