"""What is wrong with data, a configuration or a machine, found before hours are spent on it."""

from ...core.runtime import machine_facts
from .checks import examine
from .finding import Finding, findings_table
from .machine import machine_findings
from .settings import config_notes, examine_config

__all__ = [
    "Finding",
    "config_notes",
    "examine",
    "examine_config",
    "findings_table",
    "machine_facts",
    "machine_findings",
]
