"""`patchword show`: print what was recognized in a checkpoint, and what was assumed."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.text import escape_unprintable, pluralize
from ..help_pages import NO_BREAK, heading, page_width, wrap
from ..model_args import NO_OVERRIDES, JsonFlag, ModelArgs, ModelReference
from ..output import print_json

if TYPE_CHECKING:
    from ...checkpoints import Checkpoint

MAX_CLASSES = 5  # on the screen; --json has all labels
LABEL_WIDTH = 14
HEADLESS = "no head: returns {} features; use patchword embed, patchword probe, or patchword train --init"
# Codes of notes that are no assumptions: on what the user asked for, and on what the file has besides the model.
STATED = {"preprocess_stated", "head_replaced", "field_overridden", "run_unfinished"}
STATED |= {"text_tower_skipped", "decoder_skipped"}


def show(model: ModelReference, model_args: ModelArgs = NO_OVERRIDES, json: JsonFlag = False) -> int:
    """Print what was recognized in a checkpoint: format, architecture, input, classes; and what was assumed.

    Example: patchword show hf:facebook/dinov2-small

    What a checkpoint does not store can be given with the options of every command that reads a model, such as
    --num-heads, --mean or --labels. patchword card writes a model card for the Hugging Face Hub, and patchword inspect
    draws what the model computes.
    """
    from ...checkpoints import resolve_reference

    path = resolve_reference(model)
    checkpoint = model_args.read(str(path), print_assumptions=False)
    document = describe(checkpoint, model, path)
    if json:
        print_json(document)
    else:
        print_description(document)
    return 0


def describe(checkpoint: "Checkpoint", reference: str, path: Path) -> dict[str, Any]:
    """Return everything that is shown, as JSON. The model is not built: the config and the tensors suffice."""
    from ...checkpoints.card import describe_architecture
    from ...config.describe_model import describe_differences
    from ...inference.embed import feature_dim

    config, preprocess, files = checkpoint.config, checkpoint.preprocess, weight_files(path)
    return {
        "reference": reference,
        "path": str(path),
        "files": [file.name for file in files],
        "bytes": sum(file.stat().st_size for file in files),
        "format": "patchword" if is_own(path) else checkpoint.family,
        "family": checkpoint.family,
        "architecture": checkpoint.provenance.get("architecture"),
        "summary": describe_architecture(checkpoint),
        "differences": describe_differences(config),
        "parameters": sum(tensor.numel() for tensor in checkpoint.tensors.values()),
        "config": config.to_json(),
        "preprocess": preprocess.to_json() if preprocess else None,
        "preprocess_summary": preprocess.summary() if preprocess else None,
        "feature_dim": feature_dim(config),
        "classes": config.num_classes,
        "labels": list(checkpoint.labels) if checkpoint.labels else None,
        "multi_label": checkpoint.multi_label,
        "temperature": checkpoint.temperature,
        "provenance": checkpoint.provenance,
        "notes": [note.to_json() for note in checkpoint.notes],
    }


def is_own(path: Path) -> bool:
    """Whether a path is a model directory or a run of patchword."""
    from ...checkpoints.model_dir import CHECKPOINTS, MODEL_JSON

    return path.name == MODEL_JSON or (path / MODEL_JSON).is_file() or (path / CHECKPOINTS).is_dir()


def weight_files(path: Path) -> list[Path]:
    """Return the tensor files of a checkpoint; none for a run that is not finished."""
    from ...checkpoints.detect_format import select_files
    from ...errors import CheckpointError

    try:
        return select_files(path) if path.is_dir() else [path]
    except CheckpointError:
        return []


def print_description(document: dict[str, Any]) -> None:
    """Print the document as lines with labels."""
    print_fact("Format", describe_format(document))
    print_fact("File", describe_files(document))
    print_fact("Architecture", document["summary"])
    for phrase in document["differences"].values():
        print_fact("", f"- {phrase}")
    print_fact("Parameters", f"{document['parameters']:,}")
    print_fact("Input", describe_input(document))
    print_fact("Classes", describe_classes(document))
    if document["temperature"] != 1.0:
        print_fact("Temperature", f"{document['temperature']:g}: logits are divided by it")
    print_provenance(document["provenance"])
    print_notes(document)


def print_notes(document: dict[str, Any]) -> None:
    """Print what was assumed now, and when the weights were converted, apart from other notes."""
    notes = document["notes"]
    stated = [note["text"] for note in notes if note["code"] in STATED]
    assumed = [note["text"] for note in notes if note["code"] not in STATED]
    earlier = document["provenance"].get("assumed", ()) if document["format"] == "patchword" else ()
    for title, texts in (("Notes:", stated), ("Assumed:", assumed), ("Noted when it was converted:", earlier)):
        if texts:
            print(heading(title))
        for text in texts:
            print_fact("-", text, width=2)
    if not assumed and not earlier:
        print("Nothing was assumed.")


def describe_format(document: dict[str, Any]) -> str:
    """Name the format, the architecture in it, and the format that the weights were converted from."""
    names = ", ".join(dict.fromkeys(filter(None, (document["family"], document["architecture"]))))
    if document["format"] == document["family"]:
        return names
    return f"{document['format']}, originally {names}"


def describe_files(document: dict[str, Any]) -> str:
    """Describe where the weights are."""
    path, files, size = Path(document["path"]), document["files"], f"{document['bytes'] / 1e6:,.1f}{NO_BREAK}MB"
    if len(files) == 1:
        return f"{path if path.name == files[0] else path / files[0]} ({size})"
    return f"{path} ({len(files)} files, {size})" if files else str(path)


def describe_input(document: dict[str, Any]) -> str:
    """Describe the images that a model takes, and their preprocessing."""
    height, width = document["config"]["image_size"]
    channels = document["config"]["in_channels"]
    kind = {1: "grayscale", 3: "RGB"}.get(channels, f"{channels} channels")
    summary = document["preprocess_summary"] or "no preprocessing, because images have 1 or 3 channels"
    return f"{height}x{width} {kind}: {summary}"


def describe_classes(document: dict[str, Any]) -> str:
    """Describe the outputs of a model."""
    if not document["classes"]:
        return HEADLESS.format(f"{document['feature_dim']:,}")
    text = pluralize(document["classes"], "class", "es") + (", multi-label" if document["multi_label"] else "")
    labels = document["labels"]
    if labels is None:
        return f"{text} without labels; --labels gives them"
    first = "; ".join(labels[:MAX_CLASSES])
    return f"{text}: {first}{'; ...' if len(labels) > MAX_CLASSES else ''}"


def print_provenance(provenance: dict[str, Any]) -> None:
    """Print how a model was trained, and its accuracy, if that is recorded."""
    from ...checkpoints.card import METRIC_NAMES, PROVENANCE_NAMES, finite_metrics

    facts = [
        f"{name[0].lower()}{name[1:]} {provenance[key]}"
        for key, name in PROVENANCE_NAMES.items()
        if provenance.get(key) not in (None, "", {})
    ]
    if facts:
        print_fact("Training", ", ".join(facts))
    for split, values in finite_metrics(provenance.get("metrics")).items():
        print_fact(f"On {split}", ", ".join(f"{METRIC_NAMES[name]} {value:.4g}" for name, value in values.items()))


def print_fact(label: str, text: str, width: int = LABEL_WIDTH) -> None:
    """Print a label and a text, wrapped to the width of the screen."""
    indent = "  " if text.startswith("- ") else ""
    lines = wrap(escape_unprintable(text), max(30, page_width() - width), indent) or [""]
    print("\n".join(f"{label if i == 0 else '':{width}}{line}" for i, line in enumerate(lines)))
