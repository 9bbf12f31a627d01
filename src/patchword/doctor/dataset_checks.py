"""Checks of a dataset: unreadable images, class sizes, duplicates, image sizes and formats."""

from collections.abc import Callable

import numpy as np

from ..config.config_checks import patch_findings
from ..core.findings import Finding, Severity, sort_by_severity
from ..core.text import pluralize
from ..data.sources import DatasetSplits, Source
from .image_survey import Survey, survey_images
from .near_duplicates import blank_images, equal_pairs, near_pairs

MIN_CLASS_SIZE = 10  # images
IMBALANCE_NOTE, IMBALANCE_WARNING = 3, 10  # ratio of the largest to the smallest class
MAX_UPSCALING = 2  # beyond this factor most pixels are interpolated
MAX_ASPECT_RATIO = 3

_KIND_TEXTS = {
    "gray": "are grayscale. They are read as RGB images with three equal channels.",
    "CMYK": "are in CMYK. Their colors are converted, and may differ slightly from what a viewer shows.",
    "deep": "have 16-bit or floating-point pixels. They are reduced to 8 bits.",
    "transparent": "have transparency. They are composited onto white.",
    "animated": "are animated or have several pages. Only the first frame is used.",
}


def examine(
    splits: DatasetSplits,
    *,
    image_size: tuple[int, int],
    patch_size: tuple[int, int] | None = None,
    num_workers: int = 2,
    on_progress: Callable[[], object] = lambda: None,
) -> list[Finding]:
    """Read every image once, and return the findings, most severe first.

    Args:
        splits: The dataset.
        image_size: (height, width) of the model's input.
        patch_size: (height, width) of a patch, in pixels.
        num_workers: Threads that read images.
        on_progress: Called once per image.
    """
    survey = survey_images(splits.as_dict(), num_workers, on_progress)
    findings = patch_findings(image_size, patch_size) if patch_size else []
    findings += check_readable(survey) + check_class_sizes(splits)
    if len(survey.readable):
        findings += check_duplicates(survey) + check_image_sizes(survey, image_size) + check_kinds(survey)
    return sort_by_severity(findings)


def check_readable(survey: Survey) -> list[Finding]:
    """Find splits with images that cannot be read."""
    findings = []
    for split, name in enumerate(survey.names):
        samples = [sample for sample in survey.unreadable if survey.splits[sample] == split]
        if not samples:
            continue
        total = survey.counts[split]
        if len(samples) == total:
            what = f"None of the {total:,} images in {name} can be read."
        else:
            what = f"{len(samples)} of the {total:,} images in {name} cannot be read."
        findings.append(
            Finding(
                "error" if len(samples) == total else "warning",
                "unreadable_images",
                what,
                tuple(survey.unreadable[sample] for sample in samples),
                "They are skipped. Copy or download them again, or remove them.",
            )
        )
    return findings


def class_counts(source: Source) -> np.ndarray:
    """Return the number of images of each class, int64 (K,)."""
    if source.multi_label:
        counts: np.ndarray = source.targets.sum(axis=0).astype(np.int64)
        return counts
    return np.bincount(source.targets, minlength=len(source.labels))


def check_class_sizes(splits: DatasetSplits) -> list[Finding]:
    """Find classes with few or no images, and class imbalance."""
    counts, labels, findings = class_counts(splits.train), splits.train.labels, []
    order = np.argsort(counts, kind="stable")
    if small := [f"{labels[k]}: {counts[k]}" for k in order if 0 < counts[k] < MIN_CLASS_SIZE]:
        what = f"{_classes_have(len(small))} fewer than {MIN_CLASS_SIZE} training images."
        findings.append(
            Finding("warning", "small_classes", what, tuple(small), "Add images, merge the classes, or remove them.")
        )
    if empty := [labels[k] for k in np.flatnonzero(counts == 0)]:
        what = f"{_classes_have(len(empty))} no training image."
        findings.append(Finding("error", "empty_classes", what, tuple(empty), "Add images of them, or remove them."))
    for name, source in splits.as_dict().items():
        if name != "train" and (missing := _missing_classes(source, splits.train)):
            what = f"{_classes_have(len(missing))} no image in {name}, so they are not evaluated."
            findings.append(
                Finding("warning", "missing_classes", what, tuple(missing), f"Add images of them to {name}.")
            )
    return findings + check_imbalance(counts, labels, splits.train.multi_label)


def _missing_classes(source: Source, train: Source) -> list[str]:
    """Return classes with training images that have none in another split."""
    present = {source.labels[k] for k in np.flatnonzero(class_counts(source))}
    return [train.labels[k] for k in np.flatnonzero(class_counts(train)) if train.labels[k] not in present]


def _classes_have(count: int) -> str:
    return "1 class has" if count == 1 else f"{count:,} classes have"


def check_imbalance(counts: np.ndarray, labels: tuple[str, ...], multi_label: bool) -> list[Finding]:
    """Compare the largest and the smallest class."""
    present = np.flatnonzero(counts)
    if len(present) < 2:
        return []
    largest, smallest = present[counts[present].argmax()], present[counts[present].argmin()]
    ratio = counts[largest] / counts[smallest]
    if ratio < IMBALANCE_NOTE:
        return []
    options = "class_weights to true" if multi_label else "data.balanced_sampling or class_weights to true"
    return [
        Finding(
            "warning" if ratio >= IMBALANCE_WARNING else "note",
            "class_imbalance",
            f"The largest class has {ratio:.1f} times as many images as the smallest.",
            (f"{labels[largest]}: {counts[largest]:,}", f"{labels[smallest]}: {counts[smallest]:,}"),
            f"If rare classes matter as much as common ones, set {options}, and compare the accuracy of each class.",
        )
    ]


def check_duplicates(survey: Survey) -> list[Finding]:
    """Find images that occur more than once: across splits, with different labels, or within a class."""
    findings = _duplicate_findings(survey, equal_pairs(survey), "duplicate", "error")
    findings += _duplicate_findings(survey, near_pairs(survey), "near-duplicate", "warning")
    blank = blank_images(survey)
    if len(blank):
        what = f"{_images_are(len(blank))} blank: they have one uniform color."
        findings.append(Finding("note", "blank_images", what, _names(survey, blank), "Do they belong to the dataset?"))
    return findings


def _duplicate_findings(survey: Survey, pairs: np.ndarray, kind: str, leak: Severity) -> list[Finding]:
    findings, code = [], kind.replace("-", "_")
    splits = survey.splits[pairs]  # (M, 2)
    for a, b in sorted({(int(a), int(b)) for a, b in splits if a != b}):
        selected = pairs[(splits == (a, b)).all(axis=1)]
        count = len(np.unique(selected[:, 1]))
        what = f"{pluralize(count, 'image')} in {survey.names[b]} {_have(count)} a {kind} in {survey.names[a]}."
        advice = "Metrics on images of the training set are too optimistic. Remove them from one of the two splits."
        findings.append(Finding(leak, f"{code}_across_splits", what, _pair_names(survey, selected), advice))
    is_conflict = np.array([survey.label(a) != survey.label(b) for a, b in pairs], dtype=bool)
    if is_conflict.any():
        what = (
            f"{pluralize(int(is_conflict.sum()), 'pair')} of {kind}s {_have(int(is_conflict.sum()))} different labels."
        )
        names = _pair_names(survey, pairs[is_conflict])
        findings.append(
            Finding("warning", f"{code}_labels_differ", what, names, "Look at them, and correct the labels.")
        )
    harmless = pairs[(splits[:, 0] == splits[:, 1]) & ~is_conflict]
    if len(harmless):
        what = f"{pluralize(len(harmless), 'pair')} of {kind}s {_have(len(harmless))} the same label in the same split."
        names = _pair_names(survey, harmless)
        findings.append(Finding("note", f"{code}_within_split", what, names, "They count twice, which is harmless."))
    return findings


def _have(count: int) -> str:
    return "has" if count == 1 else "have"


def _images_are(count: int) -> str:
    return f"{pluralize(count, 'image')} {'is' if count == 1 else 'are'}"


def _pair_names(survey: Survey, pairs: np.ndarray) -> tuple[str, ...]:
    lines = []
    for a, b in pairs:
        labels = (survey.label(a), survey.label(b))
        suffixes = ("", "") if labels[0] == labels[1] else tuple(f" ({label})" for label in labels)
        lines.append(f"{survey.name(a)}{suffixes[0]} = {survey.name(b)}{suffixes[1]}")
    return tuple(lines)


def _names(survey: Survey, samples: np.ndarray | list[int]) -> tuple[str, ...]:
    return tuple(survey.name(sample) for sample in samples)


def check_image_sizes(survey: Survey, image_size: tuple[int, int]) -> list[Finding]:
    """Report the median size, and find images that are upscaled much or very elongated."""
    samples = survey.readable
    sizes = survey.sizes[samples]
    height, width = np.median(sizes, axis=0)
    areas = sizes.prod(axis=1)
    extremes = (samples[areas.argmin()], samples[areas.argmax()])
    where = tuple(f"{survey.sizes[s, 0]} x {survey.sizes[s, 1]}: {survey.name(s)}" for s in extremes)
    what = f"The images are {height:.0f} x {width:.0f} pixels (height x width, median)."
    findings = [Finding("note", "image_sizes", what, where if (sizes != sizes[0]).any() else ())]
    scale = (np.array(image_size) / sizes).max(axis=1)  # to cover the model's input
    if (upscaled := samples[scale > MAX_UPSCALING]).size:
        is_majority = len(upscaled) > len(samples) / 2
        what = f"{_images_are(len(upscaled))} upscaled more than {MAX_UPSCALING} times to "
        what += f"{image_size[0]} x {image_size[1]}."
        advice = "That adds no detail. A smaller image_size trains faster and loses little." if is_majority else ""
        severity: Severity = "warning" if is_majority else "note"
        findings.append(Finding(severity, "upscaled_images", what, _names(survey, upscaled), advice))
    ratios = sizes.max(axis=1) / sizes.min(axis=1)
    if (elongated := samples[ratios > MAX_ASPECT_RATIO]).size:
        what = (
            f"{pluralize(len(elongated), 'image')} {_have(len(elongated))} an aspect ratio above {MAX_ASPECT_RATIO}. "
        )
        what += "The model sees only the center."
        names = _names(survey, elongated)
        findings.append(Finding("note", "elongated_images", what, names, "If the ends matter, cut them into several."))
    return findings


def check_kinds(survey: Survey) -> list[Finding]:
    """Report unusual image formats."""
    return [
        Finding(
            "note",
            f"{kind.lower()}_images",
            f"{len(samples):,} of {len(survey.readable):,} images {_KIND_TEXTS[kind]}",
            _names(survey, samples),
        )
        for kind, samples in sorted(survey.kinds.items())
    ]
