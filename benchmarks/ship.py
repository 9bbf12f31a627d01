"""Make a bundled model from a run: half precision, with a temperature fitted on its validation set.

    python benchmarks/ship.py RUN NAME

Fails if half precision changes more than one prediction in a thousand on validation. The test set is measured once, in
the configuration that users get: without flip TTA, in half precision, with the temperature. Writes
src/patchword/weights/NAME and results/shipped_NAME.json.
"""

import argparse
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import RESULTS, write_result

from patchword.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from patchword.data.resolve import open_data
from patchword.data.sources import Source
from patchword.evaluation.evaluate import evaluate
from patchword.inference.classifier import Classifier
from patchword.inference.inputs import InputImage
from patchword.metrics.calibration import fit_temperature
from patchword.training.run_dir import read_config, read_split


def compute_logits(checkpoint: Checkpoint, source: Source) -> np.ndarray:
    """Return the logits of all images, (N, K)."""
    classifier = Classifier(checkpoint)
    readers = (partial(source.read, i) for i in range(len(source)))
    return np.stack([logits.numpy() for logits in classifier.stream(readers)])  # type: ignore[union-attr]


def compute_metrics(checkpoint: Checkpoint, source: Source) -> dict[str, Any]:
    images = [
        InputImage(source.name(i), partial(source.read, i), source.labels[target])
        for i, target in enumerate(source.targets)
    ]
    result = evaluate(Classifier(checkpoint), images)
    names = ("top1", "nll", "ece", "brier", "n")
    return {**{name: result.metrics[name] for name in names}, "top1_interval": result.intervals["top1"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    args = parser.parse_args()
    config = read_config(args.run)
    splits = open_data(config.data, config.seed, read_split(args.run))
    assert splits.val is not None
    assert splits.test is not None
    full = dataclasses.replace(read_checkpoint(args.run), temperature=1.0)
    half = full.to_half()
    exact, rounded = compute_logits(full, splits.val), compute_logits(half, splits.val)
    agreement = float((exact.argmax(axis=1) == rounded.argmax(axis=1)).mean())
    assert agreement >= 0.999, f"half precision changes {1 - agreement:.2%} of the predictions"
    shipped = dataclasses.replace(half, temperature=round(fit_temperature(rounded, splits.val.targets), 4))
    content = {
        "command": f"benchmarks/ship.py RUN {args.name}",
        "temperature": shipped.temperature,
        "half_precision_agreement_on_val": agreement,
        "max_logit_difference": float(np.abs(exact - rounded).max()),
        "test_before_temperature": compute_metrics(half, splits.test),
        "test": compute_metrics(shipped, splits.test),
    }
    # The run's own metrics use flip TTA, which predict does not.
    measured = {"metrics": {"test": content["test"]}, "with_flip_tta": full.provenance.get("metrics", {})}
    shipped = dataclasses.replace(shipped, provenance={**full.provenance, **measured})
    out = RESULTS.parent / "src/patchword/weights" / args.name
    write_checkpoint(out, shipped, overwrite=True)
    content["bytes"] = sum(path.stat().st_size for path in out.iterdir())
    print(content)
    print(write_result(f"shipped_{args.name}", content))


if __name__ == "__main__":
    main()
