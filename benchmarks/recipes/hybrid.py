"""The paper's hybrid on CIFAR-10: the blocks of `cifar10_scratch` behind the root and two units of a ResNet.

Command: patchword train benchmarks/recipes/hybrid.py --budget 10m
"""

from patchword.recipes import load_recipe

scratch = load_recipe("cifar10_scratch")
config = scratch.replace(
    name="hybrid",
    model=scratch.model.replace(
        stem="resnet", stem_layers=(1, 1), stem_convs=1, stem_width=32
    ),  # 32 -> 128 -> 256 channels, 4x4
)
