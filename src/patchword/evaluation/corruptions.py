"""Image corruptions after ImageNet-C (Hendrycks and Dietterich, 2019): noise, blur, weather, digital; five severities.

Reimplemented for any image size: lengths are fractions of the shorter side, so severity 3 is as hard at 32 pixels as at
224. The numbers are therefore not comparable with published ImageNet-C results. Each corruption takes a float array
(h, w, c) in 0..1, a severity from 1 to 5 and a random generator, and returns the same shape.
"""

import io
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image
from scipy import ndimage

SEVERITIES = (1, 2, 3, 4, 5)

Corruption = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]


def gaussian_noise(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Additive Gaussian noise."""
    return x + rng.normal(scale=(0.06, 0.10, 0.15, 0.21, 0.30)[severity - 1], size=x.shape)


def shot_noise(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Poisson noise of a low photon count."""
    photons = (80, 35, 18, 10, 5)[severity - 1]
    return rng.poisson(np.clip(x, 0, 1) * photons) / photons


def impulse_noise(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Salt-and-pepper noise."""
    fraction = (0.02, 0.05, 0.09, 0.15, 0.24)[severity - 1]
    dice = rng.random(x.shape)
    return np.where(dice < fraction / 2, 0.0, np.where(dice > 1 - fraction / 2, 1.0, x))


def defocus_blur(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Convolve with a disk."""
    radius = 0.4 + (0.010, 0.016, 0.024, 0.034, 0.046)[severity - 1] * min(x.shape[:2])
    reach = int(np.ceil(radius))
    y, z = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    disc = np.clip(radius + 0.5 - np.hypot(y, z), 0, 1)  # soft edges, so that small radii differ
    return ndimage.convolve(x, (disc / disc.sum())[:, :, None], mode="reflect")


def motion_blur(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Average along a line in a random direction."""
    length = (0.03, 0.05, 0.08, 0.11, 0.15)[severity - 1] * min(x.shape[:2])
    angle = rng.uniform(0, np.pi)
    steps = np.linspace(-length / 2, length / 2, max(3, 2 * round(length) + 1))
    moved = [ndimage.shift(x, (s * np.sin(angle), s * np.cos(angle), 0), order=1, mode="reflect") for s in steps]
    return np.mean(moved, axis=0)


def zoom_blur(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Average of increasingly zoomed images."""
    most = (1.05, 1.09, 1.14, 1.20, 1.28)[severity - 1]
    return np.mean([zoom_center(x, zoom) for zoom in np.linspace(1, most, 9)], axis=0)


def zoom_center(x: np.ndarray, zoom: float) -> np.ndarray:
    """The center of the image, enlarged to its full size."""
    center = (np.array(x.shape[:2]) - 1) / 2
    offset = np.append(center - center / zoom, 0)
    return ndimage.affine_transform(x, (1 / zoom, 1 / zoom, 1), offset, order=1, mode="reflect")


def fog(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Blend with plasma noise."""
    opacity = (0.35, 0.48, 0.60, 0.70, 0.80)[severity - 1]
    veil = (0.55 + 0.45 * plasma_noise(x.shape[:2], rng))[:, :, None]
    return x * (1 - opacity) + veil * opacity


def plasma_noise(shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Fractal noise in 0..1: each octave has twice the frequency and half the amplitude."""
    whole = np.zeros(shape)
    cells, strength = 2, 1.0
    while cells < max(shape):
        coarse = rng.random((cells + 1, cells + 1))
        zoomed = ndimage.zoom(coarse, [(s + 1) / (cells + 1) for s in shape], order=1)
        whole += strength * zoomed[: shape[0], : shape[1]]
        cells, strength = 2 * cells, strength / 2
    return (whole - whole.min()) / max(float(np.ptp(whole)), 1e-9)


def snow(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Motion-blurred white flakes over a paler image."""
    fraction = (0.006, 0.012, 0.020, 0.030, 0.045)[severity - 1]
    flakes = (rng.random(x.shape[:2]) < fraction).astype(np.float64)[:, :, None]
    flakes = ndimage.gaussian_filter(flakes, (0.006 * min(x.shape[:2]) + 0.3,) * 2 + (0,))
    flakes = motion_blur(flakes, 1, rng)
    bright = np.quantile(flakes, 0.995)  # the center of a flake
    return np.maximum(x * 0.85 + 0.10, np.clip(flakes / max(float(bright), 1e-9), 0, 1) * (0.55 + 0.09 * severity))


def brightness(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Add a constant."""
    return x + (0.10, 0.18, 0.27, 0.37, 0.48)[severity - 1]


def darkness(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Multiply by a constant."""
    return x * (0.70, 0.52, 0.38, 0.26, 0.16)[severity - 1]


def contrast(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Shrink the differences from the mean."""
    return x.mean() + (x - x.mean()) * (0.55, 0.40, 0.28, 0.18, 0.10)[severity - 1]


def saturation(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Fade or exaggerate colors; gray stays gray."""
    factor = (0.35, 0.05, 2.0, 3.5, 6.0)[severity - 1]
    gray = x.mean(axis=2, keepdims=True)
    return gray + (x - gray) * factor


def elastic(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Elastic deformation."""
    side = min(x.shape[:2])
    far = (0.008, 0.014, 0.021, 0.030, 0.042)[severity - 1] * side
    waves = [ndimage.gaussian_filter(rng.normal(size=x.shape[:2]), 0.04 * side) for _ in range(2)]
    shifts = [far * wave / max(float(wave.std()), 1e-9) for wave in waves]
    y, z = np.mgrid[: x.shape[0], : x.shape[1]]
    places = [y + shifts[0], z + shifts[1]]
    moved = [ndimage.map_coordinates(x[:, :, c], places, order=1, mode="reflect") for c in range(x.shape[2])]
    return np.stack(moved, axis=2)


def pixelate(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Downsample, then enlarge without interpolation."""
    fraction = (0.60, 0.45, 0.34, 0.25, 0.17)[severity - 1]
    h, w = x.shape[:2]
    small = resize_channels(x, (max(1, round(h * fraction)), max(1, round(w * fraction))), Image.Resampling.BOX)
    return resize_channels(small, (h, w), Image.Resampling.NEAREST)


def resize_channels(x: np.ndarray, size: tuple[int, int], resample: Image.Resampling) -> np.ndarray:
    """Resize a float image, channel by channel."""
    planes = [Image.fromarray(x[:, :, c].astype(np.float32)).resize(size[::-1], resample) for c in range(x.shape[2])]
    return np.stack([np.asarray(plane) for plane in planes], axis=2)


def jpeg(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """JPEG compression."""
    file = io.BytesIO()
    pixels = to_uint8(x)
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    image.save(file, "JPEG", quality=(30, 20, 14, 9, 5)[severity - 1])
    decoded = np.asarray(Image.open(file), dtype=np.float64) / 255
    return decoded.reshape(x.shape)


FAMILIES: dict[str, tuple[Corruption, ...]] = {
    "noise": (gaussian_noise, shot_noise, impulse_noise),
    "blur": (defocus_blur, motion_blur, zoom_blur),
    "weather": (fog, snow, brightness, darkness),
    "digital": (contrast, saturation, elastic, pixelate, jpeg),
}
CORRUPTIONS: dict[str, Corruption] = {
    function.__name__: function for family in FAMILIES.values() for function in family
}


def corrupt(pixels: np.ndarray, name: str, severity: int, seed: int) -> np.ndarray:
    """Corrupt a uint8 image (h, w, c); deterministic for a seed."""
    rng = np.random.default_rng((seed, zlib.crc32(name.encode())))  # the same random numbers at every severity
    return to_uint8(CORRUPTIONS[name](pixels.astype(np.float64) / 255, severity, rng))


def to_uint8(x: np.ndarray) -> np.ndarray:
    """Values in 0..1 as uint8, rounded."""
    return (np.clip(x, 0, 1) * 255 + 0.5).astype(np.uint8)
