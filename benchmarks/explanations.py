"""Which map tells the truth: every way to explain, ranked by deletion and insertion.

    python benchmarks/explanations.py MODEL FOLDER [--pictures 200]

For each picture the class is the one that the model gives. Prints a table and writes results/explanations.json: mean
areas with their standard errors, and how often each way beats a random order on the same picture.
"""

import argparse
import math
import time
from typing import Any

import numpy as np
import torch
from harness import shown, write_result

from patchword.inference.classifier import Classifier
from patchword.inference.image_batch import load_image_batch
from patchword.inference.inputs import resolve_images, sample_evenly
from patchword.inspection import explain, methods_for
from patchword.inspection.faithfulness import RANDOM_ORDER, STEPS, deletion_insertion, random_maps

BATCH = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("folder")
    parser.add_argument("--pictures", type=int, default=200)
    args = parser.parse_args()
    classifier = Classifier.load(args.model)
    methods, multi_label = methods_for(classifier.checkpoint.config), classifier.checkpoint.multi_label
    pixels = load_image_batch(classifier, sample_evenly(resolve_images([args.folder]), args.pictures)).pixels
    areas: dict[str, list[np.ndarray]] = {name: [] for name in (*methods, RANDOM_ORDER)}
    seconds = dict.fromkeys(methods, 0.0)
    for first in range(0, len(pixels), BATCH):
        images = classifier.preprocess.normalize(pixels[first : first + BATCH])
        with torch.no_grad():
            classes = classifier.model(images).argmax(dim=-1)
        maps: dict[str, np.ndarray] = {}
        for method in methods:
            start = time.perf_counter()
            maps[method] = explain(classifier.model, images, classes, method)
            seconds[method] += time.perf_counter() - start
        maps[RANDOM_ORDER] = random_maps(maps[methods[0]].shape, seed=first)
        for name, heat in maps.items():
            curves = deletion_insertion(classifier.model, images, classes, heat, multi_label=multi_label)
            areas[name].append(np.stack(curves.areas))
    rows = [
        row(name, np.concatenate(found, axis=1), np.concatenate(areas[RANDOM_ORDER], axis=1)) for name, found in areas.items()
    ]
    rows.sort(key=lambda r: -r["difference"])
    for each in rows:
        each["seconds_a_picture"] = round(seconds.get(each["method"], 0.0) / len(pixels), 4)
        line = f"{each['method']:14} deletion {each['deletion']:.3f}  insertion {each['insertion']:.3f}"
        print(f"{line}  difference {each['difference']:.3f} +- {each['standard_error']:.3f}", end="")
        print(f"  beats random {each['beats_random']:.0%}  {1000 * each['seconds_a_picture']:.0f} ms")
    content = {"command": f"benchmarks/explanations.py {shown(args.model)} {shown(args.folder)}", "steps": STEPS}
    print(write_result("explanations", {**content, "pictures": len(pixels), "methods": rows}))


def row(name: str, areas: np.ndarray, chance: np.ndarray) -> dict[str, Any]:
    """`areas` are (2, n): deletion and insertion of each picture."""
    difference = areas[1] - areas[0]
    return {
        "method": name,
        "deletion": round(float(areas[0].mean()), 4),
        "insertion": round(float(areas[1].mean()), 4),
        "difference": round(float(difference.mean()), 4),
        "standard_error": round(float(difference.std(ddof=1)) / math.sqrt(len(difference)), 4),
        "beats_random": round(float((difference > chance[1] - chance[0]).mean()), 3),
    }


if __name__ == "__main__":
    main()
