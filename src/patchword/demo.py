"""What `make demo` shows until `patchword train` exists: real pictures classified with what is at hand.

First handwritten digits (scikit-learn's, 8x8 pixels): a ViT with random weights, never trained, and a linear head
solved for in one step. Then two photographs, with a pretrained ViT-Ti/16: the reference in PATCHWORD_DEMO_MODEL, or
else from the hub.
"""

import os
import time

import torch
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor

from .config import ViTConfig
from .errors import PatchwordError
from .models import ViT

PRETRAINED = "hf:timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"
SHADES = " .:-=+*#%@"


def main() -> None:
    digits()
    photographs(os.environ.get("PATCHWORD_DEMO_MODEL", PRETRAINED))


def digits() -> None:
    """Random features, least-squares head, accuracy on digits that the head has not seen."""
    start = time.perf_counter()
    torch.manual_seed(0)
    source = load_digits()
    images = torch.from_numpy(source.images).float()[:, None] / 8 - 1
    labels = torch.from_numpy(source.target)
    order = torch.randperm(len(images))
    known, new = order[360:], order[:360]
    sizes = {"image_size": 8, "patch_size": 2, "embed_dim": 384, "depth": 1, "num_heads": 6, "mlp_dim": 768}
    kind = {"in_channels": 1, "num_classes": 10, "class_token": False, "pooling": "average"}
    config = ViTConfig.from_json({**sizes, **kind})
    model = ViT(config).eval()
    with torch.no_grad():
        features = model.represent(model.encode(images))
        weight, bias = least_squares(features[known], labels[known])
        model.load_state_dict({**model.state_dict(), "head.weight": weight, "head.bias": bias})
        predicted = model(images[new]).argmax(dim=1)
    accuracy = (predicted == labels[new]).float().mean().item()
    print("An untrained ViT (random weights) with a least-squares head, on real handwritten digits:")
    print(f"  {accuracy:.1%} of {len(new)} unseen digits right, after {time.perf_counter() - start:.1f} s.\n")
    show(images[new[:6], 0], predicted[:6], labels[new[:6]])


def least_squares(features: Tensor, labels: Tensor, penalty: float = 1e-3) -> tuple[Tensor, Tensor]:
    """Weight and bias of the linear head nearest to the labels (+1 for the class, -1 for others)."""
    x = torch.cat([features, torch.ones(len(features), 1)], dim=1).double()
    y = torch.nn.functional.one_hot(labels).double() * 2 - 1
    solution = torch.linalg.solve(x.T @ x + penalty * torch.eye(x.shape[1]), x.T @ y).float()
    return solution[:-1].T, solution[-1]


def show(images: Tensor, predicted: Tensor, labels: Tensor) -> None:
    """Pictures as characters, side by side."""
    for row in range(images.shape[1]):
        lines = ("".join(SHADES[round(float(v + 1) * 4.5)] * 2 for v in image[row]) for image in images)
        print("  " + " ".join(lines))
    said = (f"says {p} (is {t})" for p, t in zip(predicted.tolist(), labels.tolist(), strict=True))
    print("  " + " ".join(text.center(16) for text in said) + "\n")


def photographs(reference: str) -> None:
    from PIL import Image

    from .classifier import Classifier

    print(f"Two photographs, classified by {reference}:")
    try:
        classifier = Classifier.load(reference)
    except PatchwordError as error:
        print(f"  skipped, since these weights are not at hand. {error}")
        print("  With a network, or with PATCHWORD_DEMO_MODEL=path/to/a/checkpoint, this part works, too.")
        return
    pictures = load_sample_images()
    for name, pixels in zip(pictures.filenames, pictures.images, strict=True):
        scores = classifier(Image.fromarray(pixels), top=3).scores
        print(
            f"  {os.path.basename(name):12}" + ", ".join(f"{s.label.split(',')[0]} {s.probability:.0%}" for s in scores)
        )


if __name__ == "__main__":
    main()
