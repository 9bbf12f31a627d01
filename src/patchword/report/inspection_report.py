"""An inspection from start to end: all exhibits made, and what that cost."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..core.runtime import peak_memory
from ..plots.panel import Panel
from .inspection_panels import Subject, exhibits


@dataclass(frozen=True)
class Found:
    """The exhibits and what computing them cost."""

    exhibits: tuple[Panel, ...]
    seconds: float
    peak_bytes: int  # the most memory that the process has had so far; 0: unknown


def inspect(subject: Subject, on_exhibit: Callable[[str], object] = lambda title: None) -> Found:
    """Computes all exhibits."""
    start = time.perf_counter()
    made: list[Panel] = []
    for exhibit in exhibits(subject):
        made.append(exhibit)
        on_exhibit(exhibit.title)
    return Found(tuple(made), time.perf_counter() - start, peak_memory())
