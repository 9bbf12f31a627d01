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
    """Read the weights of a model with their config, preprocessing and labels.

    Args:
        reference: A model reference: a run or model directory, a checkpoint file or directory of another project,
            `hf:owner/name`, or a bundled model such as `patchword:cifar10`.
        **fields: Fields of the model's config. `image_size`, `in_channels` and `num_classes` adapt the weights, as
            `adapt_model` does. All others supply what the file does not store.

    Returns:
        The checkpoint. Its `notes` list what was assumed.

    Raises:
        CheckpointError: The model does not exist, is damaged, or is in an unknown format.
        ConfigError: A field is unknown or invalid.
        HubError: The Hugging Face Hub cannot be reached, or does not have the model.

    Examples:
        ```python
        import patchword as pw

        checkpoint = pw.read_checkpoint("patchword:cifar10")
        print(checkpoint.config.image_size, checkpoint.labels[:2])  # (32, 32) ('airplane', 'automobile')
        ```
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
    """Write a checkpoint in patchword's format, or in that of another project.

    The output is written under a temporary name and then renamed. A file for another project is read back and compared
    first.

    Args:
        out: The file or directory to write; the format determines which of them, and the suffix of a file.
        checkpoint: The checkpoint.
        to: The format: "patchword" (a model directory), "google", "big_vision", "timm", "transformers",
            "torchvision", "deit", "mae", "dinov2" or "dinov3".
        overwrite: Whether to replace an existing file, or a directory that contains nothing but a model.

    Returns:
        Notes on what the format cannot store, such as the temperature.

    Raises:
        ConversionError: There is no such format, or it cannot store this model.
        OutputError: `out` cannot be written, or exists (code "output_exists").

    Examples:
        ```python
        import patchword as pw

        checkpoint = pw.read_checkpoint("ViT-B_16.npz")
        for note in pw.write_checkpoint("vit-b16.safetensors", checkpoint, "timm"):
            print(note)
        ```
    """
    out = expand_user(out)
    if to == "patchword":
        if out.suffix in TENSOR_SUFFIXES:
            raise ConversionError(f"{out}: the patchword format is written to a directory.")
        write_model_dir(out, checkpoint, overwrite=overwrite)
        return []
    return write_foreign(out, checkpoint, to, overwrite=overwrite)


def load_model(reference: str | Path, **fields: Any) -> Model:
    """Load a model as a PyTorch module, in float32 and evaluation mode.

    `Classifier.load` also loads what is needed to classify images: preprocessing, labels and temperature.

    Args:
        reference: A model reference, as in `read_checkpoint`.
        **fields: Fields of the model's config, as in `read_checkpoint`.

    Raises:
        CheckpointError: The model does not exist, is damaged, or is in an unknown format.

    Examples:
        ```python
        import patchword as pw

        model = pw.load_model("ViT-B_16.npz", image_size=384)
        backbone = pw.load_model("ViT-B_16.npz", num_classes=0)  # returns image embeddings
        ```
    """
    return read_checkpoint(reference, **fields).build_model()
