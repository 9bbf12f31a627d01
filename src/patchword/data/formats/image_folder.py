"""Folders of class folders, and how their names find the outputs of a model.

Owns the layout root/CLASS/**/picture and the matching of class names to class indices. It does not open pictures and
does not know the model: labels and number of classes are given.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ...errors import DataError, Note
from ..class_labels import encode_labels, format_names
from ..datasets.imagenet import imagenet_classes
from ..images import list_images
from ..sources import SPLIT_ALIASES, FileSource, ResolvedDataset

SPLITS = frozenset(SPLIT_ALIASES)

_LAYOUT = "It should look like {folder}/cat/1.jpg, {folder}/dog/2.jpg: one folder for each class."


def list_labeled_images(folder: str | Path) -> list[tuple[Path, str]]:
    """(picture, name of its class folder) for all pictures, sorted by class and file.

    Class folders without pictures are left out, and so are pictures that lie beside the class folders.
    """
    folder = Path(folder)
    files = list_images(folder)  # refuses what is no folder and what holds no picture
    layout = _LAYOUT.format(folder=folder)
    inside = _inside(folder, files)
    pairs = [(file, path.partition("/")[0]) for file, path in zip(files, inside, strict=True) if "/" in path]
    if not pairs:
        raise DataError(f"The pictures lie directly in {folder}, so their classes are unknown. {layout}")
    names = {name for _, name in pairs}
    if splits := _splits(names):
        choices = " or ".join(str(folder / name) for name in splits)
        raise DataError(f"{folder} holds the parts of a data set ({', '.join(splits)}), not classes: give {choices}.")
    return pairs


def _inside(folder: Path, files: Sequence[Path]) -> list[str]:
    """The files' paths from the folder on. `relative_to` would do, in ten times the time: 15 s for ImageNet."""
    start = 0 if folder == Path() else len(os.path.join(folder, ""))
    return [str(file)[start:].replace(os.sep, "/") for file in files]


def _splits(names: set[str]) -> list[str]:
    return sorted(names) if all(name.lower() in SPLITS for name in names) else []


def open_folder(folder: str | Path) -> ResolvedDataset:
    """ROOT/{train,val,test}/CLASS/**, each part with its class folders as labels; or ROOT/CLASS/**, all "train"."""
    folder = Path(folder)
    parts, notes = _part_folders(folder)
    if not parts:
        parts, notes = {"train": list_labeled_images(folder)}, []
    return ResolvedDataset({name: _source(folder, pairs) for name, pairs in parts.items()}, tuple(notes))


def _source(root: Path, pairs: list[tuple[Path, str]]) -> FileSource:
    paths = _inside(root, [file for file, _ in pairs])
    words = [(name,) for _, name in pairs]
    labels, targets = encode_labels(words, False, paths.__getitem__, sorted({name for _, name in pairs}))
    return FileSource(paths, labels, targets, root)


def _part_folders(folder: Path) -> tuple[dict[str, list[tuple[Path, str]]], list[Note]]:
    """The content of each part, and what was left out; no parts where the folders are classes.

    A folder called "test" is a part if it has class folders in it; without them it is often a competition's, whose
    labels are secret. Beside two parts no other folder can be meant as a class; beside a single one it can.
    """
    subfolders = sorted(p for p in folder.iterdir() if p.is_dir() and p.name[0] != ".") if folder.is_dir() else []
    parts: dict[str, list[tuple[Path, str]]] = {}
    notes = []
    for path in (p for p in subfolders if p.name.lower() in SPLITS):
        name = SPLIT_ALIASES[path.name.lower()]
        try:
            content = list_labeled_images(path)
        except DataError as error:
            notes.append(Note(f"{path} was left out. {error}", "split_left_out"))
            continue
        if name in parts:
            raise DataError(f"{folder} has two folders for the part {name!r}, one of them {path.name}. Merge them.")
        parts[name] = content
    others = [p.name for p in subfolders if p.name.lower() not in SPLITS and _holds_pictures(p)] if parts else []
    if others and len(parts) == 1:
        return {}, []
    if others:
        text = f"{folder} has folders beside its splits that were left out: {format_names(others)}."
        notes.append(Note(text, "folders_left_out"))
    return parts, notes


def _holds_pictures(folder: Path) -> bool:
    try:
        return bool(list_images(folder))
    except DataError:
        return False


def match_classes(names: Sequence[str], labels: Sequence[str] | None, num_classes: int) -> dict[str, int]:
    """The class index for each class folder.

    The names may be labels of the model (or one of the synonyms in a label such as "tench, Tinca tinca"; case, spaces,
    hyphens and underscores do not matter), WordNet ids if there are 1000 classes, or class indices. One of these must
    fit all names: a mixture is more likely a mistake than an intention.
    """
    if labels is not None and len(labels) != num_classes:
        raise DataError(f"There are {len(labels)} labels for {num_classes} classes. Give one label for each class.")
    found = [{name: scheme(name) for name in names} for scheme in _schemes(labels, num_classes)]
    for indices in found:
        fitting = {name: index for name, index in indices.items() if index is not None}
        if len(fitting) == len(indices):
            return fitting
    misfits = min(([name for name, index in each.items() if index is None] for each in found), key=len)
    raise DataError(_misfit_message(misfits, names, labels, num_classes))


Scheme = Callable[[str], int | None]


def _schemes(labels: Sequence[str] | None, num_classes: int) -> list[Scheme]:
    """In order of trust: a label that reads "7" means more than the index 7."""
    schemes: list[Scheme] = []
    if labels is not None:
        schemes.append(_by_label(labels))
    if num_classes == len(imagenet_classes()):
        schemes.append({wnid: index for index, (wnid, _) in enumerate(imagenet_classes())}.get)
    schemes.append(lambda name: _by_index(name, num_classes))
    return schemes


def _by_label(labels: Sequence[str]) -> Scheme:
    exact = _unique((label, index) for index, label in enumerate(labels))
    whole = _unique((_bare(label), index) for index, label in enumerate(labels))
    parts = _unique((_bare(part), index) for index, label in enumerate(labels) for part in label.split(","))

    def scheme(name: str) -> int | None:
        # To the letter first, for "a" and "A" may be two classes; then a whole label: "missile" is a class of its own
        # and a synonym of "projectile".
        bare = _bare(name)
        if (found := exact.get(name)) is not None:
            return found
        return whole[bare] if bare in whole else parts.get(bare)

    return scheme


def _unique(pairs: Iterable[tuple[str, int]]) -> dict[str, int | None]:
    """None for a text that stands for several classes, as "crane" does in ImageNet: the bird and the machine."""
    table: dict[str, int | None] = {}
    for text, index in pairs:
        table[text] = index if table.get(text, index) == index else None
    return table


def _bare(text: str) -> str:
    return re.sub(r"[\s_-]+", "", text).casefold()


def _by_index(name: str, num_classes: int) -> int | None:
    # isascii: int() also takes digits of other scripts, and "²" is a digit to isdigit() but not to int().
    if not (name.isascii() and name.isdigit()):
        return None
    digits = name.lstrip("0") or "0"
    if len(digits) > len(str(num_classes)):  # int() refuses thousands of digits with an exception
        return None
    return int(digits) if int(digits) < num_classes else None


def _misfit_message(misfits: list[str], names: Sequence[str], labels: Sequence[str] | None, num_classes: int) -> str:
    accepted = ["the model's labels (unless a name stands for several classes)"] if labels is not None else []
    if num_classes == len(imagenet_classes()):
        accepted.append("ImageNet's WordNet ids (n01440764)")
    accepted.append(f"class indices from 0 to {num_classes - 1}")
    message = f"No class of the model fits the folders {format_names(misfits)}. Folder names may be {' or '.join(accepted)}."
    if labels is None and len(set(names)) == num_classes:
        message += " The model has no labels, and the order of the folders is not taken for theirs: give the labels."
    return message
