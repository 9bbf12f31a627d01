"""A model with its preprocessing, labels and temperature: picture in, Prediction out.

`Classifier` is the one road from a picture to an answer; the commands predict and evaluate walk it with many pictures.
"""

import difflib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from PIL import Image
from torch import Tensor

from ..checkpoints import Checkpoint, read_checkpoint
from ..data.images import load_image, to_mode
from ..data.prefetch import prefetch
from ..engines import Engine, torch_engine
from ..errors import ConfigError, ImageError
from ..models import optimize_for_cpu

# A file, or what reads a picture of a data set in a given mode.
ImageInput = str | Path | Callable[..., Image.Image]

# Enough pictures that the matrix products run at full speed on one core, few enough to stay in its cache.
BATCH_SIZE = 16
MOST_LISTED = 20  # classes that a message names


@dataclass(frozen=True)
class Score:
    """One class and how probable it is."""

    label: str
    index: int
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The most probable classes, best first."""

    scores: tuple[Score, ...]

    @property
    def label(self) -> str:
        return self.scores[0].label

    @property
    def probability(self) -> float:
        return self.scores[0].probability


class Encoder:
    """A model with its preprocessing: pictures in, whatever is computed of them out."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        if checkpoint.preprocess is None:
            raise ConfigError(f"The model takes {checkpoint.config.in_channels} channels, which pictures do not have.")
        self.checkpoint = checkpoint
        self.model = optimize_for_cpu(checkpoint.model())
        self.preprocess = checkpoint.preprocess

    @classmethod
    def load(cls, reference: str | Path, **fields: Any) -> Self:
        """From any model reference; `fields` are model fields that adapt or explain it, as in `pw.load`."""
        return cls(read_checkpoint(reference, **fields))

    def pixels(self, image: ImageInput | bytes | Image.Image) -> Tensor:
        """What the model will see of a picture, before normalisation: uint8 (H, W, C)."""
        mode = self.preprocess.mode
        if callable(image):
            image = image(mode=mode, at_least=self.preprocess.resized_to)
        if isinstance(image, Image.Image):
            image = to_mode(image, mode)
        elif isinstance(image, str | Path | bytes):
            image = load_image(image, mode=mode, at_least=self.preprocess.resized_to)
        else:
            kind = type(image).__name__
            raise ImageError(
                f"An image is a path, the bytes of a file, or a Pillow image (Image.fromarray), not {kind}.",
                code="image_unsupported",
            )
        return torch.from_numpy(self.preprocess.pixels(image))

    def each(
        self, files: Iterable[ImageInput], compute: Callable[[Tensor], Tensor], batch_size: int = BATCH_SIZE
    ) -> Iterator[Tensor | ImageError]:
        """For each file, in order, its row of `compute` (of uint8 (B, H, W, C)), or why it could not be read.

        Memory stays bounded.
        """
        rest = iter(files)
        batches = iter(lambda: list(itertools.islice(rest, batch_size)), [])
        for results in prefetch(partial(self._run, compute), batches, torch.get_num_threads()):
            yield from results

    def _run(self, compute: Callable[[Tensor], Tensor], files: Sequence[ImageInput]) -> list[Tensor | ImageError]:
        read: list[Tensor | ImageError] = []
        for file in files:
            try:
                read.append(self.pixels(file))
            except ImageError as error:
                read.append(error)
        good = [p for p in read if isinstance(p, Tensor)]
        with torch.inference_mode():
            rows = iter(compute(torch.stack(good))) if good else iter(())
        return [next(rows) if isinstance(p, Tensor) else p for p in read]


class Classifier(Encoder):
    """`Classifier.load("model")("cat.jpg").label`"""

    def __init__(self, checkpoint: Checkpoint, engine: str | Engine = "torch") -> None:
        if not checkpoint.config.num_classes:
            raise ConfigError("The model has no head, so it cannot classify; load it with num_classes, and train it.")
        super().__init__(checkpoint)
        count = checkpoint.config.num_classes
        self.labels = checkpoint.labels or tuple(str(i) for i in range(count))
        self.engine_name = self.chosen = "" if callable(engine) else engine
        self.engine = engine if callable(engine) else self.opened(engine)

    def __repr__(self) -> str:
        config = self.checkpoint.config
        size = "x".join(map(str, config.image_size))
        return f"Classifier({type(config).__name__.removesuffix('Config')}, {config.num_classes} classes, {size})"

    def __call__(self, image: str | Path | bytes | Image.Image, top: int = 5) -> Prediction:
        """Classifies one picture: a path, the bytes of a file, or a Pillow image."""
        pixels = self.pixels(image)
        with torch.inference_mode():
            return self.prediction(self.logits(pixels[None])[0], top)

    def opened(self, engine: str) -> Engine:
        if engine == "torch":
            return torch_engine(self.checkpoint, self.model)
        from ..engines.auto import select_engine

        chosen = select_engine(engine, self.checkpoint)
        self.engine_name, self.chosen = chosen.prepared.name, chosen.said()
        return chosen.engine

    @classmethod
    def load(cls, reference: str | Path, engine: str = "torch", **fields: Any) -> Self:
        """From any model reference.

        Args:
            engine: where it runs: torch, onnx, onnx-int8 ... (`patchword doctor` lists them), or auto, the fastest on
                this machine whose answers stay close to the model's
            fields: model fields that adapt or explain it, as in `pw.load`
        """
        return cls(read_checkpoint(reference, **fields), engine)

    def logits(self, pixels: Tensor) -> Tensor:
        """uint8 (B, H, W, C) to logits (B, K), divided by the temperature."""
        return self.engine(pixels)

    def prediction(self, logits: Tensor, top: int = 5) -> Prediction:
        if top < 1:
            raise ConfigError(f"top must be at least 1, not {top}.")
        probabilities = logits.sigmoid() if self.checkpoint.multi_label else logits.softmax(dim=-1)
        values, indices = probabilities.topk(min(top, len(self.labels)))
        pairs = zip(indices.tolist(), values.tolist(), strict=True)
        return Prediction(tuple(Score(self.labels[i], i, p) for i, p in pairs))

    def stream(self, files: Iterable[ImageInput], batch_size: int = BATCH_SIZE) -> Iterator[Tensor | ImageError]:
        """For each file, in order, its logits (K), or why it could not be read."""
        return self.each(files, self.logits, batch_size)


def find_class(labels: Sequence[str], said: str, *, hint: bool = True) -> int:
    """Which class a user means: by its label, one of the synonyms in it, or its index."""
    names, wanted = [label.lower() for label in labels], said.lower()
    exact = [index for index, label in enumerate(labels) if label == said]
    whole = [index for index, name in enumerate(names) if name == wanted]
    parts = [index for index, name in enumerate(names) if wanted in (part.strip() for part in name.split(","))]
    found = exact or whole or parts
    if len(found) == 1:
        return found[0]
    if found:
        candidates = " and ".join(f"{index} ({labels[index]})" for index in found)
        raise ConfigError(f"{said!r} may be class {candidates}. Give its index.", code="ambiguous_class")
    if said.isdecimal() and int(said) < len(names):
        return int(said)
    parts_of_all = {part.strip() for name in names for part in name.split(",")}
    near = difflib.get_close_matches(wanted, parts_of_all, n=1) if hint else []
    guess = f" Did you mean {near[0]}?" if near else ""
    have = ", ".join(labels) if len(labels) <= MOST_LISTED else f"{len(names)} classes, 0 to {len(names) - 1}"
    raise ConfigError(f"The model has no class {said!r}.{guess} It has {have}.", code="unknown_class")
