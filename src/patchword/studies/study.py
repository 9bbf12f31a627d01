"""What a study is: a question, a grid of runs that answers it, and what the paper found."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, Protocol, TypedDict

from ..config import Config
from ..plots.panel import Panel


class Experiment(Protocol):
    """What a cell runs if that is not the training of an image model: a text model, a GAN, or a measurement."""

    def to_json(self) -> dict[str, Any]:
        """Its settings, which identify it when a study is resumed."""

    def time_step(self, now: Callable[[], float]) -> tuple[float, float]:
        """Measure the seconds of a training step, and estimate those that a run needs besides its steps."""

    def run(self, seed: int, length: "Length", now: Callable[[], float]) -> dict[str, Any]:
        """Run it, and return the fields of its row. Raises a TrainingError "not_finite" if it diverges."""


@dataclass(frozen=True)
class Length:
    """How long a run is: a number of steps, or seconds."""

    steps: int | None = None
    seconds: float | None = None


class ResultRow(TypedDict):
    """The result of one run; a run that diverged has an accuracy of None, and the reason."""

    cell: str
    series: str
    x: float | str
    seed: int
    accuracy: float | None
    diverged: NotRequired[str]
    split: NotRequired[str]
    nll: NotRequired[float]
    n: NotRequired[int]
    steps: NotRequired[int]
    epochs: NotRequired[float]
    seconds: NotRequired[float]
    tflop: NotRequired[float]
    parameters: NotRequired[int]
    value: NotRequired[float]  # of a measurement without accuracy
    details: NotRequired[dict[str, Any]]  # what the study's own figures show


Means = list[dict[str, Any]]  # of each cell over its seeds: series, x, accuracy (None if all diverged), spread, cost


@dataclass(frozen=True)
class Cell:
    """One run of the grid.

    Attributes:
        series: The line of the figure that the run belongs to.
        x: Its position on the x axis.
        config: The configuration of a training run, or another experiment.
        length: Its length as a fraction of the longest run.
    """

    series: str
    x: float | str
    config: Config | Experiment
    length: float = 1.0

    @property
    def name(self) -> str:
        """The name of the run's directory, without the seed."""
        return f"{self.series} {self.x}".replace("/", "-").replace(" ", "_").replace(",", "")


@dataclass(frozen=True)
class Study:
    """A grid of runs.

    Attributes:
        name: The name on the command line.
        title: The title of the report.
        question: What the study asks.
        paper: What the paper found.
        axis: The label of the x axis.
        cells: The runs.
        equal: What all runs have in common: "steps", if only the variants should differ; "time", if the cost of a model
            is part of the question; "nothing", if nothing is trained.
        logarithmic: Whether the x axis is logarithmic.
        by_cost: Whether the x axis is the training compute instead of `Cell.x`.
        limits: What runs of this size cannot show.
        min_steps: The fewest steps of a run after which there is something to compare, if runs have equal steps.
        measured: What the accuracy is the fraction of, if not of the images of a test set.
        summarize: Writes the caption of the figure of the accuracy; by default, it names the best and the worst cell.
        panels: Makes the figures from the rows; by default, there is one of the accuracy.
    """

    name: str
    title: str
    question: str
    paper: str
    axis: str
    cells: tuple[Cell, ...]
    equal: Literal["steps", "time", "nothing"]
    logarithmic: bool = False
    by_cost: bool = False
    limits: str = ""
    min_steps: int = 30
    measured: str = ""
    summarize: Callable[[Means], str] | None = None
    panels: Callable[["Study", Sequence[ResultRow]], list[Panel]] | None = None
