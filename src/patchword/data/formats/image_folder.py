"""Image folders with one subfolder per class, and the mapping of folder names to the classes of a model.

Owns the layout ROOT/CLASS/**/image and the matching of class names to class indices. It does not open images and does
not know the model: the caller provides labels and number of classes.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ...errors import DataError, Note
from ..class_labels import encode_labels, format_names
from ..datasets.imagenet import imagenet_classes
from ..image_decoder import list_images
from ..sources import SPLIT_ALIASES, SPLIT_TITLES, FileSource, ResolvedDataset

_LAYOUT = "Use one folder per class: {folder}/cat/1.jpg, {folder}/dog/2.jpg."


def list_labeled_images(folder: str | Path) -> list[tuple[Path, str]]:
    """List (image, name of its class folder), sorted by class and file.

    Class folders without images and images outside the class folders are left out.
    """
    folder = Path(folder)
    files = list_images(folder)  # raises if it is not a folder or has no images
    pairs = [
        (file, path.partition("/")[0])
        for file, path in zip(files, _relative_paths(folder, files), strict=True)
        if "/" in path
    ]
    if not pairs:
        layout = _LAYOUT.format(folder=folder)
        raise DataError(f"The images are directly in {folder}, so their classes are unknown. {layout}")
    names = sorted({name for _, name in pairs})
    if all(name.lower() in SPLIT_ALIASES for name in names):
        choices = " or ".join(str(folder / name) for name in names)
        raise DataError(f"{folder} contains the splits of a dataset ({', '.join(names)}), not classes: use {choices}.")
    return pairs


def _relative_paths(folder: Path, files: Sequence[Path]) -> list[str]:
    """Paths relative to the folder. `Path.relative_to` takes ten times as long: 15 s for ImageNet."""
    start = 0 if folder == Path() else len(os.path.join(folder, ""))
    return [str(file)[start:].replace(os.sep, "/") for file in files]


def open_folder(folder: str | Path) -> ResolvedDataset:
    """Open ROOT/{train,val,test}/CLASS/**, or ROOT/CLASS/** as a training set. Labels are the class folders."""
    folder = Path(folder)
    splits, notes = _find_splits(folder)
    if not splits:
        splits, notes = {"train": list_labeled_images(folder)}, []
    return ResolvedDataset({name: _make_source(folder, pairs) for name, pairs in splits.items()}, tuple(notes))


def _make_source(root: Path, pairs: list[tuple[Path, str]]) -> FileSource:
    paths = _relative_paths(root, [file for file, _ in pairs])
    names = [(name,) for _, name in pairs]
    labels, targets = encode_labels(names, False, paths.__getitem__, sorted({name for _, name in pairs}))
    return FileSource(paths, labels, targets, root)


def _find_splits(folder: Path) -> tuple[dict[str, list[tuple[Path, str]]], list[Note]]:
    """List the labeled images of each split, with notes on what was left out; empty if the folders are classes.

    A folder called "test" is a split if it contains class folders; otherwise it is often the unlabeled test set of a
    competition. Beside two splits, any other folder is left out; beside a single one, it is a class.
    """
    subfolders = sorted(p for p in folder.iterdir() if p.is_dir() and p.name[0] != ".") if folder.is_dir() else []
    splits: dict[str, list[tuple[Path, str]]] = {}
    notes = []
    for path in (p for p in subfolders if p.name.lower() in SPLIT_ALIASES):
        name = SPLIT_ALIASES[path.name.lower()]
        try:
            content = list_labeled_images(path)
        except DataError as error:
            notes.append(Note(f"{path} was left out. {error}", "split_left_out"))
            continue
        if name in splits:
            raise DataError(f"{folder} has two folders for the {SPLIT_TITLES[name]}; one is {path.name}. Merge them.")
        splits[name] = content
    others = [p.name for p in subfolders if p.name.lower() not in SPLIT_ALIASES and _has_images(p)] if splits else []
    if others and len(splits) == 1:
        return {}, []
    if others:
        text = f"{folder} has folders beside its splits that were left out: {format_names(others)}."
        notes.append(Note(text, "folders_left_out"))
    return splits, notes


def _has_images(folder: Path) -> bool:
    try:
        return bool(list_images(folder))
    except DataError:
        return False


def match_classes(names: Sequence[str], labels: Sequence[str] | None, num_classes: int) -> dict[str, int]:
    """Map each class folder to a class index of the model.

    A name may be a label of the model (or a synonym in a label such as "tench, Tinca tinca"; case, spaces, hyphens and
    underscores are ignored), a WordNet id if there are 1000 classes, or a class index. All names must be of the same
    kind: a mixture is more likely a mistake.
    """
    if labels is not None and len(labels) != num_classes:
        raise DataError(f"There are {len(labels)} labels for {num_classes} classes. Provide one label per class.")
    unmatched_by_scheme = []
    for scheme in _schemes(labels, num_classes):
        indices = {name: scheme(name) for name in names}
        matched = {name: index for name, index in indices.items() if index is not None}
        if len(matched) == len(indices):
            return matched
        unmatched_by_scheme.append([name for name in indices if name not in matched])
    raise DataError(_unmatched_message(min(unmatched_by_scheme, key=len), names, labels, num_classes))


Scheme = Callable[[str], int | None]


def _schemes(labels: Sequence[str] | None, num_classes: int) -> list[Scheme]:
    """Return the ways to match a name, in order of precedence: the label "7" before the class index 7."""
    schemes: list[Scheme] = []
    if labels is not None:
        schemes.append(_by_label(labels))
    if num_classes == len(imagenet_classes()):
        schemes.append({wnid: index for index, (wnid, _) in enumerate(imagenet_classes())}.get)
    schemes.append(lambda name: _by_index(name, num_classes))
    return schemes


def _by_label(labels: Sequence[str]) -> Scheme:
    exact = _unique((label, index) for index, label in enumerate(labels))
    full = _unique((_normalize_name(label), index) for index, label in enumerate(labels))
    synonyms = _unique(
        (_normalize_name(synonym), index) for index, label in enumerate(labels) for synonym in label.split(",")
    )

    def scheme(name: str) -> int | None:
        # Exact first, because "a" and "A" may be two classes; then full labels: "missile" is a class of its own and a
        # synonym of "projectile".
        if (index := exact.get(name)) is not None:
            return index
        normalized = _normalize_name(name)
        return full[normalized] if normalized in full else synonyms.get(normalized)

    return scheme


def _unique(pairs: Iterable[tuple[str, int]]) -> dict[str, int | None]:
    """Map texts to indices; None for an ambiguous text, such as "crane" in ImageNet (the bird and the machine)."""
    table: dict[str, int | None] = {}
    for text, index in pairs:
        table[text] = index if table.get(text, index) == index else None
    return table


def _normalize_name(text: str) -> str:
    return re.sub(r"[\s_-]+", "", text).casefold()


def _by_index(name: str, num_classes: int) -> int | None:
    # isascii: int() accepts digits of other scripts, and "²" is a digit for isdigit() but not for int().
    if not (name.isascii() and name.isdigit()):
        return None
    digits = name.lstrip("0") or "0"
    if len(digits) > len(str(num_classes)):  # int() raises for thousands of digits
        return None
    return int(digits) if int(digits) < num_classes else None


def _unmatched_message(
    unmatched: list[str], names: Sequence[str], labels: Sequence[str] | None, num_classes: int
) -> str:
    accepted = ["the model's labels (unless ambiguous)"] if labels is not None else []
    if num_classes == len(imagenet_classes()):
        accepted.append("ImageNet's WordNet ids (n01440764)")
    accepted.append(f"class indices from 0 to {num_classes - 1}")
    message = f"No class of the model matches the folders {format_names(unmatched)}. "
    message += f"Folder names may be {' or '.join(accepted)}."
    if labels is None and len(set(names)) == num_classes:
        message += " The model has no labels, and the order of the folders is not used instead: provide the labels."
    return message
