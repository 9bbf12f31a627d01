"""What a user says about a checkpoint: its labels and preprocessing, and any field of its model."""

import json as json_format
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from ..errors import ConfigError
from .config_flags import CHANNEL_STATS, CONFIG_VALUES, as_list
from .output import print_status

if TYPE_CHECKING:
    from ..checkpoints import Checkpoint


def arg(metavar: str, meaning: str = "") -> Any:
    return tyro.conf.arg(metavar=metavar, help=meaning or None)


MODEL_ARG = arg("MODEL", "a model folder, a checkpoint file or folder of any family, hf:owner/name, or patchword:cifar10")
ModelReference = Annotated[Positional[str], MODEL_ARG]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
EngineName = Annotated[
    str, arg("NAME", "where it runs: torch, onnx, onnx-int8 ... (see doctor), or auto: the fastest")
]


@dataclass(frozen=True)
class ModelArgs:
    """What the checkpoint does not say, or says wrongly.

    Any field of the model can be given in the same way, to state it or to adapt the weights: --num-heads 3,
    --image-size 384, --num-classes 10, --norm-eps 1e-6 (docs/checkpoints.md lists them).
    """

    labels: Annotated[Path | None, arg("FILE")] = None
    """text file with one label per line, or a JSON list"""
    # mean and std are shown by --help only: take_fields takes them, so that a picture's name may follow them.
    mean: Annotated[tuple[float, ...] | None, arg("NUMBER...")] = None
    """of each channel, on the scale 0..1"""
    std: Annotated[tuple[float, ...] | None, arg("NUMBER...")] = None
    """of each channel"""
    crop: Annotated[float | None, arg("FRACTION")] = None
    """part of the resized picture that is kept, e.g. 0.9"""
    resize: Annotated[Literal["cover", "squash"] | None, arg("{cover,squash}")] = None
    """keep the proportions and crop, or scale both sides"""
    interpolation: Annotated[
        Literal["nearest", "bilinear", "bicubic", "lanczos"] | None, arg("{nearest,bilinear,bicubic,lanczos}")
    ] = None
    """filter for resizing"""

    def read(self, reference: str) -> "Checkpoint":
        """The checkpoint with these corrections; what was assumed goes to standard error."""
        from ..checkpoints import read_checkpoint

        fields = {n: v for n, v in CONFIG_VALUES.items() if n not in CHANNEL_STATS}
        changes = {n: getattr(self, n) for n in ("crop", "resize", "interpolation")}
        changes |= {n: as_list(v) for n, v in CONFIG_VALUES.items() if n in CHANNEL_STATS}
        labels = read_labels(self.labels) if self.labels else None
        checkpoint = read_checkpoint(reference, **fields)
        checkpoint = checkpoint.with_metadata(labels, **{n: v for n, v in changes.items() if v is not None})
        for note in checkpoint.notes:
            print_status(f"note: {note}")
        return checkpoint


NO_OVERRIDES = ModelArgs()


def model_title(reference: str) -> str:
    """What a page calls a model: the last part of its reference, but not the name that every weight file has."""
    path = Path(reference)
    plain = path.parent if path.stem in ("model", "pytorch_model") and path.parent.name else path
    return plain.name


def read_labels(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The labels in {path} cannot be read ({error}).") from None
    if path.suffix == ".json" or text.lstrip().startswith(("[", "{")):
        try:
            labels = json_format.loads(text)
        except ValueError as error:
            raise ConfigError(f"The labels in {path} are not a JSON list ({error}).") from None
        if not isinstance(labels, list):
            raise ConfigError(f"The labels in {path} must be a JSON list of names in class order, or a line each.")
        return [str(label) for label in labels]
    return [line.strip() for line in text.splitlines() if line.strip()]
