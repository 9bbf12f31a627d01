"""One thing that the doctor has to say, and how it is shown."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from .text import visible

if TYPE_CHECKING:
    from rich.table import Table

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

_SHOWN = 5  # places in the table; JSON has them all
_COLOURS = {"error": "bold red", "warning": "yellow", "note": "dim"}


@dataclass(frozen=True)
class Finding:
    """An error makes a run fail or its figures untrue; a warning makes it worse; a note is good to know."""

    severity: Severity
    what: str
    where: tuple[str, ...] = ()
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "where": list(self.where)}


def gravest_first(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def findings_table(findings: list[Finding]) -> "Table":
    """For a terminal. Names are shown as they are: neither markup nor control characters in them have any effect."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, show_edge=False, box=None, padding=(0, 2, 1, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in gravest_first(findings):
        said = Text(visible(finding.what))
        for place in finding.where[:_SHOWN]:
            said.append(f"\n  {visible(place)}", style="dim")
        if len(finding.where) > _SHOWN:
            said.append(f"\n  and {len(finding.where) - _SHOWN:,} more", style="dim")
        if finding.advice:
            said.append(f"\n{visible(finding.advice)}", style="italic")
        table.add_row(Text(finding.severity, style=_COLOURS[finding.severity]), said)
    return table
