"""Model cards for the Hugging Face Hub, generated from the metadata of a checkpoint."""

import json
import math
import re
import shlex
from typing import Any

from .. import __version__
from ..config import ViTConfig
from ..core.text import escape_unprintable
from .checkpoint import Checkpoint

MAX_LABELS = 20
METRIC_NAMES = {"top1": "accuracy", "map": "mean average precision", "f1": "F1", "nll": "negative log-likelihood"}
METRIC_NAMES |= {"ece": "expected calibration error", "brier": "Brier score"}
PROVENANCE_NAMES = {"run": "Recipe", "init": "Initial weights", "data": "Dataset", "seed": "Seed", "epoch": "Epochs"}
PROVENANCE_NAMES |= {"steps": "Steps", "seconds": "Training time in seconds", "source": "Source"}


def model_card(checkpoint: Checkpoint, title: str, reference: str) -> str:
    """Generate a model card: Markdown with a YAML header.

    Args:
        checkpoint: The model.
        title: The name of the model.
        reference: How commands refer to the model, such as hf:owner/name.
    """
    provenance = strip_paths(checkpoint.provenance)
    sections = [yaml_header(checkpoint, title), f"# {escape_markdown(title)}", description_section(checkpoint)]
    sections += [metrics_section(provenance.get("metrics")), usage_section(checkpoint, reference)]
    sections += [training_section(provenance), limitations_section(checkpoint)]
    return "\n\n".join(section for section in sections if section) + "\n"


def yaml_header(checkpoint: Checkpoint, title: str) -> str:
    """Generate the metadata that the hub reads, with the metrics as `model-index`."""
    kind = "vit" if isinstance(checkpoint.config, ViTConfig) else "resnet"
    lines = ["---", "library_name: patchword", "tags:", "- vision", f"- {kind}"]
    if checkpoint.config.num_classes:
        lines.insert(2, "pipeline_tag: image-classification")
    provenance = strip_paths(checkpoint.provenance)
    dataset, metrics = provenance.get("data"), finite_metrics(provenance.get("metrics"))
    if dataset and metrics:
        lines += ["model-index:", f"- name: {yaml_string(title)}", "  results:"]
        for split, values in metrics.items():
            lines += ["  - task:", "      type: image-classification", "    dataset:"]
            lines += [f"      name: {yaml_string(str(dataset))}", f"      type: {yaml_string(str(dataset))}"]
            lines += [f"      split: {yaml_string(split)}", "    metrics:"]
            for name, value in values.items():
                lines += [f"    - type: {yaml_string(METRIC_NAMES[name])}", f"      value: {value:.6g}"]
    return "\n".join([*lines, "---"])


def yaml_string(value: str) -> str:
    """Quote a string for YAML, of which JSON strings are a subset."""
    return json.dumps(escape_unprintable(value), ensure_ascii=False)


def escape_markdown(value: object) -> str:
    """Escape Markdown in untrusted text, such as labels."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", escape_unprintable(str(value)))


def strip_paths(value: Any) -> Any:
    """Reduce absolute paths inside a JSON value to their last component, so that they reveal nothing private."""
    if isinstance(value, dict):
        return {key: strip_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strip_paths(item) for item in value]
    if isinstance(value, str) and (value.startswith(("/", "~", "\\\\")) or re.match(r"[A-Za-z]:[\\/]", value)):
        return re.split(r"[\\/]", value.rstrip("\\/"))[-1]
    return value


def finite_metrics(metrics: Any) -> dict[str, dict[str, float]]:
    """Select the finite values of known metrics, by split and name."""
    if not isinstance(metrics, dict):
        return {}
    known = {
        split: {
            name: float(value)
            for name, value in values.items()
            if name in METRIC_NAMES and isinstance(value, int | float) and math.isfinite(value)
        }
        for split, values in metrics.items()
        if isinstance(values, dict)
    }
    return {split: values for split, values in known.items() if values}


def description_section(checkpoint: Checkpoint) -> str:
    """Describe architecture, input size, classes and calibration."""
    config, num_parameters = checkpoint.config, sum(t.numel() for t in checkpoint.tensors.values())
    size = " x ".join(map(str, config.image_size))
    text = (
        f"A {describe_architecture(checkpoint)}, with {num_parameters:,} parameters. Input images have {size} pixels."
    )
    if not config.num_classes:
        return f"{text} The model has no classification head: it returns features."
    labels = checkpoint.labels or ()
    names = f": {'; '.join(map(escape_markdown, labels[:MAX_LABELS]))}" if labels else ""
    names += f"; and {len(labels) - MAX_LABELS} more" if len(labels) > MAX_LABELS else ""
    text += f" It predicts {config.num_classes} {'labels' if checkpoint.multi_label else 'classes'}{names}."
    if checkpoint.temperature != 1.0:
        text += f" Logits are divided by {checkpoint.temperature:g} (temperature scaling, fitted on validation images)."
    return text


def describe_architecture(checkpoint: Checkpoint) -> str:
    """Describe the architecture in a few words."""
    config = checkpoint.config
    if not isinstance(config, ViTConfig):
        return f"ResNet with {', '.join(map(str, config.layers))} units per stage"
    patch = " x ".join(map(str, config.patch_size))
    stem = f" after a {config.stem} stem" if config.stem != "linear" else ""
    return (
        f"Vision Transformer with {config.depth} blocks of width {config.embed_dim}, {config.num_heads} attention "
        f"heads and patches of {patch} pixels{stem}"
    )


def metrics_section(metrics: Any) -> str:
    """Tabulate the metrics by split."""
    rows = finite_metrics(metrics)
    if not rows:
        return "## Metrics\n\nNone are recorded with these weights."
    names = [name for name in METRIC_NAMES if any(name in values for values in rows.values())]
    lines = ["| split | images | " + " | ".join(METRIC_NAMES[name] for name in names) + " |"]
    lines.append("|---" * (len(names) + 2) + "|")
    for split, values in rows.items():
        num_images = metrics[split].get("n")
        cells = [f"{values[name]:.4f}" if name in values else "" for name in names]
        count = escape_markdown(num_images) if num_images is not None else ""
        lines.append(f"| {escape_markdown(split)} | {count} | " + " | ".join(cells) + " |")
    return "## Metrics\n\n" + "\n".join(lines)


def usage_section(checkpoint: Checkpoint, reference: str) -> str:
    """Show how to load the model."""
    if not checkpoint.config.num_classes:
        return f"## Use\n\n```python\nimport patchword as pw\n\nmodel = pw.load_model({json.dumps(reference)})\n```"
    code = f'import patchword as pw\n\nprint(pw.Classifier.load({json.dumps(reference)})("photo.jpg").label)'
    return f"## Use\n\n```\npatchword predict {shlex.quote(reference)} photo.jpg\n```\n\n```python\n{code}\n```"


def training_section(provenance: dict[str, Any]) -> str:
    """List how the model was trained; empty if nothing is recorded."""
    lines = [
        f"- {name}: {escape_markdown(provenance[key])}"
        for key, name in PROVENANCE_NAMES.items()
        if provenance.get(key) not in (None, "", {})
    ]
    versions = provenance.get("versions")
    if isinstance(versions, dict):
        text = ", ".join(f"{escape_markdown(name)} {escape_markdown(version)}" for name, version in versions.items())
        lines.append(f"- Versions: {text}")
    return "## Training\n\n" + "\n".join(lines) if lines else ""


def limitations_section(checkpoint: Checkpoint) -> str:
    """State what the model cannot do."""
    advice = "Evaluate it on your own images (`patchword evaluate`) before you rely on it."
    if not checkpoint.config.num_classes:
        text = "The features reflect the training images, including their biases."
    elif checkpoint.multi_label:
        text = f"The model knows only the labels above and predicts each of them independently. {advice}"
    else:
        text = f"The model knows only its classes and assigns one of them to every image. {advice}"
    return f"## Limitations\n\n{text}\n\nGenerated by patchword {__version__} from the metadata of the model."
