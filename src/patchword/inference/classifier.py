"""A model with its preprocessing, labels and temperature: image in, `Prediction` out.

All commands classify images through `Classifier`; it is the only path from an image to a prediction.
"""

import difflib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..checkpoints import Checkpoint, read_checkpoint
from ..data.prefetch import prefetch
from ..engines import Engine, torch_engine
from ..errors import ConfigError, ImageError
from ..models import optimize_for_cpu
from .open_image import DecodedImage, ImageInput, decode
from .predictions import Prediction, class_labels, to_probabilities, top_predictions

# Large enough for matmuls to run at full speed on one core, small enough for its cache.
BATCH_SIZE = 16
MAX_LISTED = 20  # classes that a message lists

Compute = Callable[[Tensor], Tensor]  # uint8 (B, H, W, C) to one row per image


class Encoder:
    """A model with its preprocessing."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        if checkpoint.preprocess is None:
            raise ConfigError(
                f"The model takes {checkpoint.config.in_channels} channels, but images have 1 or 3.",
                code="unsupported_by_model",
            )
        self.checkpoint = checkpoint
        self.model = optimize_for_cpu(checkpoint.build_model())
        self.preprocess = checkpoint.preprocess

    @classmethod
    def load(cls, reference: str | Path, **fields: Any) -> Self:
        """Load any model reference; `fields` are model fields, as in `pw.load_model`."""
        return cls(read_checkpoint(reference, **fields))

    def decode(self, image: ImageInput, *, full: bool = False) -> DecodedImage:
        """The image, and what the model sees of it. See `inference.open_image.decode`."""
        return decode(image, self.preprocess, full=full)

    def pixels(self, image: ImageInput, *, full: bool = False) -> Tensor:
        """What the model sees of an image, before normalization: uint8 (H, W, C)."""
        return torch.from_numpy(self.decode(image, full=full).pixels)

    def map_images(
        self, images: Iterable[ImageInput], compute: Compute, batch_size: int = BATCH_SIZE, *, full: bool = False
    ) -> Iterator[Tensor | ImageError]:
        """For each image, in order, its row of `compute`, or why it could not be read. Memory stays bounded."""

        def run(batch: Sequence[ImageInput]) -> list[Tensor | ImageError]:
            results = self._run(compute, full, batch)
            return [result if isinstance(result, ImageError) else result[1] for result in results]

        for results in prefetch(run, batches(images, batch_size), torch.get_num_threads()):
            yield from results

    def map_decoded(
        self, images: Iterable[ImageInput], compute: Compute
    ) -> Iterator[tuple[DecodedImage, Tensor] | ImageError]:
        """Like `map_images`, with each image decoded at full size; one at a time on each core, to bound memory."""
        for results in prefetch(partial(self._run, compute, True), batches(images, 1), torch.get_num_threads()):
            yield from results

    def _run(
        self, compute: Compute, full: bool, images: Sequence[ImageInput]
    ) -> list[tuple[DecodedImage, Tensor] | ImageError]:
        decoded: list[DecodedImage | ImageError] = []
        for image in images:
            try:
                decoded.append(self.decode(image, full=full))
            except ImageError as error:
                decoded.append(error)
        pixels = [torch.from_numpy(each.pixels) for each in decoded if isinstance(each, DecodedImage)]
        with torch.inference_mode():
            rows = iter(compute(torch.stack(pixels))) if pixels else iter(())
        return [(each, next(rows)) if isinstance(each, DecodedImage) else each for each in decoded]


class Classifier(Encoder):
    """`Classifier.load("model")("cat.jpg").label`.

    Attributes:
        labels: names of the classes.
        engine_name: the engine that runs the model; "" for a custom one.
        engine_description: the same with its agreement with PyTorch, where `auto` chose it.
    """

    def __init__(self, checkpoint: Checkpoint, engine: str | Engine = "torch") -> None:
        """Args: engine: a name, or a function from uint8 (B, H, W, C) to logits (B, K) divided by the temperature."""
        if not checkpoint.config.num_classes:
            raise ConfigError(
                "The model has no head, so it cannot classify. Load it with num_classes and train it.",
                code="unsupported_by_model",
            )
        super().__init__(checkpoint)
        self.labels = class_labels(checkpoint)
        self.engine_name = self.engine_description = "" if callable(engine) else engine
        self.engine = engine if callable(engine) else self._open_engine(engine)

    def _open_engine(self, name: str) -> Engine:
        if name == "torch":
            return torch_engine(self.checkpoint, self.model)
        from ..engines.auto import select_engine

        selected = select_engine(name, self.checkpoint)
        self.engine_name, self.engine_description = selected.prepared.name, selected.describe()
        return selected.engine

    def __repr__(self) -> str:
        config = self.checkpoint.config
        size = "x".join(map(str, config.image_size))
        return f"Classifier({type(config).__name__.removesuffix('Config')}, {config.num_classes} classes, {size})"

    def __call__(self, image: ImageInput, top: int = 5) -> Prediction:
        """Classify one image: a path, the bytes of a file, a uint8 array (H, W, C) or a Pillow image."""
        pixels = self.pixels(image)
        with torch.inference_mode():
            return self.prediction(self.logits(pixels[None])[0], top)

    @classmethod
    def load(cls, reference: str | Path, engine: str = "torch", **fields: Any) -> Self:
        """Load any model reference.

        Args:
            reference: a run or model directory, a checkpoint file, "hf:owner/name" or "patchword:cifar10".
            engine: torch, onnx, onnx-int8, ... (`patchword doctor` lists them), or auto: the fastest engine on this
                machine whose outputs stay close to the model's.
            fields: model fields, as in `pw.load_model`.
        """
        return cls(read_checkpoint(reference, **fields), engine)

    def logits(self, pixels: Tensor) -> Tensor:
        """Logits (B, K) of uint8 pixels (B, H, W, C), divided by the temperature."""
        return self.engine(pixels)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Softmax, or sigmoid for multi-label models."""
        return to_probabilities(logits, self.checkpoint.multi_label)

    def prediction(self, logits: Tensor, top: int = 5) -> Prediction:
        """The `top` most probable classes, from the logits (K,) of one image."""
        return top_predictions(self.probabilities(logits), self.labels, top)

    def stream(
        self, images: Iterable[ImageInput], batch_size: int = BATCH_SIZE, *, full: bool = False
    ) -> Iterator[Tensor | ImageError]:
        """For each image, in order, its logits (K,), or why it could not be read."""
        return self.map_images(images, self.logits, batch_size, full=full)


def batches(images: Iterable[ImageInput], batch_size: int) -> Iterator[list[ImageInput]]:
    """Lists of at most `batch_size` images."""
    rest = iter(images)
    return iter(lambda: list(itertools.islice(rest, batch_size)), [])


def find_class(labels: Sequence[str], name: str, *, hint: bool = True) -> int:
    """The index of the class that a user means: by its label, by one of its comma-separated synonyms, or by index."""
    lowered, wanted = [label.lower() for label in labels], name.lower()
    synonyms = [{synonym.strip() for synonym in label.split(",")} for label in lowered]
    exact = [index for index, label in enumerate(labels) if label == name]
    same = [index for index, label in enumerate(lowered) if label == wanted]
    matches = exact or same or [index for index, words in enumerate(synonyms) if wanted in words]
    if len(matches) == 1:
        return matches[0]
    if matches:
        candidates = " and ".join(f"{index} ({labels[index]})" for index in matches)
        raise ConfigError(f"{name!r} can be class {candidates}. Give its index.", code="ambiguous_class")
    if name.isdecimal() and int(name) < len(labels):
        return int(name)
    close = difflib.get_close_matches(wanted, set().union(*synonyms), n=1) if hint else []
    guess = f" Did you mean {close[0]}?" if close else ""
    known = ", ".join(labels) if len(labels) <= MAX_LISTED else f"{len(labels)} classes, 0 to {len(labels) - 1}"
    raise ConfigError(f"The model has no class {name!r}.{guess} It has {known}.", code="unknown_class")
