"""Our own format: a folder with model.safetensors and model.json, which says everything about it."""

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
from .mapping import listed
from .tensor_files import MODEL_FILES, read_tensors, write_tensors

FORMAT = 2  # 1 is read, too (config/format_v1.py)
WEIGHTS_FILE, MODEL_JSON = "model.safetensors", "model.json"
CHECKPOINTS = "checkpoints"  # of a run
KINDS: dict[str, type[ModelConfig]] = {"vit": ViTConfig, "resnet": ResNetConfig}
EXTRA = "extra."


def write_model_dir(folder: Path, checkpoint: Checkpoint, *, overwrite: bool = False) -> None:
    """Writes the folder whole or not at all."""
    tensors = {**checkpoint.tensors, **{EXTRA + n: t for n, t in checkpoint.extras.items()}}
    with atomic_output(folder, overwrite=overwrite, replaceable=MODEL_FILES) as made:
        made.mkdir()
        write_tensors(made / WEIGHTS_FILE, tensors)
        write_json(made / MODEL_JSON, {**model_json(checkpoint), "sha256": sha256(made / WEIGHTS_FILE)})


def model_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """model.json without the checksum."""
    kind = "resnet" if isinstance(checkpoint.config, ResNetConfig) else "vit"
    return {
        "format": FORMAT,
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
    """Reads a folder back; a damaged or foreign file is named, never half loaded."""
    said = read_json(folder / MODEL_JSON)
    if said.get("format") not in (1, FORMAT):
        raise CheckpointError(
            f"{folder / MODEL_JSON} has format {said.get('format')!r}; this patchword reads 1 and {FORMAT}. "
            "A newer patchword may have written it."
        )
    said = upgrade_model(said) if said["format"] == 1 else said
    try:
        config = KINDS[said["architecture"]].from_json(said["config"])
        preprocess = read_preprocess(said["preprocess"], config)
        labels = read_labels(said["labels"], config)
        temperature = read_temperature(said["temperature"])
        source, provenance = said["source"], dict(said["provenance"])
        family, quirks = str(source["family"]), dict(source["quirks"])
        expected_sum, multi_label = str(said["sha256"]), said.get("multi_label", False) is True
    except ConfigError as error:
        raise CheckpointError(f"{folder / MODEL_JSON}: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / MODEL_JSON} lacks or garbles {error}.") from None
    if (folder / WEIGHTS_FILE).is_file() and sha256(folder / WEIGHTS_FILE) != expected_sum:
        raise CheckpointError(f"{folder / WEIGHTS_FILE} is damaged: its checksum is not the one in {MODEL_JSON}.")
    tensors, _ = read_tensors(folder / WEIGHTS_FILE)
    extras = {n.removeprefix(EXTRA): t for n, t in tensors.items() if n.startswith(EXTRA)}
    tensors = {n: t for n, t in tensors.items() if not n.startswith(EXTRA)}
    check_tensors(folder / WEIGHTS_FILE, tensors, config)
    said_so = (config, tensors, preprocess, labels, temperature, provenance, family, quirks, extras)
    return Checkpoint(*said_so, multi_label=multi_label)


def read_unfinished(run: Path) -> Checkpoint:
    """The model of the last whole checkpoint of a run that has not come to its end; a note says so."""
    for folder in sorted((run / CHECKPOINTS).glob("step-*"), reverse=True):
        try:
            checkpoint = read_model_dir(folder)
        except CheckpointError:
            continue
        text = f"{run} is not finished: the model is that of {folder.name}. `patchword resume {run}` continues the run."
        return replace(checkpoint, notes=(*checkpoint.notes, Note(text, "run_unfinished")))
    raise CheckpointError(f"{run} is a run without a whole checkpoint yet. Start it again: patchword resume {run}")


def read_preprocess(said: Any, config: ModelConfig) -> Preprocess | None:
    if said is None:
        return None
    preprocess = Preprocess.from_json(said)
    if preprocess.size != config.image_size or preprocess.channels != config.in_channels:
        raise ValueError(f"preprocess: the model takes {config.in_channels} channels of {config.image_size}")
    return preprocess


def read_labels(labels: Any, config: ModelConfig) -> tuple[str, ...] | None:
    if labels is None:
        return None
    if not isinstance(labels, list) or len(labels) != config.num_classes:
        raise ValueError(f"labels: the model has {config.num_classes} classes")
    return tuple(map(str, labels))


def read_temperature(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise ValueError(f"temperature {value!r}")
    return float(value)


def check_tensors(path: Path, tensors: dict[str, Any], config: ModelConfig) -> None:
    expected = tensor_shapes(config)
    wrong = [f"{n} is missing" for n in expected if n not in tensors]
    wrong += [f"{n} is not part of the model" for n in tensors if n not in expected]
    wrong += [
        f"{n} is {tuple(t.shape)}, should be {tuple(expected[n].shape)}"
        for n, t in tensors.items()
        if n in expected and t.shape != expected[n].shape
    ]
    wrong += [
        f"{n} holds {t.dtype}"
        for n, t in tensors.items()
        if n in expected and t.is_floating_point() != expected[n].is_floating_point()
    ]
    if wrong:
        raise CheckpointError(f"{path} does not fit its {MODEL_JSON}: {listed(wrong)}.")
