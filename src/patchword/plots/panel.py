"""One figure of a page: how it is drawn, its arrays, and what is to be seen in it, here and in the paper."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .theme import Theme


@dataclass(frozen=True)
class Panel:
    """`draw` is None where the figure makes no sense for this model; `caption` then says why."""

    name: str  # of its files
    title: str
    caption: str
    paper: str = ""
    draw: "Callable[[], Figure] | None" = None
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    table: tuple[tuple[str, ...], ...] = ()  # the first row is the head
    figures: "dict[Theme, Figure]" = field(default_factory=dict)  # drawn so far

    @classmethod
    def absent(cls, name: str, title: str, why: str) -> "Panel":
        return cls(name, title, why)

    def figure(self, theme: "Theme") -> "Figure":
        """Drawn once in each colouring, and laid out once: it is saved in several sizes, and laying out is slow."""
        from .theme import use_theme

        if theme not in self.figures:
            assert self.draw is not None
            with use_theme(theme):
                figure = self.draw()
                figure.draw_without_rendering()  # which lays it out
                figure.set_layout_engine("none")
            self.figures[theme] = figure
        return self.figures[theme]
