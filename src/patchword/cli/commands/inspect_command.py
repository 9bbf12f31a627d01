"""`patchword inspect`: what a model learned and what it attends to."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...core.progress import progress
from ...core.text import print_stderr
from ...errors import ConfigError, DataError, PatchwordError
from ..arguments import arg, positional
from ..config_flags import CHANNEL_STATS, CONFIG_VALUES
from ..model_args import NO_OVERRIDES, Flag, ModelArgs, ModelReference, model_title
from ..output import report_unreadable

if TYPE_CHECKING:
    from ...checkpoints import Checkpoint
    from ...report.inspection_panels import Subject
    from ...report.inspection_report import Inspection

MAX_NAMES = 6  # image names in the report


def inspect_model(
    model: ModelReference,
    images: Annotated[tuple[str, ...], positional("IMAGE...")] = (),
    *,
    out: Annotated[Path, arg("DIR")],
    model_args: ModelArgs = NO_OVERRIDES,
    label: str | None = None,
    max_images: int = 64,
    overwrite: Flag = False,
) -> int:
    """Draw what a model has learned and what it attends to: the paper's figures, and explanations with sanity checks.

    Example: patchword inspect patchword:cifar10 cifar10 --out inspection

    Args:
        images: files, folders (searched recursively), or a dataset such as cifar10; by default, only weights are drawn
        out: directory for report.html, and for every figure as PNG, SVG and arrays (.npz)
        label: class to explain, by name or index; by default, the most probable class of each image
        max_images: maximum number of images; more are sampled at even intervals
        overwrite: replace the files of an earlier inspection
    """
    if max_images < 1:
        raise ConfigError(f"--max-images must be at least 1, not {max_images}.")
    if label is not None and not images:
        raise ConfigError("--label explains a class in images: give at least one image.")
    from ...inference.classifier import Classifier, Encoder, find_class
    from ...inference.image_batch import load_image_batch
    from ...inference.inputs import resolve_images, sample_evenly
    from ...inference.predictions import class_labels
    from ...inspection.explain import NO_CLASSES
    from ...report.figure_files import REPORT_FILE, require_empty_dir, write_page
    from ...report.inspection_panels import NAMES, NUM_ORIGINALS, Subject
    from ...report.inspection_report import inspect
    from ...report.pages import inspection_html

    require_empty_dir(out, overwrite)
    checkpoint = model_args.read(model)
    if label is not None and not checkpoint.config.num_classes:
        raise ConfigError(f"--label: {NO_CLASSES}", code="unsupported_by_model")
    encoder = Classifier(checkpoint) if checkpoint.config.num_classes else Encoder(checkpoint)
    inputs = sample_evenly(resolve_images(images), max_images) if images else []
    batch = load_image_batch(encoder, inputs, NUM_ORIGINALS)
    if images and not batch.names:
        report_unreadable(batch.unreadable, len(inputs))
        raise DataError("None of the images could be read.")
    class_index = None if label is None else find_class(class_labels(checkpoint), label)
    subject = Subject(encoder, batch, class_index, read_original(model))
    with progress("inspecting", len(NAMES)) as step:
        result = inspect(subject, lambda title: step())
    notes = [*checkpoint.notes, *(reason for _, reason in batch.unreadable)]
    page = inspection_html(model_title(model), report_facts(subject, result), result.panels, notes)
    write_page(out, page, result.panels, NAMES)
    print_stderr(f"wrote {out / REPORT_FILE} and {sum(p.draw is not None for p in result.panels)} figures")
    return report_unreadable(batch.unreadable, len(inputs))


def read_original(model: str) -> "Checkpoint | None":
    """Read the checkpoint at its own image size, if the command line changes it and the file can do without."""
    if "image_size" not in CONFIG_VALUES:
        return None
    from ...checkpoints import read_checkpoint

    fields = {name: v for name, v in CONFIG_VALUES.items() if name not in ("image_size", *CHANNEL_STATS)}
    try:
        return read_checkpoint(model, **fields)
    except PatchwordError:  # the file does not say its image size
        return None


def report_facts(subject: "Subject", result: "Inspection") -> list[tuple[str, str]]:
    """Return the facts above the figures of the report."""
    checkpoint = subject.encoder.checkpoint
    size = "x".join(map(str, checkpoint.config.image_size))
    num_parameters = sum(tensor.numel() for tensor in checkpoint.tensors.values())
    names = subject.batch.names
    images = f"{len(names)} at {size} pixels: " if names else "none"
    images += ", ".join(Path(name).name for name in names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
    kind = repr(subject.classifier) if subject.has_head else f"{type(subject.model).__name__} without a head"
    facts = [
        ("Model", f"{kind}, {num_parameters:,} parameters, {checkpoint.family} format"),
        ("Images", images),
        ("Computed in", f"{result.seconds:.0f} s, {result.peak_bytes / 2**30:.2f} GiB peak memory"),
    ]
    if subject.label is not None:
        name = subject.classifier.labels[subject.label]
        facts.append(("Explained class", f"{name} (index {subject.label}, --label)"))
    return facts
