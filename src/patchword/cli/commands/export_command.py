"""`patchword export`: write a model as a file that runs without patchword."""

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...core.progress import progress
from ...core.text import print_stderr
from ...errors import ConfigError, DataError
from ..arguments import arg, positional
from ..labeled_data import load_labeled_images
from ..model_args import NO_OVERRIDES, Flag, ModelArgs, ModelReference
from ..output import report_unreadable, require_new_files

if TYPE_CHECKING:
    from ...config import ModelConfig
    from ...engines.export import ExportOptions
    from ...evaluation.export_check import ExportCheck
    from ...inference.classifier import Classifier
    from ...inference.image_batch import ImageBatch
    from ...inference.inputs import InputImage

MIN_VERIFY_IMAGES = 500  # on fewer, half a point of accuracy is less than three images
DEFAULT_MAX_DROP = 0.5  # points of accuracy


def export(
    model: ModelReference,
    out: Annotated[Path, positional("OUT")],
    model_args: ModelArgs = NO_OVERRIDES,
    include_preprocessing: Flag = False,
    int8: Flag = False,
    tome_ratio: float = 0.0,
    tome_max_drop: float | None = None,
    verify: Annotated[str | None, arg("DATA")] = None,
    calibration_data: Annotated[str | None, arg("DATA")] = None,
    max_drop: float | None = None,
    overwrite: Flag = False,
) -> int:
    """Write a model as a file that runs without patchword: .onnx, .pt2 (torch.export) or .xml (OpenVINO).

    Example: patchword export runs/photos photos.onnx --int8 --verify photos/test

    The file is loaded and compared with the model on real images before OUT is created. The comparison is written to
    OUT.check.json.

    Args:
        out: file to write, whose extension (.onnx, .pt2 or .xml) selects the format
        include_preprocessing: the file takes images of any size, resizes and crops them, and returns probabilities
        int8: quantize the matmuls to int8 (.onnx, .xml); needs --verify
        tome_ratio: token merging (ToMe): fraction of the patches, 0 to 0.5, to merge in each block after the first
            quarter of the blocks; needs --verify
        tome_max_drop: instead of --tome-ratio, find the largest ratio that loses at most this many percentage points of
            accuracy on half of the --verify images
        verify: labeled images, as for evaluate, on which the accuracy is measured before and after
        calibration_data: images, labeled or not, that set the quantization ranges of --int8; by default, crops of
            sample photographs
        max_drop: percentage points of accuracy that may be lost, or else nothing is written; by default, 0.5 plus
            --tome-max-drop
        overwrite: replace an existing file
    """
    max_drop = DEFAULT_MAX_DROP + (tome_max_drop or 0.0) if max_drop is None else max_drop
    if verify is None and (int8 or tome_ratio or tome_max_drop is not None):
        raise ConfigError("--int8, --tome-ratio and --tome-max-drop change predictions: add --verify DATA.")
    if calibration_data is not None and not int8:
        raise ConfigError("--calibration-data needs --int8: nothing else is calibrated.")
    check_ranges(tome_ratio, tome_max_drop, max_drop)
    from ...engines.export import ExportOptions, check_format

    out = out.expanduser().resolve()
    options = ExportOptions(int8, include_preprocessing)
    check_format(out, options)
    require_new_files(out, out.with_suffix(".bin") if out.suffix == ".xml" else None, overwrite=overwrite)
    classifier = model_args.load_classifier(model)
    images = load_verify_images(verify, model, classifier, max_drop)
    if tome_max_drop is not None:
        tome_ratio, images = choose_ratio(classifier, images, tome_max_drop)
    options = dataclasses.replace(options, merge_counts=merge_counts_of(classifier.checkpoint.config, tome_ratio))
    calibration = load_calibration_images(classifier, calibration_data)
    request = {"model": model, "verify": verify, "max_drop": max_drop}
    check = write_checked_export(classifier, out, options, calibration, images, request, overwrite)
    codes = [report_unreadable(check.unreadable, len(images))]
    if calibration is not None:
        codes += [report_unreadable(calibration.unreadable, len(calibration.names) + len(calibration.unreadable))]
    return max(codes)


def check_ranges(tome_ratio: float, tome_max_drop: float | None, max_drop: float) -> None:
    """Check the numbers of the command line."""
    if not 0 <= tome_ratio <= 0.5:
        raise ConfigError(f"--tome-ratio must be a fraction from 0 to 0.5, not {tome_ratio:g}.")
    for flag, points in (("max-drop", max_drop), ("tome-max-drop", tome_max_drop or 0.0)):
        if not 0 <= points <= 100:
            raise ConfigError(f"--{flag} must be a number of points from 0 to 100, not {points:g}.")
    if tome_ratio and tome_max_drop is not None:
        raise ConfigError("--tome-ratio and --tome-max-drop exclude each other: choose one.")


def load_verify_images(data: str | None, model: str, classifier: "Classifier", max_drop: float) -> "list[InputImage]":
    """Find the labeled images of --verify; too few of them are reported."""
    images = load_labeled_images(data, {model: classifier})
    if data and len(images) < MIN_VERIFY_IMAGES:
        print_stderr(f"note: {len(images)} images cannot show a loss of {max_drop:g} points; use at least a thousand.")
    return images


def choose_ratio(
    classifier: "Classifier", images: "list[InputImage]", max_drop: float
) -> "tuple[float, list[InputImage]]":
    """Choose the ToMe ratio on every other image; return it with the remaining images, which verify the export."""
    from ...evaluation.tome_search import MAX_PASSES, choose_tome_ratio

    search_images, rest = images[::2], images[1::2]
    if not rest:
        raise ConfigError("--tome-max-drop needs at least two images in --verify: half search, half verify.")
    with progress("searching", MAX_PASSES * len(search_images)) as step:
        ratio = choose_tome_ratio(classifier, search_images, max_drop / 100, step)
    print_stderr(f"merging {ratio:.0%} of the patches per block (chosen on {len(search_images)} images)")
    return ratio, rest


def merge_counts_of(config: "ModelConfig", ratio: float) -> tuple[int, ...]:
    """Return how many patches each block merges at this ToMe ratio."""
    from ...models.token_merging import merge_schedule

    merge_counts = merge_schedule(config, ratio) if ratio else ()
    if ratio and not any(merge_counts):
        raise ConfigError(f"--tome-ratio {ratio:g} merges less than one patch of this model in every block.")
    return merge_counts


def load_calibration_images(classifier: "Classifier", data: str | None) -> "ImageBatch | None":
    """Load evenly spaced images of a dataset; None if no data are given."""
    if data is None:
        return None
    from ...engines.engine import NUM_CALIBRATION_IMAGES
    from ...inference.image_batch import load_image_batch
    from ...inference.inputs import resolve_images, sample_evenly

    batch = load_image_batch(classifier, sample_evenly(resolve_images([data]), NUM_CALIBRATION_IMAGES))
    if not batch.names:
        raise DataError(f"--calibration-data: none of the images in {data} can be read.")
    return batch


def write_checked_export(
    classifier: "Classifier", out: Path, options: "ExportOptions", calibration: "ImageBatch | None",
    images: "list[InputImage]", request: dict[str, Any], overwrite: bool,
) -> "ExportCheck":  # fmt: skip
    """Write the export, check it, and give it its name together with the results of the check."""
    from ...core.io import atomic_output, replace_json
    from ...engines.export import write_export
    from ...evaluation.export_check import check_export

    print_stderr(f"exporting {out.name}")
    with atomic_output(out, overwrite=overwrite) as temporary:
        pixels = None if calibration is None else calibration.pixels
        engine = write_export(classifier.checkpoint, temporary, options, pixels)
        with progress("comparing", 2 * len(images)) as step:
            check = check_export(classifier, engine, options, images, request["max_drop"] / 100, step)
        document = {"file": out.name, **file_facts(temporary), **request, **vars(options), **check.to_json()}
        replace_json(out.with_name(f"{out.name}.check.json"), document)
        move_openvino_weights(temporary, out)
    print_check(out, document["bytes"], check)
    return check


def file_facts(path: Path) -> dict[str, Any]:
    """Return what identifies an exported file: digests, size, version and date."""
    from ... import __version__
    from ...core.io import sha256

    files = [path, path.with_suffix(".bin")] if path.suffix == ".xml" else [path]
    digests = [sha256(file) for file in files]
    weights = {"sha256_of_weights": digests[1]} if len(digests) > 1 else {}
    size = sum(file.stat().st_size for file in files)
    return {"sha256": digests[0], **weights, "bytes": size, "patchword": __version__, "date": time.strftime("%Y-%m-%d")}


def move_openvino_weights(temporary: Path, out: Path) -> None:
    """Move the .bin file of an OpenVINO model into place, which must happen before its .xml file is."""
    from ...core.io import move_into_place

    if out.suffix == ".xml":
        out.unlink(missing_ok=True)  # an older .xml must not be paired with the new weights
        move_into_place(temporary.with_suffix(".bin"), out.with_suffix(".bin"))


def print_check(out: Path, size: int, check: "ExportCheck") -> None:
    """Print size, parity, accuracy and speed of an exported file."""
    parity = check.parity
    print(f"file       {out}, {size / 2**20:.1f} MiB")
    agreement = f"same top-1 class on {parity.top1_agreement:.1%} of {parity.num_images} images"
    print(f"parity     {agreement}, KL divergence {parity.kl_divergence:.2g}")
    if check.accuracy is not None:
        accuracy = check.accuracy
        p_value = f" (p = {accuracy['p_value']:.2g})" if "p_value" in accuracy else ""
        change = f"{accuracy['before']:.2%} before, {accuracy['after']:.2%} after"
        print(f"accuracy   {change}, on {accuracy['n']} images{p_value}")
    print(f"speed      {check.speed_before:.1f} images per second in PyTorch, {check.speed_after:.1f} from the file")
