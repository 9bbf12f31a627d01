"""Classify many images: results for the screen, a JSON document or a CSV file."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..core.io import digest, weights_digest
from ..errors import ImageError
from .classifier import Classifier
from .inputs import InputImage, UnreadableImage
from .open_image import DecodedImage
from .prediction_csv import ImageResult, PredictionTable, ScoreRow
from .predictions import Prediction, Score

# Called with each image that was classified, decoded at full size, e.g. to write an explanation of the prediction.
OnPrediction = Callable[[InputImage, DecodedImage, Prediction], object]


def predict_images(
    classifier: Classifier, images: Iterable[InputImage], top: int = 5, on_prediction: OnPrediction | None = None
) -> Iterator[ImageResult]:
    """The result of each image, in order: its top classes, or why it could not be read.

    Every image is decoded and classified once. `on_prediction` gets exactly the prediction that is returned.
    """
    images, again = itertools.tee(images)
    for image, output in zip(again, compute_outputs(classifier, images, keep=on_prediction is not None), strict=True):
        if isinstance(output, ImageError):
            yield {"path": image.name, "error": str(output), "code": output.code}
            continue
        decoded, logits = output
        prediction = classifier.prediction(logits, top)
        if on_prediction is not None:
            assert decoded is not None
            on_prediction(image, decoded, prediction)
        yield {"path": image.name, "predictions": [score_row(score) for score in prediction.scores]}


def score_row(score: Score) -> ScoreRow:
    """A class as JSON."""
    return {"label": score.label, "index": score.index, "probability": score.probability}


def compute_outputs(
    classifier: Classifier, images: Iterable[InputImage], keep: bool
) -> Iterator[tuple[DecodedImage | None, Tensor] | ImageError]:
    """Logits of each image, with the decoded image if `keep`."""
    inputs = (image.image for image in images)
    if keep:
        yield from classifier.map_decoded(inputs, classifier.logits)
        return
    for output in classifier.stream(inputs):
        yield output if isinstance(output, ImageError) else (None, output)


@dataclass(frozen=True)
class WrittenTable:
    """The outcome of `write_prediction_table`."""

    num_resumed: int  # rows that an interrupted process had written ...
    num_resumed_unreadable: int  # ... of which so many hold an error
    unreadable: list[UnreadableImage]  # images that this process could not read


def write_prediction_table(
    classifier: Classifier,
    images: Sequence[InputImage],
    top: int,
    path: Path,
    on_row: Callable[[], object] = lambda: None,
    on_prediction: OnPrediction | None = None,
) -> WrittenTable:
    """Classify images into a CSV file; resumes where an interrupted process stopped."""
    unreadable: list[UnreadableImage] = []
    names = [image.name for image in images]
    with PredictionTable(path, min(top, len(classifier.labels)), fingerprint(classifier), names) as table:
        written = WrittenTable(len(table.done), table.num_errors, unreadable)
        rest = (image for image in images if image.name not in table.done)
        for result in predict_images(classifier, rest, top, on_prediction):
            table.write(result)
            on_row()
            if "error" in result:
                unreadable.append(UnreadableImage(result["path"], result["error"]))
    return written


def fingerprint(classifier: Classifier) -> str:
    """A digest of everything that a prediction depends on."""
    checkpoint = classifier.checkpoint
    model = (
        checkpoint.config,
        classifier.preprocess,
        classifier.labels,
        checkpoint.temperature,
        checkpoint.multi_label,
    )
    return digest(*model, classifier.engine_name, weights_digest(checkpoint.tensors))
