"""A model card in the hub's form: only what the checkpoint itself says, and what a reader needs to use it."""

import json
import math
import re
import shlex
from typing import Any

from .. import __version__
from ..config import ViTConfig
from ..core.text import escape_unprintable
from .checkpoint import Checkpoint

MOST_LABELS = 20
FIGURES = {"top1": "accuracy", "map": "mean average precision", "f1": "F1", "nll": "negative log-likelihood"}
FIGURES |= {"ece": "expected calibration error", "brier": "Brier score"}


def model_card(checkpoint: Checkpoint, title: str, reference: str) -> str:
    """Markdown behind a YAML head. `reference` is how commands name the model, e.g. hf:owner/name."""
    facts = strip_paths(checkpoint.provenance)
    parts = [front_matter(checkpoint, title), f"# {plain(title)}", what_it_is(checkpoint)]
    parts += [measured(facts.get("metrics")), how_to_use(checkpoint, reference), how_made(facts), limits(checkpoint)]
    return "\n\n".join(part for part in parts if part) + "\n"


def front_matter(checkpoint: Checkpoint, title: str) -> str:
    """Strings are written as JSON, which YAML reads."""
    kind = "vit" if isinstance(checkpoint.config, ViTConfig) else "resnet"
    lines = ["---", "library_name: patchword", "tags:", "- vision", f"- {kind}"]
    if checkpoint.config.num_classes:
        lines.insert(2, "pipeline_tag: image-classification")
    facts = strip_paths(checkpoint.provenance)
    data, figures = facts.get("data"), plain_figures(facts.get("metrics"))
    if data and figures:
        lines += ["model-index:", f"- name: {text(title)}", "  results:"]
        for part, values in figures.items():
            lines += ["  - task:", "      type: image-classification", "    dataset:"]
            lines += [f"      name: {text(str(data))}", f"      type: {text(str(data))}"]
            lines += [f"      split: {text(part)}", "    metrics:"]
            for figure, value in values.items():
                lines += [f"    - type: {text(FIGURES[figure])}", f"      value: {value:.6g}"]
    return "\n".join([*lines, "---"])


def text(value: str) -> str:
    """A YAML string."""
    return json.dumps(escape_unprintable(value), ensure_ascii=False)


def plain(value: object) -> str:
    """Words of others as words, whatever Markdown they hold."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", escape_unprintable(str(value)))


def strip_paths(value: Any) -> Any:
    """The same with every absolute path cut down to its last part: where things lie here is nobody's business."""
    if isinstance(value, dict):
        return {key: strip_paths(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [strip_paths(each) for each in value]
    if isinstance(value, str) and (value.startswith(("/", "~", "\\\\")) or re.match(r"[A-Za-z]:[\\/]", value)):
        return re.split(r"[\\/]", value.rstrip("\\/"))[-1]
    return value


def plain_figures(metrics: Any) -> dict[str, dict[str, float]]:
    """Part: figure: value; what else the metrics hold is left out."""
    if not isinstance(metrics, dict):
        return {}
    known = {
        part: {
            n: float(v) for n, v in values.items() if n in FIGURES and isinstance(v, int | float) and math.isfinite(v)
        }
        for part, values in metrics.items()
        if isinstance(values, dict)
    }
    return {part: values for part, values in known.items() if values}


def what_it_is(checkpoint: Checkpoint) -> str:
    config, count = checkpoint.config, sum(t.numel() for t in checkpoint.tensors.values())
    size = " x ".join(map(str, config.image_size))
    if isinstance(config, ViTConfig):
        patch = " x ".join(map(str, config.patch_size))
        stem = f", behind a {config.stem} stem" if config.stem != "linear" else ""
        shape = f"Vision Transformer: {config.depth} blocks of width {config.embed_dim}, {config.num_heads} heads, "
        shape += f"patches of {patch} pixels{stem}"
    else:
        shape = f"ResNet with {', '.join(map(str, config.layers))} units"
    said = f"A {shape}; {count:,} numbers. It sees pictures at {size} pixels"
    if not config.num_classes:
        return f"{said} and gives features; it has no head."
    said += f" and tells {config.num_classes} classes apart"
    labels = checkpoint.labels or ()
    listed = f": {'; '.join(map(plain, labels[:MOST_LABELS]))}" if labels else ""
    listed += f"; and {len(labels) - MOST_LABELS} more" if len(labels) > MOST_LABELS else ""
    heat = checkpoint.temperature
    tail = f" Its logits are divided by {heat:g} (fitted on validation pictures) to make confidence honest."
    return f"{said}{listed}." + (tail if heat != 1.0 else "")


def measured(metrics: Any) -> str:
    figures = plain_figures(metrics)
    if not figures:
        return "## Figures\n\nNone are recorded with these weights."
    names = [n for n in FIGURES if any(n in values for values in figures.values())]
    lines = ["| part | pictures | " + " | ".join(FIGURES[n] for n in names) + " |", "|---" * (len(names) + 2) + "|"]
    for part, values in figures.items():
        n = metrics[part].get("n")
        cells = [f"{values[name]:.4f}" if name in values else "" for name in names]
        lines.append(f"| {plain(part)} | {n if n is not None else ''} | " + " | ".join(cells) + " |")
    return "## Figures\n\n" + "\n".join(lines)


def how_to_use(checkpoint: Checkpoint, reference: str) -> str:
    if not checkpoint.config.num_classes:
        return f"## Use\n\n```python\nimport patchword as pw\n\nmodel = pw.load({json.dumps(reference)})\n```"
    code = f'import patchword as pw\n\nprint(pw.Classifier.load({json.dumps(reference)})("photo.jpg").label)'
    return f"## Use\n\n```\npatchword predict {shlex.quote(reference)} photo.jpg\n```\n\n```python\n{code}\n```"


def how_made(facts: dict[str, Any]) -> str:
    words = {"run": "recipe", "init": "started from", "data": "data", "seed": "seed", "epoch": "epochs"}
    words |= {"steps": "steps", "seconds": "seconds of training", "source": "source"}
    lines = [f"- {said}: {plain(facts[key])}" for key, said in words.items() if facts.get(key) not in (None, "", {})]
    versions = facts.get("versions")
    if isinstance(versions, dict):
        lines.append("- versions: " + ", ".join(f"{k} {v}" for k, v in versions.items()))
    return "## How it was made\n\n" + "\n".join(lines) if lines else ""


def limits(checkpoint: Checkpoint) -> str:
    said = "It knows only its classes, and answers with one of them whatever it is shown."
    if checkpoint.multi_label:
        said = "It knows only its labels, each of which it gives or not."
    said += " Measure it on your own pictures (`patchword evaluate`) before you rely on it."
    if not checkpoint.config.num_classes:
        said = "Features carry whatever the training pictures had in common, wanted or not."
    return f"## Limits\n\n{said}\n\nWritten by patchword {__version__} from the model's own record."
