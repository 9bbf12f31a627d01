"""RandAugment (Cubuk et al., 2019) as AugReg used it: which operations there are and how strong a magnitude makes them.

The sixteen operations and their strengths are those of big_vision's `randaug(layers, magnitude)`. Faithfully so:

* every operation has the same chance, the same one may come twice, and only directions are random, not strengths;
* magnitude 10 is the full strength of AutoAugment, and 20 is twice that;
* posterize and solarize grow *weaker* with the magnitude (from 20 and 10 on they change nothing), and with magnitude 0
  they, and the four that enhance, are at their strongest: "nothing" is `operations=0`.

Two things differ. Lengths, there in pixels of a picture of 224, are parts of the side, so that small pictures are
treated alike. And `contrast` keeps the picture's mean, as Pillow does; there it is a constant by mistake.
"""

import numpy as np

from ..keyed_rng import uniform
from . import image_ops as op

OPERATIONS = (
    *("autocontrast", "equalize", "invert", "rotate", "posterize", "solarize", "colour", "contrast"),
    *("brightness", "sharpness", "shear-x", "shear-y", "translate-x", "translate-y", "cutout", "solarize-add"),
)


def randaugment(pictures: np.ndarray, layers: int, magnitude: float, keys: np.ndarray) -> np.ndarray:
    """`layers` operations, one after the other, on each of uint8 (B, H, W, C); a new array."""
    result = pictures.copy()
    draws = uniform(keys, "randaugment", 4 * layers).reshape(len(keys), layers, 4)
    for layer in range(layers):
        choices = (draws[:, layer, 0] * len(OPERATIONS)).astype(int)
        for number, name in enumerate(OPERATIONS):
            chosen = np.flatnonzero(choices == number)
            if len(chosen):
                result[chosen] = operate(name, result[chosen], magnitude, draws[chosen, layer, 1:])
    return result


def operate(name: str, pictures: np.ndarray, magnitude: float, draws: np.ndarray) -> np.ndarray:
    """One operation on all pictures. `draws` (n, 3) in 0..1 decide on a direction and on the place of a square."""
    level = magnitude / 10
    direction = np.where(draws[:, 0] < 0.5, -level, level)
    still = np.zeros(len(pictures))
    factors = np.full(len(pictures), 1.8 * level + 0.1)
    match name:
        case "autocontrast":
            return op.autocontrast(pictures)
        case "equalize":
            return op.equalize(pictures)
        case "invert":
            return op.invert(pictures)
        case "rotate":
            return op.rotate(pictures, 30 * direction)
        case "posterize":
            return op.posterize(pictures, int(level * 4))
        case "solarize":
            return op.solarize(pictures, int(level * 256))
        case "colour":
            return op.colour(pictures, factors)
        case "contrast":
            return op.contrast(pictures, factors)
        case "brightness":
            return op.brightness(pictures, factors)
        case "sharpness":
            return op.sharpness(pictures, factors)
        case "shear-x":
            return op.shear(pictures, 0.3 * direction, still)
        case "shear-y":
            return op.shear(pictures, still, 0.3 * direction)
        case "translate-x":
            return op.translate(pictures, 100 / 224 * direction, still)
        case "translate-y":
            return op.translate(pictures, still, 100 / 224 * direction)
        case "cutout":
            return op.cutout(pictures, 80 / 224 * level, draws[:, 1:])
        case "solarize-add":
            return op.solarize_add(pictures, int(level * 110))
    raise ValueError(f"RandAugment has no operation {name!r}")
