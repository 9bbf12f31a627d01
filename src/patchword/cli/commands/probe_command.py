"""`patchword probe`: evaluate frozen features."""

from typing import TYPE_CHECKING, Annotated

from ...core.progress import progress
from ...core.text import print_stderr
from ..arguments import positional
from ..model_args import NO_OVERRIDES, JsonFlag, ModelArgs, ModelReference
from ..output import print_json

if TYPE_CHECKING:
    from ...evaluation.probe import ProbeResult


def probe(
    model: ModelReference,
    data: Annotated[str, positional("DATA")],
    model_args: ModelArgs = NO_OVERRIDES,
    layer: int | None = None,
    shots: tuple[int, ...] = (1, 5, 10, 25),
    seeds: int = 5,
    l2: float = 1024.0,
    json: JsonFlag = False,
) -> int:
    """Evaluate frozen features: few-shot linear probe, k nearest neighbors, logistic regression.

    Example: patchword probe hf:google/vit-base-patch16-224 photos/ --shots 1 5

    Args:
        data: a dataset, as for train; the probes are evaluated on its test set, or else on its validation set
        layer: block whose tokens are used, 0 for the first and -1 for the last; by default, the input of the head
        shots: numbers of training images per class of the paper's few-shot probe
        seeds: number of random draws of the few-shot images; accuracies are averaged
        l2: L2 penalty of the few-shot probe, a ridge regression
    """
    from ...config import DataConfig
    from ...data.resolve import open_data
    from ...evaluation.probe import VAL_FRACTION
    from ...evaluation.probe import probe as probe_model

    splits = open_data(DataConfig(source=data, val_fraction=VAL_FRACTION), seed=0)
    checkpoint = model_args.read(model)
    with progress("encoding", sum(map(len, splits.as_dict().values()))) as step:
        result = probe_model(checkpoint, splits, layer=layer, shots=shots, seeds=seeds, l2=l2, on_progress=step)
    if json:
        print_json(result.to_json())
    else:
        print_probe(result)
    return 0


def print_probe(result: "ProbeResult") -> None:
    """Print the accuracy of each probe with its 95% interval."""
    from ...metrics.intervals import wilson

    print(f"{result.classes} classes, {result.train:,} training images, {result.test:,} {result.split} images")
    for name, accuracy, std in result.rows():
        low, high = wilson(accuracy, result.test)
        spread = f", std {std:.2%} over draws" if std is not None else ""
        print(f"{name:10} {accuracy:.2%}  ({low:.2%} to {high:.2%}{spread})")
    if result.split == "validation":
        print_stderr("note: there is no test set; the same images chose the penalty of the logistic regression.")
    if result.skipped_shots:
        shots = ", ".join(map(str, result.skipped_shots))
        print_stderr(f"note: {shots} shots were skipped: the smallest class has fewer training images.")
