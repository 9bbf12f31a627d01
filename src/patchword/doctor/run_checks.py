"""What is wrong with a run: steps with NaN or Inf, an unusual configuration, and whether it can be resumed."""

from dataclasses import replace
from pathlib import Path

from ..config.config_checks import examine_config
from ..core.findings import Finding, sort_by_severity
from ..errors import CheckpointError
from ..training.checkpointing import CheckpointStore
from ..training.nan_guard import replay
from ..training.run_dir import is_finished, read_config

MAX_SAMPLES = 10  # of a batch that a finding lists


def examine_run(run_dir: Path) -> list[Finding]:
    """Examine a run directory, and compute each step that produced NaN or Inf again."""
    findings = [replace(finding, severity="note") for finding in examine_config(read_config(run_dir))]
    folders = sorted((run_dir / "faults").glob("step-*"))
    findings += [examine_fault(folder) for folder in folders]
    if not is_finished(run_dir):
        findings.append(examine_progress(run_dir))
    return sort_by_severity(findings)


def examine_fault(folder: Path) -> Finding:
    """Replay a step that produced NaN or Inf."""
    fault, location = replay(folder)
    recorded = str(fault.location) if fault.location else "unknown location"
    if location == fault.location:
        outcome = "computed again, the result is the same"
    else:
        outcome = f"computed again, the result differs: {location or 'all values are finite'}"
    return Finding(
        "error",
        "fault_reproduced" if location == fault.location else "fault_not_reproduced",
        f"Step {fault.step + 1} produced NaN or Inf ({recorded}); {outcome}.",
        tuple(fault.samples[:MAX_SAMPLES]),
        "Look at these images. Lower optim.lr, set optim.clip_grad_norm, or use fp32.",
    )


def examine_progress(run_dir: Path) -> Finding:
    """Say from which checkpoint an unfinished run resumes; damaged checkpoints are a warning."""
    try:
        loaded = CheckpointStore(run_dir, keep_last=1).load()
    except CheckpointError as error:
        return Finding("error", "no_intact_checkpoint", str(error))
    advice = f"Continue it with: patchword resume {run_dir}"
    if loaded is None:
        what = "The run is not finished and has no checkpoint yet: it starts from step 0."
        return Finding("note", "unfinished_run", what, (), advice)
    what = f"The run is not finished. Its last intact checkpoint is that of step {loaded.snapshot.step}."
    if loaded.notes:
        return Finding("warning", "damaged_checkpoints", what, tuple(loaded.notes), advice)
    return Finding("note", "unfinished_run", what, (), advice)
