"""Findings: the problems and remarks that `patchword doctor` reports, and their table for a terminal."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from .text import escape_unprintable

if TYPE_CHECKING:
    from rich.table import Table

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

_MAX_DETAILS = 5  # in the table; the JSON output has all of them
_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        severity: An error makes a run fail or its metrics wrong, a warning makes them worse, a note is informative.
        code: What kind of finding it is; stable, while messages may change.
        message: What was found.
        details: What it applies to, such as the names of images.
        advice: What to do about it.
    """

    severity: Severity
    code: str
    message: str
    details: tuple[str, ...] = ()
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON-compatible values."""
        return {**asdict(self), "details": list(self.details)}


def sort_by_severity(findings: list[Finding]) -> list[Finding]:
    """Sort findings, errors first; findings of the same severity keep their order."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def findings_table(findings: list[Finding]) -> "Table":
    """Format findings for a terminal. Markup and control characters in file names are printed, not interpreted."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, show_edge=False, box=None, padding=(0, 2, 1, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in sort_by_severity(findings):
        text = Text(escape_unprintable(finding.message))
        for detail in finding.details[:_MAX_DETAILS]:
            text.append(f"\n  {escape_unprintable(detail)}", style="dim")
        if len(finding.details) > _MAX_DETAILS:
            text.append(f"\n  and {len(finding.details) - _MAX_DETAILS:,} more", style="dim")
        if finding.advice:
            text.append(f"\n{escape_unprintable(finding.advice)}", style="italic")
        table.add_row(Text(finding.severity, style=_STYLES[finding.severity]), text)
    return table
