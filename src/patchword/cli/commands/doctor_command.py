"""`patchword doctor`: what is found about data, a run that stopped, or this machine, on the screen or as JSON."""

import json
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from ...config import DataConfig
from ...data.resolve import open_data
from ...doctor import Finding, examine, examine_run, findings_table, machine_findings
from ...engines.capabilities import probe_capabilities
from ...engines.engine import ENGINES
from ...engines.engine_trials import run_trials
from ...training.precision import MIN_BF16_SPEEDUP
from ...training.run_dir import CONFIG_FILE
from ..output import progress


def consult(what: str | None, image_size: tuple[int, int], patch_size: tuple[int, int], as_json: bool) -> int:
    """Prints what was found; 3 if there are errors or warnings, else 0."""
    if what is None:
        with progress("trying engines", len(ENGINES)) as step:
            findings = [*machine_findings(), precision(), *engines(step)]
    elif (Path(what) / CONFIG_FILE).is_file():
        findings = examine_run(Path(what))
    else:
        parts = open_data(DataConfig(source=what), seed=0)
        with progress("examining", sum(map(len, parts.as_dict().values()))) as step:
            findings = examine(parts, image_size=image_size, patch_size=patch_size, on_progress=step)
    if as_json:
        print(json.dumps([finding.to_json() for finding in findings], indent=2))
    elif findings:
        Console().print(findings_table(findings))
    else:
        print("Nothing is wrong.")
    return 3 if any(finding.severity != "note" for finding in findings) else 0


def precision() -> Finding:
    """A verdict of a child process, not what the processor announces."""
    seen = probe_capabilities()
    if not seen.bf16_works:
        return Finding("note", "bf16 does not work here: a trial did not survive", (), "patchword computes in fp32.")
    used = "is used" if seen.bf16_speedup > MIN_BF16_SPEEDUP else "is not used"
    return Finding("note", f"a bf16 product runs at {seen.bf16_speedup:.2g} times the speed of fp32", (), f"It {used}.")


def engines(on_progress: Callable[[], object]) -> list[Finding]:
    """What trials in processes of their own said of each engine, the fastest first."""
    verdicts = run_trials(on_progress=on_progress)
    base = verdicts["torch"]
    working = sorted((each for each in verdicts.values() if each.works), key=lambda each: -each.throughput_batch_16)
    findings = []
    for each in working:
        speed = f"{each.throughput_batch_1:.0f} pictures a second one at a time, {each.throughput_batch_16:.0f} in batches"
        gain = f" ({each.throughput_batch_16 / base.throughput_batch_16:.2g} times torch)" if base.works and each is not base else ""
        findings.append(Finding("note", f"engine {each.name} works: {speed}{gain}", (ENGINES[each.name].description,)))
    for each in verdicts.values():
        if not each.works:
            findings.append(Finding("note", f"engine {each.name} is not used: {each.reason}", (ENGINES[each.name].description,)))
    advice = "--engine auto measures with your model. int8 changes answers a little: patchword bench shows how much."
    return [*findings, Finding("note", "engines were tried with a ViT of 3 blocks, 384 wide", (), advice)]
