"""Trains the paper's convolutional baseline, a BiT ResNet (GroupNorm, weight standardization), with SGD.

Command: patchword train resnet_baseline --data.source photos --epochs 20
Machine: any; not measured. A baseline for comparing a ViT on the same data.
"""

from patchword.config import AugmentConfig, Config, OptimConfig, ResNetConfig, ScheduleConfig

config = Config(
    name="resnet-baseline",
    model=ResNetConfig(image_size=(128, 128), layers=(3, 4, 6, 3)),
    augment=AugmentConfig(crop="resized", scale=(0.25, 1.0), flip=0.5),
    optim=OptimConfig(name="sgd", lr=0.03, momentum=0.9, weight_decay=1e-4),
    schedule=ScheduleConfig(warmup_fraction=0.05),
    batch_size=64,
    epochs=20,
)
