"""What is wrong with data, a configuration or a machine, found before hours are spent on it."""

from ..config.config_checks import config_notes, examine_config
from ..core.findings import Finding, findings_table
from ..core.runtime import machine_info
from .dataset_checks import examine
from .machine import machine_findings

__all__ = [
    "Finding",
    "config_notes",
    "examine",
    "examine_config",
    "findings_table",
    "machine_info",
    "machine_findings",
]
