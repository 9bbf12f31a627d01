"""Labeled images for evaluate, export and bench, checked against the models before time is spent."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import DataError

if TYPE_CHECKING:
    from ..inference.classifier import Classifier
    from ..inference.inputs import InputImage


def load_labeled_images(data: str | None, models: "Mapping[str, Classifier]") -> "list[InputImage]":
    """Find labeled images whose classes all models know.

    Args:
        data: A folder with one folder per class, or a dataset; None for no images.
        models: Classifiers by reference, for the error message. All are multi-label, or none.
    """
    if data is None:
        return []
    from ..inference.inputs import resolve_labeled_images

    first = next(iter(models.values()))
    images = resolve_labeled_images(data, first.checkpoint.multi_label)
    for reference, classifier in models.items():
        check_classes(classifier, reference, images)
    return images


def check_classes(classifier: "Classifier", reference: str, images: "Sequence[InputImage]") -> None:
    """Check that a model has the classes of these images."""
    from ..data.formats.image_folder import match_classes

    names = sorted({label for image in images for label in image.labels})
    try:
        match_classes(names, classifier.checkpoint.labels, classifier.checkpoint.config.num_classes)
    except DataError as error:
        raise DataError(f"{reference}: {error}", code=error.code) from None
