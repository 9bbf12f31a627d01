"""Proof that an exported file says what the model says, on real pictures; without it a file does not get its name."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..data.images import Mode, load_image, to_mode
from ..data.prefetch import prefetch
from ..engines.engine import Engine
from ..engines.export import ExportOptions
from ..engines.parity import Parity, measure_parity, sample_photos
from ..engines.timing import time_interleaved
from ..errors import ExportError, ImageError
from ..inference.classifier import BATCH_SIZE, Classifier, ImageInput
from .evaluate import LabeledImage, evaluate

COMPARED = 64  # pictures whose probabilities are compared
RESIZED = 0.01  # mean divergence that resizing in the graph may cause: it rounds a little differently
SECONDS = 0.5  # for which each is timed
ROUNDING = 1e-9  # so that 19 of 20 are 5 points less than all
BATCH = 8


@dataclass(frozen=True)
class ExportCheck:
    """What a file was compared with, and what came of it."""

    parity: Parity
    speed_before: float  # pictures a second, of torch in fp32 ...
    speed_after: float  # ... and of the file
    accuracy: dict[str, Any] | None = None  # before, after, p_value, n; None: no labels were given

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"parity": self.parity.to_json()}


def check_export(
    classifier: Classifier,
    engine: Engine,
    wanted: ExportOptions,
    pictures: Sequence[LabeledImage] = (),
    max_drop: float = 0.005,
    on_progress: Callable[[], object] = lambda: None,
) -> ExportCheck:
    """Compares a file's engine with the classifier; raises `ExportError` if they do not agree well enough.

    Args:
        pictures: labelled ones; without them probabilities are compared on some photographs
        max_drop: the accuracy that may be lost, as a part of 1
    """
    file = Exported(classifier, engine, wanted.whole)
    found = compared(classifier, file, wanted, pictures)
    accuracy = None
    if pictures:
        accuracy = accuracies(classifier, file, pictures, on_progress)
        if accuracy["before"] - accuracy["after"] > max_drop + ROUNDING:
            points = 100 * (accuracy["before"] - accuracy["after"])
            raise ExportError(
                f"The export would lose {points:.1f} points of accuracy ({accuracy['before']:.2%} to "
                f"{accuracy['after']:.2%} of {accuracy['n']} pictures), more than --max-drop {100 * max_drop:g} "
                "allows: nothing was written."
            )
    before, after = speeds(classifier, file)
    return ExportCheck(found, before, after, accuracy)


def compared(
    classifier: Classifier, file: "Exported", wanted: ExportOptions, pictures: Sequence[LabeledImage]
) -> Parity:
    """Logits on a few pictures, decoded in full for both; an export in fp32 may differ by rounding only."""
    rows = np.linspace(0, len(pictures) - 1, min(COMPARED, len(pictures))).astype(int)
    chosen: list[ImageInput] = [partial(decoded, pictures[row].picture) for row in rows]
    chosen = chosen or [partial(decoded, picture) for picture in sample_photos()]
    answers = [list(each.stream(chosen)) for each in (classifier, file)]
    both = [(a, b) for a, b in zip(*answers, strict=True) if isinstance(a, Tensor) and isinstance(b, Tensor)]
    if not both:
        raise ExportError("None of the pictures to compare with could be read: nothing was written.")
    first, second = (torch.stack(column) for column in zip(*both, strict=True))
    multi_label = classifier.checkpoint.multi_label
    if file.whole and not multi_label:  # probabilities came back, so logits are known up to a constant only
        first = first.log_softmax(dim=1)
    found = measure_parity(first, second, multi_label)
    if wanted.exact:
        good = found.faithful(exact=True)
    else:  # int8 and merging are judged by accuracy
        good = found.divergence < (float("inf") if wanted.int8 or any(wanted.merged) else RESIZED)
    if not good:
        raise ExportError(
            f"The exported file does not say what the model says: on {found.pictures} pictures a logit is off by "
            f"{found.largest:.3g}, and the best class is the same for {found.same:.0%}. Nothing was written."
        )
    return found


def decoded(picture: ImageInput | Image.Image, mode: Mode, at_least: object = None) -> Image.Image:
    """In full, whatever would be enough: an export that resizes by itself is given the whole picture, too."""
    if isinstance(picture, Image.Image):
        return to_mode(picture, mode)
    return picture(mode=mode) if callable(picture) else load_image(picture, mode=mode)


def accuracies(
    classifier: Classifier, file: "Exported", pictures: Sequence[LabeledImage], on_progress: Callable[[], object]
) -> dict[str, Any]:
    """Before and after; with several labels it is the mean average precision."""
    if classifier.checkpoint.multi_label:
        found = [evaluate(each, pictures, on_progress=on_progress).figures for each in (classifier, file)]
        return {"before": found[0]["map"], "after": found[1]["map"], "n": found[1]["n"]}
    measured = evaluate(file, pictures, against=classifier, on_progress=on_progress)
    both = measured.comparison
    assert both is not None
    return {"before": both.first, "after": both.second, "p_value": both.p_value, "n": measured.figures["n"]}


def speeds(classifier: Classifier, file: "Exported") -> tuple[float, float]:
    """Pictures a second of both, in turns, on pictures of the size that the model takes."""
    shape = (BATCH, *classifier.preprocess.size, classifier.preprocess.channels)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
    times = time_interleaved({"before": classifier.engine, "after": file.engine}, pixels, SECONDS)
    return BATCH / statistics.median(times["before"]), BATCH / statistics.median(times["after"])


class Exported(Classifier):
    """An exported file in the place of the model, with the model's labels."""

    def __init__(self, classifier: Classifier, engine: Engine, whole: bool) -> None:
        self.__dict__.update(classifier.__dict__)
        self.engine, self.whole = engine, whole

    def stream(self, files: Iterable[ImageInput], batch_size: int = BATCH_SIZE) -> Iterator[Tensor | ImageError]:
        if not self.whole:
            return super().stream(files, batch_size)
        return prefetch(self.answer, files, torch.get_num_threads())

    def answer(self, file: ImageInput) -> Tensor | ImageError:
        """The whole picture goes into the graph; probabilities come back as logits."""
        mode = self.preprocess.mode
        try:
            picture = decoded(file, mode)
        except ImageError as error:
            return error
        pixels = torch.from_numpy(np.array(picture).reshape(1, picture.height, picture.width, -1))
        said = self.engine(pixels)[0]
        return said.double().logit(eps=1e-7).float() if self.checkpoint.multi_label else said.clamp(min=1e-12).log()
