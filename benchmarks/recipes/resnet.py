"""He et al.'s ResNet for CIFAR-10 with the optimiser, augmentation and average of `cifar10_scratch`, at one size.

Command: patchword train benchmarks/recipes/resnet.py --budget 10m [--model.layers 2 2 2 --model.width_factor 2]
"""

from patchword.config import ResNetConfig
from patchword.recipes import load_recipe

config = load_recipe("cifar10_scratch").replace(
    name="resnet", model=ResNetConfig(image_size=(32, 32), layers=(6, 6, 6), kind="cifar"), early_scale=1.0
)
