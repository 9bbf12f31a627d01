"""`patchword bench`: compare the inference engines on this machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...core.progress import progress
from ...core.text import print_stderr
from ...errors import ConfigError
from ..arguments import arg
from ..labeled_data import load_labeled_images
from ..model_args import MODEL_ARG, NO_OVERRIDES, Flag, JsonFlag, ModelArgs, model_title
from ..output import print_busy_note, print_json, print_table, report_unreadable

if TYPE_CHECKING:
    from ...checkpoints import Checkpoint
    from ...engines.bench import EngineBench
    from ...inference.inputs import InputImage, UnreadableImage


def bench(
    model: Annotated[str, MODEL_ARG] = "patchword:cifar10",
    model_args: ModelArgs = NO_OVERRIDES,
    engines: Annotated[tuple[str, ...], arg("NAME...")] = (),
    seconds: float = 5.0,
    verify: Annotated[str | None, arg("DATA")] = None,
    json: JsonFlag = False,
    out: Annotated[Path | None, arg("DIR")] = None,
    overwrite: Flag = False,
) -> int:
    """Compare the inference engines on this machine: latency, throughput, memory, and parity with PyTorch.

    Example: patchword bench hf:google/vit-base-patch16-224

    Args:
        engines: engines to measure, e.g. torch onnx-int8; by default, all that work on this machine
        seconds: seconds per engine and batch size; keep the machine otherwise idle
        verify: labeled images, as for evaluate, on which the accuracy of each engine is measured
        out: directory for an HTML report with the table and a figure of accuracy against speed
        overwrite: replace an existing report
    """
    if seconds <= 0:
        raise ConfigError(f"--seconds must be above 0, not {seconds:g}.")
    from ...engines.bench import BATCH_SIZES, bench_engines
    from ...engines.parity import held_out_images
    from ...report.figure_files import require_empty_dir

    check_engine_names(engines)
    print_busy_note()
    if out:
        require_empty_dir(out, overwrite)
    classifier = model_args.load_classifier(model)
    images = load_labeled_images(verify, {model: classifier})
    names = find_working_engines(engines)
    with progress("measuring", len(names) + len(BATCH_SIZES)) as step:
        samples = held_out_images(classifier.preprocess)
        rows = bench_engines(classifier.checkpoint, names, samples, seconds, on_progress=step)
    working = [row.name for row in rows if not row.error]
    if not working:
        raise ConfigError(f"None of these engines can run this model. {rows[0].name}: {rows[0].error}")
    accuracy, unreadable = measure_accuracy(classifier.checkpoint, working, images)
    print_result(rows, accuracy, json)
    if out:
        write_report(out, model, rows, accuracy)
    return report_unreadable(unreadable, len(images))


def check_engine_names(names: Sequence[str]) -> None:
    """Reject names of engines that do not exist."""
    from ...engines.engine import ENGINES

    if unknown := sorted(set(names) - set(ENGINES)):
        raise ConfigError(f"--engines: there is no engine {unknown[0]!r}. Choose from {', '.join(ENGINES)}.")


def find_working_engines(names: Sequence[str]) -> list[str]:
    """Test engines (all if no names are given) and return those that work; the others are reported."""
    from ...engines.engine import ENGINES
    from ...engines.engine_trials import run_trials

    names = names or tuple(ENGINES)
    with progress("testing engines", len(names)) as step:
        results = run_trials(names, step)
    for result in results.values():
        if not result.works:
            print_stderr(f"{result.name} does not work on this machine: {result.reason}")
    working = [name for name, result in results.items() if result.works]
    if not working:
        raise ConfigError("None of these engines works on this machine.")
    return working


def measure_accuracy(
    checkpoint: "Checkpoint", names: list[str], images: "list[InputImage]"
) -> "tuple[dict[str, float], list[UnreadableImage]]":
    """Return the accuracy of each engine (mAP of multi-label models), and the images that could not be read."""
    from ...evaluation.evaluate import evaluate
    from ...inference.classifier import Classifier

    metric = "map" if checkpoint.multi_label else "top1"
    accuracy: dict[str, float] = {}
    unreadable: list[UnreadableImage] = []
    for name in names if images else []:
        with progress(name, len(images)) as step:
            result = evaluate(Classifier(checkpoint, name), images, on_progress=step)
        accuracy[name], unreadable = float(result.metrics[metric]), result.skipped
    return accuracy, unreadable


def print_result(rows: "list[EngineBench]", accuracy: dict[str, float], json: bool) -> None:
    """Print the measurements as a table or as JSON."""
    from ...report.bench_results import bench_table

    if not json:
        print_table(bench_table(rows, accuracy))
        return
    print_json([
        row.to_json() | ({"accuracy": accuracy[row.name]} if row.name in accuracy else {}) for row in rows
    ])  # fmt: skip


def write_report(out: Path, model: str, rows: "list[EngineBench]", accuracy: dict[str, float]) -> None:
    """Write the HTML report."""
    from ...core.runtime import machine_summary
    from ...report.figure_files import REPORT_FILE
    from ...report.pages import write_bench

    facts = [("Model", model_title(model)), ("Machine", machine_summary())]
    write_bench(out, model_title(model), facts, rows, accuracy)
    print_stderr(f"wrote {out / REPORT_FILE}")
