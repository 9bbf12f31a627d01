"""Images and figures inside a page, as data URIs; a figure is drawn for light and for dark screens."""

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from ..plots.panel import Panel

if TYPE_CHECKING:
    from ..plots.theme import Theme

DPI = 110
WIDE = 700  # pixels: a wider figure is scrolled on a phone, since its text would be unreadable if it shrank
PNG_COLORS = 6000


@dataclass(frozen=True)
class RenderedPanel:
    """A figure with its title, what it shows, the paper's finding, and a table whose first row is the header."""

    title: str
    caption: str
    paper: str
    light: str
    dark: str
    wide: bool
    table: Sequence[Sequence[str]]


def render_panels(panels: Sequence[Panel]) -> list[RenderedPanel]:
    """A panel for each figure that applies to this model."""
    return [render_panel(each) for each in panels if each.draw or each.svg]


def render_panel(panel: Panel) -> RenderedPanel:
    """Draw a figure in both color schemes."""
    from ..plots.theme import DARK, LIGHT  # imports matplotlib, which a training report does not need

    (dark, _), (light, width) = ((render_svg if panel.svg else render)(panel, theme) for theme in (DARK, LIGHT))
    return RenderedPanel(panel.title, panel.caption, panel.paper, light, dark, width > WIDE, panel.table)


def render(panel: Panel, theme: "Theme") -> tuple[str, int]:
    """The figure as a data URI, and its width in pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from ..plots.theme import use_theme

    figure = panel.figure(theme)
    with use_theme(theme):
        figure.set_dpi(DPI)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    return data_uri(image, "PNG" if has_few_colors(image) else "JPEG"), image.width


def render_svg(panel: Panel, theme: "Theme") -> tuple[str, int]:
    """The figure as a data URI, and its width in pixels."""
    assert panel.svg is not None
    svg = panel.svg(theme)
    width = re.search(r'width="(\d+)"', svg)
    assert width is not None
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}", int(width[1])


def has_few_colors(image: Image.Image) -> bool:
    """Whether these are lines and flat areas, which PNG keeps sharp and small; photos are stored as JPEG."""
    pixels = np.asarray(image).reshape(-1, 3)[::7]
    return len(np.unique(pixels, axis=0)) < PNG_COLORS


def data_uri(image: Image.Image, kind: str) -> str:
    """Encode an image as PNG or JPEG inside a URI."""
    file = io.BytesIO()
    image.save(file, kind, **({"quality": 82} if kind == "JPEG" else {"compress_level": 6}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
