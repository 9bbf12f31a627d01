"""He et al.'s CIFAR-10 ResNet with optimizer, augmentation and progressive resizing as in `cifar10_scratch`.

Command: patchword train benchmarks/recipes/resnet.py --budget 10m [--model.layers 2 2 2 --model.width-factor 2]
"""

from patchword.config import ResNetConfig
from patchword.recipes import load_recipe

config = load_recipe("cifar10_scratch").replace(
    name="resnet", model=ResNetConfig(image_size=(32, 32), layers=(6, 6, 6), kind="cifar")
)
