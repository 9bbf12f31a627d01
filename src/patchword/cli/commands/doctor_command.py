"""`patchword doctor`: check this machine, a dataset, or a run that stopped."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...core.progress import progress
from ...errors import ConfigError
from ..arguments import positional
from ..model_args import JsonFlag
from ..output import print_busy_note, print_json

if TYPE_CHECKING:
    from ...core.findings import Finding

EXIT_PROBLEMS = 3


def doctor(
    what: Annotated[str | None, positional("[DATA|RUN]")] = None,
    image_size: int = 224,
    patch_size: int = 16,
    json: JsonFlag = False,
) -> int:
    """Check this machine, a dataset before training, or a run that stopped, and suggest what to do.

    Example: patchword doctor photos/ --image-size 224 --patch-size 16

    Args:
        what: a dataset, as for train, or a run directory; by default, this machine is checked
        image_size: image size, in pixels, of the model that you plan to train
        patch_size: patch size, in pixels, of that model
    """
    if min(image_size, patch_size) < 1:
        raise ConfigError("--image-size and --patch-size must be at least 1.")
    findings = diagnose(what, (image_size, image_size), (patch_size, patch_size))
    if json:
        print_json([finding.to_json() for finding in findings])
    elif findings:
        from rich.console import Console

        from ...core.findings import findings_table

        Console().print(findings_table(findings))
    else:
        print("No problems found.")
    return EXIT_PROBLEMS if any(finding.severity != "note" for finding in findings) else 0


def diagnose(what: str | None, image_size: tuple[int, int], patch_size: tuple[int, int]) -> "list[Finding]":
    """Return the findings on this machine (None), a run directory or a dataset."""
    from ...config import DataConfig
    from ...data.resolve import open_data
    from ...doctor import examine, examine_run, machine_findings
    from ...engines.engine import ENGINES
    from ...training.run_dir import CONFIG_FILE

    if what is None:
        print_busy_note()
        with progress("testing engines", len(ENGINES)) as step:
            return [*machine_findings(), precision_finding(), *engine_findings(step)]
    if (Path(what) / CONFIG_FILE).is_file():
        return examine_run(Path(what))
    splits = open_data(DataConfig(source=what), seed=0)
    with progress("examining", sum(map(len, splits.as_dict().values()))) as step:
        return examine(splits, image_size=image_size, patch_size=patch_size, on_progress=step)


def precision_finding() -> "Finding":
    """Report whether bf16 works and is used, as measured in a subprocess."""
    from ...core.findings import Finding
    from ...engines.capabilities import probe_capabilities
    from ...training.precision import MIN_BF16_SPEEDUP

    capabilities = probe_capabilities()
    if not capabilities.bf16_works:
        what = "bf16 does not work on this CPU: the test crashed"
        return Finding("note", "precision", what, (), "patchword computes in fp32.")
    speedup = capabilities.bf16_speedup
    advice = "It is used." if speedup > MIN_BF16_SPEEDUP else "It is not used."
    return Finding("note", "precision", f"a bf16 matmul runs at {speedup:.2g} times the speed of fp32", (), advice)


def engine_findings(on_progress: Callable[[], object]) -> "list[Finding]":
    """Report which engines work, the fastest first, as tested in subprocesses."""
    from ...core.findings import Finding
    from ...engines.engine import ENGINES
    from ...engines.engine_trials import run_trials

    results = run_trials(on_progress=on_progress)
    torch_result = results["torch"]
    findings = []
    for result in sorted(results.values(), key=lambda result: (not result.works, -result.throughput_batch_16)):
        summary = f"engine {result.name} is not used: {result.reason}"
        if result.works:
            speeds = f"{result.throughput_batch_1:.0f} images/s at batch size 1, {result.throughput_batch_16:.0f} at 16"
            summary = f"engine {result.name} works: {speeds}"
            if torch_result.works and result is not torch_result:
                summary += f" ({result.throughput_batch_16 / torch_result.throughput_batch_16:.2g} times torch)"
        findings.append(Finding("note", "engine", summary, (ENGINES[result.name].description,)))
    advice = "--engine auto measures your model. int8 changes predictions slightly: patchword bench shows how much."
    what = "engines were tested with a ViT of 3 blocks of width 384"
    return [*findings, Finding("note", "engine_trials", what, (), advice)]
