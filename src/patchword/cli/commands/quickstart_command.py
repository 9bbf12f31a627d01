"""`patchword quickstart`: train, evaluate and show a small ViT on built-in data."""

from pathlib import Path
from typing import Annotated

from ..arguments import arg
from . import train_command

SHADES = " .:-=+*#%@"
NUM_DIGITS = 6  # shown on the screen


def quickstart(out: Annotated[Path | None, arg("RUN")] = None) -> int:
    """Train a small ViT on handwritten digits, evaluate it and show predictions, in about a minute.

    Example: patchword quickstart

    Args:
        out: run directory to create; by default, runs/digits
    """
    from ...recipes import load_recipe
    from ...training import train
    from ...training.console import ConsoleCallback

    result = train(load_recipe("quickstart"), out, callbacks=(ConsoleCallback(),), started=train_command.START_TIME)
    if result is None:
        return 0  # the first process prints
    show_predictions(result.run_dir)
    metrics = result.metrics["test"]
    print(f"\nThe model classifies {metrics['top1']:.1%} of {metrics['n']} test digits correctly. Next:")
    print(f"  open {result.report}")
    print("  patchword train YOUR-IMAGES --budget 10m        a folder with one folder per class")
    print("  patchword train cifar10_scratch --budget 10m    from scratch, on 50,000 small images")
    return 0


def show_predictions(model: Path) -> None:
    """Print a few test digits as text, with the model's predictions below."""
    import numpy as np

    from ...data.datasets.registry import open_named_dataset
    from ...inference.classifier import Classifier

    classifier, source = Classifier.load(model), open_named_dataset("digits").test
    assert source is not None
    digits = [source.read(i, mode="L") for i in range(0, len(source), len(source) // NUM_DIGITS)][:NUM_DIGITS]
    for row in range(8):
        lines = [[SHADES[int(shade) * 9 // 255] * 2 for shade in np.asarray(digit)[row]] for digit in digits]
        print("   ".join("".join(line) for line in lines))
    predictions = [classifier(digit, top=1) for digit in digits]
    print("   ".join(f"{p.label} ({p.probability:.0%})".center(16) for p in predictions))
