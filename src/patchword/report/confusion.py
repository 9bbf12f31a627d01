"""Which classes are taken for which: a labelled map for few classes, an unlabelled picture for many, and lists."""

from collections.abc import Sequence

import numpy as np
from PIL import Image

from ..core.text import count, plural, visible
from ..evaluation.intervals import wilson
from .content import Graded
from .pictures import data_uri
from .text import escape, name, percent, shortened, width

MOST_LABELLED = 60  # classes whose names still fit beside the map
MOST_WRITTEN = 20  # classes up to which the counts are written into the cells
MOST_PAIRS = 15
MOST_SHOWN = 20  # classes in the list before the rest is folded away
SIDE = 260  # dots along a side of the unlabelled picture, at most: smaller ones cannot be seen
FONT = 12

BLUE, ORANGE = (47, 116, 208), (224, 106, 12)  # right and wrong; told apart by nearly all eyes, on white and on black


def strength(share: np.ndarray) -> np.ndarray:
    """Opacity of a cell from its share of the row. The root lets rare mistakes be seen at all."""
    return np.where(share > 0, 0.1 + 0.9 * np.sqrt(share), 0.0)


def confusion(report: Graded) -> str:
    """The picture and the most frequent mistakes; nothing where several labels may be right."""
    if report.confusion is None or not report.confusion.sum():
        return ""
    occurring = np.flatnonzero(report.confusion.any(axis=1) | report.confusion.any(axis=0))
    part, labels = report.confusion[np.ix_(occurring, occurring)], [report.labels[int(k)] for k in occurring]
    drawn = confusion_map(part, labels)
    if len(occurring) < len(report.labels):
        said = f"{len(occurring):,} of {len(report.labels):,} classes occurred or were said; the others are left out."
        drawn = drawn.replace("</figure>", f"<p>{said}</p></figure>")
    return drawn + pairs_table(report.confused_pairs(MOST_PAIRS))


def confusion_map(confusion: np.ndarray, labels: Sequence[str]) -> str:
    said = "Rows are what it was, columns what the model said. Blue is right, orange wrong; the stronger, the larger "
    said += "its share of the row."
    if len(confusion) <= MOST_LABELLED:
        picture = f'<div class="scroll">{labelled(confusion, labels)}</div>'
    else:
        picture = unlabelled(confusion)
        said += f" The {count(len(confusion))} classes are in the order of their indices, from the top left."
        if (step := dot_size(len(confusion))) > 1:
            said += f" Each dot stands for {step} x {step} of them, and shows the largest share."
    return f'<figure class="confusion">{picture}<p>{said}</p></figure>'


def labelled(confusion: np.ndarray, labels: Sequence[str]) -> str:
    """An SVG with the classes' names on both sides and the counts under the pointer."""
    labels = [visible(label) for label in labels]
    short = [shortened(label, 26) for label in labels]
    cells = len(confusion)
    cell = max(14, min(42, 620 // cells))
    room = FONT * max(map(width, short)) + 12
    upright = room <= cell + 8
    top = FONT + 12 if upright else room
    size = (room + cells * cell + 2, top + cells * cell + 2)
    sums = confusion.sum(axis=1, keepdims=True)
    share = confusion / np.maximum(sums, 1)
    parts = [_names(short, cell, room, top, upright), f'<g transform="translate({room:.0f} {top:.0f})">']
    parts.append(f'<rect class="frame" width="{cells * cell}" height="{cells * cell}"/>')
    for row, column in zip(*map(np.ndarray.tolist, np.nonzero(confusion)), strict=True):
        title = f"{labels[row]} taken for {labels[column]}" if row != column else f"{labels[row]} recognised"
        title += f": {confusion[row, column]} of {sums[row, 0]} ({percent(share[row, column])})"
        parts.append(_cell(row, column, int(confusion[row, column]), float(share[row, column]), cell, cells, title))
    shrinks = " fits" if cells <= MOST_WRITTEN else ""
    head = f'<svg class="map{shrinks}" viewBox="0 0 {size[0]:.0f} {size[1]:.0f}" width="{size[0]:.0f}" role="img"'
    return f'{head} aria-label="Confusion of {cells} classes">{"".join(parts)}</g></svg>'


def _names(labels: list[str], cell: int, room: float, top: float, upright: bool) -> str:
    parts = []
    for place, label in enumerate(labels):
        middle = (place + 0.5) * cell
        text = escape(label)
        parts.append(f'<text x="{room - 7:.0f}" y="{top + middle + 4:.1f}" text-anchor="end">{text}</text>')
        if upright:
            parts.append(f'<text x="{room + middle:.1f}" y="{top - 7:.0f}" text-anchor="middle">{text}</text>')
        else:
            turn = f"translate({room + middle + 4:.1f} {top - 7:.0f}) rotate(-90)"
            parts.append(f'<text transform="{turn}">{text}</text>')
    return "".join(parts)


def _cell(row: int, column: int, times: int, share: float, cell: int, cells: int, title: str) -> str:
    look, opacity = "right" if row == column else "wrong", float(strength(np.array(share)))
    x, y = column * cell, row * cell
    place = f'x="{x + 0.5}" y="{y + 0.5}" width="{cell - 1}" height="{cell - 1}"'
    drawn = f'<rect class="{look}" {place} fill-opacity="{opacity:.2f}"/>'
    if cells <= MOST_WRITTEN:
        on = " on" if opacity > 0.55 else ""
        middle = f'x="{x + cell / 2}" y="{y + cell / 2 + 4}"'
        drawn += f'<text class="times{on}" {middle} text-anchor="middle">{times}</text>'
    return f"<g>{drawn}<title>{escape(title)}</title></g>"


def unlabelled(confusion: np.ndarray) -> str:
    """A picture of coloured dots, transparent elsewhere so that it fits a light page and a dark one."""
    share = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    diagonal = np.eye(len(confusion), dtype=bool)
    step = dot_size(len(confusion))
    right = _pooled(np.where(diagonal, strength(share), 0), step)
    wrong = _pooled(np.where(diagonal, 0, strength(share)), step)
    pixels = np.zeros((*right.shape, 4), np.uint8)
    pixels[..., :3] = np.where((right > 0)[..., None], BLUE, ORANGE)
    pixels[..., 3] = np.round(255 * np.where(right > 0, right, wrong))
    source = data_uri(Image.fromarray(pixels), "PNG")
    return f'<img class="dots" src="{source}" alt="Confusion of {len(confusion)} classes">'


def dot_size(classes: int) -> int:
    """How many classes share a row of dots."""
    return -(-classes // SIDE)


def _pooled(values: np.ndarray, step: int) -> np.ndarray:
    """The largest value of each square of step x step cells."""
    starts = np.arange(0, len(values), step)
    return np.maximum.reduceat(np.maximum.reduceat(values, starts, axis=0), starts, axis=1)


def pairs_table(pairs: list[tuple[str, str, int, int]]) -> str:
    if not pairs:
        return '<p class="pairs">No picture was taken for another class.</p>'
    rows = "".join(
        f"<tr><td>{name(true, 32)}</td><td>{name(predicted, 32)}</td>"
        f'<td class="number">{times} of {n}</td>{bar(times / n, "wrong")}</tr>'
        for true, predicted, times, n in pairs
    )
    head = "<th>It was</th><th>taken for</th><th class=number>how often</th><th></th>"
    return f'<div class="pairs scroll"><h3>Most confused</h3>{listing(head, rows)}</div>'


def class_table(report: Graded) -> str:
    """The accuracy of each class with its interval, worst first; if there are many, the better ones are folded away."""
    scores = report.class_scores()
    if not scores:
        return ""
    accuracy = report.headline == "top1"
    rows = [_class_row(label, n, score, accuracy) for label, n, score in scores]
    measure = "recognised" if accuracy else "average precision"
    head = f"<th>Class</th><th class=number>pictures</th><th></th><th class=number>{measure}</th>"
    shown = listing(head, "".join(rows[:MOST_SHOWN]))
    if rest := rows[MOST_SHOWN:]:
        more = f"The other {plural(len(rest), 'class', 'es')}"
        shown += f"<details><summary>{more}</summary>{listing(head, ''.join(rest))}</details>"
    return f'<div class="classes scroll">{shown}</div>'


def listing(head: str, rows: str) -> str:
    return f'<table class="list"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _class_row(label: str, n: int, score: float, accuracy: bool) -> str:
    interval = wilson(score, n) if accuracy else None
    cells = f'<td>{name(label, 48)}</td><td class="number">{count(n)}</td>{bar(score, "right", interval)}'
    return f'<tr>{cells}<td class="number">{percent(score)}</td></tr>'


def bar(share: float, look: str, interval: tuple[float, float] | None = None) -> str:
    """A table cell with a bar from 0 to 100%, and a thin line over the interval."""
    inside = f'<i class="{look}" style="width:{100 * share:.1f}%"></i>'
    if interval:
        low, high = interval
        inside += f'<s style="left:{100 * low:.1f}%;width:{100 * (high - low):.1f}%"></s>'
        said = f' title="95% interval {percent(low)} to {percent(high)}"'
    else:
        said = f' title="{percent(share)}"'
    return f'<td class="bar"{said}><div>{inside}</div></td>'
