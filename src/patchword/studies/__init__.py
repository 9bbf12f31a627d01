"""Studies: claims of the paper and of what led to it, measured at small scale."""

from .definitions import LINEAGE_STUDIES, STUDIES, make_study
from .lineage_story import run_lineage
from .runner import run_study

__all__ = ["LINEAGE_STUDIES", "STUDIES", "make_study", "run_lineage", "run_study"]
