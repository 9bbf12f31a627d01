"""Which part of the patches to merge in each block for a stated loss of accuracy."""

from collections.abc import Callable, Sequence

from ..config import ViTConfig
from ..engines import torch_engine
from ..errors import ConfigError
from ..inference.classifier import BATCH_SIZE, Classifier
from ..metrics.classification import ClassificationMetrics
from ..models.token_merging import TokenMergingViT, merge_schedule
from .evaluate import LabeledImage, graded
from .export_check import ROUNDING

MOST = 50  # hundredths of the patches that a block may merge
STEPS = 1 + MOST.bit_length()  # how often the pictures are gone through, at most


def choose_tome_ratio(
    classifier: Classifier,
    pictures: Sequence[LabeledImage],
    drop: float,
    on_progress: Callable[[], object] = lambda: None,
) -> float:
    """As many as lose at most `drop`, a part of 1, of the accuracy on these pictures.

    The more are merged, the worse it gets, so halving the range finds the part in a few measurements.
    """
    config = classifier.checkpoint.config
    if not isinstance(config, ViTConfig) or classifier.checkpoint.multi_label:
        raise ConfigError("How many patches to merge is chosen for ViTs that give one class for each picture.")
    # A model whose tokens cannot be merged is refused before anything is measured.
    TokenMergingViT(classifier.model, merge_schedule(config, MOST / 100))
    whole = accuracy(classifier, pictures, on_progress)
    good, bad = 0, MOST + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        merged = merge_schedule(config, middle / 100)
        fewer = Classifier(classifier.checkpoint, torch_engine(classifier.checkpoint, classifier.model, merged))
        if whole - accuracy(fewer, pictures, on_progress) <= drop + ROUNDING:
            good = middle
        else:
            bad = middle
    return good / 100


def accuracy(classifier: Classifier, pictures: Sequence[LabeledImage], on_progress: Callable[[], object]) -> float:
    tally, _, _ = graded(classifier, pictures, BATCH_SIZE, on_progress)
    assert isinstance(tally, ClassificationMetrics)
    return float(tally.right.mean())
