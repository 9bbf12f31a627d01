"""`patchword predict`: classify images."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...core.progress import progress
from ...core.text import pluralize, print_stderr
from ...errors import ConfigError
from ..arguments import arg, positional
from ..large_jobs import ChunkSize, RayAddress, require_large_job, run_large_job
from ..model_args import NO_OVERRIDES, EngineName, Flag, JsonFlag, ModelArgs, ModelReference, require_trained_head
from ..output import EXIT_UNREADABLE, print_json, print_predictions, report_unreadable, require_new_files

if TYPE_CHECKING:
    from ...inference.classifier import Classifier
    from ...inference.inputs import InputImage
    from ...report.explanation_images import ExplanationWriter


def predict(
    model: ModelReference,
    images: Annotated[tuple[str, ...], positional("IMAGE...")],
    model_args: ModelArgs = NO_OVERRIDES,
    top: int = 5,
    json: JsonFlag = False,
    csv: Annotated[Path | None, arg("FILE")] = None,
    explain: Annotated[Path | None, arg("DIR")] = None,
    out: Annotated[str | None, arg("DIR")] = None,
    ray: RayAddress = None,
    chunk_size: ChunkSize = None,
    overwrite: Flag = False,
    engine: EngineName = "torch",
) -> int:
    """Classify images, and explain the predictions if --explain is given.

    Example: patchword predict hf:google/vit-base-patch16-224 cat.jpg --top 3

    Large jobs: with --out, predictions are written in parts, each exactly once. If the command is killed, the same
    command continues; several may run at once. Inputs and DIR may be URLs such as s3://bucket/photos/.

    Args:
        images: files, folders (searched recursively), or a dataset such as cifar10
        top: number of classes to show per image, the most probable first
        csv: write one row per image to a CSV file; if the command is killed, the same command resumes it
        out: write Parquet parts to this directory or URL, for many images; see --ray
        explain: also write each image with a heatmap of what led to its predicted class to this directory
        overwrite: replace an existing CSV file and explanations
    """
    if top < 1:
        raise ConfigError(f"--top must be at least 1, not {top}.")
    if csv and json:
        raise ConfigError("--csv and --json exclude each other: choose one.")
    require_large_job(out, ray, chunk_size)
    if out is not None:
        refuse_with_out(csv=csv is not None, explain=explain is not None, overwrite=overwrite)
        return write_parts(model, images, model_args, out, top, engine, chunk_size, ray, json)
    require_new_files(csv, overwrite=overwrite)
    from ...inference.inputs import resolve_images
    from ...inference.predict import predict_images
    from ...report.explanation_images import ExplanationWriter

    inputs = resolve_images(images)
    classifier = model_args.load_classifier(model, engine)
    require_trained_head(classifier.checkpoint)
    writer = ExplanationWriter(classifier, inputs, explain, overwrite=overwrite) if explain else None
    if csv:
        return write_csv(classifier, inputs, top, csv, writer)
    with progress("predicting", len(inputs)) as step:
        results = [result for result in predict_images(classifier, inputs, top, writer) if step()]
    if writer:
        report_explanations(writer)
    if json:
        print_json(results)
    else:
        print_predictions(results)
    return report_unreadable([(r["path"], r["error"]) for r in results if "error" in r], len(results))


def refuse_with_out(**given: bool) -> None:
    """Refuse options that have no effect on a large job."""
    for name, is_given in given.items():
        if is_given:
            raise ConfigError(f"--{name} and --out exclude each other: parts are written once, without explanations.")


def write_parts(
    model: str,
    images: tuple[str, ...],
    model_args: ModelArgs,
    out: str,
    top: int,
    engine: str,
    chunk_size: int | None,
    ray: str | None,
    json: bool,
) -> int:
    """Run a large job."""
    from ...inference.prediction_job import JobRequest

    checkpoint = model_args.read(model)
    require_trained_head(checkpoint)
    return run_large_job(JobRequest("predict", checkpoint, images, out, engine, top, chunk_size), ray, json)


def write_csv(
    classifier: "Classifier", images: "list[InputImage]", top: int, csv: Path, writer: "ExplanationWriter | None"
) -> int:
    """Write predictions row by row: memory stays bounded, and a killed command can be resumed."""
    from ...inference.predict import write_prediction_table

    with progress("predicting", len(images)) as step:
        written = write_prediction_table(classifier, images, top, csv, step, writer)
    if written.num_resumed:
        print_stderr(f"resumed after the {pluralize(written.num_resumed, 'image')} in {csv}.partial")
    if writer:
        report_explanations(writer)
    print_stderr(f"wrote {csv}")
    code = report_unreadable(written.unreadable, len(images))
    if written.num_resumed_unreadable:
        count = pluralize(written.num_resumed_unreadable, "image")
        print_stderr(f"{count} could not be read before the interruption; see the column error.")
        return EXIT_UNREADABLE
    return code


def report_explanations(writer: "ExplanationWriter") -> None:
    """Print how many explanations were written, and how they were computed."""
    images = pluralize(writer.num_written, "image")
    print_stderr(f"wrote {images} to {writer.folder}: the predicted class explained by {writer.method}")
