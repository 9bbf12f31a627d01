"""An inspection from start to end: all panels, and their cost."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..core.runtime import peak_memory
from ..plots.panel import Panel
from .inspection_panels import Subject, make_panels


@dataclass(frozen=True)
class Inspection:
    """All panels, and the cost of computing them."""

    panels: tuple[Panel, ...]
    seconds: float
    peak_bytes: int  # the most memory that the process has had so far; 0 if unknown


def inspect(subject: Subject, on_panel: Callable[[str], object] = lambda title: None) -> Inspection:
    """Compute all panels; `on_panel` is called with the title of each."""
    start = time.perf_counter()
    panels: list[Panel] = []
    for panel in make_panels(subject):
        panels.append(panel)
        on_panel(panel.title)
    return Inspection(tuple(panels), time.perf_counter() - start, peak_memory())
