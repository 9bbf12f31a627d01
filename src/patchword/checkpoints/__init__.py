"""Checkpoints: our model directories, the public formats of ViT weights both ways, and the Hugging Face Hub."""

from pathlib import Path
from typing import Any

from ..config import ViTConfig
from ..errors import CheckpointError, ConfigError, ConversionError, Note
from ..models import Model
from .checkpoint import Checkpoint
from .convert import WRITABLE, write_foreign
from .detect_format import read_foreign
from .mapping import join_names
from .model_dir import CHECKPOINTS, MODEL_JSON, read_latest_checkpoint, read_model_dir, write_model_dir
from .tensor_files import TENSOR_SUFFIXES

__all__ = ["WRITABLE", "Checkpoint", "load_model", "read_checkpoint", "write_checkpoint"]

BUNDLED_PREFIX, BUNDLED_DIR = "patchword:", Path(__file__).parents[1] / "weights"


def read_checkpoint(reference: str | Path, **fields: Any) -> Checkpoint:
    """Read a model reference.

    Args:
        reference: A run or model directory, a foreign checkpoint file or directory, `hf:owner/name`, or a bundled
            model such as `patchword:cifar10`.
        **fields: Fields of the model's config. image_size, in_channels and num_classes adapt the weights (positions
            are interpolated, input channels averaged, the head replaced by zeros). All others supply what the file
            does not store.
    """
    fields = ViTConfig.cast_fields(fields)
    path = resolve_reference(reference)
    try:
        if not path.exists():
            raise CheckpointError(
                f"There is no model at {path}. Give a model directory, a checkpoint file, or a hub name such as "
                "hf:google/vit-base-patch16-224."
            )
        if path.name == MODEL_JSON or (path.is_dir() and (path / MODEL_JSON).is_file()):
            return read_model_dir(path if path.is_dir() else path.parent).adapt(**fields)
        if (path / CHECKPOINTS).is_dir():
            return read_latest_checkpoint(path).adapt(**fields)
        return read_foreign(path, fields)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}).") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", code=error.code) from None


def resolve_reference(reference: str | Path) -> Path:
    """Return the local path of a model reference; a model on the hub is downloaded."""
    if isinstance(reference, str) and reference.startswith("hf:"):
        from .hub import download_model

        return download_model(reference)
    if isinstance(reference, str) and reference.startswith(BUNDLED_PREFIX):
        names = sorted(path.parent.name for path in BUNDLED_DIR.glob(f"*/{MODEL_JSON}"))
        if reference.removeprefix(BUNDLED_PREFIX) not in names:
            bundled = join_names([BUNDLED_PREFIX + name for name in names])
            raise CheckpointError(f"There is no {reference}. Bundled with patchword: {bundled}.")
        return BUNDLED_DIR / reference.removeprefix(BUNDLED_PREFIX)
    return expand_user(reference)


def expand_user(path: str | Path) -> Path:
    """Replace ~ by the home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # ~unknown_user
        raise CheckpointError(f"{path}: {error}") from None


def write_checkpoint(
    out: str | Path, checkpoint: Checkpoint, to: str = "patchword", *, overwrite: bool = False
) -> list[Note]:
    """Write a checkpoint atomically in the format `to`; return notes on what that format cannot store."""
    out = expand_user(out)
    if to == "patchword":
        if out.suffix in TENSOR_SUFFIXES:
            raise ConversionError(f"{out}: the patchword format is written to a directory.")
        write_model_dir(out, checkpoint, overwrite=overwrite)
        return []
    return write_foreign(out, checkpoint, to, overwrite=overwrite)


def load_model(reference: str | Path, **fields: Any) -> Model:
    """Load a model in float32 for inference: `pw.load_model("model.npz", image_size=384)`."""
    return read_checkpoint(reference, **fields).build_model()
