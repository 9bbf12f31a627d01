"""Pictures and labels in the rows of Arrow tables, as Hugging Face and others write them.

Owns which columns are picture and label, and what a cell of either may hold. It does not know where rows come from:
`data.parquet` and `data.hub_datasets` bring them. pyarrow is imported by those, only when they are used.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from ...errors import ConfigError, DataError, ImageError, how_to_install
from ..class_labels import parse_labels, encode_labels, format_names
from ..images import Mode, load_image
from ..sources import Source, decode_image

if TYPE_CHECKING:
    import pyarrow as pa

# In order of preference, where several columns could be meant.
IMAGE_COLUMNS = ("image", "img", "picture", "photo", "jpg", "png")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "category", "target")


class Columns(NamedTuple):
    image: str
    label: str
    names: tuple[str, ...] | None  # of the classes, where the label is an index into them


class RowSource(Source):
    """Rows, of which `cell` gives the picture's: bytes, or {"bytes", "path"}, or None.

    Args:
        title: what stands before the number of the row: the file or the part.
        folder: where the data are, and what a path in a cell is relative to.
    """

    def __init__(
        self,
        cell: Callable[[int], Any],
        labels: Sequence[str],
        targets: np.ndarray,
        title: str,
        folder: str,
    ) -> None:
        super().__init__(labels, targets)
        self.cell, self.title, self.folder = cell, title, folder

    def key(self, index: int) -> str:
        return f"{self.title} row {self.rows[index]}"

    def name(self, index: int) -> str:
        return os.path.join(self.folder, self.key(index))

    def read(self, index: int, *, mode: Mode, min_size: tuple[int, int] | None = None) -> Image.Image:
        try:
            value = self.cell(int(self.rows[index]))
        except Exception as error:  # a damaged page of a file; pyarrow has no common base for what it raises
            reason = f"the file is damaged ({error})."
            raise ImageError(reason, name=self.name(index), code="image_damaged") from error
        data, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
        if data is None and path:
            return load_image(os.path.join(self.folder, path), mode=mode, min_size=min_size)
        if data is None:
            raise ImageError("there is no image in this row.", name=self.name(index), code="image_empty")
        return decode_image(data, self.name(index), mode, min_size)


def find_columns(schema: "pa.Schema", what: str) -> Columns:
    """The columns of picture and label, by what Hugging Face noted about them, else by type and name."""
    features = _features(schema)
    image = _chosen("picture", IMAGE_COLUMNS, _image_columns(schema, features), schema, what)
    with_names = {column: names for column in schema.names if (names := _class_names(features.get(column)))}
    candidates = list(with_names) or [name for name in schema.names if name.lower() in LABEL_COLUMNS]
    label = _chosen("label", LABEL_COLUMNS, candidates, schema, what)
    return Columns(image, label, with_names.get(label))


def _features(schema: "pa.Schema") -> dict[str, Any]:
    """What Hugging Face's datasets wrote into the file about its columns; nothing is as good as something wrong."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return features if isinstance(features, dict) else {}


def _image_columns(schema: "pa.Schema", features: dict[str, Any]) -> list[str]:
    noted = [name for name, f in features.items() if isinstance(f, dict) and f.get("_type") == "Image"]
    if found := [name for name in noted if name in schema.names]:
        return found
    # bytes, or a struct of bytes and path
    return [field.name for field in schema if re.match(r"(large_)?binary|struct<.*\bbytes: ", str(field.type))]


def _class_names(feature: Any) -> tuple[str, ...] | None:
    """The names of a ClassLabel, or of a list of ClassLabels."""
    if isinstance(feature, list):
        feature = {"feature": feature[0]} if feature else None
    if not isinstance(feature, dict):
        return None
    if feature.get("_type") == "ClassLabel" and isinstance(feature.get("names"), list):
        return tuple(map(str, feature["names"]))
    return _class_names(feature.get("feature"))


def _chosen(kind: str, preferred: Sequence[str], candidates: list[str], schema: "pa.Schema", what: str) -> str:
    if len(candidates) == 1:
        return candidates[0]
    lower = {name.lower(): name for name in candidates}
    for name in preferred:
        if name in lower:
            return lower[name]
    found = f"several columns could be it: {format_names(candidates)}" if candidates else f"there are {format_names(schema.names)}"
    raise DataError(f"{what} has no column that is clearly the {kind}; {found}. Call it {preferred[0]!r}.")


def row_labels(
    values: Sequence[Any], names: tuple[str, ...] | None, multi_label: bool, title: str
) -> tuple[tuple[str, ...], np.ndarray] | None:
    """Labels and targets of a column; None if no row has a label, as in the test parts of competitions."""
    words = [parse_labels(value) for value in values]
    if names is not None:
        words = [_named(each, names, f"{title} row {row}") for row, each in enumerate(words)]
    if not any(words):
        return None
    return encode_labels(words, multi_label, lambda row: f"{title} row {row}", names)


def _named(words: tuple[str, ...], names: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Names instead of indices; -1 is how Hugging Face writes that there is none."""
    if wrong := [word for word in words if word != "-1" and not (word.isdigit() and int(word) < len(names))]:
        raise DataError(f"{where} has the label {wrong[0]}, but there are {len(names)} classes.")
    return tuple(names[int(word)] for word in words if word != "-1")


def missing_package(name: str, purpose: str) -> ConfigError:
    """What to raise where an optional package cannot be imported."""
    return ConfigError(f"{purpose} needs the package {name}: {how_to_install('data')}")
