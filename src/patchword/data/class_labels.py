"""Class names to class indices, and class indices of one dataset to those of another."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import DataError

_MAX_SHOWN = 5  # names in an error message


def format_names(names: Iterable[str], max_shown: int = _MAX_SHOWN) -> str:
    """Format a few names, quoted, and the number of the others: "'a', 'b' and 3 more"."""
    names = list(names)
    more = f" and {len(names) - max_shown} more" if len(names) > max_shown else ""
    return ", ".join(repr(name) for name in names[:max_shown]) + more


def sort_labels(names: Iterable[str]) -> tuple[str, ...]:
    """Sort the distinct names; if all are integers, by value, so that class 10 follows class 9."""
    unique = sorted(set(names))
    if all(name.isascii() and name.isdigit() and len(name) < 10 for name in unique):
        unique.sort(key=int)
    return tuple(unique)


def parse_labels(value: Any) -> tuple[str, ...]:
    """Read the labels in a table cell or a JSON value: a string, a number, a list of them, or nothing."""
    if isinstance(value, list | tuple | np.ndarray):
        return tuple(label for item in value for label in parse_labels(item))
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)  # pandas stores an integer column with missing values as floats
    if isinstance(value, int | np.integer):
        return (str(int(value)),)
    return (value.strip(),) if isinstance(value, str) and value.strip() else ()


def encode_labels(
    sample_labels: Sequence[tuple[str, ...]],
    multi_label: bool,
    describe: Callable[[int], str],
    labels: Sequence[str] | None = None,
) -> tuple[tuple[str, ...], np.ndarray]:
    """Encode the labels of each sample as targets. Without `multi_label`, every sample must have exactly one.

    Args:
        describe: name of the sample with that index, for error messages.
        labels: all classes in order, if the data define them; by default, the labels in use, sorted.

    Returns:
        The labels, and the targets: class indices, int64 (N,), or with `multi_label` multi-hot, float32 (N, K).
    """
    if labels is None:
        labels = sort_labels(name for names in sample_labels for name in names)
    labels = tuple(labels)
    index_of = {label: index for index, label in enumerate(labels)}
    if multi_label:
        targets = np.zeros((len(sample_labels), len(labels)), dtype=np.float32)
        for row, names in enumerate(sample_labels):
            targets[row, [index_of[name] for name in names]] = 1
        return labels, targets
    for row, names in enumerate(sample_labels):
        if not names:
            raise DataError(f"{describe(row)} has no label. Add one, or remove the sample.")
        if len(names) > 1:
            raise DataError(
                f"{describe(row)} has more than one label, {format_names(names)}. Set data.multi_label=true."
            )
    indices = (index_of[names[0]] for names in sample_labels)
    return labels, np.fromiter(indices, dtype=np.int64, count=len(sample_labels))


def to_multi_hot(targets: np.ndarray, num_classes: int) -> np.ndarray:
    """Convert class indices (N,) to a multi-hot matrix (N, K); such a matrix is returned as it is."""
    if targets.ndim == 2:
        return targets
    rows = np.zeros((len(targets), num_classes), dtype=np.float32)
    rows[np.arange(len(targets)), targets] = 1
    return rows


def remap_targets(targets: np.ndarray, old: Sequence[str], new: Sequence[str], what: str) -> np.ndarray:
    """Remap targets from the class order `old` to `new`. A class without samples needs no counterpart in `new`."""
    used = (np.flatnonzero(targets.any(axis=0)) if targets.ndim == 2 else np.unique(targets)).tolist()
    index_of = {label: index for index, label in enumerate(new)}
    if unknown := [old[index] for index in used if old[index] not in index_of]:
        raise DataError(
            f"{what} has classes that the training set lacks: {format_names(unknown)}. "
            f"The training set has {format_names(new)}. Names must match exactly."
        )
    new_indices = np.array([index_of[old[index]] for index in used], dtype=np.int64)
    if targets.ndim == 2:
        result = np.zeros((len(targets), len(new)), dtype=targets.dtype)
        result[:, new_indices] = targets[:, used]
        return result
    return new_indices[np.searchsorted(used, targets)]
