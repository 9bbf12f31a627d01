"""`patchword embed`: write image embeddings."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...core.progress import progress
from ...core.text import pluralize, print_stderr
from ...errors import ConfigError, DataError
from ..arguments import arg, positional
from ..large_jobs import ChunkSize, RayAddress, require_large_job, run_large_job
from ..model_args import NO_OVERRIDES, Flag, JsonFlag, ModelArgs, ModelReference
from ..output import print_json, report_unreadable, require_new_files

if TYPE_CHECKING:
    from ...errors import ImageError
    from ...inference.classifier import Encoder
    from ...inference.inputs import InputImage


def embed(
    model: ModelReference,
    images: Annotated[tuple[str, ...], positional("IMAGE...")],
    out: Annotated[str, arg("FILE|DIR")],
    model_args: ModelArgs = NO_OVERRIDES,
    ray: RayAddress = None,
    chunk_size: ChunkSize = None,
    json: JsonFlag = False,
    overwrite: Flag = False,
) -> int:
    """Write image embeddings, the features before the head, for search, clustering or your own classifier.

    Example: patchword embed hf:facebook/dinov2-small photos/ --out features.npz

    The model needs no head. An image that cannot be read is listed and left out of the file.

    Large jobs: with a directory or URL as --out, features are written in Parquet parts, each exactly once. If the
    command is killed, the same command continues. Inputs and DIR may be URLs such as s3://bucket/photos/.

    Args:
        images: files, folders (searched recursively), or a dataset such as cifar10
        out: file to write, by its suffix: .npz (arrays features and paths), .parquet (columns path and features) or
            .csv (a column for each feature); or a directory or URL, for many images
        overwrite: replace an existing file
    """
    from ...inference.classifier import Encoder
    from ...inference.embed import feature_dim
    from ...inference.feature_files import check_feature_file
    from ...inference.inputs import resolve_images

    if is_directory(out):
        if overwrite:
            raise ConfigError("--overwrite has no effect on a directory: its parts are written once. Choose another.")
        from ...inference.prediction_job import JobRequest

        request = JobRequest("embed", model_args.read(model), images, out, chunk_size=chunk_size)
        return run_large_job(request, ray, json)
    require_large_job(None, ray, chunk_size)
    path = Path(out)
    check_feature_file(path)
    require_new_files(path, overwrite=overwrite)
    inputs = resolve_images(images)
    encoder = Encoder(model_args.read(model))
    width = feature_dim(encoder.checkpoint.config)
    unreadable = write_features(encoder, inputs, path, width)
    count = len(inputs) - len(unreadable)
    print_stderr(f"wrote {out}: {width:,} features of {pluralize(count, 'image')}")
    if json:
        errors = [{"path": name, "error": str(error), "code": error.code} for name, error in unreadable]
        print_json({"out": out, "images": count, "feature_dim": width, "errors": errors})
    return report_unreadable([(name, str(error)) for name, error in unreadable], len(inputs))


def is_directory(out: str) -> bool:
    """Whether an output is a directory or URL for parts: it has no suffix, or ends with a slash."""
    from ...data.storage import is_remote

    return is_remote(out) or out.endswith("/") or not Path(out).suffix or Path(out).is_dir()


def write_features(
    encoder: "Encoder", inputs: "list[InputImage]", out: Path, width: int
) -> "list[tuple[str, ImageError]]":
    """Write the features of all images chunk by chunk, and return the images that could not be read."""
    from ...inference.embed import embed_images
    from ...inference.feature_files import open_feature_file

    unreadable: list[tuple[str, ImageError]] = []
    with progress("embedding", len(inputs)) as step, open_feature_file(out, width) as append:
        for chunk in embed_images(encoder, inputs, on_image=step):
            append(chunk)
            unreadable += chunk.unreadable
        if len(unreadable) == len(inputs):  # no file is better than an empty one
            message = f"None of the {len(inputs):,} images could be read. The first: {unreadable[0][1]}"
            raise DataError(message, code="no_image")
    return unreadable
