"""Which explanation method is most faithful: all methods, ranked by deletion and insertion.

    python benchmarks/explanations.py MODEL FOLDER [--num-images 200]

Each image is explained for its predicted class. Prints a table and writes results/explanations.json: mean areas with
their standard errors, and how often each method beats a random order on the same image.
"""

import argparse
import math
import time
from typing import Any

import numpy as np
import torch
from harness import short_path, write_result

from patchword.inference.classifier import Classifier
from patchword.inference.image_batch import load_image_batch
from patchword.inference.inputs import resolve_images, sample_evenly
from patchword.inspection import explain, methods_for
from patchword.inspection.faithfulness import RANDOM_ORDER, STEPS, deletion_insertion, random_maps

BATCH_SIZE = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("folder")
    parser.add_argument("--num-images", type=int, default=200)
    args = parser.parse_args()
    classifier = Classifier.load(args.model)
    methods, multi_label = methods_for(classifier.checkpoint.config), classifier.checkpoint.multi_label
    images = sample_evenly(resolve_images([args.folder]), args.num_images)
    pixels = load_image_batch(classifier, images).pixels
    areas: dict[str, list[np.ndarray]] = {name: [] for name in (*methods, RANDOM_ORDER)}
    seconds = dict.fromkeys(methods, 0.0)
    for first in range(0, len(pixels), BATCH_SIZE):
        batch = classifier.preprocess.normalize(pixels[first : first + BATCH_SIZE])
        with torch.no_grad():
            classes = classifier.model(batch).argmax(dim=-1)
        maps: dict[str, np.ndarray] = {}
        for method in methods:
            start = time.perf_counter()
            maps[method] = explain(classifier.model, batch, classes, method)
            seconds[method] += time.perf_counter() - start
        maps[RANDOM_ORDER] = random_maps(maps[methods[0]].shape, seed=first)
        for name, heatmap in maps.items():
            curves = deletion_insertion(classifier.model, batch, classes, heatmap, multi_label=multi_label)
            areas[name].append(np.stack(curves.areas))
    random_areas = np.concatenate(areas[RANDOM_ORDER], axis=1)
    rows = [summarize(name, np.concatenate(values, axis=1), random_areas) for name, values in areas.items()]
    rows.sort(key=lambda r: -r["difference"])
    for row in rows:
        row["seconds_per_image"] = round(seconds.get(row["method"], 0.0) / len(pixels), 4)
        line = f"{row['method']:14} deletion {row['deletion']:.3f}  insertion {row['insertion']:.3f}"
        print(f"{line}  difference {row['difference']:.3f} +- {row['standard_error']:.3f}", end="")
        print(f"  beats random {row['beats_random']:.0%}  {1000 * row['seconds_per_image']:.0f} ms")
    content = {
        "command": f"benchmarks/explanations.py {short_path(args.model)} {short_path(args.folder)}",
        "steps": STEPS,
    }
    print(write_result("explanations", {**content, "num_images": len(pixels), "methods": rows}))


def summarize(name: str, areas: np.ndarray, random_areas: np.ndarray) -> dict[str, Any]:
    """Return the row of a method; areas are (2, N): deletion and insertion of each image."""
    difference = areas[1] - areas[0]
    return {
        "method": name,
        "deletion": round(float(areas[0].mean()), 4),
        "insertion": round(float(areas[1].mean()), 4),
        "difference": round(float(difference.mean()), 4),
        "standard_error": round(float(difference.std(ddof=1)) / math.sqrt(len(difference)), 4),
        "beats_random": round(float((difference > random_areas[1] - random_areas[0]).mean()), 3),
    }


if __name__ == "__main__":
    main()
