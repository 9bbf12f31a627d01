"""The largest token-merging ratio (ToMe; Bolya et al., 2023) within an allowed loss of accuracy."""

from collections.abc import Callable, Sequence

from ..config import ViTConfig
from ..engines import torch_engine
from ..errors import ConfigError
from ..inference.classifier import BATCH_SIZE, Classifier
from ..inference.inputs import InputImage
from ..metrics.classification import ClassificationMetrics
from ..models.token_merging import TokenMergingViT, merge_schedule
from .evaluate import run_classifier
from .export_check import TOLERANCE

MAX_PERCENT = 50  # of the patches that a block may merge
MAX_PASSES = 1 + MAX_PERCENT.bit_length()  # over the images


def choose_tome_ratio(
    classifier: Classifier,
    images: Sequence[InputImage],
    max_drop: float,
    on_progress: Callable[[], object] = lambda: None,
) -> float:
    """The largest fraction of patches to merge in each block that loses at most `max_drop` (a fraction) of accuracy.

    Accuracy falls as more patches are merged, so a binary search needs only a few passes over the images.
    """
    config = classifier.checkpoint.config
    if not isinstance(config, ViTConfig) or classifier.checkpoint.multi_label:
        raise ConfigError(
            "The token-merging ratio can be chosen for single-label ViTs only.", code="unsupported_by_model"
        )
    # Raises before anything is measured if the tokens of this model cannot be merged.
    TokenMergingViT(classifier.model, merge_schedule(config, MAX_PERCENT / 100))
    baseline = measure_accuracy(classifier, images, on_progress)
    good, bad = 0, MAX_PERCENT + 1
    while bad - good > 1:
        percent = (good + bad) // 2
        engine = torch_engine(classifier.checkpoint, classifier.model, merge_schedule(config, percent / 100))
        merged = measure_accuracy(Classifier(classifier.checkpoint, engine), images, on_progress)
        if baseline - merged <= max_drop + TOLERANCE:
            good = percent
        else:
            bad = percent
    return good / 100


def measure_accuracy(
    classifier: Classifier, images: Sequence[InputImage], on_progress: Callable[[], object] = lambda: None
) -> float:
    """Top-1 accuracy."""
    run = run_classifier(classifier, images, BATCH_SIZE, on_progress)
    assert isinstance(run.accumulated, ClassificationMetrics)
    return float(run.accumulated.correct.mean())
