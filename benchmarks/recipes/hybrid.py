"""The paper's hybrid on CIFAR-10: the blocks of six_convolutions.py after the root and two units of a ResNet.

Command: patchword train benchmarks/recipes/hybrid.py --budget 10m
"""

from pathlib import Path

from patchword.recipes import load_recipe

six = load_recipe(str(Path(__file__).with_name("six_convolutions.py")))
config = six.replace(
    name="hybrid",
    model=six.model.replace(stem="resnet", stem_layers=(1, 1), stem_convs=1, stem_width=32),  # to 256 channels, 4x4
)
