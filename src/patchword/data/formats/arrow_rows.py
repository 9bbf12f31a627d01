"""Images and labels in the rows of Arrow tables, as Hugging Face and others write them.

Owns which columns hold image and label, and what their cells may contain. It does not know where rows come from:
`formats.parquet` and `formats.hf_datasets` provide them, and import pyarrow only when they are used.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from ...errors import ConfigError, DataError, ImageError, how_to_install
from ..class_labels import encode_labels, format_names, parse_labels
from ..image_decoder import Mode, load_image
from ..sources import Source, decode_image

if TYPE_CHECKING:
    import pyarrow as pa

# In order of preference, if several columns are candidates.
IMAGE_COLUMNS = ("image", "img", "picture", "photo", "jpg", "png")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "category", "target")


class Columns(NamedTuple):
    """Names of the image and the label column, and the class names if labels are indices into them."""

    image: str
    label: str
    class_names: tuple[str, ...] | None


class RowSource(Source):
    """Rows of a table.

    Args:
        cell: returns the image cell of a row: bytes, a dict with "bytes" and "path", or None.
        title: prefix of the row number in sample keys: the file or the split.
        folder: location of the data; paths in cells are relative to it.
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
        except Exception as error:  # a damaged page; pyarrow's errors have no common base class
            reason = f"the file is damaged ({error})."
            raise ImageError(reason, name=self.name(index), code="image_damaged") from error
        data, path = split_cell(value)
        if data is None and path:
            if os.path.isabs(path) or ".." in path.replace("\\", "/").split("/"):
                reason = f"its path {path!r} is outside of the folder of the table. Move the image into it."
                raise ImageError(reason, name=self.name(index), code="image_outside_folder")
            return load_image(os.path.join(self.folder, path), mode=mode, min_size=min_size)
        if data is None:
            raise ImageError("there is no image in this row.", name=self.name(index), code="image_empty")
        return decode_image(data, self.name(index), mode, min_size)


def split_cell(value: Any) -> tuple[Any, str | None]:
    """Return the bytes and the path of an image cell, which is a dict of both, or bytes."""
    return (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)


def find_columns(schema: "pa.Schema", what: str) -> Columns:
    """Find the image and label columns, by Hugging Face's feature metadata or else by type and name."""
    features = _features(schema)
    image = find_image_column(schema, what)
    with_names = {column: names for column in schema.names if (names := _class_names(features.get(column)))}
    candidates = list(with_names) or [name for name in schema.names if name.lower() in LABEL_COLUMNS]
    label = _choose_column("label", LABEL_COLUMNS, candidates, schema, what)
    return Columns(image, label, with_names.get(label))


def find_image_column(schema: "pa.Schema", what: str) -> str:
    """Find the image column alone, for tables without labels."""
    return _choose_column("image", IMAGE_COLUMNS, _image_columns(schema, _features(schema)), schema, what)


def _features(schema: "pa.Schema") -> dict[str, Any]:
    """Read the feature metadata that the `datasets` library wrote; invalid metadata are ignored."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return features if isinstance(features, dict) else {}


def _image_columns(schema: "pa.Schema", features: dict[str, Any]) -> list[str]:
    declared = [name for name, f in features.items() if isinstance(f, dict) and f.get("_type") == "Image"]
    if columns := [name for name in declared if name in schema.names]:
        return columns
    # bytes, or a struct of bytes and path
    return [field.name for field in schema if re.match(r"(large_)?binary|struct<.*\bbytes: ", str(field.type))]


def _class_names(feature: Any) -> tuple[str, ...] | None:
    """Return the class names of a ClassLabel feature or a list of them."""
    if isinstance(feature, list):
        feature = {"feature": feature[0]} if feature else None
    if not isinstance(feature, dict):
        return None
    if feature.get("_type") == "ClassLabel" and isinstance(feature.get("names"), list):
        return tuple(map(str, feature["names"]))
    return _class_names(feature.get("feature"))


def _choose_column(kind: str, preferred: Sequence[str], candidates: list[str], schema: "pa.Schema", what: str) -> str:
    if len(candidates) == 1:
        return candidates[0]
    lower = {name.lower(): name for name in candidates}
    for name in preferred:
        if name in lower:
            return lower[name]
    if candidates:
        problem = f"several columns may contain the {kind}: {format_names(candidates)}"
    else:
        problem = f"no column contains the {kind}; the columns are {format_names(schema.names)}"
    raise DataError(f"{what}: {problem}. Rename the right one to {preferred[0]!r}.")


def row_labels(
    values: Sequence[Any], class_names: tuple[str, ...] | None, multi_label: bool, title: str
) -> tuple[tuple[str, ...], np.ndarray] | None:
    """Encode a label column as (labels, targets); None if no row has a label, as in test sets of competitions."""
    labels = [parse_labels(value) for value in values]
    if class_names is not None:
        labels = [_to_class_names(indices, class_names, f"{title} row {row}") for row, indices in enumerate(labels)]
    if not any(labels):
        return None
    return encode_labels(labels, multi_label, lambda row: f"{title} row {row}", class_names)


def _to_class_names(indices: tuple[str, ...], class_names: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Convert class indices to names; Hugging Face writes -1 for a missing label."""
    indices = tuple(index for index in indices if index != "-1")
    if invalid := [index for index in indices if not (index.isdigit() and int(index) < len(class_names))]:
        raise DataError(f"{where} has the label {invalid[0]}, but there are only {len(class_names)} classes.")
    return tuple(class_names[int(index)] for index in indices)


def import_parquet(purpose: str) -> tuple[Any, Any]:
    """Import pyarrow and pyarrow.parquet. Raises `ConfigError` with the install line without them."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise missing_package("pyarrow", purpose) from None
    return pa, pq


def missing_package(name: str, purpose: str) -> ConfigError:
    """Make the error for an optional package that cannot be imported."""
    return ConfigError(f"{purpose} needs the package {name}: {how_to_install('data')}.")
