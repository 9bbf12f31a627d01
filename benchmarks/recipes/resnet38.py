"""He et al.'s ResNet-38 on CIFAR-10, as many operations a picture as `cifar10_scratch`, with its optimiser and average.

Command: patchword train benchmarks/recipes/resnet38.py --budget 10m
"""

from patchword.config import ResNetConfig
from patchword.recipes import load_recipe

config = load_recipe("cifar10_scratch").replace(
    name="resnet38", model=ResNetConfig(image_size=(32, 32), layers=(6, 6, 6), kind="cifar")
)
