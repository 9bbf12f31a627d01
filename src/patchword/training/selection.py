"""Which model a run publishes: the best evaluation, and the best interpolation with the initial weights (WiSE-FT)."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import Note
from .callbacks import LogRow
from .distributed import ProcessGroup
from .ema import ModelEma
from .evaluator import EvalOutputs

MIN_EVIDENCE = 2.0  # nats of validation log-likelihood that an endpoint must gain; less is noise with few images
ENDPOINTS = {0.0: "fine-tuned", 1.0: "initial"}  # the weights that are compared with their interpolation


def score(row: dict[str, Any]) -> tuple[float, float]:
    """Return what the best evaluation maximizes: accuracy (multi-label: mAP), then likelihood."""
    return row.get("top1", row.get("map", 0.0)), -row["nll"]


def is_better(row: LogRow, best: LogRow | None) -> bool:
    """Whether an evaluation is the best so far."""
    return best is None or score(row) > score(best)


def select_interpolation(
    ema: ModelEma,
    outputs: EvalOutputs | None,
    evaluate: Callable[[nn.Module], EvalOutputs | None],
    group: ProcessGroup,
) -> tuple[EvalOutputs | None, Note | None]:
    """Keep the fine-tuned or the initial weights if one is clearly better on validation than their interpolation.

    On images unlike those of pre-training, the interpolation can be worse than both. "Clearly" means a gain of
    `MIN_EVIDENCE` in the total log-likelihood: a few images, all classified correctly, cannot decide.

    Args:
        ema: Its model is replaced if an endpoint is better.
        outputs: Those of the interpolated model; only the main process has them.
        evaluate: Evaluates a model on the validation set.
        group: The processes, all of which keep the same weights.

    Returns:
        The outputs of the model that is kept, and a note if that is not the interpolation.
    """
    candidates = {ema.init_weight: outputs}
    candidates |= {weight: evaluate(ema.interpolate(weight)) for weight in ENDPOINTS}
    best, note = group.run_on_main(lambda: choose_weight(candidates, ema.init_weight))
    if note is not None:
        ema.model = ema.interpolate(best)
    return candidates[best], note


def choose_weight(candidates: dict[float, EvalOutputs | None], init_weight: float) -> tuple[float, Note | None]:
    """Return the best weight of the initial weights, and a note if that is not the interpolation."""
    outputs = {weight: each for weight, each in candidates.items() if each is not None}
    losses = {weight: float(each.metrics()["nll"]) for weight, each in outputs.items()}
    best = min(losses, key=losses.__getitem__)
    interpolated = losses[init_weight]
    if best == init_weight or (interpolated - losses[best]) * len(outputs[best].targets) < MIN_EVIDENCE:
        return init_weight, None
    text = (
        f"The {ENDPOINTS[best]} weights are kept: their validation loss is {losses[best]:.4f}, that of the "
        f"interpolation (wise_ft_alpha {1 - init_weight:g}) {interpolated:.4f}."
    )
    return best, Note(text, "interpolation_not_kept")
