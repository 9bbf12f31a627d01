"""The commands that use a model: predict, evaluate, convert."""

import json as json_format
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, Positional

from ..errors import ConfigError
from .reading import NOTHING, Flag, ModelReference, Reading, words
from .screen import print_evaluation, print_predictions, progress, report_unread, say

Format = Literal["patchword", "google", "big_vision", "timm", "transformers", "torchvision", "deit", "dinov2"]


def predict(
    model: ModelReference,
    images: Annotated[Positional[tuple[str, ...]], words("IMAGE...")],
    reading: OmitArgPrefixes[Reading] = NOTHING,
    top: int = 5,
    json: Flag = False,
    csv: Annotated[Path | None, words("FILE")] = None,
    overwrite: Flag = False,
) -> int:
    """Classify pictures.

    Example: patchword predict hf:google/vit-base-patch16-224 cat.jpg photos/ --top 3

    Args:
        images: files, or folders to be searched
        top: how many classes to show
        json: one JSON document on standard output, nothing else
        csv: write a table, one row for each picture
        overwrite: replace the table if it is there
    """
    if top < 1:
        raise ConfigError(f"--top must be at least 1, not {top}.")
    if csv and csv.exists() and not overwrite:
        raise ConfigError(f"{csv} exists already. Choose another name, or add --overwrite.")
    from ..classifier import Classifier
    from ..evaluation import predict as prediction

    files = prediction.find_files(images)
    classifier = Classifier(reading.read(model))
    with progress("predicting", len(files)) as step:
        rows = [row for row in prediction.predict_files(classifier, files, top) if step()]
    if csv:
        prediction.write_csv(csv, rows, top)
        say(f"wrote {csv}")
    if json:
        print(json_format.dumps(rows, indent=2))
    elif not csv:
        print_predictions(rows)
    return report_unread([(row["path"], row["error"]) for row in rows if "error" in row], len(rows))


def evaluate(
    model: ModelReference,
    data: Annotated[Positional[Path], words("DATA")],
    reading: OmitArgPrefixes[Reading] = NOTHING,
    json: Flag = False,
    batch_size: int = 16,
) -> int:
    """Measure a model on a folder of class folders, named by label, WordNet id or index.

    Example: patchword evaluate model.npz imagenet/val --json

    Args:
        data: DATA/CLASS/*.jpg
        json: one JSON document on standard output, nothing else
        batch_size: pictures that go through the model together, on each core
    """
    if batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, not {batch_size}.")
    from ..classifier import Classifier
    from ..data.folders import class_folders
    from ..evaluation import evaluate as measure

    total = len(class_folders(data))  # a wrong folder is told before the model is loaded
    classifier = Classifier(reading.read(model))
    with progress("evaluating", total) as step:
        result = measure(classifier, data, batch_size=batch_size, on_progress=step)
    if json:
        print(json_format.dumps(result.to_json(), indent=2))
    else:
        print_evaluation(result.figures, result.images_per_second)
    return report_unread(result.skipped, total)


def convert(
    model: ModelReference,
    out: Annotated[Positional[Path], words("OUT")],
    to: Format,
    reading: OmitArgPrefixes[Reading] = NOTHING,
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
    from ..checkpoints import write_checkpoint

    if half and to != "patchword":
        raise ConfigError("--half goes with --to patchword; the other formats are written as their projects do.")
    checkpoint = reading.read(model)
    checkpoint = checkpoint.halved() if half else checkpoint
    for note in write_checkpoint(out, checkpoint, to, overwrite=overwrite):
        say(f"note: {note}")
    say(f"wrote {out} ({checkpoint.family} to {to}, {sum(t.numel() for t in checkpoint.tensors.values()):,} numbers)")
    return 0
