"""Accuracy on corrupted images, after ImageNet-C (Hendrycks and Dietterich, 2019)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ..data.prefetch import prefetch
from ..errors import DataError, ImageError
from ..inference.classifier import BATCH_SIZE, Classifier
from ..inference.inputs import InputImage, UnreadableImage
from .corruptions import CORRUPTIONS, FAMILIES, SEVERITIES, corrupt
from .evaluate import class_indices, no_readable_image


@dataclass(frozen=True)
class Robustness:
    """Accuracy on the same images, clean and corrupted."""

    clean: float
    accuracy: dict[str, list[float]]  # of each corruption, by severity
    n: int

    @property
    def mean(self) -> float:
        """Over all corruptions and severities."""
        return float(np.mean(list(self.accuracy.values())))

    def families(self) -> dict[str, list[float]]:
        """The mean of each family of corruptions, by severity."""
        rows = {
            family: [self.accuracy[member.__name__] for member in members if member.__name__ in self.accuracy]
            for family, members in FAMILIES.items()
        }
        return {family: [float(v) for v in np.mean(values, axis=0)] for family, values in rows.items()}

    def to_json(self) -> dict[str, object]:
        """The key `corruptions` of the evaluation document. `retained` is the mean divided by the clean accuracy."""
        retained = self.mean / self.clean if self.clean else None
        return {**vars(self), "mean": self.mean, "retained": retained, "families": self.families()}


def measure_robustness(
    classifier: Classifier, images: Sequence[InputImage], on_progress: Callable[[], object] = lambda: None
) -> Robustness:
    """Accuracy under every corruption. Each image is decoded once and corrupted after resizing and cropping."""
    if classifier.checkpoint.multi_label:
        raise DataError("Robustness is measured for single-label models only.", code="unsupported_by_model")
    indices = class_indices(classifier, images)
    names = [name for name in CORRUPTIONS if classifier.preprocess.channels > 1 or name != "saturation"]
    correct, skipped = np.zeros(1 + len(names) * len(SEVERITIES), dtype=np.int64), []
    work = partial(predict_corrupted, classifier, names)
    for image, predicted in zip(images, prefetch(work, enumerate(images), torch.get_num_threads()), strict=True):
        on_progress()
        if isinstance(predicted, ImageError):
            skipped.append(UnreadableImage(image.name, str(predicted)))
        else:
            correct += predicted == indices[image.labels[0]]
    count = len(images) - len(skipped)
    if not count:
        raise no_readable_image(skipped)
    table = (correct[1:] / count).reshape(len(names), len(SEVERITIES))
    accuracy = {name: [float(v) for v in row] for name, row in zip(names, table, strict=True)}
    return Robustness(float(correct[0] / count), accuracy, count)


def predict_corrupted(
    classifier: Classifier, names: Sequence[str], item: tuple[int, InputImage]
) -> np.ndarray | ImageError:
    """The predicted class of the clean image and of each corrupted one; `item` is the image with its seed."""
    seed, image = item
    try:
        clean = classifier.pixels(image.image).numpy()
    except ImageError as error:
        return error
    corrupted = [corrupt(clean, name, severity, seed) for name in names for severity in SEVERITIES]
    with torch.inference_mode():
        batches = torch.from_numpy(np.stack([clean, *corrupted])).split(BATCH_SIZE)
        return np.concatenate([classifier.logits(batch).argmax(dim=1).numpy() for batch in batches])
