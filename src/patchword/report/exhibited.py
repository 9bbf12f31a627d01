"""A figure on a page: in two colourings, with a sentence on what one sees and one on what the paper saw."""

from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from ..figures.exhibit import Exhibit
from ..figures.theme import DARK, LIGHT, Theme, drawn_in
from .confusion import listing
from .document import section
from .pictures import data_uri
from .text import escape

DPI, WIDE = 110, 700


def shown(exhibits: Sequence[Exhibit]) -> str:
    """A section for each that is drawn."""
    return "".join(section(escape(each.title), figure(each), lead=each.seen) for each in exhibits if each.draw)


def figure(exhibit: Exhibit) -> str:
    """The figure in two colourings, of which the browser takes the one that suits; its table; and the paper's word."""
    (dark, _), (light, width) = (picture(exhibit, theme) for theme in (DARK, LIGHT))
    source = f'<source media="screen and (prefers-color-scheme:dark)" srcset="{dark}">'
    look = ' class="wide"' if width > WIDE else ""  # on a phone it is scrolled, since shrunk it could not be read
    image = f'<img{look} src="{light}" alt="{escape(exhibit.title)}. {escape(exhibit.seen)}">'
    paper = f"<p>{escape(exhibit.paper)}</p>" if exhibit.paper else ""
    aside = '<p class="aside">Wider than this screen: push it sideways.</p>' if look else ""
    drawn = f'<figure class="drawn"><div class="scroll"><picture>{source}{image}</picture></div>{aside}{paper}</figure>'
    return drawn + table(exhibit.table)


def picture(exhibit: Exhibit, theme: Theme) -> tuple[str, int]:
    """A data URI, and its width in pixels."""
    figure = exhibit.figure(theme)
    with drawn_in(theme):
        figure.set_dpi(DPI)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    return data_uri(image, "PNG" if few_colours(image) else "JPEG"), image.width


def few_colours(image: Image.Image) -> bool:
    """Lines and flat tiles, which PNG keeps sharp and small; photographs go to JPEG."""
    pixels = np.asarray(image).reshape(-1, 3)[::7]
    return len(np.unique(pixels, axis=0)) < 6000


def table(rows: Sequence[Sequence[str]]) -> str:
    """Of plain text; the first row is the head."""
    if not rows:
        return ""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    lines = "".join("<tr>" + "".join(cells(line)) + "</tr>" for line in rows[1:])
    return f'<div class="scroll">{listing(head, lines)}</div>'


def cells(line: Sequence[str]) -> list[str]:
    return [f"<td>{escape(line[0])}</td>", *(f'<td class="number">{escape(cell)}</td>' for cell in line[1:])]
