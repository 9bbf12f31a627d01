"""Arguments that commands share: the model reference, corrections to a checkpoint, the engine."""

import json as json_format
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from ..core.progress import working
from ..core.text import print_stderr
from ..errors import ConfigError
from .arguments import Argument, arg, field_arguments, positional
from .config_flags import CHANNEL_STATS, CONFIG_VALUES, as_list
from .output import print_notes

if TYPE_CHECKING:
    from ..checkpoints import Checkpoint
    from ..inference.classifier import Classifier


MODEL_ARG = positional(
    "MODEL", "run or model directory, checkpoint of any known family, hf:owner/name, or patchword:cifar10"
)
ModelReference = Annotated[str, MODEL_ARG]
Flag = bool  # a switch: --overwrite
JsonFlag = Annotated[Flag, arg(description="print one JSON document on standard output, and nothing else")]
EngineName = Annotated[
    str, arg("NAME", "inference engine: torch, onnx, onnx-int8, ... (see doctor), or auto for the fastest")
]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]


@dataclass(frozen=True)
class ModelArgs:
    """Metadata that the checkpoint lacks or that should be overridden. Fields of the model are flags, too."""

    labels: Annotated[Path | None, arg("FILE")] = None
    """text file with one label per line, or a JSON list"""
    # mean and std are here only for --help: extract_config_flags takes them, so that an image name may follow them.
    mean: Annotated[tuple[float, ...] | None, arg("NUMBER...")] = None
    """mean of each channel, on the scale 0..1"""
    std: Annotated[tuple[float, ...] | None, arg("NUMBER...")] = None
    """standard deviation of each channel"""
    crop: Annotated[float | None, arg("FRACTION")] = None
    """fraction of the resized image that the center crop keeps, e.g. 0.9"""
    resize: Annotated[Literal["cover", "squash"] | None, arg("cover|squash")] = None
    """keep the aspect ratio and crop, or scale both sides"""
    interpolation: Annotated[Interpolation | None, arg("nearest|bilinear|bicubic|lanczos")] = None
    """filter for resizing"""

    def read(self, reference: str) -> "Checkpoint":
        """Read a checkpoint with these overrides; assumptions are printed to standard error."""
        from ..checkpoints import read_checkpoint

        fields = {name: value for name, value in CONFIG_VALUES.items() if name not in CHANNEL_STATS}
        changes = {name: getattr(self, name) for name in ("crop", "resize", "interpolation")}
        changes |= {name: as_list(value) for name, value in CONFIG_VALUES.items() if name in CHANNEL_STATS}
        labels = read_labels(self.labels) if self.labels else None
        checkpoint = read_checkpoint(reference, **fields)
        checkpoint = checkpoint.with_metadata(labels, **{n: v for n, v in changes.items() if v is not None})
        print_notes(checkpoint.notes)
        return checkpoint

    def load_classifier(self, reference: str, engine: str = "torch") -> "Classifier":
        """Open a classifier; the engine that "auto" selected is printed to standard error."""
        from ..inference.classifier import Classifier

        checkpoint = self.read(reference)
        with working("measuring engines" if engine == "auto" else f"opening engine {engine}"):
            classifier = Classifier(checkpoint, engine)
        if engine == "auto":
            print_stderr(f"engine: {classifier.engine_description}")
        return classifier


NO_OVERRIDES = ModelArgs()
MODEL_OPTIONS: tuple[Argument, ...] = tuple(field_arguments(ModelArgs))


def require_trained_head(checkpoint: "Checkpoint") -> None:
    """Refuse predictions of a head that --num-classes has just replaced by zeros."""
    if any(note.code == "head_replaced" for note in checkpoint.notes):
        raise ConfigError("--num-classes replaced the head by zeros, so there is nothing to predict. Train it first.")


def model_title(reference: str) -> str:
    """Return the title of a model in reports: the last component of its reference that says something."""
    path = Path(reference)
    named = path.parent if path.stem in ("model", "pytorch_model") and path.parent.name else path
    return named.name


def read_labels(path: Path) -> list[str]:
    """Read class labels: one per line, or a JSON list."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--labels: {path} cannot be read ({error}).") from None
    if path.suffix == ".json" or text.lstrip().startswith(("[", "{")):
        try:
            labels = json_format.loads(text)
        except ValueError as error:
            raise ConfigError(f"--labels: {path} is not valid JSON ({error}).") from None
        if not isinstance(labels, list):
            raise ConfigError(f"--labels: {path} must be a JSON list of names in class order, or a name per line.")
        return [str(label) for label in labels]
    return [line.strip() for line in text.splitlines() if line.strip()]
