"""One self-contained HTML page out of a run: what was trained, how it went, how good it is, and where it fails."""

from .content import Mistake, Report, wilson
from .page import report_html, write_report

__all__ = ["Mistake", "Report", "report_html", "wilson", "write_report"]
