"""How many patches to merge in each block for a stated loss of accuracy."""

from collections.abc import Callable, Sequence

from ..classifier import BATCH_SIZE, Classifier
from ..config import ModelConfig, ViTConfig
from ..engines import torch_engine
from ..errors import ConfigError
from .measure import Labelled, graded
from .metrics import Tally
from .proof import ROUNDING


def choose_merging(
    classifier: Classifier, pictures: Sequence[Labelled], drop: float, on_progress: Callable[[], object] = lambda: None
) -> tuple[int, ...]:
    """As many as lose at most `drop`, a part of 1, of the accuracy on these pictures; the same in each block.

    The more are merged, the worse it gets, so halving the range finds the number in a few measurements.
    """
    config = classifier.checkpoint.config
    if not isinstance(config, ViTConfig) or classifier.checkpoint.several:
        raise ConfigError("How many patches to merge is chosen for ViTs that give one class for each picture.")
    whole = accuracy(classifier, pictures, on_progress)
    good, bad = 0, config.num_patches // config.depth + 1  # at most, hardly a patch would be left
    while bad - good > 1:
        count = (good + bad) // 2
        merged = (count,) * config.depth
        fewer = Classifier(classifier.checkpoint, torch_engine(classifier.checkpoint, classifier.model, merged))
        if whole - accuracy(fewer, pictures, on_progress) <= drop + ROUNDING:
            good = count
        else:
            bad = count
    return (good,) * config.depth if good else ()


def steps(config: ModelConfig) -> int:
    """How often the pictures are gone through, at most."""
    return 1 + (config.num_patches // config.depth).bit_length() if isinstance(config, ViTConfig) else 1


def accuracy(classifier: Classifier, pictures: Sequence[Labelled], on_progress: Callable[[], object]) -> float:
    tally, _, _ = graded(classifier, pictures, BATCH_SIZE, on_progress)
    assert isinstance(tally, Tally)
    return float(tally.right.mean())
