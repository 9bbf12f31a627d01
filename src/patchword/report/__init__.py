"""HTML reports: each page is one self-contained file, rendered from the templates in `templates/`."""

from .pages import training_html, write_training_report
from .report_data import Mistake, TrainingReport

__all__ = ["Mistake", "TrainingReport", "training_html", "write_training_report"]
