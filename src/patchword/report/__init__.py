"""One self-contained HTML page out of a run: what was trained, how it went, how good it is, and where it fails."""

from .content import Mistake, Report
from .page import report_html, write_report

__all__ = ["Mistake", "Report", "report_html", "write_report"]
