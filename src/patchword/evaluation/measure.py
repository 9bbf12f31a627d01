"""A classifier on a folder of class folders: figures, and the files that could not be read."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..classifier import BATCH_SIZE, Classifier
from ..data.folders import class_folders, match_classes
from ..errors import DataError, ImageError
from .metrics import Tally


@dataclass(frozen=True)
class Evaluation:
    """What `patchword evaluate` found."""

    figures: dict[str, float | int]  # top1, top5, ece, nll, n
    per_class: list[dict[str, Any]]  # label, index, n, top1
    skipped: list[tuple[str, str]]  # path and reason
    images_per_second: float

    def to_json(self) -> dict[str, Any]:
        unread = [{"path": path, "error": reason} for path, reason in self.skipped]
        speed = {"skipped": len(self.skipped), "images_per_second": self.images_per_second}
        return {**self.figures, **speed, "per_class": self.per_class, "errors": unread}


def evaluate(
    classifier: Classifier,
    folder: Path,
    *,
    batch_size: int = BATCH_SIZE,
    on_progress: Callable[[], object] = lambda: None,
) -> Evaluation:
    """Class folders may be named by label, ImageNet WordNet id, or index."""
    pairs = class_folders(folder)
    names = sorted({name for _, name in pairs})
    indices = match_classes(names, classifier.checkpoint.labels, classifier.checkpoint.config.num_classes)
    tally, skipped = Tally(), []
    start = time.perf_counter()
    results = classifier.stream([file for file, _ in pairs], batch_size)
    for (file, name), result in zip(pairs, results, strict=True):
        if isinstance(result, ImageError):
            skipped.append((str(file), str(result)))
        else:
            tally.add(result[None], [indices[name]])
        on_progress()
    seconds = time.perf_counter() - start
    if not tally.targets:
        raise DataError(f"None of the {len(pairs)} pictures in {folder} could be read. The first: {skipped[0][1]}")
    per_class = [
        {"label": classifier.labels[index], "index": index, "n": count, "top1": top1}
        for index, (count, top1) in tally.per_class().items()
    ]
    return Evaluation(tally.figures(), per_class, skipped, len(pairs) / seconds)
