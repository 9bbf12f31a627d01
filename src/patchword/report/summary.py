"""The top of the page: the one number that matters, the other figures, and what was trained, in a few lines."""

import statistics
from collections.abc import Mapping
from typing import Any

from ..core.text import count, plural
from ..evaluation.intervals import wilson
from .content import Graded, Report, number
from .text import duration, escape, name, percent, table

PARTS = {"val": "validation", "test": "test"}


def hero(report: Report) -> str:
    """The one number that matters, and what it is worth."""
    score, n = number(report.figures.get(report.headline)), int(report.figures.get("n", 0))
    part = PARTS.get(report.part, report.part)
    pictures = f"{plural(n, f'{part} picture')}"
    if score is None:
        return f'<div class="hero"><p>The {escape(part)} part was not measured.</p></div>'
    chosen = "this part also chose the checkpoint, so expect a little less on new pictures"
    context = ["one seed"] + ([chosen] if report.part == "val" else ["not used to choose anything"])
    if report.headline == "map":
        said, scale = f"mean average precision on {pictures}", ""
    else:
        low, high = wilson(score, n)
        said, scale = f"of {pictures} recognised at the first guess", accuracy_scale(report, score, low, high)
        context = [f"95% interval {percent(low)} to {percent(high)} (Wilson)", *context]
    about = f"<p><b>{escape(said)}</b></p><p class=soft>{escape('; '.join(context))}.</p>"
    return f'<div class="hero"><div class="big">{percent(score)}</div><div>{about}</div>{scale}</div>\n'


def accuracy_scale(report: Graded, score: float, low: float, high: float) -> str:
    """From 0 to 100%: the score, its interval, and what guessing would give."""
    marks = f'<i></i><s style="left:{100 * low:.2f}%;width:{100 * (high - low):.2f}%"></s>'
    marks += f'<b style="left:{100 * score:.2f}%"></b>'
    guess = report.guessing()
    if guess is not None:
        marks += f'<u style="left:{100 * guess:.2f}%"></u>'
        side = f"left:{100 * guess:.2f}%" if guess < 0.5 else f"right:{100 - 100 * guess:.2f}%"
        marks += f'<span style="{side}">{percent(guess)} by always naming the most frequent class</span>'
    return f'<div class="scale" role="img" aria-label="{percent(score)} on a scale to 100%">{marks}</div>'


def tiles(report: Graded) -> str:
    figures = report.figures
    known = {
        "top5": ("among the five best guesses", percent),
        "nll": ("loss (negative log-likelihood)", "{:.3f}".format),
        "ece": ("calibration error: mean gap between confidence and accuracy", percent),
        "ece_calibrated": ("the same for the finished model, with its temperature", percent),
        "f1": ("F1", "{:.3f}".format),
    }
    if len(report.labels) <= 5:
        known.pop("top5")  # all classes are among the best five
    cells = [(show(v), words) for key, (words, show) in known.items() if (v := number(figures.get(key))) is not None]
    return f'<div class="tiles">{"".join(f"<div><b>{v}</b><span>{words}</span></div>" for v, words in cells)}</div>\n'


def summary(report: Report) -> str:
    settings, train = report.settings, report.rows("train")
    rows = [("Model", escape(model_words(settings.get("model") or {})))]
    if report.parameters is not None:
        rows.append(("Parameters", count(report.parameters)))
    rows.append(("Started from", name(str(settings["init"])) if settings.get("init") else "random weights"))
    rows.append(("Data", data_words(report)))
    if train:  # every tenth step has a row; the last step of a run has one of validation
        last = max((train[-1], *report.rows("val")), key=lambda row: number(row.get("step")) or 0)
        length = f"{number(last.get('epoch')) or 0:.3g} epochs, {count(int(last.get('step') or 0))} steps"
        rows.append(("Length", f"{length} of {plural(settings.get('batch_size', 0), 'picture')}"))
    optim = settings.get("optim") or {}
    if optim:
        shape = (settings.get("schedule") or {}).get("shape", "")
        rows.append(("Optimiser", escape(f"{optim.get('name')}, learning rate {optim.get('lr'):g}, {shape} schedule")))
    if report.seconds is not None:
        rows.append(("Time", duration(report.seconds)))
    speeds = [v for row in train if (v := number(row.get("images_per_second"))) is not None]
    if speeds:
        rows.append(("Speed", f"{statistics.median(speeds):,.0f} pictures per second in training (median)"))
    return table([*rows, ("Seed", escape(settings.get("seed", "unknown")))])


def model_words(model: Mapping[str, Any]) -> str:
    size = " x ".join(map(str, model.get("image_size", ())))
    if "layers" in model:
        layers = ", ".join(map(str, model["layers"]))
        return f"ResNet, {layers} units, {model.get('width_factor', 1)} times the width, {size} pixels"
    if "embed_dim" not in model:
        return "unknown"
    patch = " x ".join(map(str, model.get("patch_size", ())))
    stem = "" if model.get("stem", "linear") == "linear" else f", {model['stem']} stem"
    blocks = f"{model.get('depth')} blocks, width {model['embed_dim']}, {model.get('num_heads')} heads"
    return f"ViT: {blocks}, patches of {patch} in {size} pixels{stem}"


def data_words(report: Report) -> str:
    source = str((report.settings.get("data") or {}).get("source") or "in memory")
    parts = [f"{count(n)} {escape(PARTS.get(part, part))}" for part, n in report.samples.items()]
    sizes = f": {', '.join(parts)} pictures" if parts else ""
    return f"{name(source)}{sizes}; {plural(len(report.labels), 'class', 'es')}"
