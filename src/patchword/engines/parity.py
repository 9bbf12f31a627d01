"""Parity of an engine with PyTorch in fp32: do both compute the same logits on real images?"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ..data.preprocess import Preprocess
from .engine import NUM_CALIBRATION_IMAGES, Engine

MAX_REL_DIFF = 1e-3  # an fp32 engine's largest difference of a logit, relative to the largest logit
MAX_KL_DIVERGENCE = 0.03  # mean KL divergence, in nats, of an int8 engine that "auto" may select
NUM_CHECK_IMAGES = 24  # images on which logits are compared


@dataclass(frozen=True)
class Parity:
    """Agreement of an engine's logits with those of PyTorch in fp32.

    Attributes:
        num_images: Images that were compared.
        top1_agreement: Fraction of the images with the same top-1 class.
        kl_divergence: Mean of KL(torch || engine), in nats.
        max_abs_diff: Largest absolute difference of a logit.
        max_rel_diff: The same, relative to the largest absolute logit of PyTorch.
    """

    num_images: int
    top1_agreement: float
    kl_divergence: float
    max_abs_diff: float
    max_rel_diff: float

    def to_json(self) -> dict[str, float | int | None]:
        """Return the fields; infinity, which JSON does not have, becomes None."""
        return {name: value if math.isfinite(value) else None for name, value in vars(self).items()}

    def within_tolerance(self, exact: bool) -> bool:
        """Judge fp32 engines (`exact`) by their logits, others by their KL divergence."""
        return self.max_rel_diff <= MAX_REL_DIFF if exact else self.kl_divergence <= MAX_KL_DIVERGENCE


def measure_parity(reference: Tensor, logits: Tensor, multi_label: bool = False) -> Parity:
    """Compare logits (N, K) with those of the reference; a multi-label model makes a decision per class."""
    if reference.shape != logits.shape or not logits.isfinite().all():
        return Parity(len(reference), 0.0, float("inf"), float("inf"), float("inf"))
    expected, actual = (log_probabilities(values.double(), multi_label) for values in (reference, logits))
    kl_divergence = float((expected.exp() * (expected - actual)).sum(dim=(1, 2)).mean())
    max_abs_diff = float((reference - logits).abs().max())
    decisions = [(v > 0) if multi_label else v.argmax(dim=1, keepdim=True) for v in (reference, logits)]
    top1_agreement = float((decisions[0] == decisions[1]).all(dim=1).double().mean())
    max_rel_diff = max_abs_diff / max(1e-6, float(reference.abs().max()))
    return Parity(len(reference), top1_agreement, kl_divergence, max_abs_diff, max_rel_diff)


def log_probabilities(logits: Tensor, multi_label: bool) -> Tensor:
    """Return log probabilities (N, decisions, outcomes)."""
    if multi_label:
        return torch.stack([nn.functional.logsigmoid(logits), nn.functional.logsigmoid(-logits)], dim=2)
    return logits.log_softmax(dim=1)[:, None]


def compute_logits(engine: Engine, pixels: Tensor, batch_size: int = 8) -> Tensor:
    """Run an engine over images in batches."""
    return torch.cat([engine(batch) for batch in torch.split(pixels, batch_size)])


def sample_photos(count: int = NUM_CALIBRATION_IMAGES) -> list[Image.Image]:
    """Return real images that need no download: random crops of the two photographs shipped with scikit-learn."""
    from sklearn.datasets import load_sample_images

    photos = [Image.fromarray(array) for array in load_sample_images().images]
    rng, crops = np.random.default_rng(0), []
    for index in range(count):
        photo = photos[index % len(photos)]
        width, height = (int(length * rng.uniform(0.3, 1.0)) for length in photo.size)
        left, top = (int(rng.integers(0, a - b + 1)) for a, b in zip(photo.size, (width, height), strict=True))
        crops.append(photo.crop((left, top, left + width, top + height)))
    return crops


def sample_images(preprocess: Preprocess, count: int = NUM_CALIBRATION_IMAGES) -> Tensor:
    """Return `sample_photos` resized and cropped for a model: uint8 (N, H, W, C)."""
    arrays = [preprocess.resize_and_crop(photo.convert(preprocess.mode)) for photo in sample_photos(count)]
    if not arrays:
        return torch.zeros(0, *preprocess.size, preprocess.channels, dtype=torch.uint8)
    return torch.from_numpy(np.stack(arrays))


def held_out_images(preprocess: Preprocess) -> Tensor:
    """Return sample images that are not among those that calibrate engines by default."""
    return sample_images(preprocess, NUM_CALIBRATION_IMAGES + NUM_CHECK_IMAGES)[NUM_CALIBRATION_IMAGES:]
