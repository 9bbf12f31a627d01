"""Whether an engine says what the model says, on real pictures."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ..data.preprocess import Preprocess
from .engine import CALIBRATION, Engine

CLOSE = 1e-3  # largest difference of a logit in fp32, in parts of the largest logit
CHECKED = 24  # photographs, on which answers are compared
FAITHFUL = 0.03  # mean divergence in nats that an int8 engine may have to be chosen without being asked for


@dataclass(frozen=True)
class Parity:
    """Of an engine's answers with those of torch in fp32."""

    pictures: int
    same: float  # part of the pictures whose best class is the same
    divergence: float  # mean of KL(torch || engine), in nats: what acting on the engine's probabilities costs
    largest: float  # largest difference of a logit
    relative: float  # ... in parts of the largest logit

    def to_json(self) -> dict[str, float | int | None]:
        """Without infinities, which JSON does not have."""
        return {name: value if math.isfinite(value) else None for name, value in vars(self).items()}

    def faithful(self, exact: bool) -> bool:
        return self.relative <= CLOSE if exact else self.divergence <= FAITHFUL


def measure_parity(reference: Tensor, answers: Tensor, multi_label: bool = False) -> Parity:
    """From logits (N, K) of both; with several labels each class is a decision of its own."""
    if reference.shape != answers.shape or not answers.isfinite().all():
        return Parity(len(reference), 0.0, float("inf"), float("inf"), float("inf"))
    wanted, given = (log_probabilities(logits.double(), multi_label) for logits in (reference, answers))
    divergence = float((wanted.exp() * (wanted - given)).sum(dim=(1, 2)).mean())
    largest = float((reference - answers).abs().max())
    decided = [(each > 0) if multi_label else each.argmax(dim=1, keepdim=True) for each in (reference, answers)]
    same = float((decided[0] == decided[1]).all(dim=1).double().mean())
    return Parity(len(reference), same, divergence, largest, largest / max(1e-6, float(reference.abs().max())))


def log_probabilities(logits: Tensor, multi_label: bool) -> Tensor:
    """(N, decisions, outcomes)."""
    if multi_label:
        return torch.stack([nn.functional.logsigmoid(logits), nn.functional.logsigmoid(-logits)], dim=2)
    return logits.log_softmax(dim=1)[:, None]


def answers(engine: Engine, pixels: Tensor, batch: int = 8) -> Tensor:
    return torch.cat([engine(part) for part in pixels.split(batch)])


def sample_photos(count: int = CALIBRATION) -> list[Image.Image]:
    """Real pictures that every machine has: parts of the two photographs that come with scikit-learn."""
    from sklearn.datasets import load_sample_images

    photographs = [Image.fromarray(each) for each in load_sample_images().images]
    draw, made = np.random.default_rng(0), []
    for number in range(count):
        whole = photographs[number % len(photographs)]
        width, height = (int(length * draw.uniform(0.3, 1.0)) for length in whole.size)
        left, top = (int(draw.integers(0, a - b + 1)) for a, b in zip(whole.size, (width, height), strict=True))
        made.append(whole.crop((left, top, left + width, top + height)))
    return made


def sample_pictures(preprocess: Preprocess, count: int = CALIBRATION) -> Tensor:
    """The same as a model sees them: uint8 (N, H, W, C)."""
    made = [preprocess.pixels(each.convert(preprocess.mode)) for each in sample_photos(count)]
    return torch.from_numpy(np.stack(made)) if made else torch.zeros(0, *preprocess.size, preprocess.channels).byte()


def varied_images(preprocess: Preprocess) -> Tensor:
    """Some that are not among those that engines are calibrated with."""
    return sample_pictures(preprocess, CALIBRATION + CHECKED)[CALIBRATION:]
