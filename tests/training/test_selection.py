"""Which weights a run with WiSE-FT keeps."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from patchword.training.distributed import ProcessGroup
from patchword.training.selection import select_interpolation


@dataclass
class Outputs:
    """The loss of a model on a validation set."""

    nll: float
    targets: np.ndarray

    def metrics(self) -> dict[str, float]:
        return {"nll": self.nll}


@dataclass
class Weights:
    """Weights that are known by their interpolation weight; stands for `ModelEma`."""

    init_weight: float = 0.5
    model: Any = 0.5

    def interpolate(self, weight: float) -> float:
        return weight


@pytest.mark.parametrize(
    ("num_images", "losses", "kept"),
    [
        (15, {0.5: 0.0007, 0.0: 0.0005, 1.0: 0.01}, 0.5),  # all classified correctly: no evidence
        (400, {0.5: 0.38, 0.0: 0.27, 1.0: 0.269}, 1.0),
        (400, {0.5: 0.25, 0.0: 0.24, 1.0: 0.4}, 0.0),
        (100, {0.5: 0.25, 0.0: 0.24, 1.0: 0.4}, 0.5),  # one nat
        (400, {0.5: 0.2, 0.0: 0.3, 1.0: 0.4}, 0.5),
    ],
)
def test_endpoint_needs_evidence(num_images: int, losses: dict[float, float], kept: float) -> None:
    targets, ema = np.zeros(num_images, np.int64), Weights()

    def evaluate(weight: Any) -> Any:
        return Outputs(losses[weight], targets)

    ema_stub: Any = ema
    chosen, note = select_interpolation(ema_stub, evaluate(0.5), evaluate, ProcessGroup())
    assert chosen is not None
    assert ema.model == kept
    assert chosen.metrics()["nll"] == losses[kept]
    assert (note is None) == (kept == 0.5)
    assert note is None or note.code == "interpolation_not_kept"
