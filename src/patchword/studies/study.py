"""What a study is: a question, a grid of training runs that answers it, and what the paper found."""

from dataclasses import dataclass
from typing import Literal

from ..config import Config


@dataclass(frozen=True)
class Cell:
    """One training run of the grid.

    Attributes:
        series: The line of the figure that the run belongs to.
        x: Its position on the x axis.
        config: Its configuration.
        length: Its length as a fraction of the longest run.
    """

    series: str
    x: float | str
    config: Config
    length: float = 1.0

    @property
    def name(self) -> str:
        """The name of the run's directory, without the seed."""
        return f"{self.series} {self.x}".replace("/", "-").replace(" ", "_").replace(",", "")


@dataclass(frozen=True)
class Study:
    """A grid of training runs.

    Attributes:
        name: The name on the command line.
        title: The title of the report.
        question: What the study asks.
        paper: What the paper found.
        axis: The label of the x axis.
        cells: The runs.
        equal: What all runs have in common: "steps", if only the variants should differ; "time", if the cost of a model
            is part of the question.
        logarithmic: Whether the x axis is logarithmic.
        by_cost: Whether the x axis is the training compute instead of `Cell.x`.
        limits: What runs of this size cannot show.
    """

    name: str
    title: str
    question: str
    paper: str
    axis: str
    cells: tuple[Cell, ...]
    equal: Literal["steps", "time"]
    logarithmic: bool = False
    by_cost: bool = False
    limits: str = ""
