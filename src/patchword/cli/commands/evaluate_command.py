"""The command that measures a model: evaluate."""

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import OmitArgPrefixes, Positional

from ...errors import ConfigError
from ..model_args import NO_OVERRIDES, EngineName, Flag, ModelReference, ModelArgs, model_title, arg
from ..output import print_evaluation, progress, report_unreadable, print_status

if TYPE_CHECKING:
    from ...evaluation.evaluate import Evaluation, LabeledImage
    from ...evaluation.robustness import Robustness
    from ...inference.classifier import Classifier


def evaluate(
    model: ModelReference,
    data: Annotated[Positional[str], arg("DATA")],
    reading: OmitArgPrefixes[ModelArgs] = NO_OVERRIDES,
    against: Annotated[str | None, arg("MODEL")] = None,
    json: Flag = False,
    csv: Annotated[Path | None, arg("FILE")] = None,
    out: Annotated[Path | None, arg("DIR")] = None,
    corruptions: Flag = False,
    overwrite: Flag = False,
    batch_size: int = 16,
    engine: EngineName = "torch",
) -> int:
    """Measure a model on labelled pictures, with 95 % intervals.

    Example: patchword evaluate model.npz imagenet/val --json

    Args:
        data: DATA/CLASS/*.jpg with folders named by label, WordNet id or index; or a data set such as cifar10
        against: another model, for the same pictures: is the first really better?
        json: one JSON document on standard output, nothing else
        csv: write every prediction into a table
        out: folder for a page: confusions, reliability diagram, classes, hardest mistakes
        corruptions: also measure on pictures made worse in 15 ways, at five severities: 75 times the work
        overwrite: replace the table and the page if they are there
        batch_size: pictures that go through the model together, on each core
    """
    if batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, not {batch_size}.")
    if csv and csv.exists() and not overwrite:
        raise ConfigError(f"{csv} exists already. Choose another name, or add --overwrite.")
    from ...evaluation.evaluate import evaluate as measure
    from ...evaluation.evaluate import labeled_images
    from ...inference.classifier import Classifier
    from ...inference.prediction_csv import write_rows
    from ...report.figure_files import require_empty_dir

    if out:
        require_empty_dir(out, overwrite)
    checkpoint = reading.read(model)
    if corruptions and checkpoint.multi_label:
        raise ConfigError("--corruptions goes with models that give one class for each picture.")
    pictures = labeled_images(data, checkpoint.multi_label)
    classifier, other = Classifier(checkpoint, engine), Classifier.load(against) if against else None
    if engine == "auto":
        print_status(f"engine: {classifier.chosen}")
    check_labels(classifier, model, pictures)
    if other is not None:
        check_labels(other, str(against), pictures)
    with progress("evaluating", len(pictures) * (2 if other else 1)) as step:
        result = measure(classifier, pictures, against=other, batch_size=batch_size, on_progress=step)
    if csv:
        write_rows(csv, result.rows)
        print_status(f"wrote {csv}")
    robust = made_worse(classifier, pictures) if corruptions else None
    if out:
        write_evaluation_page(out, model, data, classifier, pictures, result, robust)
    print_result(result, robust, pictures[0].part, json)
    return report_unreadable(result.skipped, len(pictures))


def made_worse(classifier: "Classifier", pictures: "list[LabeledImage]") -> "Robustness":
    from ...evaluation.robustness import robustness

    with progress("making worse", len(pictures)) as step:
        return robustness(classifier, pictures, step)


def print_result(result: "Evaluation", robust: "Robustness | None", part: str, json: bool) -> None:
    if json:
        extra = {"part": part, **({"corruptions": robust.to_json()} if robust else {})}
        print(json_format.dumps(result.to_json() | extra, indent=2))
        return
    if part:
        print(f"part      {part}")
    print_evaluation(result, robust)


def check_labels(classifier: "Classifier", name: str, pictures: "list[LabeledImage]") -> None:
    """Before time is spent: do the classes fit the model, and if not, which model?"""
    from ...data.formats.image_folder import match_classes
    from ...errors import DataError

    names = sorted({label for each in pictures for label in each.labels})
    try:
        match_classes(names, classifier.checkpoint.labels, classifier.checkpoint.config.num_classes)
    except DataError as error:
        raise DataError(f"{name}: {error}", code=error.code) from None


def write_evaluation_page(
    out: Path, model: str, data: str, classifier: "Classifier", pictures: "list[LabeledImage]",
    result: "Evaluation", robust: "Robustness | None",
) -> None:  # fmt: skip
    from ...report.figure_files import REPORT_FILE
    from ...report.pages import write_evaluation

    split = f" ({pictures[0].part} split)" if pictures[0].part else ""
    facts = [
        ("Model", model_title(model)),
        ("Architecture", repr(classifier)),
        ("Data", f"{data}, {len(pictures):,} images{split}"),
        ("Temperature", f"{classifier.checkpoint.temperature:g}"),
        ("Throughput", f"{result.images_per_second:.1f} images per second"),
    ]
    write_evaluation(out, model_title(model), classifier, pictures, result, facts, robust)
    print_status(f"wrote {out / REPORT_FILE}")
