"""Checks of a dataset, a configuration, a run or a machine, before hours are spent on it."""

from ..config.config_checks import config_notes, examine_config
from ..core.findings import Finding, findings_table
from ..core.runtime import machine_info
from .dataset_checks import examine
from .machine import machine_findings
from .run_checks import examine_run

__all__ = [
    "Finding",
    "config_notes",
    "examine",
    "examine_config",
    "examine_run",
    "findings_table",
    "machine_findings",
    "machine_info",
]
