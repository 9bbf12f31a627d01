"""The paper's experiments in small: grids of training runs that answer one question each."""

from .designs import STUDIES, make_study
from .run import run_study

__all__ = ["STUDIES", "make_study", "run_study"]
