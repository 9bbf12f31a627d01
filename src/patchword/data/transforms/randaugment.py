"""RandAugment (Cubuk et al., 2019) as used by AugReg (Steiner et al., 2021): the operations and their strengths.

The sixteen operations and their strengths are those of big_vision's `randaug(num_layers, magnitude)`, including:

* every operation is equally likely, also twice in a row; only directions are random, not strengths;
* magnitude 10 is the full strength of AutoAugment, 20 is twice that;
* posterize and solarize get *weaker* with the magnitude (no effect from 20 and 10 on). At magnitude 0 they, and the
  four enhance operations, are at their strongest: to disable RandAugment, use 0 operations.

There are two differences. Lengths, there in pixels of a 224-pixel image, are fractions of the side, so that small
images are treated alike. And `contrast` keeps the mean of the image, as Pillow does; there it is a constant by mistake.
"""

import numpy as np

from ..keyed_rng import uniform
from . import image_ops as op

OPS = (
    *("autocontrast", "equalize", "invert", "rotate", "posterize", "solarize", "color", "contrast"),
    *("brightness", "sharpness", "shear-x", "shear-y", "translate-x", "translate-y", "cutout", "solarize-add"),
)


def randaugment(images: np.ndarray, num_ops: int, magnitude: float, keys: np.ndarray) -> np.ndarray:
    """Apply `num_ops` random operations in sequence to each image of uint8 (B, H, W, C); returns a new array."""
    result = images.copy()
    draws = uniform(keys, "randaugment", 4 * num_ops).reshape(len(keys), num_ops, 4)
    for step in range(num_ops):
        choices = (draws[:, step, 0] * len(OPS)).astype(int)
        for number, name in enumerate(OPS):
            chosen = np.flatnonzero(choices == number)
            if len(chosen):
                result[chosen] = apply_op(name, result[chosen], magnitude, draws[chosen, step, 1:])
    return result


def apply_op(name: str, images: np.ndarray, magnitude: float, draws: np.ndarray) -> np.ndarray:
    """Apply one operation to all images. `draws`, (N, 3) in 0..1, give the direction and the center of a cutout."""
    level = magnitude / 10
    direction = np.where(draws[:, 0] < 0.5, -level, level)
    zero = np.zeros(len(images))
    factors = np.full(len(images), 1.8 * level + 0.1)
    match name:
        case "autocontrast":
            return op.autocontrast(images)
        case "equalize":
            return op.equalize(images)
        case "invert":
            return op.invert(images)
        case "rotate":
            return op.rotate(images, 30 * direction)
        case "posterize":
            return op.posterize(images, int(level * 4))
        case "solarize":
            return op.solarize(images, int(level * 256))
        case "color":
            return op.color(images, factors)
        case "contrast":
            return op.contrast(images, factors)
        case "brightness":
            return op.brightness(images, factors)
        case "sharpness":
            return op.sharpness(images, factors)
        case "shear-x":
            return op.shear(images, 0.3 * direction, zero)
        case "shear-y":
            return op.shear(images, zero, 0.3 * direction)
        case "translate-x":
            return op.translate(images, 100 / 224 * direction, zero)
        case "translate-y":
            return op.translate(images, zero, 100 / 224 * direction)
        case "cutout":
            return op.cutout(images, 80 / 224 * level, draws[:, 1:])
        case "solarize-add":
            return op.solarize_add(images, int(level * 110))
    raise ValueError(f"Unknown RandAugment operation {name!r}")
