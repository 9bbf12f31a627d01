"""Calibration of a model before and after temperature scaling, with the temperature fitted on other images.

    python benchmarks/calibration.py MODEL FOLDER

The images are split into two halves; the logits of each half are divided by the temperature fitted on the other half.
Prints ECE, adaptive ECE, NLL and Brier with their 95 % intervals, before and after, and the ECE that a perfectly
calibrated model with the same confidences would show on as many images; writes results/calibration.json.
"""

import argparse
from typing import Any

import numpy as np
import torch
from harness import short_path, write_result

from patchword.data.formats.image_folder import match_classes
from patchword.inference.classifier import Classifier
from patchword.inference.inputs import resolve_labeled_images
from patchword.metrics.calibration import expected_calibration_error, fit_temperature
from patchword.metrics.classification import ClassificationMetrics

METRICS = ("top1", "nll", "brier", "ece", "ece_adaptive")


def ece_if_calibrated(logits: np.ndarray, draws: int = 500) -> dict[str, float]:
    """ECE if each image is classified correctly with exactly its confidence: sampling noise alone gives a gap."""
    confidence = torch.from_numpy(logits).softmax(dim=1).amax(dim=1).numpy()
    rng = np.random.default_rng(0)
    values = [expected_calibration_error(confidence, rng.random(len(confidence)) < confidence) for _ in range(draws)]
    return {"mean": float(np.mean(values)), "95 %": float(np.quantile(values, 0.95))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("folder")
    args = parser.parse_args()
    classifier = Classifier.load(args.model)
    images = resolve_labeled_images(args.folder)
    labels = classifier.checkpoint.labels
    names = sorted({str(each.label) for each in images})
    indices = match_classes(names, labels, classifier.checkpoint.config.num_classes)
    rows = list(classifier.stream(each.image for each in images))
    assert all(isinstance(row, torch.Tensor) for row in rows), "every image can be read"
    logits = np.stack([row.numpy() for row in rows])  # type: ignore[union-attr]
    targets = np.array([indices[str(each.label)] for each in images])
    half = np.random.default_rng(0).permutation(len(targets)) % 2
    temperatures = [fit_temperature(logits[half == k], targets[half == k]) for k in (0, 1)]
    scaled = logits / np.where(half == 0, temperatures[1], temperatures[0])[:, None]
    result: dict[str, Any] = {"temperatures": [round(t, 4) for t in temperatures]}
    for name, values in (("before", logits), ("after", scaled)):
        accumulated = ClassificationMetrics.from_arrays(values, targets)
        metrics, intervals = accumulated.compute_with_intervals(logits.shape[1])
        result[name] = {key: {"value": metrics[key], "interval": intervals[key]} for key in METRICS}
        lines = [f"{key} {metrics[key]:.4f} ({intervals[key][0]:.4f} to {intervals[key][1]:.4f})" for key in METRICS]
        print(name, *lines, sep="\n  ")
    result["ece_if_perfect"] = ece_if_calibrated(logits)
    print(f"ece of a perfectly calibrated model: {result['ece_if_perfect']}")
    command = f"benchmarks/calibration.py {short_path(args.model)} {short_path(args.folder)}"
    print(write_result("calibration", {"command": command, "num_images": len(targets), **result}))


if __name__ == "__main__":
    main()
