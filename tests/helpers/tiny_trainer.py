"""A trainer of a tiny ViT on images that are told apart by a bright stripe."""

from typing import Any

import numpy as np

from patchword.config import Config, DataConfig, ViTConfig
from patchword.data.sources import ArraySource, DatasetSplits, from_arrays
from patchword.training.distributed import ProcessGroup
from patchword.training.trainer import Trainer

TINY = ViTConfig(image_size=(8, 8), patch_size=(2, 2), in_channels=1, embed_dim=16, depth=2, num_heads=2, mlp_dim=32)


def stripes(count: int = 48, size: int = 8, channels: int = 1, classes: int = 4) -> ArraySource:
    """Pictures that are told apart by which quarter of them is bright; learnt in a few steps."""
    random = np.random.default_rng(0)
    targets = np.arange(count) % classes
    images = random.integers(0, 60, (count, size, size, channels), dtype=np.uint8)
    width = size // classes
    for image, target in zip(images, targets, strict=True):
        image[:, target * width : (target + 1) * width] += 180
    return from_arrays(images, targets, labels=[f"stripe {i}" for i in range(classes)])


def make_splits(**changes: Any) -> DatasetSplits:
    return DatasetSplits(stripes(**changes), stripes(16, **changes), stripes(20, **changes))


def config(**changes: Any) -> Config:
    base: dict[str, Any] = {"model": TINY, "batch_size": 16, "steps": 4, "data": DataConfig(num_workers=0)}
    return Config(**{**base, **changes})


def trainer(**changes: Any) -> Trainer:
    made = Trainer(config(**changes), make_splits(), ProcessGroup(), fresh=True)
    made.start_loader()
    return made
