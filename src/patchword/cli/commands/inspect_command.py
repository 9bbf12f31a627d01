"""The command that sees through a model: inspect."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import OmitArgPrefixes, Positional

from ...errors import ConfigError, DataError, PatchwordError
from ..config_flags import CHANNEL_STATS, CONFIG_VALUES
from ..model_args import NO_OVERRIDES, Flag, ModelReference, ModelArgs, model_title, arg
from ..output import progress, report_unreadable, print_status

if TYPE_CHECKING:
    from ...checkpoints import Checkpoint
    from ...report.inspection_panels import Subject
    from ...report.inspection_report import Inspection

NAMED = 6  # pictures whose names stand on the page


def inspect(
    model: ModelReference,
    images: Annotated[Positional[tuple[str, ...]], arg("IMAGE...")] = (),
    *,
    out: Annotated[Path, arg("DIR")],
    reading: OmitArgPrefixes[ModelArgs] = NO_OVERRIDES,
    label: str | None = None,
    most: int = 64,
    overwrite: Flag = False,
) -> int:
    """Draw what a model learnt and what it looks at: the paper's figures, and explanations with their checks.

    Example: patchword inspect patchword:cifar10 cifar10 --out seen

    Args:
        images: files, folders, or a data set such as cifar10; without any, only what the weights alone tell
        out: folder for report.html and for every figure as PNG, SVG and arrays (.npz)
        label: the class to explain, by name or index; by default the most probable one of each picture
        most: how many of the pictures are used
        overwrite: replace the files of an earlier inspection
    """
    if most < 1:
        raise ConfigError(f"--most must be at least 1, not {most}.")
    if label is not None and not images:
        raise ConfigError("--label asks about a class in pictures; give some.")
    from ...inference.classifier import Classifier, find_class
    from ...inference.inspection_images import gather
    from ...report.figure_files import REPORT_FILE, require_empty_dir, write_page
    from ...report.inspection_panels import NAMES, Subject
    from ...report.inspection_report import inspect as look
    from ...report.pages import inspection_html

    require_empty_dir(out, overwrite)
    classifier = Classifier(reading.read(model))
    pictures = gather(classifier, images, most)
    if images and not pictures.names:
        report_unreadable(list(pictures.unread), len(pictures.unread))
        raise DataError("None of the pictures could be read, so there is nothing to look at.")
    subject = Subject(
        classifier, pictures, None if label is None else find_class(classifier.labels, label), before_resizing(model)
    )
    with progress("looking", len(NAMES)) as step:
        found = look(subject, lambda title: step())
    notes = [*classifier.checkpoint.notes, *(reason for _, reason in pictures.unread)]
    page = inspection_html(model_title(model), facts(subject, found), found.panels, notes)
    write_page(out, page, found.panels, NAMES)
    print_status(f"wrote {out / REPORT_FILE} and {sum(e.draw is not None for e in found.panels)} figures")
    return report_unreadable(list(pictures.unread), len(pictures.names) + len(pictures.unread))


def before_resizing(model: str) -> "Checkpoint | None":
    """The checkpoint as it is, where the command line asks for another image size and the file can do without."""
    if "image_size" not in CONFIG_VALUES:
        return None
    from ...checkpoints import read_checkpoint

    try:
        return read_checkpoint(model, **{n: v for n, v in CONFIG_VALUES.items() if n not in ("image_size", *CHANNEL_STATS)})
    except PatchwordError:  # only the image size made it readable
        return None


def facts(subject: "Subject", found: "Inspection") -> list[tuple[str, str]]:
    """What stands above the figures."""
    checkpoint = subject.classifier.checkpoint
    size = "x".join(map(str, checkpoint.config.image_size))
    count = sum(t.numel() for t in checkpoint.tensors.values())
    names = subject.batch.names
    images = f"{len(names)} at {size} pixels: " if names else "none"
    images += ", ".join(Path(name).name for name in names[:NAMED]) + (", ..." if len(names) > NAMED else "")
    lines = [
        ("Model", f"{subject.classifier!r}, {count:,} parameters, {checkpoint.family} format"),
        ("Images", images),
        ("Computed in", f"{found.seconds:.0f} s, {found.peak_bytes / 2**30:.2f} GiB peak memory"),
    ]
    if subject.label is not None:
        lines.append(
            ("Explained class", f"{subject.classifier.labels[subject.label]} (index {subject.label}, --label)")
        )
    return lines
