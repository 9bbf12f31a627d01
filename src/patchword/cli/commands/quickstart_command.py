"""`patchword quickstart`: the whole story on built-in data. Trains, evaluates, shows."""

from pathlib import Path

import numpy as np

from ...data.datasets.registry import open_named_dataset
from ...inference.classifier import Classifier
from ...recipes import load_recipe
from ...training import train
from ...training.console import ConsoleCallback

SHADES = " .:-=+*#%@"
SHOWN = 6  # digits on the screen


def quickstart(out: Path | None, started: float) -> int:
    outcome = train(load_recipe("quickstart"), out, watchers=(ConsoleCallback(),), started=started)
    if outcome is None:
        return 0  # another process tells
    show(outcome.folder)
    accuracy, n = outcome.figures["test"]["top1"], outcome.figures["test"]["n"]
    print(f"\n{accuracy:.1%} of {n} digits that it had never seen are recognised. Next:")
    print(f"  open {outcome.report}")
    print("  patchword train YOUR-PICTURES --budget 10m      a folder with a folder for each class")
    print("  patchword train cifar10_scratch --budget 10m    from nothing, on 50,000 small pictures")
    return 0


def show(folder: Path) -> None:
    """A few digits of the test part, and what the model says of them."""
    classifier, source = Classifier.load(folder), open_named_dataset("digits").test
    assert source is not None
    chosen = [int(i) for i in range(0, len(source), len(source) // SHOWN)][:SHOWN]
    pictures = [source.read(i, mode="L") for i in chosen]
    for row in range(8):
        lines = [[SHADES[int(shade) * 9 // 255] * 2 for shade in np.asarray(p)[row]] for p in pictures]
        print("   ".join("".join(line) for line in lines))
    said = [classifier(p, top=1) for p in pictures]
    print("   ".join(f"{s.label} ({s.probability:.0%})".center(16) for s in said))
