"""Image operations on batches: uint8 (N, H, W, C) in, a new array out. No randomness and no magnitudes.

Operations that Pillow also has give Pillow's pixels (apart from a few with nearest-neighbor sampling, where Pillow uses
16-bit fixed-point coordinates). Grayscale images (C = 1) are supported everywhere.

NumPy rather than torch, because NumPy starts no threads: these functions run on the loader's threads, beside a model
that already uses every core.
"""

import numpy as np

FILL_VALUE = 128  # for pixels from outside the image: mid-gray, close to zero after normalization


def autocontrast(images: np.ndarray) -> np.ndarray:
    """Stretch each channel so that its minimum is 0 and its maximum 255."""
    low = (
        images.min(axis=1).min(axis=1).astype(np.float64)[..., None]
    )  # (N, C, 1); a reduction over both axes at once is 10x slower
    high = images.max(axis=1).max(axis=1).astype(np.float64)[..., None]
    scale = 255 / np.maximum(high - low, 1)
    stretched = np.clip(np.arange(256) * scale - low * scale, 0, 255)
    return _apply_tables(images, np.where(high > low, stretched, np.arange(256)).astype(np.uint8))


def equalize(images: np.ndarray) -> np.ndarray:
    """Equalize the histogram of each channel."""
    tables = len(images) * images.shape[3]
    counts = np.bincount((images + _offsets(images)).reshape(-1), minlength=tables * 256).reshape(tables, 256)
    last = 255 - (counts[:, ::-1] != 0).argmax(axis=1)  # the brightest value that occurs
    step = ((counts.sum(axis=1) - counts[np.arange(tables), last]) // 255)[:, None]
    before = counts.cumsum(axis=1) - counts
    equal = np.minimum((before + step // 2) // np.maximum(step, 1), 255)
    return _apply_tables(images, np.where(step > 0, equal, np.arange(256)).astype(np.uint8))


def invert(images: np.ndarray) -> np.ndarray:
    """Invert all values."""
    return ~images


def posterize(images: np.ndarray, bits: int) -> np.ndarray:
    """Keep the highest `bits` bits of each value; 0 gives a black image, 8 or more changes nothing."""
    return images & np.uint8(0xFF << max(8 - bits, 0) & 0xFF)


def solarize(images: np.ndarray, threshold: int) -> np.ndarray:
    """Invert the values at or above the threshold; above 255 nothing changes."""
    if threshold > 255:
        return images.copy()
    return images ^ np.negative((images >= threshold).view(np.uint8))  # XOR with 255 at or above the threshold


def solarize_add(images: np.ndarray, addition: int) -> np.ndarray:
    """Add to the values below 128."""
    values = np.arange(256)
    return np.where(values < 128, np.minimum(values + addition, 255), values).astype(np.uint8).take(images)


def brightness(images: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Scale the brightness by one factor per image: 0 gives black, 1 changes nothing."""
    return _blend(np.zeros((1, 1, 1, 1)), images, factors)


def contrast(images: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Scale the contrast by one factor per image: 0 gives the mean gray level everywhere."""
    mean = _grayscale(images).mean(axis=(1, 2), dtype=np.float64) + 0.5
    return _blend(np.floor(mean)[:, None, None, None], images, factors)


def color(images: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Scale the color saturation by one factor per image: 0 gives a grayscale image."""
    if images.shape[3] == 1:
        return images.copy()
    return _blend(np.repeat(_grayscale(images)[..., None], 3, axis=3), images, factors)


def sharpness(images: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Scale the sharpness by one factor per image: 0 gives a slight blur. Border pixels do not change."""
    wide = images.astype(np.uint16)
    columns = wide[:, :-2] + wide[:, 1:-1] + wide[:, 2:]
    weighted = columns[:, :, :-2] + columns[:, :, 1:-1] + columns[:, :, 2:] + 4 * wide[:, 1:-1, 1:-1]
    blurred = ((2 * weighted + 13) // 26).astype(np.uint8)  # weighted / 13, rounded
    result = images.copy()
    result[:, 1:-1, 1:-1] = _blend(blurred, images[:, 1:-1, 1:-1], factors)
    return result


def rotate(images: np.ndarray, degrees: np.ndarray) -> np.ndarray:
    """Rotate counterclockwise about the center."""
    center_x, center_y = images.shape[2] / 2, images.shape[1] / 2
    cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    right = cos, -sin, center_x - cos * center_x + sin * center_y
    down = sin, cos, center_y - sin * center_x - cos * center_y
    return _affine(images, right, down)


def shear(images: np.ndarray, sideways: np.ndarray, downwards: np.ndarray) -> np.ndarray:
    """Shear about the upper left corner: each row is sampled `sideways` pixels further right than the row above."""
    one, none = np.ones(len(images)), np.zeros(len(images))
    return _affine(images, (one, sideways, none), (downwards, one, none))


def translate(images: np.ndarray, sideways: np.ndarray, downwards: np.ndarray) -> np.ndarray:
    """Sample pixels from further right and below, by fractions of the image's width and height."""
    height, width = images.shape[1:3]
    one, none = np.ones(len(images)), np.zeros(len(images))
    return _affine(images, (one, none, sideways * width), (none, one, downwards * height))


def cutout(images: np.ndarray, side: float, centers: np.ndarray) -> np.ndarray:
    """Fill a square with gray (DeVries and Taylor, 2017).

    Args:
        side: of the square, as a fraction of the shorter side of the image.
        centers: of the squares, (N, 2) in 0..1. A square may extend beyond the image.
    """
    height, width = images.shape[1:3]
    pixels = round(side * min(height, width))
    corners = np.floor(centers * (height, width)).astype(int) - pixels // 2
    result = images.copy()
    for image, (top, left) in zip(result, corners.tolist(), strict=True):
        image[max(top, 0) : max(top + pixels, 0), max(left, 0) : max(left + pixels, 0)] = FILL_VALUE
    return result


Axis = tuple[np.ndarray, np.ndarray, np.ndarray]  # coefficients (N,) of x, of y, and the offset


def _affine(images: np.ndarray, right: Axis, down: Axis) -> np.ndarray:
    """Sample each output pixel (x, y) at (right, down) of the input: nearest neighbor, `FILL_VALUE` outside."""
    count, height, width, channels = images.shape
    x, y = np.arange(width) + 0.5, np.arange(height)[:, None] + 0.5
    columns, rows = (a[:, None, None] * x + (b[:, None, None] * y + c[:, None, None]) for a, b, c in (right, down))
    inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
    first_rows = np.arange(0, count * height, height)[:, None, None]
    source = (rows.astype(np.intp) + first_rows) * width + columns.astype(np.intp)
    source[~inside] = count * height * width  # index of the fill pixel
    pixels = np.concatenate([images.reshape(-1, channels), np.full((1, channels), FILL_VALUE, np.uint8)])
    result: np.ndarray = pixels.take(source.reshape(-1), axis=0).reshape(images.shape)
    return result


def _grayscale(images: np.ndarray) -> np.ndarray:
    """ITU-R 601 luma, uint8 (N, H, W), in integer arithmetic as in Pillow."""
    if images.shape[3] == 1:
        return images[..., 0]
    red, green, blue = (images[..., channel].astype(np.uint32) for channel in range(3))
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).astype(np.uint8)


def _blend(start: np.ndarray, images: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Interpolate from `start` (factor 0) to the image (factor 1), or extrapolate, in float32 as Pillow's blend."""
    values, start = images.astype(np.float32), start.astype(np.float32)
    values -= start
    values *= factors.astype(np.float32)[:, None, None, None]
    values += start
    return np.clip(values, 0, 255, out=values).astype(np.uint8)


def _offsets(images: np.ndarray) -> np.ndarray:
    """Offset of each image's and channel's lookup table, (N, 1, W, C). The W axis only makes the addition faster."""
    count, _, width, channels = images.shape
    starts = np.arange(0, count * channels * 256, 256).reshape(count, 1, 1, channels)
    return np.tile(starts, (1, 1, width, 1))


def _apply_tables(images: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """Look up each value in the table of its image and channel: uint8, N * C * 256 entries in total."""
    result: np.ndarray = tables.reshape(-1).take(images + _offsets(images))
    return result
