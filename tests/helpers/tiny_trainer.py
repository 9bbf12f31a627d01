"""A trainer of a tiny ViT on images whose class is the position of a bright stripe."""

from typing import Any

import numpy as np

from patchword.config import Config, DataConfig, ViTConfig
from patchword.data.sources import ArraySource, DatasetSplits, from_arrays
from patchword.training.distributed import ProcessGroup
from patchword.training.trainer import Trainer

TINY = ViTConfig(image_size=(8, 8), patch_size=(2, 2), in_channels=1, embed_dim=16, depth=2, num_heads=2, mlp_dim=32)


def stripes(count: int = 48, size: int = 8, channels: int = 1, classes: int = 4) -> ArraySource:
    """Return images whose class is the position of a bright stripe; a model learns them in a few steps."""
    rng = np.random.default_rng(0)
    targets = np.arange(count) % classes
    images = rng.integers(0, 60, (count, size, size, channels), dtype=np.uint8)
    width = size // classes
    for image, target in zip(images, targets, strict=True):
        image[:, target * width : (target + 1) * width] += 180
    return from_arrays(images, targets, labels=[f"stripe {i}" for i in range(classes)])


def make_splits(**changes: Any) -> DatasetSplits:
    """Return a training, a validation and a test set of stripes."""
    return DatasetSplits(stripes(**changes), stripes(16, **changes), stripes(20, **changes))


def config(**changes: Any) -> Config:
    """Return a configuration of four steps."""
    base: dict[str, Any] = {"model": TINY, "batch_size": 16, "steps": 4, "data": DataConfig(num_workers=0)}
    return Config(**{**base, **changes})


def trainer(**changes: Any) -> Trainer:
    """Return a trainer before its first step."""
    new = Trainer(config(**changes), make_splits(), ProcessGroup(), fresh=True)
    new.start_loader()
    return new
