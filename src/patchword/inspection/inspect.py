"""An inspection from start to end: exhibits made, their figures and arrays written to a folder."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .drawing.theme import LIGHT, drawn_in
from .exhibit import Exhibit
from .exhibits import Subject, exhibits

DPI = 160


@dataclass(frozen=True)
class Found:
    """The exhibits and what computing them cost."""

    exhibits: tuple[Exhibit, ...]
    seconds: float
    peak_bytes: int  # the most memory that the process has had so far; 0: unknown


def inspect(subject: Subject, on_exhibit: Callable[[str], object] = lambda title: None) -> Found:
    """Computes all exhibits."""
    start = time.perf_counter()
    made: list[Exhibit] = []
    for exhibit in exhibits(subject):
        made.append(exhibit)
        on_exhibit(exhibit.title)
    return Found(tuple(made), time.perf_counter() - start, peak_memory())


def write_exhibits(folder: Path, made: Sequence[Exhibit]) -> None:
    """NAME.png, NAME.svg and NAME.npz for each exhibit that was drawn."""
    for exhibit in made:
        if exhibit.draw is None:
            continue
        with drawn_in(LIGHT):
            figure = exhibit.draw()
            figure.savefig(folder / f"{exhibit.name}.png", dpi=DPI)
            figure.savefig(folder / f"{exhibit.name}.svg", metadata={"Date": None})
        np.savez_compressed(folder / f"{exhibit.name}.npz", **exhibit.arrays)  # type: ignore[arg-type]


def peak_memory() -> int:
    """Bytes; 0 where the system does not say."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
