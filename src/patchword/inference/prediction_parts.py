"""Parts of a large job: a chunk of the manifest in, one immutable Parquet file of predictions or features out.

`predict_chunk` is the only function that makes a part, locally and on a cluster. The same chunk gives the same bytes,
and a part is only created, never changed: who computes a chunk twice wastes work, but no row is lost or doubled.
"""

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from ..checkpoints import Checkpoint
from ..core.io import json_bytes
from ..data.formats.arrow_rows import import_parquet
from ..data.sources import decode_image
from ..data.storage import Storage, StoredObject
from ..data.storage_file import open_file
from ..errors import ImageError
from .classifier import Classifier, Encoder
from .embed import feature_dim
from .entry_reader import EntryReader, read_ahead
from .inputs import InputImage
from .predict import predict_images
from .prediction_csv import ImageResult
from .prediction_manifest import Manifest

SUCCESS_KEY = "_SUCCESS.json"
MAX_LISTED_ERRORS = 100  # in the summary; the parts have all of them
NUM_FOOTER_THREADS = 32  # read at the end of a job, when nothing else is running
_PART_NAME = re.compile(r"part-(\d{8,})\.parquet")


@dataclass(frozen=True)
class ChunkModel:
    """A model that is ready for the task of a job.

    Attributes:
        encoder: The model; a `Classifier` for predictions.
        top: Classes for each image; 0 to write features.
    """

    encoder: Encoder
    top: int

    @staticmethod
    def open(checkpoint: Checkpoint, settings: dict[str, Any]) -> "ChunkModel":
        """Open the model of a job with the engine of its manifest."""
        if settings["task"] == "embed":
            return ChunkModel(Encoder(checkpoint), 0)
        return ChunkModel(Classifier(checkpoint, settings["engine"]), settings["top"])

    def run(self, pixels: Tensor) -> Tensor:
        """Compute logits or features of pixels, uint8 (B, H, W, C)."""
        if isinstance(self.encoder, Classifier):
            return self.encoder.logits(pixels)
        return self.encoder.model.embed_images(self.encoder.preprocess.normalize(pixels))


@dataclass(frozen=True)
class ChunkResult:
    """What became of a chunk.

    Attributes:
        number: The number of the chunk.
        num_images: Its images.
        errors: How many of them could not be read, by code.
        created: Whether this call wrote the part; otherwise another process was faster.
    """

    number: int
    num_images: int
    errors: Counter[str] = field(default_factory=Counter)
    created: bool = True


def part_key(number: int) -> str:
    """Return the key of the part of a chunk."""
    return f"part-{number:08}.parquet"


def list_parts(storage: Storage) -> set[int]:
    """Return the numbers of the parts that exist."""
    names = (_PART_NAME.fullmatch(found.key) for found in storage.list())
    return {int(name[1]) for name in names if name}


def prediction_columns(num_scores: int) -> list[str]:
    """Return the columns of a part with predictions: those of the CSV table, and the code of an error."""
    ranks = [f"{name}_{rank}" for rank in range(1, num_scores + 1) for name in ("label", "index", "probability")]
    return ["path", *ranks, "error", "code"]


def predict_chunk(
    model: ChunkModel,
    manifest: Manifest,
    number: int,
    *,
    poisonous: Collection[int] = (),
    on_image: Callable[[], object] = lambda: None,
) -> ChunkResult:
    """Compute the rows of one chunk, in the order of the manifest, and create its part.

    Args:
        model: The model.
        manifest: The manifest of the job.
        number: The number of the chunk.
        poisonous: Positions of images that have crashed a process: they are not read, and get an `error` row.
        on_image: Called after each image.

    Raises:
        StorageError: Inputs cannot be read for a reason that is not one image, such as an object store that does not
            respond, credentials that have expired or a disk that is not mounted. No part was written.
    """
    entries = manifest.entries(number)
    reader = EntryReader(manifest.roots)
    rows: list[dict[str, Any]] = []
    for row in _compute_rows(model, chunk_images(reader, entries, poisonous)):
        rows.append(row)
        on_image()
    reader.errors.check()
    errors = Counter(row["code"] for row in rows if row.get("error"))
    created = manifest.storage.create(part_key(number), encode_part(model, manifest, rows))
    return ChunkResult(number, len(rows), errors, created)


def chunk_images(reader: EntryReader, entries: Sequence[Any], poisonous: Collection[int]) -> Iterator[InputImage]:
    """Yield the images of a chunk; each is read ahead, and decoded by the thread that computes its batch."""
    kept = [entry for position, entry in enumerate(entries) if position not in poisonous]
    contents = read_ahead(reader, kept)
    for position, entry in enumerate(entries):
        name = reader.name(entry)
        if position in poisonous:
            reason = "reading it ended the process several times. Convert or remove the file."
            yield InputImage(name, partial(_refuse, ImageError(reason, name=name, code="image_crashes")))
            continue
        _, content = next(contents)
        if isinstance(content, ImageError):
            yield InputImage(name, partial(_refuse, content))
        else:
            yield InputImage(name, partial(decode_image, content, name))


def _refuse(error: ImageError, **options: object) -> Any:
    raise error


def _compute_rows(model: ChunkModel, images: Iterator[InputImage]) -> Iterator[dict[str, Any]]:
    if model.top:
        assert isinstance(model.encoder, Classifier)
        for result in predict_images(model.encoder, images, model.top):
            yield _prediction_row(result)
        return
    names: list[str] = []

    def inputs() -> Iterator[Any]:
        for image in images:
            names.append(image.name)
            yield image.image

    for position, output in enumerate(model.encoder.map_images(inputs(), model.run)):
        row: dict[str, Any] = {"path": names[position]}
        if isinstance(output, ImageError):
            row |= {"error": str(output), "code": output.code}
        else:
            row["features"] = output.float().numpy()
        yield row


def _prediction_row(result: ImageResult) -> dict[str, Any]:
    row: dict[str, Any] = {name: result[name] for name in ("path", "error", "code") if name in result}
    for rank, score in enumerate(result.get("predictions", ()), start=1):
        row |= {f"{name}_{rank}": value for name, value in score.items()}
    return row


def encode_part(model: ChunkModel, manifest: Manifest, rows: Sequence[dict[str, Any]]) -> bytes:
    """Encode rows as a Parquet file; the same rows give the same bytes."""
    pa, pq = import_parquet("A prediction job")
    columns = manifest.settings["columns"]
    arrays = {name: _encode_column(pa, name, [row.get(name) for row in rows], model) for name in columns}
    table = pa.table(arrays).replace_schema_metadata({"patchword.manifest": manifest.digest})
    compressed = {name: "none" if name == "features" else "zstd" for name in columns}
    dictionaries = [name for name in columns if name.startswith("label_") or name in ("error", "code")]
    buffer = io.BytesIO()
    pq.write_table(
        table, buffer, compression=compressed, use_dictionary=dictionaries, write_statistics=["code"], store_schema=True
    )
    return buffer.getvalue()


def _encode_column(pa: Any, name: str, values: list[Any], model: ChunkModel) -> Any:
    if name == "features":
        width = feature_dim(model.encoder.checkpoint.config)
        flat = np.zeros((len(values), width), np.float32)
        for row, value in enumerate(values):
            if value is not None:
                flat[row] = value
        mask = pa.array([value is None for value in values], pa.bool_())
        return pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), width, mask=mask)
    kind = name.partition("_")[0]
    if kind in ("index", "probability"):
        return pa.array(values, pa.int32() if kind == "index" else pa.float32())
    # Parquet stores UTF-8: bytes of a file name that are not become escapes such as \udcff.
    texts = [None if value is None else value.encode("utf-8", "backslashreplace").decode() for value in values]
    return pa.array(texts, pa.string())


# The end of a job


def summarize_parts(manifest: Manifest, known: dict[int, Counter[str]]) -> dict[str, Any]:
    """Count images and errors of a complete job, as JSON.

    Args:
        manifest: The manifest.
        known: Errors of the parts that this process created; of the others, the footers are read.
    """

    def look(number: int) -> list[dict[str, str]]:
        return [] if number in known and not known[number] else read_errors(manifest, number)

    codes: Counter[str] = Counter()
    listed: list[dict[str, str]] = []
    with ThreadPoolExecutor(NUM_FOOTER_THREADS) as pool:
        for errors in pool.map(look, range(manifest.num_chunks)):
            codes.update(error["code"] for error in errors)
            listed += errors[: max(0, MAX_LISTED_ERRORS - len(listed))]
    return {
        "images": manifest.num_images,
        "errors": codes.total(),
        "error_codes": dict(sorted(codes.items())),
        "unreadable": listed,
        "parts": manifest.num_chunks,
        "manifest": manifest.digest,
    }


def read_errors(manifest: Manifest, number: int) -> list[dict[str, str]]:
    """Return the error rows of one part; most parts have none, which their footer says."""
    pa, pq = import_parquet("A prediction job")
    storage, key = manifest.storage, part_key(number)
    found = storage.head(key) or StoredObject(key, 0, "")
    with open_file(storage, found) as file:
        part = pq.ParquetFile(pa.PythonFile(file, mode="r"))
        position = part.schema_arrow.get_field_index("code")
        groups = [part.metadata.row_group(i).column(position) for i in range(part.metadata.num_row_groups)]
        if all(group.statistics is not None and group.statistics.null_count == group.num_values for group in groups):
            return []
        rows = part.read(columns=["path", "error", "code"]).to_pylist()
    return [row for row in rows if row["code"] is not None]


def write_success(manifest: Manifest, summary: dict[str, Any]) -> None:
    """Mark a job as complete."""
    manifest.storage.create(SUCCESS_KEY, json_bytes(summary))


def read_success(storage: Storage) -> dict[str, Any] | None:
    """Return the summary of a complete job; None if it is not complete."""
    if storage.head(SUCCESS_KEY) is None:
        return None
    summary: dict[str, Any] = json.loads(storage.read(SUCCESS_KEY))
    return summary
