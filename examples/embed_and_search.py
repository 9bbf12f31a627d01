"""Embeds the images of a folder with a ViT, and finds the nearest neighbors of one image.

Command: python examples/embed_and_search.py QUERY FOLDER [--model patchword:cifar10] [--top 5]
Prints: cosine similarity and path of each neighbor, the most similar first.
"""

import argparse
from pathlib import Path

import torch

import patchword as pw

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("query", type=Path, help="an image")
parser.add_argument("folder", type=Path, help="images to search, recursively")
parser.add_argument("--model", default="patchword:cifar10", help="for photographs: hf:google/vit-base-patch16-224")
parser.add_argument("--top", type=int, default=5, help="number of neighbors")
args = parser.parse_args()

classifier = pw.Classifier.load(args.model)


def embed(pixels: torch.Tensor) -> torch.Tensor:
    """Return the image representation that the head reads, with norm 1: uint8 (B, H, W, C) to float32 (B, D)."""
    images = classifier.preprocess.normalize(pixels)
    return torch.nn.functional.normalize(classifier.model.embed_images(images), dim=-1)


paths = sorted(path for path in args.folder.rglob("*") if path.suffix.lower() in SUFFIXES)
query, *embeddings = classifier.map_images([args.query, *paths], embed)  # decodes and embeds in batches, on all cores
if isinstance(query, pw.PatchwordError):
    raise SystemExit(str(query))

neighbors = []
for path, embedding in zip(paths, embeddings, strict=True):
    if isinstance(embedding, pw.PatchwordError):
        print(f"skipped: {embedding}")
    elif not path.samefile(args.query):
        neighbors.append((float(query @ embedding), path))
for similarity, path in sorted(neighbors, reverse=True)[: args.top]:
    print(f"{similarity:.3f}  {path}")
