"""The paper's experiments in small: grids of training runs that answer one question each."""

from .definitions import STUDIES, make_study
from .runner import run_study

__all__ = ["STUDIES", "make_study", "run_study"]
