"""Explanations as files: one picture with its map over it for each picture that was classified."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ..core.io import atomic_output
from ..data.images import load_image
from ..errors import DataError, ImageError
from ..inference.classifier import Classifier
from ..inspection.explain import Method, default_method, explain
from ..plots.overlay_heatmap import overlay_heatmap


def check_folder(classifier: Classifier, folder: Path, overwrite: bool) -> None:
    """Before hours are spent: can this model be explained, and may the folder be written to?"""
    default_method(classifier.model)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not overwrite:
        raise DataError(f"{folder} exists already and is not empty. Choose another name, or add --overwrite.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be made ({error.strerror or error}).") from None


def explain_files(
    classifier: Classifier, files: Sequence[Path], folder: Path, method: Method | None = None
) -> Iterator[Path | ImageError]:
    """Writes folder/NAME.png for each file, for its most probable class; two files of one name get numbers."""
    method = method or default_method(classifier.model)
    taken: set[str] = set()
    originals = {file.resolve() for file in files}
    for file in files:
        try:
            picture = load_image(file, mode=classifier.preprocess.mode)
        except ImageError as error:
            yield error
            continue
        images = classifier.preprocess.normalize(classifier.pixels(picture)[None])
        with torch.no_grad():
            classes = classifier.model(images).argmax(dim=-1)
        drawn = overlay_heatmap(picture, explain(classifier.model, images, classes, method)[0], classifier.preprocess)
        target = folder / f"{free_name(file.stem, taken)}.png"
        if target.resolve() in originals:
            raise DataError(f"{target} is one of the pictures themselves. Choose another folder to explain them in.")
        with atomic_output(target, overwrite=True) as made:
            drawn.save(made, "PNG")
        yield target


def free_name(stem: str, taken: set[str]) -> str:
    name, number = stem, 1
    while name.casefold() in taken:  # on some disks Cat.png and cat.png are one file
        number += 1
        name = f"{stem}-{number}"
    taken.add(name.casefold())
    return name
