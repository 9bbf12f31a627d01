"""What is left of a model's accuracy when pictures get worse."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ..data.formats.image_folder import match_classes
from ..data.prefetch import prefetch
from ..errors import DataError, ImageError
from ..inference.classifier import Classifier
from .corruptions import CORRUPTIONS, FAMILIES, SEVERITIES, corrupted
from .evaluate import LabeledImage


@dataclass(frozen=True)
class Robustness:
    """Accuracies on the same pictures, clean and worse."""

    clean: float
    accuracy: dict[str, list[float]]  # of each corruption, at each severity
    n: int

    @property
    def mean(self) -> float:
        """Of all corruptions and severities."""
        return float(np.mean(list(self.accuracy.values())))

    def families(self) -> dict[str, list[float]]:
        """The mean of each family, at each severity."""
        named = {
            family: [self.accuracy[each.__name__] for each in members if each.__name__ in self.accuracy]
            for family, members in FAMILIES.items()
        }
        return {family: [float(v) for v in np.mean(rows, axis=0)] for family, rows in named.items()}

    def to_json(self) -> dict[str, object]:
        kept = self.mean / self.clean if self.clean else None
        return {**vars(self), "mean": self.mean, "kept": kept, "families": self.families()}


def robustness(
    classifier: Classifier, pictures: Sequence[LabeledImage], on_progress: Callable[[], object] = lambda: None
) -> Robustness:
    """Every picture is decoded once, and made worse where the model sees it: behind resizing and cropping."""
    names = sorted({label for each in pictures for label in each.labels})
    if classifier.checkpoint.multi_label:
        raise DataError("Corruptions are measured for models that give one class for each picture.")
    indices = match_classes(names, classifier.checkpoint.labels, classifier.checkpoint.config.num_classes)
    kinds = [name for name in CORRUPTIONS if classifier.preprocess.channels > 1 or name != "saturation"]
    right, count = np.zeros((1 + len(kinds) * len(SEVERITIES)), dtype=np.int64), 0
    work = partial(answers, classifier, kinds)
    for each, said in zip(pictures, prefetch(work, enumerate(pictures), torch.get_num_threads()), strict=True):
        on_progress()
        if said is not None:
            right += said == indices[each.labels[0]]
            count += 1
    if not count:
        raise DataError(f"None of the {len(pictures)} pictures could be read.")
    table = (right[1:] / count).reshape(len(kinds), len(SEVERITIES))
    rows = {name: [float(v) for v in row] for name, row in zip(kinds, table, strict=True)}
    return Robustness(float(right[0] / count), rows, count)


def answers(classifier: Classifier, kinds: Sequence[str], item: tuple[int, LabeledImage]) -> np.ndarray | None:
    """The class said to the clean picture and to each worse one, in order; None if it cannot be read."""
    seed, each = item
    try:
        clean = classifier.pixels(each.picture).numpy()
    except ImageError:
        return None
    worse = [corrupted(clean, name, severity, seed) for name in kinds for severity in SEVERITIES]
    said = []
    with torch.inference_mode():
        for batch in torch.from_numpy(np.stack([clean, *worse])).split(16):
            said.append(classifier.logits(batch).argmax(dim=1).numpy())
    return np.concatenate(said)
