"""The command that measures frozen features: probe."""

import json as json_format
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional

from ..model_args import NO_OVERRIDES, Flag, ModelReference, ModelArgs, arg
from ..output import print_probe, progress


def probe(
    model: ModelReference,
    data: Annotated[Positional[str], arg("DATA")],
    reading: OmitArgPrefixes[ModelArgs] = NO_OVERRIDES,
    layer: int | None = None,
    shots: tuple[int, ...] = (1, 5, 10, 25),
    seeds: int = 5,
    l2: float = 1024.0,
    json: Flag = False,
) -> int:
    """Measure a model's features without training it: few-shot, nearest neighbours, logistic regression.

    Example: patchword probe model.npz photos --shots 1 5

    Args:
        data: a data set as train takes it; measured on its test part, or else on validation
        layer: the block whose tokens are read, 0 the first, -1 the last; by default what the head reads
        shots: pictures of each class for the paper's few-shot probe
        seeds: how often those are drawn
        l2: penalty of the few-shot probe
        json: one JSON document on standard output, nothing else
    """
    from ...config import DataConfig
    from ...data.resolve import open_data
    from ...evaluation.probe import HELD_OUT
    from ...evaluation.probe import probe as measure

    parts = open_data(DataConfig(source=data, val_fraction=HELD_OUT), seed=0)
    checkpoint = reading.read(model)
    with progress("looking", sum(len(part) for part in parts.as_dict().values())) as step:
        found = measure(checkpoint, parts, layer=layer, shots=shots, seeds=seeds, l2=l2, on_progress=step)
    if json:
        print(json_format.dumps(found.to_json(), indent=2))
    else:
        print_probe(found)
    return 0
