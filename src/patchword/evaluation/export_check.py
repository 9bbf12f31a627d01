"""Check that an exported file has the outputs of its model, on real images, before the file gets its name."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from ..data.prefetch import prefetch
from ..engines.engine import Engine
from ..engines.export import ExportOptions
from ..engines.parity import Parity, measure_parity, sample_photos
from ..engines.timing import time_interleaved
from ..errors import ExportError, ImageError
from ..inference.classifier import BATCH_SIZE, Classifier
from ..inference.inputs import InputImage, UnreadableImage, sample_evenly
from ..inference.open_image import ImageInput, decode_image
from .evaluate import evaluate

NUM_COMPARED = 64  # images whose logits are compared
MAX_RESIZE_DIVERGENCE = 0.01  # mean KL divergence: resizing in the graph rounds slightly differently
TIMING_SECONDS = 0.5
TIMING_BATCH_SIZE = 8
TOLERANCE = 1e-9  # of accuracies: 1.0 - 0.95 is a loss of 5 points despite rounding


class AccuracyCheck(TypedDict):
    """Accuracy (multi-label: mean average precision) of the model and of the exported file."""

    before: float
    after: float
    n: int
    p_value: NotRequired[float]


@dataclass(frozen=True)
class ExportCheck:
    """How an exported file compares with its model in PyTorch fp32."""

    parity: Parity
    speed_before: float  # images per second of the model
    speed_after: float  # and of the file
    accuracy: AccuracyCheck | None = None  # None: no labeled images were given
    unreadable: tuple[UnreadableImage, ...] = ()  # of the labeled images

    def to_json(self) -> dict[str, Any]:
        """For the JSON file beside the export."""
        unreadable = [{"path": name, "error": reason} for name, reason in self.unreadable]
        return asdict(self) | {"parity": self.parity.to_json(), "unreadable": unreadable}


def check_export(
    classifier: Classifier,
    engine: Engine,
    options: ExportOptions,
    images: Sequence[InputImage] = (),
    max_drop: float = 0.005,
    on_progress: Callable[[], object] = lambda: None,
) -> ExportCheck:
    """Compare an exported file with its model.

    Args:
        classifier: the model.
        engine: the exported file.
        options: what was exported.
        images: labeled images, to compare accuracy; without them only logits are compared, on sample photos.
        max_drop: the largest loss of accuracy that is accepted, as a fraction.
        on_progress: called after each image of both evaluations.

    Raises:
        ExportError: the outputs differ too much.
    """
    exported = ExportedClassifier(classifier, engine, options.include_preprocessing)
    parity = check_parity(classifier, exported, options, images)
    accuracy: AccuracyCheck | None = None
    unreadable: tuple[UnreadableImage, ...] = ()
    if images:
        accuracy, unreadable = compare_accuracy(classifier, exported, images, on_progress)
        if accuracy["before"] - accuracy["after"] > max_drop + TOLERANCE:
            points = 100 * (accuracy["before"] - accuracy["after"])
            raise ExportError(
                f"The export loses {points:.1f} points of accuracy ({accuracy['before']:.2%} to "
                f"{accuracy['after']:.2%} on {accuracy['n']} images), more than --max-drop {100 * max_drop:g} allows. "
                "Nothing was written."
            )
    before, after = measure_speed(classifier, exported)
    return ExportCheck(parity, before, after, accuracy, unreadable)


def check_parity(
    classifier: Classifier, exported: "ExportedClassifier", options: ExportOptions, images: Sequence[InputImage]
) -> Parity:
    """Compare the logits of a few images, decoded at full size for both. fp32 exports may differ by rounding only."""
    inputs: Sequence[ImageInput] = [image.image for image in sample_evenly(images, NUM_COMPARED)] or sample_photos()
    outputs = zip(*(each.stream(inputs, full=True) for each in (classifier, exported)), strict=True)
    pairs = [(a, b) for a, b in outputs if isinstance(a, Tensor) and isinstance(b, Tensor)]
    if not pairs:
        raise ExportError("None of the images to compare with could be read. Nothing was written.")
    logits, exported_logits = (torch.stack(column) for column in zip(*pairs, strict=True))
    multi_label = classifier.checkpoint.multi_label
    if exported.include_preprocessing and not multi_label:
        logits = logits.log_softmax(dim=1)  # the file returns probabilities: its logits are known up to a constant
    parity = measure_parity(logits, exported_logits, multi_label)
    if options.exact:
        accepted = parity.within_tolerance(exact=True)
    else:  # int8 and token merging are judged by accuracy
        approximate = options.int8 or any(options.merge_counts)
        accepted = parity.kl_divergence < (float("inf") if approximate else MAX_RESIZE_DIVERGENCE)
    if not accepted:
        raise ExportError(
            f"The outputs of the exported file differ from the model's: on {parity.num_images} images a logit differs "
            f"by {parity.max_abs_diff:.3g}, and the top class agrees for {parity.top1_agreement:.0%}. "
            "Nothing was written."
        )
    return parity


def compare_accuracy(
    classifier: Classifier,
    exported: "ExportedClassifier",
    images: Sequence[InputImage],
    on_progress: Callable[[], object],
) -> tuple[AccuracyCheck, tuple[UnreadableImage, ...]]:
    """Accuracy before and after the export (mean average precision of multi-label models), and unreadable images."""
    if classifier.checkpoint.multi_label:
        original, file = (evaluate(each, images, on_progress=on_progress) for each in (classifier, exported))
        accuracy = AccuracyCheck(before=original.metrics["map"], after=file.metrics["map"], n=int(file.metrics["n"]))
        return accuracy, tuple(file.skipped)
    result = evaluate(exported, images, compare_to=classifier, on_progress=on_progress)
    comparison = result.comparison
    assert comparison is not None
    accuracy = AccuracyCheck(before=comparison.first, after=comparison.second, n=int(result.metrics["n"]))
    return accuracy | {"p_value": comparison.p_value}, tuple(result.skipped)


def measure_speed(classifier: Classifier, exported: "ExportedClassifier") -> tuple[float, float]:
    """Images per second of both, measured in turns, on images of the size that the model takes."""
    shape = (TIMING_BATCH_SIZE, *classifier.preprocess.size, classifier.preprocess.channels)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
    times = time_interleaved({"before": classifier.engine, "after": exported.engine}, pixels, TIMING_SECONDS)
    return TIMING_BATCH_SIZE / statistics.median(times["before"]), TIMING_BATCH_SIZE / statistics.median(times["after"])


class ExportedClassifier(Classifier):
    """An exported file in place of the model, with the model's preprocessing and labels."""

    def __init__(self, classifier: Classifier, engine: Engine, include_preprocessing: bool) -> None:
        """Args: include_preprocessing: the file resizes, crops and returns probabilities by itself."""
        self.__dict__.update(classifier.__dict__)
        self.engine, self.include_preprocessing = engine, include_preprocessing

    def stream(
        self, images: Iterable[ImageInput], batch_size: int = BATCH_SIZE, *, full: bool = False
    ) -> Iterator[Tensor | ImageError]:
        """As `Classifier.stream`; a file that resizes by itself gets whole images, one at a time."""
        if not self.include_preprocessing:
            return super().stream(images, batch_size, full=full)
        return prefetch(self.run_whole_image, images, torch.get_num_threads())

    def run_whole_image(self, image: ImageInput) -> Tensor | ImageError:
        """Logits, up to a constant, from the probabilities that the file returns."""
        try:
            decoded = decode_image(image, self.preprocess.mode)
        except ImageError as error:
            return error
        pixels = torch.from_numpy(np.array(decoded).reshape(1, decoded.height, decoded.width, -1))
        probabilities = self.engine(pixels)[0]
        if self.checkpoint.multi_label:
            return probabilities.double().logit(eps=1e-7).float()
        return probabilities.clamp(min=1e-12).log()
