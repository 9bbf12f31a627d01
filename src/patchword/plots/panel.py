"""A panel of a report: a figure with its caption, arrays and table."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .theme import Theme


@dataclass(frozen=True)
class Panel:
    """A figure with its caption. If `draw` and `svg` are None, the model has no such figure; the caption says why."""

    name: str  # of the files
    title: str
    caption: str
    paper: str = ""  # what the paper's figure shows
    draw: "Callable[[], Figure] | None" = None
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    table: tuple[tuple[str, ...], ...] = ()  # the first row is the header
    svg: "Callable[[Theme], str] | None" = None  # instead of `draw`, for labels in scripts that matplotlib cannot draw
    figures: "dict[Theme, Figure]" = field(default_factory=dict)  # those drawn so far

    @classmethod
    def absent(cls, name: str, title: str, reason: str) -> "Panel":
        """A panel without a figure."""
        return cls(name, title, reason)

    def figure(self, theme: "Theme") -> "Figure":
        """Draws the figure once per theme, with a fixed layout: it is saved in several sizes, and layout is slow."""
        from .theme import use_theme

        if theme not in self.figures:
            assert self.draw is not None
            with use_theme(theme):
                figure = self.draw()
                figure.draw_without_rendering()  # computes the layout
                figure.set_layout_engine("none")
            self.figures[theme] = figure
        return self.figures[theme]
