"""From the words that a data set has for its classes to class indices, and from one data set's indices to another's."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import DataError

_SHOWN = 5  # names listed in an error


def listed(names: Iterable[str], shown: int = _SHOWN) -> str:
    """A few names, quoted, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(repr(name) for name in names[:shown]) + more


def ordered_labels(names: Iterable[str]) -> tuple[str, ...]:
    """Each name once, sorted; names that are all whole numbers by their value, so that class 10 follows class 9."""
    unique = sorted(set(names))
    if all(name.isascii() and name.isdigit() and len(name) < 10 for name in unique):
        unique.sort(key=int)
    return tuple(unique)


def label_words(value: Any) -> tuple[str, ...]:
    """The labels in a cell of a table or a JSON value: a word, a number, a list of them, or nothing."""
    if isinstance(value, list | tuple | np.ndarray):
        return tuple(word for each in value for word in label_words(each))
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)  # 3.0, which is what a column of whole numbers becomes in tools that have no other gaps
    if isinstance(value, int | np.integer):
        return (str(int(value)),)
    return (value.strip(),) if isinstance(value, str) and value.strip() else ()


def labelled(
    words: Sequence[tuple[str, ...]],
    multi_label: bool,
    called: Callable[[int], str],
    labels: Sequence[str] | None = None,
) -> tuple[tuple[str, ...], np.ndarray]:
    """Labels and targets out of the words for each sample, of which there must be one, unless `several` are allowed.

    Args:
        called: how a message calls the sample of that index.
        labels: all classes in their order, where the data say so; else the words in use, sorted.
    """
    labels = ordered_labels(word for each in words for word in each) if labels is None else tuple(labels)
    index_of = {label: index for index, label in enumerate(labels)}
    if multi_label:
        targets = np.zeros((len(words), len(labels)), dtype=np.float32)
        for row, each in enumerate(words):
            targets[row, [index_of[word] for word in each]] = 1
        return labels, targets
    if (wrong := next((row for row, each in enumerate(words) if len(each) != 1), None)) is not None:
        if not words[wrong]:
            raise DataError(f"{called(wrong)} has no label. Give it one, or take it out.")
        raise DataError(f"{called(wrong)} has several labels, {listed(words[wrong])}. Set data.multi_label to true.")
    return labels, np.fromiter((index_of[each[0]] for each in words), dtype=np.int64, count=len(words))


def as_several(targets: np.ndarray, count: int) -> np.ndarray:
    """Class indices as rows of zeros with a single one; what is such rows already stays."""
    if targets.ndim == 2:
        return targets
    rows = np.zeros((len(targets), count), dtype=np.float32)
    rows[np.arange(len(targets)), targets] = 1
    return rows


def matched_targets(targets: np.ndarray, old: Sequence[str], new: Sequence[str], what: str) -> np.ndarray:
    """Targets that count classes as in `new` instead of as in `old`. Classes that no sample has need no counterpart."""
    used = (np.flatnonzero(targets.any(axis=0)) if targets.ndim == 2 else np.unique(targets)).tolist()
    index_of = {label: index for index, label in enumerate(new)}
    if unknown := [old[index] for index in used if old[index] not in index_of]:
        raise DataError(
            f"{what} has classes that the training part lacks: {listed(unknown)}. "
            f"The training part has {listed(new)}. Names must agree to the letter."
        )
    places = np.array([index_of[old[index]] for index in used], dtype=np.int64)
    if targets.ndim == 2:
        result = np.zeros((len(targets), len(new)), dtype=targets.dtype)
        result[:, places] = targets[:, used]
        return result
    return places[np.searchsorted(used, targets)]
