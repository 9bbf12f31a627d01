"""Checkpoints: our own folder, every public family of ViT weights both ways, and models on a hub."""

from pathlib import Path
from typing import Any

from ..config import ViTConfig
from ..errors import CheckpointError, ConfigError, ConversionError, Note
from ..models import Model
from .checkpoint import Checkpoint
from .convert import WRITABLE, write_foreign
from .detect_format import read_foreign
from .mapping import listed
from .model_dir import CHECKPOINTS, MODEL_JSON, read_model_dir, read_unfinished, write_model_dir
from .tensor_files import TENSOR_SUFFIXES

__all__ = ["WRITABLE", "Checkpoint", "load_model", "read_checkpoint", "write_checkpoint"]

BUILT_IN, SHIPPED = "patchword:", Path(__file__).parents[1] / "weights"


def read_checkpoint(reference: str | Path, **fields: Any) -> Checkpoint:
    """A model reference as a Checkpoint: a run or model folder, a foreign file or folder, `hf:owner/name`, or a
    model that comes with patchword, `patchword:cifar10`.

    `fields` are fields of the model's config. image_size, in_channels and num_classes adapt the weights (positions
    resampled, channels mixed, head replaced by zeros); any other states what the file does not say.
    """
    fields = ViTConfig.cast_fields(fields)
    path = resolve_reference(reference)
    try:
        if not path.exists():
            raise CheckpointError(
                f"There is no model at {path}. Give a model folder, a checkpoint file, or a hub name such as "
                "hf:google/vit-base-patch16-224."
            )
        if path.name == MODEL_JSON or (path.is_dir() and (path / MODEL_JSON).is_file()):
            return read_model_dir(path if path.is_dir() else path.parent).adapt(**fields)
        if (path / CHECKPOINTS).is_dir():
            return read_unfinished(path).adapt(**fields)
        return read_foreign(path, fields)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}).") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", code=error.code) from None


def resolve_reference(reference: str | Path) -> Path:
    """Where the files of a model reference are, once they are on this machine."""
    if isinstance(reference, str) and reference.startswith("hf:"):
        from .hub import download_model

        return download_model(reference)
    if isinstance(reference, str) and reference.startswith(BUILT_IN):
        names = sorted(path.parent.name for path in SHIPPED.glob(f"*/{MODEL_JSON}"))
        if reference.removeprefix(BUILT_IN) not in names:
            raise CheckpointError(
                f"There is no {reference}. patchword comes with {listed([BUILT_IN + n for n in names])}."
            )
        return SHIPPED / reference.removeprefix(BUILT_IN)
    return expanded(reference)


def expanded(path: str | Path) -> Path:
    """With ~ replaced by the home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # ~nobody
        raise CheckpointError(f"{path}: {error}") from None


def write_checkpoint(
    out: str | Path, checkpoint: Checkpoint, to: str = "patchword", *, overwrite: bool = False
) -> list[Note]:
    """Writes a checkpoint in any format, whole or not at all; returns what that format cannot state."""
    out = expanded(out)
    if to == "patchword":
        if out.suffix in TENSOR_SUFFIXES:
            raise ConversionError(f"{out}: the patchword format is written to a folder.")
        write_model_dir(out, checkpoint, overwrite=overwrite)
        return []
    return write_foreign(out, checkpoint, to, overwrite=overwrite)


def load_model(reference: str | Path, **fields: Any) -> Model:
    """The model behind a reference, in float32, for inference: `pw.load("model.npz", image_size=384)`."""
    return read_checkpoint(reference, **fields).build_model()
