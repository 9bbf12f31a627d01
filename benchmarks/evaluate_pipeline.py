"""Does decoding slow down the model? `evaluate` on JPEG files against the model alone on tensors, in one run.

    .venv/bin/python benchmarks/evaluate_pipeline.py MODEL FOLDER      # alone on the machine, about ten minutes

Measured in fp32 and with `engine="auto"`. Each round times the whole path (files to logits) on a subset of the images,
then the model alone on pixels, in both ways to use the cores: one batch on all of them, or one batch on each. The
faster one is the model's own speed. Decoding alone is timed too. Finally all images are evaluated with each engine.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import write_result

from patchword.data.image_decoder import list_images
from patchword.data.prefetch import prefetch
from patchword.evaluation.evaluate import evaluate
from patchword.inference.classifier import BATCH_SIZE, Classifier


def files_to_logits(classifier: Classifier, files: list[Path]) -> float:
    start = time.perf_counter()
    count = sum(1 for _ in classifier.stream(files))
    return count / (time.perf_counter() - start)


def one_batch_on_all_cores(classifier: Classifier, pixels: torch.Tensor, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count // len(pixels)):
        classifier.logits(pixels)
    return count / (time.perf_counter() - start)


def a_batch_on_each_core(classifier: Classifier, pixels: torch.Tensor, count: int) -> float:
    start = time.perf_counter()
    for _ in prefetch(lambda _: classifier.logits(pixels), range(count // len(pixels)), torch.get_num_threads()):
        pass
    return count / (time.perf_counter() - start)


def decoding_alone(classifier: Classifier, files: list[Path]) -> float:
    start = time.perf_counter()
    for _ in prefetch(classifier.pixels, files, torch.get_num_threads()):
        pass
    return len(files) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--num-images", type=int, default=192, help="per measurement of a round")
    args = parser.parse_args()
    classifiers = {engine: Classifier.load(args.model, engine) for engine in ("torch", "auto")}
    print("auto:", classifiers["auto"].engine_description)
    files = list_images(args.folder)
    pixels = torch.stack([classifiers["torch"].pixels(file) for file in files[:BATCH_SIZE]])
    jobs = {"decoding alone": partial(decoding_alone, classifiers["torch"])}
    for name, classifier in classifiers.items():
        jobs[f"{name}: files to logits"] = partial(files_to_logits, classifier)
        jobs[f"{name}: model, one batch on all cores"] = partial(on_pixels, one_batch_on_all_cores, classifier, pixels)
        jobs[f"{name}: model, a batch on each core"] = partial(on_pixels, a_batch_on_each_core, classifier, pixels)
    speeds: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(args.rounds + 1):  # the first is the warm-up
        subset = [files[(turn * args.num_images + i) % len(files)] for i in range(args.num_images)]
        for name, job in jobs.items() if turn % 2 else reversed(jobs.items()):
            speed = job(subset)
            if turn:
                speeds[name].append(speed)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    for name, speed in medians.items():
        print(f"{name:38} {speed:7.1f} images/s")
    content: dict[str, Any] = {
        "model": Path(args.model).parent.name,
        "rounds": args.rounds,
        "auto": classifiers["auto"].engine_description,
    }
    content |= {"images_per_second": medians, "ratio": {}, "evaluation": {}}
    for name, classifier in classifiers.items():
        own = max((n for n in jobs if n.startswith(f"{name}: model")), key=medians.__getitem__)
        content["ratio"][f"{name}: files to the model's own"] = ratio(speeds, f"{name}: files to logits", own)
        result = evaluate(classifier, args.folder).to_json()
        keys = ("top1", "top5", "nll", "ece", "n", "skipped", "images_per_second")
        content["evaluation"][name] = {key: result[key] for key in keys}
    content["ratio"]["auto to torch, files"] = ratio(speeds, "auto: files to logits", "torch: files to logits")
    print(content["ratio"], content["evaluation"])
    print("wrote", write_result("evaluate_pipeline", content))


def on_pixels(work: Callable[..., float], classifier: Classifier, pixels: torch.Tensor, files: list[Path]) -> float:
    return work(classifier, pixels, len(files))


def ratio(speeds: dict[str, list[float]], first: str, second: str) -> float:
    """Return the median ratio over rounds."""
    return statistics.median(a / b for a, b in zip(speeds[first], speeds[second], strict=True))


if __name__ == "__main__":
    main()
