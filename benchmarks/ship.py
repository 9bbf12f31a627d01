"""Makes a model that comes with patchword out of a run: in half precision, with a temperature from its validation part.

    python benchmarks/ship.py RUN NAME

Refuses if half precision changes more than one decision in a thousand on validation. The test part is measured once,
as a user will meet the model: without mirror images, in half precision, with its temperature. Writes
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


def answers(checkpoint: Checkpoint, source: Source) -> np.ndarray:
    """Logits (N, K)."""
    classifier = Classifier(checkpoint)
    readers = (partial(source.read, i) for i in range(len(source)))
    return np.stack([each.numpy() for each in classifier.stream(readers)])  # type: ignore[union-attr]


def figures(checkpoint: Checkpoint, source: Source) -> dict[str, Any]:
    pictures = [
        InputImage(source.name(i), partial(source.read, i), source.labels[target])
        for i, target in enumerate(source.targets)
    ]
    found = evaluate(Classifier(checkpoint), pictures)
    kept = ("top1", "nll", "ece", "brier", "n")
    return {**{name: found.metrics[name] for name in kept}, "top1_interval": found.intervals["top1"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    args = parser.parse_args()
    config = read_config(args.run)
    parts = open_data(config.data, config.seed, read_split(args.run))
    assert parts.val is not None
    assert parts.test is not None
    whole = dataclasses.replace(read_checkpoint(args.run), temperature=1.0)
    half = whole.to_half()
    exact, rounded = answers(whole, parts.val), answers(half, parts.val)
    agree = float((exact.argmax(axis=1) == rounded.argmax(axis=1)).mean())
    assert agree >= 0.999, f"half precision changes {1 - agree:.2%} of the decisions"
    shipped = dataclasses.replace(half, temperature=round(fit_temperature(rounded, parts.val.targets), 4))
    content = {
        "command": f"benchmarks/ship.py RUN {args.name}",
        "temperature": shipped.temperature,
        "half_precision_agrees_on_val": agree,
        "largest_difference_of_a_logit": float(np.abs(exact - rounded).max()),
        "test_before_temperature": figures(half, parts.test),
        "test": figures(shipped, parts.test),
    }
    # The run's own figures are of a picture and its mirror image together, which predict does not do.
    said = {"metrics": {"test": content["test"]}, "with_mirror_images": whole.provenance.get("metrics", {})}
    shipped = dataclasses.replace(shipped, provenance={**whole.provenance, **said})
    out = RESULTS.parent / "src/patchword/weights" / args.name
    write_checkpoint(out, shipped, overwrite=True)
    content["bytes"] = sum(path.stat().st_size for path in out.iterdir())
    print(content)
    print(write_result(f"shipped_{args.name}", content))


if __name__ == "__main__":
    main()
