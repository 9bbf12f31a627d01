"""A data set examined: what is wrong with it, what is unusual, and what to do about that."""

from collections.abc import Callable

import numpy as np

from ..config.config_checks import patch_findings
from ..core.findings import Finding, Severity, sort_by_severity
from ..data.sources import DatasetSplits, Source
from .image_survey import Survey, survey
from .near_duplicates import blank, equal_pairs, near_pairs

FEW = 10  # pictures: fewer hardly teach a class
UNEVEN, VERY_UNEVEN = 3, 10  # times as many pictures in the largest class as in the smallest
ENLARGED = 2  # times: beyond it, most of what the model sees is made up by interpolation
LONG = 3  # times as long as wide

_KINDS = {
    "grey": "are grey. They are read as colour pictures with three equal channels.",
    "CMYK": "are in CMYK, for print. Their colours are converted, and may differ a little from what a viewer shows.",
    "deep": "have 16 bits or floating-point pixels. They are reduced to 8 bits.",
    "transparent": "have transparency. They are laid on white.",
    "animated": "are animated or have several pages. Only the first frame is used.",
}


def examine(
    parts: DatasetSplits,
    *,
    image_size: tuple[int, int],
    patch_size: tuple[int, int] | None = None,
    workers: int = 2,
    on_progress: Callable[[], object] = lambda: None,
) -> list[Finding]:
    """Reads every picture once and says what it found, the gravest first.

    Args:
        image_size: (height, width) that the model is to see.
        patch_size: image pixels of one token, (height, width).
        workers: threads.
        on_progress: called once for each picture.
    """
    seen = survey(parts.as_dict(), workers, on_progress)
    findings = patch_findings(image_size, patch_size) if patch_size else []
    findings += unreadable(seen) + class_sizes(parts)
    if len(seen.readable):
        findings += repeats(seen) + picture_sizes(seen, image_size) + kinds(seen)
    return sort_by_severity(findings)


def unreadable(seen: Survey) -> list[Finding]:
    findings = []
    for part, name in enumerate(seen.names):
        bad = [sample for sample in seen.unreadable if seen.parts[sample] == part]
        if bad:
            none = len(bad) == seen.counts[part]
            what = f"{'None' if none else len(bad)} of the {seen.counts[part]:,} pictures in {name} can"
            findings.append(
                Finding(
                    "error" if none else "warning",
                    f"{what} be read." if none else f"{what}not be read.",
                    tuple(seen.unreadable[sample] for sample in bad),
                    "They are left out. Copy or download them again, or remove them.",
                )
            )
    return findings


def class_counts(source: Source) -> np.ndarray:
    """int64 (K,): how many pictures each class has."""
    if source.multi_label:
        return source.targets.sum(axis=0).astype(np.int64)
    return np.bincount(source.targets, minlength=len(source.labels))


def class_sizes(parts: DatasetSplits) -> list[Finding]:
    counts, labels, findings = class_counts(parts.train), parts.train.labels, []
    if few := [f"{labels[k]}: {counts[k]}" for k in np.argsort(counts, kind="stable") if 0 < counts[k] < FEW]:
        what = f"{_classes(len(few))} fewer than {FEW} pictures to learn from."
        findings.append(Finding("warning", what, tuple(few), "Add pictures, merge the classes, or leave them out."))
    if none := [labels[k] for k in np.flatnonzero(counts == 0)]:
        what = f"{_classes(len(none))} no picture to learn from."
        findings.append(Finding("error", what, tuple(none), "The model cannot know them. Add pictures or remove them."))
    for name, source in parts.as_dict().items():
        if name != "train" and (lacking := _lacking(source, parts.train)):
            what = f"{_classes(len(lacking))} no picture in {name}, so nothing is measured for them."
            findings.append(Finding("warning", what, tuple(lacking), f"Add pictures of them to {name}."))
    return findings + imbalance(counts, labels, parts.train.multi_label)


def _lacking(source: Source, train: Source) -> list[str]:
    """Labels that can be learnt, but do not occur in another part."""
    there = {source.labels[k] for k in np.flatnonzero(class_counts(source))}
    return [train.labels[k] for k in np.flatnonzero(class_counts(train)) if train.labels[k] not in there]


def _classes(count: int) -> str:
    return "1 class has" if count == 1 else f"{count:,} classes have"


def imbalance(counts: np.ndarray, labels: tuple[str, ...], multi_label: bool) -> list[Finding]:
    present = np.flatnonzero(counts)
    if len(present) < 2:
        return []
    most, least = present[counts[present].argmax()], present[counts[present].argmin()]
    ratio = counts[most] / counts[least]
    if ratio < UNEVEN:
        return []
    choice = "class_weights to true" if multi_label else "data.balanced_sampling or class_weights to true"
    return [
        Finding(
            "warning" if ratio >= VERY_UNEVEN else "note",
            f"The largest class has {ratio:.1f} times as many pictures as the smallest.",
            (f"{labels[most]}: {counts[most]:,}", f"{labels[least]}: {counts[least]:,}"),
            f"If rare classes matter as much as common ones, set {choice}, and judge by the accuracy of each class.",
        )
    ]


def repeats(seen: Survey) -> list[Finding]:
    """Pictures that occur more than once: across parts, under different labels, or just twice."""
    findings = _repeats(seen, equal_pairs(seen), "the same", "error")
    findings += _repeats(seen, near_pairs(seen), "nearly the same", "warning")
    if len(empty := blank(seen)):
        what = f"{_pictures(len(empty))} of one even colour, with nothing on them."
        findings.append(Finding("note", what, _names(seen, empty), "Are they meant to be?"))
    return findings


def _repeats(seen: Survey, pairs: np.ndarray, how: str, leak: Severity) -> list[Finding]:
    findings = []
    parts = seen.parts[pairs]  # (M, 2)
    for a, b in sorted({(int(a), int(b)) for a, b in parts if a != b}):
        chosen = pairs[(parts == (a, b)).all(axis=1)]
        count = len(np.unique(chosen[:, 1]))
        what = f"{_pictures(count)} {how} in {seen.names[b]} and in {seen.names[a]}."
        advice = "Figures measured on pictures that were learnt from are too good. Remove them from one of the two."
        findings.append(Finding(leak, what, _shown(seen, chosen), advice))
    labels = np.array([seen.label(a) != seen.label(b) for a, b in pairs], dtype=bool)
    if labels.any():
        what = f"{_pairs(int(labels.sum()))} {how}, but labelled differently."
        findings.append(Finding("warning", what, _shown(seen, pairs[labels]), "Look at them, and correct the labels."))
    inside = pairs[(parts[:, 0] == parts[:, 1]) & ~labels]
    if len(inside):
        what = f"{_pairs(len(inside))} {how}, in one part and with one label."
        findings.append(Finding("note", what, _shown(seen, inside), "They count twice, which does little harm."))
    return findings


def _shown(seen: Survey, pairs: np.ndarray) -> tuple[str, ...]:
    shown = []
    for a, b in pairs:
        labels = (seen.label(a), seen.label(b))
        ends = ("", "") if labels[0] == labels[1] else tuple(f" ({label})" for label in labels)
        shown.append(f"{seen.name(a)}{ends[0]} = {seen.name(b)}{ends[1]}")
    return tuple(shown)


def _names(seen: Survey, samples: np.ndarray | list[int]) -> tuple[str, ...]:
    return tuple(seen.name(sample) for sample in samples)


def _pictures(count: int) -> str:
    return "1 picture is" if count == 1 else f"{count:,} pictures are"


def _pairs(count: int) -> str:
    return "2 pictures are" if count == 1 else f"{count:,} pairs of pictures are"


def picture_sizes(seen: Survey, image_size: tuple[int, int]) -> list[Finding]:
    samples = seen.readable
    sizes = seen.sizes[samples]
    height, width = np.median(sizes, axis=0)
    small, large = samples[sizes.prod(axis=1).argmin()], samples[sizes.prod(axis=1).argmax()]
    range_of = tuple(f"{seen.sizes[s, 0]} x {seen.sizes[s, 1]}: {seen.name(s)}" for s in (small, large))
    what = f"The pictures are {height:.0f} x {width:.0f} pixels (height x width, median)."
    findings = [Finding("note", what, range_of if (sizes != sizes[0]).any() else ())]
    scale = (np.array(image_size) / sizes).max(axis=1)  # by which a picture is enlarged to cover what the model sees
    if (enlarged := samples[scale > ENLARGED]).size:
        most = len(enlarged) > len(samples) / 2
        what = f"{_pictures(len(enlarged))} enlarged more than {ENLARGED} times to {image_size[0]} x {image_size[1]}."
        advice = "That adds no detail. A smaller image_size would train faster and lose little." if most else ""
        findings.append(Finding("warning" if most else "note", what, _names(seen, enlarged), advice))
    ratios = sizes.max(axis=1) / sizes.min(axis=1)
    if (long := samples[ratios > LONG]).size:
        what = f"{_pictures(len(long))} more than {LONG} times as long as wide. The model sees only their middle."
        findings.append(Finding("note", what, _names(seen, long), "If the ends matter, cut them into several."))
    return findings


def kinds(seen: Survey) -> list[Finding]:
    return [
        Finding("note", f"{len(found):,} of {len(seen.readable):,} pictures {_KINDS[kind]}", _names(seen, found))
        for kind, found in sorted(seen.kinds.items())
    ]
