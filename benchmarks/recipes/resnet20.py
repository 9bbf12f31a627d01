"""He et al.'s ResNet-20 on CIFAR-10, as many operations a picture as `cifar10_scratch`, with its optimiser and average.

Command: patchword train benchmarks/recipes/resnet20.py --budget 10m
"""

from patchword.config import ResNetConfig
from patchword.recipes import load_recipe

config = load_recipe("cifar10_scratch").replace(
    name="resnet20", model=ResNetConfig(image_size=(32, 32), layers=(3, 3, 3), kind="cifar")
)
