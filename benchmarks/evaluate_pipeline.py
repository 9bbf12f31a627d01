"""Does decoding hide behind the model? `evaluate` on JPEG files against the model alone on tensors, in one run.

    .venv/bin/python benchmarks/evaluate_pipeline.py MODEL FOLDER      # alone on the machine, about four minutes

Each round times the whole road (files to logits) on a part of the pictures, then the model alone on tensors, in the two
ways it can use the cores: one batch on all of them, or a batch on each. The faster way counts as the model's own speed.
Then all pictures are evaluated once for the accuracy.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from harness import write_result

from patchword.classifier import BATCH_SIZE, Classifier
from patchword.data.ahead import ahead
from patchword.data.images import list_images
from patchword.evaluation import evaluate


def files_to_logits(classifier: Classifier, files: list[Path]) -> float:
    start = time.perf_counter()
    done = sum(1 for _ in classifier.stream(files))
    return done / (time.perf_counter() - start)


def one_batch_on_all_cores(classifier: Classifier, images: torch.Tensor, count: int) -> float:
    start = time.perf_counter()
    with torch.inference_mode():
        for _ in range(count // len(images)):
            classifier.model(images)
    return count / (time.perf_counter() - start)


def a_batch_on_each_core(classifier: Classifier, images: torch.Tensor, count: int) -> float:
    def run(_: int) -> None:
        with torch.inference_mode():
            classifier.model(images)

    start = time.perf_counter()
    for _ in ahead(run, range(count // len(images)), torch.get_num_threads()):
        pass
    return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pictures", type=int, default=192, help="in each part of a round")
    args = parser.parse_args()
    classifier = Classifier.load(args.model)
    files = list_images(args.folder)
    pixels = torch.stack([classifier.pixels(file) for file in files[:BATCH_SIZE]])
    images = classifier.preprocess.normalise(pixels)
    jobs = {
        "files to logits": lambda part: files_to_logits(classifier, part),
        "model, one batch on all cores": lambda part: one_batch_on_all_cores(classifier, images, len(part)),
        "model, a batch on each core": lambda part: a_batch_on_each_core(classifier, images, len(part)),
    }
    speeds: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(args.rounds + 1):  # the first warms up
        part = [files[(turn * args.pictures + i) % len(files)] for i in range(args.pictures)]
        for name, job in jobs.items() if turn % 2 else reversed(jobs.items()):
            speed = job(part)
            if turn:
                speeds[name].append(speed)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    own = max(medians, key=lambda name: medians[name] if name.startswith("model") else 0)
    ratio = statistics.median(a / b for a, b in zip(speeds["files to logits"], speeds[own], strict=True))
    for name, speed in medians.items():
        print(f"{name:32} {speed:7.1f} images/s")
    print(f"files against the faster model: {ratio:.3f}")
    found = evaluate(classifier, args.folder).to_json()
    figures = {k: found[k] for k in ("top1", "top5", "nll", "ece", "n", "skipped", "images_per_second")}
    print({k: round(v, 4) for k, v in figures.items()})
    content = {"model": Path(args.model).parent.name, "rounds": args.rounds, "images_per_second": medians}
    print("wrote", write_result("evaluate_pipeline", {**content, "ratio": ratio, "evaluation": figures}))


if __name__ == "__main__":
    main()
