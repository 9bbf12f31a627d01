"""Classifies all images of a folder into a CSV file, in bounded memory.

Command: python examples/batch_predict_to_csv.py FOLDER predictions.csv [--model patchword:cifar10]
Prints: how many images were classified, and how many could not be read.

Adapt it if you need columns of your own. `patchword predict MODEL FOLDER --csv predictions.csv` needs no code, and
resumes if it is interrupted.
"""

import argparse
import csv
from pathlib import Path

import patchword as pw

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("folder", type=Path, help="searched recursively")
parser.add_argument("csv", type=Path, help="file to write")
parser.add_argument("--model", default="patchword:cifar10", help="a run, a checkpoint, hf:OWNER/NAME, ...")
args = parser.parse_args()

classifier = pw.Classifier.load(args.model)
paths = sorted(path for path in args.folder.rglob("*") if path.suffix.lower() in SUFFIXES)
if not paths:
    raise SystemExit(f"{args.folder} has no images.")
num_unreadable = 0
with args.csv.open("w", newline="", encoding="utf-8") as file:
    writer = csv.writer(file)
    writer.writerow(["path", "label", "probability", "error"])
    # Images are decoded and classified in batches, on all cores; results arrive in the order of the paths.
    for path, result in zip(paths, classifier.stream(paths), strict=True):
        if isinstance(result, pw.PatchwordError):
            num_unreadable += 1
            writer.writerow([path, "", "", result])
        else:
            best = classifier.prediction(result, top=1)  # `result` is a tensor: the logits of this image
            writer.writerow([path, best.label, f"{best.probability:.4f}", ""])
print(f"{len(paths) - num_unreadable} images classified, {num_unreadable} unreadable")
