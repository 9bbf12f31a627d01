"""`patchword evaluate`: measure a model on labeled images."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...core.progress import progress
from ...core.text import print_stderr
from ...errors import ConfigError
from ..arguments import arg, positional
from ..labeled_data import load_labeled_images
from ..model_args import (
    NO_OVERRIDES,
    EngineName,
    Flag,
    JsonFlag,
    ModelArgs,
    ModelReference,
    model_title,
    require_trained_head,
)
from ..output import print_evaluation, print_json, report_unreadable, require_new_files

if TYPE_CHECKING:
    from ...evaluation.evaluate import Evaluation
    from ...evaluation.robustness import Robustness
    from ...inference.classifier import Classifier
    from ...inference.inputs import InputImage


def evaluate(
    model: ModelReference,
    data: Annotated[str, positional("DATA")],
    model_args: ModelArgs = NO_OVERRIDES,
    compare_to: Annotated[str | None, arg("MODEL")] = None,
    json: JsonFlag = False,
    csv: Annotated[Path | None, arg("FILE")] = None,
    out: Annotated[Path | None, arg("DIR")] = None,
    corruptions: Flag = False,
    overwrite: Flag = False,
    batch_size: int = 16,
    engine: EngineName = "torch",
) -> int:
    """Measure a model on labeled images, with 95% confidence intervals.

    Example: patchword evaluate runs/photos photos/test --out evaluation

    Args:
        data: folder with one subfolder per class, named by label, WordNet ID or class index; or a dataset, as for
            train, whose test split is used if there is one
        compare_to: second model, evaluated on the same images; a test tells whether the difference is significant
        csv: write the prediction of every image to a CSV file
        out: directory for an HTML report with confusions, reliability diagram, metrics per class and hardest mistakes
        corruptions: also evaluate on images with 15 corruptions at 5 severities, which takes about 75 times as long
        overwrite: replace an existing CSV file and report
        batch_size: number of images per batch, on each core
    """
    if batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, not {batch_size}.")
    require_new_files(csv, overwrite=overwrite)
    from ...evaluation.evaluate import evaluate as evaluate_classifier
    from ...inference.classifier import Classifier
    from ...inference.prediction_csv import write_rows
    from ...report.figure_files import require_empty_dir

    if out:
        require_empty_dir(out, overwrite)
    classifier = model_args.load_classifier(model, engine)
    require_trained_head(classifier.checkpoint)
    if corruptions and classifier.checkpoint.multi_label:
        raise ConfigError("--corruptions does not work with multi-label models.")
    other = Classifier.load(compare_to) if compare_to else None
    models = {model: classifier} | ({str(compare_to): other} if other else {})
    images = load_labeled_images(data, models)
    with progress("evaluating", len(images) * len(models)) as step:
        result = evaluate_classifier(classifier, images, compare_to=other, batch_size=batch_size, on_progress=step)
    if csv:
        write_rows(csv, result.predictions)
        print_stderr(f"wrote {csv}")
    robustness = run_corruptions(classifier, images) if corruptions else None
    if out:
        write_report(out, model, data, classifier, images, result, robustness)
    if json:
        print_json(result.to_json() | ({"corruptions": robustness.to_json()} if robustness else {}))
    else:
        if result.split:
            print(f"split     {result.split}")
        print_evaluation(result, robustness)
    return report_unreadable(result.skipped, len(images))


def run_corruptions(classifier: "Classifier", images: "list[InputImage]") -> "Robustness":
    """Evaluate on corrupted images."""
    from ...evaluation.robustness import measure_robustness

    with progress("corrupting", len(images)) as step:
        return measure_robustness(classifier, images, step)


def write_report(
    out: Path, model: str, data: str, classifier: "Classifier", images: "list[InputImage]", result: "Evaluation",
    robustness: "Robustness | None",
) -> None:  # fmt: skip
    """Write the HTML report."""
    from ...report.figure_files import REPORT_FILE
    from ...report.pages import write_evaluation

    split = f" ({result.split} split)" if result.split else ""
    facts = [
        ("Model", model_title(model)),
        ("Architecture", repr(classifier)),
        ("Data", f"{data}, {len(images):,} images{split}"),
        ("Temperature", f"{classifier.checkpoint.temperature:g}"),
        ("Throughput", f"{result.images_per_second:.1f} images per second"),
    ]
    write_evaluation(out, model_title(model), classifier, images, result, facts, robustness)
    print_stderr(f"wrote {out / REPORT_FILE}")
