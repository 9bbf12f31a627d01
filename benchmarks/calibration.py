"""Calibration of a model before and after a temperature that was fitted on other pictures.

    python benchmarks/calibration.py MODEL FOLDER

The pictures are dealt into two halves; each half's logits are divided by the temperature that fits the other half best.
Prints ECE, adaptive ECE, NLL and Brier with their 95 % intervals, before and after, and what ECE a perfectly calibrated
model of the same confidences would show on as many pictures; writes results/calibration.json.
"""

import argparse
from typing import Any

import numpy as np
import torch
from harness import shown, write_result

from patchword.data.formats.image_folder import match_classes
from patchword.inference.classifier import Classifier
from patchword.inference.inputs import resolve_labeled_images
from patchword.metrics.calibration import expected_calibration_error, fit_temperature
from patchword.metrics.classification import ClassificationMetrics

SHOWN = ("top1", "nll", "brier", "ece", "ece_adaptive")


def unavoidable(logits: np.ndarray, draws: int = 500) -> dict[str, float]:
    """ECE where each picture is right with just the probability that the model gave it: chance alone makes gaps."""
    sure = torch.from_numpy(logits).softmax(dim=1).amax(dim=1).numpy()
    draw = np.random.default_rng(0)
    values = [expected_calibration_error(sure, draw.random(len(sure)) < sure) for _ in range(draws)]
    return {"mean": float(np.mean(values)), "95 %": float(np.quantile(values, 0.95))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("folder")
    args = parser.parse_args()
    classifier = Classifier.load(args.model)
    pictures = resolve_labeled_images(args.folder)
    labels = classifier.checkpoint.labels
    indices = match_classes(sorted({str(p.label) for p in pictures}), labels, classifier.checkpoint.config.num_classes)
    rows = list(classifier.stream(p.image for p in pictures))
    assert all(isinstance(row, torch.Tensor) for row in rows), "every picture can be read"
    logits = np.stack([row.numpy() for row in rows])  # type: ignore[union-attr]
    targets = np.array([indices[str(p.label)] for p in pictures])
    half = np.random.default_rng(0).permutation(len(targets)) % 2
    temperatures = [fit_temperature(logits[half == k], targets[half == k]) for k in (0, 1)]
    divided = logits / np.where(half == 0, temperatures[1], temperatures[0])[:, None]
    found: dict[str, Any] = {"temperatures": [round(t, 4) for t in temperatures]}
    for name, values in (("before", logits), ("after", divided)):
        tally = ClassificationMetrics.from_arrays(values, targets)
        figures, intervals = tally.compute_with_intervals(logits.shape[1])
        found[name] = {key: {"value": figures[key], "interval": intervals[key]} for key in SHOWN}
        said = [f"{key} {figures[key]:.4f} ({intervals[key][0]:.4f} to {intervals[key][1]:.4f})" for key in SHOWN]
        print(name, *said, sep="\n  ")
    found["ece_if_perfect"] = unavoidable(logits)
    print(f"ece of a perfectly calibrated model: {found['ece_if_perfect']}")
    command = f"benchmarks/calibration.py {shown(args.model)} {shown(args.folder)}"
    print(write_result("calibration", {"command": command, "pictures": len(targets), **found}))


if __name__ == "__main__":
    main()
