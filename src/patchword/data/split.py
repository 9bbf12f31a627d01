"""Splitting a validation part off the training part, so that every class is in both, and doing it again later.

What is chosen depends on the seed and on the places of the samples alone, so it is the same on every machine.
"""

from typing import Any

import numpy as np

from ..errors import DataError
from .class_labels import listed
from .keyed_rng import keys, uniform
from .sources import Source


def stratified_split(targets: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(training indices, validation indices), both sorted; about `fraction` of each class is for validation.

    Every class keeps at least one sample for training. Every class with two or more gives one for validation, unless
    there are more such classes than `fraction` of all samples.

    Args:
        targets: int64 (N,), the classes; or (N, K) of zeros and ones, for several labels.
    """
    order = np.argsort(uniform(keys(seed, 0, np.arange(len(targets))), "split")[:, 0], kind="stable")
    choose = _chosen_by_labels if targets.ndim == 2 else _chosen_by_class
    chosen = order[choose(targets[order], fraction)]
    if not len(chosen):
        raise DataError(
            f"No validation part can be split off {len(targets)} pictures: no class has two of them. "
            f"Add pictures, or give a validation part of its own (data.val)."
        )
    return np.setdiff1d(np.arange(len(targets)), chosen), np.sort(chosen)


def stratified_part(targets: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Indices, sorted, of about `fraction` of the samples of each class, one at least; with several labels, of all."""
    order = np.argsort(uniform(keys(seed, 0, np.arange(len(targets))), "part")[:, 0], kind="stable")
    if targets.ndim == 2:
        return np.sort(order[: max(1, round(fraction * len(targets)))])
    chosen = [
        places[: max(1, round(fraction * len(places)))]
        for label in np.unique(targets)
        if len(places := order[targets[order] == label])
    ]
    return np.sort(np.concatenate(chosen))


def _chosen_by_class(targets: np.ndarray, fraction: float) -> np.ndarray:
    """The first samples of each class, as many as are due to it."""
    _, classes, counts = np.unique(targets, return_inverse=True, return_counts=True)
    due = _due(counts, fraction)
    grouped = np.argsort(classes, kind="stable")
    starts = np.cumsum(counts) - counts
    place = np.arange(len(targets)) - np.repeat(starts, counts)  # of each sample among those of its class
    return grouped[place < np.repeat(due, counts)]


def _due(counts: np.ndarray, fraction: float) -> np.ndarray:
    """How many of each class go to validation: `fraction` of all together, spread by size."""
    total = max(1, round(counts.sum() * fraction))
    most = np.maximum(counts - 1, 0)
    least = np.minimum(most, 1) if (most > 0).sum() <= total else np.zeros_like(counts)
    due = np.clip((counts * fraction).astype(np.int64), least, most)
    while gap := total - due.sum():  # whole numbers: give to, or take from, where the fraction is missed by most
        missed = (counts * fraction - due) * np.sign(gap)
        missed[due == (most if gap > 0 else least)] = -np.inf
        if missed.max() == -np.inf:
            break
        due[missed.argmax()] += np.sign(gap)
    return due


def _chosen_by_labels(targets: np.ndarray, fraction: float) -> np.ndarray:
    """Label by label, the rarest first, for it has the least choice; what a sample's other labels get is counted."""
    has = targets > 0
    counts = has.sum(axis=0)
    due = _due(counts, fraction)
    left = counts.copy()  # for training
    chosen = np.zeros(len(has), dtype=bool)
    for label in np.argsort(counts, kind="stable"):
        for sample in np.flatnonzero(has[:, label] & ~chosen):
            if due[label] <= 0:
                break
            if (left[has[sample]] > 1).all():  # no label may lose its last
                chosen[sample] = True
                due -= has[sample]
                left -= has[sample]
    unlabelled = np.flatnonzero(~has.any(axis=1))
    chosen[unlabelled[: round(len(unlabelled) * fraction)]] = True
    return np.flatnonzero(chosen)


def apply_split(source: Source, saved: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """(training indices, validation indices) of a split that was written down by the keys of its validation samples."""
    wanted = saved.get("val")
    if not isinstance(wanted, list):
        raise DataError("The saved split does not say which samples are for validation: its list 'val' is missing.")
    place = {source.key(index): index for index in range(len(source))}
    if missing := [key for key in wanted if key not in place]:
        raise DataError(f"Samples of the saved split are no longer in the data: {listed(missing)}.")
    chosen = np.array(sorted(place[key] for key in wanted), dtype=np.int64)
    return np.setdiff1d(np.arange(len(source)), chosen), chosen
