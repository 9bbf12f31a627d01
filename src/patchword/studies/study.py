"""What a study is: one question, runs that answer it, and what the paper found."""

from dataclasses import dataclass
from typing import Literal

from ..config import Config


@dataclass(frozen=True)
class Cell:
    """One training run of the grid."""

    series: str  # the line it belongs to
    x: float | str  # where on the axis it stands
    config: Config
    part: float = 1.0  # of the longest run's length

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.series} {self.x}".replace("/", "-").replace(" ", "_").replace(",", "")


@dataclass(frozen=True)
class Study:
    """`equal` says what all runs have as much of: steps, where only the variants should differ; or time, where what a
    model costs is part of the question.
    """

    name: str
    title: str
    question: str
    paper: str  # what the paper found, in our words
    axis: str
    cells: tuple[Cell, ...]
    equal: Literal["steps", "time"]
    logarithmic: bool = False
    by_cost: bool = False  # the axis is the arithmetic that a run has spent, not its x
    limits: str = ""  # what a small run cannot show
