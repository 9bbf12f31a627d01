"""The commands that use a model: predict, convert."""

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import OmitArgPrefixes, Positional

from ...errors import ConfigError
from ..model_args import NO_OVERRIDES, EngineName, Flag, ModelReference, ModelArgs, arg
from ..output import print_predictions, progress, report_unreadable, print_status

if TYPE_CHECKING:
    from ...inference.classifier import Classifier

Format = Literal["patchword", "google", "big_vision", "timm", "transformers", "torchvision", "deit", "dinov2"]


def predict(
    model: ModelReference,
    images: Annotated[Positional[tuple[str, ...]], arg("IMAGE...")],
    reading: OmitArgPrefixes[ModelArgs] = NO_OVERRIDES,
    top: int = 5,
    json: Flag = False,
    csv: Annotated[Path | None, arg("FILE")] = None,
    explain: Annotated[Path | None, arg("DIR")] = None,
    overwrite: Flag = False,
    engine: EngineName = "torch",
) -> int:
    """Classify pictures.

    Example: patchword predict hf:google/vit-base-patch16-224 cat.jpg photos/ --top 3

    Args:
        images: files, or folders to be searched
        top: how many classes to show
        json: one JSON document on standard output, nothing else
        csv: write a table, one row for each picture; killed, the same command goes on where it stopped
        explain: also write each picture with what the model saw in it into this folder
        overwrite: replace the table, and explanations, if they are there
    """
    if top < 1:
        raise ConfigError(f"--top must be at least 1, not {top}.")
    if csv and csv.exists() and not overwrite:
        raise ConfigError(f"{csv} exists already. Choose another name, or add --overwrite.")
    if csv and json:
        raise ConfigError("--csv writes a table, --json prints one: choose one of them.")
    from ...inference import predict as prediction
    from ...inference.classifier import Classifier

    files = prediction.find_files(images)
    classifier = Classifier(reading.read(model), engine)
    if engine == "auto":
        print_status(f"engine: {classifier.chosen}")
    if explain:
        from ...report.explanation_images import check_folder

        check_folder(classifier, explain, overwrite)
    if csv:
        return write_table(classifier, files, top, csv, explain)
    with progress("predicting", len(files)) as step:
        rows = [row for row in prediction.predict_files(classifier, files, top) if step()]
    if explain:
        explain_all(classifier, [Path(row["path"]) for row in rows if "error" not in row], explain)
    if json:
        print(json_format.dumps(rows, indent=2))
    else:
        print_predictions(rows)
    return report_unreadable([(row["path"], row["error"]) for row in rows if "error" in row], len(rows))


def write_table(classifier: "Classifier", files: list[Path], top: int, csv: Path, explain: Path | None) -> int:
    """Row by row, so that any number of files fits into memory, and a kill costs nothing."""
    from ...inference.predict import predict_table

    with progress("predicting", len(files)) as step:
        written = predict_table(classifier, files, top, csv, step)
    if written.already:
        print_status(f"went on behind the {written.already:,} pictures that {csv}.partial had already")
    if explain:
        explain_all(classifier, files, explain)
    print_status(f"wrote {csv}")
    code = report_unreadable(written.unread, len(files))
    if written.already_unread:
        print_status(f"{written.already_unread:,} more could not be read before; the column error says why.")
    return 3 if written.already_unread else code


def explain_all(classifier: "Classifier", files: list[Path], folder: Path) -> None:
    from ...inspection.explain import default_method
    from ...report.explanation_images import explain_files

    with progress("explaining", len(files)) as step:
        written = sum(isinstance(each, Path) for each in explain_files(classifier, files, folder) if step())
    way = default_method(classifier.model)
    print_status(f"wrote {written} {'picture' if written == 1 else 'pictures'} to {folder}, the most probable class by {way}")


def convert(
    model: ModelReference,
    out: Annotated[Positional[Path], arg("OUT")],
    to: Format,
    reading: OmitArgPrefixes[ModelArgs] = NO_OVERRIDES,
    half: Flag = False,
    overwrite: Flag = False,
) -> int:
    """Write a model in another format; it is read back and compared before it gets its name.

    Example: patchword convert ViT-B_16.npz vit-b16 --to transformers

    Args:
        out: a folder (patchword, transformers, timm; timm also *.safetensors or *.pth), *.npz (google, big_vision) or
            *.pth (torchvision, deit, dinov2)
        to: the format to write
        half: patchword only: weights of two bytes instead of four; it still computes in float32
        overwrite: replace a model that is there
    """
    from ...checkpoints import write_checkpoint

    if half and to != "patchword":
        raise ConfigError("--half goes with --to patchword; the other formats are written as their projects do.")
    checkpoint = reading.read(model)
    checkpoint = checkpoint.to_half() if half else checkpoint
    for note in write_checkpoint(out, checkpoint, to, overwrite=overwrite):
        print_status(f"note: {note}")
    print_status(f"wrote {out} ({checkpoint.family} to {to}, {sum(t.numel() for t in checkpoint.tensors.values()):,} numbers)")
    return 0
