"""One figure of an inspection: how it is drawn, its arrays, and what is to be seen in it, here and in the paper."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Exhibit:
    """`draw` is None where the figure makes no sense for this model; `seen` then says why."""

    name: str  # of its files
    title: str
    seen: str
    paper: str = ""
    draw: "Callable[[], Figure] | None" = None
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    table: tuple[tuple[str, ...], ...] = ()  # the first row is the head

    @classmethod
    def absent(cls, name: str, title: str, why: str) -> "Exhibit":
        return cls(name, title, why)
