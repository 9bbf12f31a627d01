"""Our own format: a directory with model.safetensors and model.json, which has all metadata."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import __version__
from ..config import ModelConfig, ResNetConfig, ViTConfig
from ..config.format_v1 import upgrade_model
from ..core.io import atomic_output, read_json, sha256, write_json
from ..data.preprocess import Preprocess
from ..errors import CheckpointError, ConfigError, Note
from ..models import tensor_shapes
from .checkpoint import Checkpoint
from .mapping import in_file, join_names
from .sharded_tensors import is_sharded, read_evaluated_model
from .tensor_files import MODEL_FILES, read_tensors, write_tensors

FORMAT_VERSION = 2  # version 1 is upgraded when it is read (config/format_v1.py)
WEIGHTS_FILE, MODEL_JSON = "model.safetensors", "model.json"
CHECKPOINTS = "checkpoints"  # the subdirectory of a run
CONFIG_CLASSES: dict[str, type[ModelConfig]] = {"vit": ViTConfig, "resnet": ResNetConfig}
EXTRA_PREFIX = "extra."  # of Checkpoint.extras in the tensor file


def write_model_dir(folder: Path, checkpoint: Checkpoint, *, overwrite: bool = False) -> None:
    """Write a model directory atomically."""
    tensors = {**checkpoint.tensors, **{EXTRA_PREFIX + n: t for n, t in checkpoint.extras.items()}}
    with atomic_output(folder, overwrite=overwrite, replaceable=MODEL_FILES) as temporary:
        temporary.mkdir()
        write_tensors(temporary / WEIGHTS_FILE, tensors)
        checksum = sha256(temporary / WEIGHTS_FILE)
        write_json(temporary / MODEL_JSON, {**model_json(checkpoint), "sha256": checksum})


def model_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the content of model.json, without the checksum of the weights."""
    kind = "resnet" if isinstance(checkpoint.config, ResNetConfig) else "vit"
    return {
        "format": FORMAT_VERSION,
        "patchword": __version__,
        "architecture": kind,
        "config": checkpoint.config.to_json(),
        "preprocess": checkpoint.preprocess.to_json() if checkpoint.preprocess else None,
        "labels": list(checkpoint.labels) if checkpoint.labels else None,
        "multi_label": checkpoint.multi_label,
        "temperature": checkpoint.temperature,
        "source": {"family": checkpoint.family, "quirks": checkpoint.quirks},
        "provenance": checkpoint.provenance,
    }


def read_model_dir(folder: Path) -> Checkpoint:
    """Read a model directory.

    Raises:
        CheckpointError: A file is missing, damaged or inconsistent.
    """
    document = read_json(folder / MODEL_JSON)
    if document.get("format") not in (1, FORMAT_VERSION):
        raise CheckpointError(
            f"{folder / MODEL_JSON} has format {document.get('format')!r}; supported: 1 and {FORMAT_VERSION}. "
            "A newer patchword may have written it."
        )
    document = upgrade_model(document) if document["format"] == 1 else document
    try:
        config = CONFIG_CLASSES[document["architecture"]].from_json(document["config"])
        preprocess = parse_preprocess(document["preprocess"], config)
        labels = parse_labels(document["labels"], config)
        temperature = parse_temperature(document["temperature"])
        source, provenance = document["source"], dict(document["provenance"])
        family, quirks = str(source["family"]), dict(source["quirks"])
        checksum, multi_label = str(document["sha256"]), document.get("multi_label", False) is True
    except ConfigError as error:
        raise in_file(str(folder / MODEL_JSON), error) from None
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / MODEL_JSON} has a missing or invalid value: {error}.") from None
    tensors = read_evaluated_model(folder) if is_sharded(folder) else read_weights(folder, checksum)
    extras = {n.removeprefix(EXTRA_PREFIX): t for n, t in tensors.items() if n.startswith(EXTRA_PREFIX)}
    tensors = {n: t for n, t in tensors.items() if not n.startswith(EXTRA_PREFIX)}
    check_tensors(folder / WEIGHTS_FILE, tensors, config)
    metadata = (preprocess, labels, temperature, provenance, family, quirks, extras)
    return Checkpoint(config, tensors, *metadata, multi_label=multi_label)


def read_weights(folder: Path, checksum: str) -> dict[str, Any]:
    """Read the weights of a model directory, and compare them with their checksum."""
    path = folder / WEIGHTS_FILE
    if path.is_file() and sha256(path) != checksum:
        raise CheckpointError(f"{path} is damaged: its checksum differs from the one in {MODEL_JSON}.")
    return read_tensors(path)[0]


def read_latest_checkpoint(run: Path) -> Checkpoint:
    """Read the latest intact checkpoint of an unfinished run, and add a note."""
    for folder in sorted((run / CHECKPOINTS).glob("step-*"), reverse=True):
        try:
            checkpoint = read_model_dir(folder)
        except CheckpointError:
            continue
        text = f"{run} is not finished: this is the model of {folder.name}. `patchword resume {run}` continues the run."
        return replace(checkpoint, notes=(*checkpoint.notes, Note(text, "run_unfinished")))
    raise CheckpointError(f"{run} is a run without an intact checkpoint. Start it again: patchword resume {run}")


def parse_preprocess(values: Any, config: ModelConfig) -> Preprocess | None:
    """Parse the preprocessing and check that it fits the model."""
    if values is None:
        return None
    preprocess = Preprocess.from_json(values)
    if preprocess.size != config.image_size or preprocess.channels != config.in_channels:
        raise ValueError(f"preprocess: the model takes {config.in_channels} channels of {config.image_size}")
    return preprocess


def parse_labels(labels: Any, config: ModelConfig) -> tuple[str, ...] | None:
    """Parse the labels, one for each class."""
    if labels is None:
        return None
    if not isinstance(labels, list) or len(labels) != config.num_classes:
        raise ValueError(f"labels: the model has {config.num_classes} classes")
    return tuple(map(str, labels))


def parse_temperature(value: Any) -> float:
    """Parse the temperature, a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise ValueError(f"temperature {value!r}")
    return float(value)


def check_tensors(path: Path, tensors: dict[str, Any], config: ModelConfig) -> None:
    """Raise a CheckpointError that names all missing, unexpected, misshapen and mistyped tensors."""
    expected = tensor_shapes(config)
    problems = [f"{n} is missing" for n in expected if n not in tensors]
    problems += [f"{n} is not part of the model" for n in tensors if n not in expected]
    problems += [
        f"{n} is {tuple(t.shape)}, should be {tuple(expected[n].shape)}"
        for n, t in tensors.items()
        if n in expected and t.shape != expected[n].shape
    ]
    problems += [
        f"{n} holds {t.dtype}"
        for n, t in tensors.items()
        if n in expected and t.is_floating_point() != expected[n].is_floating_point()
    ]
    if problems:
        raise CheckpointError(f"{path} does not fit its {MODEL_JSON}: {join_names(problems)}.")
