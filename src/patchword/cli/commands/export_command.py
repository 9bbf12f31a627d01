"""The commands that take a model elsewhere and fast: export, bench."""

import json as json_format
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import OmitArgPrefixes, Positional

from ...errors import ConfigError
from ..model_args import MODEL_ARG, NO_OVERRIDES, Flag, ModelReference, ModelArgs, model_title, arg
from ..output import progress, print_status
from .evaluate_command import check_labels

if TYPE_CHECKING:
    from torch import Tensor

    from ...checkpoints import Checkpoint
    from ...config import ModelConfig
    from ...engines.bench import EngineBench
    from ...evaluation.evaluate import LabeledImage
    from ...evaluation.export_check import ExportCheck
    from ...inference.classifier import Classifier

FEW = 500  # pictures, on which half a point is less than three of them
LOSS = 0.5  # points of accuracy that a file may lose if nothing else is said


def export(
    model: ModelReference,
    out: Annotated[Positional[Path], arg("OUT")],
    reading: OmitArgPrefixes[ModelArgs] = NO_OVERRIDES,
    whole: Flag = False,
    int8: Flag = False,
    merge: float = 0.0,
    merge_drop: float | None = None,
    verify: Annotated[str | None, arg("DATA")] = None,
    calibrate: Annotated[str | None, arg("DATA")] = None,
    max_drop: float | None = None,
    overwrite: Flag = False,
) -> int:
    """Write a model as a file that runs without patchword: OUT.onnx, OUT.pt2 (torch.export) or OUT.xml (OpenVINO).

    Example: patchword export runs/pets pets.onnx --int8 --verify pets/

    The file is opened again and compared with the model on real pictures before it gets its name; the comparison is
    written beside it as OUT.proof.json.

    Args:
        out: the ending says the format
        whole: resizing, cropping and probabilities in the graph: pictures of any size in
        int8: eight bits in the large matrix products; needs --verify
        merge: part of the patches to merge in each block behind the first quarter, e.g. 0.15; needs --verify
        merge_drop: merge as many as cost at most so many points, chosen on every second picture of --verify, as above
        verify: labelled pictures, as for evaluate, on which accuracy is measured before and after
        calibrate: pictures whose values set the ranges of int8; some photographs by default
        max_drop: points of accuracy that may be lost, else nothing is written; 0.5, and --merge-drop on top, by default
        overwrite: replace the file if it is there
    """
    if verify is None and (int8 or merge or merge_drop is not None):
        raise ConfigError("--int8, --merge and --merge-drop change answers: give --verify DATA, so the loss is known.")
    if calibrate is not None and not int8:
        raise ConfigError("--calibrate goes with --int8: nothing else needs to be calibrated.")
    max_drop = max_drop if max_drop is not None else LOSS + (merge_drop or 0.0)
    check_numbers(merge, merge_drop, max_drop)
    from ...core.io import atomic_output, replace_json
    from ...engines.export import ExportOptions, check_format, write_export
    from ...evaluation.evaluate import labeled_images
    from ...evaluation.export_check import check_export
    from ...inference.classifier import Classifier

    out = out.expanduser().resolve()
    check_format(out, ExportOptions(int8, whole))
    weights = out.with_suffix(".bin")
    check_room([out, weights] if out.suffix == ".xml" else [out], overwrite)
    classifier = Classifier(reading.read(model))
    checkpoint = classifier.checkpoint
    pictures = labeled_images(verify, checkpoint.multi_label) if verify else []
    check_labels(classifier, model, pictures)
    if verify and len(pictures) < FEW:
        print_status(f"note: {len(pictures)} pictures cannot show a loss of {max_drop:g} points; give a thousand or more.")
    if merge_drop is not None:
        merge, num_images = merged_within(classifier, pictures, merge_drop)
    wanted = ExportOptions(int8, whole, merged_by(checkpoint.config, merge))
    print_status(f"making {out.name}")
    with atomic_output(out, overwrite=overwrite) as made:
        engine = write_export(checkpoint, made, wanted, calibration(classifier, calibrate))
        with progress("comparing", 2 * len(pictures)) as step:
            proof = check_export(classifier, engine, wanted, pictures, max_drop / 100, step)
        said = {"file": out.name, **stated(made), "model": model, "verify": verify, "max_drop": max_drop}
        said |= {**vars(wanted), **proof.to_json()}
        replace_json(out.with_name(f"{out.name}.proof.json"), said)
        put_weights(made, weights)
    print_proof(out, said["bytes"], proof)
    return 0


def check_room(paths: list[Path], overwrite: bool) -> None:
    for path in paths:
        if path.exists() and not overwrite:
            raise ConfigError(f"{path} exists already. Choose another name, or add --overwrite.")


def check_numbers(merge: float, merge_drop: float | None, max_drop: float) -> None:
    if not 0 <= merge <= 0.5:
        raise ConfigError(f"--merge is a part of the patches, from 0 to 0.5, not {merge:g}.")
    if not 0 <= max_drop <= 100 or not 0 <= (merge_drop or 0.0) <= 100:
        raise ConfigError("--max-drop and --merge-drop must be a number of points from 0 to 100.")
    if merge and merge_drop is not None:
        raise ConfigError("Give --merge or --merge-drop, not both.")


def stated(made: Path) -> dict[str, Any]:
    """What ties a proof to its file."""
    from ... import __version__
    from ...core.io import sha256

    files = [made, made.with_suffix(".bin")] if made.suffix == ".xml" else [made]
    digests = [sha256(file) for file in files]
    weights = {"sha256_of_weights": digests[1]} if len(digests) > 1 else {}  # OpenVINO keeps them all in the .bin
    size = sum(file.stat().st_size for file in files)
    return {"sha256": digests[0], **weights, "bytes": size, "patchword": __version__, "date": time.strftime("%Y-%m-%d")}


def merged_within(
    classifier: "Classifier", pictures: "list[LabeledImage]", points: float
) -> "tuple[float, list[LabeledImage]]":
    """The part that is merged, chosen on every second picture, and the other pictures, for the proof."""
    from ...evaluation.tome_search import STEPS, choose_tome_ratio

    pictures, rest = pictures[::2], pictures[1::2]
    if not rest:
        raise ConfigError("--merge-drop chooses on every second picture of --verify, proves on the others: give more.")
    with progress("choosing", STEPS * len(pictures)) as step:
        part = choose_tome_ratio(classifier, pictures, points / 100, step)
    print_status(f"merging {part:.0%} of the patches in each block behind the first quarter, by {len(pictures)} pictures")
    return part, rest


def merged_by(config: "ModelConfig", part: float) -> tuple[int, ...]:
    from ...models.token_merging import merge_schedule

    merged = merge_schedule(config, part) if part else ()
    if part and not any(merged):
        raise ConfigError(f"--merge {part:g} is less than one patch of this model's in any block.")
    return merged


def put_weights(made: Path, weights: Path) -> None:
    """OpenVINO keeps weights in a file of their own, which must be there before the one that names it."""
    from ...core.io import move_into_place

    if made.suffix == ".xml":
        weights.with_suffix(".xml").unlink(missing_ok=True)  # an old one would name weights that are not its own
        move_into_place(made.with_suffix(".bin"), weights)


def calibration(classifier: "Classifier", data: str | None) -> "Tensor | None":
    """Some pictures of a folder as the model sees them; None: photographs that come with a library."""
    if data is None:
        return None
    import torch

    from ...engines.engine import NUM_CALIBRATION_IMAGES
    from ...errors import DataError, ImageError
    from ...inference.predict import find_files

    files = find_files([data])
    step = -(-len(files) // NUM_CALIBRATION_IMAGES)  # from all classes, which stand in order
    read = classifier.each(files[::step] if step else [], lambda pixels: pixels)
    good = [row for row in read if not isinstance(row, ImageError)]
    if not good:
        raise DataError(f"None of the pictures in {data} can be read, so int8 cannot be calibrated with them.")
    return torch.stack(good)


def print_proof(out: Path, size: int, proof: "ExportCheck") -> None:
    found = proof.parity
    print(f"file       {out}, {size / 2**20:.1f} MiB")
    same = f"{found.top1_agreement:.1%} of {found.num_images} pictures that were compared one by one get the same class"
    print(f"agreement  {same}, divergence {found.kl_divergence:.2g}")
    if proof.accuracy is not None:
        each = proof.accuracy
        chance = f" (p = {each['p_value']:.2g})" if "p_value" in each else ""
        print(f"accuracy   {each['before']:.2%} before, {each['after']:.2%} after, of {each['n']} pictures{chance}")
    print(f"speed      {proof.speed_before:.1f} pictures per second in PyTorch, {proof.speed_after:.1f} from the file")


def bench(
    model: Annotated[Positional[str], MODEL_ARG] = "patchword:cifar10",
    reading: OmitArgPrefixes[ModelArgs] = NO_OVERRIDES,
    engines: Annotated[tuple[str, ...], arg("NAME...")] = (),
    seconds: float = 5.0,
    verify: Annotated[str | None, arg("DATA")] = None,
    json: Flag = False,
    out: Annotated[Path | None, arg("DIR")] = None,
    overwrite: Flag = False,
) -> int:
    """Measure this machine's engines side by side: latency, throughput, memory, and whether answers stay the same.

    Example: patchword bench hf:google/vit-base-patch16-224

    Args:
        engines: those to measure; all that work here by default
        seconds: for each engine at each batch size; use the machine for nothing else meanwhile
        verify: labelled pictures, as for evaluate: also measure each engine's accuracy
        json: one JSON document on standard output, nothing else
        out: folder for a page with the table and a figure, accuracy against speed
        overwrite: replace the page if it is there
    """
    if seconds <= 0:
        raise ConfigError(f"--seconds must be above 0, not {seconds:g}.")
    from ...engines.bench import BATCH_SIZES
    from ...engines.bench import bench_engines as measure
    from ...engines.engine import ENGINES
    from ...engines.engine_trials import run_trials
    from ...engines.parity import held_out_images
    from ...evaluation.evaluate import labeled_images
    from ...inference.classifier import Classifier
    from ...report.figure_files import require_empty_dir

    if unknown := sorted(set(engines) - set(ENGINES)):
        raise ConfigError(f"There is no engine {unknown[0]!r}; there are {', '.join(ENGINES)}.")
    if out:
        require_empty_dir(out, overwrite)
    classifier = Classifier(reading.read(model))
    checkpoint = classifier.checkpoint
    assert checkpoint.preprocess is not None
    pictures = labeled_images(verify, checkpoint.multi_label) if verify else []
    check_labels(classifier, model, pictures)
    asked = engines or tuple(ENGINES)
    with progress("trying", len(asked)) as step:
        verdicts = run_trials(asked, step)
    names = [name for name, verdict in verdicts.items() if verdict.works]
    for verdict in verdicts.values():
        if not verdict.works:
            print_status(f"{verdict.name} does not work here: {verdict.reason}")
    if not names:
        raise ConfigError("None of these engines works here.")
    with progress("measuring", len(names) + len(BATCH_SIZES)) as step:
        rows = measure(checkpoint, names, held_out_images(checkpoint.preprocess), seconds, on_progress=step)
    if all(row.error for row in rows):
        raise ConfigError(f"None of these engines can run this model. {rows[0].name}: {rows[0].error}")
    accuracy = accuracies(checkpoint, [row.name for row in rows if not row.error], pictures) if pictures else {}
    show_bench(rows, accuracy, json)
    if out:
        write_bench_page(out, model, rows, accuracy)
    return 0


def accuracies(checkpoint: "Checkpoint", names: list[str], pictures: "list[LabeledImage]") -> dict[str, float]:
    from ...evaluation.evaluate import evaluate
    from ...inference.classifier import Classifier

    found = {}
    for name in names:
        with progress(name, len(pictures)) as step:
            result = evaluate(Classifier(checkpoint, name), pictures, on_progress=step)
        found[name] = float(result.figures["map" if checkpoint.multi_label else "top1"])
    return found


def show_bench(rows: "list[EngineBench]", accuracy: dict[str, float], json: bool) -> None:
    from ...report.bench_results import bench_table

    if json:
        said = [row.to_json() | ({"accuracy": accuracy[row.name]} if row.name in accuracy else {}) for row in rows]
        print(json_format.dumps(said, indent=2))
        return
    lines = bench_table(rows, accuracy)
    widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *cells[1:]]).rstrip())


def write_bench_page(out: Path, model: str, rows: "list[EngineBench]", accuracy: dict[str, float]) -> None:
    from ...core.runtime import machine_summary
    from ...report.figure_files import REPORT_FILE
    from ...report.pages import write_bench

    facts = [("Model", model_title(model)), ("Machine", machine_summary())]
    write_bench(out, model_title(model), facts, rows, accuracy)
    print_status(f"wrote {out / REPORT_FILE}")
