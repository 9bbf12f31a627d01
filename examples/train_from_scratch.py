"""Trains a small ViT from scratch on arrays in memory, and classifies an image with it.

Command: python examples/train_from_scratch.py [--epochs 10] [--out runs/my-digits]
Prints: validation accuracy after each evaluation, test accuracy, and the prediction for one test image.
"""

import argparse
from pathlib import Path

from sklearn.datasets import load_digits

import patchword as pw

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--out", type=Path, help="run directory to create; by default a new one below runs/")
args = parser.parse_args()

# Your own arrays go here. Images: uint8 (N, H, W) or (N, H, W, 3). Targets: integers (N,).
digits = load_digits()
images, targets = (digits.images * 255 / 16).astype("uint8"), digits.target
test = slice(1400, None)
splits = pw.DatasetSplits(
    train=pw.from_arrays(images[:1200], targets[:1200]),
    val=pw.from_arrays(images[1200:1400], targets[1200:1400]),
    test=pw.from_arrays(images[test], targets[test]),
)


class PrintEvaluations(pw.Callback):
    """Prints each evaluation on the validation set. Other methods of pw.Callback follow single steps."""

    def on_log(self, row: dict) -> None:
        """Print one line."""
        if row["kind"] == "val":
            print(f"epoch {row['epoch']:.0f}: validation accuracy {row['top1']:.1%}")


# The recipe has the model (8 x 8 pixels, grayscale), the optimizer and the augmentation; any field can be replaced:
# config.replace(model=config.model.replace(image_size=32, patch_size=4, in_channels=3), batch_size=128)
config = pw.load_recipe("quickstart")
config = config.replace(name="my-digits", epochs=args.epochs)
result = pw.train(config, args.out, splits=splits, callbacks=(PrintEvaluations(),))
print(f"test accuracy {result.metrics['test']['top1']:.1%} on {result.metrics['test']['n']} images")

prediction = pw.Classifier.load(result.run_dir)(images[test][0])
print(f"predicted {prediction.label} with probability {prediction.probability:.1%}; the label is {targets[test][0]}")
print(f"report: {result.report}")
