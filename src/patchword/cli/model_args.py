"""Arguments that commands share: the model reference, corrections to a checkpoint, the engine."""

import json as json_format
import re
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
    "MODEL",
    "run directory, model directory or checkpoint file (of timm, transformers, Google, torchvision, ...), "
    "hf:owner/name on the Hugging Face Hub, or patchword:cifar10",
)
ModelReference = Annotated[str, MODEL_ARG]
Flag = bool  # a switch: --overwrite
JsonFlag = Annotated[Flag, arg(description="print one JSON document to standard output, and nothing else")]
EngineName = Annotated[
    str,
    arg(
        "NAME",
        "inference engine: torch, onnx, onnx-int8, ... (patchword doctor lists them), or auto, the fastest whose "
        "predictions stay close to those of torch",
    ),
]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]


@dataclass(frozen=True)
class ModelArgs:
    """Metadata that the checkpoint lacks or that should be overridden. Fields of the model are flags, too."""

    labels: Annotated[Path | None, arg("FILE")] = None
    """class labels in the order of the outputs: a text file with one per line, or a JSON list"""
    # mean and std are here only for --help: extract_config_flags takes them, so that an image name may follow them.
    mean: Annotated[tuple[float, ...] | None, arg("NUMBER...")] = None
    """mean of each channel for normalization, on the scale 0 to 1"""
    std: Annotated[tuple[float, ...] | None, arg("NUMBER...")] = None
    """standard deviation of each channel for normalization, on the scale 0 to 1"""
    crop: Annotated[float | None, arg("FRACTION")] = None
    """fraction of the resized image that the center crop keeps along each side (crop_pct in timm), e.g. 0.9"""
    resize: Annotated[Literal["cover", "squash"] | None, arg("cover|squash")] = None
    """how images are resized: "cover" keeps the aspect ratio and crops, "squash" scales both sides"""
    interpolation: Annotated[Interpolation | None, arg("nearest|bilinear|bicubic|lanczos")] = None
    """filter with which images are resized"""

    def read(self, reference: str, *, print_assumptions: bool = True) -> "Checkpoint":
        """Read a checkpoint with these overrides; by default, assumptions are printed to standard error."""
        from ..checkpoints import read_checkpoint

        fields = {name: value for name, value in CONFIG_VALUES.items() if name not in CHANNEL_STATS}
        changes = {name: getattr(self, name) for name in ("crop", "resize", "interpolation")}
        changes |= {name: as_list(value) for name, value in CONFIG_VALUES.items() if name in CHANNEL_STATS}
        labels = read_labels(self.labels) if self.labels else None
        checkpoint = read_checkpoint(reference, **fields)
        try:
            checkpoint = checkpoint.with_metadata(labels, **{n: v for n, v in changes.items() if v is not None})
        except ConfigError as error:  # name the flags
            message = re.sub(r"preprocess\.(mean|std|crop)\b", r"--\1", str(error))
            raise ConfigError(message, code=error.code) from None
        if print_assumptions:
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
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--labels: {path} cannot be read ({reason}).") from None
    if path.suffix == ".json" or text.lstrip().startswith(("[", "{")):
        try:
            labels = json_format.loads(text)
        except ValueError as error:
            raise ConfigError(f"--labels: {path} is not valid JSON ({error}).") from None
        if not isinstance(labels, list):
            raise ConfigError(f"--labels: {path} must be a JSON list of names in class order, or a name per line.")
        return [str(label) for label in labels]
    return [line.strip() for line in text.splitlines() if line.strip()]
