"""A model with its preprocessing, labels and temperature: image in, `Prediction` out.

All commands classify images through `Classifier`; it is the only path from an image to a prediction.
"""

import difflib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

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

Item = TypeVar("Item")
Compute = Callable[[Tensor], Tensor]
"""A function from pixels, uint8 (B, H, W, C), to a tensor with one row for each image."""


class Encoder:
    """A model with its preprocessing.

    Args:
        checkpoint: The model; it must take images of 1 or 3 channels.

    Attributes:
        checkpoint (Checkpoint): The weights and their metadata.
        model (Model): The model, in evaluation mode, with the fast paths of `optimize_for_cpu`.
        preprocess (Preprocess): The evaluation transform.
    """

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
        """Load a model reference; `fields` are fields of the model's config, as in `read_checkpoint`."""
        return cls(read_checkpoint(reference, **fields))

    def decode(self, image: ImageInput, *, full: bool = False) -> DecodedImage:
        """Decode, resize and crop an image.

        Args:
            image: A path, the bytes of a file, an array or a Pillow image (`ImageInput`).
            full: Whether to decode at the original size, to show the image. By default large JPEGs are decoded at
                reduced scale, which is several times faster.

        Raises:
            ImageError: The image cannot be read.
        """
        return decode(image, self.preprocess, full=full)

    def pixels(self, image: ImageInput, *, full: bool = False) -> Tensor:
        """Return what the model sees of an image, uint8 (H, W, C), before normalization.

        The arguments are those of `decode`. `preprocess.normalize` makes the model's input from a batch of pixels.
        """
        return torch.from_numpy(self.decode(image, full=full).pixels)

    def map_images(
        self, images: Iterable[ImageInput], compute: Compute, batch_size: int = BATCH_SIZE, *, full: bool = False
    ) -> Iterator[Tensor | ImageError]:
        """Apply a function to many images, on all cores and in bounded memory.

        Args:
            images: The images (`ImageInput`); an iterator is read as the results are consumed.
            compute: A function from pixels, uint8 (B, H, W, C), to a tensor with one row for each image.
            batch_size: The number of images in a batch on each core, by default 16.
            full: As in `decode`.

        Yields:
            For each image, in order, its row, or the error if it cannot be read.
        """

        def run(batch: Sequence[ImageInput]) -> list[Tensor | ImageError]:
            results = self._run(compute, full, batch)
            return [result if isinstance(result, ImageError) else result[1] for result in results]

        for results in prefetch(run, batches(images, batch_size), torch.get_num_threads()):
            yield from results

    def map_decoded(
        self, images: Iterable[ImageInput], compute: Compute
    ) -> Iterator[tuple[DecodedImage, Tensor] | ImageError]:
        """Apply a function to many images like `map_images`, and yield the decoded images, too.

        Images are decoded at full size, one at a time on each core, to bound memory.
        """
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
    """A model with its preprocessing, labels and temperature, which classifies images.

    `Classifier.load` makes one from a model reference.

    Args:
        checkpoint: The model; it must have a head and take images of 1 or 3 channels.
        engine: The name of an engine, as in `load`, or a function from pixels, uint8 (B, H, W, C), to logits (B, K)
            divided by the temperature.

    Attributes:
        checkpoint (Checkpoint): The weights and their metadata.
        model (Model): The PyTorch model, in evaluation mode.
        preprocess (Preprocess): The evaluation transform.
        labels (tuple[str, ...]): The class names; "0", "1", ... if the model has none.
        engine (Engine): The function that computes logits.
        engine_name (str): The name of the engine; "" for a function.
        engine_description (str): The name and, if `auto` selected it, how closely the engine agrees with PyTorch.

    Raises:
        ConfigError: The model has no head or another number of channels (code "unsupported_by_model"), or the engine
            does not exist or does not work.

    Examples:
        ```python
        import patchword as pw

        classifier = pw.Classifier.load("patchword:cifar10")
        prediction = classifier("cat.jpg")
        print(prediction.label, f"{prediction.probability:.0%}")
        for score in classifier("cat.jpg", top=3).scores:
            print(score.label, score.probability)
        ```
    """

    def __init__(self, checkpoint: Checkpoint, engine: str | Engine = "torch") -> None:
        require_head(checkpoint)
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
        """Classify one image.

        Args:
            image: A path, the bytes of a file, a uint8 array (H, W, C) or a Pillow image (`ImageInput`).
            top: The number of classes to return, at least 1.

        Returns:
            The most probable classes with their probabilities.

        Raises:
            ImageError: The image cannot be read.
        """
        pixels = self.pixels(image)
        with torch.inference_mode():
            return self.prediction(self.logits(pixels[None])[0], top)

    @classmethod
    def load(cls, reference: str | Path, engine: str = "torch", **fields: Any) -> Self:
        """Load a model reference.

        Args:
            reference: A run or model directory, a checkpoint file, "hf:owner/name" or "patchword:cifar10".
            engine: "torch", "onnx", "onnx-int8" or another engine (`patchword doctor` lists them), or "auto": the
                fastest engine on this machine whose predictions stay close to PyTorch's.
            **fields: Fields of the model's config, as in `read_checkpoint`.

        Raises:
            CheckpointError: The model does not exist, is damaged, or is in an unknown format.
            ConfigError: As for the class.
        """
        return cls(read_checkpoint(reference, **fields), engine)

    def logits(self, pixels: Tensor) -> Tensor:
        """Compute the logits (B, K), divided by the temperature, of pixels, uint8 (B, H, W, C)."""
        return self.engine(pixels)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Convert logits (..., K) to probabilities: a softmax, or sigmoids for multi-label models."""
        return to_probabilities(logits, self.checkpoint.multi_label)

    def prediction(self, logits: Tensor, top: int = 5) -> Prediction:
        """Return the `top` most probable classes, from the logits (K,) of one image."""
        return top_predictions(self.probabilities(logits), self.labels, top)

    def stream(
        self, images: Iterable[ImageInput], batch_size: int = BATCH_SIZE, *, full: bool = False
    ) -> Iterator[Tensor | ImageError]:
        """Compute the logits of many images, on all cores and in bounded memory.

        Args:
            images: The images (`ImageInput`); an iterator is read as the results are consumed.
            batch_size: The number of images in a batch on each core, by default 16.
            full: As in `decode`.

        Yields:
            For each image, in order, its logits (K,), or the error if it cannot be read.
        """
        return self.map_images(images, self.logits, batch_size, full=full)


def open_encoder(model: str | Path | Checkpoint | Encoder) -> Encoder:
    """Open a model reference, a checkpoint or a classifier as an encoder."""
    if isinstance(model, str | Path):
        model = read_checkpoint(model)
    if isinstance(model, Checkpoint):
        return Encoder(model)
    if not isinstance(model, Encoder):
        kind = type(model).__name__
        raise ConfigError(
            f"Give a model reference, a Checkpoint or a Classifier, which know the preprocessing, not a {kind}."
        )
    return model


def require_head(checkpoint: Checkpoint) -> None:
    """Refuse to classify with a model that has no head, and say what it is good for."""
    if not checkpoint.config.num_classes:
        raise ConfigError(
            "The model has no head, so it cannot classify: use patchword embed for its features, patchword probe MODEL "
            "DATA to measure them, or patchword train DATA --init MODEL to train a head.",
            code="unsupported_by_model",
        )


def batches(items: Iterable[Item], batch_size: int) -> Iterator[list[Item]]:
    """Return lists of at most `batch_size` items."""
    rest = iter(items)
    return iter(lambda: list(itertools.islice(rest, batch_size)), [])


def find_class(labels: Sequence[str], name: str, *, hint: bool = True) -> int:
    """Find the index of the class that a user means by its label, one of its comma-separated synonyms, or its index."""
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
