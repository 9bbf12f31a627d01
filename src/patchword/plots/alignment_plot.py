"""Alignment heat maps: which source tokens a decoder attended to while it wrote each token, as SVG.

The labels are words of any language. matplotlib's font has no Hangul, and a browser has fonts for every script, so
these figures are SVG with text elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .theme import Theme

CELL, GAP, PADDING = 26, 3, 14  # pixels
TITLE_SIZE, LABEL_SIZE = 15, 14
FONTS = "'Noto Sans KR','Noto Sans CJK KR','Apple SD Gothic Neo','Malgun Gothic','Segoe UI',system-ui,sans-serif"
LETTER_WIDTH, WIDE_LETTER = 0.58, 1.0  # of a character, relative to the font size
MAX_WIDTH = 760  # of a row of maps


@dataclass(frozen=True)
class AlignmentMap:
    """One heat map: the weight of each source token (column) for each token of the output (row)."""

    title: str
    source: Sequence[str]
    output: Sequence[str]
    weights: Sequence[Sequence[float]]

    @property
    def left(self) -> float:
        """Width of the row labels."""
        return max((text_width(token, LABEL_SIZE) for token in self.output), default=0) + PADDING

    @property
    def top(self) -> float:
        """Height of the title and the column labels, which are written upwards."""
        return TITLE_SIZE + 2 * PADDING + max(text_width(token, LABEL_SIZE) for token in self.source)

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in pixels."""
        width = self.left + len(self.source) * (CELL + GAP)
        return max(width, text_width(self.title, TITLE_SIZE)) + PADDING, self.top + len(self.output) * (CELL + GAP)


def text_width(text: str, size: float) -> float:
    """Estimate the width of a text in pixels: Hangul and other wide characters are as wide as the font is high."""
    return size * sum(WIDE_LETTER if ord(letter) > 0x1100 else LETTER_WIDTH for letter in text)


def alignment_svg(maps: Sequence[AlignmentMap], theme: Theme) -> str:
    """Draw heat maps side by side, in as many rows as they need."""
    x, y, row_height, width = PADDING, PADDING, 0.0, 0.0
    parts = []
    for each in maps:
        map_width, map_height = each.size
        if x > PADDING and x + map_width > MAX_WIDTH:
            x, y, row_height = PADDING, int(y + row_height + 2 * PADDING), 0.0
        parts.append(f'<g transform="translate({x:.0f} {y:.0f})">{draw_map(each, theme)}</g>')
        x, row_height = int(x + map_width + PADDING), max(row_height, map_height)
        width = max(width, x)
    height = y + row_height + PADDING
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="{FONTS}" fill="{theme.text_color}">'
        f'<rect width="100%" height="100%" fill="{theme.background}"/>{"".join(parts)}</svg>'
    )


def draw_map(each: AlignmentMap, theme: Theme) -> str:
    """One heat map: title, column labels, and a row of cells for each token of the output."""
    left, top = each.left, each.top
    parts = [f'<text y="{TITLE_SIZE}" font-size="{TITLE_SIZE}" font-weight="600">{escape(each.title)}</text>']
    for column, token in enumerate(each.source):
        x, y = left + column * (CELL + GAP) + CELL / 2 + LABEL_SIZE / 3, top - GAP - 4
        label = f'<text transform="translate({x:.1f} {y:.1f}) rotate(-90)" font-size="{LABEL_SIZE}"'
        parts.append(f'{label} fill="{theme.muted}">{escape(token)}</text>')
    for row, (token, weights) in enumerate(zip(each.output, each.weights, strict=True)):
        y = top + row * (CELL + GAP)
        label = f'<text x="{left - 8:.1f}" y="{y + CELL / 2 + LABEL_SIZE / 3:.1f}" text-anchor="end"'
        parts.append(f'{label} font-size="{LABEL_SIZE}">{escape(token)}</text>')
        parts += [draw_cell(left + column * (CELL + GAP), y, weight, theme) for column, weight in enumerate(weights)]
    return "".join(parts)


def draw_cell(x: float, y: float, weight: float, theme: Theme) -> str:
    """A square whose color is the stronger, the larger the weight; its tooltip is the number."""
    square = f'<rect x="{x:.1f}" y="{y:.1f}" width="{CELL}" height="{CELL}" rx="4"'
    empty, full = f'{square} fill="{theme.grid_color}" opacity="0.5"/>', ""
    if weight >= 0.005:
        full = f'{square} fill="{theme.series[0]}" opacity="{min(1.0, weight):.2f}"><title>{weight:.2f}</title></rect>'
    return empty + full
